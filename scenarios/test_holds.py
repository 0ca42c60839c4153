"""Holds: how long a key or a hold protects, and what comes after that."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest
import requests
import time_machine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from retrychaos import Request, Response
from scenarios.conftest import proven, refuted
from scenarios.shop import Session, redis, save

PAY = "https://api.pay.test"
TRANSFER = f"POST {PAY}/transfers"
A_DAY = 24 * 3600


class Base(DeclarativeBase):
    pass


class Affiliate(Base):
    __tablename__ = "affiliates"
    id: Mapped[int] = mapped_column(primary_key=True)
    cents: Mapped[int]
    paid: Mapped[str | None]
    attempted: Mapped[bool] = mapped_column(default=False)


class AskSomebody(Exception):
    """It may have been paid, and it may not: nobody here can tell."""


def arrange() -> None:
    save(Affiliate(id=1, cents=4200))


@pytest.fixture(autouse=True)
def pay(chaos):
    """Transfers money, knows keys for a day, and what it has transferred for ever."""
    pay = chaos.http.provider(PAY, key_header="Idempotency-Key", key_ttl="24h")

    def transfer(request: Request) -> Response:
        pay.state.setdefault("transfers", []).append(request.json["to"])
        return Response(201, {"id": "tr_1"})

    pay.post("/transfers", transfer)
    pay.get(
        "/transfers", lambda request: [to for to in pay.state.get("transfers", []) if str(to) == request.query["to"]]
    )
    return pay


def transfer(affiliate: Affiliate, key: str) -> str:
    headers = {"Idempotency-Key": key}
    payload = {"to": affiliate.id, "cents": affiliate.cents}
    reply = requests.post(f"{PAY}/transfers", json=payload, headers=headers, timeout=30)
    reply.raise_for_status()
    return str(reply.json()["id"])


# -- BUG-54: a key until midnight -------------------------------------------------------------------------------------


def pay_out_under_the_date(affiliate_id: int) -> None:
    with Session.begin() as session:
        affiliate = session.get_one(Affiliate, affiliate_id)
        if affiliate.paid is None:
            affiliate.paid = transfer(affiliate, f"payout-{affiliate_id}-{datetime.now(UTC).date()}")


def pay_out_under_its_number(affiliate_id: int) -> None:
    with Session.begin() as session:
        affiliate = session.get_one(Affiliate, affiliate_id)
        if affiliate.paid is None:
            affiliate.paid = transfer(affiliate, f"payout-{affiliate_id}")


def test_a_key_until_midnight(chaos):
    """BUG-54 (omi). "There is a timeout in the log at 23:59:59. He was paid then, and again one second later."

    The date was put into the key so that a failed payout can be tried again tomorrow. So can one that has not failed:
    the answer of a transfer was lost, and the next attempt is on another day. Any other second of the day is safe,
    which is why nobody has seen it in a test.
    """
    unlucky = chaos(duplicates=1, crashes=0, late=False)
    with time_machine.travel(datetime(2024, 3, 1, 12, 0, 0, tzinfo=UTC), tick=False):
        proven(unlucky, pay_out_under_the_date, 1)
    with time_machine.travel(datetime(2024, 3, 1, 23, 59, 59, tzinfo=UTC), tick=False):
        refuted(unlucky, pay_out_under_the_date, 1, crashes=0, duplicated=TRANSFER)
        proven(unlucky, pay_out_under_its_number, 1)


# -- BUG-61: held for a week ------------------------------------------------------------------------------------------


def pay_out_under_a_hold(affiliate_id: int) -> None:
    """Within a day the provider knows the key. After that, and for a week, the hold stops us."""
    hold = f"hold:{affiliate_id}"
    with Session.begin() as session:
        affiliate = session.get_one(Affiliate, affiliate_id)
        if affiliate.paid is not None:
            return
        first = redis.set(hold, int(time.time()), nx=True, ex=7 * A_DAY)
        if not first and int(redis.get(hold) or 0) < time.time() - A_DAY:
            raise AskSomebody(affiliate_id)
        affiliate.paid = transfer(affiliate, f"payout-{affiliate_id}")


def pay_out_after_an_attempt(affiliate_id: int) -> None:
    """Writes down that it is going to try. Whoever finds that asks what has become of it."""
    with Session() as session:
        affiliate = session.get_one(Affiliate, affiliate_id)
        if affiliate.paid is not None:
            return
        if affiliate.attempted and requests.get(f"{PAY}/transfers", params={"to": affiliate_id}, timeout=30).json():
            affiliate.paid = "tr_1"
            session.commit()
            return
        affiliate.attempted = True
        session.commit()
        affiliate.paid = transfer(affiliate, f"payout-{affiliate_id}")
        session.commit()


def test_held_for_a_week(crashing, both):
    """BUG-61 (gumroad). "There is a hold in Redis for seven days, and a key at the provider for one."

    Who comes within a day is recognised by the provider, and within a week is stopped by the hold: nobody can say
    whether it was paid. On the eighth day nobody remembers anything. The hold cannot be made long enough; a row stays,
    and the provider can be asked.
    """
    proven(both(late=False), pay_out_under_a_hold, 1)
    refuted(crashing, pay_out_under_a_hold, 1, duplicated=TRANSFER)

    proven(crashing, pay_out_after_an_attempt, 1)
    proven(both, pay_out_after_an_attempt, 1)
