"""The test that everybody writes for an idempotent job, and what it does not see."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import fresh_world, proven, refuted
from scenarios.shop import Session, keyed_mailer, mailer, save


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    shipped: Mapped[bool] = mapped_column(default=True)
    notified: Mapped[bool] = mapped_column(default=False)


def arrange() -> None:
    save(Order(id=1))


def notify_of_shipping(order_id: int) -> None:
    with Session() as session:
        order = session.get_one(Order, order_id)
        if not order.shipped or order.notified:
            return
        mailer.send("ann@example.com", f"Order {order.id} is on its way")
        order.notified = True
        session.commit()


def notify_of_shipping_with_key(order_id: int) -> None:
    with Session() as session:
        order = session.get_one(Order, order_id)
        if not order.shipped or order.notified:
            return
        keyed_mailer.send("ann@example.com", f"Order {order.id} is on its way", key=f"shipped-{order.id}")
        order.notified = True
        session.commit()


def test_run_it_twice_and_count():
    """S18, the classical test. It passes: the second run begins after the first has *ended*."""
    fresh_world(notify_of_shipping)
    mailer.sent.clear()
    notify_of_shipping(1)
    notify_of_shipping(1)
    assert mailer.sent == ["ann@example.com: Order 1 is on its way"]
    with Session() as session:
        assert session.scalar(select(Order.notified))


def test_crash_it_everywhere_and_count(chaos):
    """S18. The same job, refuted: the process dies between the mail and the commit, and the next one sends again.

    Raising an exception in a test does not show it either, if it is raised before or after the job and not inside.
    """
    chaos.watch(mailer, "send", result=None)
    chaos.watch(keyed_mailer, "send", result=None, key="key")
    report = refuted(chaos, notify_of_shipping, 1, duplicated="Mailer.send")
    first, second = report.findings[0].timeline
    assert (first.end, first.steps[-1].kind) == ("crashed", "call")
    assert second.end == "completed"
    proven(chaos, notify_of_shipping_with_key, 1)
