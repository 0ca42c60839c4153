"""Watchdogs: who looks after those that have died, and takes the slow for dead.

Each job is right about its own crashes only because something else comes later: a flush, a sweep, a restart. That one
knows no more than the rows, and rows look alike whether somebody is at work behind them or not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from sqlalchemy import Select, or_, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import proven, refuted
from scenarios.shop import Session, keyed_mailer, mailer, save

Send = Callable[[str, str], None]


class Base(DeclarativeBase):
    pass


class Email(Base):
    __tablename__ = "emails"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(default="not sent")
    since: Mapped[datetime | None]


class Recipient(Base):
    __tablename__ = "recipients"
    address: Mapped[str] = mapped_column(primary_key=True)
    email_id: Mapped[int]
    done: Mapped[bool] = mapped_column(default=False)


class Campaign(Base):
    __tablename__ = "campaigns"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(default="queued")
    started: Mapped[datetime | None]


class Sent(Base):
    __tablename__ = "sent"
    campaign_id: Mapped[int] = mapped_column(primary_key=True)
    address: Mapped[str] = mapped_column(primary_key=True)
    at: Mapped[datetime]


class Task(Base):
    """A queue in the database. A task with a key may be in it once."""

    __tablename__ = "tasks"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    key: Mapped[str | None] = mapped_column(unique=True)
    state: Mapped[str] = mapped_column(default="queued")
    heard_of: Mapped[datetime | None]


class Result(Base):
    __tablename__ = "results"
    name: Mapped[str] = mapped_column(primary_key=True)


ADDRESSES = ("ann@example.com", "bob@example.com")
LONG_AGO = datetime(2020, 1, 1)


def arrange() -> None:
    save(Email(id=1), *(Recipient(address=address, email_id=1) for address in ADDRESSES))
    save(Campaign(id=1))
    save(Task(id=1, name="import", key="import-7"), Task(id=2, name="tidy", state="running", heard_of=LONG_AGO))


@pytest.fixture(autouse=True)
def outside(chaos):
    chaos.watch(mailer, "send", result=None)
    chaos.watch(keyed_mailer, "send", result=None, key="key")


def by_smtp(to: str, subject: str) -> None:
    mailer.send(to, subject)


def with_key(to: str, subject: str) -> None:
    keyed_mailer.send(to, subject, key=f"{subject} {to}")


# -- BUG-38: on its way, for ever -------------------------------------------------------------------------------------


def send_email(email_id: int, send: Send) -> None:
    with Session() as session:
        email = session.get_one(Email, email_id)
        email.status, email.since = "sending", datetime.now()
        session.commit()
        of_email = select(Recipient).where(Recipient.email_id == email_id, Recipient.done.is_(False))
        for recipient in session.scalars(of_email.order_by(Recipient.address)).all():
            send(recipient.address, f"Newsletter {email_id}")
            recipient.done = True
            session.commit()
        email.status, email.since = "sent", None
        session.commit()


def flush() -> None:
    with Session() as session:
        waiting = session.scalars(select(Email.id).where(Email.status == "not sent")).all()
    for number in waiting:
        send_email(number, by_smtp)


def flush_and_reset(send: Send = by_smtp) -> None:
    """Takes what has been on its way for a quarter of an hour for lost."""
    overdue = (Email.status == "sending") & (Email.since < datetime.now() - timedelta(minutes=15))
    with Session() as session:
        waiting = session.scalars(select(Email.id).where(or_(Email.status == "not sent", overdue))).all()
    for number in waiting:
        send_email(number, send)


def the_next_flush() -> None:
    time.sleep(20 * 60)
    flush()


def the_next_flush_with_reset() -> None:
    time.sleep(20 * 60)
    flush_and_reset()


def the_next_flush_with_key() -> None:
    time.sleep(20 * 60)
    flush_and_reset_with_key()


def flush_and_reset_with_key() -> None:
    flush_and_reset(with_key)


def test_on_its_way_for_ever(chaos, crashing):
    """BUG-38 (frappe). "The newsletter says *Sending*. It has said so since the deploy on Tuesday."

    The flush looks for what is not sent, and what the dead one had begun is neither that nor sent. So it was given a
    quarter of an hour. That heals the crash, but for the mail between sending and mark; and an SMTP server that takes
    twenty minutes over one mail is enough to have everything sent by two. Only a receiver that knows the mail again
    closes it.
    """
    refuted(crashing(then=[the_next_flush]), flush, lost=("Mailer.send", "emails"))

    later = crashing(then=[the_next_flush_with_reset])
    refuted(later, flush_and_reset, duplicated="Mailer.send")
    proven(later(tolerate=["Mailer.send"]), flush_and_reset)
    hanging = chaos(duplicates=1, crashes=0, faults=False, rivals=[the_next_flush_with_reset])
    refuted(hanging, flush_and_reset, duplicated="Mailer.send")

    proven(crashing(then=[the_next_flush_with_key]), flush_and_reset_with_key)
    hanging = chaos(duplicates=1, crashes=0, faults=False, rivals=[the_next_flush_with_key])
    proven(hanging, flush_and_reset_with_key)


# -- BUG-79: slow, not dead -------------------------------------------------------------------------------------------


def run_campaign(campaign_id: int, send: Send = by_smtp) -> None:
    with Session() as session:
        campaign = session.get_one(Campaign, campaign_id)
        if campaign.state == "done":
            return
        campaign.state, campaign.started = "running", datetime.now()
        session.commit()
        for address in ADDRESSES:
            if session.get(Sent, (campaign_id, address)) is None:
                send(address, f"Campaign {campaign_id}")
                session.merge(Sent(campaign_id=campaign_id, address=address, at=datetime.now()))
                session.commit()
        campaign.state = "done"
        session.commit()


def run_campaign_with_key(campaign_id: int) -> None:
    run_campaign(campaign_id, with_key)


def restart_what_began_long_ago() -> None:
    time.sleep(3 * 3600)
    with Session() as session:
        began = Campaign.started < datetime.now() - timedelta(hours=2)
        slow = session.scalars(select(Campaign.id).where(Campaign.state == "running", began)).all()
    for number in slow:
        run_campaign(number)


def restart_what_does_nothing(send: Send = by_smtp) -> None:
    time.sleep(3 * 3600)
    with Session() as session:
        for campaign in session.scalars(select(Campaign).where(Campaign.state == "running")).all():
            signs = [sent.at for sent in session.scalars(select(Sent).where(Sent.campaign_id == campaign.id))]
            if max([campaign.started, *signs]) < datetime.now() - timedelta(hours=2):
                session.rollback()
                run_campaign(campaign.id, send)


def restart_what_does_nothing_with_key() -> None:
    restart_what_does_nothing(with_key)


def test_slow_is_not_dead(chaos, crashing):
    """BUG-79 (notification-api, mavedb). "The big campaign went out twice, and only the big one."

    The watchdog restarts what has been running for two hours. The rows tell the second one what has been sent, but not
    what is being sent. To look for the last sign of life instead is better, and was taken back again: one mail that
    hangs is enough. (Rows would do for work in the database, where the one that was given up can be refused.)
    """
    refuted(crashing, run_campaign, 1, duplicated="Mailer.send")
    refuted(
        chaos(duplicates=1, crashes=0, rivals=[restart_what_began_long_ago]), run_campaign, 1, duplicated="Mailer.send"
    )
    refuted(
        chaos(duplicates=1, crashes=0, rivals=[restart_what_does_nothing]), run_campaign, 1, duplicated="Mailer.send"
    )

    proven(crashing, run_campaign_with_key, 1)
    proven(chaos(duplicates=1, crashes=0, rivals=[restart_what_does_nothing_with_key]), run_campaign_with_key, 1)


# -- BUG-65: one orphan that cannot be adopted ------------------------------------------------------------------------


def take_and_run(task_id: int) -> None:
    """Nobody delivers it again: an acknowledgement was sent when it was taken. The sweep finds who died."""
    mine = update(Task).where(Task.id == task_id, Task.state == "queued")
    with Session() as session:
        if not session.execute(mine.values(state="running", heard_of=datetime.now())).rowcount:
            return
        session.commit()
        task = session.get_one(Task, task_id)
        session.merge(Result(name=task.name))
        task.state = "done"
        session.commit()


def orphans() -> Select[tuple[Task]]:
    silent = Task.heard_of < datetime.now() - timedelta(minutes=5)
    return select(Task).where(Task.state == "running", silent).order_by(Task.id)


def sweep() -> None:
    time.sleep(10 * 60)
    with Session.begin() as session:
        for task in session.scalars(orphans()).all():
            task.state = "lost"
            session.add(Task(name=task.name, key=task.key))


def sweep_and_hand_over_the_key() -> None:
    time.sleep(10 * 60)
    with Session.begin() as session:
        for task in session.scalars(orphans()).all():
            key, task.state, task.key = task.key, "lost", None
            session.flush()
            session.add(Task(name=task.name, key=key))


def run_the_queue() -> None:
    with Session() as session:
        waiting = session.scalars(select(Task.id).where(Task.state == "queued").order_by(Task.id)).all()
    for number in waiting:
        take_and_run(number)


def test_an_orphan_that_cannot_be_adopted(crashing):
    """BUG-65 (hyrex). "One worker died, and since then nobody's tasks come back: UNIQUE constraint failed."

    The sweep puts a copy into the queue, with the key of the one that is lost; a key may be there once. And all are
    swept in one transaction, so that those without a key stay where they are as well. The key belongs to the copy.
    """
    # Which rows a task has needed is nobody's business: what counts is that its result is there.
    twice = "(sqlite3.IntegrityError) UNIQUE constraint failed: tasks.key"
    swept = crashing(then=[sweep, run_the_queue], volatile=["tasks"])
    refuted(swept, take_and_run, 1, stuck=f"sweep: IntegrityError: {twice}")
    swept = crashing(then=[sweep_and_hand_over_the_key, run_the_queue], volatile=["tasks"])
    proven(swept, take_and_run, 1)
