"""Locking that is right: two deliveries at a time, in every order of their steps, each killed anywhere. All proven.

And each of them spoiled by one change, to see that the proof depends on what it should depend on. The work is the same
everywhere: an order is credited to its customer once. Adding is the worst thing to do twice.
"""

from __future__ import annotations

import uuid

import pytest
from sqlalchemy import Engine, create_engine, event, select, update
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker
from sqlalchemy.orm import Session as OrmSession

from scenarios.conftest import proven, refuted
from scenarios.shop import Session, redis, save


class Base(DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customers"
    id: Mapped[int] = mapped_column(primary_key=True)
    points: Mapped[int] = mapped_column(default=0)


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(default="new")


class Credit(Base):
    """What was credited: one for an order."""

    __tablename__ = "credits"
    order_id: Mapped[int] = mapped_column(primary_key=True)


class LooseCredit(Base):
    """The same without the index."""

    __tablename__ = "loose_credits"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int]


class Busy(Exception):
    """The lock is taken: not done, try again later."""


Immediate = sessionmaker()
"""Every transaction begins with BEGIN IMMEDIATE."""

Deferred = sessionmaker()
"""Every transaction begins with BEGIN, before it reads."""


def arrange() -> None:
    save(Customer(id=1), Order(id=1))


def engine_that_begins_with(statement: str, url: object) -> Engine:
    """The recipe of SQLAlchemy's documentation: pysqlite itself begins a transaction only before it writes."""
    engine = create_engine(str(url))

    @event.listens_for(engine, "connect")
    def leave_begin_to_us(connection, record):
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection):
        connection.exec_driver_sql(statement)

    return engine


@pytest.fixture(autouse=True)
def engines(chaos):
    made = []
    for maker, statement in ((Immediate, "BEGIN IMMEDIATE"), (Deferred, "BEGIN")):
        engine = engine_that_begins_with(statement, chaos.sql.url)
        maker.configure(bind=engine)
        made.append(engine)
    yield
    for engine in made:
        engine.dispose()


def add_points(session: OrmSession) -> None:
    session.execute(update(Customer).where(Customer.id == 1).values(points=Customer.points + 10))


# -- BEGIN IMMEDIATE --------------------------------------------------------------------------------------------------


def credit_immediate(order_id: int) -> None:
    with Immediate.begin() as session:
        order = session.get_one(Order, order_id)
        if order.status == "credited":
            return
        add_points(session)
        order.status = "credited"


def credit_deferred(order_id: int) -> None:
    with Deferred.begin() as session:
        order = session.get_one(Order, order_id)
        if order.status == "credited":
            return
        add_points(session)
        order.status = "credited"


def credit_without_begin(order_id: int) -> None:
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        if order.status == "credited":
            return
        add_points(session)
        order.status = "credited"


def credit_immediate_after_a_look(order_id: int) -> None:
    with Immediate.begin() as session:
        if session.get_one(Order, order_id).status == "credited":
            return
    with Immediate.begin() as session:
        add_points(session)
        session.get_one(Order, order_id).status = "credited"


def credit_immediate_without_a_look(order_id: int) -> None:
    with Immediate.begin() as session:
        add_points(session)
        session.get_one(Order, order_id).status = "credited"


def test_begin_immediate(crashing, racing, both):
    """The write lock is taken before the first read: who comes second reads what the first has written.

    A plain BEGIN is as right on SQLite. Both read, and the one that wants to write second is refused ("database is
    locked"), raises, and is delivered again. What pysqlite does by itself, to begin before the first *write* only,
    protects no read.
    """
    proven(both, credit_immediate, 1)
    proven(both, credit_deferred, 1)

    proven(crashing, credit_without_begin, 1)
    refuted(racing, credit_without_begin, 1, changed="customers")
    proven(crashing, credit_immediate_after_a_look, 1)
    refuted(racing, credit_immediate_after_a_look, 1, changed="customers")
    refuted(crashing, credit_immediate_without_a_look, 1, changed="customers")


# -- a unique index ---------------------------------------------------------------------------------------------------


def credit_or_catch(order_id: int) -> None:
    with Session() as session:
        session.add(Credit(order_id=order_id))
        try:
            session.flush()
        except IntegrityError:
            session.rollback()
            session.get_one(Credit, order_id)  # it is there, and so are its points
            return
        add_points(session)
        session.commit()


def credit_unless_in_conflict(order_id: int) -> None:
    with Session.begin() as session:
        if session.execute(insert(Credit).values(order_id=order_id).on_conflict_do_nothing()).rowcount:
            add_points(session)


def credit_without_index(order_id: int) -> None:
    with Session.begin() as session:
        if session.scalar(select(LooseCredit).where(LooseCredit.order_id == order_id)) is None:
            session.add(LooseCredit(order_id=order_id))
            add_points(session)


def credit_whatever_the_conflict(order_id: int) -> None:
    with Session.begin() as session:
        session.execute(insert(Credit).values(order_id=order_id).on_conflict_do_nothing())
        add_points(session)


def credit_after_the_row_is_committed(order_id: int) -> None:
    with Session.begin() as session:
        new = session.execute(insert(Credit).values(order_id=order_id).on_conflict_do_nothing()).rowcount
    if new:
        with Session.begin() as session:
            add_points(session)


@pytest.mark.parametrize("job", [credit_or_catch, credit_unless_in_conflict])
def test_a_unique_index(both, job):
    """The index decides who is first, and the effect is in the same transaction as the decision."""
    proven(both, job, 1)


def test_a_unique_index_spoiled(crashing, racing):
    """No index; no attention to what it says; the effect in another transaction."""
    proven(crashing, credit_without_index, 1)
    refuted(racing, credit_without_index, 1, duplicated="loose_credits")  # and the points

    refuted(crashing, credit_whatever_the_conflict, 1, changed="customers")
    refuted(racing, credit_whatever_the_conflict, 1, changed="customers")

    proven(racing, credit_after_the_row_is_committed, 1)
    refuted(crashing, credit_after_the_row_is_committed, 1, lost="customers")


# -- compare and set --------------------------------------------------------------------------------------------------


def credit_if_new(order_id: int) -> None:
    new = update(Order).where(Order.id == order_id, Order.status == "new")
    with Session.begin() as session:
        if session.execute(new.values(status="credited")).rowcount:
            add_points(session)


def credit_whatever_the_count(order_id: int) -> None:
    new = update(Order).where(Order.id == order_id, Order.status == "new")
    with Session.begin() as session:
        session.execute(new.values(status="credited"))
        add_points(session)


def credit_if_it_was_new(order_id: int) -> None:
    with Session() as session:
        is_new = session.scalar(select(Order.status).where(Order.id == order_id)) == "new"
        session.commit()
        if is_new:
            session.execute(update(Order).where(Order.id == order_id).values(status="credited"))
            add_points(session)
            session.commit()


def credit_after_the_status_is_committed(order_id: int) -> None:
    new = update(Order).where(Order.id == order_id, Order.status == "new")
    with Session() as session:
        count = session.execute(new.values(status="credited")).rowcount
        session.commit()
        if count:
            add_points(session)
            session.commit()


def test_compare_and_set(crashing, racing, both):
    """Condition and change are one statement, the number of rows says who was first, and the effect comes along.

    Spoiled: the number is not looked at; the condition is checked before; the effect is in another transaction.
    """
    proven(both, credit_if_new, 1)

    refuted(crashing, credit_whatever_the_count, 1, changed="customers")
    refuted(racing, credit_whatever_the_count, 1, changed="customers")

    proven(crashing, credit_if_it_was_new, 1)
    refuted(racing, credit_if_it_was_new, 1, changed="customers")

    proven(racing, credit_after_the_status_is_committed, 1)
    refuted(crashing, credit_after_the_status_is_committed, 1, lost="customers")


# -- SET NX PX, a token, and a marker ---------------------------------------------------------------------------------

RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"
"""Delete the lock if it is ours: compared and deleted in one."""


def credit_and_mark(order_id: int) -> None:
    """Points and marker in one MULTI. Safe to repeat, one after the other."""
    if not redis.exists(f"credited:{order_id}"):
        with redis.pipeline(transaction=True) as together:
            together.incrby("points:1", 10)
            together.set(f"credited:{order_id}", 1)
            together.execute()


def credit_under_token(order_id: int) -> None:
    token = str(uuid.uuid4())
    try:
        if not redis.set(f"lock:{order_id}", token, nx=True, px=60_000):
            raise Busy(order_id)
        credit_and_mark(order_id)
    finally:
        redis.eval(RELEASE, 1, f"lock:{order_id}", token)


def credit_and_release_whoever_holds(order_id: int) -> None:
    token = str(uuid.uuid4())
    try:
        if not redis.set(f"lock:{order_id}", token, nx=True, px=60_000):
            raise Busy(order_id)
        credit_and_mark(order_id)
    finally:
        redis.delete(f"lock:{order_id}")


def credit_after_a_look_at_the_marker(order_id: int) -> None:
    token = str(uuid.uuid4())
    if redis.exists(f"credited:{order_id}"):
        return
    try:
        if not redis.set(f"lock:{order_id}", token, nx=True, px=60_000):
            raise Busy(order_id)
        with redis.pipeline(transaction=True) as together:
            together.incrby("points:1", 10)
            together.set(f"credited:{order_id}", 1)
            together.execute()
    finally:
        redis.eval(RELEASE, 1, f"lock:{order_id}", token)


def credit_or_return_if_locked(order_id: int) -> None:
    token = str(uuid.uuid4())
    if not redis.set(f"lock:{order_id}", token, nx=True, px=60_000):
        return
    credit_and_mark(order_id)
    redis.eval(RELEASE, 1, f"lock:{order_id}", token)


def credit_under_eternal_lock(order_id: int) -> None:
    token = str(uuid.uuid4())
    if not redis.set(f"lock:{order_id}", token, nx=True):
        raise Busy(order_id)
    credit_and_mark(order_id)
    redis.eval(RELEASE, 1, f"lock:{order_id}", token)


def test_a_lock_in_redis(chaos, crashing, racing, both):
    """A token, so that nobody releases the lock of another; an expiry, for the dead; a marker, for the next one.

    It holds as long as nobody is slower than the lock (`late`): see test_leases.py for what to do then.
    """
    proven(both, credit_under_token, 1)
    proven(chaos(duplicates=3, crashes=0), credit_under_token, 1)
    refuted(chaos(duplicates=2, crashes=0, late="slow"), credit_under_token, 1, changed="redis points:1")

    proven(crashing, credit_and_mark, 1)
    refuted(racing, credit_and_mark, 1, changed="redis points:1")

    proven(crashing, credit_and_release_whoever_holds, 1)
    refuted(chaos(duplicates=3, crashes=0), credit_and_release_whoever_holds, 1, changed="redis points:1")

    proven(crashing, credit_after_a_look_at_the_marker, 1)
    refuted(racing, credit_after_a_look_at_the_marker, 1, changed="redis points:1")

    proven(racing, credit_or_return_if_locked, 1)
    refuted(crashing, credit_or_return_if_locked, 1, lost="redis credited:1")

    proven(racing, credit_under_eternal_lock, 1)
    refuted(crashing, credit_under_eternal_lock, 1, stuck="Busy: 1")
