"""Errors, lost replies and shutdowns: nothing dies, the job's own clean-up runs, and what it does counts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
import redis
from sqlalchemy import Engine, create_engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from tests.sql.engines import Invoice, Order, furnish

from retrychaos import Chaos, PlanError
from retrychaos.report.text import full_text

Job: TypeAlias = Callable[[Engine], None]
Found: TypeAlias = set[tuple[str, str]]
PROVEN: Found = set()


class Mailer:
    """An outside world in which nothing can be taken back."""

    def send(self, to: str) -> None:
        raise AssertionError("the call went through")


mailer = Mailer()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    furnish(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def check(chaos: Chaos) -> Chaos:
    chaos.watch(mailer, "send", result=None)
    return chaos(faults=True)


def found(check: Chaos, job: Callable[..., None], *args: object) -> Found:
    """Kinds and effects; each finding is replayed from its token."""
    report = check.explore(job, *args)
    assert report.verdict == ("failed" if report.findings else "proven"), full_text(report)
    for finding in report.findings:
        again = check.run(job, *args, plan=finding.token)
        assert (again.kind, again.effect) == (finding.kind, finding.effect), full_text(report)
    if not report.findings:
        assert "errors, lost replies and shutdowns" in report.guarantee
    return {(finding.kind, finding.effect) for finding in report.findings}


def set_status(engine: Engine, status: str) -> None:
    with Session(engine) as session:
        session.get_one(Order, 1).status = status
        session.commit()


# -- SQLite: the database is locked -----------------------------------------------------------------------------------


def finish(engine: Engine) -> None:
    set_status(engine, "done")


def finish_or_never_mind(engine: Engine) -> None:
    with contextlib.suppress(OperationalError):
        set_status(engine, "done")


def finish_and_tell_of_errors(engine: Engine) -> None:
    try:
        set_status(engine, "done")
    except OperationalError:
        set_status(engine, "failed")
        raise


def finish_and_leave_errors(engine: Engine) -> None:
    try:
        set_status(engine, "done")
    except OperationalError:
        set_status(engine, "failed")


def finish_at_the_second_try(engine: Engine) -> None:
    try:
        set_status(engine, "done")
    except OperationalError:
        set_status(engine, "done")


def finish_whatever_happens(engine: Engine) -> None:
    try:
        set_status(engine, "done")
    except BaseException:  # SystemExit, too
        return


def finish_with_a_bill_in_the_end(engine: Engine) -> None:
    """The clean-up does what must not be done twice."""
    try:
        set_status(engine, "done")
    finally:
        with Session(engine) as session:
            if session.get_one(Order, 1).status != "billed":
                session.add(Invoice(order_id=1, note="x"))
                session.get_one(Order, 1).status = "billed"
                session.commit()


SQLITE = [
    (finish, PROVEN),
    (finish_and_tell_of_errors, PROVEN),
    (finish_at_the_second_try, PROVEN),
    (finish_or_never_mind, {("lost", "orders")}),
    (finish_and_leave_errors, {("changed", "orders")}),
    (finish_whatever_happens, {("lost", "orders")}),
]


@pytest.mark.parametrize(("job", "expected"), SQLITE)
def test_sqlite(shop: Engine, check: Chaos, job: Job, expected: Found) -> None:
    assert found(check, job, shop) == expected


@pytest.mark.parametrize("job", [finish_or_never_mind, finish_and_leave_errors, finish_whatever_happens])
def test_without_faults_nothing_of_that_is_seen(shop: Engine, chaos: Chaos, job: Job) -> None:
    report = chaos.explore(job, shop)
    assert (report.verdict, "errors" in report.guarantee) == ("proven", False)


def test_clean_up_counts(shop: Engine, check: Chaos) -> None:
    report = check.explore(finish_with_a_bill_in_the_end, shop)
    assert report.verdict == "failed", full_text(report)


# -- calls: nobody answers, or the answer does not come ---------------------------------------------------------------


def mail_then_mark(engine: Engine) -> None:
    """S13: right if SMTP refuses, wrong if its answer is lost."""
    with Session(engine) as session:
        if session.get_one(Order, 1).status == "new":
            mailer.send("ann@example.com")
            session.get_one(Order, 1).status = "done"
            session.commit()


def mark_then_mail(engine: Engine) -> None:
    """Takes back the mark if the mail fails: an answer that is lost makes it two."""
    with Session(engine) as session:
        if session.get_one(Order, 1).status == "done":
            return
        session.get_one(Order, 1).status = "done"
        session.commit()
        try:
            mailer.send("ann@example.com")
        except OSError:
            session.get_one(Order, 1).status = "new"
            session.commit()
            raise


def test_a_reply_that_is_lost(shop: Engine, check: Chaos) -> None:
    without_crashes = check(crashes=0)
    report = without_crashes.explore(mail_then_mark, shop)
    (finding,) = report.findings
    assert (finding.kind, finding.effect) == ("duplicated", "Mailer.send"), full_text(report)
    assert "lost reply: TimeoutError" in full_text(report)
    assert report.guarantee.startswith("none: a fault shows with 0 crashes and a lost reply")
    assert [delivery.end for delivery in finding.timeline] == ["failed", "completed"]


def test_a_mark_that_is_taken_back(shop: Engine, check: Chaos) -> None:
    lost_by_a_shutdown = ("lost", "Mailer.send")
    assert found(check(crashes=0), mark_then_mail, shop) == {("duplicated", "Mailer.send"), lost_by_a_shutdown}


def test_what_a_crash_shows_is_said_first(shop: Engine, check: Chaos) -> None:
    (finding,) = check.explore(mark_then_mail, shop).findings
    assert (finding.kind, finding.plan.crashes) == ("lost", 1)


def test_what_a_receiver_recognises_is_sent_once(shop: Engine, chaos: Chaos) -> None:
    chaos.watch(mailer, "send", result=None, key="to")
    assert found(chaos(faults=True), mail_then_mark, shop) == PROVEN


def remembers_its_error(engine: Engine) -> None:
    """Bills for the trouble, and takes that back."""
    with Session(engine) as session:
        failed = session.get_one(Order, 1).status == "failed once"
        if failed:
            session.add(Invoice(order_id=1, note="again"))
            session.commit()
            for invoice in session.query(Invoice).all():
                session.delete(invoice)
            session.commit()
    try:
        set_status(engine, "done")
    except OperationalError:
        set_status(engine, "failed once")
        raise


def remembers_its_error_and_does_not_look(engine: Engine) -> None:
    """As before; a crash after the bill leaves it, since it is then taken for the usual one."""
    with Session(engine) as session:
        if session.get_one(Order, 1).status == "failed once":
            session.add(Invoice(order_id=1, note="again"))
            session.get_one(Order, 1).status = "new"
            session.commit()
            for invoice in session.query(Invoice).all():
                session.delete(invoice)
            session.commit()
    try:
        set_status(engine, "done")
    except OperationalError:
        set_status(engine, "failed once")
        raise


def test_crashes_after_a_fault(shop: Engine, check: Chaos) -> None:
    assert found(check, remembers_its_error, shop) == PROVEN


def test_a_crash_that_only_hurts_after_a_fault(shop: Engine, check: Chaos) -> None:
    report = check.explore(remembers_its_error_and_does_not_look, shop)
    (finding,) = report.findings
    assert (finding.kind, finding.effect, finding.plan.crashes) == ("duplicated", "invoices", 1), full_text(report)
    assert report.guarantee.startswith("none: a fault shows with 1 crash and an error")


# -- tokens -----------------------------------------------------------------------------------------------------------


def finish_after_a_while(engine: Engine, flag: Path) -> None:
    if flag.exists():
        time.sleep(1)  # a step at which there are no errors
    finish_or_never_mind(engine)


def test_a_token_that_no_longer_fits(shop: Engine, check: Chaos, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    (finding,) = check.explore(finish_after_a_while, shop, flag).findings
    assert ".x" in finding.token
    flag.touch()
    with pytest.raises(PlanError, match="should have a fault"):
        check.run(finish_after_a_while, shop, flag, plan=finding.token)


# -- Redis ------------------------------------------------------------------------------------------------------------


def count_once(client: redis.Redis) -> None:
    if not client.exists("n"):
        client.incr("n")


def set_it(client: redis.Redis) -> None:
    client.set("a", "b")


def push_unless_it_fails(client: redis.Redis) -> None:
    with contextlib.suppress(redis.RedisError):
        client.set("a", "b")


def test_redis(chaos: Chaos) -> None:
    check = chaos(faults=True)
    assert found(check, set_it, chaos.redis) == PROVEN
    chaos.redis.flushall()
    assert found(check, count_once, chaos.redis) == PROVEN


def test_a_client_that_gives_up(chaos: Chaos) -> None:
    assert found(chaos(faults=True), push_unless_it_fails, chaos.redis) == {("lost", "redis a")}
