"""Moments with a time zone and without: both are times, and both can be the end of a lease."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Column, DateTime, Engine, Integer, MetaData, String, Table, insert, select, update

import retrychaos
from retrychaos.report.text import full_text

META = MetaData()
ORDERS = Table(
    "orders",
    META,
    Column("id", Integer, primary_key=True),
    Column("made", DateTime),
    Column("made_at", DateTime(timezone=True)),
    Column("until", String),
    Column("paid", Integer, default=0),
)


class Payments:
    def charge(self, order_id: int) -> None:
        """Watched."""


@pytest.fixture(params=["UTC", "America/New_York"])
def shop(chaos: retrychaos.Chaos, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    META.create_all(chaos.sql)
    chaos.watch(Payments, "charge", result=None)
    yield chaos.sql
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("duplicates", [1, 2])
def test_both_are_times(chaos: retrychaos.Chaos, shop: Engine, duplicates: int) -> None:
    def make() -> None:
        with shop.begin() as db:
            if not db.execute(select(ORDERS.c.id)).first():
                now = datetime.now()  # that is the point
                later = str(now.astimezone(UTC) + timedelta(minutes=5))
                db.execute(insert(ORDERS).values(id=1, made=now, made_at=datetime.now(UTC), until=later))

    report = chaos(duplicates=duplicates).explore(make)
    assert report.verdict == "proven", full_text(report)

    def make_again() -> None:
        with shop.begin() as db:
            db.execute(insert(ORDERS).values(made=datetime.now(), made_at=datetime.now(UTC)))

    with shop.begin() as db:
        db.execute(ORDERS.delete())
    assert chaos(duplicates=duplicates).explore(make_again).verdict == "failed"


def naive() -> datetime:
    return datetime.now()


def aware() -> datetime:
    return datetime.now(UTC).astimezone()


@pytest.mark.parametrize("now", [naive, aware])
def test_both_are_ends_of_leases(chaos: retrychaos.Chaos, shop: Engine, now: Callable[[], datetime]) -> None:
    with shop.begin() as db:
        db.execute(insert(ORDERS).values(id=1, paid=0))

    def pay() -> None:
        with shop.begin() as db:
            order = db.execute(select(ORDERS)).one()
            if order.paid:
                return
            if order.until is not None and now() < datetime.fromisoformat(order.until):
                raise RuntimeError("busy")
            db.execute(update(ORDERS).values(until=(now() + timedelta(minutes=5)).isoformat()))
        Payments().charge(1)
        with shop.begin() as db:
            db.execute(update(ORDERS).values(until=None, paid=1))

    report = chaos(duplicates=1, late=True, leases=["orders.until"]).explore(pay)
    (finding,) = report.findings
    assert (finding.kind, finding.effect) == ("duplicated", "Payments.charge")
    assert finding.late == "delivery 2 came 5 min late, past orders.until"


def test_the_one_is_not_compared_with_the_other(chaos: retrychaos.Chaos, shop: Engine) -> None:
    def compare() -> bool:
        return naive() < aware()

    with pytest.raises(retrychaos.BaselineError, match="can't compare offset-naive and offset-aware datetimes"):
        chaos.check(compare)
