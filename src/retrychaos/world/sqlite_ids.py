"""Makes a SQLite database draw other row ids: by comparing two runs, places where ids are kept are then found.

Only tables with AUTOINCREMENT have a counter that can be moved. The others get one, by a change of their text in the
schema; it lasts until the database is restored, which is before the next delivery.
"""

from __future__ import annotations

import functools
import re
import sqlite3
from collections.abc import Sequence

_COLUMN = re.compile(r"(\bINTEGER\s+(?:NOT\s+NULL\s+)?PRIMARY\s+KEY\b(?:\s+ASC\b)?)(?!\s+AUTOINCREMENT)", re.I)
_CONSTRAINT = re.compile(r"(\bPRIMARY\s+KEY\s*\(\s*[^(),]+?)\s*\)", re.I)


def shift_row_ids(connection: sqlite3.Connection, tables: Sequence[str], by: int) -> None:
    """Move the counters of `tables` up by multiples of `by`, disjoint per table."""
    _give_counters(connection, tables)
    counted = {
        name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE sql LIKE '%AUTOINCREMENT%'")
    }
    for number, name in enumerate(sorted(counted & set(tables)), start=1):
        quoted = name.replace('"', '""')
        highest = connection.execute(f'SELECT coalesce(max(rowid), 0) FROM "{quoted}"').fetchone()[0]
        row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (name,)).fetchone()
        if row is None:
            connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", (name, highest + by * number))
        else:
            moved = max(row[0], highest) + by * number
            connection.execute("UPDATE sqlite_sequence SET seq = ? WHERE name = ?", (moved, name))
    connection.commit()


def _give_counters(connection: sqlite3.Connection, tables: Sequence[str]) -> None:
    changes: list[tuple[str, str]] = []
    for name, sql in connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall():
        if name in tables and "AUTOINCREMENT" not in sql.upper():
            changed = _COLUMN.sub(r"\1 AUTOINCREMENT", sql, count=1)
            if changed == sql:
                changed = _CONSTRAINT.sub(r"\1 AUTOINCREMENT)", sql, count=1)
            if changed != sql and _is_valid(changed):
                changes.append((changed, name))
    if not changes:
        return
    # The table sqlite_sequence comes with the first table that needs it, and stays.
    connection.execute("CREATE TABLE retrychaos_counter (id INTEGER PRIMARY KEY AUTOINCREMENT)")
    connection.execute("DROP TABLE retrychaos_counter")
    version = connection.execute("PRAGMA schema_version").fetchone()[0]
    connection.execute("PRAGMA writable_schema = ON")
    try:
        connection.executemany("UPDATE sqlite_master SET sql = ? WHERE type = 'table' AND name = ?", changes)
        connection.execute(f"PRAGMA schema_version = {version + 1}")
    finally:
        connection.execute("PRAGMA writable_schema = OFF")


@functools.lru_cache(maxsize=256)  # the tables of a test suite, over and over
def _is_valid(sql: str) -> bool:
    """SQLite takes the text. A schema that it does not take would make the database unreadable."""
    scratch = sqlite3.connect(":memory:")
    try:
        scratch.execute(sql)
    except sqlite3.Error:
        return False
    finally:
        scratch.close()
    return True
