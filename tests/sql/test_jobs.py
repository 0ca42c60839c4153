"""Jobs in the styles that SQLAlchemy allows, each right or wrong in a known way, on every kind of engine."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Engine, delete, insert, select, text, update
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from retrychaos import Chaos
from tests.sql.engines import ENGINES, Invoice, Line, Once, Order, furnish


def orm_insert(engine: Engine, order: int) -> None:
    with Session(engine) as session:
        session.add(Invoice(order_id=order, note=uuid.uuid4().hex))
        session.commit()


def orm_guarded(engine: Engine, order: int) -> None:
    with Session(engine) as session:
        if session.scalar(select(Invoice).where(Invoice.order_id == order)) is None:
            session.add(Invoice(order_id=order, note=uuid.uuid4().hex))
            session.commit()


def guard_in_another_transaction(engine: Engine, order: int) -> None:
    with Session(engine) as session:
        invoice = session.scalar(select(Invoice).where(Invoice.order_id == order))
        if invoice is None:
            invoice = Invoice(order_id=order, note=None)
            session.add(invoice)
            session.commit()
            session.add(Line(invoice_id=invoice.id, product="book"))
            session.commit()


def each_step_guarded(engine: Engine, order: int) -> None:
    with Session(engine) as session:
        invoice = session.scalar(select(Invoice).where(Invoice.order_id == order))
        if invoice is None:
            invoice = Invoice(order_id=order, note=None)
            session.add(invoice)
            session.commit()
        if session.scalar(select(Line).where(Line.invoice_id == invoice.id)) is None:
            session.add(Line(invoice_id=invoice.id, product="book"))
            session.commit()


def parent_and_child_at_once(engine: Engine, order: int) -> None:
    with Session(engine) as session, session.begin():
        if session.scalar(select(Invoice).where(Invoice.order_id == order)):
            return
        invoice = Invoice(order_id=order, note=None)
        session.add(invoice)
        session.flush()
        session.add_all([Line(invoice_id=invoice.id, product=product) for product in ("book", "pen")])


def unique_key(engine: Engine, order: int) -> None:
    with Session(engine) as session:
        session.add(Once(key=f"order-{order}"))
        session.add(Invoice(order_id=order, note=None))
        try:
            session.commit()
        except IntegrityError:
            session.rollback()


def unique_key_first(engine: Engine, order: int) -> None:
    with Session(engine) as session:
        session.add(Once(key=f"order-{order}"))
        try:
            session.commit()
        except IntegrityError:
            session.rollback()
            return
        session.add(Invoice(order_id=order, note=None))
        session.commit()


def upsert(engine: Engine, order: int) -> None:
    with engine.begin() as connection:
        connection.execute(sqlite_insert(Once).values(key=f"o{order}").on_conflict_do_nothing())
        connection.execute(update(Order).where(Order.id == order).values(status="done"))


def counter(engine: Engine, order: int) -> None:
    with engine.begin() as connection:
        connection.execute(update(Order).where(Order.id == order).values(n=Order.n + 1))


def absolute(engine: Engine, order: int) -> None:
    with engine.begin() as connection:
        connection.execute(update(Order).where(Order.id == order).values(n=1))


def two_counters(engine: Engine, order: int) -> None:
    with engine.begin() as connection:
        connection.execute(update(Order).where(Order.id == order).values(n=1))
    with engine.begin() as connection:
        connection.execute(text("UPDATE orders SET n = n + 1 WHERE id = 2"))


def core_executemany(engine: Engine, order: int) -> None:
    with engine.begin() as connection:
        if connection.execute(select(Once)).first() is None:
            connection.execute(insert(Once), [{"key": "a"}, {"key": "b"}, {"key": "c"}])


def autocommit_executemany(engine: Engine, order: int) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if connection.execute(select(Once)).first() is None:
            connection.execute(insert(Once), [{"key": "a"}, {"key": "b"}, {"key": "c"}])


def autocommit_ignoring(engine: Engine, order: int) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        rows = [{"key": "a"}, {"key": "b"}, {"key": "c"}]
        connection.execute(sqlite_insert(Once).on_conflict_do_nothing(), rows)


def raw_insert(engine: Engine, order: int) -> None:
    connection = engine.raw_connection()
    try:
        cursor = connection.cursor()
        cursor.execute("INSERT INTO invoices (order_id) VALUES (?)", (order,))
        connection.commit()
    finally:
        connection.close()


def raw_guarded(engine: Engine, order: int) -> None:
    connection = engine.raw_connection()
    try:
        cursor = connection.cursor()
        cursor.execute("SELECT 1 FROM invoices WHERE order_id = ?", (order,))
        if cursor.fetchone() is None:
            cursor.execute("INSERT INTO invoices (order_id) VALUES (?)", (order,))
            connection.commit()
    finally:
        connection.close()


def script(engine: Engine, order: int) -> None:
    connection = engine.raw_connection()
    try:
        if not connection.cursor().execute("SELECT 1 FROM once").fetchall():
            connection.driver_connection.executescript(
                "INSERT INTO once (key) VALUES ('a'); INSERT INTO once (key) VALUES ('b');"
            )
    finally:
        connection.close()


def script_in_transaction(engine: Engine, order: int) -> None:
    connection = engine.raw_connection()
    try:
        if not connection.cursor().execute("SELECT 1 FROM once").fetchall():
            connection.driver_connection.executescript(
                "BEGIN; INSERT INTO once (key) VALUES ('a'); INSERT INTO once (key) VALUES ('b'); COMMIT;"
            )
    finally:
        connection.close()


def savepoints(engine: Engine, order: int) -> None:
    with Session(engine) as session, session.begin():
        try:
            with session.begin_nested():
                session.add(Once(key="k"))
                session.flush()
                session.add(Invoice(order_id=order, note=None))
        except IntegrityError:
            pass
        session.get_one(Order, order).status = "invoiced"


def savepoint_without_key(engine: Engine, order: int) -> None:
    with Session(engine) as session, session.begin():
        with session.begin_nested():
            session.add(Invoice(order_id=order, note=None))
        session.get_one(Order, order).status = "invoiced"


def ddl_if_not_exists(engine: Engine, order: int) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS extra (k TEXT PRIMARY KEY)"))
        connection.execute(text("INSERT OR IGNORE INTO extra VALUES ('x')"))


def ddl_blind(engine: Engine, order: int) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE extra (k TEXT PRIMARY KEY)"))
    with engine.begin() as connection:
        connection.execute(text("INSERT OR IGNORE INTO extra VALUES ('x')"))


def replace_lines(engine: Engine, order: int) -> None:
    with Session(engine) as session, session.begin():
        session.execute(delete(Once))
        session.add_all([Once(key="a"), Once(key="b")])


def replace_lines_in_two_steps(engine: Engine, order: int) -> None:
    with Session(engine) as session:
        if session.scalar(select(Order.status).where(Order.id == order)) == "done":
            return
        session.execute(delete(Once))
        session.commit()
        session.add_all([Once(key="a"), Once(key="b")])
        session.get_one(Order, order).status = "done"
        session.commit()


def insert_then_delete_old(engine: Engine, order: int) -> None:
    with Session(engine) as session:
        fresh = Invoice(order_id=order, note="now")
        session.add(fresh)
        session.commit()
        session.execute(delete(Invoice).where(Invoice.order_id == order, Invoice.id != fresh.id))
        session.commit()


def status_guard_lost_line(engine: Engine, order: int) -> None:
    with Session(engine) as session:
        found = session.get_one(Order, order)
        if found.status == "done":
            return
        found.status = "done"
        session.commit()
        session.add(Invoice(order_id=order, note=None))
        session.commit()


def json_token(engine: Engine, order: int) -> None:
    with Session(engine) as session, session.begin():
        found = session.scalar(select(Once).where(Once.key.like("{%")))
        if found is not None:
            session.delete(found)
            session.flush()
        session.add(Once(key=json.dumps({"order": order, "token": str(uuid.uuid4())})))


unread: list[object] = []


def half_read(engine: Engine, order: int) -> None:
    with Session(engine) as session:
        rows = session.execute(select(Order.id))
        rows.fetchone()
        unread.append(rows)
        if session.scalar(select(Invoice).where(Invoice.order_id == order)) is None:
            session.add(Invoice(order_id=order, note=None))
            session.commit()


def half_read_raw(engine: Engine, order: int) -> None:
    connection = engine.raw_connection()
    cursor = connection.cursor()
    cursor.execute("SELECT id FROM orders")
    cursor.fetchone()
    unread.append(cursor)
    orm_guarded(engine, order)


def left_open(engine: Engine, order: int) -> None:
    session = Session(engine)
    session.add(Invoice(order_id=order, note=None))
    session.commit()
    session.get_one(Order, order)  # and never closed


registry = scoped_session(sessionmaker())


def scoped(engine: Engine, order: int) -> None:
    session = registry(bind=engine) if not registry.registry.has() else registry()
    if session.scalar(select(Invoice).where(Invoice.order_id == order)) is None:
        session.add(Invoice(order_id=order, note=None))
        session.commit()


def temporary_table(engine: Engine, order: int) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TEMPORARY TABLE scratch (k INTEGER)"))
        connection.execute(text("INSERT INTO scratch VALUES (1)"))
        connection.execute(text("UPDATE orders SET n = (SELECT count(*) FROM scratch) WHERE id = 1"))


def gives_up_after_five(engine: Engine, order: int) -> None:
    with Session(engine) as session:
        found = session.get_one(Order, order)
        if found.status == "done":
            return
        found.n += 1
        session.commit()
        if found.n > 5:
            return
        found.status = "done"
        session.commit()


def fails_then_repairs(engine: Engine, order: int) -> None:
    with Session(engine) as session:
        found = session.get_one(Order, order)
        if found.status == "half":
            found.status = "repair"
            session.commit()
            raise RuntimeError("found it half done; the next delivery repairs")
        if found.status == "repair":
            found.status = "done"
            session.commit()
            return
        if found.status == "done":
            return
        found.status = "half"
        session.commit()
        found.status = "done"
        session.commit()


RIGHT = [
    orm_guarded,
    each_step_guarded,
    parent_and_child_at_once,
    unique_key,
    upsert,
    absolute,
    core_executemany,
    autocommit_ignoring,
    raw_guarded,
    script_in_transaction,
    savepoints,
    ddl_if_not_exists,
    replace_lines,
    insert_then_delete_old,
    json_token,
    scoped,
    temporary_table,
    fails_then_repairs,
]
WRONG = [
    (orm_insert, "duplicated", "invoices"),
    (guard_in_another_transaction, "lost", "lines"),
    (unique_key_first, "lost", "invoices"),
    (counter, "changed", "orders"),
    (two_counters, "changed", "orders"),
    (autocommit_executemany, "lost", "once"),
    (raw_insert, "duplicated", "invoices"),
    (script, "lost", "once"),
    (savepoint_without_key, "duplicated", "invoices"),
    (ddl_blind, "stuck", "OperationalError"),
    (status_guard_lost_line, "lost", "invoices"),
    (left_open, "duplicated", "invoices"),
]
Job = Callable[[Engine, int], None]


@pytest.mark.parametrize("job", RIGHT, ids=lambda job: job.__name__)
def test_right(chaos: Chaos, shop: Engine, job: Job) -> None:
    report = chaos.explore(job, shop, 1)
    registry.remove()
    assert report.verdict == "proven", (report.findings, report.stop_reason)
    assert report.runs == report.states + 1 or job is fails_then_repairs


@pytest.mark.parametrize(("job", "kind", "effect"), WRONG, ids=lambda value: getattr(value, "__name__", value))
def test_wrong(chaos: Chaos, shop: Engine, job: Job, kind: str, effect: str) -> None:
    report = chaos.explore(job, shop, 1)
    assert report.verdict == "failed", (report.guarantee, report.stop_reason)
    found = report.findings[0]
    assert found.kind == kind, (found.kind, found.effect)
    assert found.effect.startswith(effect)
    assert found.plan.crashes == 1
    replayed = chaos.run(job, shop, 1, plan=found.token)
    assert replayed.kind == kind


def test_replacing_lines_in_two_steps_is_right(chaos: Chaos, shop: Engine) -> None:
    assert chaos.explore(replace_lines_in_two_steps, shop, 1).verdict == "proven"


def test_a_half_read_result_is_no_obstacle(chaos: Chaos, shop: Engine) -> None:
    assert chaos.explore(half_read, shop, 1).verdict == "proven"
    unread.clear()


def test_a_half_read_raw_cursor_is_no_obstacle(chaos: Chaos) -> None:
    """In memory, where the database is restored through the very connection that the cursor is open on."""
    engine = ENGINES["static"](Path())
    furnish(engine)
    assert chaos.explore(half_read_raw, engine, 1).verdict == "proven"
    unread.clear()
    engine.dispose()


def test_giving_up_after_five_attempts_is_found_at_five_crashes(chaos: Chaos, shop: Engine) -> None:
    report = chaos(volatile=["orders.n"]).explore(gives_up_after_five, shop, 1)
    assert [(finding.kind, finding.plan.crashes) for finding in report.findings] == [("lost", 5)]
    without = chaos.explore(gives_up_after_five, shop, 1)
    assert (without.findings[0].kind, without.findings[0].plan.crashes) == ("changed", 1)
