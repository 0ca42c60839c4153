"""What it costs to try errors, lost replies and shutdowns. ``python -m benchmarks.faults`` prints a table.

Everything at once, as a check does it by default but without a limit of time: crash closure, a fault at every step of
the first delivery and what follows from each, and two deliveries that overlap. Beside it the same without faults.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import sqlalchemy
from sqlalchemy import Engine, text

from benchmarks.overlap import guarded_effects, on_postgres, on_sqlite, one_transaction
from retrychaos import Chaos
from retrychaos.model.report import PROVEN, Report

STEPS = 10
PROMISED = {("SQLite", "default", "one_transaction"): 5.0, ("SQLite", "default", "calls_and_rows"): 5.0}
"""Seconds, by database, profile and job."""
BUDGET = 600.0
ROUNDS = 3


class Shop:
    """Services that honour keys."""

    def reserve(self, order: int, key: str) -> None: ...
    def charge(self, order: int, key: str) -> None: ...
    def ship(self, order: int, key: str) -> None: ...


shop = Shop()


def calls_and_rows(engine: Engine, steps: int) -> None:
    """A look, three calls with keys, a row for each, two transactions: ten steps, and errors that are dealt with."""
    assert steps == STEPS
    with engine.begin() as connection:
        done = connection.execute(text("SELECT count(*) FROM done")).scalar_one()
        if done == 0:
            shop.reserve(1, key="reserve-1")
            connection.execute(text("INSERT INTO done VALUES (1)"))
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO done VALUES (2) ON CONFLICT DO NOTHING"))
        try:
            shop.charge(1, key="charge-1")
        except (ConnectionError, TimeoutError):
            shop.charge(1, key="charge-1")
        connection.execute(text("INSERT INTO done VALUES (3) ON CONFLICT DO NOTHING"))
        shop.ship(1, key="ship-1")
        connection.execute(text("INSERT INTO done VALUES (4) ON CONFLICT DO NOTHING"))


@dataclass(frozen=True)
class Row:
    """Medians of the rounds of one case."""

    database: str
    profile: str
    job: str
    report: Report
    seconds: float
    calm: float
    calm_runs: int

    @property
    def verdict(self) -> str:
        if self.report.verdict != PROVEN or "for lack of time" in self.report.guarantee:
            return f"WRONG: {self.report.verdict}"
        if self.report.steps != STEPS:
            return f"WRONG: {self.report.steps} steps"
        promised = PROMISED.get((self.database, self.profile, self.job))
        if promised is None:
            return "no promise"
        return f"{self.seconds:.2f} <= {promised:g} s{'' if self.seconds <= promised else ', too slow'}"

    def __str__(self) -> str:
        return (
            f"| {self.database} | {self.profile} | {self.job.replace('_', ' ')} | {self.report.states:,} | "
            f"{self.report.runs} | {self.seconds:.2f} | {self.calm_runs} | {self.calm:.2f} | {self.verdict} |"
        )


def measure(database: str, engine: Engine, scratch: list[str], job: Callable[[Engine, int], None], profile: str) -> Row:
    """A check with faults and one without, in turn."""
    times: dict[bool, list[float]] = {True: [], False: []}
    reports: dict[bool, Report] = {}
    for _ in range(ROUNDS):
        for faults in (True, False):
            with _fresh(engine), Chaos(faults=faults, profile=profile, budget=BUDGET, scratch=scratch) as chaos:
                for name in ("reserve", "charge", "ship"):
                    chaos.watch(shop, name, result="ok", key="key")
                began = time.perf_counter()
                reports[faults] = chaos.explore(job, engine, STEPS)
                times[faults].append(time.perf_counter() - began)
        if times[True][0] > 5:
            break
    seconds, calm = (statistics.median(times[faults]) for faults in (True, False))
    return Row(database, profile, job.__name__, reports[True], seconds, calm, reports[False].runs)


@contextmanager
def _fresh(engine: Engine) -> Iterator[None]:
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE IF EXISTS done"))
        connection.execute(text("CREATE TABLE done (n INTEGER PRIMARY KEY)"))
    engine.dispose()
    yield


def main() -> None:
    print(f"Python {platform.python_version()}, SQLAlchemy {sqlalchemy.__version__}\n")
    print("| database | profile | job of ten steps | states | runs | seconds | runs without | seconds | promise |")
    print("|---|---|---|---:|---:|---:|---:|---:|---|")
    kept = True
    for database, world in (("SQLite", on_sqlite), ("PostgreSQL", on_postgres)):
        with world() as (engine, scratch):
            for profile in ("default", "thorough"):
                for job in (one_transaction, calls_and_rows, guarded_effects):
                    if job is guarded_effects and (database, profile) != ("SQLite", "default"):
                        continue  # minutes
                    row = measure(database, engine, scratch, job, profile)
                    print(row, flush=True)
                    kept = kept and not ("WRONG" in row.verdict or "too slow" in row.verdict)
    sys.exit(not kept)


if __name__ == "__main__":
    main()
