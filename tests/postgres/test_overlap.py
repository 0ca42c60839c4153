"""Deliveries that overlap on a real server: the server says who waits, and correct locking passes exhaustively."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from retrychaos import Chaos
from retrychaos.report.text import full_text

Job = Callable[[Engine], None]


@pytest.fixture
def db(engine: Engine) -> Engine:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE invoices (id serial PRIMARY KEY, ord int)"))
        connection.execute(text("CREATE TABLE once (k text PRIMARY KEY, n int)"))
        connection.execute(text("CREATE TABLE orders (id int PRIMARY KEY, n int, status text)"))
        connection.execute(text("INSERT INTO orders VALUES (1, 0, 'new'), (2, 0, 'new')"))
    return engine


@pytest.fixture
def twice(check: Chaos) -> Chaos:
    return check(duplicates=2, budget=300)


def bill(engine: Engine, look: str, *after: str) -> None:
    """Look, in some way that may lock; bill if the order is new."""
    with engine.begin() as connection:
        if connection.execute(text(look)).scalar() == "new":
            connection.execute(text("INSERT INTO invoices (ord) VALUES (1)"))
            connection.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))


def look_and_bill(engine: Engine) -> None:
    bill(engine, "SELECT status FROM orders WHERE id = 1")


def lock_and_bill(engine: Engine) -> None:
    bill(engine, "SELECT status FROM orders WHERE id = 1 FOR UPDATE")


def advisory(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(42)"))
        if not connection.execute(text("SELECT 1 FROM invoices WHERE ord = 7")).first():
            connection.execute(text("INSERT INTO invoices (ord) VALUES (7)"))


def advisory_of_the_wrong_order(engine: Engine) -> None:
    with engine.begin() as connection:
        seen = connection.execute(text("SELECT 1 FROM invoices WHERE ord = 7")).first()
        connection.execute(text("SELECT pg_advisory_xact_lock(42)"))
        if not seen:
            connection.execute(text("INSERT INTO invoices (ord) VALUES (7)"))


def on_conflict(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO once VALUES ('7', 1) ON CONFLICT DO NOTHING"))


def give_way(engine: Engine) -> None:
    try:
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO once VALUES ('7', 1)"))
    except IntegrityError:
        pass


def compare_and_set(engine: Engine) -> None:
    with engine.begin() as connection:
        claim = "UPDATE orders SET status = 'done' WHERE id = 1 AND status = 'new'"
        if connection.execute(text(claim)).rowcount:
            connection.execute(text("INSERT INTO invoices (ord) VALUES (1)"))


def compare_and_set_with_two_commits(engine: Engine) -> None:
    with engine.begin() as connection:
        seen = connection.execute(text("SELECT status FROM orders WHERE id = 1")).scalar()
    with engine.begin() as connection:
        if seen == "new":
            connection.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))
            connection.execute(text("INSERT INTO invoices (ord) VALUES (1)"))


def two_rows_in_one_order(engine: Engine) -> None:
    with engine.begin() as connection:
        for number in (1, 2):
            connection.execute(text("UPDATE orders SET n = 1 WHERE id = :id"), {"id": number})


@pytest.mark.parametrize(
    "job",
    [lock_and_bill, advisory, on_conflict, give_way, compare_and_set, two_rows_in_one_order],
    ids=lambda job: job.__name__,
)
def test_correct_locking_is_proven(twice: Chaos, db: Engine, job: Job) -> None:
    report = twice.explore(job, db)
    assert report.verdict == "proven", full_text(report)


@pytest.mark.parametrize(
    "job", [look_and_bill, advisory_of_the_wrong_order, compare_and_set_with_two_commits], ids=lambda job: job.__name__
)
def test_a_guard_outside_of_the_lock_is_refuted(twice: Chaos, db: Engine, job: Job) -> None:
    assert twice(duplicates=1).explore(job, db).verdict == "proven"
    report = twice.explore(job, db)
    assert {(finding.kind, finding.effect) for finding in report.findings} == {("duplicated", "invoices")}, report
    again = twice.run(job, db, plan=report.findings[0].token)
    assert (again.kind, again.effect) == ("duplicated", "invoices")
    assert report.findings[0].plan.crashes == 0


def test_a_statement_that_waits_is_shown_as_waiting(twice: Chaos, db: Engine) -> None:
    """Both look without a lock; the second UPDATE waits in the server until the first one has committed."""

    def add_one(engine: Engine) -> None:
        with engine.begin() as connection:
            seen = connection.execute(text("SELECT n FROM orders WHERE id = 1")).scalar_one()
            if seen == 0:
                connection.execute(text("UPDATE orders SET n = n + 1 WHERE id = 1"))

    report = twice.explore(add_one, db)
    assert {(finding.kind, finding.effect) for finding in report.findings} == {("changed", "orders")}, full_text(report)


def serializable(engine: Engine) -> None:
    for _ in range(4):
        try:
            with engine.connect().execution_options(isolation_level="SERIALIZABLE") as connection:
                with connection.begin():
                    if not connection.execute(text("SELECT 1 FROM invoices WHERE ord = 7")).first():
                        connection.execute(text("INSERT INTO invoices (ord) VALUES (7)"))
                return
        except DBAPIError as error:
            code = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)
            if code != "40001":
                raise
    raise RuntimeError("gave up")


def test_serializable_transactions_with_retry_are_proven(twice: Chaos, db: Engine) -> None:
    report = twice(crashes=0).explore(serializable, db)
    assert report.verdict == "proven", full_text(report)


def test_a_deadlock_reaches_the_job_and_its_retry_gets_past_it(twice: Chaos, db: Engine) -> None:
    """Both have the row FOR SHARE and want to write it: the server ends one, which is delivered again."""

    def share_then_write(engine: Engine) -> None:
        bill(engine, "SELECT status FROM orders WHERE id = 1 FOR SHARE")

    report = twice(crashes=0).explore(share_then_write, db)
    assert report.verdict == "proven", full_text(report)


def test_three_at_a_time(check: Chaos, db: Engine) -> None:
    """Where two would wait for the same transaction, chance would decide who comes first, so one stands aside."""

    def job(engine: Engine) -> None:
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO once VALUES ('k', 1) ON CONFLICT DO NOTHING"))
            connection.execute(text("INSERT INTO once VALUES ('l', 1) ON CONFLICT DO NOTHING"))

    def careless(engine: Engine) -> None:
        with engine.begin() as connection:
            count = connection.execute(text("SELECT n FROM orders WHERE id = 1")).scalar_one()
            connection.execute(text("UPDATE orders SET n = :n WHERE id = 1"), {"n": 1 if count == 2 else count + 1})

    three = check(duplicates=3, budget=300)
    report = three.explore(job, db)
    assert report.verdict == "proven"
    assert "of which one at a time waits for the end of a transaction" in report.guarantee
    assert three.explore(careless, db).verdict == "failed"


def test_a_lock_is_held_while_something_else_is_done(twice: Chaos, db: Engine) -> None:
    """The one who dies has a lock here, and is about to do something elsewhere."""
    store = twice.redis

    def renew() -> None:
        with db.begin() as connection:
            connection.execute(text("UPDATE orders SET status = 'new'"))

    def job(engine: Engine) -> None:
        with engine.begin() as connection:
            if connection.execute(text("SELECT status FROM orders WHERE id = 1 FOR UPDATE")).scalar() == "new":
                store.set("paid", "1")
                connection.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))
                store.set("told", "1")

    def counting(engine: Engine) -> None:
        with engine.begin() as connection:
            if connection.execute(text("SELECT status FROM orders WHERE id = 1 FOR UPDATE")).scalar() == "new":
                store.incr("paid")
                connection.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))

    assert twice.explore(job, db).verdict == "proven"
    renew()
    (finding,) = twice.explore(counting, db).findings
    assert (finding.plan.crashes, finding.plan.switches) == (1, 0)
    renew()
    assert twice(crashes=0).explore(counting, db).verdict == "proven"


def test_a_commit_waits_for_a_deferred_constraint(twice: Chaos, db: Engine) -> None:
    with db.begin() as connection:
        connection.execute(text("CREATE TABLE applied (msg text, UNIQUE (msg) DEFERRABLE INITIALLY DEFERRED)"))
        connection.execute(text("CREATE TABLE loose (msg text)"))

    def job(engine: Engine, table: str) -> None:
        with engine.begin() as connection:
            if not connection.execute(text(f"SELECT count(*) FROM {table}")).scalar():
                connection.execute(text(f"INSERT INTO {table} VALUES ('m1')"))

    assert twice.explore(job, db, "applied").verdict == "proven"
    (finding,) = twice.explore(job, db, "loose").findings
    assert (finding.kind, finding.plan.crashes, finding.plan.switches) == ("duplicated", 0, 2)


def test_a_statement_that_is_refused_is_shown_so(twice: Chaos, db: Engine) -> None:
    def swallows_the_deadlock(engine: Engine) -> None:
        try:
            with engine.begin() as connection:
                connection.execute(text("SELECT n FROM orders WHERE id = 1 FOR SHARE"))
                connection.execute(text("UPDATE orders SET n = 1 WHERE id = 1"))
        except DBAPIError:
            pass

    (finding,) = twice.explore(swallows_the_deadlock, db).findings
    assert (finding.kind, finding.plan.crashes) == ("lost", 1)
    assert "! refused: Deadlock" in full_text(twice.explore(swallows_the_deadlock, db))


def test_a_lock_that_the_session_keeps_is_doubted(check: Chaos, db: Engine) -> None:
    """In another worker the pool would live on, and the lock with it."""

    def keeps(engine: Engine, unlock: bool) -> None:
        with engine.connect() as connection:
            connection.execute(text("SELECT pg_advisory_lock(7)"))
            connection.execute(text("UPDATE orders SET n = 1 WHERE id = 1"))
            connection.commit()
            if unlock:
                connection.execute(text("SELECT pg_advisory_unlock(7)"))

    report = check.explore(keeps, db, False)
    assert report.verdict == "inconclusive" and "still holds an advisory lock" in report.stop_reason
    with db.begin() as connection:
        connection.execute(text("UPDATE orders SET n = 0"))
    assert check.explore(keeps, db, True).verdict == "proven"


def _with_a_lock(engine: Engine, mode: str, level: str, *, look_first: bool = False) -> None:
    look = text("SELECT count(*) FROM invoices")
    with engine.connect().execution_options(isolation_level=level) as connection, connection.begin():
        seen = connection.execute(look).scalar() if look_first else None
        connection.execute(text(f"LOCK TABLE invoices IN {mode} MODE"))
        if not (connection.execute(look).scalar() if seen is None else seen):
            connection.execute(text("INSERT INTO invoices (ord) VALUES (7)"))


LEVELS = ["READ COMMITTED", "REPEATABLE READ"]
MODES = ["ACCESS EXCLUSIVE", "SHARE ROW EXCLUSIVE"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_a_table_that_is_locked_before_the_look(twice: Chaos, db: Engine, mode: str, level: str) -> None:
    """Who waits for ACCESS EXCLUSIVE has the table before anybody else can read what was committed to it."""
    report = twice.explore(_with_a_lock, db, mode, level)
    assert report.verdict == "proven", full_text(report)


@pytest.mark.parametrize(
    ("mode", "level", "verdict"),
    [
        (MODES[0], LEVELS[0], "proven"),  # both have looked, so the server refuses one of them
        (MODES[0], LEVELS[1], "failed"),  # who waits to look has taken its snapshot before
        (MODES[1], LEVELS[0], "failed"),
        (MODES[1], LEVELS[1], "failed"),
    ],
)
def test_a_table_that_is_locked_after_the_look(twice: Chaos, db: Engine, mode: str, level: str, verdict: str) -> None:
    report = twice.explore(_with_a_lock, db, mode, level, look_first=True)
    assert report.verdict == verdict, full_text(report)
    assert [finding.kind for finding in report.findings] == ["duplicated"] * (verdict == "failed")


def test_a_table_that_nobody_can_look_at(twice: Chaos, db: Engine) -> None:
    report = twice.explore(_with_a_lock, db, "ACCESS EXCLUSIVE", "SERIALIZABLE")
    assert report.verdict == "inconclusive"
    assert "invoices of postgresql" in report.guarantee
    assert "lock the table IN EXCLUSIVE MODE" in report.guarantee


@pytest.mark.parametrize("mode", MODES)
def test_what_a_deferred_trigger_writes(twice: Chaos, db: Engine, mode: str) -> None:
    """It writes when the transaction commits, and then the other one has the table."""
    with db.begin() as connection:
        connection.execute(
            text(
                "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN INSERT INTO invoices (ord) VALUES (8); RETURN NULL; END $$"
            )
        )
        connection.execute(
            text(
                "CREATE CONSTRAINT TRIGGER later AFTER INSERT ON once DEFERRABLE INITIALLY DEFERRED "
                "FOR EACH ROW EXECUTE FUNCTION note()"
            )
        )

    def job(engine: Engine, place: str) -> None:
        with engine.begin() as connection:
            connection.execute(text(f"LOCK TABLE {place} IN {mode} MODE"))
            if not connection.execute(text("SELECT 1 FROM invoices WHERE ord = 8")).first():
                connection.execute(text("INSERT INTO once SELECT max(id)::text, 1 FROM invoices"))

    with db.begin() as connection:
        connection.execute(text("INSERT INTO invoices (ord) VALUES (1)"))
    report = twice.explore(job, db, "invoices")
    assert report.verdict == "proven", full_text(report)
    with db.begin() as connection:
        connection.execute(text("DELETE FROM once"))
        connection.execute(text("DELETE FROM invoices WHERE ord = 8"))
    report = twice.explore(job, db, "orders")
    assert report.verdict == "proven", full_text(report)


def truncate_and_fill(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE once"))
        connection.execute(text("INSERT INTO once VALUES ('7', 1)"))


def test_tables_that_are_locked_together(twice: Chaos, db: Engine) -> None:
    """Who waits for the first one has the second one as well when the other commits."""

    def job(engine: Engine) -> None:
        with engine.begin() as connection:
            connection.execute(text("LOCK TABLE orders, once"))
            if not connection.execute(text("SELECT 1 FROM once")).first():
                connection.execute(text("UPDATE orders SET n = n + 1 WHERE id = 1"))
                connection.execute(text("INSERT INTO once VALUES ('7', 1)"))

    report = twice.explore(job, db)
    assert report.verdict == "proven", full_text(report)


def test_tables_that_are_locked_one_after_the_other(twice: Chaos, db: Engine) -> None:
    def job(engine: Engine, told: bool) -> None:
        seen = False
        for table in ("orders", "once"):
            with engine.begin() as connection:
                connection.execute(text(f"LOCK TABLE {table}"))
                if table == "orders":
                    seen = bool(connection.execute(text("SELECT n FROM orders WHERE id = 1")).scalar())
                    connection.execute(text("UPDATE orders SET n = 1 WHERE id = 1"))
                elif not (seen if told else connection.execute(text("SELECT 1 FROM once")).first()):
                    connection.execute(text("INSERT INTO once VALUES ('7', 1)"))

    report = twice(crashes=0).explore(job, db, False)
    assert report.verdict == "proven", full_text(report)
    with db.begin() as connection:
        connection.execute(text("UPDATE orders SET n = 0"))
        connection.execute(text("DELETE FROM once"))
    report = twice.explore(job, db, True)
    assert {(finding.kind, finding.effect) for finding in report.findings} == {("lost", "once")}, full_text(report)


def test_numbers_that_begin_anew(check: Chaos, twice: Chaos, db: Engine) -> None:
    def job(engine: Engine) -> None:
        with engine.begin() as connection:
            connection.execute(text("TRUNCATE invoices RESTART IDENTITY"))
            connection.execute(text("INSERT INTO invoices (ord) VALUES (1)"))

    report = twice.explore(job, db)
    assert report.verdict == "inconclusive"
    assert "CONTINUE IDENTITY" in report.guarantee
    assert check(duplicates=1).explore(job, db).verdict == "proven"


def truncate_and_count(engine: Engine) -> None:
    with engine.begin() as connection:
        seen = connection.execute(text("SELECT count(*) FROM once")).scalar_one()
        connection.execute(text("TRUNCATE invoices"))
        connection.execute(text("INSERT INTO invoices (id, ord) VALUES (1, :seen)"), {"seen": seen})
        connection.execute(text("INSERT INTO once VALUES ('7', 1) ON CONFLICT DO NOTHING"))


def test_a_table_that_is_emptied_and_filled(twice: Chaos, db: Engine) -> None:
    report = twice.explore(truncate_and_fill, db)
    assert report.verdict == "proven", full_text(report)


def test_a_table_that_is_filled_by_what_the_other_has_left(twice: Chaos, db: Engine) -> None:
    report = twice.explore(truncate_and_count, db)
    assert [(finding.kind, finding.effect) for finding in report.findings] == [("changed", "invoices")], report
