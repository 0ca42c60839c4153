"""Deliveries that overlap on files: what others do in between is seen, and correct locking is enough."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from tests.files.conftest import Judged


def _once(folder: Path) -> None:
    """Right only if nobody comes in between."""
    log = folder / "log"
    if log.exists() and log.read_text():
        return
    with open(log, "a") as file:
        file.write("once\n")


def test_a_look_before_a_write_is_a_race(folder: Path, judged: Judged, raced: Judged) -> None:
    def job() -> None:
        _once(folder)

    judged(job, "proven")
    (folder / "log").unlink()
    raced(job, "failed", "duplicated", crashes=0)


@pytest.mark.parametrize("lock", ["flock", "lockf"])
def test_a_lock_on_a_file_is_waited_for(lock: str, folder: Path, raced: Judged) -> None:
    def job() -> None:
        with open(folder / "lock", "a") as file:
            getattr(fcntl, lock)(file, fcntl.LOCK_EX)
            _once(folder)

    raced(job, "proven")


def test_a_lock_that_is_not_waited_for(folder: Path, raced: Judged) -> None:
    def raises() -> None:
        with open(folder / "lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _once(folder)

    def returns() -> None:
        with open(folder / "lock", "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            _once(folder)

    raced(raises, "proven")
    (folder / "log").unlink()
    raced(returns, "failed", "lost")


def test_a_shared_lock_locks_nobody_out(folder: Path, raced: Judged) -> None:
    def job() -> None:
        with open(folder / "lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            _once(folder)

    raced(job, "failed", "duplicated", crashes=0)


def test_a_circle_of_locks_is_no_proof(folder: Path, raced: Judged) -> None:
    """The first to come takes them in one order, the second in the other."""
    (folder / "turn").mkdir()

    def job() -> None:
        try:
            os.rmdir(folder / "turn")
            names = ["a", "b"]
        except FileNotFoundError:
            names = ["b", "a"]
        with open(folder / names[0], "a") as one, open(folder / names[1], "a") as other:
            fcntl.flock(one, fcntl.LOCK_EX)
            fcntl.flock(other, fcntl.LOCK_EX)

    report = raced(job, "inconclusive", crashes=0)
    assert "wait for locks on files" in report.stop_reason


def test_a_name_of_one_s_own_is_no_race(folder: Path, raced: Judged) -> None:
    def one_partial_name() -> None:
        if not (folder / "final").exists():
            (folder / "final.partial").write_text("data")
            os.replace(folder / "final.partial", folder / "final")

    def each_its_own() -> None:
        if not (folder / "final").exists():
            with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
                file.write("data")
            os.replace(file.name, folder / "final")

    raced(one_partial_name, "failed")
    for path in folder.iterdir():
        path.unlink()
    raced(each_its_own, "proven")


def test_a_link_is_made_once(folder: Path, raced: Judged) -> None:
    def job() -> None:
        with tempfile.NamedTemporaryFile("w", dir=folder) as file:
            file.write("data")
            file.flush()
            try:
                os.link(file.name, folder / "final")
            except FileExistsError:
                pass

    raced(job, "proven")


def test_a_lock_file_that_outlives_its_owner(folder: Path, judged: Judged, raced: Judged) -> None:
    def job() -> None:
        fd = os.open(folder / "lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        try:
            _once(folder)
        finally:
            os.close(fd)
            os.unlink(folder / "lock")

    judged(job, "failed", "stuck")
    raced(job, "failed", "stuck")


def test_an_overwritten_file_can_be_emptied_by_a_dead_duplicate(folder: Path, raced: Judged) -> None:
    def job() -> None:
        (folder / "f").write_text("y")

    raced(job, "failed", "lost")
    raced(job, "proven", crashes=0)


def test_the_temporary_files_of_others_are_met_in_a_listing(folder: Path, raced: Judged) -> None:
    (folder / "1.csv").write_text("a")
    (folder / "2.csv").write_text("b")

    def merge(pattern: str) -> None:
        content = "".join(sorted(path.read_text() for path in folder.glob(pattern) if path.name != "all"))
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            file.write(content)
        os.replace(file.name, folder / "all")

    def right() -> None:
        merge("*.csv")

    def wrong() -> None:
        merge("*")

    raced(right, "proven")
    (folder / "all").unlink()
    raced(wrong, "failed", crashes=0)
