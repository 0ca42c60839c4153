"""Good jobs beside their broken twins on a real server, through both drivers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
from sqlalchemy import Engine, func, insert, select, text, update
from sqlalchemy.orm import Session

from retrychaos import Chaos
from retrychaos.report.text import full_text
from tests.sql.engines import Invoice, Order

Job: TypeAlias = Callable[[Engine], None]


class Provider:
    def charge(self, number: Any) -> None: ...


provider = Provider()


def execute(engine: Engine, *statements: str) -> None:
    with engine.begin() as connection:
        raw: Any = connection.connection.dbapi_connection
        for statement in statements:
            raw.cursor().execute(statement)


def verdict(check: Chaos, job: Job, engine: Engine, **options: Any) -> set[tuple[str, str]] | str:
    """What was found, or the verdict if that is nothing; each finding is replayed from its token."""
    report = check(**options).explore(job, engine)
    if report.verdict != "failed":
        assert report.verdict != "inconclusive" or report.stop_reason
        return report.verdict if report.verdict == "proven" else report.stop_reason
    for finding in report.findings:
        again = check.run(job, engine, plan=finding.token)  # from the state before, as nobody has touched the world
        assert (again.kind, again.effect) == (finding.kind, finding.effect), full_text(report)
    return {(finding.kind, finding.effect) for finding in report.findings}


# -- pairs of jobs --------------------------------------------------------------------------------------------------


def orm(engine: Engine) -> None:
    with Session(engine) as session:
        order = session.get_one(Order, 1)
        if order.status == "new":
            session.add(Invoice(order_id=1, note="x"))
            order.status = "done"
            session.commit()


def orm_in_two(engine: Engine) -> None:
    with Session(engine) as session:
        order = session.get_one(Order, 1)
        if order.status == "new":
            session.add(Invoice(order_id=1, note="x"))
            session.commit()
            order.status = "done"
            session.commit()


def absolute(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(update(Order).where(Order.id == 1).values(n=1))
    with engine.begin() as connection:
        connection.execute(update(Order).where(Order.id == 1).values(status="done"))


def relative(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(update(Order).where(Order.id == 1).values(n=Order.n + 1))


def on_conflict(engine: Engine) -> None:
    for key in ("a", "b"):
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO once (key) VALUES (:key) ON CONFLICT DO NOTHING"), {"key": key})


def no_conflict(engine: Engine) -> None:
    for key in (1, 2):
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO invoices (order_id) VALUES (:key)"), {"key": key})


def autocommit(engine: Engine) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(update(Order).where(Order.id == 1).values(n=5))
        connection.execute(text("INSERT INTO once (key) VALUES ('a') ON CONFLICT DO NOTHING"))


def autocommit_twice(engine: Engine) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if connection.scalar(select(Order.status).where(Order.id == 1)) == "new":
            connection.execute(text("INSERT INTO invoices (order_id) VALUES (1)"))
            connection.execute(update(Order).where(Order.id == 1).values(status="done"))


def savepoints(engine: Engine) -> None:
    with engine.begin() as connection:
        if connection.scalar(select(Order.status).where(Order.id == 1)) == "new":
            with connection.begin_nested():
                connection.execute(text("INSERT INTO invoices (order_id) VALUES (1)"))
            with contextlib.suppress(ZeroDivisionError), connection.begin_nested():
                connection.execute(text("INSERT INTO invoices (order_id) VALUES (2)"))
                raise ZeroDivisionError
            connection.execute(update(Order).where(Order.id == 1).values(status="done"))


def savepoint_then_another(engine: Engine) -> None:
    with engine.begin() as connection:
        if connection.scalar(select(Order.status).where(Order.id == 1)) != "new":
            return
        with connection.begin_nested():
            connection.execute(text("INSERT INTO invoices (order_id) VALUES (1)"))
    with engine.begin() as connection, connection.begin_nested():
        connection.execute(update(Order).where(Order.id == 1).values(status="done"))


def many(engine: Engine) -> None:
    with Session(engine) as session:
        if not session.scalar(select(func.count()).where(Invoice.id != 7)):
            session.execute(insert(Invoice), [{"order_id": 1, "note": str(n)} for n in range(5)])
            session.add_all([Invoice(order_id=2, note=str(n)) for n in range(5)])  # insertmanyvalues
            session.commit()


def many_by_hand(engine: Engine) -> None:
    raw = engine.raw_connection()
    raw.cursor().executemany("INSERT INTO invoices (order_id, note) VALUES (%s, %s)", [(1, "a"), (2, "b")])
    raw.commit()
    raw.close()


def raw_guarded(engine: Engine) -> None:
    raw = engine.raw_connection()
    cursor = raw.cursor()
    cursor.execute("SELECT status FROM orders WHERE id = %s FOR UPDATE", (1,))
    if cursor.fetchone() == ("new",):
        cursor.execute("INSERT INTO invoices (order_id) VALUES (1)")
        cursor.execute("UPDATE orders SET status = 'done' WHERE id = 1")
    raw.commit()
    raw.close()


def raw_in_two(engine: Engine) -> None:
    raw = engine.raw_connection()
    cursor = raw.cursor()
    cursor.execute("SELECT status FROM orders WHERE id = 1")
    if cursor.fetchone() == ("new",):
        cursor.execute("INSERT INTO invoices (order_id) VALUES (1)")
        raw.commit()
        cursor.execute("UPDATE orders SET status = 'done' WHERE id = 1")
    raw.commit()
    raw.close()


def driver_commits(engine: Engine) -> None:
    """Past SQLAlchemy's proxy: psycopg2's own commit cannot be patched."""
    raw: Any = engine.raw_connection()
    own = raw.driver_connection
    cursor = own.cursor()
    cursor.execute("SELECT status FROM orders WHERE id = 1")
    if cursor.fetchone() == ("new",):
        cursor.execute("INSERT INTO invoices (order_id) VALUES (1)")
        own.commit()
        provider.charge(1)
        cursor.execute("UPDATE orders SET status = 'done' WHERE id = 1")
    own.commit()
    raw.close()


def statement_commits(engine: Engine) -> None:
    raw: Any = engine.raw_connection()
    cursor = raw.cursor()
    cursor.execute("SELECT status FROM orders WHERE id = 1")
    if cursor.fetchone() == ("new",):
        cursor.execute("INSERT INTO invoices (order_id) VALUES (1)")
        cursor.execute("COMMIT")
        cursor.execute("UPDATE orders SET status = 'done' WHERE id = 1")
        cursor.execute("END")
    raw.close()


def server_side(engine: Engine) -> None:
    with Session(engine) as session:
        stream = session.execute(
            select(Order.id).order_by(Order.id).execution_options(stream_results=True, yield_per=1)
        )
        for (order,) in stream:
            session.execute(text("INSERT INTO once (key) VALUES (:key) ON CONFLICT DO NOTHING"), {"key": str(order)})
        session.commit()


def server_side_again(engine: Engine) -> None:
    with Session(engine) as session:
        stream = session.execute(
            select(Order.id).order_by(Order.id).execution_options(stream_results=True, yield_per=1)
        )
        for (order,) in list(stream):
            session.execute(text("INSERT INTO invoices (order_id) VALUES (:order)"), {"order": order})
            session.commit()


def truncating(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE lines, invoices RESTART IDENTITY"))
        connection.execute(text("INSERT INTO invoices (order_id) VALUES (1)"))


def truncating_late(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO invoices (order_id) VALUES (1)"))
    with engine.begin() as connection:
        if not connection.scalar(text("SELECT count(*) FROM once")):
            connection.execute(text("INSERT INTO once (key) VALUES ('a')"))


def locking(engine: Engine) -> None:
    """A process that dies does not hold the lock of its session any more."""
    with engine.connect() as connection:
        if connection.scalar(text("SELECT pg_try_advisory_lock(7)")) is not True:
            raise RuntimeError("somebody else is at work")
        if connection.scalar(select(Order.status).where(Order.id == 1).with_for_update()) == "new":
            connection.execute(text("INSERT INTO invoices (order_id) VALUES (1)"))
            connection.execute(update(Order).where(Order.id == 1).values(status="done"))
        connection.commit()
        connection.execute(text("SELECT pg_advisory_unlock(7)"))


def locking_by_row(engine: Engine) -> None:
    """A lock that is a row outlives the process."""
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO once (key) VALUES ('lock')"))
    with engine.begin() as connection:
        connection.execute(update(Order).where(Order.id == 1).values(status="done"))
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM once WHERE key = 'lock'"))


def temporary(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TEMPORARY TABLE seen (k int)"))
        connection.execute(text("INSERT INTO seen VALUES (1)"))
        connection.execute(text("UPDATE orders SET n = (SELECT count(*) FROM seen) WHERE id = 1"))
    with engine.begin() as connection:
        connection.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))


def temporary_counts(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TEMPORARY TABLE IF NOT EXISTS seen (k int)"))
        connection.execute(text("INSERT INTO seen VALUES (1)"))
        connection.execute(text("UPDATE orders SET n = n + (SELECT count(*) FROM seen) WHERE id = 1"))


def isolated(engine: Engine) -> None:
    with Session(engine.execution_options(isolation_level="SERIALIZABLE")) as session:
        if session.get_one(Order, 1).status == "new":
            session.add(Invoice(order_id=1))
            session.get_one(Order, 1).status = "done"
        session.commit()


def isolated_in_two(engine: Engine) -> None:
    with Session(engine.execution_options(isolation_level="REPEATABLE READ")) as session:
        if session.get_one(Order, 1).status == "new":
            session.add(Invoice(order_id=1))
            session.commit()
            session.get_one(Order, 1).status = "done"
        session.commit()


def deferred(engine: Engine) -> None:
    """An effect before a commit that fails each time, until the parent is there."""
    with engine.begin() as connection:
        connection.execute(text("SET CONSTRAINTS ALL DEFERRED"))
        connection.execute(update(Order).where(Order.id == 1).values(status="done"))


def stamped(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(
            text("INSERT INTO stamps (key, expires) VALUES ('a', now() + interval '1 hour') ON CONFLICT DO NOTHING")
        )
    with engine.begin() as connection:
        connection.execute(text("UPDATE stamps SET touched = clock_timestamp(), local = localtimestamp, n = 1"))
    with engine.begin() as connection:
        connection.execute(text("UPDATE stamps SET about = jsonb_build_object('at', now(), 'n', 1)"))


def stamped_twice(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO stamps (key, expires) VALUES (gen_random_uuid(), now())"))


def extended(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE stamps SET expires = expires + interval '1 hour' WHERE key = 'old'"))


def triggered(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE orders SET status = 'done' WHERE id = 1 AND status = 'new'"))


def triggered_twice(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))


def cascading(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM invoices WHERE id = 7"))
        connection.execute(text("INSERT INTO invoices VALUES (7, 1, 'new')"))
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO lines VALUES (7, 7, 'milk') ON CONFLICT DO NOTHING"))


def cascading_away(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(
            text("INSERT INTO lines (id, invoice_id, product) VALUES (8, 7, 'tea') ON CONFLICT DO NOTHING")
        )
    with engine.begin() as connection:
        if connection.scalar(select(Order.status).where(Order.id == 1)) == "new":
            connection.execute(text("INSERT INTO lines (invoice_id, product) VALUES (7, 'bread')"))
    with engine.begin() as connection:
        connection.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))


def by_function(engine: Engine) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("SELECT pay_once(1)"))


def by_function_twice(engine: Engine) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("SELECT pay(1)"))


def two_connections(engine: Engine) -> None:
    with engine.connect() as one, engine.begin() as other:
        new = one.scalar(select(Order.status).where(Order.id == 1)) == "new"
        if new:
            other.execute(text("INSERT INTO invoices (order_id) VALUES (1)"))
            other.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))
        one.rollback()


def two_connections_apart(engine: Engine) -> None:
    with engine.begin() as one:
        if one.scalar(select(Order.status).where(Order.id == 1)) == "new":
            one.execute(update(Order).where(Order.id == 1).values(status="done"))
            with engine.begin() as other:
                other.execute(text("INSERT INTO once (key) VALUES (gen_random_uuid())"))


def keyed_by_sequence(engine: Engine) -> None:
    with engine.begin() as connection:
        if connection.scalar(select(Order.status).where(Order.id == 1)) == "new":
            provider.charge("order 1")
            connection.execute(update(Order).where(Order.id == 1).values(status="done"))


def drawn_by_sequence(engine: Engine) -> None:
    """The number is burnt by a crash, and the next delivery draws another one."""
    with engine.begin() as connection:
        if connection.scalar(select(Order.status).where(Order.id == 1)) == "new":
            provider.charge(connection.scalar(text("SELECT nextval('numbers')")))
            connection.execute(update(Order).where(Order.id == 1).values(status="done"))


def invoice_number(engine: Engine) -> None:
    with engine.begin() as connection:
        if connection.scalar(select(Order.status).where(Order.id == 1)) == "new":
            connection.execute(text("INSERT INTO invoices (id, order_id) VALUES (nextval('numbers'), 1)"))
            connection.execute(update(Order).where(Order.id == 1).values(status="done"))


PAIRS: dict[str, tuple[Job, Job, set[tuple[str, str]]]] = {
    "orm": (orm, orm_in_two, {("duplicated", "invoices")}),
    "update": (absolute, relative, {("changed", "orders")}),
    "on conflict": (on_conflict, no_conflict, {("duplicated", "invoices")}),
    "autocommit": (autocommit, autocommit_twice, {("duplicated", "invoices")}),
    "savepoints": (savepoints, savepoint_then_another, {("duplicated", "invoices")}),
    "many rows": (many, many_by_hand, {("duplicated", "invoices")}),
    "raw cursors": (raw_guarded, raw_in_two, {("duplicated", "invoices")}),
    "commit of the driver": (raw_guarded, driver_commits, {("duplicated", "invoices")}),
    "commit as a statement": (raw_guarded, statement_commits, {("duplicated", "invoices")}),
    "server-side cursors": (server_side, server_side_again, {("duplicated", "invoices")}),
    "truncate": (truncating, truncating_late, {("duplicated", "invoices")}),
    "locks": (locking, locking_by_row, {}),  # type: ignore[dict-item]
    "temporary tables": (temporary, temporary_counts, {("changed", "orders")}),
    "isolation": (isolated, isolated_in_two, {("duplicated", "invoices")}),
    "server time": (stamped, stamped_twice, {("duplicated", "stamps")}),
    "later and later": (stamped, extended, {("changed", "stamps")}),
    "triggers": (triggered, triggered_twice, {("duplicated", "noted")}),
    "cascades": (cascading, cascading_away, {("duplicated", "lines")}),
    "functions": (by_function, by_function_twice, {("duplicated", "invoices")}),
    "two connections": (two_connections, two_connections_apart, {("duplicated", "once")}),
    "sequences": (keyed_by_sequence, drawn_by_sequence, {("duplicated", "Provider.charge")}),
    "numbers": (invoice_number, orm_in_two, {("duplicated", "invoices")}),
}

WORLD = """
CREATE TABLE stamps (id serial PRIMARY KEY, key text UNIQUE, created timestamptz DEFAULT now(), expires timestamptz,
    touched timestamptz, local timestamp, about jsonb, n int);
INSERT INTO stamps (key, created, expires) VALUES ('old', '2024-01-01', '2024-01-02');
CREATE TABLE noted (id serial PRIMARY KEY, what text);
CREATE FUNCTION note() RETURNS trigger AS $$ BEGIN INSERT INTO noted (what) VALUES (NEW.status); RETURN NULL; END $$
    LANGUAGE plpgsql;
CREATE TRIGGER note AFTER UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION note();
CREATE FUNCTION pay(o int) RETURNS void AS 'INSERT INTO invoices (order_id) VALUES (o)' LANGUAGE sql;
CREATE FUNCTION pay_once(o int) RETURNS void AS
    'INSERT INTO invoices (order_id) SELECT o WHERE NOT EXISTS (SELECT FROM invoices WHERE order_id = o)' LANGUAGE sql;
INSERT INTO invoices VALUES (7, 2, 'old'); INSERT INTO lines VALUES (1, 7, 'milk');
SELECT setval('invoices_id_seq', 100), setval('lines_id_seq', 100); CREATE SEQUENCE numbers START 1000;
"""
AGAIN = """
UPDATE orders SET status = 'new', n = 0; DELETE FROM lines WHERE id <> 1; DELETE FROM invoices WHERE id <> 7;
DELETE FROM once; DELETE FROM stamps WHERE key <> 'old'; DELETE FROM noted;
"""


@pytest.fixture
def world(shop: Engine, request: pytest.FixtureRequest) -> Engine:
    sql = WORLD
    if "triggers" not in request.node.name:
        sql = "\n".join(line for line in WORLD.splitlines() if not line.startswith("CREATE TRIGGER"))
    execute(shop, sql)
    return shop


@pytest.mark.parametrize("name", list(PAIRS))
def test_a_good_job_and_its_broken_twin(check: Chaos, world: Engine, name: str) -> None:
    good, bad, findings = PAIRS[name]
    check.watch(Provider, "charge", key="number")
    assert verdict(check, good, world) == "proven"
    execute(world, AGAIN)
    found = verdict(check, bad, world)
    if findings:
        assert found == findings
    else:
        assert isinstance(found, set) and {kind for kind, _ in found} == {"stuck"}


def test_many_rows_in_autocommit(check: Chaos, world: Engine) -> None:
    """psycopg2 commits row by row; psycopg 3 sends all of them in one implicit transaction."""

    def job(engine: Engine) -> None:
        raw: Any = engine.raw_connection()
        raw.driver_connection.autocommit = True
        cursor = raw.cursor()
        cursor.execute("SELECT count(*) FROM once")
        if cursor.fetchone() == (0,):
            cursor.executemany("INSERT INTO once (key) VALUES (%s)", [("a",), ("b",)])
        raw.driver_connection.autocommit = False
        raw.close()

    expected: Any = "proven" if world.dialect.driver == "psycopg" else {("lost", "once")}
    assert verdict(check, job, world) == expected
