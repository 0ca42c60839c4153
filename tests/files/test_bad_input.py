"""Folders that cannot be declared, files that cannot be kept, and that nothing is left or different afterwards."""

# ruff: noqa: SIM115

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import retrychaos
from retrychaos import Chaos
from retrychaos.model.errors import BaselineError, OptionError, WorldError
from retrychaos.world.files import refused, unanswered
from tests.files.conftest import Judged


def test_folders_that_are_none(chaos: Chaos, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, reason in ((tmp_path / "none", "does not exist"), (tmp_path / "file", "is no folder"), ("/", "too much")):
        with pytest.raises(OptionError, match=reason):
            chaos.files(path)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_to(chaos: Chaos, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OptionError, match="may not be written to"):
        chaos.files(tmp_path)
    tmp_path.chmod(0o700)


def test_a_job_cannot_declare_a_folder(chaos: Chaos, tmp_path: Path) -> None:
    with pytest.raises(BaselineError, match="declare folders before the check"):
        chaos.explore(lambda: chaos.files(tmp_path))


def test_a_file_that_is_too_large(chaos: Chaos, folder: Path) -> None:
    def job() -> None:
        with open(folder / "large", "wb") as file:
            file.truncate(100_000_000)

    with pytest.raises(WorldError, match="larger than 50 MB"):
        chaos.explore(job)
    assert os.listdir(folder) == []


def test_a_lock_that_nobody_gives_back(chaos: Chaos, folder: Path) -> None:
    with open(folder / "lock", "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        def job() -> None:
            (folder / "x").write_text("1")
            with open(folder / "lock", "a") as file:
                fcntl.flock(file, fcntl.LOCK_EX)

        with pytest.raises(BaselineError, match="waits for something"):
            chaos.explore(job)
    assert os.listdir(folder) == ["lock"]


def test_everything_is_put_back_when_a_check_fails(chaos: Chaos, tmp_path: Path) -> None:
    folder = chaos.files(tmp_path)
    (folder / "old").write_text("x")
    (folder / "old").chmod(0o600)
    os.utime(folder / "old", (1_000, 1_000))
    (folder / "sub").mkdir()
    (folder / "sub" / "bytes").write_bytes(b"\0\1")
    (folder / "link").symlink_to("old")

    def job() -> None:
        for name in ("old", "link"):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / "sub", ignore_errors=True)
        (folder / "new").write_text("n")
        raise ValueError

    with pytest.raises(BaselineError):
        chaos.explore(job)
    assert sorted(os.listdir(folder)) == ["link", "old", "sub"]
    look = (folder / "old").stat()
    assert (look.st_mtime, look.st_mode & 0o777, (folder / "old").read_text()) == (1_000, 0o600, "x")
    assert (folder / "sub" / "bytes").read_bytes() == b"\0\1"
    assert os.readlink(folder / "link") == "old"


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_errors_and_values_are_python_s_own(chaos: Chaos, folder: Path) -> None:
    calls: tuple[Any, ...] = (
        lambda: open(folder / "none"),
        lambda: open(folder / "x", "rw"),
        lambda: open(folder / "x", "wb", encoding="utf-8"),
        lambda: open(folder / "x", "w", 0),
        lambda: open(folder / "x", newline="?"),
        lambda: open(folder, "w"),
        lambda: open(folder / "x", "x"),
        lambda: open(folder / "x", "rb").write(b""),
        lambda: open(None),  # type: ignore[call-overload]
        lambda: os.open(folder / "none", os.O_RDONLY),
        lambda: os.rmdir(folder / "none"),
        lambda: os.listdir(folder / "none"),
        lambda: os.scandir(folder / "none"),
        lambda: os.replace(folder / "none", folder / "b"),
        lambda: os.stat(folder / "none"),
        lambda: os.stat(path=folder / "x").st_size,
        lambda: os.mkdir(folder / "none" / "deeper"),
        lambda: os.write(999_999, b""),
        lambda: repr(open(folder / "x", encoding="utf-8")),
        lambda: (open(folder / "x", "rb").name, open(folder / "x", "rb").mode, open(folder / "x", "w").mode),
        lambda: shutil.copystat(folder / "x", folder / "x", follow_symlinks=False),
        lambda: sorted(os.walk(folder)),
        lambda: sorted(folder.rglob("*")),
    )
    seen: list[object] = []

    def job() -> None:
        seen.clear()
        (folder / "x").write_text("1")
        for call in calls:
            try:
                seen.append(call())
            except Exception as problem:
                seen.append((type(problem), str(problem)))
        (folder / "x").write_text("1")

    job()
    plain = list(seen)
    assert chaos.explore(job).verdict == "proven"
    assert seen == plain


def test_nothing_is_left_patched_or_open(folder: Path, chaos: Chaos, untouched: Any) -> None:
    def job() -> None:
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            file.write("x")
        os.replace(file.name, folder / "y")
        os.open(folder / "y", os.O_RDONLY)  # never closed

    names = ("open", "stat", "replace", "write", "close", "scandir", "fstat")
    before = [getattr(os, name) for name in names], open, fcntl.flock, set(os.supports_dir_fd)
    with retrychaos.Chaos(duplicates=2) as other:
        other.files(folder)
        with untouched():
            other.explore(job)
    assert before == ([getattr(os, name) for name in names], open, fcntl.flock, set(os.supports_dir_fd))


def test_a_check_without_files_does_not_load_them(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_it(chaos):
            chaos.check(lambda: chaos.redis.set("a", 1))
            assert not [name for name in sys.modules if name.startswith("retrychaos.world.files")]
        """
    )
    pytester.runpytest_subprocess("-p", "no:randomly").assert_outcomes(passed=1)


def test_what_a_full_disk_says(tmp_path: Path) -> None:
    """/dev/full is Linux's own."""
    if not sys.platform.startswith("linux"):
        pytest.skip("needs /dev/full")
    with pytest.raises(OSError) as caught:
        with open("/dev/full", "w") as file:
            file.write("x")
    assert (type(caught.value), caught.value.errno) == (type(refused("x")), errno.ENOSPC)
    assert refused("x").errno == errno.ENOSPC and unanswered("x").errno == errno.EIO


def test_the_verdict_does_not_depend_on_who_asks_first(folder: Path, judged: Judged) -> None:
    def job() -> None:
        with open(folder / "log", "a") as file:
            file.write("x\n")

    judged(job, "failed")
    (folder / "log").unlink()
    judged(job, "failed")
