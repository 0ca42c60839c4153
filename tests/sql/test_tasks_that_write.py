"""Tasks of one async job that write to one SQLite file: who finds it locked waits, and the loop goes on."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from retrychaos import Chaos
from retrychaos.report.text import full_text

aiosqlite = pytest.importorskip("aiosqlite", reason="aiosqlite is not installed")
Write = Callable[[str, int], Awaitable[None]]


@pytest.fixture(params=["delete", "wal"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    path = str(tmp_path / "shop.db")
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA journal_mode = {request.param}")
        db.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT)")
    return path


async def raw(path: str, number: int) -> None:
    """The other task has its turn while this one is in the middle of its transaction."""
    async with aiosqlite.connect(path) as db:
        await db.execute("INSERT INTO notes VALUES (?, 'x') ON CONFLICT DO NOTHING", (number,))
        await asyncio.sleep(1)
        await db.commit()


async def immediate(path: str, number: int) -> None:
    async with aiosqlite.connect(path, isolation_level=None) as db:
        await db.execute("BEGIN IMMEDIATE")
        await asyncio.sleep(0)
        await db.execute("INSERT INTO notes VALUES (?, 'x') ON CONFLICT DO NOTHING", (number,))
        await db.commit()


async def by_engine(path: str, number: int) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
    async with engine.begin() as db:
        await db.execute(text("INSERT INTO notes VALUES (:id, 'x') ON CONFLICT DO NOTHING"), {"id": number})
        await asyncio.sleep(0.1)
    await engine.dispose()


async def counting(path: str, number: int) -> None:
    """Adds a note each time that it is delivered."""
    async with aiosqlite.connect(path) as db:
        await db.execute("INSERT INTO notes (text) VALUES (?)", (str(number),))
        await asyncio.sleep(1)
        await db.commit()


async def slow(path: str, number: int) -> None:
    """Longer than the other one waits."""
    async with aiosqlite.connect(path, timeout=2) as db:
        await db.execute("INSERT INTO notes VALUES (?, 'x') ON CONFLICT DO NOTHING", (number,))
        await asyncio.sleep(3)
        await db.commit()


async def after_a_look(path: str, number: int) -> None:
    """Two that have looked and want to write: SQLite lets none of them wait."""
    async with aiosqlite.connect(path, isolation_level=None) as db:
        await db.execute("BEGIN")
        await (await db.execute("SELECT count(*) FROM notes")).fetchone()
        await asyncio.sleep(0)
        await db.execute("INSERT INTO notes VALUES (?, 'x') ON CONFLICT DO NOTHING", (number,))
        await asyncio.sleep(0)
        await db.commit()


async def together(path: str, write: Write) -> None:
    await asyncio.gather(write(path, 1), write(path, 2))


def content(path: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT id, text FROM notes ORDER BY id").fetchall()


@pytest.mark.parametrize("write", [raw, immediate, by_engine], ids=lambda write: write.__name__)
@pytest.mark.parametrize("options", [{"duplicates": 1, "faults": True}, {"duplicates": 2}], ids=["faults", "overlap"])
def test_who_finds_it_locked_waits(chaos: Chaos, path: str, write: Write, options: dict[str, Any]) -> None:
    report = chaos(**options, budget=120).explore(together, path, write)
    assert report.verdict == "proven", full_text(report)
    assert not report.warnings
    assert content(path) == [(1, "x"), (2, "x")]


@pytest.mark.parametrize("duplicates", [1, 2])
def test_who_writes_again_is_refuted(chaos: Chaos, path: str, duplicates: int) -> None:
    report = chaos(duplicates=duplicates).explore(together, path, counting)
    assert [(each.kind, each.effect) for each in report.findings] == [("duplicated", "notes")], full_text(report)


@pytest.mark.parametrize(("write", "why"), [(slow, "after the time of the connection"), (after_a_look, "at once")])
def test_waiting_has_an_end(chaos: Chaos, path: str, write: Write, why: str) -> None:
    """As in production; a clean run that fails is no clean run."""
    with pytest.raises(Exception, match="database is locked"):
        chaos(duplicates=1).explore(together, path, write)
