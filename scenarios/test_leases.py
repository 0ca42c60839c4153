"""Locks that end by themselves: the holder may be dead, or merely slow, and nobody can tell the two apart."""

from __future__ import annotations

import time
import uuid
from datetime import datetime, timedelta

import pytest
from redis.exceptions import WatchError
from sqlalchemy import select, update
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import proven, refuted
from scenarios.shop import Session, redis, save


class Base(DeclarativeBase):
    pass


class Invoice(Base):
    __tablename__ = "invoices"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int]


class Lease(Base):
    """Who holds it may work until then; `done` when the work is done."""

    __tablename__ = "leases"
    key: Mapped[str] = mapped_column(primary_key=True)
    until: Mapped[datetime]
    done: Mapped[bool] = mapped_column(default=False)


class Enrolment(Base):
    __tablename__ = "enrolments"
    id: Mapped[int] = mapped_column(primary_key=True)
    person_id: Mapped[int]


class UniqueEnrolment(Base):
    __tablename__ = "unique_enrolments"
    id: Mapped[int] = mapped_column(primary_key=True)
    person_id: Mapped[int] = mapped_column(unique=True)


class Busy(Exception):
    """The lock is taken: not done, try again later."""


def arrange() -> None:
    redis.set("pending:home", 3)
    redis.set("free", 1)
    save(Lease(key="bill-1", until=datetime(2020, 1, 1)))


@pytest.fixture
def three(chaos):
    """Three deliveries at the same time, and nothing else goes wrong."""
    return chaos(duplicates=3, crashes=0, faults=False)


@pytest.fixture
def slow(chaos):
    """Two deliveries at the same time. Nothing goes wrong, but work may take longer than any lock holds."""
    return chaos(duplicates=2, crashes=0, faults=False, late="slow")


def move_hits(page: str) -> None:
    """Right one after the other, however often: what has been moved is pending no more. Wrong two at a time."""
    if hits := redis.get(f"pending:{page}"):
        with redis.pipeline(transaction=True) as both:
            both.incrby(f"hits:{page}", int(hits))
            both.delete(f"pending:{page}")
            both.execute()


RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"
"""Delete the lock if it is ours: compared and deleted in one."""


# -- S27: an expiry that is shorter than the work ---------------------------------------------------------------------


def move_hits_slowly_under(seconds: int) -> None:
    if not redis.set("lock:home", "me", nx=True, ex=seconds):
        raise Busy
    try:
        hits = redis.get("pending:home")
        time.sleep(90)  # ask a slow service
        if hits:
            with redis.pipeline(transaction=True) as both:
                both.incrby("hits:home", int(hits))
                both.delete("pending:home")
                both.execute()
    finally:
        redis.delete("lock:home")


def test_an_expiry_that_is_shorter_than_the_work(crashing, racing):
    """S27. "The lock expires after a minute. The service was slow that day, and needed a minute and a half."

    The first one is still at work when its lock ends, and the second one begins. The expiry must be longer than the
    work can take, and everybody has to wait that long after a crash. No crash is needed to see the fault, and crashes
    alone do not show it.
    """
    proven(crashing, move_hits_slowly_under, 60)
    refuted(racing, move_hits_slowly_under, 60, changed="redis hits:home")
    proven(racing, move_hits_slowly_under, 600)


# -- BUG-46: the loser unlocks ----------------------------------------------------------------------------------------


def move_hits_or_leave(page: str) -> None:
    ours = redis.set(f"lock:{page}", 1, nx=True, ex=600)
    try:
        if ours:
            move_hits(page)
    finally:
        redis.delete(f"lock:{page}")


def move_hits_or_raise(page: str) -> None:
    if not redis.set(f"lock:{page}", 1, nx=True, ex=600):
        raise Busy(page)
    try:
        move_hits(page)
    finally:
        redis.delete(f"lock:{page}")


def test_the_loser_unlocks(crashing, racing, three):
    """BUG-46 (the task cookbook of celery). "Only one at a time, says the recipe. We have seen two."

    The second finds the lock taken, leaves, and its `finally` deletes the lock of the first. The third finds no lock.
    Two deliveries are not enough to see that. (And whoever leaves without an error has acknowledged the message, so
    that nobody is left when the first one dies.)
    """
    refuted(crashing, move_hits_or_leave, "home", lost="redis hits:home")
    proven(racing, move_hits_or_leave, "home")
    refuted(three, move_hits_or_leave, "home", changed="redis hits:home")

    proven(crashing, move_hits_or_raise, "home")
    proven(three, move_hits_or_raise, "home")


# -- BUG-47: the lock ends before the work ----------------------------------------------------------------------------


def move_hits_under_token(page: str) -> None:
    token = str(uuid.uuid4())
    if not redis.set(f"lock:{page}", token, nx=True, ex=60):
        raise Busy(page)
    try:
        move_hits(page)
    finally:
        redis.eval(RELEASE, 1, f"lock:{page}", token)


def move_hits_if_still_pending(page: str) -> None:
    with redis.pipeline() as both:
        both.watch(f"pending:{page}")
        if hits := both.get(f"pending:{page}"):
            both.multi()
            both.incrby(f"hits:{page}", int(hits))
            both.delete(f"pending:{page}")
            try:
                both.execute()
            except WatchError:
                raise Busy(page) from None


def test_the_lock_ends_before_the_work(both, slow):
    """BUG-47 (celery, sentry). "The flush took longer than its lock, and then every flush overlapped the next one."

    Who finishes late deletes a lock that is not its own any more, and lets in a third. A token heals the chain, but not
    the first overlap: an expired lock protects nothing. What can be late must be conditional where it writes: `WATCH`
    refuses the MULTI of whoever has been overtaken, and then no lock is needed.
    """
    proven(both, move_hits_or_raise, "home")
    refuted(slow, move_hits_or_raise, "home", changed="redis hits:home")

    proven(both, move_hits_under_token, "home")
    refuted(slow, move_hits_under_token, "home", changed="redis hits:home")

    proven(both, move_hits_if_still_pending, "home")
    proven(slow, move_hits_if_still_pending, "home")


# -- S26: a reservation with an end -----------------------------------------------------------------------------------


def bill_under_a_lease(order_id: int) -> None:
    if not redis.set(f"billing:{order_id}", "reserved", nx=True, ex=600):
        raise Busy(order_id)
    with Session.begin() as session:
        if session.scalar(select(Invoice).where(Invoice.order_id == order_id)) is None:
            session.add(Invoice(order_id=order_id))
    redis.delete(f"billing:{order_id}")


def bill_while_the_lease_lasts(order_id: int) -> None:
    now = datetime.now()
    lease = update(Lease).where(Lease.key == f"bill-{order_id}", Lease.done.is_(False))
    with Session() as session:
        if session.scalar(select(Lease.done).where(Lease.key == f"bill-{order_id}")):
            return
        if not session.execute(lease.where(Lease.until < now).values(until=now + timedelta(minutes=10))).rowcount:
            raise Busy(order_id)
        session.commit()
        session.add(Invoice(order_id=order_id))
        session.execute(lease.values(done=True))
        session.commit()


def bill_if_the_lease_is_still_ours(order_id: int) -> None:
    now = datetime.now()
    until = now + timedelta(minutes=10)
    lease = update(Lease).where(Lease.key == f"bill-{order_id}", Lease.done.is_(False))
    with Session() as session:
        if session.scalar(select(Lease.done).where(Lease.key == f"bill-{order_id}")):
            return
        if not session.execute(lease.where(Lease.until < now).values(until=until)).rowcount:
            raise Busy(order_id)
        session.commit()
        if not session.execute(lease.where(Lease.until == until).values(done=True)).rowcount:
            raise Busy(order_id)  # somebody else thought that we were dead
        session.add(Invoice(order_id=order_id))
        session.commit()


def test_a_reservation_with_an_end(both, slow):
    """S26. "The reservation is given back after ten minutes, in case the worker is dead. It was only swapping."

    The one that was taken for dead has looked for an invoice before it fell asleep, found none, and goes on from there
    when it wakes up. A lease that is checked once more *in the transaction of the work* refuses whoever has lost it.
    """
    proven(both, bill_under_a_lease, 1)
    refuted(slow, bill_under_a_lease, 1, duplicated="invoices")

    # A lease in a row: the check has to be told which column that is.
    slow = slow(leases=["leases.until"])
    refuted(slow, bill_while_the_lease_lasts, 1, duplicated="invoices")

    # A lease that is taken anew has another end: with any number of crashes there is no end of states.
    proven(both(crashes=2), bill_if_the_lease_is_still_ours, 1)
    proven(slow, bill_if_the_lease_is_still_ours, 1)


# -- BUG-49: a guard that was not given back --------------------------------------------------------------------------

A_DAY = 24 * 3600


def enrol_unless_running(person_id: int) -> None:
    if redis.get(f"enrol:{person_id}"):
        return
    redis.set(f"enrol:{person_id}", 1, ex=A_DAY)
    with Session.begin() as session:
        if session.scalar(select(Enrolment).where(Enrolment.person_id == person_id)) is None:
            session.add(Enrolment(person_id=person_id))
    redis.delete(f"enrol:{person_id}")


def enrol_or_raise(person_id: int) -> None:
    if not redis.set(f"enrol:{person_id}", 1, nx=True, ex=60):
        raise Busy(person_id)
    with Session.begin() as session:
        session.execute(insert(UniqueEnrolment).values(person_id=person_id).on_conflict_do_nothing())
    redis.delete(f"enrol:{person_id}")


def test_a_guard_that_was_not_given_back(crashing, racing, both, slow):
    """BUG-49 (unicef/hope). "The worker ran out of memory. All retries report success, and nobody was enrolled."

    The copy takes the guard of the dead for somebody at work, returns, and that is an acknowledgement. When the guard
    ends, a day later, there is no message left. And it is no guard: between GET and SET another one gets in. Take it
    in one command, keep it briefly, raise; and let an index make sure, for a lock is a courtesy.
    """
    refuted(crashing, enrol_unless_running, 7, lost="enrolments")
    refuted(racing, enrol_unless_running, 7, duplicated="enrolments")

    proven(both, enrol_or_raise, 7)
    proven(slow, enrol_or_raise, 7)


# -- BUG-51: a semaphore ----------------------------------------------------------------------------------------------


def work_if_there_is_room(page: str) -> None:
    if redis.decr("free") < 0:
        redis.incr("free")
        raise Busy(page)
    try:
        move_hits(page)
    finally:
        redis.incr("free")


ENTER = """
redis.call('zremrangebyscore', KEYS[1], '-inf', ARGV[2])
if redis.call('zcard', KEYS[1]) >= 1 then return 0 end
return redis.call('zadd', KEYS[1], ARGV[2] + 60, ARGV[1])
"""
"""Forget who has been in for more than a minute; go in if there is room."""


def work_if_we_can_get_in(page: str) -> None:
    me = str(uuid.uuid4())
    if not redis.eval(ENTER, 1, "inside", me, int(time.time())):
        raise Busy(page)
    try:
        move_hits(page)
    finally:
        redis.zrem("inside", me)


def test_a_semaphore(crashing, racing):
    """BUG-51 (solid_queue, redis-rate-limiters). "The limit is one. After some months of deploys it was none."

    A number does not know who has taken what: the place of a dead process is never given back. (Or it is given back
    twice, by the reaper and by the one that was not dead: test_rivals.py.) Names with a date can be forgotten one by
    one, and leaving twice is leaving.
    """
    refuted(crashing, work_if_there_is_room, "home", stuck="Busy: home")
    proven(racing, work_if_there_is_room, "home")

    proven(crashing, work_if_we_can_get_in, "home")
    proven(racing, work_if_we_can_get_in, "home")
