"""Three ways to find every ledger that deliveries which overlap can leave; the first two are slow and simple.

Enumeration makes every sequence of moves in a real run from the start. Exploration merges states that are equal in all
that can be observed, and learns each edge from a real run from the start. The third is the tool's own search, which
keeps going where it would stop for a faulty ledger. Turn-taking and kills (``Play``) are shared by all three.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import fakeredis
import redis
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import IntegrityError, OperationalError

from retrychaos import Chaos
from retrychaos.explore.check import Check
from retrychaos.explore.interleaving import Interleaving, Scope
from retrychaos.explore.transitions import Surprise
from retrychaos.model.ledger import Facts
from retrychaos.model.plan import ERROR, LOST_REPLY, SHUTDOWN
from retrychaos.runtime.delivery import Job, Order, Workshop, keep_none
from retrychaos.runtime.turns import Actor, Moved, Play
from retrychaos.world.sqlite import SqliteDatabase
from tests.oracle.moves import Found, Ledger, Move, Table, TooMany, enumerate_runs
from tests.oracle.overlapping_jobs import Duplicate, Locked, Place, Program, Unfit, furnish

_Answer = TypeVar("_Answer")
_LIMIT = 3.0
"""Seconds that a delivery may stand still."""


# -- the world of a job ---------------------------------------------------------------------------------------------


class Scene(Place, Protocol):
    """What a program runs on under the tool."""

    traces: dict[threading.Thread, list[Any]]
    """Thread -> what the delivery in it has got to know."""
    scratch: list[str]
    """Servers whose databases a check may put back."""
    keeps: bool
    """What becomes of a transaction may hang on others that have ended before it began."""

    def touch(self) -> None:
        """Look at everything: what is found in the middle of a search would be missing in ledgers seen before."""
        ...

    def ledger_of(self, facts: Facts) -> Ledger: ...

    def is_open(self, resource: Any, actor: Actor) -> bool:
        """A delivery has a transaction open there: whoever knows it for certain is asked."""
        ...

    def jam(self) -> str:
        """``jammed`` or ``unsure`` if statements wait in a server, and chance will say who gets what they wait for."""
        ...


class Shop:
    """Two SQLite files, a Redis server, and somebody who takes calls."""

    scratch: list[str] = []
    keeps = False

    def __init__(self, folder: Path, journal: str, with_redis: bool = False) -> None:
        self.paths = [folder / "first.db", folder / "second.db"]
        for path in self.paths:
            furnish(path, journal)
        self._engines: dict[tuple[int, str], Engine] = {}
        self.client: Any = fakeredis.FakeRedis(server=fakeredis.FakeServer()) if with_redis else None
        self.traces: dict[threading.Thread, list[Any]] = {}
        """Thread -> what the delivery in it has got to know."""

    def engine(self, database: int, style: str) -> Engine:
        found = self._engines.get((database, style))
        if found is None:
            found = create_engine(f"sqlite:///{self.paths[database]}")
            if style == "AUTOCOMMIT":
                found = found.execution_options(isolation_level="AUTOCOMMIT")
            elif style:
                event.listen(found, "connect", _driver_begins_nothing)
                event.listen(found, "begin", partial(_begin, style))
            self._engines[database, style] = found
        return found

    @contextmanager
    def connect(self, database: int, style: str) -> Iterator[_Core | _Raw]:
        if style.startswith("RAW"):
            begin = style.removeprefix("RAW").strip()
            with closing(self.engine(database, "BEGIN" if begin else "").raw_connection()) as raw:
                yield _Raw(self, raw, begin)
            return
        with self.engine(database, style).connect() as connection:
            yield _Core(self, connection)

    def redis(self, command: str, key: str) -> Any:
        answer = getattr(self, f"_{command}")(key)
        self.note("redis", command, key, answer)
        return answer

    def _get(self, key: str) -> Any:
        return self.client.get(key)

    def _set_once(self, key: str) -> Any:
        return self.client.set(key, "1", nx=True)

    def _increment(self, key: str) -> Any:
        return self.client.incr(key)

    def _remove(self, key: str) -> Any:
        return self.client.delete(key)

    def _guarded_increment(self, key: str) -> bool:
        with self.client.pipeline() as pipeline:
            try:
                pipeline.watch(key)
                before = int(pipeline.get(key) or 0)
                self.note("watched", before)
                pipeline.multi()
                pipeline.set(key, before + 1)
                pipeline.execute()
            except redis.WatchError:
                return False
        return True

    def send(self, what: str) -> None:
        """An effect at a receiver that takes everything: watched, with a declared result."""
        raise AssertionError("the call went through")

    def note(self, *what: Any) -> None:
        thread = threading.current_thread()
        if what == ("begins",):
            self.traces[thread] = []
        self.traces[thread].append(what)

    def touch(self) -> None:
        for database in range(len(self.paths)):
            with self.engine(database, "").connect() as connection:
                connection.execute(text("SELECT 1 FROM once"))
        if self.client is not None:
            self.client.get("a")

    def ledger_of(self, facts: Facts) -> Ledger:
        return ledger_of(facts)

    def is_open(self, resource: Any, actor: Actor) -> bool:
        if isinstance(resource, SqliteDatabase):  # SQLite itself is asked
            return any(each.owner is actor and each.in_transaction for each in resource.handles.values())
        return bool(resource.holds(actor))

    def jam(self) -> str:
        return ""

    def close(self) -> None:
        for engine in self._engines.values():
            engine.dispose()
        if self.client is not None:
            self.client.close()


class _Noted:
    """Notes what it answers."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop

    def _noted(self, statement: str, values: dict[str, Any], perform: Callable[[], _Answer]) -> _Answer:
        try:
            answer = perform()
        except (IntegrityError, sqlite3.IntegrityError) as error:
            self._shop.note(statement, values, "IntegrityError")
            raise Duplicate from error
        except (OperationalError, sqlite3.OperationalError) as error:
            self._shop.note(statement, values, "OperationalError")
            raise Locked from error
        self._shop.note(statement, values, answer)
        return answer


class _Core(_Noted):
    """SQL through SQLAlchemy."""

    def __init__(self, shop: Shop, connection: Connection) -> None:
        super().__init__(shop)
        self._connection = connection

    def run(self, statement: str, **values: Any) -> tuple[list[tuple[Any, ...]], int]:
        def perform() -> tuple[list[tuple[Any, ...]], int]:
            result = self._connection.execute(text(statement), values)
            return [tuple(row) for row in result] if result.returns_rows else [], result.rowcount

        return self._noted(statement, values, perform)

    def commit(self) -> None:
        self._noted("COMMIT", {}, self._connection.commit)

    def rollback(self) -> None:
        self._connection.rollback()
        self._shop.note("ROLLBACK")


class _Raw(_Noted):
    """SQL on a connection of the driver."""

    def __init__(self, shop: Shop, connection: Any, begin: str) -> None:
        super().__init__(shop)
        self._connection = connection
        self._begin = begin
        self._begun = False

    def run(self, statement: str, **values: Any) -> tuple[list[tuple[Any, ...]], int]:
        if self._begin and not self._begun:
            self._execute(self._begin, {})
            self._begun = True
        return self._execute(statement, values)

    def _execute(self, statement: str, values: dict[str, Any]) -> tuple[list[tuple[Any, ...]], int]:
        def perform() -> tuple[list[tuple[Any, ...]], int]:
            cursor = self._connection.cursor()
            cursor.execute(statement, values)
            return cursor.fetchall(), cursor.rowcount

        return self._noted(statement, values, perform)

    def commit(self) -> None:
        if not self._begin:
            self._noted("COMMIT", {}, self._connection.commit)
        elif self._begun:
            self._execute("COMMIT", {})
            self._begun = False

    def rollback(self) -> None:
        if self._begun:
            self._execute("ROLLBACK", {})
            self._begun = False
        self._connection.rollback()
        self._shop.note("ROLLBACK")


def _driver_begins_nothing(connection: Any, record: Any) -> None:
    connection.isolation_level = None


def _begin(statement: str, connection: Connection) -> None:
    connection.exec_driver_sql(statement)


def under_the_tool(scene: Scene, program: Program, question: Callable[[Workshop, Job], _Answer]) -> _Answer:
    """Ask while everything is patched as in a check, and every resource has been found.

    Raises Unfit if a clean run of the job fails: no check goes further.
    """
    chaos = Chaos(duplicates=2, faults=True, late=False, scratch=scene.scratch)
    chaos.watch(scene, "send", result=None)

    def ask(check: Check) -> tuple[_Answer, None]:
        workshop, job = check._workshop, check._job
        order = Order(None, workshop.clock.base, 0, "clean", limit=_LIMIT)
        workshop.run(Job(scene.touch), order, keep_none)
        if workshop.run(job, order, keep_none).end != "done":
            raise Unfit
        return question(workshop, job), None

    return chaos._ask("job", partial(program, scene), (), {}, ask)


def ledger_of(facts: Facts) -> Ledger:
    """The rows that are committed; what is as it was found is part of it."""
    return frozenset(
        (f"{Path(resource).name} {name}", relation.rows)
        for resource, version in facts.items()
        for name, relation in version.relations.items()
        if name != "schema"
    )


# -- the tool's own search ------------------------------------------------------------------------------------------


class _Lenient:
    """A company of nobody, to whom every ledger is right."""

    visitors = ()

    def judge(self, facts: Facts, elapsed: float, *others: Any) -> None:
        return None

    def excess(self, facts: Facts, ran: frozenset[int]) -> bool:
        return False


class _Everything(Interleaving):
    """It goes on where nobody can get to the end, without letting the clock move on."""

    def _wait_where_stuck(self) -> bool:
        return False

    def _report_stuck(self) -> None:
        pass


_Look: TypeAlias = Callable[[Facts], Ledger]


def by_the_tool(workshop: Workshop, job: Job, scope: Scope, most_states: int, look: _Look = ledger_of) -> Found:
    """As a check does it: with transitions shared by all deliveries, and if these surprise, learned for each.

    Raises TooMany for jobs that fail and leave more behind each time.
    """
    try:
        return _by_the_tool(workshop, job, scope, most_states, look, shared=True)
    except Surprise:
        return _by_the_tool(workshop, job, scope, most_states, look, shared=False)


def _by_the_tool(workshop: Workshop, job: Job, scope: Scope, most_states: int, look: _Look, shared: bool) -> Found:
    judge: Any = _Lenient()

    def limit() -> float:
        if search.states > most_states:
            raise TooMany
        return _LIMIT

    search = _Everything(workshop, job, judge, workshop.clock.base, scope, limit, shared)
    search.explore()
    assert not search.doubts, search.doubts
    quiet = [node for node in search.reached if not node.seats]
    return Found(
        frozenset(look(search._facts(node)) for node in quiet if node.acked),
        frozenset(look(search._facts(node)) for node in quiet),
        not search.bounded,
        search.states,
        search.runs,
    )


# -- one real run ---------------------------------------------------------------------------------------------------


class Run:
    """Deliveries on the tool's world, from the start on. Knows what can be observed."""

    def __init__(self, workshop: Workshop, scene: Scene, play: Play, scope: Scope, most: int) -> None:
        faults = (ERROR, LOST_REPLY, SHUTDOWN) if scope.faults else ()
        self.table = Table(self, scope.duplicates, scope.crashes, most, faults)
        self._workshop = workshop
        self._scene = scene
        self._play = play
        self._actors: dict[int, Actor] = {}
        self._open: dict[tuple[int, str], int] = {}
        """Delivery and resource -> the event since which it has had a transaction open there."""
        self._events: dict[str, list[Hashable]] = {}
        """Resource -> what has happened on it."""

    # -- Stage ------------------------------------------------------------------------------------------------------

    def begin(self, ident: int) -> str:
        actor = self._actors[ident] = self._play.begin(ident)
        return actor.end

    def step(self, ident: int, fail: bool) -> str:
        actor = self._actors[ident]
        known = len(self._trace(ident))
        moved = self._play.run(actor, surface=fail)
        assert not (fail and actor.away), "everybody waits in the server"
        self._happened(ident, moved, self._trace(ident)[known:])
        if moved.end == "blocked" and sum(each.away and not each.dead for each in self._play.actors) > 1:
            return self._scene.jam() or moved.end
        return moved.end

    def strike(self, ident: int, kind: str) -> str:
        actor = self._actors[ident]
        known = len(self._trace(ident))
        moved = self._play.run(actor, fault=kind)
        if not actor.struck:
            return "missed"
        self._trace(ident).append(actor.struck)
        self._happened(ident, moved, self._trace(ident)[known:])
        return moved.end

    def kill(self, ident: int) -> None:
        self._play.kill(self._actors[ident])
        self._happened(ident, None, [])

    # -- what can be observed ---------------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        return self._scene.ledger_of({**self._workshop.world.found_facts, **self._play.facts()})

    def identity(self) -> Hashable:
        """All that can make a difference from now on.

        A transaction's fate may hang on everything that has happened on its resource since it began, and on the
        transactions that were open then: so two states with one are only equal if all of that is.
        """
        world, table = self._workshop.world, self.table
        seats = tuple((ident, table.live[ident], tuple(map(repr, self._trace(ident)))) for ident in sorted(table.live))
        history: list[Hashable] = []
        for name in sorted(world.resources):
            since = [event for (ident, resource), event in self._open.items() if resource == name]
            first = 0 if self._scene.keeps else min(since, default=0)
            history.append(tuple(self._events.get(name, [])[first:]) if since else ())
        rows = tuple(sorted((name, self._rows(name)) for name in world.resources))
        who = (
            table.acked,
            table.idle,
            table.kills,
            table.faults,
            table.missed,
            seats,
            tuple(sorted(table.blocked)),
            table.jammed,
        )
        return (rows, who, tuple(history))

    def _trace(self, ident: int) -> list[Any]:
        return self._scene.traces.get(self._actors[ident].thread, [])

    def _rows(self, name: str) -> Hashable:
        """Committed rows in their order."""
        version = self._workshop.world.resources[name].version
        return repr(sorted((each, relation.rows) for each, relation in version.relations.items()))

    def _happened(self, ident: int, moved: Moved | None, learned: list[Any]) -> None:
        """moved: None if it was killed."""
        self._play.facts()
        touched = moved.did.resource if moved and moved.did else None
        over = moved is None or bool(moved.end)
        for name, resource in self._workshop.world.resources.items():
            events = self._events.setdefault(name, [])
            if touched in (None, name) or over:
                events.append((ident, moved and moved.end, tuple(map(repr, learned)), self._rows(name)))
            for each, actor in self._actors.items():
                if not self._scene.is_open(resource, actor):
                    self._open.pop((each, name), None)
                else:
                    self._open.setdefault((each, name), max(0, len(events) - 1))
            if self._scene.keeps and not any(resource == name for _, resource in self._open):
                events.clear()


# -- the two slow searches ------------------------------------------------------------------------------------------


def by_enumeration(
    workshop: Workshop, job: Job, scene: Scene, scope: Scope, most_runs: int, most_deliveries: int
) -> Found:
    """Every sequence of moves, each in a real run of its own. Raises TooMany."""

    @contextmanager
    def start() -> Iterator[Run]:
        with Play(workshop, job, None, workshop.clock.base, _LIMIT) as play:
            yield Run(workshop, scene, play, scope, most_deliveries)

    return enumerate_runs(start, most_runs)


def by_exploration(workshop: Workshop, job: Job, scene: Scene, scope: Scope, most_states: int) -> Found:
    """The graph of states that are equal in all that can be observed. Raises TooMany."""
    left: set[Ledger] = set()
    idle: set[Ledger] = set()
    whole = True
    todo: dict[Hashable, list[Move]] = {}
    ways: dict[Hashable, list[Move]] = {}
    runs = 0

    def at(run: Run, way: list[Move]) -> Hashable:
        here = run.identity()
        if here not in ways:
            if len(ways) >= most_states:
                raise TooMany
            ways[here] = list(way)
            if moves := run.table.moves():
                todo[here] = moves
            if not run.table.live:
                idle.add(run.ledger)
                if run.table.acked:
                    left.add(run.ledger)
        return here

    while not runs or todo:
        runs += 1
        with Play(workshop, job, None, workshop.clock.base, _LIMIT) as play:
            run = Run(workshop, scene, play, scope, _NO_END)
            target = next(iter(todo), None)
            way: list[Move] = []
            for move in ways[target] if target is not None else []:
                run.table.go(move)
                way.append(move)
            here = at(run, way)
            assert target in (None, here), f"{way} led to another state:\n{target}\n{here}"
            while here in todo:
                moves = todo[here]
                move = moves.pop()
                if not moves:
                    del todo[here]
                run.table.go(move)
                way.append(move)
                here = at(run, way)
            whole = whole and not run.table.cut
    return Found(frozenset(left), frozenset(idle), whole, len(ways), runs)


_NO_END = 1_000_000
