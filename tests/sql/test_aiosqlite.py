"""Jobs on SQLAlchemy's AsyncEngine with aiosqlite: files and databases in memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import retrychaos

pytest.importorskip("aiosqlite", reason="aiosqlite is not installed")


class Base(DeclarativeBase):
    pass


class Invoice(Base):
    __tablename__ = "invoices"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(unique=True)


class Note(Base):
    __tablename__ = "notes"

    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str]


async def in_one_transaction(engine: AsyncEngine, order: int) -> None:
    async with AsyncSession(engine) as session, session.begin():
        if await session.scalar(select(Invoice).where(Invoice.order_id == order)) is None:
            session.add_all([Invoice(order_id=order), Note(text="invoiced")])


async def immediate(engine: AsyncEngine, order: int) -> None:
    async with engine.connect() as connection:
        await connection.exec_driver_sql("BEGIN IMMEDIATE")
        if (await connection.execute(select(Invoice).where(Invoice.order_id == order))).first() is None:
            await connection.execute(insert(Invoice).values(order_id=order))
            await connection.execute(insert(Note).values(text="invoiced"))
        await connection.commit()


async def note_first(engine: AsyncEngine, order: int) -> None:
    async with AsyncSession(engine) as session:
        session.add(Note(text="invoiced"))
        await session.commit()
        if await session.scalar(select(Invoice).where(Invoice.order_id == order)) is None:
            session.add(Invoice(order_id=order))
            await session.commit()


async def look_then_write(engine: AsyncEngine, order: int) -> None:
    async with AsyncSession(engine) as session:
        if await session.scalar(select(Note).where(Note.text == str(order))) is None:
            await session.commit()
            session.add(Note(text=str(order)))
            await session.commit()


async def session_left_open(engine: AsyncEngine, order: int) -> None:
    session = AsyncSession(engine)
    if await session.scalar(select(Invoice).where(Invoice.order_id == order)) is None:
        session.add(Invoice(order_id=order))
        await session.commit()


async def together(engine: AsyncEngine, order: int) -> None:
    await asyncio.gather(in_one_transaction(engine, order), in_one_transaction(engine, order + 1))


async def many_rows(engine: AsyncEngine, order: int) -> None:
    async with engine.begin() as connection:
        rows = [{"order_id": order + each} for each in range(3)]
        await connection.execute(text("INSERT OR IGNORE INTO invoices (order_id) VALUES (:order_id)"), rows)


JOBS: list[tuple[Callable[..., Any], str, str]] = [
    (in_one_transaction, "proven", "proven"),
    (immediate, "proven", "proven"),
    (note_first, "failed", "failed"),
    (look_then_write, "proven", "failed"),
    (session_left_open, "proven", "proven"),
    (together, "proven", "proven"),
    (many_rows, "proven", "proven"),
]


@pytest.fixture(params=["file", "memory"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AsyncEngine]:
    path = f"/{tmp_path / 'async.db'}" if request.param == "file" else ""
    engine = create_async_engine(f"sqlite+aiosqlite://{path}")

    async def create() -> None:
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)

    asyncio.run(create())
    yield engine
    asyncio.run(engine.dispose())


def rows(engine: AsyncEngine) -> int:
    async def count() -> int:
        async with engine.connect() as connection:
            tables = [await connection.scalar(text(f"SELECT count(*) FROM {name}")) for name in ("invoices", "notes")]
            return sum(tables)

    return asyncio.run(count())


@pytest.mark.parametrize("duplicates", [1, 2])
@pytest.mark.parametrize(("job", "alone", "overlapping"), JOBS, ids=lambda value: getattr(value, "__name__", value))
def test_a_job_on_an_async_engine(
    chaos: retrychaos.Chaos, engine: AsyncEngine, job: Any, alone: str, overlapping: str, duplicates: int
) -> None:
    expected = alone if duplicates == 1 else overlapping
    in_memory = engine.url.database is None
    if duplicates == 2 and in_memory and alone == "proven":
        expected = "inconclusive"  # two deliveries cannot share it
    threads = threading.active_count()
    report = chaos(duplicates=duplicates, budget=20.0).explore(job, engine, 7)
    assert report.verdict == expected, report
    if expected == "inconclusive":
        assert "Use a SQLite file" in report.stop_reason
    assert threading.active_count() == threads
    assert rows(engine) == {together: 4, session_left_open: 1, look_then_write: 1, many_rows: 3}.get(job, 2)
    for finding in report.findings:
        assert not chaos(duplicates=duplicates).run(job, engine, 7, plan=finding.token).ok, "it replays"


def test_the_line_behind_a_step(chaos: retrychaos.Chaos, engine: AsyncEngine) -> None:
    report = chaos.explore(note_first, engine, 7)
    steps = report.findings[0].timeline[0].steps
    assert [step.site.function for step in steps if step.site] == ["note_first"] * len(steps)


def test_work_that_a_fixture_left_pending(chaos: retrychaos.Chaos, tmp_path: Path) -> None:
    engine = create_async_engine("sqlite+aiosqlite://")

    async def arrange() -> AsyncSession:
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        session = AsyncSession(engine)
        session.add(Note(text="pending"))
        await session.flush()
        return session

    session = asyncio.run(arrange())
    with pytest.raises(retrychaos.ChaosError, match="had uncommitted changes when the check began"):
        chaos.explore(in_one_transaction, engine, 7)

    async def tidy() -> None:
        await session.close()
        await engine.dispose()

    asyncio.run(tidy())


def test_lost_replies(chaos: retrychaos.Chaos, engine: AsyncEngine) -> None:
    assert chaos(faults=True).explore(in_one_transaction, engine, 7).verdict == "proven"
