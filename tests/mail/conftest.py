"""What the tests of mail have in common: a send table, and a mail with everything in it that is drawn or timed."""

from __future__ import annotations

import smtplib
from collections.abc import Callable
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from typing import Any, TypeAlias

import pytest
from sqlalchemy import text

from retrychaos import Chaos, Report
from retrychaos.report.text import full_text

Judged: TypeAlias = Callable[..., Report]


class SendTable:
    """Which mails were sent."""

    def __init__(self, chaos: Chaos) -> None:
        self._engine = chaos.sql
        with self._engine.begin() as db:
            db.execute(text("CREATE TABLE sent (name TEXT PRIMARY KEY)"))

    def __contains__(self, name: str) -> bool:
        with self._engine.begin() as db:
            return bool(db.execute(text("SELECT 1 FROM sent WHERE name = :name"), {"name": name}).scalar())

    def add(self, name: str) -> None:
        with self._engine.begin() as db:
            db.execute(text("INSERT OR IGNORE INTO sent VALUES (:name)"), {"name": name})

    def clear(self) -> None:
        with self._engine.begin() as db:
            db.execute(text("DELETE FROM sent"))


@pytest.fixture
def sent(chaos: Chaos) -> SendTable:
    return SendTable(chaos)


@pytest.fixture
def judged(chaos: Chaos) -> Judged:
    def explore(job: Callable[[], Any], verdict: str, *kinds: str, **options: Any) -> Report:
        report = chaos(**{"budget": 120, **options}).explore(job)
        story = full_text(report)
        assert report.verdict == verdict, story
        if kinds:
            assert {finding.kind for finding in report.findings} == set(kinds), story
        return report

    return explore


def letter(to: str = "ann@example.com", subject: str = "Welcome") -> EmailMessage:
    message = EmailMessage()
    message["From"] = "shop@example.com"
    message["To"] = to
    message["Subject"] = subject
    message["Date"] = formatdate()
    message["Message-ID"] = make_msgid()
    message.set_content("Hello Ann\n.dot at the start\n")
    message.add_alternative("<p>Hello</p>", subtype="html")
    message.add_attachment(b"\1\2", maintype="application", subtype="pdf", filename="a.pdf")
    return message


def send(message: EmailMessage) -> None:
    with smtplib.SMTP("smtp.example.com", 587) as server:
        server.starttls()
        server.login("user", "password")
        server.send_message(message)
