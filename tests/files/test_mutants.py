"""One right job, and what becomes of the verdict when one line of it is another one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.files.conftest import Judged

RIGHT = """
if not (folder / "out").exists():
    with open(folder / "out.partial", "w") as file:
        file.write("one\\n")
        file.flush()
        file.write("two\\n")
    os.replace(folder / "out.partial", folder / "out")
(folder / "done").touch()
"""
ALONE = f"""
with open(folder / "lock", "a") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
{"".join(f"    {line}" for line in RIGHT.strip().splitlines(keepends=True))}
"""


def job_of(code: str, folder: Path) -> Callable[[], None]:
    names = {"folder": folder, "os": os, "shutil": shutil, "fcntl": fcntl, "tempfile": tempfile}
    compiled = compile(code, __file__, "exec")
    return lambda: exec(compiled, {**names, "open": open})


WRONG = {
    "written under its name": (
        '"out.partial", "w"',
        '"out", "w"',
        "os.replace(folder / 'out.partial', folder / 'out')",
    ),
    "appended": ('"w"', '"a"', ""),
    "copied instead of renamed": ("os.replace(", "shutil.copyfile(", ""),
    "marked first": (
        "\nif not",
        "\nif (folder / 'done').exists():\n    raise SystemExit\n(folder / 'done').touch()\nif not",
        "",
    ),
    "goes on where the partial file ends": ('"out.partial", "w"', '"out.partial", "x"', ""),
    "renamed before it is whole": (
        'file.write("two\\n")',
        'os.replace(folder / "out.partial", folder / "out"); file.write("two\\n")',
        'os.replace(folder / "out.partial", folder / "out")\n(',
    ),
}
HARMLESS = {
    "flushed once more": ('file.write("two\\n")', 'file.write("two\\n"); file.flush()'),
    "synced": ('file.write("two\\n")', 'file.write("two\\n"); file.flush(); os.fsync(file.fileno())'),
    "written at once": ("        file.flush()\n", ""),
    "in bytes": ('"w") as', '"w", newline="", encoding="ascii") as'),
    "by another name of the function": ("os.replace(", "shutil.move("),
}


@pytest.mark.parametrize("edit", WRONG)
def test_an_edit_that_matters(edit: str, folder: Path, judged: Judged) -> None:
    old, new, unneeded = WRONG[edit]
    code = RIGHT.replace(old, new)
    if unneeded:
        lines = code.splitlines()
        last = max(at for at, line in enumerate(lines) if line.strip().startswith("os.replace("))
        lines[last] = "    pass"
        code = "\n".join(lines)
    assert code != RIGHT
    judged(job_of(code, folder), "failed")


@pytest.mark.parametrize("edit", HARMLESS)
def test_an_edit_that_does_not(edit: str, folder: Path, judged: Judged) -> None:
    code = RIGHT.replace(*HARMLESS[edit])
    assert code != RIGHT
    judged(job_of(code, folder), "proven")


def test_the_right_one(folder: Path, judged: Judged, raced: Judged) -> None:
    judged(job_of(RIGHT, folder), "proven")
    for path in folder.iterdir():
        path.unlink()
    raced(job_of(ALONE, folder), "proven")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("fcntl.LOCK_EX", "fcntl.LOCK_SH"),
        ("    fcntl.flock(lock, fcntl.LOCK_EX)\n", "    pass\n"),
        (
            "    fcntl.flock(lock, fcntl.LOCK_EX)\n",
            "    fcntl.flock(lock, fcntl.LOCK_EX)\n    fcntl.flock(lock, fcntl.LOCK_UN)\n",
        ),
        ('"lock", "a"', 'f"lock-{os.getpid()}", "a"'),
    ],
)
def test_a_lock_that_locks_nobody_out(old: str, new: str, folder: Path, raced: Judged) -> None:
    code = ALONE.replace(old, new)
    assert code != ALONE
    raced(job_of(code, folder), "failed")
