"""What the plugin adds to the start of pytest when no test uses it. ``python -m benchmarks.startup``"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS = 20
MOST = 15.0
"""Milliseconds that are promised."""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="retrychaos-") as name:
        folder = Path(name)
        (folder / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
        (folder / "pytest.ini").write_text("[pytest]\n")
        with_plugin, without = [], []
        for _ in range(2):  # bytecode, disk cache
            _run(folder), _run(folder, "-p", "no:retrychaos")
        for _ in range(RUNS):
            with_plugin.append(_run(folder))
            without.append(_run(folder, "-p", "no:retrychaos"))
    more = statistics.median(with_plugin) - statistics.median(without)
    pairs = [one - other for one, other in zip(with_plugin, without, strict=True)]
    ok = "ok" if more <= MOST else "too slow"
    print("| runs in turn | with the plugin | without | difference of medians | median of differences | |")
    print("|---:|---:|---:|---:|---:|---|")
    print(
        f"| {RUNS} | {statistics.median(with_plugin):.1f} ms | {statistics.median(without):.1f} ms "
        f"| {more:.1f} <= {MOST:.0f} ms | {statistics.median(pairs):.1f} ms | {ok} |"
    )
    return 0 if more <= MOST else 1


def _run(folder: Path, *options: str) -> float:
    """Milliseconds of one pytest process."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    # Bytecode is kept, as it is where a package is installed; without it, all modules are compiled each time.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    subprocess.run(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, check=True)
    return 1000 * (time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
