"""Cursors: how far a sync has come, and which work hides behind one that is ahead of the truth."""

from __future__ import annotations

import pytest
from sqlalchemy import select, tuple_, update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import proven, refuted
from scenarios.shop import Session, save


class Base(DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "users"
    id: Mapped[int] = mapped_column(primary_key=True)
    created: Mapped[int]


class Cursor(Base):
    __tablename__ = "cursors"
    name: Mapped[str] = mapped_column(primary_key=True)
    created: Mapped[int] = mapped_column(default=0)
    user_id: Mapped[int] = mapped_column(default=0)


def arrange() -> None:
    save(Cursor(name="directory"), User(id=1, created=10), User(id=2, created=20), User(id=3, created=20))


class Directory:
    """Somebody else's list of our users. PUT: the same entry twice is one entry."""

    def put(self, user_id: int, name: str) -> None: ...


directory = Directory()


@pytest.fixture(autouse=True)
def outside(chaos):
    chaos.watch(directory, "put", result=None, key="user_id")


def sync_from_the_last_attempt() -> None:
    with Session() as session:
        cursor = session.get_one(Cursor, "directory")
        new = session.scalars(select(User).where(User.created > cursor.created).order_by(User.id)).all()
        cursor.created = max((user.created for user in new), default=cursor.created)
        session.commit()
        for user in new:
            directory.put(user.id, f"user {user.id}")


def sync_from_the_last_success() -> None:
    with Session() as session:
        cursor = session.get_one(Cursor, "directory")
        new = session.scalars(select(User).where(User.created > cursor.created).order_by(User.id)).all()
        for user in new:
            directory.put(user.id, f"user {user.id}")
        cursor.created = max((user.created for user in new), default=cursor.created)
        session.commit()


def test_a_cursor_that_is_ahead(chaos):
    """BUG-70 (utopia, evc-team-relay). "A user who failed to sync once is never picked up again."

    The time of the *attempt* was stored as the next lower bound, so a run that dies takes its users with it. Move the
    cursor behind the work, and make the work repeatable. (The other half of the bug, a caught error in the middle of
    the loop, is in test_answers.py.)
    """
    refuted(chaos, sync_from_the_last_attempt, lost="Directory.put")
    proven(chaos, sync_from_the_last_success)


def sync_and_save_each_time() -> None:
    with Session() as session:
        cursor = session.get_one(Cursor, "directory")
        query = select(User).where(User.created > cursor.created).order_by(User.created, User.id)
        for user in session.scalars(query).all():
            directory.put(user.id, f"user {user.id}")
            cursor.created = user.created
            session.commit()


def sync_and_save_each_user() -> None:
    with Session() as session:
        cursor = session.get_one(Cursor, "directory")
        position = tuple_(User.created, User.id)
        query = select(User).where(position > (cursor.created, cursor.user_id)).order_by(User.created, User.id)
        for user in session.scalars(query).all():
            directory.put(user.id, f"user {user.id}")
            cursor.created, cursor.user_id = user.created, user.id
            session.commit()


def sync_and_never_go_back() -> None:
    with Session() as session:
        cursor = session.get_one(Cursor, "directory")
        position = tuple_(User.created, User.id)
        query = select(User).where(position > (cursor.created, cursor.user_id)).order_by(User.created, User.id)
        for user in session.scalars(query).all():
            directory.put(user.id, f"user {user.id}")
            behind = update(Cursor).where(tuple_(Cursor.created, Cursor.user_id) < (user.created, user.id))
            session.execute(behind.values(created=user.created, user_id=user.id))
            session.commit()


def test_a_cursor_with_ties(chaos, crashing, racing, both):
    """BUG-70, a relative. "Only ever users who had signed up in the same second as somebody else."

    After each user the cursor is behind the work, as it should be, yet it names a second and not a user: died between
    two users of one second, and `>` skips the other one. A cursor must name its place exactly. And it must not go back:
    a slow one sets it to where *it* is, far behind the fast one that has finished, and then it dies.
    """
    refuted(chaos, sync_and_save_each_time, lost="Directory.put")
    proven(crashing, sync_and_save_each_user)
    proven(racing, sync_and_save_each_user)
    refuted(both, sync_and_save_each_user, lost="cursors")
    proven(both, sync_and_never_go_back)
