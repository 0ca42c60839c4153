"""Reservations: a note that work is going to be done, which the next delivery takes for work that was done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

import pytest
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import proven, refuted
from scenarios.shop import Session, queue, redis


class Base(DeclarativeBase):
    pass


class Invoice(Base):
    __tablename__ = "invoices"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int]


class Reservation(Base):
    __tablename__ = "reservations"
    key: Mapped[str] = mapped_column(primary_key=True)
    completed: Mapped[bool] = mapped_column(default=False)
    until: Mapped[datetime | None]


class Busy(Exception):
    """Somebody else may be working on it: try again later."""


@pytest.fixture(autouse=True)
def outside(chaos):
    chaos.watch(queue, "publish", result=None, key="key")


# -- S26: reserve, work, complete -------------------------------------------------------------------------------------


@contextmanager
def reserved(key: str) -> Iterator[bool]:
    """Reserve, work, complete. If the work fails the reservation is given back."""
    with Session.begin() as session:
        if session.get(Reservation, key):
            fresh = False
        else:
            session.add(Reservation(key=key))
            fresh = True
    try:
        yield fresh
    except BaseException:
        with Session.begin() as session:
            session.delete(session.get_one(Reservation, key))
        raise
    if fresh:
        with Session.begin() as session:
            session.get_one(Reservation, key).completed = True


def bill_if_reserved(order_id: int) -> None:
    with reserved(f"bill-{order_id}") as fresh:
        if fresh:
            with Session.begin() as session:
                session.add(Invoice(order_id=order_id))


def bill_and_reserve_in_one(order_id: int) -> None:
    with Session.begin() as session:
        if session.get(Reservation, f"bill-{order_id}"):
            return
        session.add(Reservation(key=f"bill-{order_id}", completed=True))
        session.add(Invoice(order_id=order_id))


def bill_under_a_lease(order_id: int) -> None:
    key = f"bill-{order_id}"
    now = datetime.now()
    with Session.begin() as session:
        reservation = session.get(Reservation, key) or Reservation(key=key, completed=False)
        if reservation.completed:
            return
        if reservation.until is not None and reservation.until > now:
            raise Busy(key)
        reservation.until = now + timedelta(minutes=10)
        session.add(reservation)
    with Session.begin() as session:
        reservation = session.get_one(Reservation, key)
        reservation.completed, reservation.until = True, None
        session.add(Invoice(order_id=order_id))


def test_reserve_work_complete(chaos, racing, both):
    """S26. "Our idempotency middleware skips what it knows. It knew the order, so nobody billed it, ever."

    The middleware gives a reservation back when the job raises. A killed process raises nothing. A reservation in the
    transaction of the work cannot outlive it; a lease ends by itself, and whoever finds it *raises*, to come back
    later. But this lease is looked at and then taken: after a crash two deliveries find that it has ended, and both
    take it. How to take a lease, and what to do about slow holders, is in test_leases.py.
    """
    refuted(chaos, bill_if_reserved, 1, lost=("invoices", "reservations"))
    proven(racing, bill_if_reserved, 1)
    proven(both, bill_and_reserve_in_one, 1)
    proven(chaos, bill_under_a_lease, 1)
    proven(racing, bill_under_a_lease, 1)
    refuted(both, bill_under_a_lease, 1, duplicated="invoices")


# -- BUG-36: seen -----------------------------------------------------------------------------------------------------

A_MONTH = 30 * 24 * 3600


def ingest_if_unseen(event: str) -> None:
    if not redis.set(f"seen:{event}", "", nx=True, ex=A_MONTH):
        return
    queue.publish("events", event)


def ingest_with_key_then_mark_seen(event: str) -> None:
    if redis.exists(f"seen:{event}"):
        return
    queue.publish("events", event, key=event)
    redis.set(f"seen:{event}", "", ex=A_MONTH)


def ingest_and_mark_seen_together(event: str) -> None:
    if redis.exists(f"seen:{event}"):
        return
    with redis.pipeline(transaction=True) as both:
        both.rpush("events", event)
        both.set(f"seen:{event}", "", ex=A_MONTH)
        both.execute()


def test_seen_before_it_was_written(chaos, crashing, racing, both):
    """BUG-36 (openmeter). "One hiccup and one retry, and the event was metered zero times. The retry said 200 OK."

    `SET NX` asks and claims in one command, and the claim outlives the process. Mark as seen only what is written:
    after a write that may be repeated, or in the same MULTI. (The look is not part of that: two at a time both write.)
    """
    refuted(chaos, ingest_if_unseen, "e1", lost="Queue.publish")
    proven(both, ingest_with_key_then_mark_seen, "e1")
    proven(crashing, ingest_and_mark_seen_together, "e1")
    refuted(racing, ingest_and_mark_seen_together, "e1", duplicated="redis events")
