"""Reads the rows of a PostgreSQL database as text, makes relations of them, and puts others in their place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from retrychaos.model.ledger import Cell, Relation, Row
from retrychaos.world.postgres_catalog import Schema, Table, literal
from retrychaos.world.postgres_drivers import LineError
from retrychaos.world.postgres_line import Line
from retrychaos.world.postgres_look import LastLooks
from retrychaos.world.postgres_wire import Text

Rows: TypeAlias = tuple[Text, ...]
"""The rows of one table as text, in an order that depends on nothing but them."""
Located: TypeAlias = Sequence[tuple[str, Text]]
"""Rows with the place where the server keeps each (its ctid)."""

_AT_ONCE = 40
"""Tables read by one statement."""
_MOST_ROWS = 500_000
_CHUNK = 500


_KEPT = """
SELECT DISTINCT relation FROM pg_locks WHERE locktype = 'relation' AND mode = 'AccessExclusiveLock'
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


class Unread(Exception):
    """A table has changed, and cannot be read."""

    def __init__(self, table: Table) -> None:
        super().__init__(table.relation)


class Reader:
    """What was read last, table by table. Rows that were read before are the same objects."""

    def __init__(self, line: Line, schema: Schema) -> None:
        self.rows: dict[int, Rows] = {}
        self.located: dict[int, Located] = {}
        """Empty for tables that were written to since they were read."""
        self._line = line
        self._looks = LastLooks(line)
        self._contended = False
        """A table was once locked against readers."""
        self._schema = schema
        self._parts: dict[str, list[Table]] = {}
        for table in schema.tables.values():
            self._parts.setdefault(table.relation, []).append(table)
        self._known: dict[int, dict[Text, Text]] = {}
        self._cells: dict[int, dict[Text, Row]] = {}
        self._made: dict[object, Relation] = {}
        self._held = 0
        self._selects: dict[frozenset[int], str] = {}
        self._sequences: dict[int, tuple[int, bool]] = {}
        self._last: dict[int, int] = {}
        """The last numbers of sequences that draw ids, as read with the rows."""
        self._floor: dict[int, int] = {}
        """Where a sequence stood when the delivery began: what is above was drawn in it."""
        for oid, sequence in schema.sequences.items():
            self._sequences[oid] = self._exactly(sequence.place)
        self.sequences_are(self._sequences)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def read(self, oids: set[int] | None, *, sure: bool = True, alone: bool = False) -> list[str]:
        """Read these tables (None: all). Returns the names of the relations that they make up.

        sure: where all are read, one that cannot be is as before, unless somebody has looked at it in the transaction
        that changed it. alone: no delivery has anything open, so all can be read. Raises LineError, and Unread.
        """
        tables = [table for oid, table in self._schema.tables.items() if oids is None or oid in oids]
        unread = [table for table in tables if alone or not self._looked(table)]
        kept = self._kept() & self.rows.keys() if self._contended and not alone else set()
        for table in unread:
            if table.oid in kept:
                self._leave(table, sure and oids is None)
        unread = [table for table in unread if table.oid not in kept]
        for start in range(0, len(unread), _AT_ONCE):
            some = unread[start : start + _AT_ONCE]
            try:
                self._take(some, self._line.ask_again(self._select(some)))
            except LineError as problem:
                if not problem.locked or alone:
                    raise
                self._contended = True
                self._read_singly(some, sure and oids is None)
        names = dict.fromkeys(table.relation for table in tables)
        return [name for name in names if all(table.oid in self.rows for table in self._parts[name])]

    def _kept(self) -> set[int]:
        """Tables that are locked against readers, or will be before any reader has his turn. To try takes longer."""
        return {int(str(oid)) for (oid,) in self._line.ask_again(_KEPT)}

    def _looked(self, table: Table) -> bool:
        """It was read in the transaction that has committed since. To try again would be to wait for whoever has it."""
        answer = self._looks.committed(table)
        if answer is not None:
            self._take([table], answer)
            self.located.pop(table.oid)
        return answer is not None

    def _read_singly(self, tables: Sequence[Table], sure: bool) -> None:
        for table in tables:
            try:
                self._take([table], self._line.ask_again(self._select([table])))
            except LineError as problem:
                if not problem.locked or table.oid not in self.rows:
                    raise
                self._leave(table, sure)

    def _leave(self, table: Table, sure: bool) -> None:
        """An open transaction has locked a table against readers: what was read of it before is still true."""
        if not sure or self._looks.in_vain(table):
            raise Unread(table)

    def look(self, raw: Any, oids: Iterable[int]) -> None:
        """A transaction is about to commit to these tables, and then somebody else has them. Raises LineError."""
        tables = [self._schema.tables[oid] for oid in sorted(oids)]
        self._looks.take(raw, [(table, self._select([table])) for table in tables])

    def _select(self, tables: Sequence[Table]) -> str:
        key = frozenset(table.oid for table in tables)
        select = self._selects.get(key)
        if select is None:
            width = max(1, *(len(table.columns) for table in tables))
            parts = []
            for table in tables:
                columns = [f"'{table.oid}'", "ctid::text", *([table.select] if table.select else [])]
                columns += ["NULL"] * (width - len(table.columns))
                parts.append(f"SELECT {', '.join(columns)} FROM ONLY {table.place}")
            for oid in {oid for table in tables for oid in table.ids.values()}:
                sequence = ["'sequence'", f"'{oid}'", "last_value::text", *["NULL"] * (width - 1)]
                parts.append(f"SELECT {', '.join(sequence)} FROM {self._schema.sequences[oid].place}")
            select = self._selects[key] = " UNION ALL ".join(parts)
        return select

    def _take(self, tables: Sequence[Table], answer: list[Text]) -> None:
        found: dict[str, list[tuple[str, Text]]] = {str(table.oid): [] for table in tables}
        widths = {str(table.oid): 2 + len(table.columns) for table in tables}
        for row in answer:
            oid = str(row[0])
            if oid == "sequence":
                self._last[int(str(row[1]))] = int(str(row[2]))
                continue
            found[oid].append((str(row[1]), row[2 : widths[oid]]))
        for table in tables:
            self._looks.drop(table)
            located = found[str(table.oid)]
            known = self._known.setdefault(table.oid, {})
            if len(known) > 4 * len(located) + 1_000:
                known.clear()
                self._cells.pop(table.oid, None)
            located = [(place, known.setdefault(row, row)) for place, row in located]
            self.located[table.oid] = located
            rows = tuple(sorted([row for _, row in located], key=_order))
            if self.rows.get(table.oid) != rows:
                self.rows[table.oid] = rows

    def locate(self, oids: Iterable[int]) -> None:
        """Know where the rows of these tables are kept."""
        missing = {oid for oid in oids if oid not in self.located}
        if missing:
            self.read(missing, alone=True)

    def replaced(self, rows: Mapping[int, Rows]) -> None:
        """These tables hold these rows now, at places unknown."""
        for oid, some in rows.items():
            self.rows[oid] = some
            self.located.pop(oid, None)

    # -- relations ----------------------------------------------------------------------------------------------------

    def relation(self, name: str, before: Relation | None) -> Relation:
        """The relation of that name; the same object as `before`, or as earlier, where it is the same."""
        parts = self._parts[name]
        rows = tuple([cells for table in parts for cells in self._converted(table)])
        if before is not None and before.rows == rows:
            return before
        fresh = self._fresh(parts[0], rows, before)
        key = (name, before, rows, tuple(fresh.items()))
        made = self._made.get(key)
        if made is None:
            self._held += len(rows)
            if self._held > _MOST_ROWS:
                self._made.clear()
                self._held = len(rows)
            made = self._made[key] = _relation(parts[0], rows, before, fresh)
        return made

    def _fresh(self, table: Table, rows: Sequence[Row], before: Relation | None) -> dict[int, frozenset[Cell]]:
        """Ids that are new in a column and were drawn from its sequence in this delivery, not given by the job."""
        fresh: dict[int, frozenset[Cell]] = {}
        for column, sequence in table.ids.items() if before is not None else ():
            assert before is not None
            new = frozenset(row[column] for row in rows) - frozenset(row[column] for row in before.rows)
            if new and sequence in self._floor and sequence in self._last:
                low, high = sorted((self._floor[sequence], self._last[sequence]))
                fresh[column] = frozenset(each for each in new if isinstance(each, int) and low <= each <= high)
        return fresh

    def _converted(self, table: Table) -> list[Row]:
        memo = self._cells.setdefault(table.oid, {})
        out = []
        for row in self.rows[table.oid]:
            cells = memo.get(row)
            if cells is None:
                pairs = zip(row, table.converts, strict=True)
                cells = memo[row] = tuple([None if text is None else convert(text) for text, convert in pairs])
            out.append(cells)
        return out

    # -- sequences ----------------------------------------------------------------------------------------------------

    def sequences(self) -> dict[int, tuple[int, bool]]:
        """Where each sequence stands now: its last value, and whether that was given out. No transaction holds it."""
        if self._schema.sequences:
            for oid, value in self._line.ask_again(
                "SELECT seqrelid, pg_sequence_last_value(seqrelid) FROM pg_sequence WHERE seqrelid >= 16384"
            ):
                number = int(str(oid))
                if number not in self._schema.sequences:
                    continue  # of a temporary table
                if value is not None:
                    self._sequences[number] = (int(value), True)
                elif self._sequences[number][1]:
                    self._sequences[number] = self._exactly(self._schema.sequences[number].place)
        return dict(self._sequences)

    def sequences_are(self, values: Mapping[int, tuple[int, bool]]) -> None:
        """They were put there, and a delivery begins from there."""
        self._sequences.update(values)
        for oid, (value, called) in values.items():
            step = self._schema.sequences[oid].increment
            self._floor[oid] = value + step if called else value

    def _exactly(self, place: str) -> tuple[int, bool]:
        value, called = self._line.ask(f"SELECT last_value::text, is_called::text FROM {place}")[0]
        return int(str(value)), called == "true"


def _relation(
    table: Table, rows: tuple[Row, ...], before: Relation | None, fresh: Mapping[int, frozenset[Cell]]
) -> Relation:
    generated: dict[int, frozenset[Cell]] = {}
    for column in table.ids:
        known = before.generated.get(column, frozenset()) if before else frozenset()
        drawn = (known & frozenset(row[column] for row in rows)) | fresh.get(column, frozenset())
        if drawn:
            generated[column] = drawn
    return Relation(table.relation, table.columns, rows, generated, table.refs, table.keys)


def _order(row: Text) -> tuple[tuple[bool, str], ...]:
    return tuple([(text is None, text or "") for text in row])


def changes(table: Table, located: Located, wanted: Rows) -> list[str]:
    """Statements that put `wanted` in the place of what is there."""
    there = Counter(row for _, row in located)
    missing = list((Counter(wanted) - there).elements())
    extra = there - Counter(wanted)
    places = []
    for place, row in located:
        if extra[row] > 0:
            extra[row] -= 1
            places.append(place)
    statements = []
    if places:
        array = ",".join(f'"{place}"' for place in places)
        statements.append(f"DELETE FROM ONLY {table.place} WHERE ctid = ANY ('{{{array}}}'::tid[])")
    if missing and not table.stored:
        statements += [f"INSERT INTO {table.place} DEFAULT VALUES"] * len(missing)
        return statements
    for start in range(0, len(missing), _CHUNK):
        rows = ", ".join(
            "(" + ", ".join(literal(row[at]) for at in table.stored) + ")" for row in missing[start : start + _CHUNK]
        )
        statements.append(f"INSERT INTO {table.place} ({table.into}) OVERRIDING SYSTEM VALUE VALUES {rows}")
    return statements
