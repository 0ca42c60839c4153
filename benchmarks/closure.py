"""What a crash closure costs, against the job itself. ``python -m benchmarks.closure [--quick]`` prints tables."""

from __future__ import annotations

import argparse
import gc
import platform
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import fakeredis
import redis
import sqlalchemy

from benchmarks import jobs
from retrychaos import Chaos
from retrychaos.model.report import PROVEN, Report

FACTOR, FIXED = 1.5, 0.015
"""The promise: total time <= FACTOR x states x one plain run + FIXED seconds, for a database up to 100 kB."""
BUDGET = 600.0
"""Seconds a check may take: a slow disk must not end it."""
MOST_MEMORY = 300
"""MB that 1,000 states of a database of 1 MB may take."""
TMPFS = Path("/dev/shm")
DISK = Path("/var/tmp")  # survives a reboot by convention, so it is on disk; /tmp may not be


@dataclass
class Case:
    """A job to be measured: `check` explores it once, `plain` runs it once and returns the seconds."""

    job: str
    where: str
    effects: int
    check: Callable[[], Report]
    plain: Callable[[], float]
    promised: bool = True
    """The promise of FACTOR and FIXED holds for it."""


@dataclass
class Measured:
    """Medians of the rounds of a case."""

    case: Case
    report: Report
    total: float
    plain: float

    @property
    def whole(self) -> float:
        """Seconds of one plain run for each state."""
        return self.report.states * self.plain

    @property
    def bound(self) -> float:
        return FACTOR * self.whole + FIXED

    @property
    def result(self) -> str:
        if self.report.verdict != PROVEN or self.report.runs != self.report.states + 1:
            return f"WRONG: {self.report.verdict}"
        if not self.case.promised:
            return "no promise"
        return "ok" if self.total <= self.bound else "too slow"


def measure(case: Case, seconds: float) -> Measured:
    """Check and plain runs in turn, so that both see the same machine, for about that many seconds."""
    end = time.perf_counter() + seconds
    totals: list[float] = []
    plains: list[float] = []
    while not totals or (time.perf_counter() < end and len(totals) < 16):
        plains += [case.plain() for _ in range(2)]
        total, report = _timed(case.check)
        totals.append(total)
        plains += [case.plain() for _ in range(2)]
    if len(totals) > 1:  # the first round has imports and statements to compile
        del totals[0], plains[:4]
    return Measured(case, report, statistics.median(totals), statistics.median(plains))


def _timed(check: Callable[[], Report]) -> tuple[float, Report]:
    gc.collect()
    began = time.perf_counter()
    report = check()
    return time.perf_counter() - began, report


# -- cases ----------------------------------------------------------------------------------------------------------


@contextmanager
def on_sqlite(
    where: str, folder: Path | None, effects: int, archived: int = 0, job: Callable[..., None] = jobs.send
) -> Iterator[Case]:
    """A job on SQLite through the ORM; in memory if `folder` is None."""
    home = None if folder is None else Path(tempfile.mkdtemp(prefix="retrychaos-", dir=folder))
    path = None if home is None else home / "jobs.db"
    engine = jobs.open_database(None if path is None else str(path), archived)
    start = _contents(engine)

    def rewind() -> None:
        """A fresh copy of the database, and a fresh connection where that does not lose it."""
        if path is None:
            with _copy(start) as source, closing(engine.raw_connection()) as raw:
                assert raw.dbapi_connection is not None
                source.backup(raw.dbapi_connection)
        else:
            engine.dispose()
            path.write_bytes(start)

    def plain() -> float:
        rewind()
        began = time.perf_counter()
        job(engine, effects)
        return time.perf_counter() - began

    def check() -> Report:
        rewind()
        with Chaos(budget=BUDGET, duplicates=1) as chaos:
            return chaos.explore(job, engine, effects)

    try:
        yield Case(f"ORM {job.__name__}", where, effects, check, plain, promised=not archived)
    finally:
        engine.dispose()
        if home is not None:
            shutil.rmtree(home)


def _contents(engine: sqlalchemy.Engine) -> bytes:
    with closing(engine.raw_connection()) as raw:
        assert isinstance(raw.dbapi_connection, sqlite3.Connection)
        return raw.dbapi_connection.serialize()


@contextmanager
def _copy(data: bytes) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.deserialize(data)
        yield connection


@contextmanager
def on_redis(effects: int) -> Iterator[Case]:
    """A job on fakeredis alone."""

    def fresh() -> redis.Redis:
        return fakeredis.FakeRedis(server=fakeredis.FakeServer())

    def plain() -> float:
        with closing(fresh()) as client:
            began = time.perf_counter()
            jobs.count(client, effects)
            return time.perf_counter() - began

    def check() -> Report:
        with closing(fresh()) as client, Chaos(budget=BUDGET, duplicates=1) as chaos:
            return chaos.explore(jobs.count, client, effects)

    yield Case("redis count", "fakeredis", effects, check, plain, promised=False)


# -- tables ---------------------------------------------------------------------------------------------------------

_HEAD = """\
| job | where | effects | states | runs | boundaries | seconds | one plain run | ratio | total <= bound | |
|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|"""


def row(measured: Measured) -> str:
    case, report = measured.case, measured.report
    return (
        f"| {case.job} | {case.where} | {case.effects} | {report.states} | {report.runs} | {report.boundaries:,} "
        f"| {measured.total:.3f} | {1000 * measured.plain:.2f} ms | {measured.total / measured.whole:.2f} "
        f"| {1000 * measured.total:.1f} <= {1000 * measured.bound:.1f} ms | {measured.result} |"
    )


def closures(quick: bool) -> bool:
    """Print the table of times. Whether every promise was kept."""
    places = {"memory": None, "tmpfs": TMPFS, "disk": DISK}
    sizes = (5, 20) if quick else (5, 20, 100)
    seconds = 0.5 if quick else 4.0
    cases = [on_sqlite(where, folder, size) for where, folder in places.items() for size in sizes]
    cases += [on_redis(size) for size in sizes]
    cases += [on_sqlite("tmpfs, 1 MB", TMPFS, 20, 10_000)]
    cases += [on_sqlite("tmpfs, 1 MB", TMPFS, 20, 10_000, jobs.archive)]
    print(_HEAD)
    kept = True
    for case in cases:
        with case as opened:
            measured = measure(opened, seconds)
        print(row(measured), flush=True)
        kept = kept and measured.result in ("ok", "no promise")
    return kept


def memory(states: int) -> bool:
    """Print the table of memory, measured in a fresh process. Whether the promise was kept."""
    command = [sys.executable, "-m", "benchmarks.memory", "--states", str(states)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    verdict, found, runs, size, grown, seconds = done.stdout.split()
    ok = "ok" if float(grown) < MOST_MEMORY and verdict == PROVEN else "too much"
    print("| states | runs | database | seconds | peak memory grows by | |\n|---:|---:|---:|---:|---:|---|")
    print(
        f"| {found} | {runs} | {int(size) / 1e6:.1f} MB | {float(seconds):.1f} "
        f"| {float(grown):.0f} < {MOST_MEMORY} MB | {ok} |"
    )
    return ok == "ok"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="without the long jobs, fewer rounds: under 20 s")
    quick: bool = parser.parse_args().quick
    versions = f"Python {platform.python_version()}, SQLAlchemy {sqlalchemy.__version__}, redis-py {redis.__version__}"
    print(f"{versions}, fakeredis {fakeredis.__version__}, SQLite {sqlite3.sqlite_version}\n")
    kept = closures(quick)
    print()
    kept = memory(100 if quick else 1_000) and kept
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
