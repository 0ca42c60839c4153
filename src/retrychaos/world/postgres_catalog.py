"""What a PostgreSQL database is made of, as its catalog says: tables, how to read and write their rows, sequences."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from retrychaos.model.errors import WorldError
from retrychaos.world.postgres_cells import Convert, converter
from retrychaos.world.postgres_line import Line
from retrychaos.world.postgres_wire import Text

_USER_SCHEMAS = "n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname !~ '^pg_(toast|temp)'"

_RELATIONS = f"""
SELECT c.oid, n.nspname, c.relname, c.relkind, c.relispopulated,
    CASE WHEN c.relispartition THEN pg_partition_root(c.oid) ELSE c.oid END
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'm', 'f', 'S') AND c.relpersistence <> 't' AND {_USER_SCHEMAS}
ORDER BY c.relkind = 'p' DESC, c.oid
"""
_COLUMNS = """
SELECT a.attrelid, a.attnum, a.attname, a.attgenerated, coalesce(b.typname, t.typname), coalesce(b.typtype, t.typtype),
    (SELECT e.typname FROM pg_type e WHERE e.oid = coalesce(b.typelem, t.typelem) AND e.typdelim = ','
        AND coalesce(b.typcategory, t.typcategory) = 'A'),
    (SELECT o.oid::regproc FROM pg_cast k, pg_proc o WHERE k.castsource IN (t.oid, b.oid) AND k.casttarget = 25
        AND k.castmethod = 'f' AND k.oid >= 16384 AND o.oid = coalesce(b.typoutput, t.typoutput))
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid LEFT JOIN pg_type b ON b.oid = t.typbasetype
WHERE a.attrelid >= 16384 AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attrelid, a.attnum
"""
_ID_COLUMNS = """
SELECT d.adrelid, d.adnum, p.refobjid FROM pg_attrdef d
    JOIN pg_depend p ON p.classid = 'pg_attrdef'::regclass AND p.objid = d.oid AND p.refclassid = 'pg_class'::regclass
    JOIN pg_sequence s ON s.seqrelid = p.refobjid
UNION SELECT p.refobjid, p.refobjsubid, p.objid FROM pg_depend p JOIN pg_sequence s ON s.seqrelid = p.objid
    WHERE p.classid = 'pg_class'::regclass AND p.refclassid = 'pg_class'::regclass AND p.deptype = 'i'
"""
_CONSTRAINTS = """
SELECT contype, conrelid, array_to_string(conkey, ' '), confrelid FROM pg_constraint
WHERE contype IN ('p', 'f') AND conrelid >= 16384
"""
_ALL = "SELECT oid FROM pg_class WHERE oid >= 16384 AND relpersistence <> 't'"
_SEQUENCES = "SELECT seqrelid, seqincrement, seqmin, seqmax FROM pg_sequence WHERE seqrelid >= 16384"
_DEFERRED = "SELECT DISTINCT tgrelid FROM pg_trigger WHERE tgdeferrable AND NOT tgisinternal"
_ALWAYS = """
SELECT tgname, tgrelid::regclass FROM pg_trigger WHERE tgenabled IN ('A', 'R')
UNION ALL SELECT rulename, ev_class::regclass FROM pg_rewrite WHERE ev_enabled IN ('A', 'R')
"""
_SOURCES = """
SELECT 'function', oid, proname, prosrc FROM pg_proc WHERE oid >= 16384
UNION ALL SELECT 'view', oid, relname, pg_get_viewdef(oid) FROM pg_class WHERE relkind IN ('v', 'm') AND oid >= 16384
UNION ALL SELECT 'trigger', t.tgrelid, p.proname, '' FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid
    WHERE NOT t.tgisinternal
"""

_TEMPORARY = "(SELECT oid FROM pg_class WHERE relpersistence = 't')"
_TEMPORARY_SCHEMAS = "(SELECT oid FROM pg_namespace WHERE nspname ~ '^pg_(toast_)?temp_')"
_SUM = "coalesce(sum(xmin::text::bigint), 0), count(*)"
MARK = (
    "SELECT concat_ws(' ', "
    + ", ".join(
        f"(SELECT concat({what}) FROM {table})"
        for what, table in (
            (
                "sum(hashtextextended(concat_ws(' ', oid, relname, relkind, relnamespace, relpersistence, "
                "relispartition, "
                "relchecks, relrowsecurity, relforcerowsecurity, reloptions, relowner), 0))",
                "pg_class WHERE oid >= 16384 AND relpersistence <> 't' AND relkind <> 't'",
            ),
            (_SUM, f"pg_attribute WHERE attrelid >= 16384 AND attrelid NOT IN {_TEMPORARY}"),
            (_SUM, f"pg_attrdef WHERE adrelid NOT IN {_TEMPORARY}"),
            (_SUM, f"pg_constraint WHERE oid >= 16384 AND connamespace NOT IN {_TEMPORARY_SCHEMAS}"),
            (_SUM, f"pg_index WHERE indexrelid >= 16384 AND indrelid NOT IN {_TEMPORARY}"),
            ("sum(hashtextextended(t::text, 0))", f"pg_trigger t WHERE tgrelid NOT IN {_TEMPORARY}"),
            (_SUM, f"pg_type WHERE oid >= 16384 AND typnamespace NOT IN {_TEMPORARY_SCHEMAS}"),
            (_SUM, f"pg_namespace WHERE oid >= 16384 AND oid NOT IN {_TEMPORARY_SCHEMAS}"),
            (_SUM, f"pg_sequence WHERE seqrelid NOT IN {_TEMPORARY}"),
            (_SUM, "pg_proc WHERE oid >= 16384"),
            (_SUM, "pg_rewrite WHERE oid >= 16384"),
            (_SUM, "pg_enum"),
            (_SUM, "pg_policy"),
            (_SUM, "pg_inherits"),
            (_SUM, "pg_extension"),
            (_SUM, "pg_largeobject_metadata"),
            ("count(*)", "pg_prepared_xacts WHERE database = current_database()"),
        )
    )
    + ")"
)
"""Another text for another schema. Asked of a job's connection it sees what that has not committed yet; temporary
tables do not count, and neither does what TRUNCATE and VACUUM change. Prepared transactions and large objects are in
it, too."""

_TIME = r"now|current_timestamp|current_time|localtime|localtimestamp|(?:clock|statement|transaction)_timestamp"
_WORDS = {
    "time": rf"\b(?:{_TIME}|current_date|timeofday)\b|'(?:now|today|tomorrow|yesterday)'",
    "notify": r"\b(?:notify|pg_notify)\b",
    "outside": r"\b(?:dblink\w*|lo_\w+|pg_terminate_backend|pg_cancel_backend|pg_reload_conf|pg_promote|pg_logical_emit"
    r"_message|alter\s+system|pg_file_\w+|pg_execute_server_program)\b|\bcopy\b.*\bto\s+(?:program\b|')",
    "uuid": r"\b(?:gen_random_uuid|uuid_generate_v4|uuidv4)\b",
}
_CATEGORIES = {name: re.compile(pattern, re.I | re.S) for name, pattern in _WORDS.items()}


@dataclass(frozen=True, eq=False)
class Table:
    """A table (or partition, or materialized view) that holds rows, and how they are read and written.

    relation: the name under which its rows are compared; partitions have that of their parent.
    """

    oid: int
    relation: str
    place: str
    kind: str
    columns: tuple[str, ...]
    select: str
    stored: tuple[int, ...]
    """Indexes of the columns that can be written; generated ones come by themselves."""
    into: str
    converts: tuple[Convert, ...]
    ids: Mapping[int, int]
    """Column index -> sequence that draws its values."""
    refs: Mapping[int, str]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class Sequence:
    place: str
    increment: int
    lowest: int
    highest: int


class Schema:
    """The catalog as read at one time. Raises WorldError if rows could not be put back exactly."""

    def __init__(self, line: Line) -> None:
        self.mark = line.ask(MARK)[0][0]
        self.tables: dict[int, Table] = {}
        self.foreign: dict[int, str] = {}
        """Tables whose rows are elsewhere."""
        self.empty: dict[int, str] = {}
        """Materialized views that hold nothing yet."""
        self.oids = {int(str(row[0])) for row in line.ask(_ALL)}
        """Everything that a lock may name: tables, indexes and so on."""
        self.database = int(str(line.ask("SELECT oid FROM pg_database WHERE datname = current_database()")[0][0]))
        self.sequences: dict[int, Sequence] = {}
        self._read(line)
        self._words = dict(_CATEGORIES)
        self.triggers: dict[str, set[int]] = defaultdict(set)
        """``notify``, ``outside`` or ``uuid`` -> tables with a trigger that does such a thing."""
        self._read_sources(line.ask(_SOURCES))
        self.deferred = {int(str(table)) for (table,) in line.ask(_DEFERRED)}
        """Tables with a trigger that may run when the transaction commits, and write anywhere."""
        defaults = line.ask("SELECT pg_get_expr(adbin, adrelid) FROM pg_attrdef")
        self.draws_uuids = bool(self.triggers["uuid"]) or any(self.mentions("uuid", str(text)) for (text,) in defaults)
        """At random, as a default or by a trigger."""
        always = line.ask(_ALWAYS)
        if always:
            raise WorldError(
                f"{always[0][0]} on {always[0][1]} fires always (ENABLE ALWAYS or REPLICA), so rows cannot be put back "
                "without it. Every delivery has to start from an exact state. Remedy: ENABLE TRIGGER in the tests."
            )

    def mentions(self, category: str, text: str) -> bool:
        """Does a statement use the server's ``time``, a random ``uuid``, ``notify``, or reach ``outside``; perhaps
        through a function?"""
        return self._words[category].search(text) is not None

    def _read(self, line: Line) -> None:
        columns: dict[str, list[Text]] = defaultdict(list)
        for row in line.ask(_COLUMNS):
            columns[str(row[0])].append(row)
        ids: dict[str, dict[str, int]] = defaultdict(dict)
        for table, number, sequence in line.ask(_ID_COLUMNS):
            ids[str(table)][str(number)] = int(str(sequence))
        relations = line.ask(_RELATIONS)
        names = {str(row[0]): _name(str(row[1]), str(row[2])) for row in relations}
        keys, refs = self._constraints(line.ask(_CONSTRAINTS), names)
        drawn = {str(row[0]): row for row in line.ask(_SEQUENCES)}
        for oid, schema, name, kind, populated, root in relations:
            place = f"{quote(str(schema))}.{quote(str(name))}"
            if kind == "S":
                row = drawn[str(oid)]
                self.sequences[int(str(oid))] = Sequence(place, *(int(str(number)) for number in row[1:]))
            elif kind == "f":
                self.foreign[int(str(oid))] = names[str(oid)]
            elif kind == "m" and populated not in ("t", "true"):
                self.empty[int(str(oid))] = names[str(oid)]
            elif kind == "r" or kind == "m":
                # Columns in the order of the parent: that of a partition may be another one.
                order = [row[2] for row in columns[str(root)]]
                own = sorted(columns[str(oid)], key=lambda row: order.index(row[2]) if row[2] in order else -1)
                self._add(int(str(oid)), str(root), names, place, str(kind), own, columns[str(root)], ids, keys, refs)

    def _add(
        self,
        oid: int,
        root: str,
        names: Mapping[str, str],
        place: str,
        kind: str,
        own: list[Text],
        shown: list[Text],
        ids: Mapping[str, Mapping[str, int]],
        keys: Mapping[str, list[str]],
        refs: Mapping[str, Mapping[str, str]],
    ) -> None:
        numbers = [str(row[1]) for row in shown]
        columns = tuple(str(row[2]) for row in own)
        stored = tuple(at for at, row in enumerate(own) if not row[3])
        select = ", ".join(_as_text(row) for row in own)
        drawn = {**ids.get(root, {}), **({} if root == str(oid) else ids.get(str(oid), {}))}
        self.tables[oid] = Table(
            oid,
            names.get(root, names[str(oid)]),
            place,
            kind,
            columns,
            select,
            stored,
            ", ".join(quote(columns[at]) for at in stored),
            tuple(converter(str(row[4]), str(row[5]), row[6]) for row in own),
            {numbers.index(number): sequence for number, sequence in drawn.items() if number in numbers},
            {numbers.index(number): target for number, target in refs.get(root, {}).items() if number in numbers},
            tuple(numbers.index(number) for number in keys.get(root, ()) if number in numbers),
        )

    def _constraints(
        self, rows: Iterable[Text], names: Mapping[str, str]
    ) -> tuple[dict[str, list[str]], dict[str, dict[str, str]]]:
        keys: dict[str, list[str]] = {}
        refs: dict[str, dict[str, str]] = defaultdict(dict)
        for kind, table, numbers, target in rows:
            parts = str(numbers).split()
            if kind == "p":
                keys[str(table)] = parts
            elif len(parts) == 1 and str(target) in names:
                refs[str(table)][parts[0]] = names[str(target)]
        return keys, refs

    def _read_sources(self, rows: list[Text]) -> None:
        """Functions and views that use the server's time and so on: their names count as such words, too."""
        for category in _CATEGORIES:
            found: set[str] = set()
            while True:
                more = {
                    str(name)
                    for kind, _, name, source in rows
                    if kind != "trigger" and name not in found and self._words[category].search(str(source))
                }
                if not more:
                    break
                found |= more
                words = "|".join(re.escape(name) for name in sorted(found))
                self._words[category] = re.compile(rf"{_WORDS[category]}|\b(?:{words})\b", re.I | re.S)
            self.triggers[category] = {
                int(str(table)) for kind, table, name, _ in rows if kind == "trigger" and name in found
            }


def quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def literal(text: str | None) -> str:
    return "NULL" if text is None else "'" + text.replace("'", "''") + "'"


def _name(schema: str, name: str) -> str:
    return name if schema == "public" else f"{schema}.{name}"


def _as_text(column: Text) -> str:
    name = quote(str(column[2]))
    # A cast that somebody made to text may leave things out: then by the type's own output function.
    return f"textin({column[7]}({name}))" if column[7] else f"{name}::text"
