"""What the jobs of this gallery share: a database, a Redis, and the world outside.

The classes below stand for services that cannot be rolled back. Each scenario declares the methods that it uses with
``chaos.watch``: from then on every call that returned counts as an effect at the receiver.
"""

from __future__ import annotations

from collections.abc import Iterable

import fakeredis
from sqlalchemy.orm import DeclarativeBase, sessionmaker

Session = sessionmaker()
"""Bound to the database of each test by conftest.py."""

redis = fakeredis.FakeRedis(server=fakeredis.FakeServer(), decode_responses=True)
"""A client like any other: a check finds it when a job uses it."""


class Mailer:
    """Sends mail. Like SMTP, it does not notice that it has been asked for the same mail before."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def send(self, to: str, subject: str) -> None:
        self.sent.append(f"{to}: {subject}")


class KeyedMailer:
    """A mail provider with an HTTP interface: a key that it knows already is answered, and nothing is sent."""

    def send(self, to: str, subject: str, key: str) -> None: ...


class Payments:
    """Takes money. Whether it honours the key is said where it is watched."""

    def charge(self, order_id: int, cents: int, key: str | None = None) -> str:
        return f"ch_{order_id}"


class Queue:
    """Takes messages for other workers."""

    def publish(self, topic: str, body: str, key: str | None = None) -> None: ...


mailer = Mailer()
keyed_mailer = KeyedMailer()
payments = Payments()
queue = Queue()


def save(*rows: DeclarativeBase) -> None:
    """Put rows into the database before a check."""
    with Session.begin() as session:
        session.add_all(rows)


def by_receiver(rows: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    """Receiver -> ids, in the order of the rows."""
    groups: dict[str, list[int]] = {}
    for receiver, number in rows:
        groups.setdefault(receiver, []).append(number)
    return groups
