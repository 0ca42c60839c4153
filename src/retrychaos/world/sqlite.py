"""A SQLite database as a resource: committed rows as facts, whole-database snapshots, restore through backup().

The database itself is asked what a statement writes (EXPLAIN), never its text. A file is read through a monitor
connection, which sees committed work only; a database in memory through its one connection, while no transaction is
open on it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sqlite3
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from retrychaos.model.errors import SharedError, WorldError
from retrychaos.model.leases import ends
from retrychaos.model.ledger import Cell, Relation, Row, Version
from retrychaos.world.resource import Blob, Plain, Stage
from retrychaos.world.sqlite_effects import Effect, explain
from retrychaos.world.sqlite_handle import Handle, ask, untrace
from retrychaos.world.sqlite_ids import shift_row_ids
from retrychaos.world.sqlite_turns import TurnConnection

_ALONE = (
    "{} cannot be used by two deliveries at once: a database in memory belongs to one connection, where each would see "
    "and roll back the other's work. Use a SQLite file (chaos.sql, or one in tmp_path), or check crashes only with "
    "duplicates=1."
)
_SHARED = (
    "{} cannot be used by two deliveries at once: nobody waits there for a lock, as somebody would in a file. Use a "
    'SQLite file (in Django\'s settings TEST: {{"NAME": "test.sqlite3"}}), or check crashes only with duplicates=1.'
)
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_PRAGMA = "PRAGMA"
"""The relation of the numbers that SQLite keeps for the job beside the tables."""
_MOST_LEFT = 32
"""Connections left open, before it is looked which of them are in use."""
_MOST_ROWS = 500_000
"""Rows of relations that are kept for the case that the same state is read again."""


@dataclass(frozen=True)
class _Table:
    """How a table is read: its SELECT, the column of its row id, the columns that refer to other tables."""

    select: str
    columns: tuple[str, ...]
    rowid: int | None
    refs: dict[int, str]
    keys: tuple[int, ...]


class SqliteDatabase(Plain):
    """A SQLite database: in a file, in the memory of one connection, or in memory that several connections share.

    reader: a connection of our own, or, where there is but one, that of the job (`borrowed`).
    """

    private = True

    def __init__(
        self, stage: Stage, name: str, label: str, reader: sqlite3.Connection, path: str | None, borrowed: bool = False
    ) -> None:
        self.stage = stage
        self.name = name
        self.label = label
        self.path = path
        self.handles: dict[int, Handle] = {}
        self._reader = reader
        self._writer = reader
        self._borrowed = borrowed
        self._effects: dict[str, Effect] = {}
        self._tables: dict[str, _Table] = {}
        self._roots: dict[int, str] = {}
        self._saved: tuple[Version, Blob] | None = None
        self._known: dict[str, dict[Row, Row]] = {}
        self._made: dict[tuple[Relation | None, tuple[Row, ...], bool], Relation] = {}
        """Relations by what they were made from: many deliveries reach the same state."""
        self._held = 0
        self._seen = -1
        self._altered = False
        self._explained = 0
        self._owed: list[Effect] = []
        """Written, and could not be read again yet."""
        self._left: list[Callable[[], sqlite3.Connection | None]] = []
        """Connections that jobs may have left open."""
        self._most_left = _MOST_LEFT
        self.commits = 0
        self.alone = "" if path is not None else (_ALONE if borrowed else _SHARED).format(label)
        if path is not None:
            reader.execute("PRAGMA busy_timeout = 0")
            reader.execute("PRAGMA synchronous = OFF")
            if _pragma(reader, "journal_mode") != "wal":
                reader.execute("PRAGMA journal_mode = MEMORY")
        if not borrowed:
            reader.text_factory = str
        self.version = Version({})
        self._read_schema()
        self.version = self._read(None)
        self._mark()

    # -- what hooks tell --------------------------------------------------------------------------------------------

    def effect_of(self, statement: str, parameters: Any) -> Effect:
        """What `statement` may write. Cached by text until the schema changes."""
        effect = self._effects.get(statement)
        if effect is None:
            self._explained += 1
            with self._quiet():
                effect = explain(self._reader, statement, parameters, self._roots, self._explained)
            self._effects[statement] = effect
        return effect

    def wrote(self, handle: Handle, effect: Effect) -> None:
        """A statement with that effect is about to run."""
        if handle.effects and not handle.in_transaction:
            self.committed(handle)  # apart from what comes now, which may be rolled back
        if effect.tables is None or effect.tables:
            handle.effects.append(effect)
            self.stage.touched(self)
        elif effect.ends:
            self.stage.touched(self)

    def committed(self, handle: Handle) -> None:
        """The transaction of that connection has been committed, and the driver may have begun the next."""
        if handle.effects:
            self._owed += handle.effects
            handle.effects = []
            self.stage.touched(self)

    def follow(self, raw: sqlite3.Connection, handle: Handle) -> None:
        """A delivery is about to use that connection for the first time."""
        before = self.handles.get(id(raw))
        if before is not None:  # of a connection that is gone; the new one lies where it has lain
            self.committed(before)
        self.handles[id(raw)] = handle

    # -- Resource ---------------------------------------------------------------------------------------------------

    def refresh(self) -> Version:
        done, self._owed = self._owed, []
        for handle in self.handles.values():
            if handle.effects and not handle.in_transaction and not handle.waiting:
                done += handle.effects
                handle.effects = []
        if done:
            self.commits += 1
            try:
                self._update(done)
            except sqlite3.OperationalError as error:
                shared = self.path is None and not self._borrowed
                if not (self.stage.concurrent or shared) or error.sqlite_errorcode & 0xFF not in _BUSY:
                    raise
                self._owed = done  # a COMMIT that waits for readers lets nobody begin to read, so nothing has changed
                self.stage.touched(self)
        return self.version

    def sweep(self) -> Version:
        self.refresh()
        seen = self._seen
        self._mark()
        if self._seen != seen:
            before = self.version
            self._read_schema()
            self.version = self._read(None)
            if self.version is not before:
                self.stage.doubt(
                    f"{self.label} was changed by a connection that the check did not see, so crashes around that "
                    "change were not tried. Let the job open its connections through a SQLAlchemy engine."
                )
        return self.version

    def save(self) -> Blob:
        if self._saved is None or self._saved[0] is not self.version:
            with self._quiet():
                pages = _pages(self._reader, self._saved[1] if self._saved else ())
            self._saved = (self.version, pages)
        return self._saved[1]

    def restore(self, version: Version, blob: Blob) -> None:
        seen = self._seen
        self._mark()
        if self.version is version and self._seen == seen and not self._altered:
            return
        with self._quiet():
            self._write(blob)
        ddl = _schema_rows(version) != _schema_rows(self.version)
        self.version = version
        self._saved = (version, blob)
        self._altered = False
        if ddl:
            self._read_schema()
        self._mark()

    def end_delivery(self) -> Sequence[str]:
        lost = False
        for handle in self.handles.values():
            lost = lost or (bool(handle.effects) and handle.in_transaction)
            self._drop(handle)
        self.handles.clear()
        if not lost:
            return ()
        return (
            f"work on {self.label} was left uncommitted when the job returned, so it is lost; commit or roll back "
            "before returning",
        )

    def holds(self, owner: object) -> str:
        held = [
            connection.holds() if isinstance(connection := handle.connection, TurnConnection) else "write"
            for handle in self.handles.values()
            if handle.owner is owner and handle.in_transaction
        ]
        return "+".join(sorted(held))

    def leave(self, owner: object) -> None:
        """A delivery is over while others go on: what it had open is gone."""
        for key, handle in list(self.handles.items()):
            if handle.owner is owner:
                self._drop(handle)
                del self.handles[key]

    def shift(self, seconds: float) -> None:
        """SQLite has no clock of its own: its functions are overridden."""

    def land(self, ahead: float) -> None:
        """Nothing in a database ends by itself."""

    def shift_ids(self, by: int) -> None:
        """Let every table draw other row ids, disjoint per table, as a busy database would have them."""
        tables = [name for name, table in self._tables.items() if table.rowid is not None]
        if not tables:
            return
        self._altered = True
        with self._quiet():
            try:
                shift_row_ids(self._writer, tables, by)
            except sqlite3.OperationalError as problem:
                self._clear_the_way(problem)
                shift_row_ids(self._writer, tables, by)
        self._mark()

    def distrust(self) -> None:
        self._altered = True

    def close(self) -> None:
        for handle in self.handles.values():
            untrace(handle.connection)
        self.handles.clear()
        if not self._borrowed:
            for connection in (self._reader, self._writer):
                with contextlib.suppress(sqlite3.Error):
                    connection.close()

    # -- reading ----------------------------------------------------------------------------------------------------

    def _update(self, done: Iterable[Effect]) -> None:
        tables: set[str] | None = set()
        generating: set[str] = set()
        given: set[str] = set()
        for effect in done:
            if effect.tables is None:
                tables = None
            elif tables is not None:
                tables |= effect.tables
            generating |= effect.generates
            given |= effect.given
        if tables is None:
            self._read_schema()
        self.version = self._read(tables, generating - given)
        self._mark()

    def _read(self, names: set[str] | None, generating: Set[str] = frozenset()) -> Version:
        """The committed state; only the tables in `names` are read again (None: all of them)."""
        old = self.version.relations
        new = dict(old)
        if names is None:
            numbers = self._numbers()
            kept = {*self._tables, "schema", *([_PRAGMA] if numbers else [])}
            new = {name: relation for name, relation in old.items() if name in kept}
            text = "replace(sql, ' AUTOINCREMENT', '')"  # which may be ours, see shift_ids
            sql = f"SELECT type, name, {text} FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'"
            schema = tuple(self._execute(sql))
            if "schema" not in old or old["schema"].rows != schema:
                new["schema"] = Relation("schema", ("type", "name", "sql"), schema)
            if numbers and (_PRAGMA not in old or old[_PRAGMA].rows != numbers):
                new[_PRAGMA] = Relation(_PRAGMA, ("name", "value"), numbers)
        for name in self._tables if names is None else names:
            table = self._tables.get(name)
            if table is None:
                continue
            rows = self._shared(name, self._execute(table.select))
            before = old.get(name)
            if before is None or before.rows != rows or before.columns != table.columns:
                new[name] = self._relation(name, table, rows, before, name in generating)
        same = len(new) == len(old) and all(old.get(name) is relation for name, relation in new.items())
        if same:
            return self.version
        ending = ends(self.stage.options("leases"), new)
        return Version(new, tuple(sorted(ending)), ending)

    def _numbers(self) -> tuple[Row, ...]:
        """Those that a job keeps in the header of the file, for its migrations."""
        found = [(name, self._execute(f"PRAGMA {name}")[0][0]) for name in ("application_id", "user_version")]
        return tuple([(name, value) for name, value in found if value])

    def _relation(
        self, name: str, table: _Table, rows: tuple[Row, ...], before: Relation | None, fresh: bool
    ) -> Relation:
        """The same object for the same rows: what is worked out for a relation (form, hash) is then found again."""
        key = (before, rows, fresh)
        made = self._made.get(key)
        if made is None or made.name != name:
            self._held += len(rows)
            if self._held > _MOST_ROWS:
                self._made.clear()
                self._held = len(rows)
            made = self._made[key] = _relation(name, table, rows, before, fresh)
        return made

    def _shared(self, name: str, rows: list[Row]) -> tuple[Row, ...]:
        """Rows that were read before are the same objects: a thousand versions of a big table must fit in memory."""
        known = self._known.setdefault(name, {})
        if len(known) > 4 * len(rows) + 1_000:
            known.clear()
        return tuple([known.setdefault(row, row) for row in rows])

    def _execute(self, sql: str) -> list[Row]:
        with self._quiet():
            cursor = sqlite3.Cursor(self._reader)
            try:
                return cursor.execute(sql).fetchall()
            except sqlite3.OperationalError as error:
                if "decode" not in str(error):
                    raise
                self._reader.text_factory = _any_text
                return cursor.execute(sql).fetchall()
            finally:
                cursor.close()

    def _read_schema(self) -> None:
        self._effects.clear()
        self._made.clear()
        self._held = 0
        self._roots = {}
        self._tables = {}
        for name, sql, root in self._execute("SELECT name, sql, rootpage FROM sqlite_master WHERE type = 'table'"):
            assert isinstance(name, str)
            assert isinstance(root, int)
            self._roots[root] = name
            if not name.startswith("sqlite_"):
                self._tables[name] = self._table(name, str(sql))
        for root, owner in self._execute("SELECT rootpage, tbl_name FROM sqlite_master WHERE type = 'index'"):
            assert isinstance(owner, str)
            assert isinstance(root, int)
            self._roots[root] = owner

    def _table(self, name: str, sql: str) -> _Table:
        quoted = _quote(name)
        info = self._execute(f"PRAGMA table_xinfo({quoted})")
        columns = tuple(str(row[1]) for row in info if row[6] != 1)  # 1: hidden columns of virtual tables
        keys = [str(row[1]) for row in info if row[5]]
        kinds = {str(row[1]): str(row[2]).upper() for row in info}
        rowid = None
        if len(keys) == 1 and kinds[keys[0]] == "INTEGER" and "WITHOUT ROWID" not in sql.upper():
            rowid = columns.index(keys[0])
        refs = {
            columns.index(str(row[3])): str(row[2])
            for row in self._execute(f"PRAGMA foreign_key_list({quoted})")
            if row[3] in columns
        }
        indexes = tuple(columns.index(key) for key in keys)
        # A unary plus keeps the value and drops the declared type, so that no converter of the user's runs.
        select = ", ".join(f"+{_quote(column)}" for column in columns)
        return _Table(f"SELECT {select} FROM {quoted}", columns, rowid, refs, indexes)

    # -- writing ----------------------------------------------------------------------------------------------------

    def _write(self, blob: Blob) -> None:
        source = sqlite3.connect(":memory:")
        try:
            if blob:
                source.deserialize(b"".join(blob))
            try:
                source.backup(self._writer, progress=_refuse_busy)
            except sqlite3.OperationalError as problem:
                self._clear_the_way(problem)
                source.backup(self._writer, progress=_refuse_busy)
        except (sqlite3.Error, _Busy) as error:
            raise WorldError(
                f"{self.label} cannot be restored ({error}). Every delivery has to start from an exact state, so the "
                "check stops here. Close other connections with open transactions or half-read results, and see that "
                "the file can be written."
            ) from error
        finally:
            source.close()

    def _clear_the_way(self, problem: sqlite3.OperationalError) -> None:
        """The engine that was seen first may be read-only, or half-read results may be in the way."""
        if self.path is not None and "readonly" in str(problem):
            self._writer = sqlite3.connect(self.path, isolation_level=None)
            self._writer.execute("PRAGMA synchronous = OFF")
            return
        gc.collect()
        for thing in gc.get_objects():
            if issubclass(type(thing), sqlite3.Cursor) and self._is_left_over(thing.connection):
                thing.close()

    def _is_left_over(self, connection: sqlite3.Connection) -> bool:
        """A job has used it and not closed it."""
        return connection is self._reader or any(connection is each() for each in self._left)

    def _drop(self, handle: Handle) -> None:
        """The process that used this connection is gone. Only an engine can open another one for the next, and only
        connections of deliveries that overlap are used by nobody after that; others are made as if they were new."""
        handle.effects = []
        handle.announced = handle.committing = False
        handle.rows = 0
        connection = handle.connection
        untrace(connection)
        if handle.inherited or connection is None:
            return
        closes = not self._borrowed and (handle.record is not None or isinstance(connection, TurnConnection))
        try:
            sqlite3.Connection.rollback(connection)
            if not closes:
                for kind, name in ask(connection, "SELECT type, name FROM sqlite_temp_master"):
                    if kind in ("table", "view"):
                        ask(connection, f"DROP {kind} IF EXISTS temp.{_quote(name)}")
                if handle.synchronous is not None:
                    ask(connection, f"PRAGMA synchronous = {handle.synchronous}")
                # If nobody refers to it any more it would wait for the collector, which does not run now.
                forgotten = sys.getrefcount(connection) <= _least_references()
                closes = self.path is not None and handle.record is None and forgotten
                if not closes:
                    self._leave_open(handle)
        except sqlite3.Error:
            pass  # closed already, or closed below
        if closes:
            if handle.record is not None:
                handle.record.invalidate()
            try:
                connection.close()
            except sqlite3.Error:
                pass

    def _leave_open(self, handle: Handle) -> None:
        """Somebody may still refer to it: the job by a module global, or only what waits for the collector."""
        self._left.append(handle.refer)
        if len(self._left) > self._most_left:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()
            self._left = [each for each in self._left if each() is not None]
            self._most_left = 2 * len(self._left) + _MOST_LEFT

    def _quiet(self) -> _Quiet:
        return _Quiet(self.stage, self._reader if self._borrowed else None)

    def _mark(self) -> None:
        """Remember the state of the change counter, to notice commits of connections that were not seen."""
        if self._borrowed:
            self._seen = self._reader.total_changes
        else:
            with self._quiet():
                self._seen = self._reader.execute("PRAGMA data_version").fetchone()[0]


class _Busy(Exception):
    """backup() would wait for ever on a lock; this ends it."""


class _Quiet:
    """The harness is at work on a store: hooks look away. What a job has set on a borrowed connection is aside."""

    def __init__(self, stage: Stage, borrowed: sqlite3.Connection | None) -> None:
        self._stage = stage
        self._borrowed = borrowed

    def __enter__(self) -> None:
        self._before = self._stage.quiet
        self._stage.quiet = True
        raw = self._borrowed
        if raw is not None:
            self._settings = raw.row_factory, raw.text_factory
            raw.row_factory, raw.text_factory = None, str

    def __exit__(self, *exc: object) -> None:
        self._stage.quiet = self._before
        if self._borrowed is not None:
            self._borrowed.row_factory, self._borrowed.text_factory = self._settings


def _refuse_busy(status: int, remaining: int, total: int) -> None:
    if status in _BUSY:
        raise _Busy("database is locked")


def _relation(name: str, table: _Table, rows: tuple[Row, ...], before: Relation | None, fresh: bool) -> Relation:
    generated: dict[int, frozenset[Cell]] = {}
    if table.rowid is not None:
        ids = frozenset(row[table.rowid] for row in rows)
        known = before.generated.get(table.rowid, frozenset()) if before else frozenset()
        old = frozenset(row[table.rowid] for row in before.rows) if before else frozenset()
        drawn = (known & ids) | ((ids - old) if fresh else frozenset())
        if drawn:
            generated[table.rowid] = drawn
    return Relation(name, table.columns, rows, generated, table.refs, table.keys)


def _pages(connection: sqlite3.Connection, before: Sequence[bytes]) -> tuple[bytes, ...]:
    """The database as a tuple of pages; pages that are as `before` are shared with it."""
    try:
        data = connection.serialize()
    except sqlite3.OperationalError:  # an empty database has no pages
        return ()
    if not data:
        return ()
    if data[18:20] != b"\1\1":  # a database in memory cannot be in WAL mode
        data = data[:18] + b"\1\1" + data[20:]
    size = int.from_bytes(data[16:18], "big")
    size = 65536 if size == 1 else size
    pages = [data[start : start + size] for start in range(0, len(data), size)]
    shared = min(len(pages), len(before))
    return tuple(before[i] if i < shared and before[i] == page else page for i, page in enumerate(pages))


@functools.cache
def _least_references() -> int:
    """To a connection that is one local variable; the driver's own cache of statements refers to it, too."""
    connection = sqlite3.connect(":memory:")
    count = sys.getrefcount(connection)
    connection.close()
    return count


def _schema_rows(version: Version) -> tuple[Row, ...]:
    relation = version.relations.get("schema")
    return relation.rows if relation else ()


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _pragma(connection: sqlite3.Connection, name: str) -> Any:
    return connection.execute(f"PRAGMA {name}").fetchone()[0]


def _any_text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def copy_aside(path: str, blob: Blob, folder: str) -> str:
    """A copy of a database file in the state of `blob`. Raises SharedError if it could not stand for the file."""
    with open(path, "rb") as file:
        if file.read(20)[18:] == b"\2\2":
            raise SharedError(f"{path}: in WAL mode, other locks hold than in the copy")
    os.makedirs(folder, 0o700, exist_ok=True)
    copy = os.path.join(os.path.realpath(folder), f"{len(os.listdir(folder))}.db")
    with open(copy, "xb") as file:
        file.write(b"".join(blob))
    return copy
