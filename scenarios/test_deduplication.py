"""Deduplication that is too broad: it takes work for a duplicate which is none."""

from __future__ import annotations

import pytest
from sqlalchemy import UniqueConstraint, select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from retrychaos import BaselineError
from scenarios.conftest import fresh_world, proven
from scenarios.shop import Session, keyed_mailer


class Base(DeclarativeBase):
    pass


class NarrowNotice(Base):
    """Meant to be unique on status and text. But the column alone is unique: it was declared one-to-one."""

    __tablename__ = "narrow_notices"
    id: Mapped[int] = mapped_column(primary_key=True)
    status_id: Mapped[int] = mapped_column(unique=True)
    text: Mapped[str]


class Notice(Base):
    __tablename__ = "notices"
    __table_args__ = (UniqueConstraint("status_id", "text"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    status_id: Mapped[int]
    text: Mapped[str]


@pytest.fixture(autouse=True)
def outside(chaos):
    chaos.watch(keyed_mailer, "send", result=None, key="key")


def notify_once_a_status(status_id: int, text: str) -> None:
    with Session.begin() as session:
        same = select(NarrowNotice).where(NarrowNotice.status_id == status_id, NarrowNotice.text == text)
        if session.scalar(same) is not None:
            return
        session.add(NarrowNotice(status_id=status_id, text=text))
        session.flush()
        keyed_mailer.send("list@example.com", text, key=f"{status_id}:{text}")


def notify_once_a_text(status_id: int, text: str) -> None:
    with Session.begin() as session:
        same = select(Notice).where(Notice.status_id == status_id, Notice.text == text)
        if session.scalar(same) is not None:
            return
        session.add(Notice(status_id=status_id, text=text))
        session.flush()
        keyed_mailer.send("list@example.com", text, key=f"{status_id}:{text}")


def test_two_notices_of_one_status(chaos):
    """BUG-57 (squad). "The build failed, mail. It was fixed, no mail, and an IntegrityError on every retry."

    No crash is needed, so a check of one job cannot see it: for a single notice the narrow index is as good as the
    right one. Check the *second* job in the world that the first has left. It fails without any fault, and the check
    says so instead of passing.
    """
    proven(chaos, notify_once_a_status, 7, "failed")
    with pytest.raises(BaselineError, match=r"UNIQUE constraint failed: narrow_notices\.status_id"):
        chaos.explore(notify_once_a_status, 7, "fixed")

    fresh_world(notify_once_a_text)
    chaos.check(notify_once_a_text, 7, "failed")
    chaos.check(notify_once_a_text, 7, "fixed")
