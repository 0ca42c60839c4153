"""Jobs that send mail: what a crash loses or repeats, and what of a mail counts."""

from __future__ import annotations

import asyncio
import smtplib
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from email.message import EmailMessage
from typing import Any

import pytest

from retrychaos import Chaos
from tests.mail.conftest import Judged, SendTable, letter, send

aiosmtplib = pytest.importorskip("aiosmtplib")


def test_before_and_after(sent: SendTable, judged: Judged, chaos: Chaos) -> None:
    def mark_then_send() -> None:
        if "welcome" not in sent:
            sent.add("welcome")
            send(letter())

    def send_then_mark() -> None:
        if "welcome" not in sent:
            send(letter())
            sent.add("welcome")

    report = judged(mark_then_send, "failed", "lost")
    assert report.findings[0].effect == "mail"
    sent.clear()
    judged(send_then_mark, "failed", "duplicated")
    (mail,) = chaos.mail
    assert (mail.sender, mail.recipients, mail.subject) == ("shop@example.com", ("ann@example.com",), "Welcome")
    assert mail.body == "Hello Ann\n.dot at the start\n"
    assert mail.message["To"] == "ann@example.com"
    sent.clear()
    report = judged(send_then_mark, "proven", tolerate=["mail"])
    assert "tolerated: mail more than once" in report.guarantee
    sent.clear()
    judged(mark_then_send, "failed", "lost", tolerate=["mail"])


def test_two_senders(sent: SendTable, judged: Judged) -> None:
    def send_unless_sent() -> None:
        if "welcome" not in sent:
            send(letter())
            sent.add("welcome")

    judged(send_unless_sent, "failed", "duplicated", duplicates=2, crashes=0)
    sent.clear()
    judged(send_unless_sent, "proven", duplicates=2, tolerate=["mail"])


def test_what_makes_two_mails_different(sent: SendTable, judged: Judged) -> None:
    def job(subject: str, body: str) -> None:
        message = EmailMessage()
        message["To"], message["Subject"] = "ann@example.com", subject
        message.set_content(body)
        with smtplib.SMTP("smtp.example.com") as server:
            server.send_message(message, from_addr="shop@example.com")

    def a_code_each_time() -> None:
        if "code" not in sent:
            job(f"your code is {uuid.uuid4()}", "type it in")
            sent.add("code")

    def the_second_is_an_apology() -> None:
        if "try" in sent:
            job("sorry, again", "")
            return
        sent.add("try")
        job("welcome", "")

    judged(a_code_each_time, "proven", tolerate=["mail"])
    judged(the_second_is_an_apology, "failed", tolerate=["mail"])


def test_one_connection_for_many(sent: SendTable, judged: Judged, chaos: Chaos) -> None:
    def digest() -> None:
        with smtplib.SMTP_SSL("smtp.example.com") as server:
            server.login("user", "password")
            for name in ("ann", "bob", "cid"):
                if name not in sent:
                    server.sendmail("shop@example.com", [f"{name}@example.com"], f"Subject: for {name}\n\nNews\n")
                    sent.add(name)

    report = judged(digest, "failed", "duplicated")
    assert [mail.recipients[0][:3] for mail in chaos.mail] == ["ann", "bob", "cid"]
    assert report.findings[0].plan.crashes == 1
    sent.clear()
    judged(digest, "proven", tolerate=["mail"])


def test_async_senders(judged: Judged, chaos: Chaos) -> None:
    def job() -> None:
        where: dict[str, Any] = {"hostname": "smtp.example.com", "username": "user", "password": "password"}
        asyncio.run(aiosmtplib.send(letter(), port=587, start_tls=True, **where))
        asyncio.run(aiosmtplib.send(letter("bob@example.com"), port=465, use_tls=True, **where))

    judged(job, "failed", "duplicated")
    assert [mail.recipients for mail in chaos.mail] == [("ann@example.com",), ("bob@example.com",)]
    judged(job, "proven", tolerate=["mail"], duplicates=2)


def test_a_mail_inside_of_a_watched_call_is_covered_by_it(chaos: Chaos, judged: Judged) -> None:
    class Mailer:
        def send(self, to: str, key: str) -> None:
            send(letter(to))

    mailer = Mailer()
    chaos.watch(mailer, "send", key="key")

    def job() -> None:
        mailer.send("ann@example.com", key="welcome ann")

    judged(job, "proven")
    assert len(chaos.mail) == 1


def test_only_the_other_client_is_there() -> None:
    code = """
import asyncio, sys, aiosmtplib, retrychaos
for name in ("smtplib", "retrychaos.world.mail_clients"):
    sys.modules.pop(name, None)
def job():
    asyncio.run(aiosmtplib.send("Subject: hi", sender="a@x.y", recipients=["b@x.y"], hostname="smtp.example.com"))
with retrychaos.Chaos(duplicates=1) as chaos:
    assert chaos.explore(job).findings[0].effect == "mail"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def server() -> Iterator[Any]:
    """A mail server of the test's own."""
    controllers = pytest.importorskip("aiosmtpd.controller")

    class Handler:
        def __init__(self) -> None:
            self.got: list[bytes] = []
            self.port = 0

        async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
            self.got.append(envelope.content)
            return "250 OK"

    handler = Handler()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        handler.port = probe.getsockname()[1]
    controller = controllers.Controller(handler, hostname="127.0.0.1", port=handler.port)
    controller.start()
    yield handler
    controller.stop()


def test_a_server_of_the_test_is_reached(server: Any, sent: SendTable, judged: Judged, chaos: Chaos) -> None:
    def send_then_mark() -> None:
        if "welcome" not in sent:
            with smtplib.SMTP("127.0.0.1", server.port) as client:
                client.send_message(letter())
            sent.add("welcome")

    def async_sender() -> None:
        asyncio.run(aiosmtplib.send(letter(), hostname="127.0.0.1", port=server.port))

    judged(send_then_mark, "failed", "duplicated")
    assert server.got and b"Subject: Welcome" in server.got[0]
    assert [mail.subject for mail in chaos.mail] == ["Welcome"]
    judged(async_sender, "failed", "duplicated")


def test_nobody_listens_here(judged: Judged, chaos: Chaos) -> None:
    def job() -> None:
        with smtplib.SMTP("localhost", 1) as client:
            client.send_message(letter())
        asyncio.run(aiosmtplib.send(letter("bob@example.com"), hostname="127.0.0.1", port=1))

    judged(job, "proven", tolerate=["mail"])
    assert len(chaos.mail) == 2


@pytest.mark.parametrize("isolation", ["sample", "process"])
def test_clients_that_are_imported_late(isolation: str, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        f"""
        import sys

        def job():
            import smtplib
            with smtplib.SMTP("smtp.example.com") as server:
                server.sendmail("a@x.y", ["b@x.y"], "Subject: hi")

        def test_it(chaos):
            sys.modules.pop("smtplib", None)
            report = chaos(isolation={isolation!r}).explore(job)
            assert report.findings[0].kind == "duplicated" and chaos.mail[0].subject == "hi"
            assert "retrychaos" not in str(sys.modules["smtplib"].SMTP.data.__module__)
        """
    )
    pytester.runpytest_subprocess("-p", "no:randomly").assert_outcomes(passed=1)


def test_a_check_without_mail_does_not_load_it() -> None:
    code = """
import sys, retrychaos, fakeredis
client = fakeredis.FakeRedis(server=fakeredis.FakeServer())
before = set(sys.modules)
with retrychaos.Chaos(duplicates=1) as chaos:
    chaos.check(lambda: client.set("a", 1))
new = set(sys.modules) - before
assert not new & {"smtplib", "retrychaos.world.mail_clients", "retrychaos.world.mail_dialogue"}, new
"""
    subprocess.run([sys.executable, "-c", code], check=True)
