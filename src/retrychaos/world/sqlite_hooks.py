"""Finds the SQLite databases that a job reaches through ``sqlite3``, and reports each statement and commit as a step.

What opens connections for a job by itself (SQLAlchemy, Django) says so (`set_up`), and SQLAlchemy announces its own
statements (sql.py). Connections that were open before the check cannot be given another class: a trace callback tells
when a job uses one, and the check begins anew with it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qs

from retrychaos.model.errors import LateError, SharedError, SharingError, WorldError
from retrychaos.model.plan import ERROR
from retrychaos.model.values import short
from retrychaos.world import sqlite_seen as seen
from retrychaos.world.handles import is_open
from retrychaos.world.provenance import context_of
from retrychaos.world.resource import Blob, Stage
from retrychaos.world.sql_texts import texts
from retrychaos.world.sqlite import SqliteDatabase, copy_aside
from retrychaos.world.sqlite_async import AsyncSqlite
from retrychaos.world.sqlite_clock import follow_clock
from retrychaos.world.sqlite_elders import LATE, Elders, alive
from retrychaos.world.sqlite_handle import Handle, ask, identify, untrace
from retrychaos.world.sqlite_seen import SeenConnection
from retrychaos.world.sqlite_turns import TurnConnection

_UNSEEN = (
    "the connection to {} was opened before the check, or by other means than sqlite3.connect, so it cannot be told "
    "when it waits for another delivery. Let the job open its connections itself or through an engine, or use "
    "duplicates=1."
)
_OPEN = (
    "{}: the connection was already inside a transaction when the check began. No other process would see what is in "
    "it, and a crash would lose it. Commit in the fixture before the check."
)
_FILE = "sqlite:"
"""Before the path in the name of a database."""
_FACTORY = 5
"""Position of the class among the arguments of connect() after the database: the fifth."""
_real_connect = sqlite3.connect


class SqliteSource:
    """Hooks into ``sqlite3`` while installed."""

    def __init__(self, stage: Stage, elders: Elders | None = None) -> None:
        self.stage = stage
        self.handles: dict[int, tuple[SqliteDatabase, Handle]] = {}
        self._elders = elders or Elders()
        self.threaded = AsyncSqlite(stage)
        """Connections that threads of aiosqlite serve."""
        self._aside: list[sqlite3.Connection] = []
        """Connections from before the check that nobody uses yet, as far as we know."""
        self.held: dict[int, str] = {}
        """Connections from before the check that no job may use, and why."""
        self._ignored: dict[int, Any] = {}
        self._blocked: list[sqlite3.Connection] = []
        """Connections to databases that were refused: nothing may run on them any more."""
        self._copies: dict[str, str] = {}
        """Files of which this process uses a copy, see part()."""
        self._setting_up: list[int] = []
        """Threads in which somebody opens a connection for the job."""
        self._patched: list[tuple[Any, Any]] = []
        self._connect: Any = None

    # -- Source -----------------------------------------------------------------------------------------------------

    def install(self) -> None:
        self.threaded.install()
        seen.watch(self)
        self._connect = self._connecting(_real_connect)
        for module in _holding(_real_connect):
            self._patch(module, self._connect)
        for module in (sqlite3, sqlite3.dbapi2):
            if module.connect is not self._connect:  # somebody has wrapped it
                self._patch(module, self._connecting(module.connect))
        for raw in alive():
            if any(raw is used for used in self._elders.used):
                continue
            with contextlib.suppress(sqlite3.Error):  # closed, or of another thread
                sqlite3.Connection.set_authorizer(raw, None)
                self._aside.append(raw)
        for raw in self._elders.used:
            with contextlib.suppress(sqlite3.ProgrammingError):  # closed meanwhile
                self.track(raw)
        self.end_delivery()

    def _patch(self, module: Any, connect: Any) -> None:
        self._patched.append((module, module.connect))
        module.connect = connect

    def uninstall(self) -> None:
        self.threaded.uninstall()
        seen.unwatch(self)
        while self._patched:
            module, original = self._patched.pop()
            module.connect = original
        for module in _holding(self._connect):  # imported meanwhile
            module.connect = _real_connect
        for raw in self._elders.used:
            untrace(raw)
        for raw in self._aside:
            untrace(raw)
            self._disarm(raw)
        self._aside.clear()
        self._unblock()
        self._setting_up.clear()

    def cancel(self, owner: object) -> None:
        for _, handle in list(self.handles.values()):
            if handle.owner is owner and (connection := handle.connection) is not None:
                connection.interrupt()

    def leave(self, owner: object) -> None:
        for key, (database, handle) in list(self.handles.items()):
            if handle.owner is owner:
                database.leave(owner)
                self.handles.pop(key, None)

    def part(self, blobs: Mapping[str, Blob], folder: str) -> None:
        for name, blob in blobs.items():
            if not name.startswith(_FILE + os.sep):
                continue  # in memory, or of another kind
            path = name.removeprefix(_FILE)
            if is_open(path):
                raise SharedError(f"{path}: a connection from before the check would go to the original")
            self._copies[path] = copy_aside(path, blob, folder)
            self.stage.claim_path(self._copies[path])

    def end_delivery(self) -> None:
        self._unblock()
        self.handles.clear()
        self._ignored.clear()

    def before_delivery(self) -> None:
        """Connections that are older than the check report from their first statement on."""
        for raw in self._aside:  # an engine may have lent it to a delivery
            with contextlib.suppress(sqlite3.Error):
                sqlite3.Connection.set_authorizer(raw, self._alarm(raw))
        for raw in self._elders.used:
            with contextlib.suppress(sqlite3.ProgrammingError):
                self.track(raw)

    def _unblock(self) -> None:
        for raw in self._blocked:
            with contextlib.suppress(sqlite3.Error):
                raw.set_progress_handler(None, 0)
        self._blocked.clear()

    def block(self, raw: sqlite3.Connection, problem: Exception) -> None:
        """The delivery ends, and nothing runs on that connection until then."""
        self.stage.fail(problem)
        raw.set_progress_handler(lambda: 1, 1)
        self._blocked.append(raw)

    # -- connections ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def set_up(self) -> Iterator[None]:
        """Somebody opens a connection for the job inside: what runs there is not the job's doing."""
        self._setting_up.append(threading.get_ident())
        try:
            yield
        finally:
            self._setting_up.remove(threading.get_ident())

    @property
    def _in_set_up(self) -> bool:
        return threading.get_ident() in self._setting_up

    def _copy_of(self, database: Any, options: Mapping[str, Any]) -> Any:
        """What stands for that file in this process."""
        if not self._copies or not isinstance(database, str | bytes | os.PathLike):
            return database
        name = os.fsdecode(database)
        if options.get("uri") and name.startswith("file:"):
            return database
        return self._copies.get(os.path.realpath(name), database)

    def _connecting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
            database = self._copy_of(database, kwargs)
            if not self.stage.running or context_of(sys._getframe(1), "sqlite3.connect") is None:
                return original(database, *args, **kwargs)
            return self._open(original, database, args, kwargs)

        return connect

    def _open(self, original: Callable[..., Any], database: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A connection for the job, of its own class and of ours."""
        turns = self.stage.owner is not None and _is_file(database)
        wanted = args[_FACTORY - 1] if len(args) >= _FACTORY else kwargs.get("factory")
        made = seen.combined(wanted, TurnConnection if turns else SeenConnection)
        if len(args) >= _FACTORY:
            args = (*args[: _FACTORY - 1], made, *args[_FACTORY:])
        else:
            kwargs["factory"] = made
        shared = self._share(database) if kwargs.get("uri") else None
        raw = original(database, *args, **kwargs)
        if isinstance(raw, SeenConnection):
            raw.opened_by = self
            raw.shared = shared
            raw.setting_up = self._in_set_up
        if not self._in_set_up and isinstance(raw, sqlite3.Connection):
            try:
                self.track(raw)
            except WorldError as problem:
                self.stage.refuse(problem)
        return raw

    def _share(self, database: Any) -> SqliteDatabase | None:
        """A database in memory that several connections share, and that was there before the job came to it."""
        name = _shared_name(database)
        if name is None:
            return None
        quiet, self.stage.quiet = self.stage.quiet, True
        try:
            known = self.stage.find(f"sqlite:shared:{name}")
            if isinstance(known, SqliteDatabase):
                return known
            reader = _real_connect(os.fsdecode(database), uri=True, isolation_level=None, check_same_thread=False)
            if not ask(reader, "SELECT count(*) FROM sqlite_master")[0][0]:
                reader.close()  # the job makes it itself, and it dies with the process
                return None
            made = SqliteDatabase(
                self.stage, f"sqlite:shared:{name}", f"sqlite in memory, shared as {name}", reader, None
            )
            self.stage.adopt(made)
            return made
        finally:
            self.stage.quiet = quiet

    def meet(self, raw: SeenConnection) -> None:
        """See sqlite_seen.Watcher."""
        if self._in_set_up:
            raw.setting_up = True
            return
        if raw.opened_by is not self and not any(raw is used for used in self._elders.used):
            self.use(raw)
            self.stage.refuse(LateError(LATE))
        try:
            self.track(raw)
        except WorldError as problem:
            self.stage.refuse(problem)
        except sqlite3.ProgrammingError:
            pass  # closed: the driver will say so

    def track(
        self, raw: sqlite3.Connection, record: Any = None, discover: Callable[[str], SqliteDatabase] | None = None
    ) -> None:
        """Follow a connection from its first use in this delivery on. Raises WorldError if that cannot be done.

        record: SQLAlchemy's. discover: makes the resource with that name, if it is not known yet.
        """
        known = self.handles.get(id(raw))
        if (known is not None and known[1].connection is raw) or self._ignored.get(id(raw)) is raw:
            return
        if any(raw is aside for aside in self._aside):
            self._disarm(raw)
        quiet, self.stage.quiet = self.stage.quiet, True
        self.stage.claim_connection(raw)
        try:
            database = self._database(raw, discover)
            if database is None:
                self._ignored[id(raw)] = raw
                return
            opened = self._is_opened_here(raw)
            inherited = raw.in_transaction and not opened
            if inherited and record is None:
                raise WorldError(_OPEN.format(database.label))
            seen_ = isinstance(raw, SeenConnection)
            refer = weakref.ref(raw) if seen_ and record is None else functools.partial(_itself, raw)
            handle = Handle(refer, record, inherited, owner=self.stage.owner)
            follow_clock(raw)
            if database.path is not None and not raw.in_transaction:
                # A crash is a snapshot here, so nothing has to reach the disk.
                with contextlib.suppress(sqlite3.OperationalError):  # somebody's COMMIT lets nobody begin to read
                    if record is None:
                        handle.synchronous = ask(raw, "PRAGMA synchronous")[0][0]
                    ask(raw, "PRAGMA synchronous = OFF")
        finally:
            self.stage.quiet = quiet
        database.follow(raw, handle)
        self.handles[id(raw)] = (database, handle)
        if isinstance(raw, SeenConnection):
            raw.setting_up = False
            raw.tie(database, handle)
        if self.stage.concurrent and not isinstance(raw, TurnConnection):
            self.stage.fail(SharingError(database.alone or _UNSEEN.format(database.label)))
        sqlite3.Connection.set_trace_callback(raw, self._tracer(database, handle))

    def _database(
        self, raw: sqlite3.Connection, discover: Callable[[str], SqliteDatabase] | None
    ) -> SqliteDatabase | None:
        """The resource behind a connection; None for one in the memory of the process that the job has made itself."""
        path = identify(raw)
        if path is None:
            shared = getattr(raw, "shared", None)
            if shared is not None:
                return shared  # type: ignore[no-any-return]  # see _share()
            if self._is_opened_here(raw):
                return None
        elif path not in self._copies.values():
            self.stage.keep_off(path)
        if path is not None:
            self.stage.claim_path(path)
        original = next((file for file, copy in self._copies.items() if copy == path), path)
        name = f"{_FILE}{original}" if path is not None else f"sqlite:memory:{self.threaded.identity(raw):x}"
        known = self.stage.find(name)
        if known is None:
            known = discover(name) if discover is not None else self._discover(raw, name, path)
            self.stage.adopt(known)
        assert isinstance(known, SqliteDatabase)
        return known

    def _is_opened_here(self, raw: sqlite3.Connection) -> bool:
        return getattr(raw, "opened_by", None) is self

    def _discover(self, raw: sqlite3.Connection, name: str, path: str | None) -> SqliteDatabase:
        if path is None:
            return SqliteDatabase(self.stage, name, "sqlite in memory", raw, None, borrowed=True)
        reader = _real_connect(path, isolation_level=None, check_same_thread=False)
        return SqliteDatabase(self.stage, name, f"sqlite {path}", reader, path)

    def _alarm(self, raw: sqlite3.Connection) -> Callable[..., int]:
        """The authorizer of a connection from before the check, until the job uses it: then nothing runs on it."""

        def alarm(*what: Any) -> int:
            if not self.stage.running or context_of(sys._getframe(1), "sqlite3") is None:
                return sqlite3.SQLITE_OK
            if id(raw) in self.held:
                self.stage.fail(WorldError(self.held[id(raw)]))
            else:
                self.use(raw)
                self.stage.fail(LateError(LATE))
            return sqlite3.SQLITE_DENY

        return alarm

    def use(self, raw: sqlite3.Connection) -> None:
        """The job uses that connection from before the check."""
        if not any(raw is used for used in self._elders.used):
            self._elders.used.append(raw)

    def _disarm(self, raw: sqlite3.Connection) -> None:
        with contextlib.suppress(sqlite3.Error):
            sqlite3.Connection.set_authorizer(raw, None)

    # -- steps ------------------------------------------------------------------------------------------------------

    def announce(
        self, database: SqliteDatabase, handle: Handle, statement: str, parameters: Any = (), shown: Any = ()
    ) -> None:
        """See sqlite_seen.Watcher."""
        word = seen.without_comments(statement)[:12].upper()
        if word.startswith(("COMMIT", "END")):
            self.committing(database, handle)
        elif word.startswith("ROLLBACK") and " TO" not in word:
            return
        else:
            self.step(database, handle, statement, parameters, shown)
        self.stage.strike(ERROR, locked)

    def committing(self, database: SqliteDatabase, handle: Handle) -> None:
        """Here is the boundary, and what is committed is read at the next one."""
        self.stage.step("commit", database, "COMMIT", "COMMIT")
        self.stage.touched(database)

    def step(self, database: SqliteDatabase, handle: Handle, statement: str, row: Any, parameters: Any) -> None:
        text, template = texts(statement)
        self._watch_out(database, text)
        effect = database.effect_of(statement, row)
        detail = f"{text} {short(parameters)}" if parameters and self.stage.traced else text
        self.stage.step("sql", database, template, detail)
        database.wrote(handle, effect)

    def _watch_out(self, database: SqliteDatabase, text: str) -> None:
        start = text[:6].upper()
        if start == "ATTACH":
            self.stage.refuse(
                WorldError(
                    f"the job attaches a database ({text}). SQLite does not tell which of several databases a "
                    "transaction changed, so a check there could be wrong. Give the job one engine for each database "
                    "(or one connection)."
                )
            )
        if start == "VACUUM" and " INTO " in text.upper():
            self.stage.doubt(f"effect outside the ledger: {text} on {database.label} writes a file of its own")

    def _tracer(self, database: SqliteDatabase, handle: Handle) -> Callable[[str], None]:
        """The trace callback of a connection: every statement as it starts, with its values filled in."""

        def trace(statement: str) -> None:
            connection = handle.connection
            users = getattr(connection, "users_trace", None)
            if users is not None:
                users(statement)
            if handle.announced or not self.stage.running:
                return
            try:
                if self.stage.concurrent:
                    self._unseen(database, handle, statement)
                else:
                    self._traced(database, handle, statement)
            except Exception as problem:  # the driver would swallow it
                self.stage.fail(problem)

        return trace

    def _unseen(self, database: SqliteDatabase, handle: Handle, statement: str) -> None:
        word = statement.lstrip()[:8].upper()
        if handle.rows or handle.committing or word.startswith(("ROLLBACK", "--")):
            return
        self.stage.fail(SharingError(database.alone or _UNSEEN.format(database.label)))

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
                self.committing(database, handle)
            handle.committing = False
        elif word.startswith("BEGIN"):
            self.stage.look()  # what was committed cannot be told apart any more once the transaction is open
        elif not word.startswith(("ROLLBACK", "--")):
            self._raw(database, handle, statement)

    def _raw(self, database: SqliteDatabase, handle: Handle, statement: str) -> None:
        text, template = texts(statement)
        self._watch_out(database, text)
        effect = database.effect_of(statement, ())
        if effect.fires and not handle.in_transaction:
            self.stage.doubt(
                f"{text} on {database.label} fires triggers outside a transaction, on a connection from before the "
                "check: its boundaries cannot be told apart. Let the job open its connection, or use a transaction."
            )
        self.stage.step("sql", database, template, text)
        database.wrote(handle, effect)


def locked() -> sqlite3.OperationalError:
    return sqlite3.OperationalError("database is locked")


def _itself(raw: sqlite3.Connection) -> sqlite3.Connection:
    return raw


def _is_file(database: Any) -> bool:
    name = os.fsdecode(database) if isinstance(database, str | bytes | os.PathLike) else ""
    return bool(name) and ":memory:" not in name and "mode=memory" not in name


def _shared_name(database: Any) -> str | None:
    """The name of a database in memory that several connections share, as in ``file:name?mode=memory&cache=shared``."""
    if not isinstance(database, str | bytes | os.PathLike):
        return None
    name, _, rest = os.fsdecode(database).partition("?")
    options = {key: values[-1] for key, values in parse_qs(rest).items()}
    if not name.startswith("file:") or options.get("cache") != "shared":
        return None
    name = name.removeprefix("file:")
    return name if options.get("mode") == "memory" or name == ":memory:" else None


def _holding(function: Any) -> list[Any]:
    """Modules that have it under the name ``connect``."""
    return [
        module
        for module in list(sys.modules.values())
        if getattr(module, "__dict__", {}).get("connect") is function and module.__name__ != __name__
    ]
