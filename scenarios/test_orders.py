"""Orders: two jobs that are meant to run one after the other, in queues that promise no such thing."""

from __future__ import annotations

import pytest
from sqlalchemy import update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import later, proven, refuted
from scenarios.shop import Session, keyed_mailer, mailer, save


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    shipped: Mapped[bool] = mapped_column(default=False)
    notified: Mapped[bool] = mapped_column(default=False)


class ShippedOrder(Base):
    """The same, on its way already."""

    __tablename__ = "shipped_orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    shipped: Mapped[bool] = mapped_column(default=True)
    notified: Mapped[bool] = mapped_column(default=False)


class NotYet(Exception):
    """What comes before has not come yet: try again later."""


def arrange() -> None:
    save(Order(id=1), ShippedOrder(id=1))


@pytest.fixture(autouse=True)
def outside(chaos):
    chaos.watch(mailer, "send", result=None)
    chaos.watch(keyed_mailer, "send", result=None, key="key")


def ship(order_id: int) -> None:
    with Session.begin() as session:
        session.execute(update(Order).where(Order.id == order_id).values(shipped=True))


def notify_if_shipped(order_id: int) -> None:
    with Session() as session:
        order = session.get_one(ShippedOrder, order_id)
        if not order.shipped or order.notified:
            return
        mailer.send("ann@example.com", "On its way")
        order.notified = True
        session.commit()


def notify_if_shipped_with_key(order_id: int) -> None:
    with Session() as session:
        order = session.get_one(Order, order_id)
        if not order.shipped or order.notified:
            return
        keyed_mailer.send("ann@example.com", "On its way", key=f"shipped-{order_id}")
        order.notified = True
        session.commit()


def notify_once_shipped(order_id: int) -> None:
    with Session() as session:
        order = session.get_one(Order, order_id)
        if order.notified:
            return
        if not order.shipped:
            raise NotYet(order_id)
        keyed_mailer.send("ann@example.com", "On its way", key=f"shipped-{order_id}")
        order.notified = True
        session.commit()


def test_a_notice_of_shipping(crashing, racing):
    """S16. "Return unless shipped, return if notified, send, mark": it is the example of a *good* job in its article.

    It is safe from being run twice in a row, and from nothing else. Killed between mail and mark it sends again; two at
    the same time both send.
    """
    refuted(crashing, notify_if_shipped, 1, duplicated="Mailer.send")
    refuted(racing, notify_if_shipped, 1, duplicated="Mailer.send")


def test_the_notice_is_faster_than_the_parcel(chaos):
    """S16. The job that ships has been enqueued first, and the notice is done first. Not shipped, so it *returns*.

    That is an acknowledgement: nobody will tell the customer. `Not yet` is no reason to be done; raise, and come again.
    """
    in_any_order = later(chaos, siblings=[(ship, (1,))], order=True)
    refuted(in_any_order, notify_if_shipped_with_key, 1, reordered="KeyedMailer.send", crashes=0)
    proven(in_any_order, notify_once_shipped, 1)
