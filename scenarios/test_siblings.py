"""Siblings: two different messages about one thing, at the same time. Each is right alone, however often delivered."""

from __future__ import annotations

import logging
from typing import Any

from sqlalchemy import JSON, ForeignKey, select, update
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import later, proven, refuted
from scenarios.shop import Session, save

log = logging.getLogger(__name__)


class Base(DeclarativeBase):
    pass


class Job(Base):
    """Work in two halves, with its progress as one document."""

    __tablename__ = "jobs"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(default="started")
    progress: Mapped[dict[str, Any]] = mapped_column(JSON)


class CountedJob(Base):
    """The same, with its progress as a number."""

    __tablename__ = "counted_jobs"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(default="started")
    left: Mapped[int]


class Result(Base):
    __tablename__ = "results"
    id: Mapped[str] = mapped_column(primary_key=True)
    images: Mapped[int]


class Customer(Base):
    __tablename__ = "customers"
    id: Mapped[str] = mapped_column(primary_key=True)
    hours: Mapped[int] = mapped_column(default=0)


class Event(Base):
    """Events that were taken in."""

    __tablename__ = "events"
    id: Mapped[str] = mapped_column(primary_key=True)
    customer_id: Mapped[str] = mapped_column(ForeignKey("customers.id"))
    hours: Mapped[int]


class Fee(Base):
    __tablename__ = "fees"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    units: Mapped[int]


class RequestedFee(Base):
    __tablename__ = "requested_fees"
    customer: Mapped[str] = mapped_column(primary_key=True)
    units: Mapped[int] = mapped_column(primary_key=True)


def arrange() -> None:
    save(Job(id=1, progress={"left": 5}), CountedJob(id=1, left=5))


# -- BUG-71: one document for all -------------------------------------------------------------------------------------


def take_result(result: str, images: int) -> None:
    with Session() as session:
        if session.get(Result, result):
            return
        job = session.get_one(Job, 1)
        session.add(Result(id=result, images=images))
        left = job.progress["left"] - images
        job.progress = {"left": left}
        job.state = "started" if left else "success"
        session.commit()


def take_result_by_counting(result: str, images: int) -> None:
    with Session() as session:
        if not session.execute(insert(Result).values(id=result, images=images).on_conflict_do_nothing()).rowcount:
            return
        job = update(CountedJob).where(CountedJob.id == 1)
        session.execute(job.values(left=CountedJob.left - images))
        session.execute(job.where(CountedJob.left == 0).values(state="success"))
        session.commit()


def test_one_document_for_all(chaos, both):
    """BUG-71 (antenna). "All results are in, and the job stays at *started*, two images to go."

    Two handlers read the document, each takes its images off, and writes the whole: who writes last has never heard of
    the other. A result that is delivered twice does no harm, so only two *different* results show it. Let the database
    subtract, in a column of its own, and say when nothing is left.
    """
    proven(both, take_result, "r1", 3)
    other = later(chaos, duplicates=2, crashes=0, siblings=[(take_result, ("r2", 2))])
    refuted(other, take_result, "r1", 3, changed="jobs")

    proven(both, take_result_by_counting, "r1", 3)
    other = later(chaos, duplicates=2, siblings=[(take_result_by_counting, ("r2", 2))])
    proven(other, take_result_by_counting, "r1", 3)


# -- BUG-62: a broken transaction -------------------------------------------------------------------------------------


def take_event(event: str, customer_id: str, hours: int) -> None:
    with Session.begin() as session:
        if session.get(Event, event):
            return
        if session.get(Customer, customer_id) is None:
            try:
                session.add(Customer(id=customer_id, hours=0))
                session.flush()
            except IntegrityError:
                pass  # the other event was faster, so the customer is there
        session.add(Event(id=event, customer_id=customer_id, hours=hours))
        session.execute(update(Customer).where(Customer.id == customer_id).values(hours=Customer.hours + hours))


def take_event_and_never_mind(event: str, customer_id: str, hours: int) -> None:
    try:
        take_event(event, customer_id, hours)
    except SQLAlchemyError as error:
        log.info("harmless noise: %s", error)  # there is always another event


def take_event_with_savepoint(event: str, customer_id: str, hours: int) -> None:
    with Session.begin() as session:
        if session.get(Event, event):
            return
        if session.get(Customer, customer_id) is None:
            try:
                with session.begin_nested():
                    session.add(Customer(id=customer_id, hours=0))
            except IntegrityError:
                pass
        session.add(Event(id=event, customer_id=customer_id, hours=hours))
        session.execute(update(Customer).where(Customer.id == customer_id).values(hours=Customer.hours + hours))


def test_a_broken_transaction(chaos, both):
    """BUG-62 (dj-stripe). "A unique violation in the log now and then, we know why. Some events had no effect at all."

    The error is caught, but the transaction is broken by it, and the next statement raises. As long as that goes up to
    the queue the event comes again and finds the customer. If somebody has silenced the noise, the event is gone. A
    savepoint around the insert confines the damage.
    """
    event = ("e1", "ann", 3)
    proven(both(faults=False), take_event_and_never_mind, *event)  # any other error it silences as well
    other = later(
        chaos, duplicates=2, crashes=0, faults=False, siblings=[(take_event_and_never_mind, ("e2", "ann", 2))]
    )
    refuted(other, take_event_and_never_mind, *event, lost="events")

    other = later(chaos, duplicates=2, siblings=[(take_event, ("e2", "ann", 2))])
    proven(other, take_event, *event)
    other = later(chaos, duplicates=2, siblings=[(take_event_with_savepoint, ("e2", "ann", 2))])
    proven(other, take_event_with_savepoint, *event)


# -- BUG-58: two requests, a moment apart -----------------------------------------------------------------------------


def bill_unless_billed(customer: str, units: int, asked_at: float) -> None:
    with Session() as session:
        if session.scalar(select(Fee).where(Fee.customer == customer, Fee.units == units)):
            return
        session.add(Fee(customer=customer, units=units))
        session.commit()


def bill_the_wish(customer: str, units: int, asked_at: float) -> None:
    with Session() as session:
        session.execute(insert(RequestedFee).values(customer=customer, units=units).on_conflict_do_nothing())
        session.commit()


def test_two_requests_a_moment_apart(chaos, crashing):
    """BUG-58 (lago). "Jobs are unique by customer and time. She pressed twice, at 12:00:00.00 and 12:00:00.05."

    A time stamp in the key makes every message unique, and the key useless. What must be billed once is the wish.
    """
    proven(crashing, bill_unless_billed, "ann", 5, 12.00)
    other = later(chaos, duplicates=2, crashes=0, siblings=[(bill_unless_billed, ("ann", 5, 12.05))])
    refuted(other, bill_unless_billed, "ann", 5, 12.00, duplicated="fees")

    other = later(chaos, duplicates=2, siblings=[(bill_the_wish, ("ann", 5, 12.05))])
    proven(other, bill_the_wish, "ann", 5, 12.00)
