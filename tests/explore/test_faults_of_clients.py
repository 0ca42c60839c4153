"""Errors and lost replies of HTTP clients, SMTP and files: what the client really raises reaches the job."""

from __future__ import annotations

import contextlib
import smtplib
from collections.abc import Callable
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests

from retrychaos import Chaos
from retrychaos.report.text import full_text

PAY = "https://api.pay.test"


@pytest.fixture
def check(chaos: Chaos) -> Chaos:
    pay = chaos.http.provider(PAY, key_header="Idempotency-Key")
    pay.post("/charges", json={"id": "ch_1"}, status=201)
    return chaos(faults=True, crashes=0)


def found(check: Chaos, job: Callable[..., None], *args: Any) -> set[tuple[str, str]]:
    report = check.explore(job, *args)
    assert report.verdict == ("failed" if report.findings else "proven"), full_text(report)
    for finding in report.findings:
        again = check.run(job, *args, plan=finding.token)
        assert (again.kind, again.effect) == (finding.kind, finding.effect), full_text(report)
    return {(finding.kind, finding.effect) for finding in report.findings}


def charge_by_requests() -> None:
    requests.post(f"{PAY}/charges", json={"order": 1}, timeout=5).raise_for_status()


def charge_by_requests_with_a_key() -> None:
    requests.post(f"{PAY}/charges", json={"order": 1}, headers={"Idempotency-Key": "1"}, timeout=5).raise_for_status()


def charge_by_httpx() -> None:
    httpx.post(f"{PAY}/charges", json={"order": 1}).raise_for_status()


def charge_and_swallow() -> None:
    with contextlib.suppress(requests.ConnectionError):
        charge_by_requests()


def charge_again_if_refused() -> None:
    """A refused connection has done nothing, so this is right; and the key covers what a timeout has done."""
    try:
        charge_by_requests_with_a_key()
    except requests.ConnectionError:
        charge_by_requests_with_a_key()


def charge_again_after_a_timeout() -> None:
    try:
        charge_by_requests()
    except requests.Timeout:
        charge_by_requests()


DUPLICATED = ("duplicated", f"POST {PAY}/charges")


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (charge_by_requests_with_a_key, set()),
        (charge_again_if_refused, set()),
        (charge_by_requests, {DUPLICATED}),
        (charge_by_httpx, {DUPLICATED}),
        (charge_and_swallow, {DUPLICATED, ("lost", f"POST {PAY}/charges")}),
        (charge_again_after_a_timeout, {DUPLICATED}),
    ],
)
def test_http(check: Chaos, job: Callable[[], None], expected: set[tuple[str, str]]) -> None:
    assert found(check, job) == expected


def send(subject: str) -> None:
    message = EmailMessage()
    message["From"], message["To"], message["Subject"] = "shop@example.com", "ann@example.com", subject
    with smtplib.SMTP("mail.example.com") as smtp:
        smtp.send_message(message)


def welcome() -> None:
    """S13: right if SMTP refuses, wrong if its answer is lost."""
    send("Welcome")


def welcome_or_never_mind() -> None:
    with contextlib.suppress(smtplib.SMTPServerDisconnected):
        send("Welcome")


def test_mail(check: Chaos) -> None:
    report = check.explore(welcome)
    (finding,) = report.findings
    assert (finding.kind, finding.effect) == ("duplicated", "mail"), full_text(report)
    assert "lost reply" in full_text(report) and "SMTPServerDisconnected" in full_text(report)


def test_mail_that_may_come_twice(check: Chaos) -> None:
    assert found(check(tolerate=["mail"]), welcome) == set()


def test_mail_whose_error_is_swallowed(check: Chaos) -> None:
    assert found(check(tolerate=["mail"]), welcome_or_never_mind) == {("lost", "mail")}


def write(folder: Path) -> None:
    (folder / "report.partial").write_text("all of it")
    (folder / "report.partial").replace(folder / "report")


def write_or_never_mind(folder: Path) -> None:
    with contextlib.suppress(OSError):
        write(folder)


def write_and_clean_up(folder: Path) -> None:
    try:
        write(folder)
    except OSError:
        (folder / "report.partial").unlink(missing_ok=True)
        raise


def test_files(check: Chaos) -> None:
    folder = Path(check.files)
    assert found(check, write, folder) == set()


def test_files_that_are_cleaned_up(check: Chaos) -> None:
    assert found(check, write_and_clean_up, Path(check.files)) == set()


def test_files_whose_error_is_swallowed(check: Chaos) -> None:
    assert ("lost", "files") in {
        (kind, effect.split(" ")[0]) for kind, effect in found(check, write_or_never_mind, Path(check.files))
    }
