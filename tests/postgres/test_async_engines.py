"""Jobs on SQLAlchemy's AsyncEngine with a PostgreSQL server, through each async driver."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeAlias

import pytest
from sqlalchemy import ForeignKey, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.pool import NullPool

from retrychaos import Chaos, ChaosError
from retrychaos.report.text import full_text
from tests.postgres_server import Postgres

Job: TypeAlias = Callable[[AsyncEngine], Coroutine[Any, Any, None]]

DRIVERS = ("psycopg", "asyncpg")


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    n: Mapped[int] = mapped_column(default=0)
    status: Mapped[str] = mapped_column(default="new")


class Invoice(Base):
    __tablename__ = "invoices"

    id: Mapped[int] = mapped_column(primary_key=True)
    ord: Mapped[int] = mapped_column(ForeignKey("orders.id"))


class Once(Base):
    __tablename__ = "once"

    k: Mapped[str] = mapped_column(primary_key=True)


@pytest.fixture(params=DRIVERS)
def engine(request: pytest.FixtureRequest, postgres_server: Postgres, postgres: str) -> Iterator[AsyncEngine]:
    engine = create_async_engine(postgres_server.url(postgres, request.param))

    async def create() -> None:
        async with engine.begin() as db:
            await db.run_sync(Base.metadata.create_all)
            await db.execute(text("INSERT INTO orders VALUES (1, 0, 'new'), (2, 0, 'new')"))
        await engine.dispose()  # its connections belong to this loop

    asyncio.run(create())
    yield engine
    asyncio.run(engine.dispose())


@pytest.fixture
def twice(check: Chaos) -> Chaos:
    return check(duplicates=2, budget=300)


async def bill(engine: AsyncEngine, look: str) -> None:
    """Look, in some way that may lock; bill if the order is new."""
    async with engine.begin() as db:
        if await db.scalar(text(look)) == "new":
            await db.execute(text("INSERT INTO invoices (ord) VALUES (1)"))
            await db.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))


async def look_and_bill(engine: AsyncEngine) -> None:
    await bill(engine, "SELECT status FROM orders WHERE id = 1")


async def lock_and_bill(engine: AsyncEngine) -> None:
    await bill(engine, "SELECT status FROM orders WHERE id = 1 FOR UPDATE")


async def lock_with_the_orm(engine: AsyncEngine) -> None:
    async with AsyncSession(engine) as session, session.begin():
        order = await session.get_one(Order, 1, with_for_update=True)
        if order.status == "new":
            session.add(Invoice(ord=1))
            order.status = "done"


async def look_with_the_orm(engine: AsyncEngine) -> None:
    async with AsyncSession(engine) as session:
        order = await session.get_one(Order, 1)
        if order.status == "new":
            session.add(Invoice(ord=1))
            order.status = "done"
            await session.commit()


async def two_transactions(engine: AsyncEngine) -> None:
    async with AsyncSession(engine, expire_on_commit=False) as session:
        order = await session.get_one(Order, 1, with_for_update=True)
        if order.status == "new":
            session.add(Invoice(ord=1))
            await session.commit()
            order.status = "done"
            await session.commit()


async def advisory(engine: AsyncEngine) -> None:
    async with engine.begin() as db:
        await db.execute(text("SELECT pg_advisory_xact_lock(42)"))
        if not (await db.execute(select(Invoice.id))).first():
            await db.execute(text("INSERT INTO invoices (ord) VALUES (1)"))


async def advisory_of_the_wrong_order(engine: AsyncEngine) -> None:
    async with engine.begin() as db:
        seen = (await db.execute(select(Invoice.id))).first()
        await db.execute(text("SELECT pg_advisory_xact_lock(42)"))
        if not seen:
            await db.execute(text("INSERT INTO invoices (ord) VALUES (1)"))


async def on_conflict(engine: AsyncEngine) -> None:
    async with engine.begin() as db:
        await db.execute(text("INSERT INTO once VALUES ('7') ON CONFLICT DO NOTHING"))


async def give_way(engine: AsyncEngine) -> None:
    try:
        async with engine.begin() as db:
            await db.execute(text("INSERT INTO once VALUES ('7')"))
            await db.execute(text("INSERT INTO invoices (ord) VALUES (1)"))
    except IntegrityError:
        pass


async def no_constraint(engine: AsyncEngine) -> None:
    """As give_way, where nothing is unique."""
    async with engine.begin() as db:
        if not (await db.execute(select(Invoice.id))).first():
            await db.execute(text("INSERT INTO invoices (ord) VALUES (1)"))


async def savepoint(engine: AsyncEngine) -> None:
    async with engine.begin() as db:
        try:
            async with db.begin_nested():
                await db.execute(text("INSERT INTO once VALUES ('7')"))
        except IntegrityError:
            return
        await db.execute(text("INSERT INTO invoices (ord) VALUES (1)"))


async def compare_and_set(engine: AsyncEngine) -> None:
    async with engine.begin() as db:
        if (await db.execute(update(Order).where(Order.id == 1, Order.status == "new").values(status="done"))).rowcount:
            await db.execute(text("INSERT INTO invoices (ord) VALUES (1)"))


async def two_rows_in_one_order(engine: AsyncEngine) -> None:
    async with engine.begin() as db:
        for number in (1, 2):
            await db.execute(text("UPDATE orders SET n = 1 WHERE id = :id"), {"id": number})


async def at_once(engine: AsyncEngine) -> None:
    """Each statement is committed by itself."""
    async with engine.connect() as db:
        db = await db.execution_options(isolation_level="AUTOCOMMIT")
        await db.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))
        await db.execute(text("INSERT INTO once VALUES ('7') ON CONFLICT DO NOTHING"))


async def many_rows(engine: AsyncEngine) -> None:
    async with engine.begin() as db:
        rows = [{"k": str(each)} for each in range(3)]
        await db.execute(text("INSERT INTO once VALUES (:k) ON CONFLICT DO NOTHING"), rows)


async def streamed(engine: AsyncEngine) -> None:
    """A server-side cursor."""
    async with engine.begin() as db:
        async for (number,) in await db.stream(text("SELECT id FROM orders ORDER BY id")):
            await db.execute(text("INSERT INTO once VALUES (:k) ON CONFLICT DO NOTHING"), {"k": str(number)})


async def no_pool(engine: AsyncEngine) -> None:
    mine = create_async_engine(engine.url, poolclass=NullPool)
    await compare_and_set(mine)
    await mine.dispose()


async def an_engine_of_its_own(engine: AsyncEngine) -> None:
    """As a worker makes one when it starts. Nobody disposes of it."""
    await compare_and_set(create_async_engine(engine.url, pool_pre_ping=True))


async def session_left_open(engine: AsyncEngine) -> None:
    session = AsyncSession(engine)
    if not (await session.scalars(select(Once))).first():
        session.add(Once(k="7"))
        await session.commit()
    await session.scalars(select(Once))


async def together(engine: AsyncEngine) -> None:
    """Tasks over one pool."""
    await asyncio.gather(*(compare_and_set(engine), on_conflict(engine), savepoint_of(engine, "8")))


async def savepoint_of(engine: AsyncEngine, key: str) -> None:
    async with engine.begin() as db:
        await db.execute(text("INSERT INTO once VALUES (:k) ON CONFLICT DO NOTHING"), {"k": key})


async def together_on_one_row(engine: AsyncEngine) -> None:
    """They would wait for each other's locks."""

    async def add(key: str) -> None:
        async with engine.begin() as db:
            if (await db.execute(text("INSERT INTO once VALUES (:k) ON CONFLICT DO NOTHING"), {"k": key})).rowcount:
                await db.execute(text("UPDATE orders SET n = n + 1 WHERE id = 1"))

    await asyncio.gather(add("1"), add("2"), add("3"))


async def torn_in_a_task(engine: AsyncEngine) -> None:
    await asyncio.gather(on_conflict(engine), two_transactions(engine))


GOOD: list[Job] = [
    *(lock_and_bill, lock_with_the_orm, advisory, on_conflict, give_way, savepoint, compare_and_set),
    *(two_rows_in_one_order, at_once, many_rows, no_pool, an_engine_of_its_own, session_left_open),
]
TOGETHER: list[Job] = [together, together_on_one_row]
RACY: list[Job] = [look_and_bill, look_with_the_orm, advisory_of_the_wrong_order, no_constraint]
TORN: list[Job] = [two_transactions, torn_in_a_task]


@pytest.mark.parametrize("job", GOOD, ids=lambda job: job.__name__)
def test_a_good_job_is_proven(twice: Chaos, engine: AsyncEngine, job: Job) -> None:
    threads = threading.active_count()
    report = twice.explore(job, engine)
    assert report.verdict == "proven", full_text(report)
    assert threading.active_count() == threads


def test_a_server_side_cursor(check: Chaos, engine: AsyncEngine) -> None:
    report = check(duplicates=1).explore(streamed, engine)
    assert report.verdict == "proven", full_text(report)


def test_a_server_side_cursor_of_a_delivery_that_dies(twice: Chaos, engine: AsyncEngine) -> None:
    async def job(engine: AsyncEngine) -> None:
        async with engine.begin() as db:
            async for (number,) in await db.stream(text("SELECT id FROM orders WHERE id = 1 FOR UPDATE")):
                await db.execute(text("INSERT INTO once VALUES (:k) ON CONFLICT DO NOTHING"), {"k": str(number)})

    report = twice.explore(job, engine)
    assert report.verdict == "proven", full_text(report)


@pytest.mark.parametrize("job", TOGETHER, ids=lambda job: job.__name__)
@pytest.mark.parametrize("duplicates", [1, 2])
def test_tasks_over_one_pool(twice: Chaos, engine: AsyncEngine, job: Job, duplicates: int) -> None:
    report = twice(duplicates=duplicates).explore(job, engine)
    assert report.verdict == "proven", full_text(report)


@pytest.mark.parametrize("job", RACY, ids=lambda job: job.__name__)
def test_a_guard_outside_of_the_lock_is_refuted(twice: Chaos, engine: AsyncEngine, job: Job) -> None:
    assert twice(duplicates=1).explore(job, engine).verdict == "proven"
    report = twice.explore(job, engine)
    assert {(finding.kind, finding.effect) for finding in report.findings} == {("duplicated", "invoices")}, report
    again = twice.run(job, engine, plan=report.findings[0].token)
    assert (again.kind, again.effect) == ("duplicated", "invoices")
    assert report.findings[0].plan.crashes == 0


@pytest.mark.parametrize("job", TORN, ids=lambda job: job.__name__)
def test_a_crash_between_two_transactions(check: Chaos, engine: AsyncEngine, job: Job) -> None:
    report = check(duplicates=1).explore(job, engine)
    assert {(finding.kind, finding.effect) for finding in report.findings} == {("duplicated", "invoices")}, report
    assert not check.run(job, engine, plan=report.findings[0].token).ok


def test_the_line_behind_a_step(check: Chaos, engine: AsyncEngine) -> None:
    report = check.explore(two_transactions, engine)
    steps = report.findings[0].timeline[0].steps
    assert [step.site.function for step in steps if step.site] == ["two_transactions"] * len(steps)


def test_a_read_modify_write(twice: Chaos, engine: AsyncEngine) -> None:
    """Both look without a lock; the second UPDATE waits in the server until the first one has committed."""

    async def add_one(engine: AsyncEngine) -> None:
        async with engine.begin() as db:
            if await db.scalar(text("SELECT n FROM orders WHERE id = 1")) == 0:
                await db.execute(text("UPDATE orders SET n = n + 1 WHERE id = 1"))

    report = twice.explore(add_one, engine)
    assert {(finding.kind, finding.effect) for finding in report.findings} == {("changed", "orders")}, full_text(report)


async def in_the_order_of_the_process(engine: AsyncEngine, again: bool) -> None:
    """Each delivery locks its row of the claim first, and then the other one: they come to wait for each other."""
    for _ in (1, 2, 3):
        try:
            async with engine.begin() as db:
                free = "SELECT id FROM orders WHERE status = 'new' ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED"
                first = await db.scalar(text(free))
                if first is None:
                    if await db.scalar(text("SELECT count(*) FROM orders WHERE status = 'new'")) == 0:
                        return
                    raise RuntimeError("somebody else is at it")
                for number in (first, 3 - first):
                    await db.execute(text("UPDATE orders SET status = 'done' WHERE id = :id"), {"id": number})
            return
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) != "40P01":
                raise
            if not again:
                return


def test_a_deadlock_between_deliveries(twice: Chaos, engine: AsyncEngine) -> None:
    report = twice(crashes=0).explore(in_the_order_of_the_process, engine, True)
    assert report.verdict == "proven", full_text(report)


async def both_rows(engine: AsyncEngine, swallow: bool) -> None:
    """What is locked first depends on what is there; who is the victim of a deadlock may give up."""
    try:
        async with engine.begin() as db:
            await db.execute(text("SELECT * FROM orders WHERE id = 1 FOR SHARE"))
            await db.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))
    except DBAPIError as error:
        if not (swallow and getattr(error.orig, "sqlstate", None) == "40P01"):
            raise


@pytest.mark.parametrize("swallow", [False, True])
def test_a_lock_that_is_made_stronger(twice: Chaos, engine: AsyncEngine, swallow: bool) -> None:
    """Both share the lock, and each wants it alone: a deadlock, whose victim comes again or may rely on the other."""
    report = twice(crashes=0).explore(both_rows, engine, swallow)
    assert report.verdict == "proven", full_text(report)


async def serializable(engine: AsyncEngine) -> None:
    for _ in range(4):
        try:
            async with engine.connect() as db:
                db = await db.execution_options(isolation_level="SERIALIZABLE")
                async with db.begin():
                    await insert_if_none(db)
            return
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) != "40001":
                raise
    raise RuntimeError("gave up")


async def insert_if_none(db: AsyncConnection) -> None:
    if not (await db.execute(text("SELECT 1 FROM invoices WHERE ord = 1"))).first():
        await db.execute(text("INSERT INTO invoices (ord) VALUES (1)"))


def test_serializable_transactions_with_retry_are_proven(twice: Chaos, engine: AsyncEngine) -> None:
    report = twice(crashes=0).explore(serializable, engine)
    assert report.verdict == "proven", full_text(report)


# -- faults -----------------------------------------------------------------------------------------------------------


async def again_if_it_fails(engine: AsyncEngine) -> None:
    """Right where nothing was done, wrong where only the answer was lost."""
    for attempt in (1, 2):
        try:
            async with engine.begin() as db:
                await db.execute(text("INSERT INTO invoices (ord) VALUES (1)"))
        except (DBAPIError, OSError):
            if attempt == 2:
                raise
        else:
            return


async def swallow(engine: AsyncEngine) -> None:
    try:
        await lock_and_bill(engine)
    except (DBAPIError, OSError):
        return


async def take_a_deadlock_for_done(engine: AsyncEngine) -> None:
    try:
        await lock_and_bill(engine)
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != "40P01":
            raise


async def go_on_in_the_broken_transaction(engine: AsyncEngine) -> None:
    async with engine.begin() as db:
        try:
            await db.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) != "40P01":
                raise
            await db.execute(text("SELECT 1"))


async def strictly(engine: AsyncEngine) -> None:
    async with engine.connect() as db:
        db = await db.execution_options(isolation_level="SERIALIZABLE")
        try:
            async with db.begin():
                if await db.scalar(text("SELECT status FROM orders WHERE id = 1")) == "new":
                    await db.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) != "40001":
                raise


async def with_lock_timeout(engine: AsyncEngine) -> None:
    async with engine.begin() as db:
        await db.execute(text("SET LOCAL lock_timeout = '10s'"))
        try:
            async with db.begin_nested():
                await db.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) != "55P03":
                raise


@pytest.mark.parametrize(
    "job",
    [lock_and_bill, lock_with_the_orm, at_once, give_way, go_on_in_the_broken_transaction, serializable],
    ids=lambda job: job.__name__,
)
def test_errors_and_lost_replies(check: Chaos, engine: AsyncEngine, job: Job) -> None:
    report = check(faults=True).explore(job, engine)
    assert report.verdict == "proven", full_text(report)


@pytest.mark.parametrize(
    ("job", "kind", "effect", "fault"),
    [
        (again_if_it_fails, "duplicated", "invoices", "lost reply"),
        (swallow, "lost", "invoices", "error"),
        (take_a_deadlock_for_done, "lost", "invoices", "deadlock"),
        (strictly, "lost", "orders", "serialization failure"),
        (with_lock_timeout, "lost", "orders", "lock timeout"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_fault_that_is_handled_wrongly(
    check: Chaos, engine: AsyncEngine, job: Job, kind: str, effect: str, fault: str
) -> None:
    report = check(faults=True, crashes=0).explore(job, engine)
    findings = {(each.kind, each.effect): each for each in report.findings}
    assert (kind, effect) in findings, full_text(report)
    finding = findings[kind, effect]
    assert finding.plan.faults == (fault,)
    again = check(faults=True, crashes=0).run(job, engine, plan=finding.token)
    assert (again.kind, again.effect) == (kind, effect)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_database_that_may_hold_data(chaos: Chaos, engine: AsyncEngine) -> None:
    with pytest.raises(ChaosError, match=r"is not empty .*scratch="):
        chaos.explore(lock_and_bill, engine)


def test_a_job_that_changes_the_schema(check: Chaos, engine: AsyncEngine) -> None:
    async def job(engine: AsyncEngine) -> None:
        async with engine.begin() as db:
            await db.execute(text("CREATE TABLE more (id int)"))

    with pytest.raises(ChaosError, match="is about to change the schema"):
        check.explore(job, engine)


def test_a_connection_from_before_the_check_with_an_open_transaction(check: Chaos, engine: AsyncEngine) -> None:
    async def test() -> None:
        async with engine.connect() as db:
            await db.execute(text("SELECT 1"))

            async def job() -> None:
                await db.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))

            with pytest.raises(ChaosError):
                check.explore(job)
        await engine.dispose()

    asyncio.run(test())


def test_a_test_that_is_itself_a_coroutine(check: Chaos, engine: AsyncEngine) -> None:
    """Its own connections, and the loop that they belong to, are left alone."""

    async def test() -> None:
        async with engine.connect() as db:
            assert await db.scalar(text("SELECT count(*) FROM invoices")) == 0
            await db.commit()
            report = check(duplicates=2).explore(lock_and_bill, engine)
            assert report.verdict == "proven", full_text(report)
            assert await db.scalar(text("SELECT count(*) FROM invoices")) == 1
        await engine.dispose()

    asyncio.run(test())


def test_work_left_uncommitted(check: Chaos, engine: AsyncEngine) -> None:
    async def job(engine: AsyncEngine) -> None:
        await on_conflict(engine)
        session = AsyncSession(engine)
        session.add(Invoice(ord=1))
        await session.flush()

    report = check.explore(job, engine)
    assert any("left uncommitted" in each for each in report.warnings), full_text(report)


def test_connections_are_gone_after_a_check(
    check: Chaos, engine: AsyncEngine, postgres_server: Postgres, postgres: str
) -> None:
    asyncio.run(engine.dispose())
    assert postgres_server.connected(postgres) == []
    assert check(duplicates=2, faults=True).explore(lock_and_bill, engine).verdict == "proven"
    assert postgres_server.connected(postgres) == []
