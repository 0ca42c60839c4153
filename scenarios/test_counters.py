"""Counters: adding is the one thing that can never be repeated, setting is the one that always can."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import proven, refuted
from scenarios.shop import Session, redis, save


class Base(DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customers"
    id: Mapped[int] = mapped_column(primary_key=True)
    points: Mapped[int]


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int]
    points: Mapped[int]


class Credited(Base):
    """Orders whose points have been given."""

    __tablename__ = "credited"
    order_id: Mapped[int] = mapped_column(primary_key=True)


def arrange() -> None:
    save(
        Customer(id=1, points=30),
        Order(id=1, customer_id=1, points=30),
        Order(id=2, customer_id=1, points=10),
    )
    redis.set("points:1", 30)


# -- S25 in the database ----------------------------------------------------------------------------------------------


def add_points(order_id: int) -> None:
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        customer = session.get_one(Customer, order.customer_id)
        customer.points = Customer.points + order.points


def set_points(order_id: int) -> None:
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        customer = session.get_one(Customer, order.customer_id)
        total = select(func.sum(Order.points)).where(Order.customer_id == customer.id)
        customer.points = session.scalar(total) or 0


def add_points_once(order_id: int) -> None:
    with Session.begin() as session:
        if session.get(Credited, order_id):
            return
        order = session.get_one(Order, order_id)
        customer = session.get_one(Customer, order.customer_id)
        customer.points = Customer.points + order.points
        session.add(Credited(order_id=order_id))


def test_a_sum_in_the_database(chaos):
    """S25. "Nobody complains about points. They only wonder in accounting, a year later."

    Adding depends on what is there, which a redelivery has changed already. Computing the end state from the orders
    does not. Where the sum must be added, a note of it goes into the same transaction.
    """
    refuted(chaos, add_points, 2, changed="customers")
    proven(chaos, set_points, 2)
    proven(chaos, add_points_once, 2)


# -- S25 in Redis -----------------------------------------------------------------------------------------------------


def incr_points(order_id: int) -> None:
    redis.incrby("points:1", 10)


def incr_points_then_note(order_id: int) -> None:
    if redis.exists(f"credited:{order_id}"):
        return
    redis.incrby("points:1", 10)
    redis.set(f"credited:{order_id}", 1)


def note_then_incr_points(order_id: int) -> None:
    if redis.set(f"credited:{order_id}", 1, nx=True):
        redis.incrby("points:1", 10)


def incr_points_and_note_together(order_id: int) -> None:
    if redis.exists(f"credited:{order_id}"):
        return
    with redis.pipeline(transaction=True) as both:
        both.incrby("points:1", 10)
        both.set(f"credited:{order_id}", 1)
        both.execute()


def points_by_order(order_id: int) -> None:
    redis.hset("points by order:1", str(order_id), 10)


def test_a_sum_in_redis(chaos, crashing, racing, both):
    """S25. The same in Redis, "where INCR is atomic". It is, and so are two of them.

    A note in a second command is torn off by a crash; MULTI keeps both together, and does not include the look, so that
    two at a time both add. Or there is no sum at all: whoever reads it adds up what is known of each order, and writing
    that down twice is writing it down.
    """
    refuted(chaos, incr_points, 2, changed="redis points:1")
    refuted(chaos, incr_points_then_note, 2, changed="redis points:1")
    refuted(chaos, note_then_incr_points, 2, lost="redis points:1")
    proven(crashing, incr_points_and_note_together, 2)
    refuted(racing, incr_points_and_note_together, 2, changed="redis points:1")
    proven(both, points_by_order, 2)
