"""aiosqlite without SQLAlchemy."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

import aiosqlite
import pytest

from retrychaos import Chaos, WorldError
from retrychaos.report.text import full_text

Job = Callable[[str], Coroutine[Any, Any, None]]


@pytest.fixture
def path(tmp_path: Path) -> str:
    with closing(sqlite3.connect(tmp_path / "shop.db")) as db:
        db.executescript(
            "CREATE TABLE paid (ord INTEGER UNIQUE); CREATE TABLE log (id INTEGER PRIMARY KEY, ord INTEGER);"
        )
    return str(tmp_path / "shop.db")


async def unique(path: str) -> None:
    async with aiosqlite.connect(path) as db:
        await db.execute("INSERT OR IGNORE INTO paid VALUES (?)", (1,))
        await db.execute("INSERT INTO log (ord) SELECT 1 WHERE changes() = 1")
        await db.commit()


async def torn(path: str) -> None:
    async with aiosqlite.connect(path, isolation_level=None) as db:
        await db.execute("INSERT OR IGNORE INTO paid VALUES (?)", (1,))
        await db.execute("INSERT INTO log (ord) SELECT 1 WHERE changes() = 1")


async def look_first(path: str) -> None:
    async with aiosqlite.connect(path) as db:
        async with db.execute("SELECT count(*) FROM log") as rows:
            row = await rows.fetchone()
        if row is not None and not row[0]:
            await db.execute("INSERT INTO log (ord) VALUES (1)")
            await db.commit()


async def forget_to_commit(path: str) -> None:
    async with aiosqlite.connect(path) as db:
        await db.execute("INSERT INTO log (ord) VALUES (1)")
        await db.commit()
        await db.execute("INSERT INTO paid VALUES (1)")


@pytest.mark.parametrize(
    ("job", "duplicates", "verdict"),
    [
        (unique, 1, "proven"),
        (unique, 2, "proven"),
        (torn, 1, "failed"),
        (look_first, 1, "proven"),
        (look_first, 2, "failed"),
        (forget_to_commit, 1, "failed"),
    ],
)
def test_each_statement_is_a_step(chaos: Chaos, path: str, job: Job, duplicates: int, verdict: str) -> None:
    report = chaos(duplicates=duplicates, faults=True, late=True).explore(job, path)
    assert report.verdict == verdict, full_text(report)


def test_connections_from_before_the_check(chaos: Chaos, path: str) -> None:
    """A thread of the test serves them. They are as they were after that."""

    async def through(db: aiosqlite.Connection) -> None:
        await db.execute("INSERT INTO log (ord) VALUES (1)")
        await db.commit()

    async def test() -> int:
        async with aiosqlite.connect(path) as db:
            with pytest.raises(WorldError, match=r"open it in the job, or pass an engine"):
                chaos(duplicates=1).explore(through, db)
            async with db.execute("SELECT count(*) FROM log") as found:
                return (await found.fetchone())[0]

    assert asyncio.run(test()) == 0
