"""Copies: the queue's patience (its visibility timeout) is shorter than the work, or than the wait for it."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
import requests
from sqlalchemy import select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import proven, refuted
from scenarios.shop import Session, keyed_mailer, mailer, redis, save

STORAGE = "https://storage.test"


class Base(DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "users"
    id: Mapped[int] = mapped_column(primary_key=True)
    signed_up: Mapped[datetime]
    deleted: Mapped[bool] = mapped_column(default=False)
    asked: Mapped[bool] = mapped_column(default=False)


class Channel(Base):
    __tablename__ = "channels"
    id: Mapped[int] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(default=1)


def arrange() -> None:
    save(User(id=1, signed_up=datetime(2024, 3, 1)), Channel(id=1))


@pytest.fixture(autouse=True)
def outside(chaos):
    chaos.watch(mailer, "send", result=None)
    chaos.watch(keyed_mailer, "send", result=None, key="key")
    chaos.http.provider(STORAGE).put("/{name}", status=200)


@pytest.fixture
def three(chaos):
    """Three deliveries at the same time, and nobody dies."""
    return chaos(duplicates=3, crashes=0, faults=False)


# -- BUG-76: once an hour, for four days ------------------------------------------------------------------------------

QUESTION = "How is it going?"


def ask_how_it_goes(user_id: int) -> None:
    with Session() as session:
        if session.get_one(User, user_id).deleted:
            return
    mailer.send(f"user-{user_id}", QUESTION)


def ask_unless_asked(user_id: int) -> None:
    with Session() as session:
        user = session.get_one(User, user_id)
        if user.deleted or user.asked:
            return
        mailer.send(f"user-{user_id}", QUESTION)
        user.asked = True
        session.commit()


def ask_who_is_due() -> None:
    """Run once a day. Nobody waits in the queue for days."""
    with Session() as session:
        due = (User.signed_up < datetime.now() - timedelta(days=4), User.asked.is_(False), User.deleted.is_(False))
        for user in session.scalars(select(User).where(*due).order_by(User.id)).all():
            mailer.send(f"user-{user.id}", QUESTION)
            user.asked = True
            session.commit()


def ask_who_is_claimed() -> None:
    with Session() as session:
        due = (User.signed_up < datetime.now() - timedelta(days=4), User.asked.is_(False), User.deleted.is_(False))
        for number in session.scalars(select(User.id).where(*due).order_by(User.id)).all():
            claim = update(User).where(User.id == number, User.asked.is_(False)).values(asked=True)
            ours = session.execute(claim).rowcount  # type: ignore[attr-defined]
            session.commit()
            if ours:
                mailer.send(f"user-{number}", QUESTION)


def ask_with_key(user_id: int) -> None:
    with Session() as session:
        user = session.get_one(User, user_id)
        if user.deleted or user.asked:
            return
        keyed_mailer.send(f"user-{user_id}", QUESTION, key=f"four-days-{user_id}")
        user.asked = True
        session.commit()


def test_once_an_hour_for_four_days(three, racing, crashing, both):
    """BUG-76 (SourceLair). "A mail for the fourth day. On the fourth day she had it eighty-seven times."

    The message waits in a worker, unacknowledged, and after an hour the queue takes that worker for dead. All copies
    are due at the same moment, so looking before sending does not help. What was done about it is a run a day that
    looks for who is due: no copies any more, but for a second run that begins before the first has ended.
    """
    refuted(three, ask_how_it_goes, 1, duplicated="Mailer.send")
    refuted(three, ask_unless_asked, 1, duplicated="Mailer.send")

    proven(crashing(tolerate=["Mailer.send"]), ask_who_is_due)
    refuted(racing, ask_who_is_due, duplicated="Mailer.send")
    proven(three, ask_who_is_claimed)
    refuted(crashing, ask_who_is_claimed, lost="Mailer.send")

    proven(three, ask_with_key, 1)
    proven(both, ask_with_key, 1)


# -- BUG-77: late or early acknowledgements ---------------------------------------------------------------------------


def put(name: str) -> None:
    requests.put(f"{STORAGE}/{name}", data="all questions", timeout=600).raise_for_status()


def publish(channel_id: int) -> None:
    with Session() as session:
        version = session.get_one(Channel, channel_id).version + 1
        put(f"channel-{channel_id}.db")
        session.execute(update(Channel).where(Channel.id == channel_id).values(version=version))
        session.commit()
    mailer.send("owner", f"Channel {channel_id} is published")


def publish_acknowledged_early(channel_id: int, request: str) -> None:
    """What an early acknowledgement comes to: from here on nobody delivers it again."""
    if redis.set(f"acknowledged:{request}", 1, nx=True):
        publish(channel_id)


def publish_version(channel_id: int, version: int) -> None:
    put(f"channel-{channel_id}-{version}.db")
    with Session.begin() as session:
        older = (Channel.id == channel_id, Channel.version < version)
        session.execute(update(Channel).where(*older).values(version=version))
    keyed_mailer.send("owner", f"Channel {channel_id} is published", key=f"published-{channel_id}-{version}")


def test_late_or_early_acknowledgements(crashing, racing, both):
    """BUG-77 (studio, readthedocs). "Published six times, an hour apart. Since we undid that, deploys lose builds."

    Acknowledged late, the build is handed out again while it runs. Acknowledged early, it is gone with its worker. That
    is a choice between twice and not at all, for as long as "publish" means one version more. "Publish version 2" can
    be done as often as one likes.
    """
    refuted(racing, publish, 1, duplicated="Mailer.send")
    proven(racing, publish_acknowledged_early, 1, "r1")
    refuted(crashing, publish_acknowledged_early, 1, "r1", lost="Mailer.send")

    proven(crashing, publish_version, 1, 2)
    proven(both, publish_version, 1, 2)
