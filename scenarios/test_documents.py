"""Documents: generating is expensive and may happen twice; what counts is where the result goes.

One document is one Redis key here: ``SET`` replaces it as a whole, as writing to a temporary file and renaming it does.
For files see test_files.py.
"""

from __future__ import annotations

import uuid

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import proven, refuted
from scenarios.shop import Session, redis, save


class Base(DeclarativeBase):
    pass


class Statement(Base):
    __tablename__ = "statements"
    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str]
    generated: Mapped[bool] = mapped_column(default=False)


class PrintShop:
    """Prints and posts whatever arrives."""

    def post(self, text: str) -> None: ...


print_shop = PrintShop()


def arrange() -> None:
    save(Statement(id=1, text="March: 42.00"))


def generate_at_the_print_shop(statement_id: int) -> None:
    with Session.begin() as session:
        statement = session.get_one(Statement, statement_id)
        if statement.generated:
            return
        print_shop.post(statement.text)
        statement.generated = True


def generate_under_a_new_name(statement_id: int) -> None:
    with Session.begin() as session:
        statement = session.get_one(Statement, statement_id)
        if statement.generated:
            return
        redis.set(f"documents:{uuid.uuid4()}", f"<pdf>{statement.text}</pdf>")
        statement.generated = True


def generate_over_the_old_one(statement_id: int) -> None:
    with Session.begin() as session:
        statement = session.get_one(Statement, statement_id)
        if statement.generated:
            return
        redis.set(f"documents:{statement.id}", f"<pdf>{statement.text}</pdf>")
        statement.generated = True


def test_generate_unless_generated(chaos):
    """S5. "Every statement was in the post twice, though the job returns at once if the flag is set."

    The flag is set after the generation, so there is always a moment in which the one has happened and the other has
    not. Whether that hurts depends on the effect alone: printing twice is two letters, a new name for every attempt
    leaves an orphan, and writing the same document again leaves one document.
    """
    chaos.watch(print_shop, "post", result=None)
    refuted(chaos, generate_at_the_print_shop, 1, duplicated="PrintShop.post")
    refuted(chaos, generate_under_a_new_name, 1, duplicated="redis documents:<random>")
    proven(chaos, generate_over_the_old_one, 1)
