"""The numbers that SQLite keeps for a job beside its tables: user_version and application_id."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from retrychaos import Chaos
from retrychaos.report.text import full_text


def _migrate(path: str, begin: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(begin)
        if db.execute("PRAGMA user_version").fetchone()[0] < 2:
            db.execute("ALTER TABLE orders ADD COLUMN paid INTEGER")
            db.execute("PRAGMA user_version = 2")
        if begin != "SELECT 1":
            db.execute("COMMIT")


def migrate(path: str) -> None:
    _migrate(path, "BEGIN IMMEDIATE")


def migrate_without_a_transaction(path: str) -> None:
    _migrate(path, "SELECT 1")


def migrate_after_a_look(path: str) -> None:
    """Both have looked before one of them writes; the second one is refused, and delivered again."""
    _migrate(path, "BEGIN")


def count_up(path: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        number = db.execute("PRAGMA user_version").fetchone()[0]
        db.execute(f"PRAGMA user_version = {number + 1}")


def brand(path: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA application_id = 7")


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "shop.db")
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
        db.execute("PRAGMA user_version = 1")
    return path


def numbers(path: str) -> list[int]:
    with closing(sqlite3.connect(path)) as db:
        return [db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("user_version", "application_id")]


@pytest.mark.parametrize("job", [migrate, migrate_after_a_look, brand], ids=lambda job: job.__name__)
def test_numbers_that_are_right(chaos: Chaos, path: str, job: object) -> None:
    assert callable(job)
    report = chaos(duplicates=2, budget=60).explore(job, path)
    assert report.verdict == "proven", full_text(report)
    assert numbers(path) == ([1, 7] if job is brand else [2, 0])


def test_a_number_that_is_counted_up(chaos: Chaos, path: str) -> None:
    report = chaos(duplicates=1).explore(count_up, path)
    assert [(each.kind, each.effect) for each in report.findings] == [("changed", "PRAGMA")], full_text(report)
    assert "user_version" in full_text(report)
    assert numbers(path) == [2, 0]


def test_a_number_that_is_written_after_a_crash_only(chaos: Chaos, path: str) -> None:
    report = chaos(duplicates=1).explore(migrate_without_a_transaction, path)
    assert [each.kind for each in report.findings] == ["stuck"], full_text(report)
    assert "duplicate column name" in full_text(report)


def test_numbers_of_a_database_in_memory(chaos: Chaos) -> None:
    def job(engine: Engine) -> None:
        with engine.begin() as db:
            number = db.execute(text("PRAGMA user_version")).scalar_one()
            db.execute(text(f"PRAGMA user_version = {number + 1}"))

    report = chaos(duplicates=1).explore(job, chaos.sql)
    assert [(each.kind, each.effect) for each in report.findings] == [("changed", "PRAGMA")], full_text(report)
    with chaos.sql.connect() as db:
        assert db.execute(text("PRAGMA user_version")).scalar_one() == 1
