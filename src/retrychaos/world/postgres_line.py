"""The harness's own connection to a PostgreSQL database: to look and to put back, never to be seen by the hooks.

Rows come as the text that PostgreSQL itself writes, so that no adapter of the user's is involved.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Any, ClassVar

from retrychaos.model.errors import WorldError
from retrychaos.world.postgres_drivers import PATIENCE, LineError, dialler, finish, run
from retrychaos.world.postgres_wire import Text

_AS_TEXT = (
    "row_security = off",
    "client_encoding = 'UTF8'",
    "standard_conforming_strings = on",
    "TimeZone = 'UTC'",
    "DateStyle = 'ISO, YMD'",
    "IntervalStyle = 'postgres'",
    "bytea_output = 'hex'",
    "extra_float_digits = 1",
)
"""Settings that decide what a value looks like as text."""
_SETTINGS = (
    "SET session_replication_role = replica",  # no trigger and no foreign key stands in the way of putting back
    "SET synchronous_commit = off",
    "SET lock_timeout = '300ms'",
    "SET statement_timeout = 0",
    "SET idle_in_transaction_session_timeout = 0",
    "SET default_transaction_read_only = off",
    "SET default_transaction_isolation = 'read committed'",
    "SET jit = off",
    *(f"SET {setting}" for setting in _AS_TEXT),
)
READING = "; ".join(f"SET LOCAL {setting}" for setting in _AS_TEXT)
"""Lets another connection read in this transaction what the harness would read."""
_MOST_PREPARED = 500
_PATIENCE = PATIENCE
_SHORT = 1.0
"""Seconds in which not a byte comes from a server before it is given up, for the first time and later."""


class Line:
    """A connection of the harness to the database that a job's connection goes to."""

    _all: ClassVar[weakref.WeakSet[Line]] = weakref.WeakSet()
    _orphans: ClassVar[list[Any]] = []
    """In a forked child: connections of the parent. They must never be closed from here, that would end its session."""

    def __init__(self, like: Any) -> None:
        self._dial = dialler(like)
        self.silent = False
        """The server has once left a question unanswered."""
        self._raw: Any = None
        self._prepared: dict[str, str] = {}
        Line._all.add(self)

    def ask(self, sql: str) -> list[Text]:
        """The rows of the last of several statements, which run as one transaction. Raises LineError."""
        try:
            patience = _SHORT if self.silent else _PATIENCE
            if self._raw is None:
                self._raw = self._dial(patience)
                for setting in _SETTINGS:
                    self._set(setting)
            return run(self._raw, sql, patience)
        except LineError as problem:
            self.silent = self.silent or problem.silent
            if problem.silent:
                self.hang_up()
            raise
        except BaseException:
            self.hang_up()  # interrupted in the middle of an answer
            raise

    def ask_again(self, sql: str) -> list[Text]:
        """As ask, for one statement that is asked often: the server plans it only once."""
        name = self._prepared.get(sql)
        if name is None or self._raw is None:
            if self._raw is None or len(self._prepared) > _MOST_PREPARED:
                self._prepared.clear()
                self.ask("DEALLOCATE ALL")
            name = f"retrychaos_{len(self._prepared)}"
            self.ask(f"PREPARE {name} AS {sql}")
            self._prepared[sql] = name
        return self.ask(f"EXECUTE {name}")

    def _set(self, setting: str) -> None:
        try:
            run(self._raw, setting)
        except LineError as problem:
            self.hang_up()
            if "session_replication_role" not in setting:
                raise
            raise WorldError(
                f"the job's database role may not set session_replication_role ({problem}), and without it rows cannot "
                "be put back past triggers and foreign keys. Use a superuser for tests, or let a superuser run: "
                "GRANT SET ON PARAMETER session_replication_role TO the role of the job (PostgreSQL 15 or newer)."
            ) from problem

    def hang_up(self) -> None:
        raw, self._raw = self._raw, None
        if raw is not None:
            with contextlib.suppress(Exception):
                finish(raw)

    def drop(self) -> None:
        raw, self._raw = self._raw, None
        if raw is not None:
            Line._orphans.append(raw)


def _drop_lines() -> None:
    for line in list(Line._all):
        line.drop()


os.register_at_fork(after_in_child=_drop_lines)
