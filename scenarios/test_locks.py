"""Locks in Redis: they stay when their holder dies, because nobody is left to run the `finally`."""

from __future__ import annotations

import pytest
from redis.exceptions import LockError

from scenarios.conftest import proven, refuted
from scenarios.shop import queue, redis


class Busy(Exception):
    """The lock is taken: not done, try again later."""


def arrange() -> None:
    redis.rpush("batch:7", "a", "b")


@pytest.fixture(autouse=True)
def outside(chaos):
    chaos.watch(queue, "publish", result=None, key="key")


def deliver(batch: int) -> None:
    """Safe to repeat: a message counts once by its key, and deleting twice is deleting."""
    for number, item in enumerate(redis.lrange(f"batch:{batch}", 0, -1)):
        queue.publish("items", item, key=f"{batch}-{number}")
    redis.delete(f"batch:{batch}")


# -- S27: a lock without an expiry ------------------------------------------------------------------------------------


def deliver_under_lock_for_ever(batch: int) -> None:
    if not redis.set(f"lock:{batch}", "me", nx=True):
        raise Busy(batch)
    try:
        deliver(batch)
    finally:
        redis.delete(f"lock:{batch}")


def deliver_under_lock_that_expires(batch: int) -> None:
    if not redis.set(f"lock:{batch}", "me", nx=True, ex=60):
        raise Busy(batch)
    try:
        deliver(batch)
    finally:
        redis.delete(f"lock:{batch}")


def deliver_under_lock_of_redis_py(batch: int) -> None:
    with redis.lock(f"lock:{batch}", timeout=60):
        deliver(batch)


def deliver_under_impatient_lock_of_redis_py(batch: int) -> None:
    lock = redis.lock(f"lock:{batch}", timeout=60)
    if not lock.acquire(blocking=False):
        raise LockError(f"{batch} is being delivered")
    try:
        deliver(batch)
    finally:
        lock.release()


def deliver_under_eternal_lock_of_redis_py(batch: int) -> None:
    with redis.lock(f"lock:{batch}", blocking_timeout=5):
        deliver(batch)


def test_a_lock_released_in_finally(chaos):
    """S27. "It is released in `finally`, so it cannot leak." It leaked when the machine was reclaimed.

    From then on every retry failed, until somebody deleted the key by hand. With an expiry the retries fail for a
    minute and then go on: waiting is not being stuck.
    """
    refuted(chaos, deliver_under_lock_for_ever, 7, stuck="Busy: 7")
    proven(chaos, deliver_under_lock_that_expires, 7)


def test_the_lock_of_redis_py(chaos):
    """S27. `Redis.lock` releases in `__exit__`, which is another `finally`: only its `timeout` saves the next one.

    `blocking_timeout` is how long to wait for the lock, not how long it lives.
    """
    refuted(
        chaos,
        deliver_under_eternal_lock_of_redis_py,
        7,
        stuck="LockError: Unable to acquire lock within the time specified",
    )
    proven(chaos, deliver_under_lock_of_redis_py, 7)
    proven(chaos, deliver_under_impatient_lock_of_redis_py, 7)


# -- BUG-44: a lock and its expiry in two commands --------------------------------------------------------------------


def flush_with_setnx_and_expire(batch: int) -> None:
    if not redis.setnx(f"lock:{batch}", 1):
        raise Busy(batch)
    redis.expire(f"lock:{batch}", 60)
    deliver(batch)
    redis.delete(f"lock:{batch}")


def flush_or_return(batch: int) -> None:
    if not redis.set(f"lock:{batch}", 1, nx=True, ex=60):
        return
    deliver(batch)
    redis.delete(f"lock:{batch}")


def flush_or_raise(batch: int) -> None:
    if not redis.set(f"lock:{batch}", 1, nx=True, ex=60):
        raise Busy(batch)
    deliver(batch)
    redis.delete(f"lock:{batch}")


def flush_unless_empty(batch: int) -> None:
    if not redis.exists(f"batch:{batch}"):
        return  # nothing to flush; a lock may be left, and ends by itself
    flush_or_raise(batch)


def test_a_lock_and_its_expiry(chaos):
    """BUG-44 (sidekiq-grouping, node-resque, ShedLock). "A batch is never flushed again. Twice in three months."

    Died between SETNX and EXPIRE: a lock for ever. `SET NX EX` is one command and closes the gap, and one thing is left
    to see: a job that finds the lock taken and *returns* has acknowledged its message, and the dead holder does the
    work no more. Raise, and the retry comes after the expiry.
    """
    refuted(chaos, flush_with_setnx_and_expire, 7, stuck="Busy: 7")
    refuted(chaos, flush_or_return, 7, lost=("Queue.publish", "redis batch:7"))
    proven(chaos, flush_or_raise, 7)
    proven(chaos, flush_unless_empty, 7)
