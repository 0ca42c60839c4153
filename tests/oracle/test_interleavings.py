"""Random small jobs whose deliveries overlap: does the tool's search reach the ledgers that slow, simple ones reach?

RETRYCHAOS_INTERLEAVING_SEEDS=FIRST-LAST tries those seeds instead of the usual ones, for each kind of jobs.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from retrychaos.explore.interleaving import Scope
from tests.oracle.comparing import Outcome, chosen, difference, outcome, simplest
from tests.oracle.interleaved_processes import Processes, Question
from tests.oracle.interleavings import Shop, by_enumeration, by_exploration, by_the_tool, under_the_tool
from tests.oracle.moves import Ledger
from tests.oracle.overlapping_jobs import RAW_STYLES, STYLES, Block, Kind, Program, Unfit, random_program

BATCH = 10
MOST_STATES = 1_000
"""Of the tool's search."""
MOST_DELIVERIES = 4
"""In one run of the enumeration, which does not see that failing again and again leads nowhere new."""
JOURNALS = ("delete", "truncate", "memory", "wal")


@dataclass(frozen=True)
class Family:
    """Random jobs of one kind. seeds: how many in a usual run. states, runs: more is too many for the slow searches."""

    kind: Kind
    scope: Scope
    seeds: int
    states: int = 80
    runs: int = 30

    def case(self, seed: int) -> Case:
        chance = random.Random(seed)
        return Case(random_program(chance, self.kind), chance.choice(JOURNALS), self)


@dataclass(frozen=True)
class Case:
    program: Program
    journal: str
    family: Family


FAMILIES = {
    "pairs": Family(Kind((2, 3), second=0.1), Scope(2, 0), 60),
    "raw": Family(Kind((2, 3), (*RAW_STYLES, *STYLES)), Scope(2, 0), 30),
    "crashes": Family(Kind((1, 2), second=0.1), Scope(2, 1), 50),
    "redis": Family(Kind((2, 3), redis=0.5), Scope(2, 0), 20),
    "redis crashes": Family(Kind((1, 2), redis=0.5), Scope(2, 1), 20),
    "faults": Family(Kind((1, 2), second=0.1), Scope(2, 0, faults=True, anywhere=True), 20, states=100, runs=60),
    "redis faults": Family(Kind((1, 2), redis=0.5), Scope(2, 0, faults=True, anywhere=True), 10, 100, 60),
    "three": Family(Kind((1, 2), sends=0.05), Scope(3, 0), 20),
}


def usual(family: Family, share: int = 1) -> range:
    return chosen(range(family.seeds // share))


def batches() -> Iterator[object]:
    for name, family in FAMILIES.items():
        seeds = usual(family)
        for start in range(0, len(seeds), BATCH):
            some = seeds[start : start + BATCH]
            yield pytest.param(name, some, id=f"{name.replace(' ', '-')}-{some[0]}-{some[-1]}")


# -- comparing ------------------------------------------------------------------------------------------------------


def in_the_shop(case: Case) -> tuple[Outcome, Outcome, Outcome]:
    """What the tool, the exploration and the enumeration find; None where a job is too big, or fails in a clean run."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="interleavings-", dir=memory) as folder:
        with closing(Shop(Path(folder), case.journal, case.family.kind.redis > 0)) as shop:
            family, scope = case.family, case.family.scope
            with contextlib.suppress(Unfit):
                return under_the_tool(
                    shop,
                    case.program,
                    lambda workshop, job: (
                        outcome(lambda: by_the_tool(workshop, job, scope, MOST_STATES)),
                        outcome(lambda: by_exploration(workshop, job, shop, scope, family.states)),
                        outcome(lambda: by_enumeration(workshop, job, shop, scope, family.runs, MOST_DELIVERIES)),
                    ),
                )
    return None, None, None


def disagreement(case: Case) -> str:
    tool, explored, enumerated = in_the_shop(case)
    return difference(tool, explored, "exploration") or difference(tool, enumerated, "enumeration")


def report(seed: object, case: Case, disagrees: Callable[[Case], str]) -> str:
    small, shown = simplest(case, disagrees)
    return f"seed {seed}: {case.program}\n  smaller, {small.journal}, {small.family.scope}: {small.program}\n{shown}"


# -- tests ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("name", "seeds"), list(batches()))
def test_random_jobs(name: str, seeds: range) -> None:
    """The tool reaches the same ledgers as exploration without shortcuts, and as every sequence of moves."""
    family = FAMILIES[name]
    explored = enumerated = 0
    failures = []
    for seed in seeds:
        case = family.case(seed)
        tool, by_states, by_runs = in_the_shop(case)
        explored += by_states is not None
        enumerated += by_runs is not None
        if difference(tool, by_states, "exploration") or difference(tool, by_runs, "enumeration"):
            failures.append(report(f"{name} {seed}", case, disagreement))
    if failures:
        pytest.fail(f"{len(failures)} disagreements\n\n" + "\n\n".join(failures), pytrace=False)
    assert explored + enumerated, "all of these jobs were too big to compare anything"


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with closing(Processes()) as handle:
        yield handle


def by_processes(case: Case, processes: Processes) -> str:
    tool, _, _ = in_the_shop(Case(case.program, case.journal, Family(case.family.kind, case.family.scope, 0, 0, 0)))
    family, scope = case.family, case.family.scope
    assert scope.crashes is not None
    question = Question(case.program, case.journal, scope.duplicates, scope.crashes, family.runs, MOST_DELIVERIES)
    return difference(tool, outcome(lambda: processes.find(question)), "processes")


@pytest.mark.parametrize("name", ["pairs", "raw", "crashes", "three"])
def test_real_processes(name: str, processes: Processes) -> None:
    """The tool reaches the same ledgers as processes with connections of their own that are killed by the system."""
    failures = []
    for seed in usual(FAMILIES[name], share=10):
        case = FAMILIES[name].case(seed)
        if by_processes(case, processes):
            failures.append(report(f"{name} {seed}", case, lambda case: by_processes(case, processes)))
    if failures:
        pytest.fail(f"{len(failures)} disagreements\n\n" + "\n\n".join(failures), pytrace=False)


KNOWN: dict[str, tuple[Program, str]] = {
    "a refused insert keeps its lock": (
        Program(
            (
                Block((("exists", "taken"), ("send", "y")), database=1),
                Block((("try_claim", "taken"), ("savepoint", ("bump", 1))), after_error="skip"),
            )
        ),
        "wal",
    ),
    "what a statement has committed is seen before another one begins": (
        Program(
            (
                Block((("unclaim", "taken"), ("savepoint", ("insert", "y"))), "RAW BEGIN", after_error="again"),
                Block((("exists", "taken"),), "RAW BEGIN"),
            )
        ),
        "wal",
    ),
    "nobody can read while a commit waits": (
        Program((Block((("value", 1), ("leave_if", 1), ("bump", 1)), "BEGIN", after_error="again"),)),
        "delete",
    ),
    "a statement that has waited has done something": (
        Program((Block((("bump", 1),)), Block((("claim_quietly", "k"),), "AUTOCOMMIT"))),
        "delete",
    ),
    "a statement that begins a transaction waits": (
        Program((Block((("value", 1), ("leave_if", 1), ("bump", 1)), "RAW BEGIN IMMEDIATE"),)),
        "wal",
    ),
}


@pytest.mark.parametrize("crashes", [0, 1])
@pytest.mark.parametrize("name", KNOWN)
def test_known_jobs(name: str, crashes: int, processes: Processes) -> None:
    """Jobs that the tool was once wrong about."""
    program, journal = KNOWN[name]
    case = Case(program, journal, Family(Kind(), Scope(2, crashes), 0, states=300, runs=60))
    found = disagreement(case) or by_processes(case, processes)
    assert not found, found


def left_by_the_tool(program: Program) -> frozenset[Ledger]:
    with tempfile.TemporaryDirectory() as folder, closing(Shop(Path(folder), "delete")) as shop:
        search = partial(by_the_tool, scope=Scope(2, 0), most_states=20 * MOST_STATES)
        return under_the_tool(shop, program, lambda workshop, job: search(workshop, job)).left


ROLE = Block((("bump", 1),), "AUTOCOMMIT", database=1)
"""Who comes first finds 1 in the second database, who comes second 2: nothing else is in anybody's way."""
ASK = ("inner", Block((("value", 1),), "RAW", database=1))


def test_a_commit_waits_for_readers_however_it_is_written() -> None:
    """A COMMIT that is executed as a statement waits as one by the driver does, and does not fail at once."""
    operations = (("count",), ASK, ("leave_if", 2), ("bump", 2))
    by_statement, by_driver = (
        Program((ROLE, Block(operations, style, after_error="stop"), ("send", "x"))) for style in ("RAW BEGIN", "BEGIN")
    )
    assert left_by_the_tool(by_statement) == left_by_the_tool(by_driver)


@pytest.mark.xfail(
    strict=True,
    reason="a statement outside of a transaction gives up its lock here while it waits for readers; in production it "
    "keeps it, and a reader that then wants to write is refused",
)
def test_a_single_statement_keeps_its_lock_while_it_waits(processes: Processes) -> None:
    """Outside of a transaction too: a reader that then wants to write is refused, since both would wait for ever."""
    first = Block((ASK, ("leave_if", 2), ("value", 1), ("bump", 1)), "BEGIN", after_error="stop")
    program = Program((ROLE, first, Block((("bump", 2),), "AUTOCOMMIT"), ("send", "x")))
    # The one stops before its UPDATE, with the lock of a reader; the other one's UPDATE waits for it.
    question = Question(program, "delete", 2, 0, 1, 4, script=(0,) * 6 + (1,) * 6)
    (real,) = processes.find(question).left
    assert ("first.db counters", ((1, 0), (2, 1))) in real
    assert real in left_by_the_tool(program)
