"""A cursor class for psycopg2 that reports each statement, and how both drivers say what a cursor has run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

Statement: TypeAlias = Callable[[Any, Any, Any, Any], AbstractContextManager[None]]
"""(connection, query, values, cursor): what a statement runs inside of."""


def cursor_class(base: Any, statement: Statement, is_seen: Callable[[], bool]) -> Any:
    """A subclass of `base` (psycopg2's own if None)."""
    from psycopg2 import extensions

    class Cursor(base or extensions.cursor):  # type: ignore[misc]
        def execute(self, query: Any, vars: Any = None) -> Any:
            with statement(self.connection, query, vars, self):
                return super().execute(query, vars)

        def executemany(self, query: Any, vars_list: Any) -> Any:
            if is_seen() and self.connection.autocommit:
                for row in vars_list:  # each is committed by itself
                    self.execute(query, row)
                return None
            rows = list(vars_list)
            with statement(self.connection, query, rows, self):
                return super().executemany(query, rows)

        def callproc(self, procname: Any, parameters: Any = None) -> Any:
            with statement(self.connection, f"CALL {procname}", parameters, self):
                return super().callproc(procname, parameters) if parameters else super().callproc(procname)

        def copy_expert(self, sql: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
            with statement(self.connection, sql, None, self):
                return super().copy_expert(sql, file, *args, **kwargs)

        def copy_from(self, file: Any, table: Any, *args: Any, **kwargs: Any) -> Any:
            with statement(self.connection, f"COPY {table} FROM STDIN", None, self):
                return super().copy_from(file, table, *args, **kwargs)

        def copy_to(self, file: Any, table: Any, *args: Any, **kwargs: Any) -> Any:
            with statement(self.connection, f"COPY {table} TO STDOUT", None, self):
                return super().copy_to(file, table, *args, **kwargs)

    return Cursor


def query_text(query: Any, raw: Any) -> str:
    if isinstance(query, str):
        return query
    if isinstance(query, bytes):
        return query.decode("utf-8", "replace")
    return str(query.as_string(raw)) if hasattr(query, "as_string") else str(query)


def tags(cursor: Any) -> list[str]:
    """What the server called the commands that a cursor has just run."""
    results = getattr(cursor, "_results", None)
    if results:
        statuses = [result.command_status for result in results[:8] + results[-1:]]
        return [status.decode() for status in statuses if status]
    status = getattr(cursor, "statusmessage", None)
    return [status] if status else []
