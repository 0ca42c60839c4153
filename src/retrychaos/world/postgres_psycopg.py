"""Hooks on psycopg 3, which is written in Python: its classes get other methods for a while."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from retrychaos.model.errors import WorldError
from retrychaos.world.postgres_async import AsyncPsycopg
from retrychaos.world.postgres_cursors import query_text
from retrychaos.world.postgres_drivers import driver_of, standing
from retrychaos.world.postgres_steps import Steps
from retrychaos.world.postgres_wire import IDLE
from retrychaos.world.resource import Stage


class Psycopg:
    """The hooks, to be put in the place of methods."""

    def __init__(self, stage: Stage, steps: Steps) -> None:
        self._stage = stage
        self._steps = steps

    def hooks(self) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
        """(class or module, name, what makes a hook of the original)"""
        import psycopg
        from psycopg._connection_base import BaseConnection

        yield psycopg.Cursor, "execute", self.execute
        yield psycopg.Cursor, "executemany", self.execute
        yield psycopg.Cursor, "stream", self.stream
        yield psycopg.Cursor, "copy", self.copy
        yield psycopg.ServerCursor, "execute", self.execute
        fetching = next(each for each in psycopg.ServerCursor.__mro__ if "_fetch_gen" in vars(each))
        yield fetching, "_fetch_gen", self.fetch
        yield psycopg.Connection, "pipeline", self.pipeline
        yield BaseConnection, "_exec_command", self.command
        mine = AsyncPsycopg(self._stage, self._steps)
        yield psycopg.AsyncCursor, "execute", mine.execute
        yield psycopg.AsyncCursor, "executemany", mine.execute
        yield psycopg.AsyncCursor, "stream", mine.stream
        yield psycopg.AsyncCursor, "copy", mine.copy
        yield psycopg.AsyncServerCursor, "execute", mine.execute
        yield psycopg.AsyncConnection, "pipeline", self.pipeline
        yield psycopg.AsyncConnection, "commit", mine.commit
        yield psycopg.AsyncTransaction, "__aexit__", mine.leave
        yield psycopg.AsyncConnection, "wait", mine.wait
        yield psycopg.waiting, "wait_conn_async", mine.wait_conn_async

    def execute(self, original: Any) -> Any:
        @functools.wraps(original)
        def execute(cursor: Any, query: Any, params: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self._steps.looks_away():
                return original(cursor, query, params, *args, **kwargs)
            if not isinstance(params, dict | list | tuple | None) and original.__name__ == "executemany":
                params = list(params)
            with self._steps.statement(cursor._conn, query, params, cursor):
                return original(cursor, query, params, *args, **kwargs)

        return execute

    def stream(self, original: Any) -> Any:
        @functools.wraps(original)
        def stream(cursor: Any, query: Any, params: Any = None, *args: Any, **kwargs: Any) -> Any:
            with self._steps.statement(cursor._conn, query, params, None):
                rows = list(original(cursor, query, params, *args, **kwargs))
            self._steps.streamed(rows)
            yield from rows

        return stream

    def copy(self, original: Any) -> Any:
        @functools.wraps(original)
        @contextlib.contextmanager
        def copy(cursor: Any, statement: Any, params: Any = None, **kwargs: Any) -> Iterator[Any]:
            with self._steps.statement(cursor._conn, statement, params, cursor):
                with original(cursor, statement, params, **kwargs) as copying:
                    yield copying

        return copy

    def fetch(self, original: Any) -> Any:
        """Rows of a cursor in the server: only now it looks for them, and may lock them."""

        @functools.wraps(original)
        def _fetch_gen(cursor: Any, number: int | None) -> Any:
            with self._steps.statement(cursor._conn, f"FETCH {number or 'ALL'}", None, None):
                rows = yield from original(cursor, number)
            self._steps.streamed(rows)
            return rows

        return _fetch_gen

    def pipeline(self, original: Any) -> Any:
        @functools.wraps(original)
        def pipeline(raw: Any) -> Any:
            if self._steps.followed(raw) is not None:
                self._stage.refuse(
                    WorldError(
                        "the job uses psycopg's pipeline mode: its statements are sent together, so what a crash "
                        "between them leaves cannot be seen. Do without pipeline() under the check."
                    )
                )
            return original(raw)

        return pipeline

    def command(self, original: Any) -> Any:
        @functools.wraps(original)
        def _exec_command(raw: Any, command: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._steps.looks_away() and driver_of(raw) == "psycopg":
                if standing(raw) == IDLE:
                    self._steps.followed(raw)  # the command may begin a transaction
                if command == b"COMMIT":
                    with self._steps.commit(raw):
                        return (yield from original(raw, command, *args, **kwargs))
                if query_text(command, raw).startswith(("PREPARE TRANSACTION", "COMMIT PREPARED")):
                    found = self._steps.followed(raw)
                    if found is not None:
                        self._steps.refuse_two_phases(found[0])
            result = yield from original(raw, command, *args, **kwargs)
            return result

        return _exec_command
