"""Refunds: undoing is a job like any other, and is interrupted like any other."""

from __future__ import annotations

import pytest
from sqlalchemy import update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import proven, refuted
from scenarios.shop import Session, save


class Base(DeclarativeBase):
    pass


class Dreamer(Base):
    __tablename__ = "dreamers"
    id: Mapped[int] = mapped_column(primary_key=True)
    credits: Mapped[int]


class Dream(Base):
    __tablename__ = "dreams"
    id: Mapped[int] = mapped_column(primary_key=True)
    dreamer_id: Mapped[int]
    status: Mapped[str] = mapped_column(default="processing")
    meaning: Mapped[str | None]


def arrange() -> None:
    save(Dreamer(id=1, credits=4), Dream(id=1, dreamer_id=1))


class ProviderError(Exception):
    """It cannot be interpreted, and nothing is charged."""


class Interpreter:
    def interpret(self, dream_id: int) -> str:
        raise NotImplementedError


interpreter = Interpreter()


@pytest.fixture(autouse=True)
def provider(chaos):
    """Refuses every dream."""
    chaos.watch(interpreter, "interpret", result=ProviderError("refused"))


def give_back(dreamer: Dreamer) -> None:
    dreamer.credits = Dreamer.credits + 1


def fail_then_refund(dream_id: int) -> None:
    with Session() as session:
        dream = session.get_one(Dream, dream_id)
        if dream.status != "processing":
            return
        try:
            dream.meaning = interpreter.interpret(dream_id)
        except ProviderError:
            dream.status = "failed"
            session.commit()
            give_back(session.get_one(Dreamer, dream.dreamer_id))
            session.commit()
            return
        dream.status = "done"
        session.commit()


def refund_then_fail(dream_id: int) -> None:
    with Session() as session:
        dream = session.get_one(Dream, dream_id)
        if dream.status != "processing":
            return
        try:
            dream.meaning = interpreter.interpret(dream_id)
        except ProviderError:
            give_back(session.get_one(Dreamer, dream.dreamer_id))
            session.commit()
            dream.status = "failed"
            session.commit()
            return
        dream.status = "done"
        session.commit()


def fail_and_refund_together(dream_id: int) -> None:
    with Session() as session:
        dream = session.get_one(Dream, dream_id)
        if dream.status != "processing":
            return
        try:
            dream.meaning = interpreter.interpret(dream_id)
            dream.status = "done"
        except ProviderError:
            dream.status = "failed"
            give_back(session.get_one(Dreamer, dream.dreamer_id))
        session.commit()


def refund_what_we_have_failed(dream_id: int) -> None:
    processing = update(Dream).where(Dream.id == dream_id, Dream.status == "processing")
    with Session() as session:
        dream = session.get_one(Dream, dream_id)
        try:
            change = {"meaning": interpreter.interpret(dream_id), "status": "done"}
        except ProviderError:
            change = {"status": "failed"}
        if session.execute(processing.values(change)).rowcount and change["status"] == "failed":
            give_back(session.get_one(Dreamer, dream.dreamer_id))
        session.commit()


def test_a_refund(chaos, crashing, racing, both):
    """BUG-43 (my-dream-api). "My credit did not come back after the failed job. For a friend it came back twice."

    Two commits. The status first: whoever comes next sees `failed` and skips the refund. The refund first: whoever
    comes next sees `processing` and refunds again. The status *is* the note that the refund was made, so they are one
    commit; and refund only what you have failed yourself, or two at a time both refund.
    """
    refuted(chaos, fail_then_refund, 1, lost="dreamers")
    refuted(chaos, refund_then_fail, 1, changed="dreamers")
    proven(crashing, fail_and_refund_together, 1)
    refuted(racing, fail_and_refund_together, 1, changed="dreamers")
    proven(both, refund_what_we_have_failed, 1)
