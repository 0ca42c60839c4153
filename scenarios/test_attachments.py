"""Attachments: the guard inside the job is for speed. What makes it right is that attaching replaces."""

from __future__ import annotations

from sqlalchemy import UniqueConstraint, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import proven, refuted
from scenarios.shop import Session, save


class Base(DeclarativeBase):
    pass


class Company(Base):
    __tablename__ = "companies"
    id: Mapped[int] = mapped_column(primary_key=True)
    logo: Mapped[str | None]


class Attachment(Base):
    __tablename__ = "attachments"
    id: Mapped[int] = mapped_column(primary_key=True)
    company_id: Mapped[int]
    content: Mapped[str]


class NamedAttachment(Base):
    """At most one of each name for a company."""

    __tablename__ = "named_attachments"
    __table_args__ = (UniqueConstraint("company_id", "name"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    company_id: Mapped[int]
    name: Mapped[str]
    content: Mapped[str]


def arrange() -> None:
    save(Company(id=1))


def fetch_logo(company_id: int) -> str:
    """Asks a directory on the web. Reading leaves nothing behind, so it is no effect."""
    return f"<svg>{company_id}</svg>"


def attach_logo_over_the_old_one(company_id: int) -> None:
    with Session() as session:
        company = session.get_one(Company, company_id)
        if company.logo is not None:
            return
        company.logo = fetch_logo(company_id)
        session.commit()


def attach_logo_as_a_row(company_id: int) -> None:
    with Session() as session:
        if session.scalar(select(Attachment).where(Attachment.company_id == company_id)):
            return
        session.add(Attachment(company_id=company_id, content=fetch_logo(company_id)))
        session.commit()


def attach_logo_as_a_named_row(company_id: int) -> None:
    with Session() as session:
        named = insert(NamedAttachment).values(company_id=company_id, name="logo", content=fetch_logo(company_id))
        session.execute(named.on_conflict_do_nothing())
        session.commit()


def test_attach_unless_attached(crashing, racing, both):
    """S21. "Some companies have their logo twice in the list. The job does return if there is one."

    Two deliveries find none, fetch it, and attach it. If attaching *replaces*, the second one writes what is there
    already, and nobody ever knows. If it *inserts*, there are two, unless an index says that there is one of a kind.
    """
    proven(both, attach_logo_over_the_old_one, 1)

    proven(crashing, attach_logo_as_a_row, 1)
    refuted(racing, attach_logo_as_a_row, 1, duplicated="attachments")

    proven(both, attach_logo_as_a_named_row, 1)
