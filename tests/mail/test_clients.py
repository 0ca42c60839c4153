"""smtplib against the mailbox behaves as against a server; and what it raises is what we say it raises."""

from __future__ import annotations

import smtplib
import socket
import threading
from collections.abc import Callable
from email.message import EmailMessage
from email.utils import make_msgid
from typing import Any

import pytest

import retrychaos
from retrychaos import Chaos
from retrychaos.world.mail_clients import refused, unanswered
from retrychaos.world.mail_dialogue import Dialogue
from retrychaos.world.mailbox import Mail
from tests.mail.conftest import letter


def in_a_job(chaos: Chaos, work: Callable[[], Any]) -> Any:
    """What `work` returns or raises inside of a delivery."""
    got: list[Any] = []

    def job() -> None:
        try:
            got.append(work())
        except Exception as problem:
            got.append(problem)
        with smtplib.SMTP("smtp.example.com") as server:
            server.sendmail("a@x.y", ["end@x.y"], "Subject: end")

    chaos(tolerate=["mail"]).check(job)
    return got[0]


def test_partial_refusals(chaos: Chaos) -> None:
    chaos.mail.refuse("bob@example.com")

    def some() -> Any:
        with smtplib.SMTP("smtp.example.com") as server:
            return server.sendmail("a@x.y", ["ann@example.com", "Bob@example.com"], "Subject: hi")

    def all_of_them() -> None:
        with smtplib.SMTP("smtp.example.com") as server:
            server.sendmail("a@x.y", ["bob@example.com"], "Subject: hi")

    assert in_a_job(chaos, some) == {"Bob@example.com": (550, b"5.1.1 mailbox unavailable")}
    assert [mail.recipients for mail in chaos.mail] == [("ann@example.com",), ("end@x.y",)]
    error = in_a_job(chaos, all_of_them)
    assert isinstance(error, smtplib.SMTPRecipientsRefused) and "bob@example.com" in error.recipients
    with pytest.raises(ValueError, match="400 to 599"):
        chaos.mail.refuse("x@y.z", 250)


def test_no_recipients(chaos: Chaos) -> None:
    def nobody() -> None:
        with smtplib.SMTP("smtp.example.com") as server:
            server.sendmail("a@x.y", [], "Subject: hi")

    assert isinstance(in_a_job(chaos, nobody), smtplib.SMTPException)


def test_commands_by_hand(chaos: Chaos) -> None:
    def dialogue() -> list[int]:
        with smtplib.SMTP() as server:
            codes = [server.connect("smtp.example.com")[0], server.helo()[0], server.ehlo()[0]]
            assert server.has_extn("starttls") and server.has_extn("auth")
            codes += [server.docmd("DATA")[0], server.docmd("RCPT", "TO:<a@x.y>")[0], server.docmd("WHAT")[0]]
            codes += [server.mail("a@x.y")[0], server.docmd("DATA")[0], server.rcpt("b@x.y")[0]]
            codes += [server.rset()[0], server.noop()[0], server.verify("a@x.y")[0], server.starttls()[0]]
            server.ehlo()
            assert not server.has_extn("starttls")
            codes += [server.login("user", "password")[0], server.docmd("AUTH", "XOAUTH2 dG9rZW4=")[0]]
            return codes

    assert in_a_job(chaos, dialogue) == [220, 250, 250, 503, 503, 502, 250, 503, 250, 250, 250, 252, 220, 235, 235]


def test_after_the_end(chaos: Chaos) -> None:
    def closed() -> None:
        server = smtplib.SMTP("smtp.example.com")
        server.quit()
        server.sendmail("a@x.y", ["b@x.y"], "x")

    assert isinstance(in_a_job(chaos, closed), smtplib.SMTPServerDisconnected)


def test_local_mail_transfer(chaos: Chaos) -> None:
    def lmtp() -> Any:
        with smtplib.LMTP("lmtp.example.com") as server:
            return server.sendmail("a@x.y", ["b@x.y"], "Subject: hi")

    assert in_a_job(chaos, lmtp) == {}


def test_a_refused_connection() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(OSError) as caught:
        smtplib.SMTP("127.0.0.1", port)
    assert (type(caught.value), caught.value.args) == (type(refused()), refused().args)


def test_an_answer_that_does_not_come() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        over = threading.Event()

        def serve() -> None:
            connection, _ = listening.accept()
            accepted: list[Mail] = []
            server = Dialogue(accepted.append, {}, secure=True)
            with connection:
                connection.sendall(b"220 hello\r\n")
                while not accepted:
                    answer = server.feed(connection.recv(65_536))
                    if not accepted:
                        connection.sendall(answer)
                over.wait(10)

        thread = threading.Thread(target=serve)
        thread.start()
        client = smtplib.SMTP("127.0.0.1", listening.getsockname()[1], timeout=0.5)
        with pytest.raises(smtplib.SMTPException) as caught:
            client.send_message(letter())
        over.set()
        thread.join()
    assert (type(caught.value), caught.value.args) == (type(unanswered()), unanswered().args)


def test_what_comes_in_pieces() -> None:
    mails: list[Mail] = []
    dialogue = Dialogue(mails.append, {}, secure=True)
    text = b"EHLO me\r\nMAIL FROM:<a@x.y>\r\nRCPT TO:<b@x.y>\r\nDATA\r\n..dot\r\nline\r\n.\r\nQUIT\r\n"
    answers = b"".join(dialogue.feed(text[at : at + 1]) for at in range(len(text)))
    assert mails == [Mail("a@x.y", ("b@x.y",), b".dot\r\nline\r\n")]
    assert answers.endswith(b"250 2.0.0 accepted\r\n221 2.0.0 bye\r\n") and dialogue.ended


def test_nothing_is_left_patched(untouched: Any) -> None:
    before = [vars(smtplib.SMTP)[name] for name in ("_get_socket", "data", "mail", "rcpt", "starttls")]
    getfqdn = socket.getfqdn

    def job() -> None:
        with smtplib.SMTP("smtp.example.com") as server:
            server.sendmail("a@x.y", ["b@x.y"], "Subject: hi")

    with retrychaos.Chaos(duplicates=2) as chaos:
        with untouched():
            chaos.explore(job)
    assert [vars(smtplib.SMTP)[name] for name in ("_get_socket", "data", "mail", "rcpt", "starttls")] == before
    assert socket.getfqdn is getfqdn


def test_mails_of_all_kinds() -> None:
    broken = Mail("", ("a@x.y",), b"Content-Type: text/plain; charset=nonsense\r\n\r\n\xff\xfe")
    assert broken.subject == "" and isinstance(broken.body, str) and broken.row
    assert Mail("", (), b"").row
    one, two = (Mail("a@x.y", ("b@x.y",), bytes(letter())) for _ in range(2))
    assert one.data != two.data and one.row == two.row
    assert Mail("a@x.y", ("b@x.y",), bytes(letter(subject="other"))).row != one.row


def test_ids_by_which_parts_name_each_other() -> None:
    def inline(picture: bytes) -> Mail:
        message, name = EmailMessage(), make_msgid()
        message.set_content(f'<img src="cid:{name[1:-1]}">', subtype="html")
        message.add_related(picture, "image", "png", cid=name)
        return Mail("a@x.y", ("b@x.y",), bytes(message))

    assert inline(b"1").row == inline(b"1").row != inline(b"2").row
