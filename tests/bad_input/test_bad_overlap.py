"""Deliveries that overlap, and things that cannot be: each ends by itself, says why, and leaves nothing behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session
from sqlalchemy.pool import StaticPool

from retrychaos import Chaos

_lock = threading.Lock()


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path / 'jobs.db'}")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE marks (k TEXT PRIMARY KEY)"))
    yield engine
    engine.dispose()


@pytest.fixture
def twice(chaos: Chaos) -> Chaos:
    return chaos(duplicates=2, budget=20)


def mark(engine: Engine) -> int:
    with engine.begin() as connection:
        return int(connection.execute(text("INSERT INTO marks VALUES ('7') ON CONFLICT DO NOTHING")).rowcount)


def count(engine: Engine) -> int:
    with engine.begin() as connection:
        return int(connection.execute(text("SELECT count(*) FROM marks")).scalar_one())


def in_a_thread(engine: Engine) -> None:
    thread = threading.Thread(target=mark, args=(engine,))
    thread.start()
    thread.join()


def under_a_lock_in_memory(engine: Engine) -> None:
    with _lock:
        mark(engine)


def endless_loop_if_overtaken(engine: Engine) -> None:
    seen = count(engine)
    if not mark(engine) and not seen:
        while True:
            pass


def endless_statement_if_overtaken(engine: Engine) -> None:
    seen = count(engine)
    if not mark(engine) and not seen:
        with engine.begin() as connection:
            endless = "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT count(*) FROM t"
            connection.execute(text(endless)).scalar()


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (in_a_thread, "works with threads of its own"),
        (under_a_lock_in_memory, "a lock in memory that the other delivery holds"),
        (endless_loop_if_overtaken, "did not come back"),
        (endless_statement_if_overtaken, "did not come back"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_followed_is_inconclusive(
    twice: Chaos, db: Engine, job: Callable[[Engine], None], reason: str
) -> None:
    before = set(threading.enumerate())
    report = twice.explore(job, db)
    assert (report.verdict, report.budget_spent) == ("inconclusive", False)
    assert reason in report.stop_reason and "duplicates=1" in report.stop_reason
    assert set(threading.enumerate()) == before
    assert count(db) == 1  # as one clean run leaves it


def test_worlds_that_cannot_be_shared_say_so(twice: Chaos, db: Engine) -> None:
    memory = create_engine("sqlite://", poolclass=StaticPool)
    with memory.begin() as connection:
        connection.execute(text("CREATE TABLE marks (k TEXT PRIMARY KEY)"))
    report = twice.explore(mark, memory)
    assert report.verdict == "inconclusive" and "Use a SQLite file" in report.stop_reason
    assert any("one delivery at a time" in note for note in report.notes)
    memory.dispose()

    session = Session(db)

    def job() -> None:
        session.execute(text("INSERT INTO marks VALUES ('7') ON CONFLICT DO NOTHING"))
        session.commit()

    report = twice.explore(job)
    assert report.verdict == "inconclusive" and "one SQLAlchemy session is used by both" in report.stop_reason


def test_an_interruption_ends_everything(twice: Chaos, db: Engine) -> None:
    def job(engine: Engine) -> None:
        seen = count(engine)
        if not mark(engine) and not seen:  # only where deliveries overlap
            signal.raise_signal(signal.SIGINT)

    before: Any = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        twice.explore(job, db)
    assert set(threading.enumerate()) == before
    assert count(db) == 0  # as before the check


def test_new_engines_in_every_delivery(twice: Chaos, tmp_path: Path, db: Engine) -> None:
    def job(path: str) -> None:
        mark(create_engine(f"sqlite:///{path}"))

    assert twice.explore(job, str(tmp_path / "jobs.db")).verdict == "proven"
