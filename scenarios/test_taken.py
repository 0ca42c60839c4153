"""Taken: what a worker has taken out of the queue is nowhere, and what it has locked stays locked."""

from __future__ import annotations

import time
import uuid

import pytest
import requests
from sqlalchemy import select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import proven, refuted
from scenarios.shop import Session, redis

SITE = "https://jobs.test"
AN_HOUR = 3600


class Base(DeclarativeBase):
    pass


class Page(Base):
    __tablename__ = "pages"
    url: Mapped[str] = mapped_column(primary_key=True)
    text: Mapped[str]


class Report(Base):
    __tablename__ = "reports"
    id: Mapped[int] = mapped_column(primary_key=True)
    hour: Mapped[str]


class Document(Base):
    """A row of an export. Its id is chosen by whoever writes it."""

    __tablename__ = "documents"
    id: Mapped[str] = mapped_column(primary_key=True)
    text: Mapped[str]


class ExportRun(Base):
    __tablename__ = "export_runs"
    id: Mapped[str] = mapped_column(primary_key=True)
    done: Mapped[bool]


class Busy(Exception):
    """Somebody is at it: not done, try again later."""


def arrange() -> None:
    redis.zadd("due", {"/jobs": 0})


@pytest.fixture(autouse=True)
def site(chaos):
    chaos.http.provider(SITE).get("/{page}", body=b"42 jobs")


@pytest.fixture
def slow(chaos):
    """Two deliveries at the same time. Nobody dies, but work may take longer than any lease holds."""
    return chaos(duplicates=2, crashes=0, late=True)


# -- BUG-39: popped ---------------------------------------------------------------------------------------------------

POP = """
local page = redis.call('zrange', KEYS[1], '-inf', ARGV[1], 'BYSCORE', 'LIMIT', 0, 1)[1]
if page then redis.call('zrem', KEYS[1], page) end
return page
"""
"""Take what is due out of the queue."""

LEASE = """
for _, page in ipairs(redis.call('zrange', 'taken', '-inf', ARGV[1], 'BYSCORE')) do
    redis.call('zrem', 'taken', page)
    redis.call('zadd', 'due', 0, page)
end
local page = redis.call('zrange', 'due', '-inf', ARGV[1], 'BYSCORE', 'LIMIT', 0, 1)[1]
if page then
    redis.call('zrem', 'due', page)
    redis.call('zadd', 'taken', ARGV[1] + 60, page)
end
return page
"""
"""Give back what was taken too long ago; then put what is due among what is taken, for a minute."""


def crawl(page: str) -> None:
    text = requests.get(f"{SITE}{page}", timeout=10).text
    with Session.begin() as session:
        session.merge(Page(url=page, text=text))


def pop_and_crawl() -> None:
    now = int(time.time())
    if page := redis.eval(POP, 1, "due", now):
        crawl(page)
        redis.zadd("due", {page: now + AN_HOUR})


def lease_and_crawl() -> None:
    now = int(time.time())
    page = redis.eval(LEASE, 0, now)
    if page:
        crawl(page)
        with redis.pipeline(transaction=True) as both:
            both.zrem("taken", page)
            both.zadd("due", {page: now + AN_HOUR})
            both.execute()
    elif redis.zcard("taken"):
        raise Busy


def test_popped(crashing, racing, both, slow):
    """BUG-39 (jobseek). "Every deploy loses some pages. They are not in the queue, and not in the database."

    What is popped is in the memory of one process. Move it, in one step, to where it can be seen that somebody has it,
    and until when. If he is only slow, it is crawled twice, which does no harm.
    """
    refuted(crashing, pop_and_crawl, lost="redis due")
    proven(racing, pop_and_crawl)

    proven(both(crashes=2), lease_and_crawl)
    proven(slow, lease_and_crawl)


# -- BUG-45: locked ---------------------------------------------------------------------------------------------------


def report(hour: str) -> None:
    """Right one after the other, wrong two at a time."""
    with Session.begin() as session:
        if session.scalar(select(Report).where(Report.hour == hour)) is None:
            session.add(Report(hour=hour))


def report_unless_locked(hour: str) -> None:
    if redis.setnx("lock:report", 1):
        report(hour)
        redis.delete("lock:report")


def start_up_and_report(hour: str) -> None:
    """A worker that has just been started: whatever is locked was locked by its predecessor."""
    redis.delete("lock:report")
    report_unless_locked(hour)


def report_under_a_lock_that_ends(hour: str) -> None:
    if not redis.set("lock:report", 1, nx=True, ex=60):
        raise Busy
    report(hour)
    redis.delete("lock:report")


def test_locked(crashing, racing, both):
    """BUG-45 (huey, taskiq-redis). "The hourly report has not run since we restarted. It is registered, it is called."

    It is called and returns, every hour: the one that was killed has the lock. Workers then removed all locks when they
    start, which is right for as long as there is one worker. An end in the lock needs no such thing.
    """
    next_hour = crashing(then=[(report_unless_locked, ("11:00",))])
    refuted(next_hour, report_unless_locked, "10:00", lost="reports")  # and the lock is left
    proven(racing, report_unless_locked, "10:00")

    next_hour = crashing(then=[(start_up_and_report, ("11:00",))])
    proven(next_hour, start_up_and_report, "10:00")
    refuted(racing, start_up_and_report, "10:00", duplicated="reports")

    next_hour = crashing(then=[(report_under_a_lock_that_ends, ("11:00",))])
    proven(next_hour, report_under_a_lock_that_ends, "10:00")
    proven(both, report_under_a_lock_that_ends, "10:00")


# -- BUG-11: written under any name -----------------------------------------------------------------------------------

ROWS = ("ann", "bob", "eve")


def export(run: str) -> None:
    for text in ROWS:
        with Session.begin() as session:
            session.add(Document(id=uuid.uuid4().hex, text=text))
    with Session.begin() as session:
        session.merge(ExportRun(id=run, done=True))


def export_unless_done(run: str) -> None:
    with Session() as session:
        if session.get(ExportRun, run) is not None:
            return
    export(run)


def export_under_their_places(run: str) -> None:
    for place, text in enumerate(ROWS):
        with Session.begin() as session:
            session.merge(Document(id=f"{run}-{place}", text=text))
    with Session.begin() as session:
        session.merge(ExportRun(id=run, done=True))


def test_written_under_any_name(crashing, both):
    """BUG-11 (bigquery-firestore-export). "Three thousand rows. At 12,900 documents we stopped it."

    Each attempt begins at the first row, and gives every row a new name. Whether the run is done is asked too late to
    help: it is written last. A row that is called after its place overwrites itself.
    """
    refuted(crashing, export, "r1", duplicated="documents")
    refuted(crashing, export_unless_done, "r1", duplicated="documents")
    proven(both, export_under_their_places, "r1")
