"""PostgreSQL's protocol, as far as the harness speaks it itself, and how a connection stands.

Source: https://www.postgresql.org/docs/current/protocol-message-formats.html
"""

from __future__ import annotations

import select
import struct
import time
from collections.abc import Iterator
from typing import TypeAlias

Text: TypeAlias = tuple[str | None, ...]
"""A row, as PostgreSQL writes it."""

IDLE, ACTIVE, IN_TRANSACTION, FAILED, UNKNOWN = range(5)
"""How a connection stands, in the numbers of libpq."""
_STATES = {b"I": IDLE, b"T": IN_TRANSACTION, b"E": FAILED}
_READY = b"Z\x00\x00\x00\x05"
"""ReadyForQuery, the last message of each answer; one more byte says how the connection stands."""
ALL_GONE = "; ".join(
    (
        "ROLLBACK",  # and what DISCARD ALL does, which must not be sent together with anything else
        "CLOSE ALL",
        "SET SESSION AUTHORIZATION DEFAULT",
        "RESET ALL",
        "DEALLOCATE ALL",
        "UNLISTEN *",
        "SELECT pg_advisory_unlock_all()",
        "DISCARD PLANS",
        "DISCARD TEMP",
        "DISCARD SEQUENCES",
    )
)
"""After these statements a session is as it was when it began."""
TERMINATE = b"X\x00\x00\x00\x04"
_CANCEL = 80877102
"""The code of a CancelRequest."""
_SOON = 0.0003
"""Seconds in which most answers come. Who sleeps meanwhile is woken later than that: most of a question's time."""
_perf_counter = time.perf_counter


class Refused(Exception):
    """The server says no. state: its SQLSTATE."""

    def __init__(self, message: str, state: str | None) -> None:
        super().__init__(message)
        self.state = state


def until_ready(descriptor: int, writable: bool, patience: float) -> bool:
    """Wait until something can be read (or written). False if it takes longer than so many seconds."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN | (select.POLLOUT if writable else 0))
    soon = _perf_counter() + _SOON
    while _perf_counter() < soon:
        if poll.poll(0):
            return True
    return bool(poll.poll(patience * 1000))


def state_after(end: bytes) -> int:
    """How a connection stands on which this came last; ACTIVE unless it is the end of an answer."""
    return _STATES.get(end[-1:], ACTIVE) if end[-6:-1] == _READY else ACTIVE


def query(sql: str) -> bytes:
    text = sql.encode("utf-8", "surrogateescape") + b"\0"
    return b"Q" + struct.pack("!i", len(text) + 4) + text


def cancel_request(pid: int, secret: int) -> bytes:
    return struct.pack("!iiii", 16, _CANCEL, pid, secret)


def greeting_of(answer: bytes) -> bytes:
    """What the server says to somebody whom it trusts, of what it has said while a connection was opened."""
    said = (
        answer[at:to] for at, to in _places(answer) if answer[at : at + 1] != b"R" or answer[at + 5 : to] == bytes(4)
    )
    return b"".join(said)


def rows_of(answer: bytes) -> list[Text] | None:
    """The rows of the last statement of a query; None if the answer is not complete yet. Raises Refused."""
    messages = list(_messages(answer)) if state_after(answer) != ACTIVE else []
    if not messages or messages[-1][0] != b"Z":
        return None
    rows: list[Text] = []
    for kind, body in messages:
        if kind == b"E":
            about = dict(_fields(body))
            raise Refused(about.get("M", "no message"), about.get("C"))
        if kind == b"T":
            rows = []
        elif kind == b"D":
            rows.append(tuple(_values(body)))
    return rows


def _messages(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(kind, body) of each whole message."""
    return ((data[at : at + 1], data[at + 5 : to]) for at, to in _places(data))


def _places(data: bytes) -> Iterator[tuple[int, int]]:
    """Where each whole message begins and ends."""
    at = 0
    while at + 5 <= len(data):
        to = at + 1 + int.from_bytes(data[at + 1 : at + 5], "big")
        if to > len(data):
            return
        yield at, to
        at = to


def _values(body: bytes) -> Iterator[str | None]:
    at = 2
    for _ in range(int.from_bytes(body[:2], "big")):
        size = int.from_bytes(body[at : at + 4], "big", signed=True)
        at += 4
        if size < 0:
            yield None
        else:
            yield body[at : at + size].decode("utf-8", "surrogateescape")
            at += size


def _fields(body: bytes) -> Iterator[tuple[str, str]]:
    for field in body.split(b"\0"):
        if field:
            yield chr(field[0]), field[1:].decode("utf-8", "replace")
