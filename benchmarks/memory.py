"""Peak memory of one check with many states of a database of 1 MB. Run by closure.py in a process of its own."""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path

from benchmarks import jobs
from retrychaos import Chaos

ROWS = 10_000
TMPFS = Path("/dev/shm")
_MB = 1024 * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, default=1_000)
    states: int = parser.parse_args().states
    with (
        tempfile.TemporaryDirectory(prefix="retrychaos-", dir=TMPFS) as folder,
        Chaos(budget=600, duplicates=1) as chaos,
    ):
        path = Path(folder) / "big.db"
        engine = jobs.open_database(str(path), ROWS)
        before = _resident()
        began = time.perf_counter()
        report = chaos.explore(jobs.catch_up, engine, states)
        seconds = time.perf_counter() - began
        # What a parent process had counts for ru_maxrss too: the growth is at most this, never more.
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        engine.dispose()
        print(report.verdict, report.states, report.runs, path.stat().st_size, grown / _MB, seconds)


def _resident() -> int:
    """Bytes of memory that this process has now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
