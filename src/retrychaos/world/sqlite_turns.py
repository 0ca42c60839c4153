"""SQLite connections of deliveries that overlap: a lock of another delivery is waited for without any time passing.

SQLite itself says who has to wait: it answers BUSY. Where its own busy handler would wait, the delivery stands aside
until another one has moved, and tries again. Where it would not (a transaction that has read wants to write; a snapshot
that is out of date), the error reaches the job at once, as it does in production.

All rows of a result are read at once, since a half-read cursor keeps a lock that its owner does not know of.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from retrychaos.model.errors import SharingError
from retrychaos.world.resource import BEGUN
from retrychaos.world.sqlite_seen import SeenConnection, SeenCursor

if TYPE_CHECKING:
    from retrychaos.world.sqlite import SqliteDatabase
    from retrychaos.world.sqlite_handle import Handle

_BUSY_SNAPSHOT = 517
_TAKES_NO_LOCK = re.compile(r"\s*(BEGIN(?!\s+(IMMEDIATE|EXCLUSIVE))|SAVEPOINT|RELEASE)\b", re.IGNORECASE)
_COMMITS = re.compile(r"\s*(COMMIT|END|RELEASE)\b", re.IGNORECASE)
_POSITIONS = ("timeout", "detect_types", "isolation_level", "check_same_thread", "factory", "cached_statements", "uri")
_DEFAULT_TIMEOUT = 5.0
_TAKEN = (
    "one connection to {} is used by both deliveries: the job keeps it in memory that they share here, and separate "
    "workers never do. Open the connection inside the job, or in a threading.local; or check crashes only with "
    "duplicates=1."
)


class TurnCursor(SeenCursor):
    """A cursor that has read everything, and reports what the job gets."""

    connection: TurnConnection
    _rows: deque[Any] | None = None
    """As the database gave them: a row factory makes of each what it wants when it is fetched."""

    def execute(self, statement: str, *parameters: Any) -> Any:
        connection = self.connection
        self._rows = None
        super().execute(statement, *parameters)
        if not connection.tied:
            return self
        handle, resource = connection.handle, connection.resource
        assert handle is not None
        assert resource is not None
        if statement.lstrip()[:8].upper() == "ROLLBACK" and " TO" not in statement.upper():
            handle.effects = []
        connection.settle(statement)
        resource.stage.observed(list(self._rows or ()), self.rowcount, self.lastrowid)
        if "busy_timeout" in statement.lower():
            connection.patient = bool(self._rows and self._rows[0][0])
            before, handle.announced = handle.announced, True  # this one is not the job's
            sqlite3.Cursor(connection).execute("PRAGMA busy_timeout = 0").close()
            handle.announced = before
        return self

    def perform(self, statement: str, *parameters: Any) -> None:
        factory, self.row_factory = self.row_factory, None
        try:
            super().perform(statement, *parameters)
            self._rows = deque(super().fetchall()) if self.description is not None else None
        finally:
            self.row_factory = factory

    def executemany(self, statement: str, rows: Iterable[Any]) -> Any:
        self._rows = None
        return super().executemany(statement, rows)

    def perform_many(self, statement: str, rows: Any) -> None:
        super().perform_many(statement, rows)
        connection = self.connection
        assert connection.resource is not None
        connection.settle(statement)
        connection.resource.stage.observed(self.rowcount, self.lastrowid)

    def close(self) -> None:
        try:
            super().close()
        except sqlite3.ProgrammingError:
            if not self.connection.over:
                raise

    def fetchone(self) -> Any:
        if self._rows is None:
            return super().fetchone()
        return self._made(self._rows.popleft()) if self._rows else None

    def fetchmany(self, size: int | None = None) -> list[Any]:
        if self._rows is None:
            return super().fetchmany(self.arraysize if size is None else size)
        wanted = min(self.arraysize if size is None else size, len(self._rows))
        return [self._made(self._rows.popleft()) for _ in range(wanted)]

    def fetchall(self) -> list[Any]:
        if self._rows is None:
            return super().fetchall()
        return self.fetchmany(len(self._rows))

    def __iter__(self) -> TurnCursor:
        return self

    def __next__(self) -> Any:
        if self._rows is None:
            return super().__next__()
        if not self._rows:
            raise StopIteration
        return self._made(self._rows.popleft())

    def _made(self, row: Any) -> Any:
        factory: Any = self.row_factory
        return row if factory is None else factory(self, row)


class TurnConnection(SeenConnection):
    """A connection whose waits are seen."""

    cursor_class = TurnCursor

    patient = True
    """It would wait for a lock."""
    timeout = _DEFAULT_TIMEOUT
    """For so many seconds."""
    locked = False
    """Its transaction has a lock already."""
    writing = False
    pending = False
    """Its COMMIT waits: nobody can begin to read."""
    over = False
    """Its delivery has ended or died, and it is closed."""
    _last: SqliteDatabase | None = None

    def __init__(self, database: Any, *args: Any, **kwargs: Any) -> None:
        options = {
            **dict(zip(_POSITIONS, args, strict=False)),
            **kwargs,
        }  # by name: from Python 3.15 on only that works
        timeout = options.pop("timeout", _DEFAULT_TIMEOUT)
        options.pop("factory", None)
        options["check_same_thread"] = False  # it is closed from outside when its delivery dies
        super().__init__(database, timeout=0.0, **options)
        self.patient, self.timeout = timeout > 0, timeout

    def untie(self) -> None:
        self._last = self.resource
        super().untie()
        self.over = True

    @property
    def tied(self) -> bool:
        if not self.over:
            handle, resource = self.handle, self.resource
            if handle is not None and resource is not None and resource.stage.running:
                if handle.owner is not resource.stage.owner:
                    resource.stage.refuse(SharingError(_TAKEN.format(resource.label)))
                return True
            return super().tied
        if self._last is not None and self._last.stage.running:
            # A delivery that has died ends here, when it is unwound.
            self._last.stage.step("sql", self._last, "closed", "a statement on a connection of a delivery that is over")
        return False

    def holds(self) -> str:
        """What others can notice of its open transaction."""
        if not self.in_transaction:
            return ""
        if self.pending:
            return "pending"
        return "write" if self.writing else "read" if self.locked else BEGUN

    def end(self, action: Callable[[], None]) -> None:
        super().end(action)
        self.locked = self.writing = False
        if self.resource is not None:
            self.resource.stage.observed("committed")

    def rollback(self) -> None:
        try:
            super().rollback()
            self.settle("")
        except sqlite3.ProgrammingError:
            if not self.over:
                raise

    # -- waiting ----------------------------------------------------------------------------------------------------

    def perform(self, action: Callable[[], Any], statement: str) -> Any:
        """Do it, waiting for others where SQLite would."""
        handle, resource = self.handle, self.resource
        assert handle is not None
        assert resource is not None
        ending = is_end(statement)
        try:
            return self._patiently(action, ending, handle, resource)
        except sqlite3.Error as error:
            # A statement that fails keeps the lock that it has taken, until the transaction ends.
            self.settle("" if _is_busy(error) else statement)
            resource.stage.observed("error", type(error).__name__, str(error))
            raise

    def _patiently(self, action: Callable[[], Any], ending: bool, handle: Handle, resource: SqliteDatabase) -> Any:
        while True:
            try:
                return action()
            except sqlite3.OperationalError as error:
                if not waits_for(error) or not self.patient or self._waits_for_itself(handle, resource):
                    raise
                if self.locked and not ending:
                    raise  # SQLite does not wait here, whatever the timeout: two such waits would never end
                self.pending, handle.waiting = ending and self.locked, True
                try:
                    if not resource.stage.blocked():
                        raise
                finally:
                    self.pending = handle.waiting = False
                resource.stage.touched(resource)

    def _waits_for_itself(self, handle: Handle, resource: SqliteDatabase) -> bool:
        """Its own delivery has the lock, on another connection, and no other delivery has any."""
        locked = [
            each.owner is handle.owner
            for each in resource.handles.values()
            if isinstance(other := each.connection, TurnConnection) and other is not self and other.locked
        ]
        return bool(locked) and all(locked)

    def settle(self, statement: str) -> None:
        """A statement has succeeded: which lock is held now?"""
        if not self.in_transaction:
            self.locked = self.writing = False
            return
        if not statement or _TAKES_NO_LOCK.match(statement):
            return
        effect = self.resource.effect_of(statement, ()) if self.resource is not None else None
        self.writing = self.writing or (effect is not None and effect.writes)
        self.locked = self.locked or effect is None or effect.reads


def waits_for(error: sqlite3.Error) -> bool:
    """Somebody else has a lock, and will give it up."""
    return _is_busy(error) and error.sqlite_errorcode != _BUSY_SNAPSHOT


def is_end(statement: str) -> bool:
    """It ends a transaction."""
    return _COMMITS.match(statement) is not None


def takes_a_lock(statement: str) -> bool:
    return bool(statement) and not _TAKES_NO_LOCK.match(statement)


def hasten(connection: sqlite3.Connection) -> float:
    """Let a new connection not wait for locks. Gives the seconds for which it would have."""
    if isinstance(connection, TurnConnection):
        return connection.timeout
    with contextlib.closing(sqlite3.Cursor(connection)) as cursor:
        seconds: float = cursor.execute("PRAGMA busy_timeout").fetchone()[0] / 1000
        cursor.execute("PRAGMA busy_timeout = 0")
    return seconds


def _is_busy(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
