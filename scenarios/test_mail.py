"""Mail: it cannot be taken back, and SMTP does not recognise a mail that it has sent before."""

from __future__ import annotations

import pytest
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import proven, refuted
from scenarios.shop import Session, keyed_mailer, mailer


class Base(DeclarativeBase):
    pass


class Sending(Base):
    """The send table: one row a mail."""

    __tablename__ = "sendings"
    name: Mapped[str] = mapped_column(primary_key=True)


@pytest.fixture(autouse=True)
def outside(chaos):
    chaos.watch(mailer, "send", result=None)
    chaos.watch(keyed_mailer, "send", result=None, key="key")


# -- S10, S11: before or after ----------------------------------------------------------------------------------------


def mark_then_welcome(address: str) -> None:
    name = f"welcome {address}"
    with Session.begin() as session:
        if session.get(Sending, name):
            return
        session.add(Sending(name=name))
    mailer.send(address, "Welcome!")


def welcome_then_mark(address: str) -> None:
    name = f"welcome {address}"
    with Session() as session:
        if session.get(Sending, name):
            return
    mailer.send(address, "Welcome!")
    with Session.begin() as session:
        session.add(Sending(name=name))


def welcome_inside_the_transaction(address: str) -> None:
    name = f"welcome {address}"
    with Session.begin() as session:
        if session.get(Sending, name):
            return
        session.add(Sending(name=name))
        session.flush()
        mailer.send(address, "Welcome!")


def welcome_with_key_then_mark(address: str) -> None:
    name = f"welcome {address}"
    with Session() as session:
        if session.get(Sending, name):
            return
    keyed_mailer.send(address, "Welcome!", key=name)
    with Session.begin() as session:
        session.add(Sending(name=name))


def test_mark_then_send(chaos):
    """S10. "The table says that it was sent. The log of the mail server says that it was not."

    A promise was committed, and then nobody was left to keep it: at most once. The next delivery trusts the table.
    """
    refuted(chaos, mark_then_welcome, "ann@example.com", lost="Mailer.send")


def test_send_then_mark(chaos):
    """S11. "Welcome, Ann! Welcome, Ann!" Sent, and killed before it was written down: at least once.

    Putting both into one transaction changes nothing. It takes the mark back, and never the mail.
    """
    refuted(chaos, welcome_then_mark, "ann@example.com", duplicated="Mailer.send")
    refuted(chaos, welcome_inside_the_transaction, "ann@example.com", duplicated="Mailer.send")


def test_send_then_mark_and_say_so(chaos):
    """S11. A second welcome is no disaster. So say it: the tolerance stands in the guarantee, for everyone to read.

    It covers this mail twice, and nothing else: a lost one is still a failure.
    """
    tolerant = chaos(tolerate=["Mailer.send"])
    report = proven(tolerant, welcome_then_mark, "ann@example.com")
    assert "tolerated: Mailer.send more than once" in report.guarantee
    refuted(tolerant, mark_then_welcome, "ann@example.com", lost="Mailer.send")


def test_send_with_a_key(chaos):
    """S11 with a provider that knows keys: the mark saves a call, and the key sees to it that there is one mail."""
    proven(chaos, welcome_with_key_then_mark, "ann@example.com")
