"""One bug, four stages: usage is metered once an hour for every customer (BUG-72, langfuse)."""

from __future__ import annotations

import uuid
from pathlib import Path

from sqlalchemy import Engine, create_engine, func, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.orm import Session as OrmSession
from sqlalchemy.pool import NullPool

from scenarios.conftest import proven, refuted
from scenarios.shop import Session, redis, save


class Base(DeclarativeBase):
    pass


class Usage(Base):
    __tablename__ = "usage"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    hour: Mapped[int]


class Cursor(Base):
    __tablename__ = "cursors"
    name: Mapped[str] = mapped_column(primary_key=True)
    hour: Mapped[int]


class KnownAlready(Exception):
    """HTTP 400: an event of this id has been received."""


class Provider:
    """Bills by events and rejects an id that it knows. No rollback of ours reaches its database."""

    books: Engine

    def begin(self, folder: Path) -> None:
        self.books = create_engine(f"sqlite:///{folder / 'provider.db'}", poolclass=NullPool)
        with self.books.begin() as books:
            books.execute(text("DROP TABLE IF EXISTS meter_events"))
            books.execute(text("CREATE TABLE meter_events (id TEXT PRIMARY KEY, customer TEXT, units INTEGER)"))

    def post(self, id: str, customer: str, units: int) -> None:
        row = {"id": id, "customer": customer, "units": units}
        try:
            with self.books.begin() as books:
                books.execute(text("INSERT INTO meter_events VALUES (:id, :customer, :units)"), row)
        except IntegrityError:
            raise KnownAlready(id) from None


provider = Provider()


def arrange() -> None:
    save(Cursor(name="metering", hour=11))
    save(Usage(customer="ann", hour=12), Usage(customer="ann", hour=12), Usage(customer="bob", hour=12))
    provider.begin(folder=Path(Session.kw["bind"].url.database).parent)


def units_by_customer(session: OrmSession, hour: int) -> list[tuple[str, int]]:
    query = select(Usage.customer, func.count()).where(Usage.hour == hour).group_by(Usage.customer)
    return [(customer, units) for customer, units in session.execute(query.order_by(Usage.customer))]


def meter_with_random_ids(hour: int) -> None:
    with Session.begin() as session:
        cursor = session.get_one(Cursor, "metering")
        if cursor.hour >= hour:
            return
        for customer, units in units_by_customer(session, hour):
            provider.post(str(uuid.uuid4()), customer, units)
        cursor.hour = hour


def meter_with_stable_ids(hour: int) -> None:
    with Session.begin() as session:
        cursor = session.get_one(Cursor, "metering")
        if cursor.hour >= hour:
            return
        for customer, units in units_by_customer(session, hour):
            provider.post(f"{customer}:{hour}", customer, units)
        cursor.hour = hour


def meter_and_take_known_for_delivered(hour: int) -> None:
    with Session.begin() as session:
        cursor = session.get_one(Cursor, "metering")
        if cursor.hour >= hour:
            return
        for customer, units in units_by_customer(session, hour):
            try:
                provider.post(f"{customer}:{hour}", customer, units)
            except KnownAlready:
                pass
            redis.incrby(f"units:{customer}", units)
        cursor.hour = hour


def meter_and_set_local_units(hour: int) -> None:
    with Session.begin() as session:
        cursor = session.get_one(Cursor, "metering")
        if cursor.hour >= hour:
            return
        for customer, units in units_by_customer(session, hour):
            try:
                provider.post(f"{customer}:{hour}", customer, units)
            except KnownAlready:
                pass
            redis.hset(f"units:{customer}", str(hour), units)
        cursor.hour = hour


def test_stage_one_random_ids(chaos):
    """ "A run failed in the middle, and the customers at the beginning of the alphabet were billed twice." """
    refuted(chaos, meter_with_random_ids, 12, duplicated="meter_events")


def test_stage_two_stable_ids(chaos):
    """ "Fixed: the id is made from customer and hour. Now metering stands still since Tuesday."

    The provider *rejects* what it knows, the job takes that for a failure, and every retry fails at the first customer.
    """
    refuted(chaos, meter_with_stable_ids, 12, stuck="KnownAlready: ann:12")


def test_stage_three_known_is_delivered(chaos):
    """ "Fixed: a rejected duplicate is a success. The bill is right, and our own dashboard shows more than the bill."

    The provider deduplicates, the local counter beside it does not: it is added to on every attempt (S25).
    """
    refuted(chaos, meter_and_take_known_for_delivered, 12, changed="redis units:ann")


def test_stage_four_local_units_are_set(chaos):
    """Every effect of the loop can be repeated: a rejected duplicate is delivered, and units of an hour are set."""
    proven(chaos, meter_and_set_local_units, 12)
