"""What a transaction is about to commit to tables that a waiting delivery will have locked against readers by then.

Whoever waits for an ACCESS EXCLUSIVE lock gets it in the moment of the COMMIT, before anybody else can read the table.
So it is read before, by the transaction itself, and counts if the server says later that it has committed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from retrychaos.world.postgres_catalog import Table
from retrychaos.world.postgres_drivers import LineError, run
from retrychaos.world.postgres_line import READING, Line
from retrychaos.world.postgres_wire import Text

_LEVEL = "SELECT current_setting('transaction_isolation'), txid_current()::text, txid_current_snapshot()::text"

_DEFERRED = "SET LOCAL lock_timeout = '300ms'; SET CONSTRAINTS ALL IMMEDIATE"
"""What a COMMIT does first, unless it has to wait for somebody."""


class LastLooks:
    """By table: what was read last in a transaction before its COMMIT."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._taken: dict[int, tuple[str, list[Text] | None]] = {}

    def take(self, raw: Any, tables: Sequence[tuple[Table, str]]) -> None:
        """Read these tables, each with its query, in the transaction that is open on the connection."""
        level, number, snapshot = map(str, run(raw, _LEVEL)[0])
        # To look at the level SERIALIZABLE would be noticed by others.
        sees_all = level == "read committed" or (level == "repeatable read" and self._is_of_now(snapshot))
        for table, select in tables:
            self._taken[table.oid] = (number, None)
            if not sees_all:
                continue
            # Back there, settings are those of the job again, and what was deferred is still to be done.
            run(raw, "SAVEPOINT retrychaos")
            with contextlib.suppress(LineError):
                self._taken[table.oid] = (number, run(raw, f"{READING}; {_DEFERRED}; {select}"))
            run(raw, "ROLLBACK TO SAVEPOINT retrychaos; RELEASE SAVEPOINT retrychaos")

    def committed(self, table: Table) -> list[Text] | None:
        """What the last one has seen that has looked at the table, if it has seen it and has committed."""
        number, answer = self._taken.get(table.oid, ("", None))
        return answer if answer is not None and self._is_committed(number) else None

    def in_vain(self, table: Table) -> bool:
        """The last one that would have looked at the table could not, and has committed."""
        number, answer = self._taken.get(table.oid, ("", None))
        return answer is None and bool(number) and self._is_committed(number)

    def drop(self, table: Table) -> None:
        """The table was read since."""
        self._taken.pop(table.oid, None)

    def _is_of_now(self, snapshot: str) -> bool:
        """Nobody has committed since that snapshot was taken."""
        oldest = snapshot.partition(":")[0]
        missed = (
            f"SELECT 1 FROM generate_series({oldest}, txid_snapshot_xmax(txid_current_snapshot()) - 1) AS id "
            f"WHERE NOT txid_visible_in_snapshot(id, '{snapshot}') AND txid_status(id) = 'committed' LIMIT 1"
        )
        return not self._line.ask(missed)

    def _is_committed(self, number: str) -> bool:
        return self._line.ask(f"SELECT txid_status({number})")[0][0] == "committed"
