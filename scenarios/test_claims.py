"""Claims: one conditional UPDATE decides who does the work. What happens if the winner dies is another question."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import proven, refuted
from scenarios.shop import Session, keyed_mailer, mailer, payments, queue, redis, save


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    cents: Mapped[int]
    status: Mapped[str] = mapped_column(default="new")
    claimed_at: Mapped[datetime] = mapped_column(default=datetime(2020, 1, 1))


class Run(Base):
    """A computation that a project has asked for."""

    __tablename__ = "runs"
    id: Mapped[int] = mapped_column(primary_key=True)
    project: Mapped[str]
    state: Mapped[str] = mapped_column(default="created")


class Email(Base):
    __tablename__ = "emails"
    id: Mapped[int] = mapped_column(primary_key=True)
    receiver: Mapped[str]
    status: Mapped[str] = mapped_column(default="queued")


class Schedule(Base):
    __tablename__ = "schedules"
    id: Mapped[int] = mapped_column(primary_key=True)
    task: Mapped[str]
    next_hour: Mapped[int]


class Task(Base):
    """A queue in the database: enqueueing is a row, and part of the transaction."""

    __tablename__ = "tasks"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


class Busy(Exception):
    """Somebody else may be working on it: try again later."""


def arrange() -> None:
    save(
        Order(id=1, cents=4200),
        Run(id=1, project="survey"),
        Email(id=1, receiver="ann@example.com"),
        Schedule(id=1, task="backup", next_hour=3),
    )


@pytest.fixture(autouse=True)
def outside(chaos):
    chaos.watch(payments, "charge", key="key")
    chaos.watch(queue, "publish", result=None, key="key")
    chaos.watch(mailer, "send", result=None)
    chaos.watch(keyed_mailer, "send", result=None, key="key")


# -- claim, then charge -----------------------------------------------------------------------------------------------


def claim_then_charge(order_id: int) -> None:
    order = update(Order).where(Order.id == order_id)
    with Session() as session:
        if not session.execute(order.where(Order.status == "new").values(status="charging")).rowcount:
            return  # somebody else has it
        session.commit()
        payments.charge(order_id, 4200)
        session.execute(order.values(status="paid"))
        session.commit()


def claim_for_a_while_then_charge(order_id: int) -> None:
    order = update(Order).where(Order.id == order_id, Order.status != "paid")
    long_ago = datetime.now() - timedelta(minutes=10)
    with Session() as session:
        if not session.execute(order.where(Order.claimed_at < long_ago).values(claimed_at=datetime.now())).rowcount:
            if session.get_one(Order, order_id).status == "paid":
                return
            raise Busy(order_id)
        session.commit()
        payments.charge(order_id, 4200)
        session.execute(order.values(status="paid"))
        session.commit()


def charge_with_key_then_mark(order_id: int) -> None:
    with Session() as session:
        if session.get_one(Order, order_id).status == "paid":
            return
        payments.charge(order_id, 4200, key=f"order-{order_id}")
        session.execute(update(Order).where(Order.id == order_id).values(status="paid"))
        session.commit()


def test_claim_then_charge(crashing, racing, both):
    """The claim is perfect: of two deliveries exactly one charges. Then the one that won is killed.

    Before its charge: nobody will charge, for everybody else has seen that the order is taken. "After ten minutes the
    claim is void" turns *lost* into *duplicated*, because nobody can tell whether the dead one had charged. A claim
    settles who works; only the provider can settle whether it was done, by a key. With the key no claim is needed.
    """
    proven(racing, claim_then_charge, 1)
    refuted(crashing, claim_then_charge, 1, lost=("Payments.charge", "orders"))

    proven(racing, claim_for_a_while_then_charge, 1)
    refuted(crashing, claim_for_a_while_then_charge, 1, duplicated="Payments.charge")

    proven(both, charge_with_key_then_mark, 1)


# -- BUG-19: two that check for work ----------------------------------------------------------------------------------


def start_waiting_runs(project: str) -> None:
    with Session() as session:
        for run in session.scalars(select(Run).where(Run.project == project, Run.state == "created")).all():
            queue.publish("execute", f"{run.id}")  # the worker will set the state, when it begins


def claim_runs_then_start(project: str) -> None:
    waiting = update(Run).where(Run.project == project, Run.state == "created")
    with Session() as session:
        claimed = session.scalars(waiting.values(state="queued").returning(Run.id)).all()
        session.commit()
    for run_id in claimed:
        queue.publish("execute", f"{run_id}")


def claim_and_start_with_key(project: str) -> None:
    waiting = update(Run).where(Run.project == project, Run.state == "created")
    with Session.begin() as session:
        for run_id in session.scalars(waiting.values(state="queued").returning(Run.id)).all():
            queue.publish("execute", f"{run_id}", key=f"run-{run_id}")


def test_two_checkers(crashing, racing, both):
    """BUG-19 (anonlink-entity-service). "The run was computed twice. The progress bar said: stage 4 of 3."

    The end of the upload and the start of the run both enqueue a checker, and both find the run, whose state nobody
    changes. `UPDATE ... WHERE state = 'created' RETURNING id` ends that: a row is returned to one of them only. But
    what is claimed and not yet published is lost with its process. Publish before the commit, with a key: until then
    nobody else gets past the UPDATE, and afterwards nobody finds the row.
    """
    refuted(crashing, start_waiting_runs, "survey", duplicated="Queue.publish")
    refuted(racing, start_waiting_runs, "survey", duplicated="Queue.publish")

    proven(racing, claim_runs_then_start, "survey")
    refuted(crashing, claim_runs_then_start, "survey", lost="Queue.publish")

    proven(both, claim_and_start_with_key, "survey")


# -- BUG-20: every mail starts a job that sends all mails -------------------------------------------------------------


def send_all() -> None:
    with Session() as session:
        for email in session.scalars(select(Email).where(Email.status == "queued")).all():
            mailer.send(email.receiver, "Welcome")
            email.status = "sent"
            session.commit()


def send_all_under_lock() -> None:
    if not redis.set("lock:send", 1, nx=True, ex=60):
        raise Busy
    try:
        send_all()
    finally:
        redis.delete("lock:send")


def send_all_with_key() -> None:
    with Session() as session:
        for email in session.scalars(select(Email).where(Email.status == "queued")).all():
            keyed_mailer.send(email.receiver, "Welcome", key=f"email-{email.id}")
            email.status = "sent"
            session.commit()


def test_send_all(crashing, racing, both):
    """BUG-20 (django-post_office). "One mail was queued, and dozens went out. Only under load."

    Queueing a mail enqueues *send all*, so a hundred mails start a hundred jobs, each of which selects what the others
    are sending. A lock makes them go one after the other, and does nothing about a process that dies after the mail
    and before the status.
    """
    refuted(crashing, send_all, duplicated="Mailer.send")
    refuted(racing, send_all, duplicated="Mailer.send")

    proven(racing, send_all_under_lock)
    refuted(crashing, send_all_under_lock, duplicated="Mailer.send")

    proven(both, send_all_with_key)


# -- BUG-27: two schedulers -------------------------------------------------------------------------------------------


def tick(hour: int) -> None:
    with Session.begin() as session:
        for schedule in session.scalars(select(Schedule).where(Schedule.next_hour <= hour)).all():
            session.add(Task(name=schedule.task))
            schedule.next_hour += 24


def tick_if_still_due(hour: int) -> None:
    with Session.begin() as session:
        for schedule in session.scalars(select(Schedule).where(Schedule.next_hour <= hour)).all():
            as_seen = update(Schedule).where(Schedule.id == schedule.id, Schedule.next_hour == schedule.next_hour)
            if session.execute(as_seen.values(next_hour=Schedule.next_hour + 24)).rowcount:
                session.add(Task(name=schedule.task))


def test_two_schedulers(crashing, racing, both):
    """BUG-27 (django-q). "A schedule that should fire once fired twice: we run two clusters on one database."

    Task and next date are one transaction, so no crash hurts. Two schedulers that have both read the row before either
    has moved it both fire. Move it *from the date that was read*, and fire only if that moved a row.
    """
    proven(crashing, tick, 3)
    refuted(racing, tick, 3, duplicated="tasks")
    proven(both, tick_if_still_due, 3)


# -- a claim and a slow winner ----------------------------------------------------------------------------------------


def test_a_claim_that_ends_too_early(chaos):
    """A claim with an end is a bet on how long the work takes. The one with the key does not care."""
    slow = chaos(duplicates=2, crashes=0, faults=False, late="slow", leases=["orders.claimed_at+10m"])
    proven(slow, charge_with_key_then_mark, 1)
    refuted(slow, claim_for_a_while_then_charge, 1, duplicated="Payments.charge")
