"""Outbox: rows that a relay hands to a broker. The broker and the database still do not share a transaction."""

from __future__ import annotations

import logging

import pytest
from sqlalchemy import select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import proven, refuted
from scenarios.shop import Session, queue, redis, save

log = logging.getLogger(__name__)


class Base(DeclarativeBase):
    pass


class Message(Base):
    __tablename__ = "outbox"
    id: Mapped[int] = mapped_column(primary_key=True)
    topic: Mapped[str]
    body: Mapped[str]


def arrange() -> None:
    save(Message(id=1, topic="orders", body="created"), Message(id=2, topic="orders", body="paid"))


@pytest.fixture(autouse=True)
def broker(chaos):
    """Its consumers deduplicate on the key."""
    chaos.watch(queue, "publish", result=None, key="key")


class ArchivedBefore(Exception):
    """The archive keeps what it has."""


def archive(message: Message) -> None:
    """A hook that runs after each message: to a store of its own, write once."""
    if not redis.set(f"archive:{message.id}", message.body, nx=True):
        raise ArchivedBefore(message.id)


def relay() -> None:
    with Session() as session:
        for message in session.scalars(select(Message).order_by(Message.id)).all():
            try:
                queue.publish(message.topic, message.body)
                archive(message)
                session.delete(message)
                session.commit()
            except Exception:
                session.rollback()
                log.warning("will retry")


def relay_with_key() -> None:
    with Session() as session:
        for message in session.scalars(select(Message).order_by(Message.id)).all():
            try:
                queue.publish(message.topic, message.body, key=f"outbox-{message.id}")
                archive(message)
                session.delete(message)
                session.commit()
            except Exception:
                session.rollback()
                log.warning("will retry")


def relay_with_key_and_hook_apart() -> None:
    with Session() as session:
        for message in session.scalars(select(Message).order_by(Message.id)).all():
            queue.publish(message.topic, message.body, key=f"outbox-{message.id}")
            try:
                archive(message)
            except ArchivedBefore:
                pass  # by an earlier delivery, which died before the commit
            session.delete(message)
            session.commit()


def test_a_relay_with_a_hook(chaos):
    """BUG-03 (scs-outbox). "The relay publishes the same row on every cycle, all night, one warning each."

    Died between publish and commit: published again. Died after the archive hook: from now on the hook raises about its
    own leftovers, the catch-all rolls back the delete, and the row stays for ever. A key on the message cures the first
    and hides the second; the twin also lets nothing stand between a published message and its deletion.
    """
    refuted(chaos, relay, duplicated="Queue.publish")
    refuted(chaos, relay_with_key, lost="outbox")
    proven(chaos, relay_with_key_and_hook_apart)
