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
