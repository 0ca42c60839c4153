"""Finds the databases that a job reaches through SQLAlchemy, and reports each statement and commit as a step.

Listeners on the classes reach engines and connections that existed before the check. A trace callback on each SQLite
connection sees what goes past SQLAlchemy (raw cursors, executescript).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
import weakref
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.orm import Session
from sqlalchemy.orm import session as session_module
from sqlalchemy.pool import Pool

from retrychaos.model.errors import SharedError, SharingError, WorldError
from retrychaos.model.plan import ERROR
from retrychaos.model.values import short
from retrychaos.world.handles import is_open
from retrychaos.world.postgres_hooks import PostgresSource
from retrychaos.world.postgres_line import driver_of, holds_nothing
from retrychaos.world.resource import Blob, Stage
from retrychaos.world.sql_texts import texts
from retrychaos.world.sqlite import Handle, SqliteDatabase, copy_aside, identify
from retrychaos.world.sqlite_clock import follow_clock
from retrychaos.world.sqlite_turns import TurnConnection, connecting

_RECIPE = (
    "the connection was already inside a transaction when the check began (the 'rollback after each test' recipe: "
    "Session(bind=connection) inside connection.begin()). There a commit of the job commits nothing, so a crash "
    "cannot be told from success and every verdict would be wrong. Remedy: let the job use an engine on a database "
    "of its own (chaos.sql, or a SQLite file in tmp_path), commit what the fixtures insert, and drop the outer "
    "transaction: the check itself puts the database back."
)
_PENDING = (
    "a session or connection had uncommitted changes when the check began, on the same connection that the job uses. "
    "No other process would see them. Remedy: commit in the fixture before the check."
)
_SHARED_SESSION = (
    "one SQLAlchemy session is used by both deliveries: it was made outside of the job, so in this process they "
    "share it, "
    "which separate workers never do. Make the session inside the job, or use a scoped_session; or check crashes only "
    "with duplicates=1."
)


_UNSEEN = (
    "the connection to {} was opened before the check, or by other means than sqlite3.connect, so it cannot be told "
    "when it waits for another delivery. Let the job open its connections through an engine, or use duplicates=1."
)

_FILE = "sqlite:"
"""Before the path in the name of a database."""


class SqlSource:
    """Hooks into SQLAlchemy while installed."""

    def __init__(self, stage: Stage, servers: PostgresSource | None = None) -> None:
        self._stage = stage
        self._servers = servers
        """Follows connections to PostgreSQL."""
        self._handles: dict[int, tuple[SqliteDatabase, Handle]] = {}
        self._begun: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._opened: list[Any] = []
        """Connections opened by the running delivery."""
        self._ignored: dict[int, Any] = {}
        self._used: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._blocked: list[sqlite3.Connection] = []
        """Connections to databases that were refused: nothing may run on them any more."""
        self._copies: dict[str, str] = {}
        """Files of which this process uses a copy, see part()."""
        self._used_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._session_users: weakref.WeakKeyDictionary[Session, object] = weakref.WeakKeyDictionary()
        self._sessions: set[int] = set()
        self._listeners: list[tuple[Any, str, Callable[..., Any]]] = [
            (Engine, "before_cursor_execute", self._before_execute),
            (Engine, "after_cursor_execute", self._after_execute),
            (Engine, "handle_error", self._on_error),
            (Engine, "begin", self._on_begin),
            (Engine, "commit", self._on_commit),
            (Pool, "connect", self._on_connect),
            (Pool, "checkout", self._on_checkout),
            (Session, "after_begin", self._on_session),
            (DefaultDialect, "do_executemany", self._executemany),
            (DefaultDialect, "do_connect", self._connect),
        ]
        self._installed: list[tuple[Any, str, Callable[..., Any]]] = []
        self._patched: list[tuple[Any, str, Any]] = []
        self._pools: dict[object, dict[int, tuple[Pool, Pool]]] = {}
        """Each of several deliveries has pools of its own, as every worker process has."""

    def install(self) -> None:
        self._sessions = {session.hash_key for session in _live_sessions()}
        _close_idle_transactions()
        if self._stage.options("faults"):
            self._patch(DefaultDialect, "do_commit", self._commit)
            self._listeners += [
                (DefaultDialect, "do_execute", self._do_execute),
                (DefaultDialect, "do_execute_no_params", self._do_execute),
            ]
        for target, name, listener in self._listeners:
            event.listen(target, name, listener)
            self._installed.append((target, name, listener))
        self._patch(Pool, "connect", self._connect_pool)
        for module in (sqlite3, sqlite3.dbapi2):
            self._patch(module, "connect", functools.partial(connecting, self._stage))

    def uninstall(self) -> None:
        while self._patched:
            setattr(*self._patched.pop())
        while self._installed:
            event.remove(*self._installed.pop())

    def _patch(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = vars(owner)[name]
        self._patched.append((owner, name, original))
        setattr(owner, name, functools.wraps(original)(make(original)))

    def cancel(self, owner: object) -> None:
        for _, handle in list(self._handles.values()):
            if handle.owner is owner:
                handle.connection.interrupt()

    def leave(self, owner: object) -> None:
        for key, (database, handle) in list(self._handles.items()):
            if handle.owner is owner:
                database.leave(owner)
                self._handles.pop(key, None)
        for original, pool in self._pools.pop(owner, {}).values():
            if dialect_of(original) == "sqlite":
                pool.dispose()
        for session, user in list(self._session_users.items()):
            if user is owner:
                self._used_sessions.discard(session)

    def part(self, blobs: Mapping[str, Blob], folder: str) -> None:
        for name, blob in blobs.items():
            if not name.startswith(_FILE + os.sep):
                continue  # in memory, or of another kind
            path = name.removeprefix(_FILE)
            if is_open(path):
                raise SharedError(f"{path}: a connection from before the check would go to the original")
            self._copies[path] = copy_aside(path, blob, folder)
            self._stage.claim_path(self._copies[path])

    def end_delivery(self) -> None:
        """Sessions and connections are memory of the process: none survives into the next delivery."""
        for session in list(self._used_sessions):
            if session.hash_key in self._sessions:
                session.rollback()
                session.expire_all()
            else:
                session.close()
        for raw in self._blocked:
            with contextlib.suppress(sqlite3.Error):
                raw.set_progress_handler(None, 0)
        self._blocked.clear()
        self._used_sessions.clear()
        for connection in list(self._used):
            if not connection.closed and connection.in_transaction():
                connection.rollback()
        self._used.clear()
        self._handles.clear()
        self._ignored.clear()
        self._opened.clear()
        for owner in list(self._pools):
            self.leave(owner)
        self._session_users.clear()

    # -- listeners --------------------------------------------------------------------------------------------------

    def _connect(self, dialect: Any, record: Any, args: Any, options: Any) -> Any:
        """The copy instead of the file; None for the usual connection."""
        if not self._copies or not args or not isinstance(args[0], str) or options.get("uri"):
            return None
        copy = self._copies.get(os.path.realpath(args[0]))
        return None if copy is None else dialect.connect(copy, *args[1:], **options)

    def _on_connect(self, connection: Any, record: Any) -> None:
        if self._stage.running:
            self._opened.append(connection)

    def _on_checkout(self, connection: Any, record: Any, fairy: Any) -> None:
        if self._stage.running and isinstance(connection, sqlite3.Connection):
            try:
                self._track(connection, record, fairy._pool)
            except WorldError as problem:
                # Raised here, it would make the pool close the connection, and lose a database in memory.
                self._stage.fail(problem)
                connection.set_progress_handler(lambda: 1, 1)
                self._blocked.append(connection)

    def _on_session(self, session: Session, transaction: Any, connection: Connection) -> None:
        if self._stage.running:
            self._used_sessions.add(session)
            owner = self._stage.owner
            if owner is not None and self._session_users.setdefault(session, owner) is not owner:
                self._stage.refuse(SharingError(_SHARED_SESSION))

    def _on_begin(self, connection: Connection) -> None:
        if self._stage.running:
            self._begun.add(connection)

    def _before_execute(
        self, connection: Connection, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool
    ) -> None:
        if not self._stage.running:
            return
        found = self._handle_of(connection)
        if found is None:
            return
        database, handle = found
        # The ORM's bulk INSERT is one statement with the values of all rows in a row.
        many = executemany and bool(parameters) and isinstance(parameters[0], tuple | dict)
        first = parameters[0] if many else parameters
        self._step(database, handle, statement, first, parameters)
        handle.rows = 1 if many and not handle.in_transaction else 0
        handle.announced = not handle.rows  # else the trace callback reports the rows from the second on

    def _after_execute(self, connection: Connection, *rest: Any) -> None:
        if self._stage.running:
            self._settle(connection)

    def _on_error(self, context: Any) -> None:
        if not isinstance(context.original_exception, Exception):
            # SQLAlchemy takes it for a lost connection and closes it. We ended the delivery, the database is well; and
            # a database in memory would be gone with its connection.
            context.is_disconnect = False
        if self._stage.running and context.connection is not None:
            self._settle(context.connection)

    def _settle(self, connection: Connection) -> None:
        found = self._handles.get(id(connection.connection.dbapi_connection))
        if found is not None:
            found[1].announced = False
            found[1].rows = 0

    def _on_commit(self, connection: Connection) -> None:
        if not self._stage.running:
            return
        found = self._handle_of(connection)
        if found is None:
            return
        database, handle = found
        # The event comes before the commit: here is the boundary, and what is committed is read at the next one.
        self._stage.step("commit", database, "COMMIT", "COMMIT")
        self._stage.touched(database)
        handle.committing = handle.in_transaction  # else the driver sends no COMMIT

    def _do_execute(self, cursor: Any, *rest: Any) -> bool:
        """Where SQLAlchemy takes an error for one of the database."""
        if id(getattr(cursor, "connection", None)) in self._handles:
            self._stage.strike(ERROR, _locked)
        return False

    def _commit(self, original: Any) -> Any:
        def do_commit(dialect: Any, raw: Any) -> None:
            if id(getattr(raw, "dbapi_connection", raw)) in self._handles:
                self._stage.strike(ERROR, _locked)
            original(dialect, raw)

        return do_commit

    def _executemany(self, cursor: Any, statement: str, parameters: Any, context: Any) -> bool:
        """Row by row where rows are committed one by one and triggers make rows hard to tell apart."""
        self._do_execute(cursor)
        if not self._stage.running or not isinstance(getattr(cursor, "connection", None), sqlite3.Connection):
            return False
        found = self._handles.get(id(cursor.connection))
        if found is None or not found[1].rows or not parameters:
            return False
        database, handle = found
        if not (self._stage.concurrent or database.effect_of(statement, parameters[0]).fires):
            return False
        handle.announced = True
        for number, row in enumerate(parameters):
            if number:
                self._step(database, handle, statement, row, row)
                handle.announced = True
            cursor.execute(statement, row)
        return True

    # -- connections ------------------------------------------------------------------------------------------------

    def _handle_of(self, connection: Connection) -> tuple[SqliteDatabase, Handle] | None:
        raw = connection.connection.dbapi_connection
        found = self._handles.get(id(raw))
        if found is None:
            if id(raw) in self._ignored:
                return None
            if not isinstance(raw, sqlite3.Connection):
                self._look_at_other(connection)
                return None
            record = connection.connection._connection_record
            try:
                self._track(raw, record, connection.engine.pool)
            except WorldError as problem:
                self._stage.refuse(problem)
            found = self._handles.get(id(raw))
            if found is None:
                return None
        if connection.in_transaction() and connection not in self._begun:
            found[1].inherited = True
            self._stage.refuse(WorldError(f"{found[0].label}: {_why_open(connection)}"))
        self._used.add(connection)
        return found

    def _track(self, raw: sqlite3.Connection, record: Any, pool: Pool) -> None:
        """Follow a connection from its first use in this delivery on. Raises WorldError if that cannot be done."""
        if id(raw) in self._handles or id(raw) in self._ignored:
            return
        quiet, self._stage.quiet = self._stage.quiet, True
        self._stage.claim_connection(raw)
        try:
            path = identify(raw)
            if path is None and any(raw is opened for opened in self._opened):
                # A database in the memory of the process that the job started itself: it dies with the process.
                self._ignored[id(raw)] = raw
                return
            if path is not None:
                if path not in self._copies.values():
                    self._stage.keep_off(path)
                self._stage.claim_path(path)
            original = next((file for file, copy in self._copies.items() if copy == path), path)
            name = f"{_FILE}{original}" if path is not None else f"sqlite:memory:{id(raw):x}"
            known = self._stage.find(name)
            if known is None:
                known = self._discover(raw, name, path, pool)
                self._stage.adopt(known)
            assert isinstance(known, SqliteDatabase)
            follow_clock(raw)
            if path is not None and not raw.in_transaction:
                # A crash is a snapshot here, so nothing has to reach the disk. The connection ends with the delivery.
                with contextlib.suppress(sqlite3.OperationalError):  # somebody's COMMIT lets nobody begin to read
                    raw.execute("PRAGMA synchronous = OFF").close()
        finally:
            self._stage.quiet = quiet
        inherited = raw.in_transaction and not any(raw is opened for opened in self._opened)
        handle = Handle(raw, record, inherited, owner=self._stage.owner)
        known.handles[id(raw)] = handle
        self._handles[id(raw)] = (known, handle)
        if isinstance(raw, TurnConnection):
            raw.tie(known, handle, lambda statement: self._traced(known, handle, statement))
            return
        if self._stage.concurrent:
            self._stage.fail(SharingError(known.alone or _UNSEEN.format(known.label)))
        raw.set_trace_callback(self._tracer(known, handle))

    # -- several deliveries -----------------------------------------------------------------------------------------

    def _connect_pool(self, original: Any) -> Any:
        def connect(pool: Pool) -> Any:
            owner = self._stage.owner
            if owner is None or not self._stage.running:
                return original(pool)
            pools = self._pools.setdefault(owner, {})
            if id(pool) not in pools:
                mine = pool.recreate()
                if self._servers is not None and dialect_of(pool) == "postgresql":
                    mine._invoke_creator = self._servers.connecting(pool, mine._invoke_creator)
                pools[id(pool)] = (pool, mine)
            return original(pools[id(pool)][1])

        return connect

    def _discover(self, raw: sqlite3.Connection, name: str, path: str | None, pool: Pool) -> SqliteDatabase:
        if path is None:
            _refuse_shared(raw, pool)
            return SqliteDatabase(self._stage, name, "sqlite in memory", raw, None)
        # A connection like the job's own, with the user's functions and collations, but not from the job's pool.
        monitor_pool = pool.recreate()
        fairy = monitor_pool.connect()
        monitor = fairy.dbapi_connection
        fairy.detach()
        assert isinstance(monitor, sqlite3.Connection)
        monitor.row_factory = None
        monitor.isolation_level = None
        monitor_pool.dispose()
        return SqliteDatabase(self._stage, name, f"sqlite {path}", monitor, path)

    def _look_at_other(self, connection: Connection) -> None:
        """A server: PostgreSQL's drivers report steps themselves (postgres_hooks.py), others are refused."""
        driver = driver_of(connection.connection.dbapi_connection)
        if connection.dialect.name != "postgresql" or driver not in ("psycopg", "psycopg2"):
            self._refuse_dialect(connection)
        if connection.in_transaction() and connection not in self._begun:
            self._stage.refuse(WorldError(f"{connection.engine.url.database}: {_why_open(connection)}"))
        self._used.add(connection)

    def _refuse_dialect(self, connection: Connection) -> None:
        dialect = connection.dialect
        remedy = (
            "Use a synchronous engine on psycopg 3 (postgresql+psycopg://) or psycopg2 (postgresql+psycopg2://)"
            if dialect.name == "postgresql"
            else "Use an engine on SQLite (a file, or in memory with StaticPool), for instance chaos.sql, or PostgreSQL"
        )
        self._stage.refuse(
            WorldError(
                f"{connection.engine.url.render_as_string()}: databases of the kind '{dialect.name}' with the driver "
                f"'{dialect.driver}' are not covered yet, and the check never touches a database that it cannot put "
                f"back. {remedy}."
            )
        )

    # -- steps ------------------------------------------------------------------------------------------------------

    def _step(self, database: SqliteDatabase, handle: Handle, statement: str, row: Any, parameters: Any) -> None:
        text, template = texts(statement)
        self._watch_out(database, text)
        effect = database.effect_of(statement, row)
        detail = f"{text} {short(parameters)}" if parameters and self._stage.traced else text
        self._stage.step("sql", database, template, detail)
        database.wrote(handle, effect)

    def _watch_out(self, database: SqliteDatabase, text: str) -> None:
        start = text[:6].upper()
        if start == "ATTACH":
            self._stage.refuse(
                WorldError(
                    f"the job attaches a database ({text}). SQLite does not tell which of several databases a "
                    "transaction changed, so a check there could be wrong. Give the job one engine for each database."
                )
            )
        if start == "VACUUM" and " INTO " in text.upper():
            self._stage.doubt(f"effect outside the ledger: {text} on {database.label} writes a file of its own")

    def _tracer(self, database: SqliteDatabase, handle: Handle) -> Callable[[str], None]:
        """The trace callback of a connection: every statement as it starts, with its values filled in."""

        def trace(statement: str) -> None:
            if handle.announced or not self._stage.running:
                return
            try:
                self._traced(database, handle, statement)
            except Exception as problem:  # the driver would swallow it
                self._stage.fail(problem)

        return trace

    def _traced(self, database: SqliteDatabase, handle: Handle, statement: str) -> None:
        word = statement.lstrip()[:8].upper()
        if handle.rows and word.startswith("BEGIN"):
            handle.rows, handle.announced = 0, True  # the driver opens a transaction: rows do not commit
        elif handle.rows:
            handle.rows += 1
            if handle.rows > 2:
                self._raw(database, handle, statement)
        elif word.startswith(("COMMIT", "END")):
            if not handle.committing:
                self._stage.step("commit", database, "COMMIT", "COMMIT")
                self._stage.touched(database)
            handle.committing = False
        elif word.startswith("BEGIN") and self._stage.concurrent:
            self._raw(database, handle, statement)  # it may have to wait; and what was committed before is read here
        elif word.startswith("BEGIN"):
            self._stage.look()  # what was committed cannot be told apart any more once the transaction is open
        elif not word.startswith(("ROLLBACK", "--")):
            self._raw(database, handle, statement)

    def _raw(self, database: SqliteDatabase, handle: Handle, statement: str) -> None:
        text, template = texts(statement)
        self._watch_out(database, text)
        effect = database.effect_of(statement, ())
        if effect.fires and not handle.in_transaction:
            self._stage.doubt(
                f"{text} on {database.label} fires triggers outside a transaction, and was not run through "
                "SQLAlchemy: its boundaries cannot be told apart. Run it through SQLAlchemy or in a transaction."
            )
        self._stage.step("sql", database, template, text)
        database.wrote(handle, effect)


def dialect_of(pool: Pool) -> str:
    return str(getattr(pool._dialect, "name", ""))


def _live_sessions() -> list[Session]:
    return list(session_module._sessions.values())  # the registry behind Session.close_all()


def _connections(session: Session) -> list[Connection]:
    transaction = session.get_transaction()
    if transaction is None:
        return []
    return [entry[0] for entry in set(transaction._connections.values())]


def _close_idle_transactions() -> None:
    """Reading an attribute after a commit begins a transaction that holds nothing: end it before the check.

    Sessions that hold nothing else forget what they have read, as they do after every delivery.
    """
    for session in _live_sessions():
        if session.new or session.dirty or session.deleted or isinstance(session.bind, Connection):
            continue
        if session.bind is not None and session.bind.dialect.is_async:
            continue
        if not session.in_transaction():
            session.expire_all()
            continue
        if session.in_nested_transaction():
            continue
        raws = [connection.connection.dbapi_connection for connection in _connections(session)]
        if not any(_is_busy(raw) for raw in raws):
            session.rollback()


def _locked() -> sqlite3.OperationalError:
    return sqlite3.OperationalError("database is locked")


def _is_busy(raw: Any) -> bool:
    return bool(raw.in_transaction) if isinstance(raw, sqlite3.Connection) else not holds_nothing(raw)


def _why_open(connection: Connection) -> str:
    for session in _live_sessions():
        if connection in _connections(session) and not isinstance(session.bind, Connection):
            return _PENDING
    return _RECIPE


def _refuse_shared(raw: sqlite3.Connection, pool: Pool) -> None:
    """A shared-cache database in memory shows uncommitted rows of others, and a second connection sees its tables."""
    tables = "SELECT count(*) FROM sqlite_master"
    if not raw.execute(tables).fetchone()[0]:
        return
    # A connection like the job's own, but not from its pool. Only its tables are of interest, not its settings.
    second: Any = pool._invoke_creator(None)  # type: ignore[arg-type]  # there is no record of it
    if second is raw:
        return
    with closing(second):
        shared = second.execute(tables).fetchone()[0]
    if shared:
        raise WorldError(
            "the job's database is a shared-cache database in memory (cache=shared). It shows uncommitted rows of one "
            "connection to the others, so what a crash leaves cannot be seen. Use a SQLite file in tmp_path, or "
            "sqlite:// with StaticPool."
        )
