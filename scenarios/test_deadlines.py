"""Deadlines: jobs that are right, and store until when something holds. A time is no fault, wherever it is written."""

from __future__ import annotations

import json
import time

from scenarios.conftest import proven, refuted
from scenarios.shop import redis


class Busy(Exception):
    """Somebody is at it: not done, try again later."""


def an_hour_from_now() -> str:
    return json.dumps({"until": int(time.time()) + 3600})


# -- a deadline, and then some work -----------------------------------------------------------------------------------


def hold_then_work() -> None:
    redis.set("hold", an_hour_from_now())
    redis.set("work", "done")


def hold_then_work_slowly() -> None:
    redis.set("hold", an_hour_from_now())
    time.sleep(30)
    redis.set("work", "done")


def hold_then_count() -> None:
    redis.set("hold", an_hour_from_now())
    redis.incr("work")


def test_a_deadline_and_then_some_work(crashing):
    """Who comes again holds it again, until an hour from then. What it had held before is overwritten."""
    proven(crashing, hold_then_work)
    refuted(crashing, hold_then_count, changed="redis work")


def test_a_deadline_and_then_some_slow_work(crashing):
    """The same, where the clock goes on between the deadline and the end of the job."""
    proven(crashing, hold_then_work_slowly)


def hold_by_a_number_then_work_slowly() -> None:
    redis.set("hold", int(time.time()) + 3600)
    time.sleep(30)
    redis.set("work", "done")


def test_a_number_for_a_deadline(crashing):
    """The same with nothing but a number in the key."""
    proven(crashing, hold_by_a_number_then_work_slowly)


def hold_as_a_document() -> None:
    if not redis.set("hold", an_hour_from_now(), ex=3600, nx=True) and redis.get("work") != "done":
        raise Busy
    redis.set("work", "done")


def thirty_seconds_later() -> None:
    time.sleep(30)


def test_a_deadline_and_its_key(crashing):
    """A hold with a deadline that ends when the deadline is over: who dies is waited for."""
    proven(crashing, hold_as_a_document)


def test_a_deadline_and_a_follow_up_that_waits(crashing):
    """The same, with another job after it that only lets time pass."""
    proven(crashing(then=[thirty_seconds_later]), hold_as_a_document)


# -- the lock of those who clean up -----------------------------------------------------------------------------------


def work_or_finish_for_the_dead() -> None:
    """Only who finds half-done work locks it, and leaves the lock to end by itself."""
    if redis.set("work", "begun", nx=True):
        redis.set("work", "done")
    elif redis.get("work") == "begun":
        if not redis.set("work:lock", 1, nx=True, ex=10):
            raise Busy
        redis.set("work", "done")


def test_the_lock_of_those_who_clean_up(crashing):
    """A lock that is left behind and ends by itself is no fault, also where it is needed only after a crash."""
    proven(crashing, work_or_finish_for_the_dead)


# -- what somebody else has locked ------------------------------------------------------------------------------------


def work() -> None:
    redis.set("work", "done")


def test_what_somebody_else_has_locked(crashing):
    """A key of somebody else goes on to end while the job is tried: it is the job's as little as its end is."""
    redis.flushall()
    redis.set("lock of another job", 1, ex=3600)
    assert crashing.explore(work).verdict == "proven"


def test_what_somebody_else_has_locked_in_processes(crashing):
    """The same, with a process for each delivery."""
    redis.flushall()
    redis.set("lock of another job", 1, ex=3600)
    assert crashing(isolation="process").explore(work).verdict == "proven"
