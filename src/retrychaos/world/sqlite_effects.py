"""What a SQL statement may write, as SQLite itself says: the bytecode of EXPLAIN, triggers and cascades included."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DDL = frozenset({"ParseSchema", "SetCookie", "Destroy", "DropTable", "CreateBtree", "VUpdate", "VCreate", "VDestroy"})
_READS = frozenset({"SELECT", "VALUES", "EXPLAIN"})


@dataclass(frozen=True)
class Effect:
    """What a statement may write, as its bytecode says.

    tables: names, or None for "anything". generates: tables in which it draws row ids itself. given: tables in which
    it may take row ids from the statement. writes: it takes the lock of a writer. reads: that of a reader. fires: it
    runs subprograms (triggers, foreign key actions). ends: it may end a transaction.
    """

    tables: frozenset[str] | None = frozenset()
    generates: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()
    fires: bool = False
    ends: bool = False
    writes: bool = False
    reads: bool = True


_NOTHING = Effect()
ANYTHING = Effect(tables=None, writes=True)
"""It may write to any table."""


def explain(
    connection: sqlite3.Connection, statement: str, parameters: Any, roots: Mapping[int, str], number: int
) -> Effect:
    """The effect of a statement. `roots`: root page -> table. `number`: another one at each call.

    The number makes every text new: EXPLAIN does not look whether a statement in the driver's cache is older than the
    schema, and then reads freed memory.
    """
    words = statement.lstrip(" \t\r\n(").split(None, 1)
    if not words or words[0].upper() in _READS:
        return _NOTHING
    try:
        program = connection.execute(f"EXPLAIN /* {number} */ {statement}", parameters or ()).fetchall()
    except sqlite3.Error:
        # Not visible from here (a table of an open transaction, a temporary table): expect anything.
        return Effect(tables=None, ends=True, writes=True)
    codes = {str(row[1]) for row in program}
    if codes & _DDL:
        return Effect(tables=None, ends=True, writes=True)
    locks = [row for row in program if row[1] == "Transaction" and row[2] != 1]  # 1: temporary tables
    tables: set[str] = set()
    given: set[tuple[str, int]] = set()
    drawn: set[tuple[str, int]] = set()
    cursors: dict[int, str] = {}
    for row in program:
        code, p1, p2, p3 = str(row[1]), row[2], row[3], row[4]
        if code in ("OpenWrite", "Clear"):
            root, database = (p2, p3) if code == "OpenWrite" else (p1, p2)
            if database == 1:
                continue  # temporary tables die with the process
            owner = roots.get(root)
            if owner is None:
                return ANYTHING
            tables.add(owner)
            cursors[p1] = owner
        elif code == "NewRowid" and p1 in cursors:
            drawn.add((cursors[p1], p2))
        elif code == "MustBeInt":
            given |= {(owner, p1) for owner in cursors.values()}
    return Effect(
        frozenset(tables),
        generates=frozenset(owner for owner, register in drawn - given),
        given=frozenset(owner for owner, register in drawn & given),
        fires="Program" in codes,
        ends=bool(codes & {"AutoCommit", "Savepoint"}),
        writes=any(row[3] for row in locks),
        reads=bool(locks),
    )
