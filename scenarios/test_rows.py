"""Rows in the job's own database: the easy case, because a transaction can hold everything."""

from __future__ import annotations

import pytest
from sqlalchemy import ForeignKey, select, update
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import proven, refuted
from scenarios.shop import Session, save


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    cents: Mapped[int]
    status: Mapped[str] = mapped_column(default="new")


class Invoice(Base):
    __tablename__ = "invoices"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"))
    cents: Mapped[int]


class Receipt(Base):
    """An invoice as it should have been: at most one an order, and the database sees to it."""

    __tablename__ = "receipts"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"), unique=True)
    cents: Mapped[int]


class Done(Base):
    """Operations that have been performed, by business key."""

    __tablename__ = "done"
    key: Mapped[str] = mapped_column(primary_key=True)


def arrange() -> None:
    save(Order(id=1, cents=4200))


# -- S1, S2, S3: creating a row ---------------------------------------------------------------------------------------


def create_invoice(order_id: int) -> None:
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        session.add(Invoice(order_id=order_id, cents=order.cents))


def create_invoice_unless_there(order_id: int) -> None:
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        if session.scalar(select(Invoice).where(Invoice.order_id == order_id)) is None:
            session.add(Invoice(order_id=order_id, cents=order.cents))


def create_or_find_receipt(order_id: int) -> None:
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        session.execute(
            insert(Receipt).values(order_id=order_id, cents=order.cents).on_conflict_do_nothing(["order_id"])
        )


def create_receipt_and_catch(order_id: int) -> None:
    with Session() as session:
        order = session.get_one(Order, order_id)
        session.add(Receipt(order_id=order_id, cents=order.cents))
        try:
            session.commit()
        except IntegrityError:
            session.rollback()  # an earlier delivery was faster


def test_a_new_row_on_every_run(chaos):
    """S1. "The worker was killed by the deploy after the commit and before the ack: the customer got two invoices."

    A commit does not acknowledge the message. Between the two lies a boundary, and the job must survive a crash there.
    """
    refuted(chaos, create_invoice, 1, duplicated="invoices")


def test_a_row_unless_it_is_there(crashing, racing):
    """S2. Looking first is enough as long as deliveries come one after the other, and so the guarantee says.

    Two deliveries at the same time both look, both find nothing, and both insert: only an index stops that (S3).
    """
    report = proven(crashing, create_invoice_unless_there, 1)
    assert "one delivery at a time" in report.guarantee
    refuted(racing, create_invoice_unless_there, 1, duplicated="invoices")


@pytest.mark.parametrize("job", [create_or_find_receipt, create_receipt_and_catch])
def test_a_row_under_a_unique_index(both, job):
    """S3. The index remembers for the job, and cannot be forgotten, raced or crashed past."""
    proven(both, job, 1)


# -- S4: a business key ---------------------------------------------------------------------------------------------


def bill_then_note_key(order_id: int) -> None:
    key = f"bill-{order_id}"
    with Session.begin() as session:
        if session.get(Done, key):
            return
        session.add(Invoice(order_id=order_id, cents=4200))
    with Session.begin() as session:
        session.add(Done(key=key))


def note_key_then_bill(order_id: int) -> None:
    key = f"bill-{order_id}"
    with Session.begin() as session:
        if session.get(Done, key):
            return
        session.add(Done(key=key))
    with Session.begin() as session:
        session.add(Invoice(order_id=order_id, cents=4200))


def bill_and_note_key_together(order_id: int) -> None:
    key = f"bill-{order_id}"
    with Session.begin() as session:
        if session.get(Done, key):
            return
        session.add(Done(key=key))
        session.add(Invoice(order_id=order_id, cents=4200))


def test_a_business_key_beside_the_effect(chaos, both):
    """S4. "We do keep a table of what is done. It just was not up to date when the node went away."

    Two transactions can be torn apart: noting the key last bills twice, noting it first bills never. In one transaction
    with the effect, the key is true by construction; and its index refuses whoever has looked too early.
    """
    refuted(chaos, bill_then_note_key, 1, duplicated="invoices")
    refuted(chaos, note_key_then_bill, 1, lost="invoices")
    proven(both, bill_and_note_key_together, 1)


# -- S6: a status and what it stands for ------------------------------------------------------------------------------


def close_order_then_bill(order_id: int) -> None:
    with Session() as session:
        order = session.get_one(Order, order_id)
        if order.status == "closed":
            return
        order.status = "closed"
        session.commit()
        session.add(Invoice(order_id=order_id, cents=order.cents))
        session.commit()


def bill_then_close_order(order_id: int) -> None:
    with Session() as session:
        order = session.get_one(Order, order_id)
        if order.status == "closed":
            return
        session.add(Invoice(order_id=order_id, cents=order.cents))
        session.commit()
        order.status = "closed"
        session.commit()


def close_order_and_bill_together(order_id: int) -> None:
    with Session() as session:
        order = session.get_one(Order, order_id)
        if order.status == "closed":
            return
        order.status = "closed"
        session.add(Invoice(order_id=order_id, cents=order.cents))
        session.commit()


def close_the_open_order_and_bill(order_id: int) -> None:
    still_open = update(Order).where(Order.id == order_id, Order.status != "closed")
    with Session.begin() as session:
        if session.execute(still_open.values(status="closed")).rowcount:
            order = session.get_one(Order, order_id)
            session.add(Invoice(order_id=order_id, cents=order.cents))


def test_a_status_and_what_it_stands_for(chaos, crashing, racing, both):
    """S6. "Closed orders without an invoice, four or five a month, always on the day of a deploy."

    The guard reads the status, so the status must become visible in the same instant as the invoice: one commit. For
    two deliveries at the same time that is not enough, as both have read *new*; let the UPDATE be the guard.
    """
    refuted(chaos, close_order_then_bill, 1, lost="invoices")
    refuted(chaos, bill_then_close_order, 1, duplicated="invoices")
    proven(crashing, close_order_and_bill_together, 1)
    refuted(racing, close_order_and_bill_together, 1, duplicated="invoices")
    proven(both, close_the_open_order_and_bill, 1)
