"""Errors, lost replies and shutdowns: nobody dies, so what the job does about them counts.

A timeout says nothing about what the other side has done. Code that takes it for "no" does it again, or takes something
back that has already happened.
"""

from __future__ import annotations

import smtplib
from email.message import EmailMessage

import pytest
import requests
from redis import RedisError
from sqlalchemy import select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import proven, refuted
from scenarios.shop import Session, redis, save

API = "https://api.saas.test"


class Base(DeclarativeBase):
    pass


class Invoice(Base):
    __tablename__ = "invoices"
    id: Mapped[int] = mapped_column(primary_key=True)
    remote: Mapped[str | None]


class Letter(Base):
    __tablename__ = "letters"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(default="pending")


class Submission(Base):
    __tablename__ = "submissions"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(default="new")
    staged: Mapped[bool] = mapped_column(default=True)


class Purchase(Base):
    __tablename__ = "purchases"
    id: Mapped[int] = mapped_column(primary_key=True)
    paid: Mapped[bool] = mapped_column(default=False)


def arrange() -> None:
    save(Invoice(id=1), Letter(id=1), Letter(id=2), Submission(id=1), Purchase(id=1))


@pytest.fixture(autouse=True)
def api(chaos):
    api = chaos.http.provider(API, key_header="Idempotency-Key")
    for path in ("/invoices", "/print", "/charges"):
        api.post(path, json={"id": "r_1"}, status=201)
    return api


@pytest.fixture
def unlucky(chaos):
    """No crash: an error, a lost reply or a shutdown in the first delivery, and then it is delivered again."""
    return chaos(duplicates=1, crashes=0, faults=True)


def post(path: str, key: str | None = None, **payload: object) -> str:
    headers = {} if key is None else {"Idempotency-Key": key}
    reply = requests.post(API + path, json=payload, headers=headers, timeout=10)
    reply.raise_for_status()
    return str(reply.json()["id"])


# -- S13: mail --------------------------------------------------------------------------------------------------------


def welcome(address: str) -> None:
    message = EmailMessage()
    message["From"], message["To"], message["Subject"] = "shop@example.com", address, "Welcome!"
    with smtplib.SMTP("smtp.example.com") as smtp:
        smtp.send_message(message)


def test_the_answer_of_the_mail_server_is_lost(unlucky):
    """S13. "Connection unexpectedly closed", says the log. Ann got the mail all the same, and then the next one."""
    refuted(unlucky, welcome, "ann@example.com", crashes=0, duplicated="mail")


def test_a_mail_that_may_come_twice(unlucky):
    """A refused connection has sent nothing, so with the lost reply allowed, the job is right."""
    proven(unlucky(tolerate=["mail"]), welcome, "ann@example.com")


# -- BUG-14, BUG-15: a timeout after it was done ----------------------------------------------------------------------


def push_invoice(number: int) -> None:
    with Session.begin() as session:
        invoice = session.get_one(Invoice, number)
        if invoice.remote is None:
            invoice.remote = post("/invoices", invoice=number)


def push_invoice_under_its_number(number: int) -> None:
    with Session.begin() as session:
        invoice = session.get_one(Invoice, number)
        if invoice.remote is None:
            invoice.remote = post("/invoices", key=f"invoice-{number}", invoice=number)


def test_a_timeout_is_not_a_no(unlucky):
    """BUG-14. The ERP took four minutes, and the client one: the invoice is there twice, and linked once."""
    refuted(unlucky, push_invoice, 1, crashes=0, duplicated=f"POST {API}/invoices")
    proven(unlucky, push_invoice_under_its_number, 1)


def print_letters() -> None:
    with Session.begin() as session:
        letters = session.scalars(select(Letter).where(Letter.state == "pending").order_by(Letter.id)).all()
        if letters:
            post("/print", letters=[letter.id for letter in letters])
        for letter in letters:
            letter.state = "sent"


def print_each_letter_once() -> None:
    with Session() as session:
        for letter in session.scalars(select(Letter).where(Letter.state == "pending").order_by(Letter.id)).all():
            post("/print", key=f"letter-{letter.id}", letter=letter.id)
            letter.state = "sent"
            session.commit()


def test_a_rollback_does_not_unprint(unlucky):
    """BUG-15. "Could not send letters: timed out", every five minutes; and every five minutes they were printed."""
    refuted(unlucky, print_letters, crashes=0, duplicated=f"POST {API}/print")
    proven(unlucky, print_each_letter_once)


# -- BUG-17: taken back, and yet it has happened ----------------------------------------------------------------------


def submit(number: int) -> None:
    with Session() as session:
        submission = session.get_one(Submission, number)
        if submission.state != "new":
            return
        try:
            redis.rpush("queue", f"ingest {number}")
        except RedisError:
            submission.state, submission.staged = "failed", False
            session.commit()
            return
        submission.state = "queued"
        session.commit()


def submit_and_leave_doubts_to_the_retry(number: int) -> None:
    """A set, so that the retry can put it there again."""
    with Session() as session:
        submission = session.get_one(Submission, number)
        if submission.state != "new":
            return
        redis.sadd("queue", f"ingest {number}")
        submission.state = "queued"
        session.commit()


def test_unknown_is_not_failed(unlucky):
    """BUG-17. The user was told that it failed, and its file was deleted. The worker had the job already.

    Where nobody answered it was not in the queue, and is lost; where the database failed after it, it is there twice.
    """
    refuted(unlucky, submit, 1, crashes=0, changed="submissions", lost="redis queue", duplicated="redis queue")
    proven(unlucky, submit_and_leave_doubts_to_the_retry, 1)


# -- BUG-52: a key for each attempt -----------------------------------------------------------------------------------


def confirm_again_if_it_times_out(number: int) -> None:
    with Session.begin() as session:
        purchase = session.get_one(Purchase, number)
        if purchase.paid:
            return
        for attempt in (1, 2):
            try:
                post("/charges", key=f"purchase-{number}-{attempt}", purchase=number)
            except requests.Timeout:
                if attempt == 2:
                    raise
            else:
                break
        purchase.paid = True


def confirm_with_one_key(number: int) -> None:
    with Session.begin() as session:
        purchase = session.get_one(Purchase, number)
        if purchase.paid:
            return
        try:
            post("/charges", key=f"purchase-{number}", purchase=number)
        except requests.Timeout:
            post("/charges", key=f"purchase-{number}", purchase=number)
        purchase.paid = True


def test_one_key_for_all_attempts(unlucky):
    """BUG-52. A second try deserves a second key, somebody thought."""
    refuted(unlucky, confirm_again_if_it_times_out, 1, crashes=0, duplicated=f"POST {API}/charges")
    proven(unlucky, confirm_with_one_key, 1)


# -- shutdown ---------------------------------------------------------------------------------------------------------


def confirm_or_forget(number: int) -> None:
    """Takes everything for a failure of the payment, also the end of its worker."""
    with Session() as session:
        purchase = session.get_one(Purchase, number)
        if purchase.paid:
            return
        try:
            post("/charges", key=f"purchase-{number}", purchase=number)
        except:  # noqa: E722  # that is what is wrong with it
            return
        purchase.paid = True
        session.commit()


def test_a_bare_except_swallows_the_shutdown(unlucky):
    """A deploy asked the worker to stop. The job said "all right", and was acknowledged."""
    refuted(unlucky, confirm_or_forget, 1, crashes=0, lost=(f"POST {API}/charges", "purchases"))
    proven(unlucky, confirm_with_one_key, 1)
