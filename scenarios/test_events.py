"""Events: what somebody else's state was when they were sent. They overtake each other, and come again."""

from __future__ import annotations

import pytest
import requests
from sqlalchemy import select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import proven, refuted
from scenarios.shop import Session

PAY = "https://api.pay.test"


class Base(DeclarativeBase):
    pass


class Subscription(Base):
    __tablename__ = "subscriptions"
    id: Mapped[str] = mapped_column(primary_key=True)
    status: Mapped[str]
    version: Mapped[int]


CREATED = ("created", "sub_1", "incomplete", 1)
UPDATED = ("updated", "sub_1", "active", 2)
"""Kind, subscription, its status at that moment, and the number that the provider gives to each change."""


@pytest.fixture(autouse=True)
def pay(chaos):
    """The subscription has been paid, whatever the events say."""
    pay = chaos.http.provider(PAY)
    pay.get("/subscriptions/{id}", lambda _: pay.state.get("now", {"status": "active", "version": 2}))
    pay.post("/subscriptions/{id}/pay", lambda _: pay.state.update(now={"status": "active", "version": 2}) or {})
    return pay


def store(subscription: str, status: str, version: int) -> None:
    with Session.begin() as session:
        session.merge(Subscription(id=subscription, status=status, version=version))


def store_if_newer(subscription: str, status: str, version: int) -> None:
    row = insert(Subscription).values(id=subscription, status=status, version=version)
    newer = row.excluded.version > Subscription.version
    with Session.begin() as session:
        session.execute(
            row.on_conflict_do_update(index_elements=["id"], set_={"status": status, "version": version}, where=newer)
        )


def copy_event(kind: str, subscription: str, status: str, version: int) -> None:
    with Session() as session:
        known = session.scalar(select(Subscription.id).where(Subscription.id == subscription))
    if kind == "updated" and known is None:
        return
    store(subscription, status, version)


def ask(subscription: str) -> tuple[str, int]:
    now = requests.get(f"{PAY}/subscriptions/{subscription}", timeout=10).json()
    return now["status"], now["version"]


def ask_and_store(kind: str, subscription: str, status: str, version: int) -> None:
    store(subscription, *ask(subscription))


def ask_and_store_if_newer(kind: str, subscription: str, status: str, version: int) -> None:
    store_if_newer(subscription, *ask(subscription))


def copy_event_if_newer(kind: str, subscription: str, status: str, version: int) -> None:
    store_if_newer(subscription, status, version)


def is_paid_meanwhile() -> None:
    """The customer pays, and the event about that is handled before the worker in the middle has moved."""
    requests.post(f"{PAY}/subscriptions/sub_1/pay", timeout=10).raise_for_status()
    ask_and_store(*UPDATED)


def is_paid_meanwhile_if_newer() -> None:
    requests.post(f"{PAY}/subscriptions/sub_1/pay", timeout=10).raise_for_status()
    ask_and_store_if_newer(*UPDATED)


def test_an_event_that_is_overtaken(chaos, both, pay):
    """BUG-75 (Members, cashier-stripe). "He has paid. With us he is *incomplete*, and the provider says *active*."

    *Updated* came first, found no row, and was dropped. Or an old *created* came again, and was copied over it. Do not
    copy: ask what is true now. That is right in any order, one at a time; but an answer is an old answer, too, by the
    time it is written. Whose change is the newer one is for the provider to say, and has to be compared where it is
    written.
    """
    proven(both, copy_event, *CREATED)
    in_any_order = chaos(duplicates=1, siblings=[(copy_event, UPDATED)], order=True)
    refuted(in_any_order, copy_event, *CREATED, crashes=0, reordered="subscriptions")

    in_any_order = chaos(duplicates=2, siblings=[(ask_and_store, UPDATED)], order=True)
    proven(in_any_order, ask_and_store, *CREATED)
    pay.state["now"] = {"status": "incomplete", "version": 1}
    meanwhile = chaos(duplicates=1, crashes=0, rivals=[is_paid_meanwhile])
    refuted(meanwhile, ask_and_store, *CREATED, changed="subscriptions")
    meanwhile = chaos(duplicates=1, crashes=0, rivals=[is_paid_meanwhile_if_newer])
    proven(meanwhile, ask_and_store_if_newer, *CREATED)

    in_any_order = chaos(duplicates=2, siblings=[(copy_event_if_newer, UPDATED)], order=True)
    proven(in_any_order, copy_event_if_newer, *CREATED)
