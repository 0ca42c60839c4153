"""Mail by SMTP: nothing about the jobs is declared, their mails arrive in ``chaos.mail`` instead of anywhere else."""

from __future__ import annotations

import fcntl
import smtplib
from email.message import EmailMessage
from email.utils import formatdate, make_msgid

import pytest
from sqlalchemy import delete, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import proven, refuted
from scenarios.shop import Session, redis, save


class Base(DeclarativeBase):
    pass


class Sending(Base):
    """The send table: one row a mail."""

    __tablename__ = "sendings"
    name: Mapped[str] = mapped_column(primary_key=True)


class Queued(Base):
    """Mails to be sent."""

    __tablename__ = "queue"
    id: Mapped[int] = mapped_column(primary_key=True)
    to: Mapped[str]
    status: Mapped[str] = mapped_column(default="queued")


class Payment(Base):
    __tablename__ = "payments"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str]


SUBSCRIBERS = ("ann@example.com", "bob@example.com")
lock_file = ""


@pytest.fixture(autouse=True)
def place(chaos):
    global lock_file
    lock_file = str(chaos.files / "senders.lock")


def arrange() -> None:
    save(Payment(id=1, status="started"), *(Queued(id=at, to=to) for at, to in enumerate(SUBSCRIBERS, 1)))


def send(to: str, subject: str) -> None:
    message = EmailMessage()
    message["From"], message["To"], message["Subject"] = "shop@example.com", to, subject
    message["Date"], message["Message-ID"] = formatdate(), make_msgid(domain="example.com")
    message.set_content(f"{subject}, {to}")
    with smtplib.SMTP("smtp.example.com", 587) as server:
        server.starttls()
        server.send_message(message)


def was_sent(name: str) -> bool:
    with Session() as session:
        return session.get(Sending, name) is not None


def note_sent(name: str) -> None:
    with Session.begin() as session:
        session.merge(Sending(name=name))


# -- S10, S11 --------------------------------------------------------------------------------------------------------


def mark_then_welcome(address: str) -> None:
    if not was_sent(address):
        note_sent(address)
        send(address, "Welcome")


def welcome_then_mark(address: str) -> None:
    if not was_sent(address):
        send(address, "Welcome")
        note_sent(address)


def test_before_or_after(crashing, chaos):
    """S10, S11, with a real client. "The table says that it was sent." "Welcome, Ann! Welcome, Ann!"

    Mark first loses a mail, send first repeats it; SMTP has no third way. Say which one you want.
    """
    refuted(crashing, mark_then_welcome, "ann@example.com", lost="mail")
    refuted(crashing, welcome_then_mark, "ann@example.com", duplicated="mail")
    report = proven(crashing(tolerate=["mail"]), welcome_then_mark, "ann@example.com")
    assert "tolerated: mail more than once" in report.guarantee
    assert [(mail.recipients, mail.subject) for mail in chaos.mail] == [(("ann@example.com",), "Welcome")]


# -- BUG-05 ----------------------------------------------------------------------------------------------------------


def forward_response(submission: str) -> None:
    send("owner@example.com", f"Response {submission}")


def forward_response_once(submission: str) -> None:
    if not was_sent(submission):
        send("owner@example.com", f"Response {submission}")
        note_sent(submission)


def test_an_ack_that_was_lost(crashing):
    """BUG-05 (platform-forms-client). "Two hundred responses, mailed again and again for two days."

    The mail was sent and the message not deleted: all that a delivery knows then is what it has written down. The note
    makes two days of mails one more at most.
    """
    refuted(crashing, forward_response, "7", duplicated="mail")
    proven(crashing(tolerate=["mail"]), forward_response_once, "7")


# -- BUG-06, BUG-09 --------------------------------------------------------------------------------------------------


def send_digests() -> None:
    for address in SUBSCRIBERS:
        send(address, "Your week")


def send_digests_with_a_note_each() -> None:
    for address in SUBSCRIBERS:
        if not was_sent(f"digest {address}"):
            send(address, "Your week")
            note_sent(f"digest {address}")


def test_a_batch_begins_again(crashing):
    """BUG-06 (lms), BUG-09 (LaunchNotes). "Half of the list has the roundup twice, since the deploy."

    The loop begins with the first receiver again. A note for each leaves a window of one mail, which has to be allowed.
    """
    refuted(crashing, send_digests, duplicated="mail")
    report = refuted(crashing, send_digests_with_a_note_each, duplicated="mail")
    assert len(report.findings[0].differences) == 1  # one mail, not the whole list
    proven(crashing(tolerate=["mail"]), send_digests_with_a_note_each)


# -- BUG-02 ----------------------------------------------------------------------------------------------------------


def flush_in_one_transaction() -> None:
    with Session.begin() as session:
        for queued in session.scalars(select(Queued).order_by(Queued.id)).all():
            send(queued.to, "Invoice")
            session.delete(queued)


def flush_one_by_one() -> None:
    while True:
        with Session.begin() as session:
            queued = session.scalars(select(Queued).order_by(Queued.id).limit(1)).first()
            if queued is None:
                return
            send(queued.to, "Invoice")
            session.delete(queued)


def flush_what_is_taken() -> None:
    while True:
        with Session.begin() as session:
            queued = session.scalars(select(Queued).order_by(Queued.id).limit(1)).first()
            if queued is None:
                return
            to = queued.to
            session.delete(queued)
        send(to, "Invoice")


def test_a_rollback_does_not_unsend(crashing):
    """BUG-02 (odoo). "One mail failed, and the ones before it were sent again." The rollback brought back their rows.

    One transaction for each mail leaves a window of one mail. To delete first closes it, and opens the other one.
    """
    report = refuted(crashing, flush_in_one_transaction, duplicated="mail")
    assert len(report.findings[0].differences) >= 1
    refuted(crashing, flush_one_by_one, duplicated="mail")
    proven(crashing(tolerate=["mail"]), flush_one_by_one)
    refuted(crashing, flush_what_is_taken, lost="mail")


# -- BUG-20 ----------------------------------------------------------------------------------------------------------


def send_all() -> None:
    with Session() as session:
        rows = session.execute(select(Queued.id, Queued.to).where(Queued.status == "queued").order_by(Queued.id)).all()
    for _, to in rows:
        send(to, "Queued")
    with Session.begin() as session:
        session.execute(update(Queued).where(Queued.id.in_([number for number, _ in rows])).values(status="sent"))


def send_all_alone() -> None:
    with open(lock_file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        send_all()


def test_every_sender_sends_everything(racing, both):
    """BUG-20 (django-post_office). "One queued mail went out dozens of times, under load."

    Each sender selects the same rows, and notes them as sent at the end. A lock file makes one of them wait, and then
    there is nothing left. Who dies with the lock is another matter: then there is one more of what was not noted.
    """
    refuted(racing, send_all, duplicated="mail")
    proven(racing, send_all_alone)
    refuted(both, send_all_alone, duplicated="mail")


# -- BUG-08 ----------------------------------------------------------------------------------------------------------


def mail_chunk(chunk: str) -> None:
    if not was_sent(chunk):
        for address in SUBSCRIBERS:
            send(address, "Course news")
        note_sent(chunk)


def mail_chunk_locked(chunk: str) -> None:
    if not redis.set(f"lock:{chunk}", "mine", nx=True, ex=600):
        raise RuntimeError("somebody is at it")
    try:
        mail_chunk(chunk)
    finally:
        redis.delete(f"lock:{chunk}")


def test_one_chunk_for_two_workers(racing, crashing):
    """BUG-08 (edx-platform). "The whole course got the mail twice." The child was delivered twice, at the same time.

    "Not done yet" is true for both. The lock settles who works, and who is second has to come back and look.
    """
    refuted(racing, mail_chunk, "c1", duplicated="mail")
    proven(racing, mail_chunk_locked, "c1")
    refuted(crashing, mail_chunk_locked, "c1", duplicated="mail")


# -- BUG-22 ----------------------------------------------------------------------------------------------------------


def payment_is_complete(payment_id: int) -> None:
    with Session.begin() as session:
        session.get_one(Payment, payment_id).status = "completed"  # also if it was registered before
    with Session.begin() as session:
        payment = session.get_one(Payment, payment_id)
        if payment.status != "completed":
            return
        payment.status = "registered"
        send("office@example.com", "Paid")


def payment_is_complete_forwards(payment_id: int) -> None:
    with Session.begin() as session:
        payment = session.get_one(Payment, payment_id)
        if payment.status == "registered":
            return
        send("office@example.com", "Paid")
        payment.status = "registered"


def test_a_status_that_goes_backwards(crashing):
    """BUG-22 (open-forms). "Almost every payment is announced twice." A guard is there; the line before resets it.

    Forwards only, and what remains is the window between the mail and the commit.
    """
    refuted(crashing, payment_is_complete, 1, duplicated="mail")
    proven(crashing(tolerate=["mail"]), payment_is_complete_forwards, 1)


# -- S12 -------------------------------------------------------------------------------------------------------------


def welcome_user(number: int) -> None:
    with Session() as session:
        to = session.get_one(Queued, number).to
    send(to, "Welcome")


def welcome_user_if_any(number: int) -> None:
    with Session() as session:
        user = session.get(Queued, number)
    if user is not None:
        send(user.to, "Welcome")


def delete_user() -> None:
    with Session.begin() as session:
        session.execute(delete(Queued).where(Queued.id == 1))


def test_somebody_has_left(chaos):
    """S12. "Twenty-five retries, and in the end the dead set: NoResultFound." The user had left before the welcome.

    To raise means to be tried again, and there will never be a user. Who has left needs no mail.
    """
    chaos = chaos(crashes=0, duplicates=1, tolerate=["mail"], rivals=[delete_user])
    refuted(chaos, welcome_user, 1, crashes=0, stuck="it waits for ever")
    proven(chaos, welcome_user_if_any, 1)
