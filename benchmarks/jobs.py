"""The jobs that are measured: all correct, so that the whole closure is explored."""

from __future__ import annotations

import redis
from sqlalchemy import Engine, create_engine, func, insert, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import StaticPool


class Base(DeclarativeBase):
    """Tables of the measured jobs."""


class Sent(Base):
    """What a job has done: one row an item."""

    __tablename__ = "sent"

    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[int]


class Archive(Base):
    """Rows that make a database big."""

    __tablename__ = "archive"

    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str]


def open_database(path: str | None, archived: int = 0) -> Engine:
    """An engine on a new database with the tables, and that many rows of 100 bytes; in memory if `path` is None."""
    engine = create_engine("sqlite://", poolclass=StaticPool) if path is None else create_engine(f"sqlite:///{path}")
    Base.metadata.create_all(engine)
    if archived:
        with engine.begin() as connection:
            connection.execute(insert(Archive), [{"text": f"{number:0100}"} for number in range(archived)])
    return engine


def send(engine: Engine, items: int) -> None:
    """For each item: look whether it is done, else do it and commit."""
    with Session(engine) as session:
        for item in range(items):
            if session.scalar(select(Sent).where(Sent.item == item)) is None:
                session.add(Sent(item=item))
                session.commit()


def archive(engine: Engine, items: int) -> None:
    """As send(), but each item goes into the big table itself."""
    with Session(engine) as session:
        for item in range(items):
            if session.scalar(select(Archive).where(Archive.text == f"item {item}")) is None:
                session.add(Archive(text=f"item {item}"))
                session.commit()


def catch_up(engine: Engine, items: int) -> None:
    """Item by item at the first attempt; later ones do what is left in one transaction.

    So a check meets many states, all of them while the first delivery runs, without as many long runs.
    """
    with Session(engine) as session:
        done = session.scalar(select(func.count()).select_from(Sent)) or 0
        if done:
            if done < items:
                session.execute(insert(Sent), [{"item": item} for item in range(done, items)])
            session.commit()
            return
        for item in range(items):
            session.add(Sent(item=item))
            session.commit()


def count(client: redis.Redis, items: int) -> None:
    """For each item: look whether it is counted, else mark and count it in one MULTI."""
    for item in range(items):
        if not client.exists(f"done:{item}"):
            pipe = client.pipeline(transaction=True)
            pipe.setnx(f"done:{item}", 1)
            pipe.incr("total")
            pipe.execute()
