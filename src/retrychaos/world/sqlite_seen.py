"""SQLite connections whose statements, commits and other doings are reported before they happen.

While a check is on, ``sqlite3.connect`` gives such a connection, whatever class the job asks for: ours stands between
that class and the one in C. What goes past these methods (``sqlite3.Connection.execute(connection, ...)``) is left to a
trace callback.
"""

from __future__ import annotations

import functools
import re
import sqlite3
import types
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from retrychaos.model.errors import SharingError, WorldError
from retrychaos.world.sqlite_effects import ANYTHING

if TYPE_CHECKING:
    from retrychaos.world.resource import Stage
    from retrychaos.world.sqlite import SqliteDatabase
    from retrychaos.world.sqlite_handle import Handle

_COMMENTS = re.compile(r"(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/)*", re.DOTALL)
_CHANGES_ROWS = re.compile(r"(INSERT|UPDATE|DELETE|REPLACE)\b", re.IGNORECASE)
_LEGACY = -1
"""``sqlite3.LEGACY_TRANSACTION_CONTROL``, all there is before Python 3.12."""


class Watcher(Protocol):
    """Who is told."""

    @property
    def stage(self) -> Stage: ...

    def meet(self, raw: SeenConnection) -> None:
        """Tie that connection, at its first statement in a delivery, unless it is none of our business."""
        ...

    def announce(
        self, database: SqliteDatabase, handle: Handle, statement: str, parameters: Any = (), shown: Any = ()
    ) -> None:
        """That statement is about to run, and nobody has said so before. May raise what the driver would raise."""
        ...


_watchers: list[Watcher] = []
"""Only the last is told, as long as its check is on. A connection may outlive the check in which it was opened."""


def watch(watcher: Watcher) -> None:
    _watchers.append(watcher)


def unwatch(watcher: Watcher) -> None:
    if watcher in _watchers:
        _watchers.remove(watcher)


def without_comments(statement: str) -> str:
    """From its first word on."""
    match = _COMMENTS.match(statement)
    return statement[match.end() :] if match else statement


def combined(factory: Any, ours: Any) -> Any:
    """A class that is both what the user asks for and ours; `factory` itself if that cannot be."""
    if factory is None:
        return ours
    if not isinstance(factory, type) or not issubclass(factory, ours.__mro__[-2]):
        return factory
    return factory if issubclass(factory, ours) else _combined(factory, ours)


@functools.lru_cache(maxsize=128)
def _combined(factory: Any, ours: Any) -> Any:
    if issubclass(ours, factory):
        return ours
    try:
        made = types.new_class(factory.__name__, (factory, ours))
    except TypeError:  # a layout that cannot be combined: the trace callback sees what it does
        return factory
    made.__module__, made.__qualname__ = factory.__module__, factory.__qualname__
    return made


class SeenCursor(sqlite3.Cursor):
    """Reports each statement."""

    connection: SeenConnection
    _count: int | None = None
    """Rows of an executemany that ran row by row."""

    @property
    def rowcount(self) -> int:
        return super().rowcount if self._count is None else self._count

    def execute(self, statement: str, *parameters: Any) -> Any:
        self._count = None
        if not self.connection.tied:
            super().execute(statement, *parameters)
            return self
        values = parameters[0] if parameters else ()
        self.connection.do(statement, values, values, lambda: self.perform(statement, *parameters))
        return self

    def perform(self, statement: str, *parameters: Any) -> None:
        """Really run it."""
        super().execute(statement, *parameters)

    def executemany(self, statement: str, rows: Iterable[Any]) -> Any:
        self._count = None
        connection = self.connection
        if not connection.tied:
            super().executemany(statement, rows)
            return self
        if connection.commits_rows(statement):
            count = 0
            for row in rows:
                self.execute(statement, row)
                count += max(super().rowcount, 0)
            self._count = count
            return self
        rows = rows if isinstance(rows, list | tuple) else list(rows)
        connection.do(statement, rows[0] if rows else (), rows, lambda: self.perform_many(statement, rows))
        return self

    def perform_many(self, statement: str, rows: Any) -> None:
        super().executemany(statement, rows)

    def executescript(self, script: str) -> Any:
        connection = self.connection
        if not connection.tied:
            super().executescript(script)
            return self
        if connection.legacy and connection.in_transaction:
            connection.commit()
        with connection.as_it_stands():
            statement = ""
            for piece in script.split(";"):
                statement += piece + ";"
                if sqlite3.complete_statement(statement):
                    self._one_of(statement)
                    statement = ""
            self._one_of(statement)  # what it does not take for a statement it may say itself
        return self

    def _one_of(self, statement: str) -> None:
        if without_comments(statement).strip("; \t\r\n"):
            self.execute(statement)
            if self.description is not None:
                self.fetchall()


class SeenConnection(sqlite3.Connection):
    """Reports what is done on it, once it is tied to a database that the check knows."""

    cursor_class: type[SeenCursor] = SeenCursor
    handle: Handle | None = None
    resource: SqliteDatabase | None = None
    opened_by: object = None
    """The check in which it was opened."""
    shared: SqliteDatabase | None = None
    """The database in memory that it shares with others."""
    setting_up = False
    """What opened it (an engine, Django) is not done with it yet: what runs is not the job's doing."""
    users_trace: Any = None
    """The trace callback that the job has set."""

    def tie(self, database: SqliteDatabase, handle: Handle) -> None:
        """From now on it belongs to the running delivery."""
        self.resource, self.handle = database, handle

    def untie(self) -> None:
        """Its delivery is over."""
        self.resource = self.handle = None

    @property
    def tied(self) -> bool:
        watcher = _watchers[-1] if _watchers else None
        if watcher is None or self.setting_up or not watcher.stage.running:
            return False
        if self.handle is None:
            watcher.meet(self)
        return self.handle is not None

    @property
    def legacy(self) -> bool:
        """The driver opens transactions before statements that change rows, if there is an isolation level."""
        return getattr(self, "autocommit", _LEGACY) == _LEGACY

    def commits_rows(self, statement: str) -> bool:
        """Each row of an executemany is a transaction of its own."""
        handle = self.handle
        if self.in_transaction or handle is None or handle.announced or handle.rows:
            return False
        if not self.legacy:
            return bool(getattr(self, "autocommit", False))
        return self.isolation_level is None or not _CHANGES_ROWS.match(without_comments(statement))

    def do(self, statement: str, values: Any, shown: Any, action: Callable[[], Any], takes: bool = True) -> Any:
        """Run a statement as a step, announced if nobody has done that.

        values: of its first row. shown: of all rows. takes: what it does is known by its text.
        """
        handle, resource = self.handle, self.resource
        assert handle is not None
        assert resource is not None
        raw = not (handle.announced or handle.rows)
        if raw:
            if takes:
                _watchers[-1].announce(resource, handle, statement, values, shown)
            handle.announced = True
        try:
            return self.perform(action, statement)
        finally:
            if raw:
                handle.announced = False

    def perform(self, action: Callable[[], Any], statement: str) -> Any:
        """Really do it."""
        return action()

    def end(self, action: Callable[[], None]) -> None:
        """The driver sends a COMMIT in `action`, if a transaction is open."""
        handle, resource = self.handle, self.resource
        if handle is None or resource is None or not self.in_transaction:
            action()
            return
        if not handle.committing:
            _watchers[-1].announce(resource, handle, "COMMIT")
            handle.committing = True
        try:
            self.perform(action, "COMMIT")
        finally:
            handle.committing = False
        resource.committed(handle)

    # -- what jobs call ---------------------------------------------------------------------------------------------

    def cursor(self, factory: Any = None) -> Any:
        make: Any = super().cursor
        return make(combined(factory, self.cursor_class))

    def execute(self, *args: Any) -> Any:
        return self.cursor().execute(*args)

    def executemany(self, *args: Any) -> Any:
        return self.cursor().executemany(*args)

    def executescript(self, *args: Any) -> Any:
        return self.cursor().executescript(*args)

    def commit(self) -> None:
        if self.tied:
            self.end(super().commit)
        else:
            super().commit()

    def rollback(self) -> None:
        if self.handle is not None and self.in_transaction:
            self.handle.effects = []  # nothing of them will be committed
        super().rollback()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        if kind is not None:
            self.rollback()
            return False
        try:
            self.commit()
        except BaseException:
            self.rollback()
            raise
        return False

    def close(self) -> None:
        handle, resource = self.handle, self.resource
        if handle is not None and resource is not None:
            if handle.in_transaction:
                # As it does by itself, but for statements that frames of an exception, and of ours, still hold.
                handle.effects = []
                super().rollback()
            elif handle.effects:
                resource.committed(handle)
        super().close()

    def set_trace_callback(self, callback: Any) -> None:
        self.users_trace = callback
        if self.handle is None:
            super().set_trace_callback(callback)

    def backup(self, target: sqlite3.Connection, **options: Any) -> None:
        """One step that writes all of the target: until its end that is one transaction there."""
        if self.tied:
            self.do("SELECT 'backup'", (), (), lambda: None)
        if not isinstance(target, SeenConnection) or not target.tied:
            super().backup(target, **options)
            return
        assert target.handle is not None
        assert target.resource is not None
        if target.resource.stage.concurrent:
            _refuse_overlap(target.resource, "backup() into it")
        _watchers[-1].announce(target.resource, target.handle, "VACUUM /* backup() */")
        target.resource.wrote(target.handle, ANYTHING)
        target.do("", (), (), lambda: sqlite3.Connection.backup(self, target, **options), takes=False)

    def blobopen(self, table: str, column: str, row: int, /, *, readonly: bool = False, name: str = "main") -> Any:
        def action() -> Any:
            return sqlite3.Connection.blobopen(self, table, column, row, readonly=readonly, name=name)

        if not self.tied:
            return action()
        assert self.resource is not None
        where = f"{table}.{column} row {row}"
        if readonly:
            self.do(f"SELECT 'blob of {where}'", (), (), lambda: None)
            return action()
        if self.resource.stage.concurrent:
            _refuse_overlap(self.resource, "blobopen() for writing")
        return SeenBlob(self, action, where)

    def deserialize(self, data: Any, /, *, name: str = "main") -> None:
        if not self.tied:
            super().deserialize(data, name=name)
            return
        assert self.resource is not None
        assert self.handle is not None
        if self.resource.path is not None:
            self.resource.stage.refuse(
                WorldError(
                    f"deserialize() takes a connection away from {self.resource.label}: all that is done on it "
                    "afterwards is in memory. Use a connection to ':memory:' for that."
                )
            )
        _watchers[-1].announce(self.resource, self.handle, "VACUUM /* deserialize() */")
        self.resource.wrote(self.handle, ANYTHING)
        super().deserialize(data, name=name)

    # -- how transactions are opened --------------------------------------------------------------------------------

    @property
    def isolation_level(self) -> Any:
        return super().isolation_level

    @isolation_level.setter
    def isolation_level(self, level: Any) -> None:
        setting: Any = functools.partial(_LEVEL.__set__, self, level)
        if level is None and self.legacy and self.tied:
            self.end(setting)  # the driver commits
        else:
            setting()

    if hasattr(sqlite3.Connection, "autocommit"):

        @property
        def autocommit(self) -> Any:
            return _MODE.__get__(self)

        @autocommit.setter
        def autocommit(self, mode: Any) -> None:
            setting: Any = functools.partial(_MODE.__set__, self, mode)
            if mode is True and self.tied:
                self.end(setting)
            else:
                setting()

    def as_it_stands(self) -> _NoTransactions:
        """No BEGIN is added to statements in there."""
        return _NoTransactions(self)


_LEVEL: Any = sqlite3.Connection.__dict__["isolation_level"]
_MODE: Any = sqlite3.Connection.__dict__.get("autocommit")


class _NoTransactions:
    def __init__(self, connection: SeenConnection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._level = self._connection.isolation_level
        if self._connection.legacy and self._level is not None:
            self._set(None)

    def __exit__(self, *exc: object) -> None:
        if self._connection.legacy and self._level is not None:
            self._set(self._level)

    def _set(self, level: Any) -> None:
        _LEVEL.__set__(self._connection, level)


class SeenBlob:
    """A blob that is written to bit by bit. Outside of a transaction all of it is committed when it is closed."""

    def __init__(self, connection: SeenConnection, opening: Callable[[], Any], where: str) -> None:
        self._connection = connection
        self._where = where
        self._tell()
        self._blob = opening()

    def _tell(self) -> None:
        connection = self._connection
        if connection.tied and connection.resource is not None and connection.handle is not None:
            connection.do(f"SELECT 'write to the blob {self._where}'", (), (), lambda: None)
            connection.resource.wrote(connection.handle, ANYTHING)

    def write(self, data: Any, /) -> None:
        self._tell()
        self._blob.write(data)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._tell()
        self._blob[key] = value

    def close(self) -> None:
        self._tell()
        self._blob.close()

    def __enter__(self) -> SeenBlob:
        self._blob.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getitem__(self, key: Any) -> Any:
        return self._blob[key]

    def __len__(self) -> int:
        return len(self._blob)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._blob, name)


def _refuse_overlap(database: SqliteDatabase, what: str) -> None:
    database.stage.refuse(
        SharingError(
            f"the job uses {what} on {database.label}. It cannot be told when that waits for another delivery; "
            "duplicates=1 checks crashes only."
        )
    )
