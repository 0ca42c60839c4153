"""Deliveries that overlap: correct locking passes exhaustively, races are found with few switches, tokens replay."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis as redis_package
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from retrychaos import Chaos, Report
from retrychaos.report.text import full_text

BUDGET = 120


@pytest.fixture
def twice(chaos: Chaos) -> Chaos:
    return chaos(duplicates=2, budget=BUDGET)


@pytest.fixture(params=["delete", "wal", "truncate", "memory"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    engine = create_engine(f"sqlite:///{tmp_path / 'jobs.db'}")
    with engine.connect() as connection:
        connection.exec_driver_sql(f"PRAGMA journal_mode = {request.param}")
    furnish(engine)
    return engine


@pytest.fixture
def db(twice: Chaos) -> Engine:
    furnish(twice.sql)
    return twice.sql


def furnish(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE invoices (id INTEGER PRIMARY KEY, ord INTEGER)"))
        connection.execute(text("CREATE TABLE marks (k TEXT PRIMARY KEY, n INTEGER)"))
        connection.execute(text("CREATE TABLE orders (id INTEGER PRIMARY KEY, status TEXT, n INTEGER)"))
        connection.execute(text("INSERT INTO orders VALUES (1, 'new', 0)"))


def replayed(chaos: Chaos, report: Report, job: Callable[..., None], *args: Any) -> set[tuple[str, str]]:
    """What was found; every token must show it again."""
    assert report.verdict == "failed", full_text(report)
    for finding in report.findings:
        again = chaos.run(job, *args, plan=finding.token)
        assert (again.kind, again.effect) == (finding.kind, finding.effect), full_text(report)
    return {(finding.kind, finding.effect) for finding in report.findings}


# -- SQLite -----------------------------------------------------------------------------------------------------------


def find_or_create(engine: Engine) -> None:
    with engine.begin() as connection:
        if not connection.execute(text("SELECT 1 FROM invoices WHERE ord = 7")).first():
            connection.execute(text("INSERT INTO invoices (ord) VALUES (7)"))


def test_find_or_create_without_a_constraint_is_right_alone_and_wrong_twice(twice: Chaos, engine: Engine) -> None:
    assert twice(duplicates=1).explore(find_or_create, engine).verdict == "proven"
    report = twice.explore(find_or_create, engine)
    assert replayed(twice, report, find_or_create, engine) == {("duplicated", "invoices")}
    (finding,) = report.findings
    assert (finding.plan.crashes, finding.plan.switches, len(finding.timeline)) == (0, 2, 2)


def create_or_find(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO marks VALUES ('7', 1) ON CONFLICT DO NOTHING"))


def insert_and_give_way(engine: Engine) -> None:
    with Session(engine) as session:
        try:
            session.execute(text("INSERT INTO marks VALUES ('7', 1)"))
            session.commit()
        except IntegrityError:
            session.rollback()


def compare_and_set(engine: Engine) -> None:
    with engine.begin() as connection:
        claimed = connection.execute(text("UPDATE orders SET status = 'done' WHERE id = 1 AND status = 'new'"))
        if claimed.rowcount:
            connection.execute(text("INSERT INTO invoices (ord) VALUES (1)"))


def begin_immediate(engine: Engine) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        if not connection.execute(text("SELECT 1 FROM invoices WHERE ord = 7")).first():
            connection.execute(text("INSERT INTO invoices (ord) VALUES (7)"))
        connection.commit()


def atomic_increment_behind_a_mark(engine: Engine) -> None:
    with engine.begin() as connection:
        if connection.execute(text("INSERT INTO marks VALUES ('7', 1) ON CONFLICT DO NOTHING")).rowcount:
            connection.execute(text("UPDATE orders SET n = n + 1 WHERE id = 1"))


GOOD = [create_or_find, insert_and_give_way, compare_and_set, begin_immediate, atomic_increment_behind_a_mark]


@pytest.mark.parametrize("job", GOOD, ids=lambda job: job.__name__)
def test_correct_locking_is_proven(twice: Chaos, engine: Engine, job: Callable[[Engine], None]) -> None:
    report = twice.explore(job, engine)
    assert report.verdict == "proven", full_text(report)
    assert (
        "2 deliveries that overlap in every order of their steps" in report.guarantee and "closed" in report.guarantee
    )


def look_then_set(engine: Engine) -> None:
    with engine.begin() as connection:
        status = connection.execute(text("SELECT status FROM orders WHERE id = 1")).scalar_one()
    with engine.begin() as connection:
        if status == "new":
            connection.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))
            connection.execute(text("INSERT INTO invoices (ord) VALUES (1)"))


def begin_deferred(engine: Engine) -> None:
    begin_with(engine, "BEGIN")


def begin_with(engine: Engine, how: str) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql(how)
        if not connection.execute(text("SELECT 1 FROM invoices WHERE ord = 7")).first():
            connection.execute(text("INSERT INTO invoices (ord) VALUES (7)"))
        connection.commit()


def read_modify_write(engine: Engine) -> None:
    """Right if it runs twice after each other, since the second run finds the mark."""
    with engine.begin() as connection:
        if connection.execute(text("SELECT 1 FROM marks WHERE k = '7'")).first():
            return
        n = connection.execute(text("SELECT n FROM orders WHERE id = 1")).scalar_one()
        connection.execute(text("UPDATE orders SET n = :n WHERE id = 1"), {"n": n + 1})
        connection.execute(text("INSERT INTO marks VALUES ('7', 1) ON CONFLICT DO NOTHING"))


MUTANTS: list[tuple[Callable[[Engine], None], set[tuple[str, str]]]] = [
    (look_then_set, {("duplicated", "invoices")}),
    (read_modify_write, {("changed", "orders")}),
]


@pytest.mark.parametrize(("job", "found"), MUTANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_guard_outside_of_the_lock_is_refuted(
    twice: Chaos, engine: Engine, job: Callable[[Engine], None], found: set[tuple[str, str]]
) -> None:
    assert replayed(twice, twice.explore(job, engine), job, engine) == found


def test_a_deferred_transaction_gets_busy_at_once_and_is_retried(twice: Chaos, engine: Engine) -> None:
    """A transaction that has read and wants to write is turned away whatever the timeout; its retry finds the row."""
    report = twice.explore(begin_deferred, engine)
    assert report.verdict == "proven", full_text(report)


def test_busy_reaches_a_job_that_does_not_want_to_wait(twice: Chaos, tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'jobs.db'}", connect_args={"timeout": 0})
    furnish(engine)

    def gives_up(engine: Engine) -> None:
        try:
            begin_immediate(engine)
        except OperationalError:
            return  # somebody else is at it, it believes

    report = twice.explore(gives_up, engine)
    assert replayed(twice, report, gives_up, engine) == {("lost", "invoices")}
    assert report.findings[0].plan.crashes == 1  # the other one dies


def test_steps_that_cross_two_databases(twice: Chaos, tmp_path: Path) -> None:
    engines = [create_engine(f"sqlite:///{tmp_path / name}") for name in ("one.db", "two.db")]
    for engine in engines:
        furnish(engine)

    def mark_in_both(one: Engine, two: Engine) -> None:
        for engine in (one, two):
            create_or_find(engine)

    def looks_in_one_writes_in_two(one: Engine, two: Engine) -> None:
        with one.begin() as connection:
            seen = connection.execute(text("SELECT 1 FROM marks")).first()
        if not seen:
            with two.begin() as connection:
                connection.execute(text("INSERT INTO invoices (ord) VALUES (7)"))
            create_or_find(one)

    assert twice.explore(mark_in_both, *engines).verdict == "proven"
    for engine in engines:
        furnish_again(engine)
    report = twice.explore(looks_in_one_writes_in_two, *engines)
    assert report.verdict == "failed" and report.findings[0].kind == "duplicated"


def test_raw_connections_scripts_and_executemany_hand_over_too(twice: Chaos, db: Engine) -> None:
    def raw(engine: Engine) -> None:
        connection = engine.raw_connection()
        cursor = connection.cursor()
        if not cursor.execute("SELECT 1 FROM invoices WHERE ord = 7").fetchall():
            cursor.executemany("INSERT INTO invoices (ord) VALUES (?)", [(7,), (8,)])
        connection.commit()
        connection.close()

    def script(engine: Engine) -> None:
        connection = engine.raw_connection()
        connection.executescript(  # type: ignore[attr-defined]  # the driver's own method
            "INSERT OR IGNORE INTO marks VALUES ('a', 1); INSERT OR IGNORE INTO marks VALUES ('b', 1);"
        )
        connection.close()

    assert replayed(twice, twice.explore(raw, db), raw, db) == {("duplicated", "invoices")}
    furnish_again(db)
    assert twice.explore(script, db).verdict == "proven"


def furnish_again(engine: Engine) -> None:
    with engine.begin() as connection:
        for table in ("invoices", "marks", "orders"):
            connection.execute(text(f"DROP TABLE {table}"))
    furnish(engine)


def test_thread_locals_are_those_of_separate_workers(twice: Chaos, db: Engine) -> None:
    sessions = scoped_session(sessionmaker(db))

    def job() -> None:
        sessions.execute(text("INSERT INTO marks VALUES ('7', 1) ON CONFLICT DO NOTHING"))
        sessions.commit()
        sessions.remove()

    assert twice.explore(job).verdict == "proven"


def test_explicit_begin_by_events(twice: Chaos, tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'jobs.db'}")

    @event.listens_for(engine, "connect")
    def no_begin(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    furnish(engine)
    assert twice.explore(find_or_create, engine).verdict == "proven"


def test_a_delivery_that_sleeps_for_a_random_time(twice: Chaos, db: Engine) -> None:
    """Jitter is drawn by each delivery for itself."""

    def job(engine: Engine) -> None:
        time.sleep(random.random())
        create_or_find(engine)

    report = twice.explore(job, db)
    assert report.verdict == "proven", full_text(report)


# -- Redis ------------------------------------------------------------------------------------------------------------


def count_once(client: redis_package.Redis) -> None:
    """Counts and marks in one step, but has looked before."""
    if not client.get("done"):
        with client.pipeline() as pipe:
            pipe.incr("n").set("done", 1).execute()


def in_lock(client: redis_package.Redis) -> None:
    with client.lock("lock", timeout=30):
        count_once(client)


def in_lock_or_later(client: redis_package.Redis) -> None:
    lock = client.lock("lock", timeout=30, blocking=False)
    if not lock.acquire():
        raise RuntimeError("busy")
    try:
        count_once(client)
    finally:
        lock.release()


def polling(client: redis_package.Redis) -> None:
    for _ in range(5):
        if client.set("lock", 1, nx=True, ex=60):
            break
        time.sleep(1)
    else:
        raise RuntimeError("busy")
    count_once(client)
    client.delete("lock")


def watching(client: redis_package.Redis) -> None:
    with client.pipeline() as pipe:
        while True:
            try:
                pipe.watch("n")
                if pipe.get("n"):
                    return
                pipe.multi()
                pipe.set("n", 1)
                pipe.execute()
                return
            except redis_package.WatchError:
                continue


@pytest.mark.parametrize("job", [in_lock, in_lock_or_later, polling, watching], ids=lambda job: job.__name__)
def test_locks_in_redis_are_proven(twice: Chaos, job: Callable[[redis_package.Redis], None]) -> None:
    report = twice.explore(job, twice.redis)
    assert report.verdict == "proven", full_text(report)


def busy_means_done(client: redis_package.Redis) -> None:
    if not client.set("lock", 1, nx=True, ex=60):
        return
    count_once(client)
    client.delete("lock")


def gives_up_after_five(client: redis_package.Redis) -> None:
    for _ in range(5):
        if client.set("lock", 1, nx=True, ex=60):
            break
        time.sleep(1)
    else:
        return
    count_once(client)
    client.delete("lock")


def lease_shorter_than_the_work(client: redis_package.Redis) -> None:
    if not client.set("lock", 1, nx=True, px=1000):
        raise RuntimeError("busy")
    if not client.get("done"):
        time.sleep(5)
        with client.pipeline() as pipe:
            pipe.incr("n").set("done", 1).execute()
    client.delete("lock")


@pytest.mark.parametrize(
    ("job", "found"),
    [
        (count_once, {("changed", "redis n")}),
        (busy_means_done, {("lost", "redis done")}),
        (gives_up_after_five, {("lost", "redis done")}),
        (lease_shorter_than_the_work, {("changed", "redis n")}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_locks_in_redis_that_do_not_hold_are_refuted(
    twice: Chaos, job: Callable[[redis_package.Redis], None], found: set[tuple[str, str]]
) -> None:
    report = twice.explore(job, twice.redis)
    assert report.verdict == "failed", full_text(report)
    assert {(finding.kind, finding.effect) for finding in report.findings} >= found
    twice.redis.flushall()
    again = twice.run(job, twice.redis, plan=report.findings[0].token)
    assert again.kind == report.findings[0].kind


def test_a_consumer_that_waits_for_its_producer(twice: Chaos) -> None:
    """BLPOP waits for another delivery; with nobody to come, its timeout passes on the clock."""

    def job(client: redis_package.Redis) -> None:
        if client.set("first", 1, nx=True):
            client.rpush("queue", "x")
        client.blpop(["queue"], timeout=5)
        client.set("done", 1)

    report = twice.explore(job, twice.redis)
    assert report.verdict == "proven", full_text(report)


# -- more than two, counts, repeatability ------------------------------------------------------------------------------


def test_three_live_deliveries_are_allowed(chaos: Chaos) -> None:
    furnish(chaos.sql)
    report = chaos(duplicates=3, budget=BUDGET).explore(create_or_find, chaos.sql)
    assert report.verdict == "proven", full_text(report)
    assert "up to 3 deliveries" in report.guarantee


def test_crashes_and_duplicates_are_in_one_space(twice: Chaos) -> None:
    """Right under crashes and right under duplicates, wrong under both: a duplicate overtakes, then dies."""

    def job(client: redis_package.Redis) -> None:
        if client.get("state") == b"written":
            return
        mine = client.incr("attempts") == 1 or not client.get("state")
        client.set("state", "empty")
        client.set("body", "text" if mine else "")
        client.set("state", "written")

    report = twice(volatile=["redis:attempts"]).explore(job, twice.redis)
    assert report.verdict == "failed", full_text(report)


def test_two_checks_agree_in_everything(twice: Chaos, db: Engine) -> None:
    one, two = twice.explore(look_then_set, db), None
    furnish_again(db)
    two = twice.explore(look_then_set, db)
    assert [finding.token for finding in one.findings] == [finding.token for finding in two.findings]
    assert (one.states, one.runs) == (two.states, two.runs)


def test_the_report_shows_deliveries_side_by_side(twice: Chaos, db: Engine) -> None:
    report = full_text(twice.explore(find_or_create, db))
    lines = report.splitlines()
    head = next(line for line in lines if "delivery 1" in line)
    assert "delivery 2" in head
    column = head.index("delivery 2")
    assert any(line[:column].strip() == "" and "commit: COMMIT" in line[column:] for line in lines), report


def test_a_small_budget_is_said_and_random_schedules_go_on(chaos: Chaos, db: Engine) -> None:
    def long(engine: Engine) -> None:
        for number in range(12):
            with engine.begin() as connection:
                connection.execute(text("INSERT INTO marks VALUES (:k, 1) ON CONFLICT DO NOTHING"), {"k": str(number)})

    report = chaos(duplicates=2, budget=3).explore(long, db)
    assert (report.verdict, report.ok) == ("inconclusive", True)
    assert "random schedules" in report.stop_reason and "budget" in report.stop_reason
    assert any("one delivery at a time" in note for note in report.notes)


def test_no_thread_is_left(twice: Chaos, db: Engine) -> None:
    before = set(threading.enumerate())
    twice.explore(look_then_set, db)
    assert set(threading.enumerate()) == before


def lease_then_pay(engine: Engine, nap: float = 0) -> None:
    """A lease in a row, taken by a token, for a minute from the time at which the delivery began."""
    me, now = uuid.uuid4().hex, time.time()
    with engine.begin() as db:
        claim = "UPDATE lease SET owner = :me, until = :until WHERE owner IS NULL OR until < :now"
        if not db.execute(text(claim), {"me": me, "until": now + 60, "now": now}).rowcount:
            raise RuntimeError("somebody is at it")
    with engine.begin() as db:
        points, done = db.execute(text("SELECT points, done FROM accounts")).one()
    if nap:
        time.sleep(nap)
    if not done:
        with engine.begin() as db:
            db.execute(text("UPDATE accounts SET points = :points, done = done + 1"), {"points": points + 10})
    with engine.begin() as db:
        db.execute(text("UPDATE lease SET owner = NULL, until = 0 WHERE owner = :me"), {"me": me})


@pytest.mark.parametrize(("nap", "verdict"), [(0, "proven"), (100, "failed")])
def test_a_delivery_that_has_waited_knows_when_it_began(chaos: Chaos, tmp_path: Path, nap: float, verdict: str) -> None:
    """It has read the clock before its first statement, and that has waited for a lock while the clock went on."""
    engine = create_engine(f"sqlite:///{tmp_path / 'leases.db'}")
    with engine.begin() as db:
        db.execute(text("CREATE TABLE lease (owner TEXT, until REAL)"))
        db.execute(text("CREATE TABLE accounts (points INTEGER, done INTEGER)"))
        db.execute(text("INSERT INTO lease VALUES (NULL, 0)"))
        db.execute(text("INSERT INTO accounts VALUES (0, 0)"))
    report = chaos(duplicates=2, crashes=1, budget=100, volatile=["lease"]).explore(lease_then_pay, engine, nap)
    engine.dispose()
    assert report.verdict == verdict, full_text(report)
