"""Batches: one job, many receivers, and a mark at the end for all of them."""

from __future__ import annotations

from datetime import datetime

import pytest
from sqlalchemy import delete, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import proven, refuted
from scenarios.shop import Session, by_receiver, keyed_mailer, mailer, queue, redis, save


class Base(DeclarativeBase):
    pass


class Missed(Base):
    """A message that its receiver has not seen."""

    __tablename__ = "missed"
    id: Mapped[int] = mapped_column(primary_key=True)
    receiver: Mapped[str]
    processed_at: Mapped[datetime | None]
    sent_at: Mapped[datetime | None]


class Task(Base):
    """A queue in the database: enqueueing is a row, and part of the transaction."""

    __tablename__ = "tasks"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    receiver: Mapped[str]
    numbers: Mapped[str]


def arrange() -> None:
    save(Missed(id=1, receiver="ann"), Missed(id=2, receiver="bob"), Missed(id=3, receiver="ann"))


@pytest.fixture(autouse=True)
def outside(chaos):
    chaos.watch(queue, "publish", result=None, key="key")
    chaos.watch(mailer, "send", result=None)
    chaos.watch(keyed_mailer, "send", result=None, key="key")


# -- BUG-07: delete all rows at the end -------------------------------------------------------------------------------


def mail_all_then_delete() -> None:
    with Session.begin() as session:
        rows = session.execute(select(Missed.receiver, Missed.id).order_by(Missed.id)).all()
        for receiver, numbers in by_receiver(rows).items():
            queue.publish("missed messages", f"{receiver}: {numbers}")
        session.execute(delete(Missed).where(Missed.id.in_([number for _, number in rows])))


def delete_then_mail_each() -> None:
    with Session() as session:
        rows = session.execute(select(Missed.receiver, Missed.id).order_by(Missed.id)).all()
        for receiver, numbers in by_receiver(rows).items():
            session.execute(delete(Missed).where(Missed.id.in_(numbers)))
            session.commit()
            queue.publish("missed messages", f"{receiver}: {numbers}")


def enqueue_and_delete_each() -> None:
    with Session() as session:
        rows = session.execute(select(Missed.receiver, Missed.id).order_by(Missed.id)).all()
        for receiver, numbers in by_receiver(rows).items():
            session.add(Task(name="missed messages", receiver=receiver, numbers=str(numbers)))
            session.execute(delete(Missed).where(Missed.id.in_(numbers)))
            session.commit()


def enqueue_what_we_have_deleted() -> None:
    with Session() as session:
        rows = session.execute(select(Missed.receiver, Missed.id).order_by(Missed.id)).all()
        for receiver, numbers in by_receiver(rows).items():
            if session.execute(delete(Missed).where(Missed.id.in_(numbers))).rowcount:
                session.add(Task(name="missed messages", receiver=receiver, numbers=str(numbers)))
            session.commit()


def test_one_batch_for_many_receivers(chaos, crashing, racing, both):
    """BUG-07 (zulip). "One user's event was poisonous. All users before that one got their mail again every minute."

    The rows go only when the loop is through, so whatever stops it half way repeats the first half. Deleting each
    receiver's rows first loses a mail instead. Deleted in the transaction that enqueues, receiver by receiver, nothing
    is lost or repeated, and the batch makes progress. Two at a time enqueue what the other one has just deleted, unless
    they look at how many rows were left to delete.
    """
    refuted(chaos, mail_all_then_delete, duplicated="Queue.publish")
    refuted(chaos, delete_then_mail_each, lost="Queue.publish")
    proven(crashing, enqueue_and_delete_each)
    refuted(racing, enqueue_and_delete_each, duplicated="tasks")
    proven(both, enqueue_what_we_have_deleted)


# -- BUG-12: mark all rows at the end, and a lock in the mail task ----------------------------------------------------


def dispatch_then_mark() -> None:
    with Session.begin() as session:
        unprocessed = select(Missed.receiver, Missed.id).where(Missed.processed_at.is_(None)).order_by(Missed.id)
        rows = session.execute(unprocessed).all()
        for receiver, numbers in by_receiver(rows).items():
            queue.publish("send_digest", f"{receiver}: {numbers}")
        ids = [number for _, number in rows]
        session.execute(update(Missed).where(Missed.id.in_(ids)).values(processed_at=datetime.now()))


def dispatch_and_mark_together() -> None:
    with Session.begin() as session:
        unprocessed = select(Missed.receiver, Missed.id).where(Missed.processed_at.is_(None)).order_by(Missed.id)
        rows = session.execute(unprocessed).all()
        for receiver, numbers in by_receiver(rows).items():
            session.add(Task(name="send_digest", receiver=receiver, numbers=str(numbers)))
        ids = [number for _, number in rows]
        session.execute(update(Missed).where(Missed.id.in_(ids)).values(processed_at=datetime.now()))


def dispatch_what_we_have_marked() -> None:
    with Session.begin() as session:
        unprocessed = update(Missed).where(Missed.processed_at.is_(None)).values(processed_at=datetime.now())
        rows = session.execute(unprocessed.returning(Missed.receiver, Missed.id)).all()
        for receiver, numbers in by_receiver(sorted(rows)).items():
            session.add(Task(name="send_digest", receiver=receiver, numbers=str(numbers)))


def send_digest_under_lock(receiver: str, numbers: list[int]) -> None:
    lock = f"mail:{receiver}:{'_'.join(map(str, numbers))}"
    if not redis.set(lock, 1, nx=True, ex=300):
        return
    try:
        mailer.send(receiver, f"{len(numbers)} new messages")
        with Session.begin() as session:
            session.execute(update(Missed).where(Missed.id.in_(numbers)).values(sent_at=datetime.now()))
    except Exception:
        pass
    finally:
        redis.delete(lock)


def send_digest_with_key(receiver: str, numbers: list[int]) -> None:
    with Session.begin() as session:
        unsent = select(Missed.id).where(Missed.id.in_(numbers), Missed.sent_at.is_(None))
        if session.scalars(unsent).first() is None:
            return
        key = f"digest:{receiver}:{'_'.join(map(str, numbers))}"
        keyed_mailer.send(receiver, f"{len(numbers)} new messages", key=key)
        session.execute(update(Missed).where(Missed.id.in_(numbers)).values(sent_at=datetime.now()))


def test_a_batch_marked_at_the_end(chaos, crashing, racing, both):
    """BUG-12 (plane). "Notifications come twice when the batcher overlaps itself or is run again."

    The same gap as above, with a mark instead of a delete. Mark and tasks belong into one transaction, and the mark
    comes first: what it returns nobody else gets.
    """
    refuted(chaos, dispatch_then_mark, duplicated="Queue.publish")
    proven(crashing, dispatch_and_mark_together)
    refuted(racing, dispatch_and_mark_together, duplicated="tasks")
    proven(both, dispatch_what_we_have_marked)


def test_a_lock_instead_of_a_memory(chaos):
    """BUG-12, the task that it starts. A lock was put around the mail, and is deleted when the mail is out.

    A lock says that somebody is at work, not that the work was done. Died under the lock: the retry finds it, returns,
    and the digest is lost. Died after its release: the retry takes it again, and the digest is sent twice. The twin
    asks the rows whether it was sent, and covers the gap with a key.
    """
    refuted(chaos, send_digest_under_lock, "ann", [1, 3], lost=("Mailer.send", "missed"), duplicated="Mailer.send")
    proven(chaos, send_digest_with_key, "ann", [1, 3])
