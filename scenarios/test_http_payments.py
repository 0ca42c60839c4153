"""Payments over HTTP: a charge that nobody can take back, and a key that makes the provider recognise it.

The same family as test_payments.py, with a real client in the job, and a provider that answers as Stripe does: a known
key gets the saved answer, errors too; the same key with other parameters is refused; keys are forgotten after a day.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import uuid
from typing import Any

import httpx
import pytest
import requests
from sqlalchemy import update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from retrychaos import Request, Response
from scenarios.conftest import proven, refuted
from scenarios.shop import Session, save

PAY = "https://api.pay.test"
CHARGE = f"POST {PAY}/charges"


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    cents: Mapped[int]
    paid: Mapped[bool] = mapped_column(default=False)
    failed: Mapped[bool] = mapped_column(default=False)
    claimed: Mapped[bool] = mapped_column(default=False)
    charge: Mapped[str | None]
    payment_key: Mapped[str | None]


class Wallet(Base):
    __tablename__ = "wallets"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int] = mapped_column(default=0)


class Attempt(Base):
    __tablename__ = "attempts"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int]
    charge: Mapped[str | None]


def arrange() -> None:
    save(Order(id=1, cents=4200), Wallet(id=1))


@pytest.fixture(autouse=True)
def pay(chaos, request):
    """Takes money, and honours keys: for ever, unless a test says for how long."""
    pay = chaos.http.provider(PAY, key_header="Idempotency-Key", key_ttl=getattr(request, "param", None))
    pay.post("/charges", json={"id": "ch_1", "status": "succeeded"}, status=201)
    return pay


def charge(order: Order, key: str | None = None, **more: Any) -> str:
    headers = {} if key is None else {"Idempotency-Key": key}
    reply = requests.post(f"{PAY}/charges", json={"order": order.id, "cents": order.cents, **more}, headers=headers)
    reply.raise_for_status()
    return str(reply.json()["id"])


# -- S7, S8: a key ----------------------------------------------------------------------------------------------------


def charge_without_key(order_id: int) -> None:
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        order.charge = charge(order)
        order.paid = True


def charge_with_stable_key(order_id: int) -> None:
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        if order.paid:
            return
        order.charge = charge(order, key=f"order-{order.id}")
        order.paid = True


def test_a_charge_without_a_key(chaos, both, pay):
    """S7, S8. "The card was charged, then our pod was evicted before it could note that. So it charged again." """
    refuted(chaos, charge_without_key, 1, duplicated=CHARGE)
    proven(both, charge_with_stable_key, 1)
    assert [call.key for call in pay.calls] == ["order-1"]


def charge_after_asking(order_id: int) -> None:
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        if order.paid:
            return
        found = requests.get(f"{PAY}/charges", params={"order": order.id}).json()
        order.charge = found[0] if found else charge(order, key=f"order-{order.id}")
        order.paid = True


@pytest.mark.parametrize("pay", ["24h"], indirect=True)
def test_a_key_that_has_been_forgotten(chaos, pay):
    """S8, BUG-61. "The worker was down over the weekend. On Monday the same key was a new key, and charged again."

    A stable key protects for as long as the provider remembers it. Who comes later than that has to ask first.
    """
    proven(chaos(late=False), charge_with_stable_key, 1)
    refuted(chaos, charge_with_stable_key, 1, duplicated=CHARGE)

    def take(request: Request) -> Response:
        pay.state.setdefault("charges", {})["ch_1"] = str(request.json["order"])
        return Response(201, {"id": "ch_1"})

    def look(request: Request) -> list[str]:
        return [each for each, order in pay.state.get("charges", {}).items() if order == request.query["order"]]

    pay.post("/charges", take)
    pay.get("/charges", look)
    proven(chaos, charge_after_asking, 1)


# -- S9, BUG-53, BUG-54: where the key comes from ---------------------------------------------------------------------


def charge_with_key_of_the_attempt(order_id: int) -> None:
    key = str(uuid.uuid4())
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        if order.paid:
            return
        order.charge = charge(order, key)
        order.paid = True


def charge_with_key_stored_once(order_id: int) -> None:
    unkeyed = update(Order).where(Order.id == order_id, Order.payment_key.is_(None))
    with Session() as session:
        session.execute(unkeyed.values(payment_key=str(uuid.uuid4())))
        session.commit()
        order = session.get_one(Order, order_id)
        order.charge = charge(order, order.payment_key)
        order.paid = True
        session.commit()


def test_a_key_that_is_new_on_every_attempt(chaos, both):
    """S9. "We do send an idempotency key." It was drawn in the job, so every attempt had one of its own."""
    refuted(chaos, charge_with_key_of_the_attempt, 1, duplicated=CHARGE)
    proven(both, charge_with_key_stored_once, 1)


def charge_with_hash_of_the_request(order_id: int) -> None:
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        if order.paid:
            return
        sdk = {"created": datetime.datetime.now(datetime.UTC).isoformat(), "attempt": str(uuid.uuid4())}
        key = hashlib.sha256(json.dumps({"order": order.id, "sdk": sdk}).encode()).hexdigest()
        order.charge = charge(order, key, sdk=sdk)
        order.paid = True


def charge_with_hash_of_what_is_fixed(order_id: int) -> None:
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        if order.paid:
            return
        key = hashlib.sha256(json.dumps({"order": order.id, "for": "charge"}).encode()).hexdigest()
        order.charge = charge(order, key)
        order.paid = True


def test_a_key_that_is_a_hash_of_the_whole_request(chaos, both):
    """BUG-53. The SDK hashed the request to get a key, and put the time and the number of the attempt into it."""
    refuted(chaos, charge_with_hash_of_the_request, 1, duplicated=CHARGE)
    proven(both, charge_with_hash_of_what_is_fixed, 1)


def pay_out(order_id: int) -> None:
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        if order.paid:
            return
        reply = requests.post(
            f"{PAY}/transfers", json={"cents": order.cents}, headers={"Idempotency-Key": f"payout-{order.id}"}
        )
        reply.raise_for_status()
        order.paid = True


def pay_out_by_the_day(order_id: int) -> None:
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        if order.paid:
            return
        key = f"payout-{order.id}-{datetime.datetime.now(datetime.UTC).date()}"
        requests.post(f"{PAY}/transfers", json={}, headers={"Idempotency-Key": key}).raise_for_status()
        order.paid = True


def test_the_date_in_a_key(chaos, pay):
    """BUG-54. A failed payout was answered with its old failure for hours, so somebody put the date into the key.

    A key with the date protects until midnight. Here the queue came back a day later.
    """
    pay.post("/transfers", json={"id": "tr_1"}, status=201)
    proven(chaos, pay_out, 1)
    proven(chaos(late=False), pay_out_by_the_day, 1)
    refuted(chaos, pay_out_by_the_day, 1, duplicated=f"POST {PAY}/transfers")


# -- S14: a guard -----------------------------------------------------------------------------------------------------


def charge_unless_paid(order_id: int) -> None:
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        if order.paid:
            return
        order.charge = charge(order)
        order.paid = True


def test_a_charge_guarded_by_paid(chaos, both):
    """S14. "It checks `paid` first, how can it charge twice?" Because between the charge and `paid` a process can die.

    The guard saves a request, the key saves the customer.
    """
    refuted(chaos, charge_unless_paid, 1, duplicated=CHARGE)
    proven(both, charge_with_stable_key, 1)


# -- a claim ----------------------------------------------------------------------------------------------------------


def claim_then_charge(order_id: int) -> None:
    free = update(Order).where(Order.id == order_id, Order.claimed.is_(False)).values(claimed=True)
    with Session() as session:
        claimed = session.execute(free).rowcount  # type: ignore[attr-defined]
        session.commit()
        if not claimed:
            return
        order = session.get_one(Order, order_id)
        order.charge = charge(order)
        order.paid = True
        session.commit()


def test_a_claim_before_a_charge(racing, crashing, both):
    """Two workers never charge twice, as only one gets the claim. And if it dies, nobody ever charges."""
    proven(racing, claim_then_charge, 1)
    refuted(crashing, claim_then_charge, 1, lost=(CHARGE, "orders"))
    proven(both, charge_with_stable_key, 1)


# -- S15: a refused card ----------------------------------------------------------------------------------------------


def charge_or_tell(order_id: int) -> None:
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        if order.paid:
            return
        try:
            order.charge = charge(order, key=f"order-{order.id}")
            order.paid = True
        except requests.HTTPError:
            order.failed = True
            requests.post("https://mail.test/send", json={"order": order.id}).raise_for_status()


def charge_or_tell_once(order_id: int) -> None:
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        if order.paid or order.failed:
            return
        try:
            order.charge = charge(order, key=f"order-{order.id}")
            order.paid = True
        except requests.HTTPError:
            order.failed = True
            key = {"Idempotency-Key": f"refused-{order.id}"}
            requests.post("https://keyed-mail.test/send", json={"order": order.id}, headers=key).raise_for_status()


def test_a_refused_card(chaos, both, pay):
    """S15. The card was refused, and the customer was told so. Again and again, until somebody looked at the queue."""
    pay.post("/charges", json={"error": "card_declined"}, status=402)
    chaos.http.provider("https://mail.test").post("/send", status=202)
    mail = chaos.http.provider("https://keyed-mail.test", key_header="Idempotency-Key")
    mail.post("/send", status=202)
    refuted(chaos, charge_or_tell, 1, duplicated="POST https://mail.test/send")
    proven(both, charge_or_tell_once, 1)
    assert len(mail.calls) == 1


# -- BUG-52: a new row for every attempt ------------------------------------------------------------------------------


def top_up(order_id: int) -> None:
    with Session() as session:
        order = session.get_one(Order, order_id)
        attempt = Attempt(order_id=order.id)
        session.add(attempt)
        session.commit()
        attempt.charge = charge(order)
        session.get_one(Wallet, 1).balance += order.cents
        session.commit()


def top_up_once(order_id: int) -> None:
    with Session() as session:
        order = session.get_one(Order, order_id)
        attempt = session.get(Attempt, order.id)
        if attempt is None:
            attempt = Attempt(id=order.id, order_id=order.id)
            session.add(attempt)
            session.commit()
        if attempt.charge is None:
            attempt.charge = charge(order, key=f"attempt-{attempt.id}")
            session.get_one(Wallet, 1).balance += order.cents
            session.commit()


def test_a_new_attempt_for_each_delivery(chaos, crashing):
    """BUG-52. One top-up was charged three times: each delivery made an attempt of its own, and a payment for it.

    One key for one purchase, kept until its outcome is known.
    """
    refuted(chaos, top_up, 1, duplicated=CHARGE, lost="attempts")
    proven(crashing, top_up_once, 1)


# -- BUG-59: an answer that is out of date ----------------------------------------------------------------------------


def invoice_of(order_id: int) -> dict[str, str]:
    headers = {"Idempotency-Key": f"inv-{order_id}"}
    reply = httpx.post(f"{PAY}/invoices", json={"order": order_id}, headers=headers)
    return dict(reply.raise_for_status().json())


def settle_by_the_first_answer(order_id: int) -> None:
    invoice = invoice_of(order_id)
    if invoice["status"] == "open":
        httpx.post(f"{PAY}/invoices/{invoice['id']}/payments", json={"order": order_id}).raise_for_status()
    with Session.begin() as session:
        session.get_one(Order, order_id).paid = True


def settle_by_the_present_state(order_id: int) -> None:
    invoice = httpx.get(f"{PAY}/invoices/{invoice_of(order_id)['id']}").raise_for_status().json()
    if invoice["status"] == "open":
        httpx.post(f"{PAY}/invoices/{invoice['id']}/payments", json={"order": order_id}).raise_for_status()
    with Session.begin() as session:
        session.get_one(Order, order_id).paid = True


def test_an_answer_from_memory_is_an_old_answer(chaos, crashing, pay):
    """BUG-59. The invoice was open when it was made. It is paid now, but the key brings back the answer of that time.

    What a known key answers is what was. Ask for what is.
    """

    def make(request: Request) -> dict[str, str]:
        return pay.state.setdefault("in_1", {"id": "in_1", "status": "open"})

    def pay_it(request: Request) -> dict[str, str]:
        pay.state["in_1"]["status"] = "paid"
        return {}

    pay.post("/invoices", make)
    pay.post("/invoices/{id}/payments", pay_it)
    pay.get("/invoices/{id}", lambda _: pay.state["in_1"])
    refuted(chaos, settle_by_the_first_answer, 1, duplicated=f"POST {PAY}/invoices/{{id}}/payments")
    proven(crashing, settle_by_the_present_state, 1)
