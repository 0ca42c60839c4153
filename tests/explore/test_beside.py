"""The sample for hidden memory, run in a fork beside the closure where that can touch nothing that both have."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.pool import NullPool, StaticPool

from retrychaos import Chaos
from retrychaos.explore.runner import Forked
from retrychaos.runtime.delivery import Order, Outcome

warm: set[str] = set()


def careful(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("INSERT OR IGNORE INTO jobs VALUES (1)"))
    with engine.begin() as connection:
        connection.execute(text("INSERT OR IGNORE INTO jobs VALUES (2)"))


def forgetful(engine: Engine) -> None:
    """Two clean runs and every redelivery in one process do well; in a new process the redelivery repeats an effect."""
    with engine.begin() as connection:
        again = connection.execute(text("SELECT count(*) FROM jobs")).scalar()
        if not again or "warm" not in warm:
            connection.execute(text("INSERT INTO jobs VALUES ((SELECT count(*) FROM jobs))"))
    warm.add("warm")


def on_the_side(engine: Engine) -> None:
    """Reads through a connection of its own."""
    if engine.url.database:
        with closing(sqlite3.connect(engine.url.database)) as connection:
            connection.execute("SELECT count(*) FROM jobs").fetchall()
    careful(engine)


def _memory(path: Path) -> Engine:
    return create_engine("sqlite://", poolclass=StaticPool)


def _file(path: Path) -> Engine:
    return create_engine(f"sqlite:///{path}", poolclass=NullPool)


def _pooled(path: Path) -> Engine:
    return create_engine(f"sqlite:///{path}")


def _own_connections(path: Path) -> Engine:
    return create_engine("sqlite://", poolclass=NullPool, creator=lambda: sqlite3.connect(path))


def _wal(path: Path) -> Engine:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    return _file(path)


WORLDS: list[tuple[Callable[[Path], Engine], bool]] = [
    (_memory, True),
    (_file, True),
    (_pooled, False),  # a connection to the file is open when the check begins
    (_own_connections, True),
    (_wal, False),
]


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each delivery that was asked for: did the one that was begun do?"""
    used: list[bool] = []
    begun = Forked.begun

    def watched(self: Forked, order: Order) -> Outcome | None:
        outcome = begun(self, order)
        used.append(outcome is not None)
        return outcome

    monkeypatch.setattr(Forked, "begun", watched)
    return used


@pytest.fixture(params=WORLDS, ids=lambda param: param[0].__name__.strip("_"))
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """An engine, and whether a fork can have its database for itself."""
    make, can_part = request.param
    engine = make(tmp_path / "jobs.db")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE jobs (number INTEGER)"))
        connection.execute(text("CREATE UNIQUE INDEX one ON jobs (number)"))
    warm.clear()
    yield engine, can_part
    engine.dispose()


def test_a_sample_runs_beside_where_nothing_is_shared(world: Any, beside: list[bool], chaos: Chaos) -> None:
    engine, can_part = world
    assert chaos.explore(careful, engine).verdict == "proven"
    assert beside[0] == can_part


def test_hidden_memory_is_found_beside_and_alone(world: Any, chaos: Chaos) -> None:
    report = chaos.explore(forgetful, world[0])
    assert [(found.kind, found.effect) for found in report.findings] == [("duplicated", "jobs")]
    assert any("in the memory of its process" in note for note in report.notes)


def test_a_connection_on_the_side_goes_to_the_copy_too(world: Any, beside: list[bool], chaos: Chaos) -> None:
    assert chaos.explore(on_the_side, world[0]).verdict == "proven"
    assert beside[0] == world[1]


def test_the_embedded_database_can_be_had_by_a_fork(beside: list[bool], chaos: Chaos) -> None:
    with chaos.sql.begin() as connection:
        connection.execute(text("CREATE TABLE jobs (number INTEGER PRIMARY KEY)"))
    assert chaos.explore(careful, chaos.sql).verdict == "proven"
    assert beside[0]


def test_no_effect_outside_happens_beside(world: Any, beside: list[bool], tmp_path: Path, chaos: Chaos) -> None:
    engine, _ = world

    class Log:
        @staticmethod
        def write(line: str) -> None:
            with open(tmp_path / "lines", "a") as file:
                file.write(line)

    def job() -> None:
        careful(engine)
        Log.write("done")

    assert chaos.explore(job).verdict == "inconclusive"
    chaos.watch(Log, "write")  # and goes through
    assert chaos.explore(job).verdict == "failed"
    assert not any(beside)


def test_no_copy_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: list[bool]) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    engine = _file(tmp_path / "jobs.db")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE jobs (number INTEGER PRIMARY KEY)"))
    assert Chaos(duplicates=1).explore(careful, engine).verdict == "proven"
    assert beside[0] and list(folder.iterdir()) == []


def test_a_fork_that_dies_is_told_at_once(world: Any, chaos: Chaos) -> None:
    engine, mine = world[0], os.getppid()

    def job() -> None:
        if os.getppid() != mine:
            os._exit(3)
        careful(engine)

    report = chaos.explore(job)
    assert (report.verdict, report.seconds < 5) == ("inconclusive", True)
    assert "a forked delivery died" in report.stop_reason
