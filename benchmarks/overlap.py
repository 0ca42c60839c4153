"""What it costs to try every order of deliveries that overlap. ``python -m benchmarks.overlap [--quick]`` prints a
table.

Beside each check the job is run plainly twice, in turn with it, so that both see the same machine. Seconds are those of
the part in which deliveries overlap: a check without that is taken off.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy import Engine, create_engine, text

from retrychaos import Chaos
from retrychaos.model.report import PROVEN, Report
from retrychaos.runtime.turns import Moved, Play

PROMISED = {
    ("SQLite", "one transaction", 2): {5: 0.05, 10: 0.3, 20: 10.0},
    ("SQLite", "one transaction", 3): {10: 3.0},
    ("PostgreSQL", "one transaction", 2): {5: 0.1, 10: 0.5, 20: 20.0},
}
"""Seconds until a space with kills is closed, by database, job, live deliveries and steps."""
STEPS_PER_SECOND = {"SQLite": 4_000, "PostgreSQL": 800}
"""Promised for steps that are really done, turn by turn."""
MOST_STATES = 100_000
BUDGET = 600.0
ROUNDS = 5


def one_transaction(engine: Engine, steps: int) -> None:
    """Statements that are right whoever comes first, and one COMMIT."""
    with engine.begin() as connection:
        for number in range(steps - 1):
            connection.execute(text("INSERT INTO done VALUES (:n) ON CONFLICT DO NOTHING"), {"n": number})


def guarded_effects(engine: Engine, steps: int) -> None:
    """As many transactions as fit: look, do it unless it is done, COMMIT."""
    for number in range(steps // 2):
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO done VALUES (:n) ON CONFLICT DO NOTHING"), {"n": number})


@dataclass(frozen=True)
class Row:
    """Medians of the rounds of one case."""

    database: str
    job: str
    duplicates: int
    steps: int
    report: Report
    seconds: float
    crashes_only: float
    twice: float
    rate: float
    """Real steps in a second."""

    def __str__(self) -> str:
        promised = PROMISED.get((self.database, self.job, self.duplicates), {}).get(self.steps)
        net = self.seconds - self.crashes_only
        verdict = "" if promised is None else f"{net:.3f} <= {promised:g} s{'' if net <= promised else ', too slow'}"
        if promised is not None and self.rate < STEPS_PER_SECOND[self.database]:
            verdict += f", less than {STEPS_PER_SECOND[self.database]:,} steps a second"
        if self.report.verdict != PROVEN:
            verdict = f"WRONG: {self.report.verdict}"
        return (
            f"| {self.database} | {self.job} | {self.duplicates} | {self.steps} | {self.report.states:,} | "
            f"{self.report.runs} | {net:.3f} | {self.twice * 1000:.1f} ms | {self.rate:,.0f} | {verdict} |"
        )


def measure(
    database: str, engine: Engine, scratch: list[str], job: Callable[[Engine, int], None], duplicates: int, steps: int
) -> Row:
    """A check with deliveries that overlap, one without, and two plain runs, in turn."""
    whole: list[float] = []
    alone: list[float] = []
    plain: list[float] = []
    report: Report | None = None
    rate = 0.0
    for _ in range(ROUNDS):
        for live, times in ((duplicates, whole), (1, alone)):
            _rewind(engine)
            with Chaos(duplicates=live, budget=BUDGET, scratch=scratch) as chaos, counted() as steps_done:
                seconds, done = _timed(lambda live=chaos: live.explore(job, engine, steps))
            times.append(seconds)
            if live == duplicates:
                report, rate = done, steps_done.rate
        _rewind(engine)
        began = time.perf_counter()
        job(engine, steps)
        job(engine, steps)
        plain.append(time.perf_counter() - began)
        if whole[0] > 5:
            break
    assert report is not None
    name = job.__name__.replace("_", " ")
    medians = (statistics.median(times[1:] or times) for times in (whole, alone, plain))
    return Row(database, name, duplicates, steps, report, *medians, rate)


@dataclass
class Steps:
    """Steps of deliveries that take turns, and the seconds that they took."""

    number: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.number / self.seconds if self.seconds else 0.0


@contextmanager
def counted() -> Iterator[Steps]:
    run, steps = Play.run, Steps()

    def counting(*args: Any, **kwargs: Any) -> Moved:
        began = time.clock_gettime(time.CLOCK_MONOTONIC)  # perf_counter is virtual in a check
        try:
            return run(*args, **kwargs)
        finally:
            steps.number += 1
            steps.seconds += time.clock_gettime(time.CLOCK_MONOTONIC) - began

    Play.run = counting  # type: ignore[method-assign]  # put back below
    try:
        yield steps
    finally:
        Play.run = run  # type: ignore[method-assign]  # as it was


def _timed(check: Callable[[], Report]) -> tuple[float, Report]:
    gc.collect()
    began = time.perf_counter()
    report = check()
    return time.perf_counter() - began, report


def _rewind(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE IF EXISTS done"))
        connection.execute(text("CREATE TABLE done (n INTEGER PRIMARY KEY)"))
    engine.dispose()


@contextmanager
def on_sqlite() -> Iterator[tuple[Engine, list[str]]]:
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="retrychaos-", dir=folder) as home:
        engine = create_engine(f"sqlite:///{home}/jobs.db")
        yield engine, []
        engine.dispose()


@contextmanager
def on_postgres() -> Iterator[tuple[Engine, list[str]]]:
    from tests.postgres_server import running_server

    with running_server() as server, server.database() as name:
        engine = create_engine(server.url(name))
        yield engine, [f"postgresql:///?host={server.folder}"]
        engine.dispose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="up to 10 steps")
    quick = parser.parse_args().quick
    print(f"Python {platform.python_version()}, SQLAlchemy {sqlalchemy.__version__}\n")
    print("| database | job | live | steps | states | runs | seconds | the job twice | steps a second | promise |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---|")
    for database, world in (("SQLite", on_sqlite), ("PostgreSQL", on_postgres)):
        with world() as (engine, scratch):
            for steps in (5, 10) if quick else (5, 10, 20):
                print(measure(database, engine, scratch, one_transaction, 2, steps), flush=True)
            for steps in (4, 6) if quick else (4, 6, 8, 10):
                print(measure(database, engine, scratch, guarded_effects, 2, steps), flush=True)
            for steps in (5,) if quick else (5, 10):
                print(measure(database, engine, scratch, one_transaction, 3, steps), flush=True)
    if not quick:
        print(f"\n{many_states()}")


def many_states() -> str:
    """The memory that a space of many states takes; the last measurement, since memory is never given back."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with on_sqlite() as (engine, _):
        for steps in itertools.count(12, 2):
            _rewind(engine)
            with Chaos(duplicates=2, budget=BUDGET) as chaos:
                report = chaos.explore(guarded_effects, engine, steps)
            if report.states >= MOST_STATES:
                break
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return (
        f"{report.states:,} states ({steps // 2} guarded effects on SQLite): the peak of memory grew by {grown:.0f} MB."
    )


if __name__ == "__main__":
    main()
