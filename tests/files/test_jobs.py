"""Jobs that write files, one delivery at a time: right ones are proven, wrong ones refuted, unseen ones neither."""

from __future__ import annotations

import csv
import gzip
import json
import logging
import os
import pathlib
import shutil
import sqlite3
import subprocess
import tempfile
import threading
import time
import uuid
import zipfile
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from retrychaos import Chaos
from tests.files.conftest import Judged

# -- torn and repeated writes -----------------------------------------------------------------------------------------


def test_writing_anew_is_right_and_appending_is_not(folder: Path, judged: Judged) -> None:
    def overwrite() -> None:
        (folder / "report.txt").write_text("a\nb\n")

    def append() -> None:
        with open(folder / "export.csv", "a") as file:
            file.write("a\n")
            file.flush()
            file.write("b\n")

    judged(overwrite, "proven")
    assert (folder / "report.txt").read_text() == "a\nb\n"
    report = judged(append, "failed", "duplicated")
    assert any("line" in line.row and line.found == 2 for line in report.findings[0].differences)


def test_half_a_file_is_seen(folder: Path, judged: Judged) -> None:
    def skip_if_there() -> None:
        if not (folder / "map").exists():
            (folder / "map").write_bytes(os.urandom(0) + b"x" * 30_000)

    def rename_when_done() -> None:
        if not (folder / "tile").exists():
            (folder / "tile.partial").write_bytes(b"x" * 30_000)
            os.replace(folder / "tile.partial", folder / "tile")

    judged(skip_if_there, "failed", "lost")
    judged(rename_when_done, "proven")


def test_each_raw_write_is_a_step(chaos: Chaos, folder: Path) -> None:
    def job() -> None:
        with open(folder / "big", "w") as file:
            for _ in range(3):
                file.write("x" * 5_000)

    report = chaos.explore(job)
    assert report.verdict == "proven"
    assert 3 <= report.steps <= 4  # created, and written when the buffer is full and at the end


def test_descriptors_and_positions(folder: Path, judged: Judged) -> None:
    (folder / "count").write_text("5")

    def add_one() -> None:
        with open(folder / "count", "r+") as file:
            number = int(file.read())
            file.seek(0)
            file.write(str(number + 1))
            file.truncate()

    def append_by_descriptor() -> None:
        fd = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(fd, b"x")
        os.close(fd)

    def head_if_empty() -> None:
        with open(folder / "table.csv", "a") as file:
            if file.tell() == 0:
                file.write("id,name\n")

    judged(add_one, "failed", "changed")
    judged(append_by_descriptor, "failed", "changed")
    judged(head_if_empty, "proven")


def test_everything_goes_through_the_same_door(folder: Path, judged: Judged) -> None:
    def job() -> None:
        (folder / "pkg").mkdir(exist_ok=True)
        with open(folder / "pkg" / "a.csv", "w", newline="") as file:
            csv.writer(file).writerows([[1, 2], [3, 4]])
        with open(folder / "pkg" / "a.json", "w") as file:
            json.dump({"a": 1}, file, indent=1)
        shutil.copy(folder / "pkg" / "a.csv", folder / "pkg" / "b.csv")
        with gzip.open(folder / "a.gz", "wb") as packed:
            packed.write(b"abc" * 100)
        with zipfile.ZipFile(folder / "a.zip", "w") as archive:
            archive.writestr(zipfile.ZipInfo("x"), "y" * 100)
        os.makedirs(folder / "x" / "y", exist_ok=True)
        shutil.rmtree(folder / "x")

    judged(job, "proven")
    assert (folder / "pkg" / "b.csv").read_text().split() == ["1,2", "3,4"]


def test_an_inbox(folder: Path, judged: Judged) -> None:
    inbox, done = folder / "in", folder / "done"
    inbox.mkdir()
    done.mkdir()

    def fill() -> None:
        for name in "12":
            (inbox / name).write_text(f"letter {name}")
            (done / name).unlink(missing_ok=True)

    def answer_then_remove() -> None:
        for letter in sorted(inbox.iterdir()):
            (done / letter.name).write_text(letter.read_text().upper())
            letter.unlink()

    def remove_then_answer() -> None:
        for letter in sorted(inbox.iterdir()):
            content = letter.read_text()
            letter.unlink()
            (done / letter.name).write_text(content.upper())

    fill()
    judged(answer_then_remove, "proven")
    fill()
    judged(remove_then_answer, "failed", "lost")


def test_two_folders(chaos: Chaos, tmp_path: Path, judged: Judged) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for each in (one, other):
        each.mkdir()
        chaos.files(each)

    def move() -> None:
        (one / "x").write_text("1")
        os.replace(one / "x", other / "x")

    def move_and_look() -> None:
        if (one / "x").exists():
            os.replace(one / "x", other / "x")
            with open(other / "log", "a") as file:
                file.write("moved\n")

    judged(move, "proven")
    (one / "x").write_text("1")
    judged(move_and_look, "failed", "lost")


def test_a_path_from_the_working_folder(chaos: Chaos, tmp_path: Path, monkeypatch: Any, judged: Judged) -> None:
    monkeypatch.chdir(tmp_path)
    chaos.files(tmp_path)

    def append() -> None:
        with open("export.txt", "a") as file:
            file.write("x\n")

    judged(append, "failed", "duplicated")


def test_times_of_files_are_those_of_the_clock(folder: Path, judged: Judged) -> None:
    cache = folder / "cache"

    def refresh() -> None:
        if cache.exists() and time.time() - cache.stat().st_mtime < 3600:
            return
        (folder / "cache.new").write_text("value")
        os.replace(folder / "cache.new", cache)

    judged(refresh, "proven")
    assert abs(cache.stat().st_mtime - time.time()) < 300


def test_times_and_names_in_contents(folder: Path, judged: Judged) -> None:
    def stamped() -> None:
        (folder / "report").write_text(f"made at {time.time()}\nby nobody\n")

    def under_a_new_name() -> None:
        (folder / f"{uuid.uuid4()}.pdf").write_text("statement")

    judged(stamped, "proven")
    judged(under_a_new_name, "failed", "duplicated", "lost")


def test_the_work_of_a_thread_counts(folder: Path, judged: Judged) -> None:
    def job() -> None:
        worker = threading.Thread(target=lambda: (folder / "x").write_text("1"))
        worker.start()
        worker.join()

    judged(job, "proven")


def test_an_unflushed_buffer_is_lost_and_said(folder: Path, judged: Judged) -> None:
    kept = []

    def job() -> None:
        (folder / "done").write_text("y")
        file = open(folder / "notes", "w")  # noqa: SIM115
        file.write("xx")
        kept.append(file)

    report = judged(job, "proven")
    assert any("2 bytes in its buffer were lost" in warning for warning in report.warnings)
    assert (folder / "notes").read_text() == ""
    assert all(file.closed for file in kept)


def test_a_job_may_ask_for_the_folder_first(chaos: Chaos) -> None:
    def job() -> None:
        with open(chaos.files / "a.csv", "a") as file:
            file.write("a\n")

    assert chaos.explore(job).verdict == "failed"
    assert "a.csv" in os.listdir(chaos.files)


@pytest.mark.parametrize("isolation", ["sample", "process"])
def test_in_processes_of_their_own(chaos: Chaos, folder: Path, isolation: str) -> None:
    def job() -> None:
        if not (folder / "f").exists():
            (folder / "f").write_text("y")

    assert chaos(isolation=isolation).explore(job).findings[0].kind == "lost"


def test_a_file_that_was_begun_is_called_so(chaos: Chaos, folder: Path) -> None:
    """Nothing is missing: each attempt has a name of its own, and one has left an empty file."""

    def export() -> None:
        (folder / f"{uuid.uuid4()}.txt").write_text("x")

    report = chaos.explore(export)
    assert [(each.kind, each.reason) for each in report.findings] == [
        ("lost", "what was begun was left half done, and no later delivery finishes it or takes it away"),
        ("duplicated", ""),
    ]


def test_a_found_fault_is_replayed(chaos: Chaos, folder: Path) -> None:
    def job() -> None:
        with open(folder / "log", "a") as file:
            file.write("x\n")
        (folder / "done").write_text("")

    finding = chaos.explore(job).findings[0]
    for path in folder.iterdir():
        path.unlink()
    again = chaos.run(job, plan=finding.token)
    assert (again.kind, again.effect) == (finding.kind, finding.effect)


# -- temporary files -------------------------------------------------------------------------------------------------


def test_what_a_crash_leaves_of_a_temporary_file_is_no_fault(folder: Path, judged: Judged) -> None:
    def job() -> None:
        if (folder / "final").exists():
            return
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            file.write("hello\n")
        os.replace(file.name, folder / "final")

    def in_a_folder() -> None:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            (pathlib.Path(place) / "x").write_text("data")
            os.replace(pathlib.Path(place) / "x", folder / "other")

    judged(job, "proven")
    judged(in_a_folder, "proven")
    assert sorted(os.listdir(folder)) == ["final", "other"]


def test_a_result_under_a_temporary_name_counts(chaos: Chaos, folder: Path, judged: Judged) -> None:
    with chaos.sql.begin() as db:
        db.execute(text("CREATE TABLE reports (id INTEGER PRIMARY KEY, path TEXT)"))

    def make() -> str:
        fd, path = tempfile.mkstemp(dir=folder)
        with os.fdopen(fd, "w") as file:
            file.write("result")
        return path

    def registered() -> None:
        with chaos.sql.begin() as db:
            if db.execute(text("SELECT path FROM reports")).scalar():
                return
        path = make()
        with chaos.sql.begin() as db:
            db.execute(text("INSERT INTO reports VALUES (1, :path)"), {"path": path})

    def dropped() -> None:
        make()

    judged(dropped, "failed", "duplicated")
    judged(registered, "proven")


def test_a_temporary_file_that_was_sent_somewhere(chaos: Chaos, folder: Path, judged: Judged) -> None:
    class Store:
        def upload(self, path: str, key: str) -> None: ...

    store = Store()
    chaos.watch(store, "upload", result=None, key="key")

    def job() -> None:
        with tempfile.NamedTemporaryFile("w", dir=folder) as file:
            file.write("data")
            file.flush()
            store.upload("invoice", key="invoice-1")
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            file.write("data")
        os.unlink(file.name)

    judged(job, "proven")


# -- the limits of the folder ----------------------------------------------------------------------------------------


def test_a_database_in_the_folder_belongs_to_sql(chaos: Chaos, folder: Path, judged: Judged) -> None:
    engine = create_engine(f"sqlite:///{folder / 'x.db'}")
    with engine.begin() as db:
        db.execute(text("CREATE TABLE t (id INTEGER PRIMARY KEY)"))

    def row_first() -> None:
        with engine.begin() as db:
            if db.execute(text("SELECT count(*) FROM t")).scalar():
                return
            db.execute(text("INSERT INTO t VALUES (1)"))
        (folder / "f").write_text("y")

    def file_first() -> None:
        (folder / "f").write_text("y")
        with engine.begin() as db:
            db.execute(text("INSERT OR IGNORE INTO t VALUES (1)"))

    judged(row_first, "failed", "lost")
    with engine.begin() as db:
        db.execute(text("DELETE FROM t"))
    judged(file_first, "proven")
    engine.dispose()

    def past_the_engine() -> None:
        (folder / "f").write_text("y")
        with sqlite3.connect(folder / "x.db") as db:
            db.execute("INSERT OR IGNORE INTO t VALUES (2)")
        db.close()

    judged(past_the_engine, "proven")


def test_what_is_not_seen_is_doubted(folder: Path, tmp_path: Path, judged: Judged) -> None:
    (folder / "out").symlink_to(tmp_path)
    old = open(folder / "old", "a")  # noqa: SIM115

    def by_a_process() -> None:
        (folder / "f").write_text("y")
        subprocess.run(["sh", "-c", f"echo hi > {folder}/g"], check=True)

    def through_an_old_handle() -> None:
        (folder / "f").write_text("y")
        old.write("x\n")
        old.flush()

    def outside() -> None:
        (folder / "f").write_text("y")
        (tmp_path / "g").write_text("z")

    def through_a_link() -> None:
        (folder / "f").write_text("y")
        (folder / "out" / "g").write_text("z")

    for job in (by_a_process, through_an_old_handle, outside, through_a_link):
        report = judged(job, "inconclusive")
        assert "outside the ledger" in report.stop_reason or "in a way that was not seen" in report.stop_reason
    old.close()


def test_a_log_in_the_folder_is_no_effect(folder: Path, judged: Judged) -> None:
    def job() -> None:
        handler = logging.FileHandler(folder / "job.log")
        logger = logging.getLogger("tests.files")
        logger.addHandler(handler)
        logger.warning("at work")
        logger.removeHandler(handler)
        handler.close()
        (folder / "f").write_text("y")

    judged(job, "proven")
