"""Jobs on psycopg's AsyncConnection, without SQLAlchemy."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import psycopg
import pytest

from retrychaos import Chaos, ChaosError
from retrychaos.report.text import full_text
from tests.postgres_server import Postgres

Connect: TypeAlias = Callable[..., Coroutine[Any, Any, psycopg.AsyncConnection[Any]]]
Job: TypeAlias = Callable[[Connect], Coroutine[Any, Any, None]]


@pytest.fixture
def connect(postgres_server: Postgres, postgres: str) -> Connect:
    postgres_server.run(
        "CREATE TABLE invoices (id serial PRIMARY KEY, ord int); CREATE TABLE once (k text PRIMARY KEY, n int);"
        "CREATE TABLE orders (id int PRIMARY KEY, n int, status text);"
        "INSERT INTO orders VALUES (1, 0, 'new'), (2, 0, 'new')",
        postgres,
    )
    return functools.partial(
        psycopg.AsyncConnection.connect, host=postgres_server.folder, user="postgres", dbname=postgres
    )


@pytest.fixture
def twice(check: Chaos) -> Chaos:
    return check(duplicates=2, budget=60)


async def status(db: psycopg.AsyncConnection[Any], lock: str = "") -> Any:
    row = await (await db.execute(f"SELECT status FROM orders WHERE id = 1 {lock}".encode())).fetchone()
    return row and row[0]


async def locked(connect: Connect) -> None:
    async with await connect() as db:
        if await status(db, "FOR UPDATE") == "new":
            await db.execute("INSERT INTO invoices (ord) VALUES (1)")
            await db.execute("UPDATE orders SET status = 'done' WHERE id = 1")


async def not_locked(connect: Connect) -> None:
    async with await connect() as db:
        if await status(db) == "new":
            await db.execute("INSERT INTO invoices (ord) VALUES (1)")
            await db.execute("UPDATE orders SET status = 'done' WHERE id = 1")


async def block(connect: Connect) -> None:
    async with await connect(autocommit=True) as db:
        async with db.transaction():
            if await status(db, "FOR UPDATE") == "new":
                async with db.transaction():
                    await db.execute("INSERT INTO invoices (ord) VALUES (1)")
                await db.execute("UPDATE orders SET status = 'done' WHERE id = 1")


async def two_blocks(connect: Connect) -> None:
    async with await connect(autocommit=True) as db:
        async with db.transaction():
            new = await status(db, "FOR UPDATE") == "new"
            if new:
                await db.execute("INSERT INTO invoices (ord) VALUES (1)")
        async with db.transaction():
            await db.execute("UPDATE orders SET status = 'done' WHERE id = 1")


async def autocommit(connect: Connect) -> None:
    async with await connect(autocommit=True) as db:
        if await status(db) == "new":
            await db.execute("INSERT INTO invoices (ord) VALUES (1)")
            await db.execute("UPDATE orders SET status = 'done' WHERE id = 1")


async def commit_and_rollback(connect: Connect) -> None:
    db = await connect()
    try:
        await db.execute("INSERT INTO invoices (ord) VALUES (7)")
        await db.rollback()
        await db.execute("INSERT INTO once VALUES ('7', 1) ON CONFLICT DO NOTHING")
        await db.commit()
    finally:
        await db.close()


async def unique(connect: Connect) -> None:
    try:
        async with await connect() as db:
            await db.execute("INSERT INTO once VALUES ('7', 1)")
            await db.execute("INSERT INTO invoices (ord) VALUES (1)")
    except psycopg.errors.UniqueViolation:
        pass


async def many(connect: Connect) -> None:
    async with await connect() as db, db.cursor() as cursor:
        rows = ((str(each), each) for each in range(3))
        await cursor.executemany("INSERT INTO once VALUES (%s, %s) ON CONFLICT DO NOTHING", rows)


async def copied(connect: Connect) -> None:
    async with await connect() as db, db.cursor() as cursor:
        if not await (await cursor.execute("SELECT 1 FROM once")).fetchall():
            async with cursor.copy("COPY once FROM STDIN") as copy:
                await copy.write_row(("7", 1))
                await copy.write_row(("8", 1))


async def copied_first(connect: Connect) -> None:
    async with await connect(autocommit=True) as db, db.cursor() as cursor:
        if await status(db) == "new":
            async with cursor.copy("COPY invoices (ord) FROM STDIN") as copy:
                await copy.write_row((1,))
            await db.execute("UPDATE orders SET status = 'done' WHERE id = 1")


async def read_by_copy(connect: Connect) -> None:
    async with await connect() as db, db.cursor() as cursor:
        async with cursor.copy("COPY (SELECT id FROM orders ORDER BY id) TO STDOUT") as copy:
            seen = [row async for row in copy.rows()]
        assert seen == [("1",), ("2",)]
        await db.execute("INSERT INTO once VALUES ('7', 1) ON CONFLICT DO NOTHING")


async def cursor_in_the_server(connect: Connect) -> None:
    async with await connect() as db, db.cursor("mine") as cursor:
        await cursor.execute("SELECT id FROM orders ORDER BY id")
        async for (number,) in cursor:
            await db.execute("INSERT INTO once VALUES (%s, 1) ON CONFLICT DO NOTHING", (str(number),))


async def streamed(connect: Connect) -> None:
    async with await connect() as db, db.cursor() as cursor:
        numbers = [number async for (number,) in cursor.stream("SELECT id FROM orders ORDER BY id")]
        await db.execute("INSERT INTO once VALUES (%s, 1) ON CONFLICT DO NOTHING", (str(numbers),))


async def left_open(connect: Connect) -> None:
    """The process ends, and its connection with it."""
    db = await connect()
    await db.execute("INSERT INTO once VALUES ('7', 1) ON CONFLICT DO NOTHING")
    await db.commit()


async def tasks_on_one_connection(connect: Connect) -> None:
    async with await connect() as db:
        keys = ("1", "2", "3")
        await asyncio.gather(*(db.execute("INSERT INTO once VALUES (%s) ON CONFLICT DO NOTHING", (k,)) for k in keys))


async def within_time(connect: Connect) -> None:
    async with asyncio.timeout(5), await connect() as db:
        if await status(db, "FOR UPDATE") == "new":
            await asyncio.sleep(3)
            await db.execute("UPDATE orders SET status = 'done' WHERE id = 1")


GOOD: list[Job] = [
    *(locked, block, commit_and_rollback, unique, many, read_by_copy, cursor_in_the_server, streamed, left_open),
    *(tasks_on_one_connection, within_time),
]


@pytest.mark.parametrize("job", GOOD, ids=lambda job: job.__name__)
def test_a_good_job_is_proven(twice: Chaos, connect: Connect, job: Job) -> None:
    report = twice.explore(job, connect)
    assert report.verdict == "proven", full_text(report)


def test_copy(twice: Chaos, connect: Connect) -> None:
    """With a key that is unique, whoever comes second fails, and finds all there when it comes again."""
    report = twice.explore(copied, connect)
    assert report.verdict == "proven", full_text(report)


@pytest.mark.parametrize("job", [two_blocks, autocommit, copied_first], ids=lambda job: job.__name__)
def test_a_crash_between_two_transactions(check: Chaos, connect: Connect, job: Job) -> None:
    report = check(duplicates=1).explore(job, connect)
    assert {(each.kind, each.effect) for each in report.findings} == {("duplicated", "invoices")}, full_text(report)
    assert not check.run(job, connect, plan=report.findings[0].token).ok


def test_a_guard_without_a_lock(twice: Chaos, connect: Connect) -> None:
    assert twice(duplicates=1).explore(not_locked, connect).verdict == "proven"
    report = twice.explore(not_locked, connect)
    assert {(each.kind, each.effect) for each in report.findings} == {("duplicated", "invoices")}, full_text(report)
    assert not twice.run(not_locked, connect, plan=report.findings[0].token).ok


async def give_up_when(connect: Connect, error: type[psycopg.Error]) -> None:
    try:
        async with await connect() as db:
            await db.set_isolation_level(psycopg.IsolationLevel.SERIALIZABLE)
            if await status(db, "FOR UPDATE") == "new":
                await db.execute("UPDATE orders SET status = 'done' WHERE id = 1")
    except error:
        pass


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (psycopg.errors.DeadlockDetected, "deadlock"),
        (psycopg.errors.SerializationFailure, "serialization failure"),
        (psycopg.OperationalError, "error"),
    ],
)
def test_who_swallows_an_error_loses_work(
    check: Chaos, connect: Connect, error: type[psycopg.Error], fault: str
) -> None:
    job = functools.partial(give_up_when, connect, error)
    report = check(faults=True, crashes=0).explore(job)
    assert {(each.kind, each.effect) for each in report.findings} == {("lost", "orders")}, full_text(report)
    assert report.findings[0].plan.faults == (fault,)


@pytest.mark.parametrize("job", [locked, block, many, copied, cursor_in_the_server], ids=lambda job: job.__name__)
def test_errors_and_lost_replies(check: Chaos, connect: Connect, job: Job) -> None:
    report = check(faults=True).explore(job, connect)
    assert report.verdict == "proven", full_text(report)


def test_a_lost_reply(check: Chaos, connect: Connect) -> None:
    async def again_if_it_fails(connect: Connect) -> None:
        for attempt in (1, 2):
            try:
                async with await connect() as db:
                    await db.execute("INSERT INTO invoices (ord) VALUES (1)")
                return
            except psycopg.OperationalError:
                if attempt == 2:
                    raise

    report = check(faults=True, crashes=0).explore(again_if_it_fails, connect)
    assert ("duplicated", "invoices") in {(each.kind, each.effect) for each in report.findings}, full_text(report)
    assert "lost reply: OperationalError: server closed the connection unexpectedly" in full_text(report)


def test_pipelines_are_refused(check: Chaos, connect: Connect) -> None:
    async def job() -> None:
        async with await connect() as db, db.pipeline():
            await db.execute("INSERT INTO once VALUES ('7', 1)")

    with pytest.raises(ChaosError, match="pipeline mode"):
        check.explore(job)


def test_two_phase_commits_are_refused(check: Chaos, connect: Connect) -> None:
    async def job() -> None:
        async with await connect() as db:
            await db.tpc_begin("1")
            await db.execute("INSERT INTO once VALUES ('7', 1)")
            await db.tpc_prepare()

    with pytest.raises(ChaosError, match="two-phase"):
        check.explore(job)


def test_the_driver_is_left_as_it_was(check: Chaos, connect: Connect) -> None:
    owners = (psycopg.AsyncConnection, psycopg.AsyncCursor, psycopg.AsyncServerCursor, psycopg.AsyncTransaction)
    before = [dict(vars(owner)) for owner in owners]
    waiting = dict(vars(psycopg.waiting))
    check.explore(locked, connect)
    assert [dict(vars(owner)) for owner in owners] == before
    assert dict(vars(psycopg.waiting)) == waiting
