"""SQLite connections of deliveries that overlap: a lock of another delivery is waited for without any time passing.

SQLite itself says who has to wait: it answers BUSY. Where its own busy handler would wait, the delivery stands aside
until another one has moved, and tries again. Where it would not (a transaction that has read wants to write; a snapshot
that is out of date), the error reaches the job at once, as it does in production.

All rows of a result are read at once, since a half-read cursor keeps a lock that its owner does not know of.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from retrychaos.world.resource import BEGUN

if TYPE_CHECKING:
    from retrychaos.world.resource import Stage
    from retrychaos.world.sqlite import Handle, SqliteDatabase

_BUSY_SNAPSHOT = 517
_TAKES_NO_LOCK = re.compile(r"\s*(BEGIN(?!\s+(IMMEDIATE|EXCLUSIVE))|SAVEPOINT|RELEASE|PRAGMA)\b", re.IGNORECASE)
_COMMITS = re.compile(r"\s*(COMMIT|END|RELEASE)\b", re.IGNORECASE)
_POSITIONS = ("timeout", "detect_types", "isolation_level", "check_same_thread", "factory", "cached_statements", "uri")
_DEFAULT_TIMEOUT = 5.0


def connecting(stage: Stage, original: Callable[..., Any]) -> Callable[..., Any]:
    """``sqlite3.connect``, for deliveries that overlap."""

    def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
        if stage.owner is not None and stage.running and _is_file(database) and "factory" not in kwargs:
            kwargs["factory"] = TurnConnection
        return original(database, *args, **kwargs)

    return connect


def _is_file(database: Any) -> bool:
    name = os.fsdecode(database) if isinstance(database, str | bytes | os.PathLike) else ""
    return bool(name) and ":memory:" not in name and "mode=memory" not in name


class TurnConnection(sqlite3.Connection):
    """A connection whose waits are seen. Behaves as any other until it is tied to a delivery."""

    def __init__(self, database: Any, *args: Any, **kwargs: Any) -> None:
        options = {
            **dict(zip(_POSITIONS, args, strict=False)),
            **kwargs,
        }  # by name: from Python 3.15 on only that works
        timeout = options.pop("timeout", _DEFAULT_TIMEOUT)
        options.pop("factory", None)
        options["check_same_thread"] = False  # it is closed from outside when its delivery dies
        super().__init__(database, timeout=0.0, **options)
        self.patient = timeout > 0
        """It would wait for a lock."""
        self.locked = False
        """Its transaction has a lock already."""
        self.writing = False
        self.pending = False
        """Its COMMIT waits: nobody can begin to read."""
        self.handle: Handle | None = None
        self.resource: SqliteDatabase | None = None
        self.announce: Callable[[str], None] = _nothing
        """Reports a statement that nobody has announced as a step."""

    def tie(self, database: SqliteDatabase, handle: Handle, announce: Callable[[str], None]) -> None:
        """From now on it belongs to the running delivery."""
        self.resource, self.handle, self.announce = database, handle, announce

    @property
    def tied(self) -> bool:
        return self.handle is not None and self.resource is not None and self.resource.stage.running

    def holds(self) -> str:
        """What others can notice of its open transaction."""
        if not self.in_transaction:
            return ""
        if self.pending:
            return "pending"
        return "write" if self.writing else "read" if self.locked else BEGUN

    # -- what jobs call ---------------------------------------------------------------------------------------------

    def cursor(self, factory: Any = None) -> Any:
        make: Any = super().cursor
        return make(factory or TurnCursor)

    def execute(self, *args: Any) -> Any:
        return self.cursor().execute(*args)

    def executemany(self, *args: Any) -> Any:
        return self.cursor().executemany(*args)

    def executescript(self, script: str) -> Any:
        return self.cursor().executescript(script)

    def commit(self) -> None:
        if not self.tied:
            super().commit()
            return
        assert self.handle is not None
        assert self.resource is not None
        stage = self.resource.stage
        if self.in_transaction and not self.handle.committing:
            self.announce("COMMIT")
            self.handle.committing = True
        self.patiently(super().commit, ending=True)
        self.settle("")
        stage.observed("committed")

    def rollback(self) -> None:
        try:
            if self.handle is not None and self.in_transaction:
                self.handle.effects = []  # nothing of them will be committed
            super().rollback()
            self.settle("")
        except sqlite3.ProgrammingError:
            if self.handle is None:
                raise  # else its delivery has died, and the connection with it

    def do(self, statement: str, action: Callable[[], Any]) -> None:
        """Run a statement as a step, announced if nobody has done that, and waiting for others where SQLite would."""
        handle, resource = self.handle, self.resource
        assert handle is not None
        assert resource is not None
        raw = not handle.announced
        if raw:
            self.announce(statement)
            handle.announced = True
        try:
            self.patiently(action, ending=bool(_COMMITS.match(statement)))
        except sqlite3.Error as error:
            # A statement that fails keeps the lock that it has taken, until the transaction ends.
            self.settle("" if _is_busy(error) else statement)
            resource.stage.observed("error", type(error).__name__, str(error))
            raise
        finally:
            if raw:
                handle.announced = False

    # -- waiting ----------------------------------------------------------------------------------------------------

    def patiently(self, action: Callable[[], Any], ending: bool = False) -> Any:
        """Do it, waiting for others where SQLite would."""
        assert self.resource is not None
        while True:
            try:
                return action()
            except sqlite3.OperationalError as error:
                if not _is_busy(error) or error.sqlite_errorcode == _BUSY_SNAPSHOT or not self.patient:
                    raise
                if self.locked and not ending:
                    raise  # SQLite does not wait here, whatever the timeout: two such waits would never end
                assert self.handle is not None
                self.pending, self.handle.waiting = ending and self.locked, True
                try:
                    if not self.resource.stage.blocked():
                        raise
                finally:
                    self.pending = self.handle.waiting = False
                self.resource.stage.touched(self.resource)

    def settle(self, statement: str) -> None:
        """A statement has succeeded: which lock is held now?"""
        if not self.in_transaction:
            self.locked = self.writing = False
            return
        if statement and not _TAKES_NO_LOCK.match(statement):
            self.locked = True
        if statement and self.resource is not None:
            self.writing = self.writing or self.resource.effect_of(statement, ()).writes


class TurnCursor(sqlite3.Cursor):
    """A cursor that has read everything, and reports what the job gets."""

    connection: TurnConnection

    def __init__(self, connection: TurnConnection) -> None:
        super().__init__(connection)
        self._rows: deque[Any] | None = None

    def execute(self, statement: str, parameters: Any = ()) -> TurnCursor:
        connection = self.connection
        self._rows = None
        if not connection.tied:
            super().execute(statement, parameters)
            return self
        handle, resource = connection.handle, connection.resource
        assert handle is not None
        assert resource is not None
        connection.do(statement, lambda: self._perform(statement, parameters))
        if statement.lstrip()[:8].upper() == "ROLLBACK" and " TO" not in statement.upper():
            handle.effects = []
        connection.settle(statement)
        read: Iterable[Any] = self._rows or ()
        rows = [tuple(row) if isinstance(row, sqlite3.Row) else row for row in read]
        resource.stage.observed(rows, self.rowcount, self.lastrowid)
        if "busy_timeout" in statement.lower():
            connection.patient = bool(self._rows and self._rows[0][0])
            super(TurnConnection, connection).execute("PRAGMA busy_timeout = 0")
        return self

    def _perform(self, statement: str, parameters: Any) -> None:
        super().execute(statement, parameters)
        self._rows = deque(super().fetchall()) if self.description is not None else None

    def executemany(self, statement: str, rows: Iterable[Any]) -> TurnCursor:
        self._rows = None
        connection = self.connection
        if not connection.tied:
            super().executemany(statement, rows)
            return self
        rows = list(rows)
        assert connection.resource is not None
        connection.do(statement, lambda: sqlite3.Cursor.executemany(self, statement, rows))
        connection.settle(statement)
        connection.resource.stage.observed(self.rowcount, self.lastrowid)
        return self

    def executescript(self, script: str) -> TurnCursor:
        if not self.connection.tied:
            super().executescript(script)
            return self
        connection = self.connection
        if connection.in_transaction:
            connection.commit()
        level, connection.isolation_level = connection.isolation_level, None  # no BEGIN is added in a script
        try:
            statement = ""
            for piece in script.split(";"):
                statement += piece + ";"
                if sqlite3.complete_statement(statement):
                    if statement.strip("; \t\r\n"):
                        self.execute(statement)
                    statement = ""
        finally:
            connection.isolation_level = level
        return self

    def close(self) -> None:
        try:
            super().close()
        except sqlite3.ProgrammingError:
            if self.connection.handle is None:
                raise  # else its delivery has died, and the connection with it

    def fetchone(self) -> Any:
        if self._rows is None:
            return super().fetchone()
        return self._rows.popleft() if self._rows else None

    def fetchmany(self, size: int | None = None) -> list[Any]:
        if self._rows is None:
            return super().fetchmany(self.arraysize if size is None else size)
        wanted = min(self.arraysize if size is None else size, len(self._rows))
        return [self._rows.popleft() for _ in range(wanted)]

    def fetchall(self) -> list[Any]:
        if self._rows is None:
            return super().fetchall()
        rows = list(self._rows)
        self._rows.clear()
        return rows

    def __iter__(self) -> TurnCursor:
        return self

    def __next__(self) -> Any:
        if self._rows is None:
            return super().__next__()
        if not self._rows:
            raise StopIteration
        return self._rows.popleft()


def _is_busy(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _nothing(statement: str) -> None:
    pass
