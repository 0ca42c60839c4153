"""Errors and lost replies on PostgreSQL: the server goes away, before a statement, or with the answer to a COMMIT."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from retrychaos import Chaos
from retrychaos.report.text import full_text
from tests.sql.engines import Invoice, Order

Job = Callable[[Engine], None]


def bill(engine: Engine) -> None:
    with Session(engine) as session:
        order = session.get_one(Order, 1)
        if order.status == "new":
            session.add(Invoice(order_id=1, note="x"))
            order.status = "done"
            session.commit()


def bill_again_if_it_fails(engine: Engine) -> None:
    """Right where nothing was done, wrong where only the answer was lost."""
    for attempt in (1, 2):
        try:
            with engine.begin() as connection:
                connection.execute(text("INSERT INTO invoices (order_id, note) VALUES (1, 'x')"))
        except OperationalError:
            if attempt == 2:
                raise
        else:
            return


def bill_if_new_again_if_it_fails(engine: Engine) -> None:
    for attempt in (1, 2):
        try:
            return bill(engine)
        except OperationalError:
            if attempt == 2:
                raise


def bill_and_swallow(engine: Engine) -> None:
    try:
        bill(engine)
    except OperationalError:
        return


@pytest.mark.parametrize("job", [bill, bill_if_new_again_if_it_fails])
def test_right(shop: Engine, check: Chaos, job: Job) -> None:
    report = check(faults=True).explore(job, shop)
    assert report.verdict == "proven", full_text(report)
    assert "errors, lost replies and shutdowns" in report.guarantee


def test_the_answer_to_a_commit_is_lost(shop: Engine, check: Chaos) -> None:
    report = check(faults=True, crashes=0).explore(bill_again_if_it_fails, shop)
    assert ("duplicated", "invoices") in {(each.kind, each.effect) for each in report.findings}, full_text(report)
    assert "lost reply: OperationalError: server closed the connection unexpectedly" in full_text(report)


def test_an_error_that_is_swallowed(shop: Engine, check: Chaos) -> None:
    report = check(faults=True).explore(bill_and_swallow, shop)
    assert {(each.kind, each.effect) for each in report.findings} == {("lost", "invoices")}, full_text(report)


def test_autocommit(shop: Engine, check: Chaos) -> None:
    """Each statement is applied by itself, so its answer can be lost, too."""

    def job(engine: Engine) -> None:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            if connection.execute(text("SELECT status FROM orders WHERE id = 1")).scalar() == "new":
                connection.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))

    report = check(faults=True).explore(job, shop)
    assert report.verdict == "proven", full_text(report)


# -- the server refuses a statement -----------------------------------------------------------------------------------


def take_a_deadlock_for_done(engine: Engine) -> None:
    """Tells deadlocks from other errors, and takes one for a sign that somebody else does it."""
    try:
        bill(engine)
    except OperationalError as error:
        if sqlstate(error) == "40P01":
            return
        raise


def again_after_a_deadlock(engine: Engine) -> None:
    try:
        bill(engine)
    except OperationalError as error:
        if sqlstate(error) != "40P01":
            raise
        bill(engine)


def sqlstate(error: OperationalError) -> str | None:
    return getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)


def go_on_in_the_broken_transaction(engine: Engine) -> None:
    """The error is caught, but the transaction is aborted; what comes after it in the same block fails as well."""
    with engine.begin() as connection:
        try:
            connection.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))
        except OperationalError as error:
            if sqlstate(error) != "40P01":
                raise
            connection.execute(text("SELECT 1"))


@pytest.mark.parametrize("job", [again_after_a_deadlock, go_on_in_the_broken_transaction])
def test_a_deadlock(shop: Engine, check: Chaos, job: Job) -> None:
    report = check(faults=True).explore(job, shop)
    assert report.verdict == "proven", full_text(report)


def test_a_deadlock_that_is_swallowed(shop: Engine, check: Chaos) -> None:
    report = check(faults=True, crashes=0).explore(take_a_deadlock_for_done, shop)
    assert {(each.kind, each.effect) for each in report.findings} == {("lost", "invoices")}, full_text(report)
    (finding,) = report.findings
    assert finding.plan.faults == ("deadlock",)
    again = check(faults=True, crashes=0).run(take_a_deadlock_for_done, shop, plan=finding.token)
    assert (again.kind, again.effect) == ("lost", "invoices")
    assert "deadlock: DeadlockDetected: deadlock detected" in full_text(report)


def strictly(engine: Engine, swallows: bool) -> None:
    with engine.connect().execution_options(isolation_level="SERIALIZABLE") as connection:
        try:
            with connection.begin():
                if connection.execute(text("SELECT status FROM orders WHERE id = 1")).scalar() == "new":
                    connection.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))
        except OperationalError as error:
            if not (swallows and sqlstate(error) == "40001"):
                raise


def test_serialization_failures(shop: Engine, check: Chaos) -> None:
    """They come at statements and at the COMMIT, and only where the level is above READ COMMITTED."""
    report = check(faults=True, crashes=0).explore(strictly, shop, True)
    assert {(each.kind, each.effect) for each in report.findings} == {("lost", "orders")}, full_text(report)
    assert report.findings[0].plan.faults == ("serialization failure",)


def test_serialization_failures_that_are_raised(shop: Engine, check: Chaos) -> None:
    report = check(faults=True).explore(strictly, shop, False)
    assert report.verdict == "proven", full_text(report)


def with_lock_timeout(engine: Engine, timeout: bool) -> None:
    with engine.begin() as connection:
        if timeout:
            connection.execute(text("SET LOCAL lock_timeout = '10s'"))
        try:
            with connection.begin_nested():
                connection.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))
        except OperationalError as error:
            if sqlstate(error) != "55P03":
                raise


def test_lock_timeouts(shop: Engine, check: Chaos) -> None:
    """Only where a time for locks is set."""
    report = check(faults=True, crashes=0).explore(with_lock_timeout, shop, True)
    assert {(each.kind, each.effect) for each in report.findings} == {("lost", "orders")}, full_text(report)
    assert report.findings[0].plan.faults == ("lock timeout",)


def test_no_lock_timeouts_without_a_time(shop: Engine, check: Chaos) -> None:
    report = check(faults=True, crashes=0).explore(with_lock_timeout, shop, False)
    assert report.verdict == "proven", full_text(report)
