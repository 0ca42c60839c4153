"""One connection of a job to a SQLite database, and how the harness itself uses connections of others."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from retrychaos.model.errors import WorldError
from retrychaos.world.sqlite_effects import Effect
from retrychaos.world.sqlite_seen import SeenConnection


@dataclass(eq=False)
class Handle:
    """One connection of the job to the database, tracked while a delivery runs."""

    refer: Callable[[], sqlite3.Connection | None]
    """Gives the connection. That of a job which forgets to close one is gone with its last use."""
    record: Any
    """SQLAlchemy's connection record, to invalidate it at the end of the delivery; None for a raw one."""
    inherited: bool = False
    """It was in a transaction when the check began: the user's, and left alone."""
    announced: bool = False
    """A statement is running that SQLAlchemy has told us of: the trace callback looks away."""
    rows: int = 0
    """It is an executemany that commits row by row: how many rows have started, plus one. 0: it is not."""
    committing: bool = False
    waiting: bool = False
    """Its statement waits for another delivery: it has done nothing yet."""
    owner: object = None
    """The delivery that it belongs to, where several run."""
    synchronous: int | None = None
    """What that was set to, where the connection may live on after the check."""
    effects: list[Effect] = field(default_factory=list)
    """What was written here since the last look at the committed state."""

    @property
    def connection(self) -> sqlite3.Connection | None:
        return self.refer()

    @property
    def in_transaction(self) -> bool:
        connection = self.connection
        try:
            return connection is not None and connection.in_transaction
        except sqlite3.ProgrammingError:  # closed: whatever it had open is gone
            return False


def untrace(connection: sqlite3.Connection | None) -> None:
    """Nothing is reported any more; what the job has set is in its place again."""
    if connection is None:
        return
    users = None
    if isinstance(connection, SeenConnection):
        connection.untie()
        users = connection.users_trace
    with contextlib.suppress(sqlite3.Error):
        sqlite3.Connection.set_trace_callback(connection, users)


def ask(connection: sqlite3.Connection, sql: str) -> list[Any]:
    """Plain rows, whatever factories and overridden methods the connection has."""
    cursor = sqlite3.Cursor(connection)
    factory = connection.text_factory
    connection.text_factory = str
    try:
        return cursor.execute(sql).fetchall()
    finally:
        connection.text_factory = factory
        cursor.close()


def identify(connection: sqlite3.Connection) -> str | None:
    """The real path of the file behind a connection, or None for a database in memory.

    Raises WorldError if other databases are attached: their changes would not be seen.
    """
    path = None
    for _, schema, file in ask(connection, "PRAGMA database_list"):
        if schema == "main":
            path = os.path.realpath(file) if file else None
        elif schema != "temp":
            raise WorldError(
                f"database {file or schema!r} is attached to the job's connection as {schema!r}. SQLite does not tell "
                "which of several databases a transaction changed, so a check there could be wrong. Give the job one "
                "engine for each database instead of ATTACH."
            )
    return path
