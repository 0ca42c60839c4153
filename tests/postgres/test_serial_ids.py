"""Row ids from sequences: no rollback brings them back, so each attempt gets other ones; only their order counts."""

from __future__ import annotations

from collections.abc import Callable

import fakeredis
import pytest
import redis
from sqlalchemy import Engine, ForeignKey, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from retrychaos import Chaos, Report
from retrychaos.report.text import full_text

Job = Callable[..., None]


class Base(DeclarativeBase):
    pass


class Invoice(Base):
    __tablename__ = "invoices"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(unique=True)
    amount: Mapped[int]


class Line(Base):
    __tablename__ = "lines"
    id: Mapped[int] = mapped_column(primary_key=True)
    invoice_id: Mapped[int] = mapped_column(ForeignKey("invoices.id"))


class Event(Base):
    """Without anything unique."""

    __tablename__ = "events"
    id: Mapped[int] = mapped_column(primary_key=True)
    what: Mapped[str]


@pytest.fixture
def db(engine: Engine) -> Engine:
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE cursors (seen int)"))
        connection.execute(text("INSERT INTO cursors VALUES (0)"))
        connection.execute(text("CREATE TABLE sent (event int)"))
        connection.execute(text("CREATE TABLE leader (claim int)"))
    return engine


@pytest.fixture
def twice(check: Chaos) -> Chaos:
    return check(duplicates=2, budget=300)


def found(report: Report) -> tuple[str, list[str]]:
    return report.verdict, sorted({finding.kind for finding in report.findings})


PROVEN = ("proven", list[str]())


# -- jobs -----------------------------------------------------------------------------------------------------------


def find_or_create(engine: Engine) -> None:
    with Session(engine) as session:
        if session.scalar(select(Invoice).where(Invoice.order_id == 7)) is None:
            session.add(Invoice(order_id=7, amount=5))
            try:
                session.commit()
            except IntegrityError:
                session.rollback()


def insert_unless_there(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO invoices (order_id, amount) VALUES (7, 5) ON CONFLICT DO NOTHING"))


def invoice_with_line(engine: Engine) -> None:
    """A row that refers to the id of another, in one transaction."""
    with Session(engine) as session:
        if session.scalar(select(Invoice).where(Invoice.order_id == 7)) is None:
            invoice = Invoice(order_id=7, amount=5)
            session.add(invoice)
            session.flush()
            session.add(Line(invoice_id=invoice.id))
            session.commit()


def invoice_then_line(engine: Engine) -> None:
    """The same in two: whoever finds the invoice takes it that the line is there."""
    with Session(engine) as session:
        if session.scalar(select(Invoice).where(Invoice.order_id == 7)) is None:
            invoice = Invoice(order_id=7, amount=5)
            session.add(invoice)
            session.commit()
            session.add(Line(invoice_id=invoice.id))
            session.commit()


def look_and_insert(engine: Engine) -> None:
    with Session(engine) as session:
        if session.scalar(select(Event).where(Event.what == "shipped")) is None:
            session.add(Event(what="shipped"))
            session.commit()


def insert(engine: Engine) -> None:
    with Session(engine) as session:
        session.add(Event(what="shipped"))
        session.commit()


def _export(engine: Engine, lock: str) -> None:
    """Sends all events that are newer than the last one sent."""
    with engine.begin() as connection:
        connection.execute(text(lock))
        if not connection.execute(text("SELECT 1 FROM events WHERE what = 'mine'")).first():
            connection.execute(text("INSERT INTO events (what) VALUES ('mine')"))
        connection.execute(text("INSERT INTO events (what) VALUES ('seen')"))
        seen = connection.execute(text("SELECT seen FROM cursors")).scalar()
        new = connection.execute(text("SELECT id FROM events WHERE id > :s AND what = 'mine'"), {"s": seen}).scalars()
        for event in new.all():
            connection.execute(text("INSERT INTO sent VALUES (:e)"), {"e": event})
        connection.execute(text("DELETE FROM events WHERE what = 'seen'"))
        connection.execute(text("UPDATE cursors SET seen = (SELECT max(id) FROM events)"))


def export_locked(engine: Engine) -> None:
    """Right, since who draws later gets a larger number."""
    _export(engine, "SELECT pg_advisory_xact_lock(1)")


def _elect(engine: Engine, lock: str) -> None:
    """The one with the lowest id does it."""
    with engine.begin() as connection:
        connection.execute(text(lock))
        mine = connection.execute(text("INSERT INTO events (what) VALUES ('claim') RETURNING id")).scalar()
    with engine.begin() as connection:
        if connection.execute(text("SELECT min(id) FROM events")).scalar() == mine:
            connection.execute(text("INSERT INTO leader VALUES (1)"))


def elect_locked(engine: Engine) -> None:
    _elect(engine, "SELECT pg_advisory_xact_lock(1)")


def elect(engine: Engine) -> None:
    _elect(engine, "SELECT 1")


# -- tests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", [find_or_create, insert_unless_there, invoice_with_line, export_locked])
def test_right(db: Engine, twice: Chaos, job: Job) -> None:
    report = twice.explore(job, db)
    assert found(report) == PROVEN, full_text(report)
    assert "any number of crashes" in report.guarantee


@pytest.mark.parametrize("job", [find_or_create, insert_unless_there])
def test_three_deliveries(db: Engine, check: Chaos, job: Job) -> None:
    report = check(duplicates=3, budget=300).explore(job, db)
    assert found(report) == PROVEN, full_text(report)


@pytest.mark.parametrize(
    ("job", "kind"), [(invoice_then_line, "lost"), (look_and_insert, "duplicated"), (insert, "duplicated")]
)
def test_wrong(db: Engine, twice: Chaos, job: Job, kind: str) -> None:
    report = twice.explore(job, db)
    assert report.verdict == "failed", full_text(report)
    assert kind in {finding.kind for finding in report.findings}


@pytest.mark.parametrize(("job", "right"), [(elect_locked, True), (elect, False)])
def test_who_draws_first_gets_the_lower_number(db: Engine, check: Chaos, job: Job, right: bool) -> None:
    without_crashes = check(duplicates=2, crashes=0, budget=300, volatile=["events"])
    report = without_crashes.explore(job, db)
    assert found(report) == (PROVEN if right else ("failed", ["duplicated"])), full_text(report)


def cache(engine: Engine, client: redis.Redis) -> None:
    with Session(engine) as session:
        invoice = session.scalar(select(Invoice).where(Invoice.order_id == 7))
        if invoice is None:
            session.add(invoice := Invoice(order_id=7, amount=5))
            try:
                session.commit()
            except IntegrityError:
                session.rollback()
                invoice = session.scalars(select(Invoice).where(Invoice.order_id == 7)).one()
        client.set("invoice", f"number {invoice.id} of 7")


def cache_what_was_tried(engine: Engine, client: redis.Redis) -> None:
    """Stores the id of a row that was never committed, if another delivery was first."""
    with engine.begin() as connection:
        drawn = connection.execute(text("SELECT nextval('invoices_id_seq')")).scalar()
        connection.execute(text("INSERT INTO invoices VALUES (:id, 7, 5) ON CONFLICT DO NOTHING"), {"id": drawn})
    client.set("invoice", f"number {drawn} of 7")


@pytest.mark.parametrize(("job", "right"), [(cache, True), (cache_what_was_tried, False)])
def test_ids_in_another_store(db: Engine, twice: Chaos, job: Job, right: bool) -> None:
    """They are renamed wherever they are: in keys and in texts."""
    report = twice.explore(job, db, fakeredis.FakeRedis(server=fakeredis.FakeServer()))
    assert found(report) == (PROVEN if right else ("failed", ["changed"])), full_text(report)


def test_a_job_that_knows_its_ids(db: Engine, twice: Chaos) -> None:
    """Its sequences stay where they are."""

    def small(engine: Engine) -> None:
        with engine.begin() as connection:
            connection.execute(text("SELECT pg_advisory_xact_lock(1)"))
            if connection.execute(text("SELECT max(id) FROM events")).scalar() is None:
                drawn = connection.execute(text("INSERT INTO events (what) VALUES ('') RETURNING id")).scalar_one()
                connection.execute(text("UPDATE events SET what = :w"), {"w": "small" if drawn < 1_000 else "large"})

    assert found(twice.explore(small, db)) == PROVEN


def import_rows(engine: Engine) -> None:
    """Draws thousands of ids in one delivery."""
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(1)"))
        if connection.execute(text("SELECT count(*) FROM events")).scalar() == 0:
            connection.execute(text("INSERT INTO events (what) SELECT 'row ' || n FROM generate_series(1, 3000) n"))


def test_many_ids(db: Engine, check: Chaos) -> None:
    report = check(duplicates=2, crashes=1, budget=300).explore(import_rows, db)
    assert found(report) == PROVEN, full_text(report)
