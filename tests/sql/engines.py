"""The SQLite engines that a test suite may have, and a small shop to work on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, ForeignKey, Integer, String, create_engine, event
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import NullPool, StaticPool


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(String, default="new")
    n: Mapped[int] = mapped_column(Integer, default=0)


class Invoice(Base):
    __tablename__ = "invoices"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"))
    note: Mapped[str | None]


class Line(Base):
    __tablename__ = "lines"
    id: Mapped[int] = mapped_column(primary_key=True)
    invoice_id: Mapped[int] = mapped_column(ForeignKey("invoices.id", ondelete="CASCADE"))
    product: Mapped[str]


class Once(Base):
    __tablename__ = "once"
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(unique=True)


def _file(path: Path) -> Engine:
    return create_engine(f"sqlite:///{path / 'shop.db'}")


def _wal(path: Path) -> Engine:
    engine = create_engine(f"sqlite:///{path / 'shop.db'}")

    @event.listens_for(engine, "connect")
    def pragmas(connection: Any, record: Any) -> None:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA foreign_keys = ON")

    return engine


def _null(path: Path) -> Engine:
    return create_engine(f"sqlite:///{path / 'shop.db'}", poolclass=NullPool)


def _static(path: Path) -> Engine:
    return create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})


def _memory(path: Path) -> Engine:
    return create_engine("sqlite://")


ENGINES: dict[str, Callable[[Path], Engine]] = {
    "file": _file,
    "wal": _wal,
    "nullpool": _null,
    "static": _static,
    "memory": _memory,
}


def furnish(engine: Engine) -> None:
    """Tables, and one order of one line."""
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([Order(id=1), Order(id=2)])
        session.commit()
