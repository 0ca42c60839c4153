"""Random small jobs whose deliveries overlap on PostgreSQL: the same ledgers as slow, simple searches find?

RETRYCHAOS_INTERLEAVING_SEEDS=FIRST-LAST tries those seeds instead of the usual ones, for each kind of jobs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

import pytest

from retrychaos.explore.interleaving import Scope
from retrychaos.runtime import turns
from retrychaos.runtime.delivery import Job, Workshop
from tests.oracle.comparing import Outcome, chosen, difference, outcome, simplest
from tests.oracle.interleaved_processes import Processes
from tests.oracle.interleaved_sessions import Question
from tests.oracle.interleavings import by_enumeration, by_exploration, by_the_tool, under_the_tool
from tests.oracle.moves import Found
from tests.oracle.overlapping_jobs import (
    POSTGRES_NAMES,
    Block,
    Kind,
    Operation,
    Program,
    Unfit,
    contended_program,
    random_program,
)
from tests.oracle.postgres_interleavings import STYLES, PostgresShop, Store
from tests.postgres_server import Postgres

BATCH = 10
FEW_STATES = 20
"""Of the tool's search; where there are more, there are too many runs to make all of them."""
_PATIENCE = 0.03
"""Seconds until a deadlock would have been found, also on a machine that is busy."""
MOST_RUNS = 30
REAL_RUNS = 100
"""Of processes, which are faster."""
SHARE = 5
"""So many random jobs are tried without processes, where one is tried with them."""
MOST_DELIVERIES = 4
"""In one run of the enumeration, which does not see that failing again and again leads nowhere new."""


@dataclass(frozen=True)
class Family:
    """Random jobs of one kind. seeds: how many in a usual run. states: of the tool's search; more is too many."""

    kind: Kind
    scope: Scope
    seeds: int
    states: int = 45
    driver: str = "psycopg"
    make: Callable[[random.Random, Kind], Program] = random_program

    def case(self, seed: int) -> Case:
        chance = random.Random(seed)
        program = self.make(chance, self.kind)
        return Case(Program(tuple(map(_in_a_transaction, program.parts))), self)


@dataclass(frozen=True)
class Case:
    program: Program
    family: Family


def _in_a_transaction(part: Block | Operation) -> Block | Operation:
    """Where some statement has to be in one."""
    if isinstance(part, Block) and not {"savepoint", "lock_table"}.isdisjoint(each[0] for each in part.operations):
        return replace(part, style=part.style.replace("AUTOCOMMIT", ""))
    return part


def _kind(least: int, most: int, styles: tuple[str, ...] = STYLES) -> Kind:
    return Kind((least, most), styles, sends=0.08, inner=0.0, names=POSTGRES_NAMES)


NOT_SERIALIZABLE = tuple(style for style in STYLES if style != "SERIALIZABLE")
FAMILIES = {
    "pairs": Family(_kind(2, 3), Scope(2, 0), 30),
    "contended": Family(_kind(1, 2), Scope(2, 0), 20, make=contended_program),
    "psycopg2": Family(_kind(1, 1), Scope(2, 0), 10, driver="psycopg2", make=contended_program),
    "crashes": Family(_kind(1, 2, NOT_SERIALIZABLE), Scope(2, 1), 20),
    "contended crashes": Family(_kind(1, 1, NOT_SERIALIZABLE), Scope(2, 1), 10, make=contended_program),
    "three": Family(_kind(1, 1), Scope(3, 0), 10),
}


def batches() -> Iterator[object]:
    for name, family in FAMILIES.items():
        seeds = chosen(range(family.seeds))
        for start in range(0, len(seeds), BATCH):
            some = seeds[start : start + BATCH]
            yield pytest.param(name, some, id=f"{name.replace(' ', '-')}-{some[0]}-{some[-1]}")


@pytest.fixture(scope="module")
def store(postgres_server: Postgres) -> Iterator[Store]:
    with postgres_server.database() as name, closing(Store(postgres_server, name)) as store:
        yield store


def in_the_shop(case: Case, store: Store) -> tuple[Outcome, Outcome, Outcome]:
    """What the tool, the exploration and the enumeration find; None where a job is too big, or fails in a clean run."""
    family, scope = case.family, case.family.scope

    def all_three(workshop: Workshop, job: Job) -> tuple[Outcome, Outcome, Outcome]:
        tool = outcome(lambda: by_the_tool(workshop, job, scope, family.states, shop.ledger_of))
        if not isinstance(tool, Found):
            return tool, None, None  # the slow ones would only take longer to find that it is too big
        explored = outcome(lambda: by_exploration(workshop, job, shop, scope, 2 * family.states))
        enumerated = None
        if tool.states <= FEW_STATES:
            enumerated = outcome(lambda: by_enumeration(workshop, job, shop, scope, MOST_RUNS, MOST_DELIVERIES))
        return tool, explored, enumerated

    with closing(PostgresShop(store, family.driver)) as shop:
        try:
            return under_the_tool(shop, case.program, all_three)
        except Unfit:
            return None, None, None


def disagreement(case: Case, store: Store) -> str:
    tool, explored, enumerated = in_the_shop(case, store)
    return difference(tool, explored, "exploration") or difference(tool, enumerated, "enumeration")


@contextmanager
def patience() -> Iterator[None]:
    """On a machine that is busy, the server may look for a deadlock later than the deliveries here take for granted,
    and end another one of a circle. What is found is only believed if it is found again with more time for that.
    """
    before, turns._DEADLOCK = turns._DEADLOCK, _PATIENCE
    try:
        yield
    finally:
        turns._DEADLOCK = before


def report(seed: object, case: Case, disagrees: Callable[[Case], str]) -> str:
    """Empty if it is not found again."""
    with patience():
        small, shown = simplest(case, disagrees)
    if not shown:
        return ""
    family = small.family
    return f"seed {seed}: {case.program}\n  smaller, {family.driver}, {family.scope}: {small.program}\n{shown}"


def fail(reports: list[str]) -> None:
    found = [each for each in reports if each]
    if found:
        pytest.fail(f"{len(found)} disagreements\n\n" + "\n\n".join(found), pytrace=False)


@pytest.mark.long
@pytest.mark.parametrize(("name", "seeds"), list(batches()))
def test_random_jobs(name: str, seeds: range, store: Store) -> None:
    """The tool reaches the same ledgers as exploration without shortcuts, and as every sequence of moves."""
    family = FAMILIES[name]
    compared = 0
    failures = []
    for seed in seeds:
        case = family.case(seed)
        tool, by_states, by_runs = in_the_shop(case, store)
        compared += by_states is not None or by_runs is not None
        if difference(tool, by_states, "exploration") or difference(tool, by_runs, "enumeration"):
            failures.append(report(f"{name} {seed}", case, lambda case: disagreement(case, store)))
    fail(failures)
    assert compared, "all of these jobs were too big to compare anything"


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with closing(Processes("interleaved_sessions")) as handle:
        yield handle


def by_processes(case: Case, store: Store, processes: Processes) -> str:
    """In which ledgers the tool and real processes disagree."""
    family, scope = case.family, case.family.scope
    assert scope.crashes is not None
    with closing(PostgresShop(store, family.driver)) as shop:
        try:
            tool = under_the_tool(
                shop,
                case.program,
                lambda workshop, job: outcome(lambda: by_the_tool(workshop, job, scope, family.states, shop.ledger_of)),
            )
        except Unfit:
            return ""
    if tool is None:
        return ""
    question = Question(
        store.server.folder, store.name, case.program, scope.duplicates, scope.crashes, REAL_RUNS, MOST_DELIVERIES
    )
    return difference(tool, outcome(lambda: processes.find(question)), "processes")


@pytest.mark.parametrize("name", FAMILIES)
def test_real_processes(name: str, store: Store, processes: Processes) -> None:
    """The tool reaches the same ledgers as processes with connections of their own that are killed by the system."""
    family = FAMILIES[name]
    failures = []
    for seed in chosen(range(family.seeds // SHARE)):
        case = family.case(seed)
        if by_processes(case, store, processes):
            failures.append(report(f"{name} {seed}", case, lambda case: by_processes(case, store, processes)))
    fail(failures)


KNOWN: dict[str, tuple[Program, int]] = {
    "two who share a row and want to write it": (
        Program((Block((("lock", 1, "SHARE"), ("bump", 1)), after_error="again"),)),
        0,
    ),
    "a snapshot of the past": (
        Program((Block((("value", 1), ("store", 1)), "REPEATABLE READ", after_error="again"),)),
        0,
    ),
    "a circle of a row and an advisory lock": (
        Program((Block((("bump", 1), ("advise", 1))), Block((("advise", 1), ("bump", 1)), after_error="skip"))),
        0,
    ),
    "a failed statement is not waited for": (
        Program((Block((("try_claim", "k"), ("bump", 1)), after_error="skip"),)),
        0,
    ),
    "a foreign key and a lock": (Program((Block((("refer", 1), ("lock", 1, "UPDATE")), after_error="stop"),)), 0),
    "write skew": (Program((Block((("exists", "k"), ("leave_if", 1), ("claim_quietly", "k")), "SERIALIZABLE"),)), 0),
    "a claim that is taken back": (Program((Block((("unclaim", "taken"), ("claim_quietly", "taken"))),)), 0),
    "what is locked depends on what others have locked": (
        Program((Block((("lock", 1, "KEY SHARE"), ("pick",), ("fail_if", 0))),)),
        0,
    ),
    "a COMMIT that fails has been observed as one that succeeds": (
        Program(
            (
                Block((("count",), ("insert_got",)), "SERIALIZABLE", after_error="again"),
                Block((("insert", "y"),)),
            )
        ),
        0,
    ),
    "a statement outside of a transaction that changes nothing is a commit": (
        Program((Block((("store", 1),), "AUTOCOMMIT"), Block((("value", 1), ("store", 1)), "REPEATABLE READ"))),
        0,
    ),
    "what a statement has committed that has waited is there at once": (
        Program((Block((("lock", 1, "UPDATE SKIP LOCKED"),)), Block((("upsert", 1),), "AUTOCOMMIT"))),
        0,
    ),
    "a waiting statement draws a number when the one that it waits for dies": (
        Program((Block((("lock_table", "notes", "SHARE"), ("insert", "x"))),)),
        1,
    ),
}
"""Programs, and with how many crashes."""


@pytest.mark.parametrize("name", KNOWN)
def test_known_jobs(name: str, store: Store, processes: Processes) -> None:
    """Jobs that are about one thing each; many the tool was once wrong about."""
    program, crashes = KNOWN[name]
    case = Case(program, Family(Kind(), Scope(2, crashes), 0, states=300))
    found = disagreement(case, store) or by_processes(case, store, processes)
    assert not found or not report(name, case, lambda case: disagreement(case, store)), found
