"""One job of two effects, and how many guards it needs."""

from __future__ import annotations

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import proven, refuted
from scenarios.shop import Session, keyed_mailer, save


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    label: Mapped[str | None]
    notified: Mapped[bool] = mapped_column(default=False)


def arrange() -> None:
    save(Order(id=1))


def attach_label_and_notify(order_id: int) -> None:
    with Session() as session:
        order = session.get_one(Order, order_id)
        if order.label is not None:
            return
        order.label = f"label of {order.id}"
        session.commit()
        keyed_mailer.send("ann@example.com", "Your label", key=f"label-{order.id}")


def attach_label_and_notify_each_guarded(order_id: int) -> None:
    with Session() as session:
        order = session.get_one(Order, order_id)
        if order.label is None:
            order.label = f"label of {order.id}"
            session.commit()
        if not order.notified:
            keyed_mailer.send("ann@example.com", "Your label", key=f"label-{order.id}")
            order.notified = True
            session.commit()


def test_attach_then_notify(chaos):
    """S23. "The label is there, so the job returns. Nobody was told that it is there."

    A guard says that *its* step was done. Used for the whole job it skips whatever came after that step. With a guard
    for each step a redelivery goes on where the last one stopped, and the key covers the moment between mail and mark.
    """
    chaos.watch(keyed_mailer, "send", result=None, key="key")
    refuted(chaos, attach_label_and_notify, 1, lost="KeyedMailer.send")
    proven(chaos, attach_label_and_notify_each_guarded, 1)
