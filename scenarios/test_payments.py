"""Payments: money moves at a provider, which no rollback reaches. Only the provider can recognise a repeated charge."""

from __future__ import annotations

import uuid

import pytest
from sqlalchemy import update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import proven, refuted
from scenarios.shop import Session, payments, save


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    cents: Mapped[int]
    paid: Mapped[bool] = mapped_column(default=False)
    attempts: Mapped[int] = mapped_column(default=0)
    payment_key: Mapped[str | None]


def arrange() -> None:
    save(Order(id=1, cents=4200))


@pytest.fixture(autouse=True)
def provider(chaos):
    """Honours keys: equal calls with an equal key count once, calls without a key count every time."""
    return chaos.watch(payments, "charge", key="key")


# -- S7, S8: a key ----------------------------------------------------------------------------------------------------


def charge_without_key(order_id: int) -> None:
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        payments.charge(order.id, order.cents)
        order.paid = True


def charge_with_stable_key(order_id: int) -> None:
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        payments.charge(order.id, order.cents, key=f"order-{order.id}")
        order.paid = True


def test_a_charge_without_a_key(chaos, provider):
    """S7, S8. "The card was charged, then our pod was evicted before it could write that down. So it charged again."

    A key made from the order is the same in every attempt, and the provider answers the second call from memory.
    """
    refuted(chaos, charge_without_key, 1, duplicated="Payments.charge")
    proven(chaos, charge_with_stable_key, 1)
    assert [call.key for call in provider.calls] == ["order-1"]


# -- S9: where the key comes from -------------------------------------------------------------------------------------


def charge_with_key_of_the_attempt(order_id: int) -> None:
    key = str(uuid.uuid4())
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        if order.paid:
            return
        payments.charge(order.id, order.cents, key=key)
        order.paid = True


def charge_with_stored_key(order_id: int) -> None:
    with Session() as session:
        order = session.get_one(Order, order_id)
        if order.payment_key is None:
            order.payment_key = str(uuid.uuid4())
            session.commit()
        payments.charge(order.id, order.cents, key=order.payment_key)
        order.paid = True
        session.commit()


def charge_with_key_stored_once(order_id: int) -> None:
    unkeyed = update(Order).where(Order.id == order_id, Order.payment_key.is_(None))
    with Session() as session:
        session.execute(unkeyed.values(payment_key=str(uuid.uuid4())))
        session.commit()
        order = session.get_one(Order, order_id)
        payments.charge(order.id, order.cents, key=order.payment_key)
        order.paid = True
        session.commit()


def test_a_key_that_is_new_on_every_attempt(chaos, crashing, racing, both):
    """S9. "We do send an idempotency key." It was drawn in the job, so every attempt had one of its own.

    A random key is fine if it is committed before it is used: then the next attempt finds it. Two at a time both find
    none, unless it is stored only where there is none, and read again.
    """
    refuted(chaos, charge_with_key_of_the_attempt, 1, duplicated="Payments.charge")
    proven(crashing, charge_with_stored_key, 1)
    refuted(racing, charge_with_stored_key, 1, duplicated="Payments.charge")
    proven(both, charge_with_key_stored_once, 1)


# -- S14: a guard -----------------------------------------------------------------------------------------------------


def charge_unless_paid(order_id: int) -> None:
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        if order.paid:
            return
        payments.charge(order.id, order.cents)
        order.paid = True


def charge_unless_paid_with_stable_key(order_id: int) -> None:
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        if order.paid:
            return
        payments.charge(order.id, order.cents, key=f"order-{order.id}")
        order.paid = True


def test_a_charge_guarded_by_paid(chaos):
    """S14. "It checks `paid` first, how can it charge twice?" Because between the charge and `paid` a process can die.

    The guard saves a call, the key saves the customer. (A provider forgets its keys after a day; then the guard helps.)
    """
    refuted(chaos, charge_unless_paid, 1, duplicated="Payments.charge")
    proven(chaos, charge_unless_paid_with_stable_key, 1)


# -- one key, two payloads --------------------------------------------------------------------------------------------


def charge_with_a_fee_for_retries(order_id: int) -> None:
    with Session() as session:
        order = session.get_one(Order, order_id)
        if order.paid:
            return
        order.attempts += 1
        session.commit()
        payments.charge(order.id, order.cents + 10 * order.attempts, key=f"order-{order.id}")
        order.paid = True
        session.commit()


def test_one_key_for_two_payloads(chaos):
    """A key promises that the request is the same. Providers refuse a known key with other parameters, or charge again.

    The amount must come from the order alone; what depends on the attempt must not enter a request that has a key.
    """
    refuted(chaos, charge_with_a_fee_for_retries, 1, changed="Payments.charge")
