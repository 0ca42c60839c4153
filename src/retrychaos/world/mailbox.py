"""Mails: what arrived in the clean run, for the test to look at, and each as a row of the ledger."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, overload

from retrychaos.model.ledger import Cell, Row

if TYPE_CHECKING:
    from email.message import EmailMessage

COLUMNS: Final = ("recipients", "subject", "body", "sender", "headers", "attachments")
_VOLATILE: Final = frozenset({"date", "message-id", "received", "dkim-signature", "mime-version"})
"""Headers that say when and by whom a mail was made, not what it says."""


@dataclass(frozen=True)
class Mail:
    """One mail that was accepted. `sender` and `recipients` are those of the envelope, Bcc included."""

    sender: str
    recipients: tuple[str, ...]
    data: bytes

    @cached_property
    def message(self) -> EmailMessage:
        """The whole mail, parsed."""
        import email.policy

        found: EmailMessage = email.message_from_bytes(self.data, policy=email.policy.default)
        return found

    @property
    def subject(self) -> str:
        return str(self.message.get("Subject", ""))

    @property
    def body(self) -> str:
        """The text, or the HTML where there is no text."""
        part = self.message.get_body(("plain", "html"))
        return "" if part is None else _text(part)

    @cached_property
    def row(self) -> Row:
        """What counts: not the date, the ids and the boundaries of its parts."""
        headers = tuple(
            f"{name}: {value}"
            for name, value in self.message.items()
            if name.lower() not in _VOLATILE and not name.lower().startswith("content-") and name.lower() != "subject"
        )
        main = self.message.get_body(("plain", "html"))
        parts = [part for part in self.message.walk() if part is not main and not part.is_multipart()]
        ids = [str(part.get("Content-ID", "")).strip().strip("<>") for part in parts]

        def named(text: str) -> str:
            """The ids by which the parts of a mail name each other are drawn for each."""
            for number, name in enumerate(ids):
                text = text.replace(f"cid:{name}", f"cid:part {number}") if name else text
            return text

        rest = tuple(_part(part, named) for part in parts)
        return (", ".join(sorted(self.recipients)), self.subject, named(self.body), self.sender, headers, rest)

    def __repr__(self) -> str:
        return f"<mail to {', '.join(self.recipients)}: {self.subject}>"


def _text(part: Any) -> str:
    try:
        content = part.get_content()
    except (LookupError, KeyError):  # an unknown charset or type
        content = part.get_payload(decode=True)
    if isinstance(content, bytes):
        return content.decode("utf-8", "replace")
    return str(content).replace("\r\n", "\n")


def _part(part: Any, named: Callable[[str], str]) -> Cell:
    kind, name = part.get_content_type(), part.get_filename() or ""
    if kind.startswith("text/"):
        return (kind, name, named(_text(part)))
    payload = part.get_payload(decode=True)
    data = payload if isinstance(payload, bytes) else repr(part.get_payload()).encode()
    return (kind, name, f"{len(data)} bytes", hashlib.blake2b(data, digest_size=16).hexdigest())


class Mailbox(Sequence[Mail]):
    """The mails of the clean run of the last check, in the order in which they were accepted."""

    def __init__(self) -> None:
        self._mails: tuple[Mail, ...] = ()
        self.refused: dict[str, tuple[int, str]] = {}

    def refuse(self, address: str, code: int = 550, reason: str = "5.1.1 mailbox unavailable") -> None:
        """The server refuses this recipient from now on: 5xx for ever, 4xx for now."""
        if not 400 <= code < 600:
            raise ValueError(f"a server refuses with a code from 400 to 599, not {code}")
        self.refused[address.lower()] = (code, reason)

    def take(self, mails: Sequence[Mail]) -> None:
        self._mails = tuple(mails)

    @overload
    def __getitem__(self, index: int) -> Mail: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Mail]: ...

    def __getitem__(self, index: int | slice) -> Mail | Sequence[Mail]:
        return self._mails[index]

    def __len__(self) -> int:
        return len(self._mails)

    def __iter__(self) -> Iterator[Mail]:
        return iter(self._mails)

    def __repr__(self) -> str:
        return f"<mailbox {list(self._mails)!r}>"
