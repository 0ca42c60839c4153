"""The server's side of SMTP (RFC 5321), in memory: takes what a client sends, gives what a server answers.

It accepts every login and every mail; only recipients that the test has refused, or that are no addresses, are refused.
TLS is agreed to, and not spoken: there is no wire.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from retrychaos.world.mailbox import Mail

GREETING: Final = b"220 mailbox.retrychaos ESMTP\r\n"
_EXTENSIONS: Final = ("SIZE 104857600", "8BITMIME", "SMTPUTF8", "DSN", "AUTH PLAIN LOGIN", "ENHANCEDSTATUSCODES")
_PATH = re.compile(r"\s*(?:FROM|TO):\s*(?:<([^>]*)>|(\S+))", re.IGNORECASE)
_END = b"\r\n.\r\n"


class Dialogue:
    """One connection. `accept` is called once a mail, at the moment in which a server takes it over."""

    def __init__(self, accept: Callable[[Mail], None], refused: Mapping[str, tuple[int, str]], secure: bool) -> None:
        self._accept = accept
        self._refused = refused
        self._secure = secure
        self._buffer = b""
        self._challenges = 0
        """Lines that the client has still to send for its login."""
        self._sender: str | None = None
        self._recipients: list[str] = []
        self._in_data = False
        self.lmtp = False
        self.ended = False

    def feed(self, data: bytes) -> bytes:
        """What a server answers to that; may be nothing, if a command is not complete."""
        self._buffer += data
        answers = b""
        while not self.ended:
            if self._in_data:
                found = self._content()
                if found is None:
                    break
                answers += self._accepted(found)
                continue
            line, end, rest = self._buffer.partition(b"\n")
            if not end:
                break
            self._buffer = rest
            answers += self._command(line.rstrip(b"\r").decode("utf-8", "surrogateescape")).encode(
                "utf-8", "surrogateescape"
            )
        return answers

    # -- commands ----------------------------------------------------------------------------------------------------

    def _command(self, line: str) -> str:
        if self._challenges:
            self._challenges -= 1
            return "334 UGFzc3dvcmQ6\r\n" if self._challenges else "235 2.7.0 welcome\r\n"
        name, _, rest = line.partition(" ")
        handler = {
            "EHLO": self._hello,
            "LHLO": self._hello,
            "HELO": lambda _: "250 mailbox.retrychaos\r\n",
            "STARTTLS": self._start_tls,
            "AUTH": self._auth,
            "MAIL": self._mail,
            "RCPT": self._rcpt,
            "DATA": self._data,
            "RSET": self._reset,
            "NOOP": lambda _: "250 2.0.0 ok\r\n",
            "VRFY": lambda _: "252 2.0.0 cannot verify, but will take it\r\n",
            "QUIT": self._quit,
        }.get(name.upper())
        if handler is None:
            return f"502 5.5.2 {name.upper()[:20]} is not known here\r\n"
        self.lmtp = self.lmtp or name.upper() == "LHLO"
        return handler(rest)

    def _hello(self, _: str) -> str:
        self._reset("")
        offers = [*_EXTENSIONS, *([] if self._secure else ["STARTTLS"])]
        lines = ["mailbox.retrychaos", *offers]
        return "".join(f"250{'-' if at < len(lines) - 1 else ' '}{line}\r\n" for at, line in enumerate(lines))

    def _start_tls(self, _: str) -> str:
        if self._secure:
            return "503 5.5.1 TLS is on\r\n"
        self._secure = True
        return "220 2.0.0 go ahead\r\n"

    def _auth(self, rest: str) -> str:
        mechanism, _, initial = rest.partition(" ")
        if mechanism.upper() == "LOGIN":
            self._challenges = 1 if initial else 2
            return "334 UGFzc3dvcmQ6\r\n" if initial else "334 VXNlcm5hbWU6\r\n"
        if not initial:
            self._challenges = 1
            return "334 \r\n"
        return "235 2.7.0 welcome\r\n"

    def _mail(self, rest: str) -> str:
        found = _PATH.match(rest)
        if found is None:
            return "501 5.5.4 MAIL FROM:<address>\r\n"
        if self._sender is not None:
            return "503 5.5.1 a mail has begun\r\n"
        self._sender = found[1] if found[1] is not None else found[2]
        return "250 2.1.0 ok\r\n"

    def _rcpt(self, rest: str) -> str:
        if self._sender is None:
            return "503 5.5.1 MAIL first\r\n"
        found = _PATH.match(rest)
        address = "" if found is None else found[1] if found[1] is not None else found[2]
        if not address:
            return "501 5.1.3 RCPT TO:<address>\r\n"
        if address.lower() in self._refused:
            code, reason = self._refused[address.lower()]
            return f"{code} {reason}\r\n"
        self._recipients.append(address)
        return "250 2.1.5 ok\r\n"

    def _data(self, _: str) -> str:
        if not self._recipients:
            return "503 5.5.1 no recipients\r\n" if self._sender is not None else "503 5.5.1 MAIL first\r\n"
        self._in_data = True
        return "354 end with a line that is a dot\r\n"

    def _reset(self, _: str) -> str:
        self._sender, self._recipients = None, []
        return "250 2.0.0 ok\r\n"

    def _quit(self, _: str) -> str:
        self.ended = True
        return "221 2.0.0 bye\r\n"

    # -- the mail itself ---------------------------------------------------------------------------------------------

    def _content(self) -> bytes | None:
        """The text of the mail without the dots that stand for the wire; None if it is not complete."""
        if self._buffer.startswith(_END[2:]):
            found, self._buffer = b"", self._buffer[3:]
            return found
        text, end, rest = self._buffer.partition(_END)
        if not end:
            return None
        self._buffer = rest
        return re.sub(rb"(?m)^\.", b"", text + b"\r\n")

    def _accepted(self, data: bytes) -> bytes:
        mail = Mail(self._sender or "", tuple(self._recipients), data)
        self._in_data = False
        self._reset("")
        self._accept(mail)
        times = len(mail.recipients) if self.lmtp else 1
        return b"250 2.0.0 accepted\r\n" * times
