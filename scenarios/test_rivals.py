"""Rivals: somebody else at work on the same thing, who is not a job and knows nothing of jobs."""

from __future__ import annotations

import pytest
from sqlalchemy import update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import later, proven, refuted
from scenarios.shop import Session, queue, redis, save


class Base(DeclarativeBase):
    pass


class Company(Base):
    __tablename__ = "companies"
    id: Mapped[int] = mapped_column(primary_key=True)
    logo: Mapped[str | None]


class Busy(Exception):
    """No room: try again later."""


def arrange() -> None:
    save(Company(id=1))
    redis.set("free", 1)
    redis.set("unique:sync", "tick-1")


@pytest.fixture(autouse=True)
def outside(chaos):
    chaos.watch(queue, "publish", result=None, key="key")


# -- S22: an admin ----------------------------------------------------------------------------------------------------


def admin_uploads_logo() -> None:
    with Session.begin() as session:
        session.execute(update(Company).where(Company.id == 1).values(logo="by hand"))


def attach_logo_if_missing_when_asked(company_id: int) -> None:
    """The guard stands where the work is asked for; the work itself comes later, and does not look again."""
    with Session() as session:
        if session.get_one(Company, company_id).logo is not None:
            return
    with Session.begin() as session:
        session.execute(update(Company).where(Company.id == company_id).values(logo="from the web"))


def attach_logo_if_missing(company_id: int) -> None:
    with Session.begin() as session:
        missing = update(Company).where(Company.id == company_id, Company.logo.is_(None))
        session.execute(missing.values(logo="from the web"))


def test_an_admin_in_between(chaos, both):
    """S22. "I had uploaded the new logo by hand. An hour later the old one was back."

    No two deliveries are needed: between the look and the write somebody else has written. Whatever the order of two
    whole runs, the logo by hand stays; so it must stay when they overlap. Look where you write.
    """
    proven(both, attach_logo_if_missing_when_asked, 1)
    with_admin = later(chaos, duplicates=1, crashes=0, rivals=[admin_uploads_logo])
    refuted(with_admin, attach_logo_if_missing_when_asked, 1, changed="companies")
    proven(with_admin, attach_logo_if_missing, 1)


# -- BUG-51: a reaper -------------------------------------------------------------------------------------------------


def work_then_give_back() -> None:
    if redis.decr("free") < 0:
        redis.incr("free")
        raise Busy
    redis.set("claim:work", 1)
    try:
        redis.set("work", "done")
    finally:
        redis.delete("claim:work")
        redis.incr("free")


def reap() -> None:
    """Has not heard of the holder for a while: whoever has the claim must be dead."""
    if redis.exists("claim:work"):
        redis.delete("claim:work")
        redis.incr("free")


GIVE_BACK = "if redis.call('del', 'claim:work') == 1 then return redis.call('incr', 'free') end return 0"
"""Who deletes the claim gives the room back, and nobody else."""


def work_then_give_back_if_claimed() -> None:
    if redis.decr("free") < 0:
        redis.incr("free")
        raise Busy
    redis.set("claim:work", 1)
    try:
        redis.set("work", "done")
    finally:
        redis.eval(GIVE_BACK, 0)


def reap_if_claimed() -> None:
    redis.eval(GIVE_BACK, 0)


def test_a_reaper_that_is_wrong(chaos):
    """BUG-51 (solid_queue). "The limit is one. Eleven were running."

    The worker lives, only its heart beats too slowly. The reaper gives its place back, and so does the worker when it
    is done: from then on there are two places, for ever. The place must be given back with the claim, by one of them.
    (A counter of places does not survive the loss of a worker anyway, nor that of a reply.)
    """
    with_reaper = later(chaos, duplicates=1, crashes=0, faults=False, rivals=[reap])
    refuted(with_reaper, work_then_give_back, changed="redis free")
    with_reaper = later(chaos, duplicates=1, crashes=0, faults=False, rivals=[reap_if_claimed])
    proven(with_reaper, work_then_give_back_if_claimed)


# -- BUG-50: a scheduler ----------------------------------------------------------------------------------------------


def tick() -> None:
    """Enqueues the recurring job, unless one is on its way."""
    if redis.set("unique:sync", "tick-2", nx=True):
        queue.publish("sync", "tick-2")


def sync_and_unlock_at_the_end(tick: str) -> None:
    try:
        redis.set("synced", "yes")
    finally:
        redis.delete("unique:sync")


def sync_and_unlock_ours_when_done(tick: str) -> None:
    redis.set("synced", "yes")
    if redis.get("unique:sync") == tick:
        redis.delete("unique:sync")


def test_a_shutdown_is_not_the_end_of_the_job(chaos):
    """BUG-50 (sidekiq-unique-jobs). "There is one sync job, it is unique. After every restart there were two."

    A shutdown raises in the job, `finally` unlocks, and the queue takes the job back. The next tick of the scheduler
    finds no lock and enqueues another one. Unlock when the work is done, and only what is ours.
    """
    stopped = later(chaos, duplicates=1, crashes=0, faults=True, rivals=[tick])
    refuted(stopped, sync_and_unlock_at_the_end, "tick-1", lost="redis unique:sync")
    proven(stopped, sync_and_unlock_ours_when_done, "tick-1")
