"""A PostgreSQL database as a resource: committed rows as facts, restored by their difference to what is there.

The server itself is asked what a transaction changed, never the text of its statements: just before a commit, the locks
of its backend name every table that it has written, through triggers, cascades and functions too. The position in the
write-ahead log tells whether anything was committed at all. Rows are read by a connection of the harness, which sees
committed work only.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from retrychaos.model.errors import SharingError, WorldError
from retrychaos.model.leases import ends
from retrychaos.model.ledger import Version
from retrychaos.world.postgres_catalog import MARK, Schema
from retrychaos.world.postgres_cursors import tags
from retrychaos.world.postgres_drivers import (
    TELLING,
    LineError,
    backend,
    cancel,
    clear,
    finish,
    roll_back,
    run,
    shut,
    standing,
)
from retrychaos.world.postgres_handle import WRITERS, Handle
from retrychaos.world.postgres_line import Line
from retrychaos.world.postgres_rows import Reader, Rows, Unread, changes
from retrychaos.world.postgres_wire import ACTIVE, FAILED, IDLE, IN_TRANSACTION
from retrychaos.world.resource import (
    BEGUN,
    CIRCLE,
    MORE,
    MOST_DRAWN,
    SERIAL,
    SERIAL_WRITES,
    WAITS,
    Blob,
    RandomIds,
    SerialCounter,
    Stage,
)

_LOG = "SELECT pg_current_wal_insert_lsn()::text"
_HEAVY = frozenset(("ShareLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock"))
_LARGE_OBJECTS = 2613
_LARGE, _APART = 1_000_000_000, 10_000_000
"""Numbers that a sequence gives in deliveries that overlap: nothing else has such numbers, and integers hold them."""
_FAR = 110.0
"""Seconds; more than the second clean run is ahead."""


@dataclass(frozen=True, eq=False)
class State:
    """What restores a version: rows as text by table, and where sequences stand."""

    rows: Mapping[int, Rows]
    sequences: Mapping[int, tuple[int, bool]]


class PostgresDatabase:
    """One database of a PostgreSQL server."""

    def __init__(self, stage: Stage, name: str, label: str, line: Line) -> None:
        self.stage = stage
        self.name = name
        self.label = label
        self.handles: dict[int, Handle] = {}
        self._line = line
        self._dirty: set[int] | None = set()
        """Tables to be read again at the next look; None: all."""
        self._trusted = True
        self._direct: bool | None = None
        self._saved: tuple[Version, State] | None = None
        self.commits = 0
        self._stirred = False
        """A statement outside of a transaction has written."""
        self._unseen = False
        """Something may have been committed that nobody could look at before."""
        self.version = Version({}, real_time=True)
        self._read_schema()
        self.draws_uuids = self._schema.draws_uuids
        """The server does, at random."""
        # The server's clock goes on by itself, the virtual one stands still and leaps: how far are they apart?
        server = float(str(self._ask("SELECT extract(epoch FROM clock_timestamp())")[0][0]))
        self._clock = server - stage.now()
        self._met = stage.now()
        self._log = self._log_position()
        self._full_log = self._log
        self.version = self._read(None)

    @property
    def schema(self) -> Schema:
        return self._schema

    # -- what hooks tell --------------------------------------------------------------------------------------------

    def follow(self, raw: Any, record: Any, renew: Callable[[Any], bool], unhooked: bool) -> Handle:
        """A connection of the job, from its first use in this delivery on."""
        handle = self.handles.get(id(raw))
        if handle is None:
            pid = backend(raw)
            if self._direct is None:
                # Behind a pooler the pid is not that of a backend, and locks could not be found by it.
                seen = f"SELECT 1 FROM pg_stat_activity WHERE pid = {pid} AND datname = current_database()"
                self._direct = bool(self._ask(seen))
            handle = self.handles[id(raw)] = Handle(raw, record, pid if self._direct else None, renew, unhooked)
            handle.owner = self.stage.owner
        return handle

    def looks_at_clock(self, text: str) -> bool:
        """The statement may use the server's clock, and the virtual one is far ahead of that."""
        return self._schema.mentions("time", text) and self.stage.now() - self._met - self._clock > _FAR

    def settle(self, handle: Handle) -> None:
        """Before a boundary: has a transaction ended without a hook having seen it?"""
        if handle.open and standing(handle.raw) not in (IN_TRANSACTION, FAILED, ACTIVE):
            # Not all commits of psycopg2 are hooked, but those of engines are.
            self._unseen = self._unseen or (handle.record is None and not handle.failed)
            self.ended(handle)

    def ended(self, handle: Handle) -> None:
        """A transaction or statement is over, and nobody was asked before what it wrote."""
        self._dirty = None
        self.stage.touched(self)
        if handle.over():
            self._refuse_new_schema()

    def executed(self, handle: Handle, done: Sequence[str], was_idle: bool) -> None:
        """A statement has run; `done`: what the server called it."""
        words = [tag.split(" ", 1)[0] for tag in done if tag]
        handle.ran(words)
        status = standing(handle.raw)
        if status in (IN_TRANSACTION, FAILED):
            handle.open, handle.failed = True, status == FAILED
            if handle.unhooked:
                self.stage.touched(self)
        elif status == IDLE:
            self.ended(handle)
            # A row may have been written that is as before: a snapshot of somebody else is out of date by that.
            self._stirred = self._stirred or any(map(_has_written, done))
            if was_idle and not {"CALL", "DO"}.isdisjoint(words):
                self.stage.doubt(
                    f"a procedure on {self.label} ran outside a transaction ({done[-1]}): it may commit on its own, "
                    "and boundaries inside it are not seen. Call it in a transaction."
                )

    def committing(self, handle: Handle) -> None:
        """A COMMIT comes next. What it commits is read at the next boundary."""
        status = standing(handle.raw)
        altered = handle.over()
        if status != IN_TRANSACTION:
            return
        if handle.pid is None:
            self._dirty = None
        else:
            here = f"locktype = 'relation' AND database = {self._schema.database}"
            found = self._ask(
                f"SELECT granted::text, relation, mode FROM pg_locks WHERE pid = {handle.pid} AND ({here} "
                "AND mode NOT IN ('AccessShareLock', 'RowShareLock') OR locktype = 'transactionid' AND "
                f"mode = 'ExclusiveLock') OR NOT granted AND {here} AND mode = 'AccessExclusiveLock'"
            )
            locks = [each for granted, *each in found if granted == "true"]
            wanted = len(locks) < len(found)
            tables = {int(relation) for relation, _ in locks if relation is not None and int(relation) >= 16384}
            heavy = any(relation is not None and mode in _HEAVY for relation, mode in locks)
            if any(relation == str(_LARGE_OBJECTS) for relation, _ in locks):
                self._refuse_large_objects()
            self._check_tables(tables)
            if all(relation is not None for relation, _ in locks):
                return  # it has no number, so it has not written anything here
            known = tables & self._schema.tables.keys()
            if tables & self._schema.deferred:
                self._dirty, known = None, set(self._schema.tables)
            altered = altered or heavy or bool(tables - self._schema.oids)
            if self._dirty is not None:
                self._dirty |= known
            if wanted:  # who gets one of them may have the others in the next moment
                self._look(handle, known)
        if altered and run(handle.raw, MARK)[0][0] != self._schema.mark:
            self._refuse_ddl("is about to change")
        self.stage.touched(self)

    def _look(self, handle: Handle, oids: set[int]) -> None:
        try:
            self._reader.look(handle.raw, oids)
        except LineError as problem:
            self.stage.refuse(WorldError(self._lost(problem)))

    def _check_tables(self, tables: set[int]) -> None:
        for oid in tables & self._schema.empty.keys():
            self.stage.refuse(
                WorldError(
                    f"the job fills the materialized view {self._schema.empty[oid]} of {self.label}, which was never "
                    "refreshed: that state cannot be put back. Refresh it before the check."
                )
            )
        for oid in tables & self._schema.foreign.keys():
            self.stage.refuse(
                WorldError(
                    f"the job writes to the foreign table {self._schema.foreign[oid]} of {self.label}: its rows live "
                    "in another store, which the check can neither see nor put back. Use a plain table in tests."
                )
            )
        if tables & self._schema.triggers["notify"]:
            self.doubt_notify("a trigger")
        if tables & self._schema.triggers["outside"]:
            self.stage.doubt(f"effect outside the ledger: a trigger on {self.label} reaches outside the database")

    def doubt_notify(self, who: str) -> None:
        if "notify" not in self.stage.options("volatile"):
            self.stage.doubt(
                f"effect outside the ledger: {who} on {self.label} sends a NOTIFY. If it does no harm to send it "
                'again, say so: volatile=["notify"].'
            )

    # -- Resource ---------------------------------------------------------------------------------------------------

    def refresh(self) -> Version:
        for handle in self.handles.values():
            if handle.unhooked and handle.open:
                self.settle(handle)
                if handle.open:
                    self.stage.touched(self)
        if self._dirty is None or self._dirty:
            dirty, self._dirty = self._dirty, set()
            if dirty is None and not self._stirred:
                log = self._log_position()
                if log == self._log:
                    return self.version  # nothing at all was committed
                self._log = log
            else:
                self._log = None  # it has moved on, and where to is asked when it matters
            before, self.version = self.version, self._read(dirty)
            self.commits += bool(dirty) or self._stirred or self.version is not before
            self._stirred = False
        return self.version

    def sweep(self) -> Version:
        self.refresh()
        log = self._log_position()
        if log != self._full_log:
            self._log = self._full_log = log
            before = self.version
            self.version = self._read(None)
            if self.version is not before:
                self.stage.doubt(
                    f"{self.label} was changed by a connection that the check did not see, so crashes around that "
                    "change were not tried. Let the job open its connections through a SQLAlchemy engine."
                )
            self._refuse_new_schema()
        return self.version

    def save(self) -> Blob:
        rows = self._reader.rows
        sequences = self._reader.sequences()
        saved = self._saved
        if saved is None or saved[0] is not self.version or saved[1].sequences != sequences:
            self._saved = (self.version, State(dict(rows), sequences))
        assert self._saved is not None
        return self._saved[1]

    def restore(self, version: Version, blob: State) -> None:
        self._dirty, self._stirred, self._unseen = set(), False, False
        try:
            log = self._log_position()
            if not self._trusted or log != self._full_log:
                self._reader.read(None, alone=True)
                self._trusted = True
            if self._put_back(blob):
                log = self._log_position()
        except LineError as problem:
            raise WorldError(
                f"{self.label} cannot be restored ({problem}). Every delivery has to start from an exact state, so the "
                "check stops here. Close other connections with open transactions: in tests and fixtures, commit or "
                "close a session before the check."
            ) from problem
        self._log = self._full_log = log
        self.version = version
        self._saved = (version, blob)

    def _put_back(self, blob: State) -> bool:
        sequences = self._reader.sequences()
        statements = [
            self._moving(oid, value, called)
            for oid, (value, called) in blob.sequences.items()
            if sequences.get(oid) != (value, called)
        ]
        wanted = {
            oid: rows
            for oid, rows in blob.rows.items()
            if self._schema.tables[oid].kind == "r"
            and (there := self._reader.rows.get(oid)) is not rows
            and there != rows
        }
        if wanted:
            self._reader.locate(wanted)
            for oid, rows in wanted.items():
                statements += changes(self._schema.tables[oid], self._reader.located[oid], rows)
        if statements:
            self._line.ask("; ".join(statements))
            self._reader.replaced(wanted)
        views = {
            oid
            for oid, rows in blob.rows.items()
            if self._schema.tables[oid].kind != "r" and self._reader.rows.get(oid) != rows
        }
        if views:
            self._refresh_views(views, blob)
        self._reader.sequences_are(blob.sequences)
        return bool(statements or views)

    def _refresh_views(self, views: Iterable[int], blob: State) -> None:
        names = [self._schema.tables[oid].place for oid in sorted(views)]
        self._line.ask("; ".join(f"REFRESH MATERIALIZED VIEW {name}" for name in names))
        self._reader.read(set(views), alone=True)
        for oid in views:
            if Counter(self._reader.rows[oid]) != Counter(blob.rows[oid]):
                raise WorldError(
                    f"the materialized view {self._schema.tables[oid].relation} of {self.label} held something else "
                    "than its query gives now, and cannot be put back. Refresh it before the check."
                )

    def end_delivery(self) -> Sequence[str]:
        self._look_for_kept_locks()
        lost = False
        for handle in self.handles.values():
            lost = lost or handle.lost
            self._drop(handle)
        self.handles.clear()
        if not lost:
            return ()
        return (
            f"work on {self.label} was left uncommitted when the job returned, so it is lost; commit or roll back "
            "before returning",
        )

    def _look_for_kept_locks(self) -> None:
        """The job has returned. In a worker that lives on, its pool keeps the connections, and what they hold."""
        pids = [
            str(each.pid)
            for each in self.handles.values()
            if each.record is not None and each.pid is not None and standing(each.raw) == IDLE
        ]
        held = f"SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND pid IN ({', '.join(pids)}) LIMIT 1"
        with contextlib.suppress(LineError):
            if pids and not self._line.silent and self._line.ask(held):
                self.stage.doubt(
                    f"the job returned and still holds an advisory lock of its session on {self.label}: a worker that "
                    "lives on keeps it in its pool, and whoever wants it next waits for ever. Here each delivery is a "
                    "process of its own, so that is not tried. Unlock it in a finally (pg_advisory_unlock), or use "
                    "pg_advisory_xact_lock, which ends with the transaction."
                )

    # -- deliveries that overlap --------------------------------------------------------------------------------------

    private = False
    alone = ""

    def holds(self, owner: object) -> str:
        """What the server says that it has: a lock that others can notice, or a snapshot."""
        mine = [each for each in self.handles.values() if each.owner is owner and each.pid is not None]
        if not mine:
            return ""
        locks = self._ask(
            "SELECT DISTINCT locktype, mode, granted::text, relation::text, concat_ws(' ', classid, objid, objsubid) "
            f"FROM pg_locks WHERE locktype <> 'virtualxid' AND pid IN ({', '.join(str(each.pid) for each in mine)})"
        )
        if any(granted == "false" for _, _, granted, *_ in locks):
            return WAITS
        writes = any(kind == "transactionid" for kind, *_ in locks)  # without a number it cannot even have locked rows
        if any(mode == "SIReadLock" for _, mode, *_ in locks):
            return SERIAL_WRITES if writes else SERIAL
        if writes:
            return MORE
        told = [
            f"{mode} {kind} {relation or ''} {rest}"
            for kind, mode, _, relation, rest in locks
            if relation is None or int(relation) in self._schema.tables
        ]
        if locks:
            return f"locks {', '.join(sorted(told))}"
        open_ = any(standing(each.raw) in (IN_TRANSACTION, FAILED) and not each.fresh for each in mine)
        return BEGUN if open_ else ""

    def waits(self, owner: object) -> str:
        for pid in self._pids(owner):
            # The server is asked bit by bit, and may have ended a circle in the middle of that: then it waits no more.
            question = (
                f"WITH RECURSIVE w(pid) AS (SELECT unnest(pg_blocking_pids({pid})) UNION "
                f"SELECT unnest(pg_blocking_pids(w.pid)) FROM w) SELECT circle::text FROM "
                f"(SELECT bool_or(pid = {pid}) AS circle FROM w) AS found "
                f"WHERE circle OR NOT circle AND cardinality(pg_blocking_pids({pid})) > 0"
            )
            try:
                found = self._line.ask(question)
            except LineError as problem:  # nobody is running who could be refused anything
                raise WorldError(self._lost(problem)) from problem
            if found:
                return CIRCLE if found[0][0] == "true" else WAITS
        return ""

    def came_back(self, owner: object) -> bool:
        mine = [each for each in self.handles.values() if each.owner is owner and standing(each.raw) == IDLE]
        over = [each for each in mine if each.commits or each.cursor is not None]
        for handle in over:
            if handle.commits:
                self._stirred = True
                self.ended(handle)
            else:
                self._unseen = True
                self.executed(handle, tags(handle.cursor), was_idle=True)
                handle.cursor = None
        return bool(over)

    def races(self, owner: object) -> bool:
        # When a transaction ends, all who wait for that are woken at once. Who waits for the lock of a row version does
        # so since another one waits before it; whether the order stays depends on what becomes of the row.
        pids = ", ".join(map(str, self._pids(owner)))
        return bool(
            self._ask(
                f"SELECT 1 FROM pg_locks mine WHERE NOT granted AND pid IN ({pids}) AND (locktype = 'tuple' OR EXISTS ("
                "SELECT FROM pg_locks other WHERE NOT granted AND other.transactionid = mine.transactionid "
                f"AND other.pid NOT IN ({pids})))"
            )
        )

    def serials(self) -> Mapping[Hashable, int]:
        """No transaction holds a sequence, and a crash does not bring back what was drawn from it."""
        return {
            oid: value + called * self._schema.sequences[oid].increment
            for oid, (value, called) in self._positions().items()
        }

    def _positions(self) -> Mapping[int, tuple[int, bool]]:
        try:
            return self._reader.sequences()
        except LineError as problem:
            if not problem.locked:
                raise
            self.stage.refuse(
                SharingError(
                    f"a sequence of {self.label} is locked, as by TRUNCATE ... RESTART IDENTITY or ALTER SEQUENCE: "
                    "nobody can tell which numbers the deliveries draw. Leave the numbers as they are (CONTINUE "
                    "IDENTITY), or check crashes only with duplicates=1."
                )
            )

    def space_serials(self, place: int) -> Sequence[SerialCounter | RandomIds]:
        counters: list[SerialCounter] = []
        moved: dict[int, tuple[int, bool]] = {}
        for oid, upcoming in sorted(self.serials().items(), key=repr):
            assert isinstance(oid, int)
            sequence, step = self._schema.sequences[oid], self._schema.sequences[oid].increment
            first = max(upcoming, _LARGE + (place + len(counters)) * _APART)
            counter = SerialCounter(self.name, oid, first, step)
            fits = sequence.lowest <= first - 2 * step and counter.number(MOST_DRAWN) <= sequence.highest
            if fits and 0 < MOST_DRAWN * step <= _APART:
                counters.append(counter)
                moved[oid] = (first - step, True)
        self._move_sequences(moved)
        return [*counters, RandomIds(self.name)] if self.draws_uuids else counters

    def _move_sequences(self, moved: Mapping[int, tuple[int, bool]]) -> None:
        if not moved:
            return
        self._ask("; ".join(self._moving(oid, *position) for oid, position in moved.items()))
        self._reader.sequences_are(moved)
        self._log = self._full_log = self._log_position()

    def _moving(self, oid: int, value: int, called: bool) -> str:
        """Put a sequence there, by drawing the number before the next, where there is one.

        The first number that is drawn after a sequence was moved is logged, with 32 more (sequence.c,
        nextval_internal), and the transaction gets a number for that. What a delivery holds must not depend on it.
        """
        sequence = self._schema.sequences[oid]
        before = value - sequence.increment
        if called and sequence.lowest <= before <= sequence.highest:
            return f"SELECT setval({oid}::regclass, {before}, true), nextval({oid}::regclass)"
        return f"SELECT setval({oid}::regclass, {value}, {str(called).lower()})"

    def _pids(self, owner: object) -> list[int]:
        return [each.pid for each in self.handles.values() if each.owner is owner and each.pid is not None]

    def cancel(self, handle: Handle) -> None:
        """Its statement that runs in the server ends."""
        if handle.pid is None:
            cancel(handle.raw)
            return
        try:
            self._line.ask(f"SELECT pg_cancel_backend({handle.pid})")
        except LineError:
            shut(handle.raw)

    def leave(self, owner: object) -> list[tuple[Any, bool]]:
        """A delivery is over while others go on: what it had open is gone. Gives its connections, and whether each is
        good for another one."""
        left: list[tuple[Any, bool]] = []
        for key, handle in list(self.handles.items()):
            if handle.owner is owner:
                del self.handles[key]
                if self._line.silent:
                    shut(handle.raw)
                then = TELLING if handle.tells else ""  # the settings that the next delivery would make
                left.append((handle.raw, not self._line.silent and clear(handle.raw, then)))
        return left

    def shift(self, seconds: float) -> None:
        """The server's clock cannot be moved."""

    def land(self, ahead: float) -> None:
        """Nothing in a database ends by itself."""

    def shift_ids(self, by: int) -> None:
        """Let every sequence draw other numbers, disjoint per sequence, as a busy database would."""
        moved: dict[int, tuple[int, bool]] = {}
        for number, (oid, (value, _)) in enumerate(sorted(self._reader.sequences().items()), start=1):
            sequence = self._schema.sequences[oid]
            target = value + by * number * (1 if sequence.increment > 0 else -1)
            if sequence.lowest <= target <= sequence.highest - by:
                moved[oid] = (target, True)
        self._move_sequences(moved)

    def distrust(self) -> None:
        self._trusted = False

    def close(self) -> None:
        self.handles.clear()
        self._line.hang_up()

    # -- reading ----------------------------------------------------------------------------------------------------

    def _read_schema(self) -> None:
        try:
            self._schema = Schema(self._line)
            self._reader = Reader(self._line, self._schema)
        except LineError as problem:
            raise WorldError(f"the catalog of {self.label} cannot be read: {problem}") from problem

    def _read(self, oids: set[int] | None) -> Version:
        """The committed state; only the tables in `oids` are read again (None: all of them)."""
        try:
            names = self._reader.read(oids, sure=not self._unseen)
            self._unseen = self._unseen and oids is not None
        except Unread as table:
            self.stage.refuse(
                SharingError(
                    f"{table} of {self.label} cannot be read: another delivery has got an ACCESS EXCLUSIVE lock on it "
                    "in the moment when it was changed, and nobody could look before: it was changed at the level "
                    "SERIALIZABLE, or with an old snapshot, outside of a transaction, or by a commit that was not "
                    "seen. Two deliveries at once are not covered; lock the table IN EXCLUSIVE MODE, which lets "
                    "readers in, or use duplicates=1."
                )
            )
        except LineError as problem:
            self.stage.refuse(WorldError(f"{self.label} cannot be read: {problem}"))
        old = self.version.relations
        new = dict(old)
        for name in names:
            before = old.get(name)
            relation = self._reader.relation(name, before)
            if relation is not before:
                new[name] = relation
        same = len(new) == len(old) and all(old.get(name) is relation for name, relation in new.items())
        if same:
            return self.version
        ending = ends(self.stage.options("leases"), new)
        return Version(new, tuple(sorted(ending)), ending, real_time=True)

    def _log_position(self) -> str | None:
        return self._ask_again(_LOG)

    def _ask(self, sql: str) -> list[tuple[str | None, ...]]:
        try:
            return self._line.ask(sql)
        except LineError as problem:
            self.stage.refuse(WorldError(self._lost(problem)))

    def _lost(self, problem: LineError) -> str:
        return f"{self.label} does not answer the check, which is lost without it: {problem}"

    def _ask_again(self, sql: str) -> str | None:
        try:
            return self._line.ask_again(sql)[0][0]
        except LineError:
            return self._ask(sql)[0][0]

    # -- refusing ---------------------------------------------------------------------------------------------------

    def _refuse_new_schema(self) -> None:
        if self._ask_again(MARK) != self._schema.mark:
            self._refuse_ddl("has changed")

    def _refuse_ddl(self, how: str) -> NoReturn:
        self.stage.refuse(
            WorldError(
                f"the job {how} the schema of {self.label} (CREATE, ALTER, DROP, large objects or a prepared "
                "transaction). The check puts back rows and sequences of PostgreSQL, not schemas, so deliveries after "
                "it would start from a wrong state. Remedy: do such things before the check (migrations, fixtures); in "
                "the job use temporary tables, DELETE or TRUNCATE."
            )
        )

    def _refuse_large_objects(self) -> NoReturn:
        self.stage.refuse(
            WorldError(
                f"the job works with large objects of {self.label}, which the check can neither compare nor put back. "
                "Use a bytea column, or declare the function that stores them with chaos.watch."
            )
        )

    def _drop(self, handle: Handle) -> None:
        """Its locks are gone before this returns; a closed socket would leave that to the server's leisure."""
        if self._line.silent:
            shut(handle.raw)
        elif handle.renew(handle.raw):
            return
        with contextlib.suppress(Exception):
            if standing(handle.raw) in (IN_TRANSACTION, FAILED):
                roll_back(handle.raw)
            run(handle.raw, "SELECT pg_advisory_unlock_all()")
        if handle.record is not None:
            handle.record.invalidate()
        with contextlib.suppress(Exception):
            finish(handle.raw)


def _has_written(tag: str) -> bool:
    """What the server calls a command that has written rows: ``UPDATE 1``, ``INSERT 0 1``."""
    number = tag.rpartition(" ")[2]
    return tag.split(" ")[0] in WRITERS and number.isdigit() and int(number) > 0
