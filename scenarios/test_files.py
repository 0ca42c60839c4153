"""Files: a write can be torn, a name cannot. What is under its final name had better be whole."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import pytest
from sqlalchemy import update
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


class Attachment(Base):
    __tablename__ = "attachments"
    id: Mapped[int] = mapped_column(primary_key=True)
    shop: Mapped[str]
    path: Mapped[str]


class Product(Base):
    __tablename__ = "products"
    day: Mapped[str] = mapped_column(primary_key=True)
    path: Mapped[str]


folder = Path()
"""The folder of each test."""


@pytest.fixture(autouse=True)
def place(chaos):
    global folder
    folder = chaos.files.path


def arrange() -> None:
    for path in folder.iterdir():
        path.unlink()
    save(Statement(id=1, text="March: 42.00"))
    redis.rpush("questions", "a", "b", "c", "d")
    (folder / "upload.csv").write_text("ann\nbob\n")


# -- S5 --------------------------------------------------------------------------------------------------------------


def generate(statement_id: int) -> None:
    with Session.begin() as session:
        statement = session.get_one(Statement, statement_id)
        if statement.generated:
            return
        (folder / f"statement-{statement_id}.txt").write_text(f"Statement\n{statement.text}\n")
        statement.generated = True


def generate_into_the_archive(statement_id: int) -> None:
    with Session.begin() as session:
        statement = session.get_one(Statement, statement_id)
        if statement.generated:
            return
        with open(folder / "archive.txt", "a") as archive:
            archive.write(f"Statement\n{statement.text}\n")
        statement.generated = True


def test_generate_unless_generated(crashing):
    """S5 with real files. "We generate unless it was generated." So it is generated twice; that hurts only who appends.

    One file that is written anew is the same file. (The external kind of S5 is in test_documents.py.)
    """
    proven(crashing, generate, 1)
    refuted(crashing, generate_into_the_archive, 1, duplicated="files")


# -- S21 -------------------------------------------------------------------------------------------------------------


def attach_logo(shop: str) -> None:
    if (folder / f"{shop}.svg").exists():
        return
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
        file.write("<svg>logo</svg>")
    os.replace(file.name, folder / f"{shop}.svg")


def attach_logo_as_a_row(shop: str) -> None:
    with Session() as session:
        if session.query(Attachment).filter_by(shop=shop).count():
            return
    attach_logo(shop)
    with Session.begin() as session:
        session.add(Attachment(shop=shop, path=f"{shop}.svg"))


def test_attach_a_logo(both, crashing, racing):
    """S21. "Each shop has one logo, and ours has two." The guard is inside of the job, and two have looked at once.

    A file that is replaced is one file, whoever comes last. A row that is inserted is one more.
    """
    proven(both, attach_logo, "acme")
    proven(crashing, attach_logo_as_a_row, "acme")
    refuted(racing, attach_logo_as_a_row, "acme", duplicated="attachments")


# -- BUG-73 ----------------------------------------------------------------------------------------------------------


def build_map(day: str) -> None:
    out = folder / f"{day}.map"
    if not out.exists():
        out.write_text(f"map of {day}\n" * 1_000)
    note_product(day, out)


def build_map_under_another_name_first(day: str) -> None:
    out, partial = folder / f"{day}.map", folder / f"{day}.map.partial"
    if not out.exists():
        partial.write_text(f"map of {day}\n" * 1_000)
        os.replace(partial, out)
    note_product(day, out)


def note_product(day: str, out: Path) -> None:
    with Session.begin() as session:
        session.merge(Product(day=day, path=out.name))


def test_a_map_that_is_there_is_done(crashing):
    """BUG-73 (driftscan, cohort-extractor). "Half of the sky was missing, and the next run found nothing to do."

    Existing is not being complete. Under another name until it is complete, and then renamed: that is one step.
    """
    refuted(crashing, build_map, "2024-03-01", lost="files")
    proven(crashing, build_map_under_another_name_first, "2024-03-01")


# -- BUG-68 ----------------------------------------------------------------------------------------------------------


def export_by_appending(job: str) -> None:
    offset = int(redis.get(f"offset:{job}") or 0)
    while rows := redis.lrange("questions", offset, offset + 1):
        with open(folder / f"{job}.csv", "a") as file:
            file.writelines(f"{row}\n" for row in rows)
        offset += len(rows)
        redis.set(f"offset:{job}", offset)


def export_truncating_first(job: str) -> None:
    offset = int(redis.get(f"offset:{job}") or 0)
    while rows := redis.lrange("questions", offset, offset + 1):
        with open(folder / f"{job}.csv", "a" if offset else "w") as file:
            file.writelines(f"{row}\n" for row in rows)
        offset += len(rows)
        redis.set(f"offset:{job}", offset)


def export_anew(job: str) -> None:
    with open(folder / f"{job}.csv.partial", "w") as file:
        offset = 0
        while rows := redis.lrange("questions", offset, offset + 1):
            file.writelines(f"{row}\n" for row in rows)
            offset += len(rows)
    os.replace(folder / f"{job}.csv.partial", folder / f"{job}.csv")


def export_anew_alone(job: str) -> None:
    with open(folder / f"{job}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / f"{job}.csv").exists():
            export_anew(job)


def test_an_export_that_appends(crashing, racing, both):
    """BUG-68 (sensei). "Thirty questions, a clean 100 %, and 15,090 lines." The lines were there; the offset was not.

    To begin a new file with the first batch helps the first batch. A whole new file needs no offset at all; and a lock,
    if there may be two, since both write into the same partial one.
    """
    refuted(crashing, export_by_appending, "7", duplicated="files")
    refuted(crashing, export_truncating_first, "7", duplicated="files")
    proven(crashing, export_anew, "7")
    proven(both, export_anew_alone, "7")


# -- BUG-41, BUG-39 --------------------------------------------------------------------------------------------------


def import_then_commit_what_is_gone(statement_id: int) -> None:
    upload = folder / "upload.csv"
    with Session.begin() as session:
        names = upload.read_text().split()
        upload.unlink()
        session.execute(update(Statement).where(Statement.id == statement_id).values(text=", ".join(names)))


def import_then_remove(statement_id: int) -> None:
    upload = folder / "upload.csv"
    if not upload.exists():
        return
    names = upload.read_text().split()
    with Session.begin() as session:
        session.execute(update(Statement).where(Statement.id == statement_id).values(text=", ".join(names)))
    upload.unlink()


def test_an_upload_that_is_taken_away(crashing):
    """BUG-41 (pix), BUG-39 (jobseek). "Every retry of the import says that the file does not exist." It did, once.

    What a job needs to be tried again goes last.
    """
    gone = f"FileNotFoundError: [Errno 2] No such file or directory: '{folder / 'upload.csv'}'"
    refuted(crashing, import_then_commit_what_is_gone, 1, stuck=gone)
    proven(crashing, import_then_remove, 1)
