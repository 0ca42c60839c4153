"""Losers: the duplicate was noticed, and what it does next is the fault."""

from __future__ import annotations

import uuid

import pytest
from sqlalchemy import update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import proven, refuted
from scenarios.shop import Session, mailer, queue, save


class Base(DeclarativeBase):
    pass


class Notification(Base):
    __tablename__ = "notifications"
    id: Mapped[str] = mapped_column(primary_key=True)
    body: Mapped[str]


class Task(Base):
    __tablename__ = "tasks"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(default="queued")
    result: Mapped[str | None]


class Retry(Exception):
    """A problem with the database: try again later."""


class AlreadyRunning(Exception):
    """Somebody else has it."""


def arrange() -> None:
    save(Task(id=1))


@pytest.fixture(autouse=True)
def outside(chaos):
    chaos.watch(queue, "publish", result=None, key="key")
    chaos.watch(mailer, "send", result=None)


# -- BUG-66: a known row is a database error --------------------------------------------------------------------------


def fan_out_with_new_ids(rows: list[str]) -> None:
    for row in rows:
        queue.publish("save", row, key=str(uuid.uuid4()))


def fan_out_with_ids_of_the_rows(job: str, rows: list[str]) -> None:
    for number, row in enumerate(rows):
        queue.publish("save", row, key=str(uuid.uuid5(uuid.NAMESPACE_OID, f"{job}:{number}")))


def save_or_retry(notification_id: str, body: str) -> None:
    try:
        save(Notification(id=notification_id, body=body))
    except IntegrityError:
        raise Retry(notification_id) from None
    queue.publish("deliver", notification_id, key=notification_id)


def save_or_stop(notification_id: str, body: str) -> None:
    try:
        save(Notification(id=notification_id, body=body))
    except IntegrityError:
        return  # the copy is late: it is saved
    queue.publish("deliver", notification_id, key=notification_id)


def save_or_go_on(notification_id: str, body: str) -> None:
    try:
        save(Notification(id=notification_id, body=body))
    except IntegrityError:
        pass  # it is saved; whether it was passed on, nobody knows
    queue.publish("deliver", notification_id, key=notification_id)


def test_a_known_row_is_a_database_error(crashing, racing, both):
    """BUG-66 (notifications-api). "The queue delivered it twice, and the copy retried until it was exhausted."

    An id that is made on every attempt does not collide, and is a second text message. An id from outside does, and
    "database error, try again" retries for ever what will never work. To stop instead is right for a copy, and wrong
    for the redelivery of a dead one, which had saved and not yet passed on. Nobody knows which of the two it is, so go
    on, and let the key decide.
    """
    refuted(crashing, fan_out_with_new_ids, ["a", "b"], duplicated="Queue.publish")
    refuted(racing, fan_out_with_new_ids, ["a", "b"], duplicated="Queue.publish")
    proven(both, fan_out_with_ids_of_the_rows, "job", ["a", "b"])

    refuted(crashing, save_or_retry, "n1", "hello", stuck="Retry: n1")
    proven(racing, save_or_stop, "n1", "hello")
    refuted(crashing, save_or_stop, "n1", "hello", lost="Queue.publish")
    proven(both, save_or_go_on, "n1", "hello")


# -- BUG-80: the loser reports a failure ------------------------------------------------------------------------------


def run_or_report_failure(task_id: int) -> None:
    task = update(Task).where(Task.id == task_id)
    with Session() as session:
        try:
            if not session.execute(task.where(Task.state == "queued").values(state="running")).rowcount:
                raise AlreadyRunning
            session.commit()
            session.execute(task.values(state="success", result="42"))
            session.commit()
        except Exception:
            session.rollback()
            session.execute(task.values(state="failed"))
            session.commit()
            mailer.send("ops@example.com", f"Task {task_id} has failed")


def run_or_leave(task_id: int) -> None:
    task = update(Task).where(Task.id == task_id)
    with Session() as session:
        if not session.execute(task.where(Task.state == "queued").values(state="running")).rowcount:
            return
        session.commit()
        session.execute(task.values(state="success", result="42"))
        session.commit()


def run_in_one(task_id: int) -> None:
    queued = update(Task).where(Task.id == task_id, Task.state == "queued")
    with Session() as session:
        if not session.execute(queued.values(state="running")).rowcount:
            return
        session.execute(update(Task).where(Task.id == task_id).values(state="success", result="42"))
        session.commit()


def test_the_loser_reports_a_failure(crashing, racing, both):
    """BUG-80 (airflow). "The task is fine, it is still running. Its status says failed, and there was a mail."

    The copy finds it running, raises, and the handler for everything writes down a failure of what it has never begun.
    "Running already" is no failure: leave. (Then nobody resumes what the dead have left as running. Whoever writes the
    status only together with the result has no such state, and nothing to clean up.)
    """
    refuted(racing, run_or_report_failure, 1, duplicated="Mailer.send")
    refuted(crashing, run_or_report_failure, 1, duplicated="Mailer.send")

    proven(racing, run_or_leave, 1)
    refuted(crashing, run_or_leave, 1, lost="tasks")

    proven(both, run_in_one, 1)
