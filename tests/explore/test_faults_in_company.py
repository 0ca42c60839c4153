"""Errors, lost replies and shutdowns where somebody else is about, and in other deliveries than the first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
import redis
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import OperationalError

from retrychaos import Chaos
from retrychaos.report.text import full_text

Found: TypeAlias = set[tuple[str, str]]
PROVEN: Found = set()
COUNT = text("INSERT INTO attempts SELECT n FROM (SELECT count(*) + 1 AS n FROM attempts) WHERE n <= 2")
"""Attempts are counted up to the second."""


@pytest.fixture
def shop(chaos: Chaos) -> Engine:
    with chaos.sql.begin() as db:
        db.execute(text("CREATE TABLE orders (id INTEGER PRIMARY KEY, status TEXT)"))
        db.execute(text("INSERT INTO orders VALUES (1, 'new')"))
        db.execute(text("CREATE TABLE attempts (n INTEGER PRIMARY KEY)"))
    return chaos.sql


@pytest.fixture
def check(chaos: Chaos) -> Chaos:
    return chaos(faults=True, duplicates=2, budget=60)


def found(check: Chaos, job: Callable[..., None], *args: object) -> Found:
    """Kinds and effects; each finding is replayed from its token."""
    report = check.explore(job, *args)
    assert report.verdict == ("failed" if report.findings else "proven"), full_text(report)
    for finding in report.findings:
        again = check.run(job, *args, plan=finding.token)
        assert (again.kind, again.effect) == (finding.kind, finding.effect), full_text(report)
        assert again.plan.faults == finding.plan.faults
    return {(finding.kind, finding.effect) for finding in report.findings}


# -- the clean-up of one delivery, while another is at work -----------------------------------------------------------


class Busy(Exception):
    """Somebody else is at it."""


def mark_and_give_back(client: redis.Redis) -> None:
    """Takes the place, works, gives it back; a failure gives it back as well, once more if need be."""
    if not client.set("place", "taken", nx=True, ex=60):
        raise Busy
    try:
        client.set("work", "done")
    except redis.RedisError:
        with contextlib.suppress(redis.RedisError):
            client.delete("place")
        raise
    client.delete("place")


def mark_and_remove_if_it_fails(client: redis.Redis) -> None:
    """What the other one has done in the meantime is removed with it, and that one was acknowledged."""
    try:
        client.set("work", "done")
    except redis.RedisError:
        client.delete("work")
        raise


def test_a_lost_reply_and_a_clean_up_that_comes_late(check: Chaos) -> None:
    """Alone it is right: what was removed is done again. Beside another one, that has been acknowledged since."""
    alone = check(duplicates=1)
    assert found(alone, mark_and_remove_if_it_fails, check.redis) == PROVEN
    report = check.explore(mark_and_remove_if_it_fails, check.redis)
    assert {(each.kind, each.effect) for each in report.findings} == {("lost", "redis work")}, full_text(report)
    (finding,) = report.findings
    assert (finding.plan.crashes, len(finding.plan.faults)) == (0, 1)
    assert "a fault shows when deliveries overlap, with 0 crashes and a" in report.guarantee
    assert f"! {finding.plan.faults[0]}: " in full_text(report)
    assert found(check, mark_and_remove_if_it_fails, check.redis) == {("lost", "redis work")}


def test_what_may_be_given_back(check: Chaos) -> None:
    assert found(check, mark_and_give_back, check.redis) == PROVEN
    report = check.explore(mark_and_give_back, check.redis)
    assert "errors, lost replies and shutdowns" in report.guarantee and "and others after that" in report.guarantee


# -- the second delivery ----------------------------------------------------------------------------------------------


def give_up_at_the_second(db: Engine) -> None:
    """Careful the first time; later ones take every error for "done already"."""
    with db.begin() as connection:
        connection.execute(COUNT)
    with db.connect() as connection:
        first = connection.execute(text("SELECT count(*) FROM attempts")).scalar() == 1
    try:
        with db.begin() as connection:
            connection.execute(text("UPDATE orders SET status = 'done'"))
    except Exception:
        if first:
            raise


def raise_at_every(db: Engine) -> None:
    with db.begin() as connection:
        connection.execute(COUNT)
    with db.begin() as connection:
        connection.execute(text("UPDATE orders SET status = 'done'"))


def test_the_second_delivery_swallows_errors(check: Chaos, shop: Engine) -> None:
    """Only a fault after a crash shows it."""
    calm = check(duplicates=1, volatile=["attempts"])
    assert found(calm, give_up_at_the_second, shop) == PROVEN
    thorough = calm(profile="thorough")
    assert found(thorough, give_up_at_the_second, shop) == {("lost", "orders")}
    report = thorough.explore(raise_at_every, shop)
    assert report.verdict == "proven", full_text(report)
    assert "at the steps of every delivery" in report.guarantee


def test_thorough_with_a_counter_of_attempts_is_bounded(check: Chaos, shop: Engine) -> None:
    """Attempts that are counted for ever: the number of deliveries bounds them, which is no reason to call it stuck."""

    def job(db: Engine) -> None:
        with db.begin() as connection:
            connection.execute(text("INSERT INTO attempts SELECT count(*) + 1 FROM attempts"))
        with db.begin() as connection:
            connection.execute(text("UPDATE orders SET status = 'done'"))

    report = check(duplicates=1, profile="thorough", crashes=0, volatile=["attempts"]).explore(job, shop)
    assert report.verdict == "proven", full_text(report)
    assert "at most 25 deliveries" in report.guarantee


# -- one of two that are alive ----------------------------------------------------------------------------------------


def work(db: Engine, client: redis.Redis, alone: Callable[[redis.Redis], None], beside: Callable[..., None]) -> None:
    """Who gets the lock works under it; who does not, works all the same."""
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(db.connect())
        try:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        except OperationalError:
            beside(client)
            return
        alone(client)


def set_result(client: redis.Redis) -> None:
    client.set("result", "done")


def set_result_or_step_back(client: redis.Redis) -> None:
    """If it fails it takes everything back, for the other one to do it. That one may be past it."""
    try:
        client.set("result", "done")
    except redis.RedisError:
        client.delete("result")


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Engine]:
    """Nobody waits for a lock."""
    engine = create_engine(f"sqlite:///{tmp_path / 'locks.db'}", connect_args={"timeout": 0, "isolation_level": None})
    with engine.begin() as db:
        db.execute(text("CREATE TABLE nowhere (n INTEGER)"))
    yield engine
    engine.dispose()


def test_a_fault_in_the_second_of_two(check: Chaos, hasty: Engine) -> None:
    """By default only the first one meets a fault, and the guarantee says no more."""
    calm = check(crashes=0)
    report = calm.explore(work, hasty, check.redis, set_result, set_result_or_step_back)
    assert report.verdict == "proven", full_text(report)
    assert "at the steps of the first delivery" in report.guarantee
    thorough = calm(profile="thorough")
    bad = (work, hasty, check.redis, set_result, set_result_or_step_back)
    assert found(thorough, *bad) == {("lost", "redis result")}
    (finding,) = thorough.explore(*bad).findings
    assert finding.plan.turns and len(finding.plan.faults) == 1
    check.redis.flushall()
    report = thorough.explore(work, hasty, check.redis, set_result, set_result)
    assert report.verdict == "proven", full_text(report)
    assert "at the steps of every delivery, one of them where they overlap" in report.guarantee


# -- rivals, siblings, follow-ups -------------------------------------------------------------------------------------


def charge_again(db: Engine) -> None:
    try:
        with db.begin() as connection:
            connection.execute(text("UPDATE orders SET status = 'done' WHERE status IN ('new', 'failed')"))
    except BaseException:
        with db.begin() as connection:
            connection.execute(text("UPDATE orders SET status = 'failed' WHERE status = 'new'"))
        raise


def refund_failed(db: Engine) -> None:
    """A clerk, or a cron job."""
    with db.begin() as connection:
        if connection.execute(text("SELECT status FROM orders")).scalar() == "failed":
            connection.execute(text("UPDATE orders SET status = 'refunded'"))


def test_a_rival_between_a_fault_and_the_retry(check: Chaos, shop: Engine) -> None:
    with_clerk = check(duplicates=1, rivals=[(refund_failed, (shop,))])
    assert found(check(duplicates=1), charge_again, shop) == PROVEN
    assert found(with_clerk, charge_again, shop) == {("changed", "orders")}


def test_a_sibling_between_a_fault_and_the_retry(check: Chaos, shop: Engine) -> None:
    with_clerk = check(duplicates=1, siblings=[(refund_failed, (shop,))])
    assert found(with_clerk, charge_again, shop) == {("changed", "orders")}


def test_a_job_that_follows_a_fault(check: Chaos, shop: Engine) -> None:
    """What a failed attempt leaves behind meets the next job."""

    def note_attempts(db: Engine) -> None:
        try:
            with db.begin() as connection:
                connection.execute(text("UPDATE orders SET status = 'done'"))
        except BaseException:
            with db.begin() as connection:
                connection.execute(text("INSERT INTO attempts VALUES (1) ON CONFLICT DO NOTHING"))
            raise

    def close(db: Engine) -> None:
        with db.begin() as connection:
            if connection.execute(text("SELECT count(*) FROM attempts")).scalar():
                raise Busy
            connection.execute(text("UPDATE orders SET status = 'closed'"))

    alone = check(duplicates=1)
    assert found(alone, note_attempts, shop) == {("duplicated", "attempts")}
    assert found(alone(then=[(close, (shop,))]), note_attempts, shop) == {("stuck", "close: Busy")}
