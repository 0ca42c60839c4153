"""Jobs on asyncpg, without SQLAlchemy."""

from __future__ import annotations

import asyncio
import functools
import io
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeAlias

import asyncpg
import pytest

from retrychaos import Chaos, ChaosError
from retrychaos.report.text import full_text
from tests.postgres_server import Postgres, running_server
from tests.world.redis_server import free_port

Connect: TypeAlias = Callable[..., Any]
Job: TypeAlias = Callable[[Connect], Coroutine[Any, Any, None]]

SCHEMA = (
    "CREATE TABLE invoices (id serial PRIMARY KEY, ord int); CREATE TABLE once (k text PRIMARY KEY, n int);"
    "CREATE TYPE mood AS ENUM ('new', 'done'); CREATE TABLE orders (id int PRIMARY KEY, n int, status text);"
    "INSERT INTO orders VALUES (1, 0, 'new'), (2, 0, 'new');"
    "CREATE TABLE notes (id int PRIMARY KEY, of mood, data jsonb, at timestamptz, tags text[])"
)


@pytest.fixture
def connect(postgres_server: Postgres, postgres: str) -> Connect:
    """asyncpg.create_pool."""
    postgres_server.run(SCHEMA, postgres)
    where = {"host": postgres_server.folder, "user": "postgres", "database": postgres}
    return functools.partial(asyncpg.create_pool, **where, min_size=1)


async def alone(connect: Connect) -> Any:
    """A connection outside of a pool."""
    where = {name: value for name, value in connect.keywords.items() if name != "min_size"}  # type: ignore[attr-defined]
    return await asyncpg.connect(**where)


@pytest.fixture
def twice(check: Chaos) -> Chaos:
    return check(duplicates=2, budget=60)


LOOK = "SELECT status FROM orders WHERE id = $1"


async def locked(connect: Connect) -> None:
    async with connect() as pool, pool.acquire() as db, db.transaction():
        if await db.fetchval(f"{LOOK} FOR UPDATE", 1) == "new":
            await db.execute("INSERT INTO invoices (ord) VALUES ($1)", 1)
            await db.execute("UPDATE orders SET status = 'done' WHERE id = 1")


async def not_locked(connect: Connect) -> None:
    async with connect() as pool, pool.acquire() as db, db.transaction():
        if await db.fetchval(LOOK, 1) == "new":
            await db.execute("INSERT INTO invoices (ord) VALUES ($1)", 1)
            await db.execute("UPDATE orders SET status = 'done' WHERE id = 1")


async def no_transaction(connect: Connect) -> None:
    async with connect() as pool:
        if await pool.fetchval(LOOK, 1) == "new":
            await pool.execute("INSERT INTO invoices (ord) VALUES ($1)", 1)
            await pool.execute("UPDATE orders SET status = 'done' WHERE id = 1")


async def a_connection_alone(connect: Connect) -> None:
    db = await alone(connect)
    try:
        async with db.transaction():
            if await db.execute("UPDATE orders SET status = 'done' WHERE id = 1 AND status = 'new'") == "UPDATE 1":
                await db.execute("INSERT INTO invoices (ord) VALUES (1)")
    finally:
        await db.close()


async def two_transactions(connect: Connect) -> None:
    async with connect() as pool, pool.acquire() as db:
        async with db.transaction():
            new = await db.fetchval(f"{LOOK} FOR UPDATE", 1) == "new"
            if new:
                await db.execute("INSERT INTO invoices (ord) VALUES (1)")
        async with db.transaction():
            await db.execute("UPDATE orders SET status = 'done' WHERE id = 1")


async def savepoint(connect: Connect) -> None:
    async with connect() as pool, pool.acquire() as db, db.transaction():
        try:
            async with db.transaction():
                await db.execute("INSERT INTO once VALUES ($1, 1)", "7")
        except asyncpg.UniqueViolationError:
            return
        await db.execute("INSERT INTO invoices (ord) VALUES (1)")


async def given_up(connect: Connect) -> None:
    async with connect() as pool, pool.acquire() as db:
        transaction = db.transaction()
        await transaction.start()
        await db.execute("INSERT INTO invoices (ord) VALUES (7)")
        await transaction.rollback()
        await db.execute("INSERT INTO once VALUES ('7', 1) ON CONFLICT DO NOTHING")


async def prepared(connect: Connect) -> None:
    """Prepared long before it is used."""
    async with connect() as pool, pool.acquire() as db:
        bill = await db.prepare("INSERT INTO invoices (ord) VALUES ($1) RETURNING id")
        async with db.transaction():
            if await db.fetchval(f"{LOOK} FOR UPDATE", 1) == "new":
                assert isinstance(await bill.fetchval(1), int)
                await db.execute("UPDATE orders SET status = 'done' WHERE id = $1", 1)


async def prepared_outside(connect: Connect) -> None:
    """As prepared, without a transaction around."""
    async with connect() as pool, pool.acquire() as db:
        bill = await db.prepare("INSERT INTO invoices (ord) VALUES ($1) RETURNING id")
        if await db.fetchval(LOOK, 1) == "new":
            assert isinstance(await bill.fetchval(1), int)
            await db.execute("UPDATE orders SET status = 'done' WHERE id = $1", 1)


async def no_cache(connect: Connect) -> None:
    async with connect(statement_cache_size=0) as pool, pool.acquire() as db, db.transaction():
        for number in (1, 2):
            await db.execute("UPDATE orders SET status = 'done' WHERE id = $1", number)


async def many(connect: Connect) -> None:
    async with connect() as pool, pool.acquire() as db:
        rows = ((str(each), each) for each in range(3))
        await db.executemany("INSERT INTO once VALUES ($1, $2) ON CONFLICT DO NOTHING", rows)


async def many_anew(connect: Connect) -> None:
    async with connect() as pool, pool.acquire() as db:
        if await db.fetchval(LOOK, 1) == "new":
            await db.executemany("INSERT INTO invoices (ord) VALUES ($1)", [(each,) for each in range(3)])
            await db.execute("UPDATE orders SET status = 'done' WHERE id = 1")


async def cursor(connect: Connect) -> None:
    async with connect() as pool, pool.acquire() as db, db.transaction():
        async for row in db.cursor("SELECT id FROM orders ORDER BY id", prefetch=1):
            await db.execute("INSERT INTO once VALUES ($1, 1) ON CONFLICT DO NOTHING", str(row["id"]))


async def cursor_by_hand(connect: Connect) -> None:
    async with connect() as pool, pool.acquire() as db, db.transaction():
        rows = await db.cursor("SELECT id FROM orders WHERE id > $1 ORDER BY id", 0)
        await rows.forward(1)
        assert (await rows.fetchrow())["id"] == 2
        await db.execute("INSERT INTO once VALUES ('2', 1) ON CONFLICT DO NOTHING")


async def several_at_once(connect: Connect) -> None:
    """One message, so one transaction."""
    async with connect() as pool:
        await pool.execute(
            "UPDATE orders SET status = 'done' WHERE id = 1; INSERT INTO once VALUES ('7', 1) ON CONFLICT DO NOTHING"
        )


async def copied(connect: Connect) -> None:
    async with connect() as pool, pool.acquire() as db:
        if not await db.fetch("SELECT 1 FROM once"):
            await db.copy_records_to_table("once", records=[("7", 1), ("8", 1)])


async def copied_anew(connect: Connect) -> None:
    async with connect() as pool, pool.acquire() as db:
        if await db.fetchval(LOOK, 1) == "new":
            await db.copy_to_table("invoices", source=io.BytesIO(b"1\n2\n"), columns=["ord"])
            await db.execute("UPDATE orders SET status = 'done' WHERE id = 1")


async def copied_on_the_way(connect: Connect) -> None:
    """What is copied comes from another connection, bit by bit."""
    async with connect() as pool, pool.acquire() as db, pool.acquire() as other:

        async def ids() -> AsyncIterator[tuple[str, int]]:
            for number in (1, 2):
                yield str(await other.fetchval("SELECT n + $1 FROM orders WHERE id = 1", number)), 1

        if not await db.fetch("SELECT 1 FROM once"):
            await db.copy_records_to_table("once", records=ids())


async def read_by_copy(connect: Connect) -> None:
    async with connect() as pool, pool.acquire() as db:
        out = io.BytesIO()
        await db.copy_from_query("SELECT id FROM orders ORDER BY id", output=out)
        assert out.getvalue() == b"1\n2\n"
        await db.execute("INSERT INTO once VALUES ('7', 1) ON CONFLICT DO NOTHING")


async def kinds_of_values(connect: Connect) -> None:
    """asyncpg asks the catalog for what it does not know yet; the job has codecs of its own."""

    async def init(db: Any) -> None:
        await db.set_type_codec("jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")

    async with connect(init=init) as pool, pool.acquire() as db, db.transaction():
        await db.execute(
            "INSERT INTO notes VALUES (1, $1, $2, now(), $3) ON CONFLICT DO NOTHING", "new", {"a": 1}, ["b", "c"]
        )
        row = await db.fetchrow("SELECT * FROM notes")
        assert (row["of"], row["data"], row["tags"]) == ("new", {"a": 1}, ["b", "c"])


async def serializable(connect: Connect) -> None:
    async with connect() as pool:
        for _ in range(4):
            try:
                async with pool.acquire() as db, db.transaction(isolation="serializable"):
                    if not await db.fetch("SELECT 1 FROM invoices WHERE ord = 1"):
                        await db.execute("INSERT INTO invoices (ord) VALUES (1)")
                return
            except asyncpg.SerializationError:
                pass
    raise RuntimeError("gave up")


async def snapshot(connect: Connect) -> None:
    """REPEATABLE READ does not keep two from seeing nothing."""
    async with connect() as pool, pool.acquire() as db, db.transaction(isolation="repeatable_read"):
        if not await db.fetch("SELECT 1 FROM invoices WHERE ord = 1"):
            await db.execute("INSERT INTO invoices (ord) VALUES (1)")


async def advisory(connect: Connect) -> None:
    """The lock is of the session: the pool lets it go when the connection comes back."""
    async with connect() as pool, pool.acquire() as db:
        await db.execute("SELECT pg_advisory_lock(42)")
        if await db.fetchval(LOOK, 1) == "new":
            async with db.transaction():
                await db.execute("INSERT INTO invoices (ord) VALUES (1)")
                await db.execute("UPDATE orders SET status = 'done' WHERE id = 1")


async def advisory_too_late(connect: Connect) -> None:
    async with connect() as pool, pool.acquire() as db:
        new = await db.fetchval(LOOK, 1) == "new"
        await db.execute("SELECT pg_advisory_lock(42)")
        if new:
            async with db.transaction():
                await db.execute("INSERT INTO invoices (ord) VALUES (1)")
                await db.execute("UPDATE orders SET status = 'done' WHERE id = 1")


async def left_open(connect: Connect) -> None:
    """The process ends, and its connection with it."""
    db = await alone(connect)
    await db.execute("INSERT INTO once VALUES ('7', 1) ON CONFLICT DO NOTHING")


async def pool_of_ten(connect: Connect) -> None:
    """As many as asyncpg opens by itself."""
    await locked(functools.partial(connect, min_size=10))


async def tasks(connect: Connect) -> None:
    async def add(pool: Any, key: str) -> None:
        async with pool.acquire() as db, db.transaction():
            await db.execute("INSERT INTO once VALUES ($1, 1) ON CONFLICT DO NOTHING", key)
            await asyncio.sleep(0.01)

    async with connect(max_size=2) as pool:
        await asyncio.gather(*(add(pool, str(each)) for each in range(3)))


GOOD: list[Job] = [
    *(locked, a_connection_alone, savepoint, given_up, prepared, no_cache, many, cursor, cursor_by_hand),
    *(several_at_once, read_by_copy, kinds_of_values, advisory, left_open, pool_of_ten, tasks),
]
TORN: list[Job] = [no_transaction, two_transactions, prepared_outside, many_anew, copied_anew]
RACY: list[Job] = [not_locked, snapshot, advisory_too_late]


def name_of(job: Any) -> Any:
    return getattr(job, "__name__", job)


def findings(report: Any) -> set[tuple[str, str]]:
    return {(each.kind, each.effect) for each in report.findings}


@pytest.mark.parametrize("job", GOOD, ids=name_of)
def test_a_good_job_is_proven(twice: Chaos, connect: Connect, job: Job) -> None:
    report = twice.explore(job, connect)
    assert report.verdict == "proven", full_text(report)


@pytest.mark.parametrize("job", [copied, copied_on_the_way], ids=name_of)
def test_copy(twice: Chaos, connect: Connect, job: Job) -> None:
    """With a key that is unique, whoever comes second fails, and finds all there when it comes again."""
    report = twice.explore(job, connect)
    assert report.verdict == "proven", full_text(report)


@pytest.mark.parametrize("job", TORN, ids=name_of)
def test_a_crash_between_two_transactions(check: Chaos, connect: Connect, job: Job) -> None:
    report = check(duplicates=1).explore(job, connect)
    assert findings(report) == {("duplicated", "invoices")}, full_text(report)
    assert not check.run(job, connect, plan=report.findings[0].token).ok


@pytest.mark.parametrize("job", RACY, ids=name_of)
def test_a_guard_without_a_lock(twice: Chaos, connect: Connect, job: Job) -> None:
    assert twice(duplicates=1).explore(job, connect).verdict == "proven"
    report = twice.explore(job, connect)
    assert findings(report) == {("duplicated", "invoices")}, full_text(report)
    assert not twice.run(job, connect, plan=report.findings[0].token).ok


def test_serializable_transactions_with_retry(twice: Chaos, connect: Connect) -> None:
    report = twice(crashes=0).explore(serializable, connect)
    assert report.verdict == "proven", full_text(report)


def test_a_lock_that_everybody_wants_in_another_order(twice: Chaos, connect: Connect) -> None:
    """Who is the victim of a deadlock comes again."""

    async def strengthen(connect: Connect) -> None:
        async with connect() as pool, pool.acquire() as db, db.transaction():
            await db.execute("SELECT * FROM orders WHERE id = 1 FOR SHARE")
            await db.execute("UPDATE orders SET status = 'done' WHERE id = 1")

    report = twice(crashes=0).explore(strengthen, connect)
    assert report.verdict == "proven", full_text(report)


def test_a_table_that_is_locked_while_a_statement_is_prepared(twice: Chaos, connect: Connect) -> None:
    async def job(connect: Connect) -> None:
        async with connect() as pool, pool.acquire() as db, db.transaction():
            await db.execute("LOCK TABLE orders IN ACCESS EXCLUSIVE MODE")
            if await db.fetchval(LOOK, 1) == "new":
                await db.execute("INSERT INTO invoices (ord) VALUES (1)")
                await db.execute("UPDATE orders SET status = 'done' WHERE id = 1")

    async def look(connect: Connect) -> None:
        async with connect() as pool:
            await pool.fetchval(LOOK, 1)  # to prepare it, the server needs the table
            await job(connect)

    report = twice(crashes=0).explore(look, connect)
    assert report.verdict == "proven", full_text(report)


def test_steps_and_their_lines(check: Chaos, connect: Connect) -> None:
    report = check(duplicates=1).explore(two_transactions, connect)
    steps = report.findings[0].timeline[0].steps
    assert [each.detail for each in steps] == [
        "SELECT status FROM orders WHERE id = $1 FOR UPDATE",
        "INSERT INTO invoices (ord) VALUES (1)",
        "COMMIT",
    ]
    assert {each.site.function for each in steps if each.site} == {"two_transactions"}


def test_more_rows_than_a_socket_holds(check: Chaos, connect: Connect) -> None:
    """The server does not read on before somebody reads what it has answered."""

    async def job(connect: Connect) -> None:
        async with connect() as pool, pool.acquire() as db, db.transaction():
            if await db.fetchval("SELECT count(*) FROM once") == 0:
                await db.executemany("INSERT INTO once VALUES ($1, 1)", [(f"{each:0200}",) for each in range(50_000)])
                assert len(await db.fetch("SELECT * FROM once")) == 50_000

    report = check(duplicates=1, crashes=1).explore(job, connect)
    assert report.verdict == "proven", full_text(report)


# -- pools from elsewhere ----------------------------------------------------------------------------------------------


POOLS: list[Any] = []


async def with_the_pool_of_the_process(connect: Connect, guard: str) -> None:
    """Whoever needs it first makes it, and nobody closes it."""
    if not POOLS:
        POOLS.append(await connect(max_size=2))
    await bill(POOLS[0], guard)


async def bill(pool: Any, guard: str) -> None:
    """Tasks that take connections of one pool at the same time, some of them by hand."""

    async def note(key: str) -> None:
        await pool.execute("INSERT INTO once VALUES ($1, 1) ON CONFLICT DO NOTHING", key)

    await asyncio.gather(note("1"), note("2"))
    db = await pool.acquire()
    try:
        async with db.transaction():
            if await db.fetchval(f"{LOOK} {guard}", 1) == "new":
                await db.execute("INSERT INTO invoices (ord) VALUES ($1)", 1)
                await db.execute("UPDATE orders SET status = 'done' WHERE id = 1")
    finally:
        await pool.release(db)


@pytest.mark.parametrize(("guard", "verdict"), [("FOR UPDATE", "proven"), ("", "failed")])
def test_a_pool_that_is_made_by_who_comes_first(twice: Chaos, connect: Connect, guard: str, verdict: str) -> None:
    POOLS.clear()
    report = twice.explore(with_the_pool_of_the_process, connect, guard)
    assert report.verdict == verdict, full_text(report)
    POOLS.clear()


@pytest.mark.parametrize(("guard", "verdict"), [("FOR UPDATE", "proven"), ("", "failed")])
def test_the_pool_of_a_test(twice: Chaos, connect: Connect, guard: str, verdict: str) -> None:
    async def test() -> None:
        async with connect(max_size=2) as pool:
            report = twice.explore(bill, pool, guard)
            assert report.verdict == verdict, full_text(report)
            assert await pool.fetchval("SELECT count(*) FROM once") == 2

    asyncio.run(test())


def test_a_job_that_closes_the_pool_of_a_test(check: Chaos, connect: Connect) -> None:
    async def job(pool: Any) -> None:
        async with pool:
            await bill(pool, "FOR UPDATE")

    async def test() -> None:
        async with connect(max_size=2) as pool:
            assert check.explore(job, pool).verdict == "proven"
            assert await pool.fetchval("SELECT count(*) FROM once") == 2

    asyncio.run(test())


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", [locked, prepared, many, cursor, several_at_once, tasks], ids=name_of)
def test_errors_and_lost_replies(check: Chaos, connect: Connect, job: Job) -> None:
    report = check(faults=True).explore(job, connect)
    assert report.verdict == "proven", full_text(report)


async def give_up_when(connect: Connect, error: type[Exception]) -> None:
    try:
        async with connect() as pool, pool.acquire() as db, db.transaction(isolation="serializable"):
            if await db.fetchval(f"{LOOK} FOR UPDATE", 1) == "new":
                await db.execute("UPDATE orders SET status = 'done' WHERE id = 1")
    except error:
        pass


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (asyncpg.DeadlockDetectedError, "deadlock"),
        (asyncpg.SerializationError, "serialization failure"),
        (asyncpg.ConnectionDoesNotExistError, "error"),
    ],
    ids=name_of,
)
def test_who_swallows_an_error_loses_work(check: Chaos, connect: Connect, error: type[Exception], fault: str) -> None:
    report = check(faults=True, crashes=0).explore(functools.partial(give_up_when, connect, error))
    assert findings(report) == {("lost", "orders")}, full_text(report)
    assert report.findings[0].plan.faults == (fault,)


def test_a_lost_reply(check: Chaos, connect: Connect) -> None:
    async def again_if_it_fails(connect: Connect) -> None:
        async with connect() as pool:
            for attempt in (1, 2):
                try:
                    await pool.execute("INSERT INTO invoices (ord) VALUES (1)")
                    return
                except asyncpg.ConnectionDoesNotExistError:
                    if attempt == 2:
                        raise

    report = check(faults=True, crashes=0).explore(again_if_it_fails, connect)
    assert ("duplicated", "invoices") in findings(report), full_text(report)
    assert "lost reply: ConnectionDoesNotExistError: connection was closed" in full_text(report)


async def again_on_the_same_connection(connect: Connect, **limits: float) -> None:
    """asyncpg gives up by itself; the statement may have been done all the same."""
    async with connect(**limits) as pool, pool.acquire() as db, db.transaction():
        if await db.fetchval(f"{LOOK} FOR UPDATE", 1) == "new":
            for attempt in (1, 2):
                try:
                    await db.execute("INSERT INTO invoices (ord) VALUES ($1)", 1)
                    break
                except TimeoutError:
                    if attempt == 2:
                        raise
            await db.execute("UPDATE orders SET status = 'done' WHERE id = 1")


def test_who_tries_again_after_a_timeout(check: Chaos, connect: Connect) -> None:
    check = check(faults=True, crashes=0)
    assert check.explore(again_on_the_same_connection, connect).verdict == "proven"


def test_who_tries_again_after_a_timeout_of_its_own(check: Chaos, connect: Connect) -> None:
    check = check(faults=True, crashes=0)
    report = check.explore(again_on_the_same_connection, connect, command_timeout=5)
    assert findings(report) == {("duplicated", "invoices")}, full_text(report)
    assert report.findings[0].plan.faults == ("lost reply",)


def test_who_takes_a_timeout_for_done(check: Chaos, connect: Connect) -> None:
    """It waited for a lock, and nothing was done."""

    async def job(connect: Connect) -> None:
        async with connect() as pool:
            try:
                await pool.execute("UPDATE orders SET status = 'done' WHERE id = 1", timeout=2)
            except TimeoutError:
                pass

    report = check(faults=True, crashes=0).explore(job, connect)
    assert findings(report) == {("lost", "orders")}, full_text(report)
    assert report.findings[0].plan.faults == ("lock timeout",)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_connection_from_before_the_check(check: Chaos, connect: Connect) -> None:
    async def test() -> None:
        db = await alone(connect)

        async def job() -> None:
            await db.execute("INSERT INTO once VALUES ('7', 1)")

        with pytest.raises(ChaosError, match=r"opened before the check, or in another event loop.*Open it in the job"):
            check.explore(job)
        assert await db.fetchval("SELECT count(*) FROM once") == 0
        await db.close()

    asyncio.run(test())


def test_the_connections_of_a_test_are_left_alone(check: Chaos, connect: Connect) -> None:
    async def test() -> None:
        async with connect() as pool:
            assert await pool.fetchval("SELECT count(*) FROM invoices") == 0
            assert check(duplicates=2).explore(locked, connect).verdict == "proven"
            assert await pool.fetchval("SELECT count(*) FROM invoices") == 1

    asyncio.run(test())


def test_a_database_that_may_hold_data(chaos: Chaos, connect: Connect) -> None:
    with pytest.raises(ChaosError, match=r"is not empty .*scratch="):
        chaos.explore(locked, connect)


def test_a_job_that_changes_the_schema(check: Chaos, connect: Connect) -> None:
    async def job(connect: Connect) -> None:
        async with connect() as pool:
            await pool.execute("CREATE TABLE more (id int)")

    with pytest.raises(ChaosError, match="has changed the schema"):
        check.explore(job, connect)


def test_work_left_uncommitted(check: Chaos, connect: Connect) -> None:
    async def job(connect: Connect) -> None:
        await many(connect)
        db = await alone(connect)
        await db.transaction().start()
        await db.execute("INSERT INTO invoices (ord) VALUES (1)")

    report = check.explore(job, connect)
    assert any("left uncommitted" in each for each in report.warnings), full_text(report)


def test_connections_are_gone_after_a_check(
    check: Chaos, connect: Connect, postgres_server: Postgres, postgres: str
) -> None:
    assert check(duplicates=2, faults=True).explore(locked, connect).verdict == "proven"
    assert check.explore(left_open, connect).verdict == "proven"
    assert postgres_server.connected(postgres) == []


# -- sockets -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def far_server() -> Iterator[Postgres]:
    """A server that listens on a port, with TLS."""
    with running_server(free_port()) as server:
        yield server


@pytest.mark.parametrize("mode", ["disable", "prefer", "require"])
def test_a_server_on_a_port(twice: Chaos, far_server: Postgres, mode: str) -> None:
    with far_server.database() as name:
        far_server.run(SCHEMA, name)
        connect = functools.partial(
            asyncpg.create_pool, host="127.0.0.1", port=far_server.port, user="postgres", database=name, ssl=mode
        )

        async def encrypted(connect: Connect) -> bool:
            async with connect() as pool:
                return bool(await pool.fetchval("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"))

        async def job(connect: Connect) -> None:
            assert await encrypted(connect) == (mode != "disable")
            await locked(connect)

        chaos = twice(scratch=[f"postgresql://127.0.0.1:{far_server.port}/{name}"])
        report = chaos.explore(job, connect)
        assert report.verdict == "proven", full_text(report)
        far_server.run("UPDATE orders SET status = 'new'", name)
        assert findings(chaos.explore(not_locked, connect)) == {("duplicated", "invoices")}
