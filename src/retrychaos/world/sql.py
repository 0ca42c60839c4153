"""Finds the databases that a job reaches through SQLAlchemy, and reports each statement and commit as a step.

Listeners on the classes reach engines and connections that existed before the check. What goes past SQLAlchemy (raw
cursors, executescript) the hooks on the drivers see (sqlite_hooks.py, postgres_hooks.py).
"""

from __future__ import annotations

import functools
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
from sqlalchemy.pool import Pool, StaticPool

from retrychaos.model.errors import SharingError, WorldError
from retrychaos.model.plan import ERROR
from retrychaos.world.async_record import AsyncRecord, dies_in_silence
from retrychaos.world.postgres_drivers import DRIVERS, below, driver_of, holds_nothing
from retrychaos.world.postgres_hooks import PostgresSource
from retrychaos.world.resource import Blob, Stage
from retrychaos.world.sqlite import SqliteDatabase
from retrychaos.world.sqlite_async import PENDING, forget, sqlite_of, take_over
from retrychaos.world.sqlite_handle import Handle, identify
from retrychaos.world.sqlite_hooks import SqliteSource, locked

_RECIPE = (
    "the connection was already inside a transaction when the check began (the 'rollback after each test' recipe: "
    "Session(bind=connection) inside connection.begin()). There a commit of the job commits nothing, so a crash "
    "cannot be told from success and every verdict would be wrong. Remedy: let the job use an engine on a database "
    "of its own (chaos.sql, or a SQLite file in tmp_path), commit what the fixtures insert, and drop the outer "
    "transaction: the check itself puts the database back."
)
_SHARED_SESSION = (
    "one SQLAlchemy session is used by both deliveries: it was made outside of the job, so in this process they "
    "share it, "
    "which separate workers never do. Make the session inside the job, or use a scoped_session; or check crashes only "
    "with duplicates=1."
)


class SqlSource:
    """Hooks into SQLAlchemy while installed."""

    def __init__(self, stage: Stage, sqlite: SqliteSource, servers: PostgresSource | None = None) -> None:
        self._stage = stage
        self._sqlite = sqlite
        """Follows connections to SQLite."""
        self._servers = servers
        """Follows connections to PostgreSQL."""
        self._handles = sqlite.handles
        self._begun: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._used: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._used_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._session_users: weakref.WeakKeyDictionary[Session, object] = weakref.WeakKeyDictionary()
        self._sessions: set[int] = set()
        self._listeners: list[tuple[Any, str, Callable[..., Any]]] = [
            (Engine, "before_cursor_execute", self._before_execute),
            (Engine, "after_cursor_execute", self._after_execute),
            (Engine, "handle_error", self._on_error),
            (Engine, "begin", self._on_begin),
            (Engine, "commit", self._on_commit),
            (Pool, "checkout", self._on_checkout),
            (Session, "after_begin", self._on_session),
            (DefaultDialect, "do_executemany", self._executemany),
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
        """The drivers see to it."""

    def leave(self, owner: object) -> None:
        self._sqlite.leave(owner)
        for original, pool in self._pools.pop(owner, {}).values():
            if dialect_of(original) == "sqlite" and not original._dialect.is_async:
                pool.dispose()
        for session, user in list(self._session_users.items()):
            if user is owner:
                self._used_sessions.discard(session)

    def part(self, blobs: Mapping[str, Blob], folder: str) -> None:
        """The drivers see to it."""

    def end_delivery(self) -> None:
        """Sessions and connections are memory of the process: none survives into the next delivery."""
        for session in list(self._used_sessions):
            if _is_async(session):
                continue  # it would need its loop, which is gone; its connections end with the delivery
            if session.hash_key in self._sessions:
                session.rollback()
                session.expire_all()
            else:
                session.close()
        self._used_sessions.clear()
        for connection in list(self._used):
            if not connection.dialect.is_async and not connection.closed and connection.in_transaction():
                connection.rollback()
        self._used.clear()
        for owner in list(self._pools):
            self.leave(owner)
        self._session_users.clear()

    # -- listeners --------------------------------------------------------------------------------------------------

    def _on_checkout(self, connection: Any, record: Any, fairy: Any) -> None:
        if (self._stage.running or self._stage.quiet) and fairy._pool._dialect.is_async:
            dies_in_silence(record, fairy)
        if self._stage.running and (raw := sqlite_of(connection)) is not None:
            if raw is not connection:
                record = AsyncRecord(record, forget)
            try:
                self._track(raw, record, fairy._pool)
            except WorldError as problem:
                # Raised here, it would make the pool close the connection, and lose a database in memory.
                self._sqlite.block(raw, problem)

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
        self._sqlite.step(database, handle, statement, first, parameters)
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
        found = self._handles.get(id(sqlite_of(connection.connection.dbapi_connection)))
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
        self._sqlite.committing(database, handle)  # the event comes before the commit
        handle.committing = handle.in_transaction  # else the driver sends no COMMIT

    def _do_execute(self, cursor: Any, *rest: Any) -> bool:
        """Where SQLAlchemy takes an error for one of the database."""
        if id(_connection_of(cursor)) in self._handles:
            self._stage.strike(ERROR, locked)
        return False

    def _commit(self, original: Any) -> Any:
        def do_commit(dialect: Any, raw: Any) -> None:
            if id(sqlite_of(getattr(raw, "dbapi_connection", raw))) in self._handles:
                self._stage.strike(ERROR, locked)
            original(dialect, raw)

        return do_commit

    def _executemany(self, cursor: Any, statement: str, parameters: Any, context: Any) -> bool:
        """Row by row where rows are committed one by one and triggers make rows hard to tell apart."""
        self._do_execute(cursor)
        raw = _connection_of(cursor)
        if not self._stage.running or raw is None:
            return False
        found = self._handles.get(id(raw))
        if found is None or not found[1].rows or not parameters:
            return False
        database, handle = found
        if not (self._stage.concurrent or database.effect_of(statement, parameters[0]).fires):
            return False
        handle.announced = True
        for number, row in enumerate(parameters):
            if number:
                self._sqlite.step(database, handle, statement, row, row)
                handle.announced = True
            cursor.execute(statement, row)
        return True

    # -- connections ------------------------------------------------------------------------------------------------

    def _handle_of(self, connection: Connection) -> tuple[SqliteDatabase, Handle] | None:
        pooled: Any = connection.connection.dbapi_connection
        raw = sqlite_of(pooled)
        found = self._handles.get(id(raw))
        if found is None:
            if raw is None:
                self._look_at_other(connection)
                return None
            record: Any = connection.connection._connection_record
            if raw is not pooled:
                record = AsyncRecord(record, forget)
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
        self._sqlite.track(raw, record, lambda name: self._discover(raw, name, pool))

    # -- several deliveries -----------------------------------------------------------------------------------------

    def _connect_pool(self, original: Any) -> Any:
        def connect(pool: Pool) -> Any:
            if not self._stage.running:
                return original(pool)
            if isinstance(pool, StaticPool) and pool._dialect.is_async:
                return original(self._in_memory(pool))
            with self._sqlite.set_up():
                return original(self._own(pool))

        return connect

    def _in_memory(self, pool: StaticPool) -> StaticPool:
        quiet, self._stage.quiet = self._stage.quiet, True
        try:
            return self._sqlite.threaded.pool_for(pool)
        except WorldError as problem:
            self._stage.refuse(problem)
        finally:
            self._stage.quiet = quiet

    def _own(self, pool: Pool) -> Pool:
        """What stands for that pool in the running delivery."""
        owner = self._stage.owner
        if owner is None and not pool._dialect.is_async:  # the loop that an async one belongs to is of the delivery
            return pool
        pools = self._pools.setdefault(owner, {})
        if id(pool) not in pools:
            mine = pool.recreate()
            if self._servers is not None and dialect_of(pool) == "postgresql" and not pool._dialect.is_async:
                mine._invoke_creator = self._servers.connecting(pool, mine._invoke_creator)
            pools[id(pool)] = (pool, mine)
        return pools[id(pool)][1]

    def _discover(self, raw: sqlite3.Connection, name: str, pool: Pool) -> SqliteDatabase:
        path = identify(raw)
        if path is None:
            _refuse_shared(raw, pool)
            return SqliteDatabase(self._stage, name, "sqlite in memory", raw, None, borrowed=True)
        # A connection like the job's own, with the user's functions and collations, but not from the job's pool.
        monitor_pool = pool.recreate()
        fairy = monitor_pool.connect()
        pooled: Any = fairy.dbapi_connection
        monitor = sqlite_of(pooled)
        assert monitor is not None
        fairy.detach()
        monitor.row_factory = None
        monitor.isolation_level = None
        if pooled is monitor:
            monitor_pool.dispose()
        else:
            take_over(fairy)
        return SqliteDatabase(self._stage, name, f"sqlite {path}", monitor, path)

    def _look_at_other(self, connection: Connection) -> None:
        """A server: PostgreSQL's drivers report steps themselves (postgres_hooks.py), others are refused."""
        driver = driver_of(below(connection.connection.dbapi_connection))
        if connection.dialect.name != "postgresql" or driver not in DRIVERS:
            self._refuse_dialect(connection)
        if connection.in_transaction() and connection not in self._begun:
            self._stage.refuse(WorldError(f"{connection.engine.url.database}: {_why_open(connection)}"))
        self._used.add(connection)

    def _refuse_dialect(self, connection: Connection) -> None:
        dialect = connection.dialect
        remedy = (
            "Use psycopg 3 (postgresql+psycopg://, for async engines, too), psycopg2 or asyncpg"
            if dialect.name == "postgresql"
            else "Use an engine on SQLite (a file, or in memory with StaticPool), for instance chaos.sql, or PostgreSQL"
        )
        self._stage.refuse(
            WorldError(
                f"{connection.engine.url.render_as_string()}: databases of the kind '{dialect.name}' with the driver "
                f"'{dialect.driver}' are not covered, and the check never touches a database that it cannot put "
                f"back. {remedy}."
            )
        )


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


def _is_async(session: Session) -> bool:
    return any(connection.dialect.is_async for connection in _connections(session))


def _connection_of(cursor: Any) -> sqlite3.Connection | None:
    """The SQLite connection that a cursor belongs to."""
    if isinstance(cursor, sqlite3.Cursor):
        return cursor.connection
    return sqlite_of(getattr(cursor, "_adapt_connection", None))


def _is_busy(raw: Any) -> bool:
    return bool(raw.in_transaction) if isinstance(raw, sqlite3.Connection) else not holds_nothing(raw)


def _why_open(connection: Connection) -> str:
    for session in _live_sessions():
        if connection in _connections(session) and not isinstance(session.bind, Connection):
            return PENDING
    return _RECIPE


def _refuse_shared(raw: sqlite3.Connection, pool: Pool) -> None:
    """A shared-cache database in memory shows uncommitted rows of others, and a second connection sees its tables."""
    tables = "SELECT count(*) FROM sqlite_master"
    if not raw.execute(tables).fetchone()[0]:
        return
    # A connection like the job's own, but not from its pool. Only its tables are of interest, not its settings.
    pooled: Any = pool._invoke_creator(None)  # type: ignore[arg-type]  # there is no record of it
    second: Any = sqlite_of(pooled)
    if second is raw:
        return
    with closing(second):
        shared = second.execute(tables).fetchone()[0]
    forget(pooled)
    if shared:
        raise WorldError(
            "the job's database is a shared-cache database in memory (cache=shared). It shows uncommitted rows of one "
            "connection to the others, so what a crash leaves cannot be seen. Use a SQLite file in tmp_path, or "
            "sqlite:// with StaticPool."
        )
