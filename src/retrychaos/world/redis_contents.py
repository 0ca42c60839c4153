"""What a Redis server holds, as plain rows: how the keys of each type are read.

Nothing here talks to a server. Reading a key is a small program (a generator) that yields commands and is sent their
replies, so that the programs of many keys share their round trips.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from retrychaos.model.ledger import Cell, Row
from retrychaos.world.redis_commands import Command, Reply, as_text

Part: TypeAlias = tuple[Cell, Cell]
"""A field and a value: one row of a key."""


class Seen(NamedTuple):
    """A key as just read: `deadline` is when it ends by the clock of the server, in milliseconds."""

    kind: str
    deadline: int | None
    body: tuple[Part, ...]


@dataclass(frozen=True, eq=False, slots=True)
class KeyState:
    """One state of one key; shared by all versions of the server in which the key is the same.

    `expiry` is when it ends by the virtual clock, in milliseconds; `ttl` the time that it was granted, in seconds.
    """

    kind: str
    body: tuple[Part, ...]
    expiry: int | None
    ttl: float | None
    rows: tuple[Row, ...]
    dumped: list[bytes] = field(default_factory=list)
    """The DUMP, once somebody needed it. Never compared: it depends on the order of insertion."""

    @classmethod
    def of(cls, key: bytes, seen: Seen, expiry: int | None, ttl: float | None) -> KeyState:
        name = as_text(key)
        rows = tuple((name, seen.kind, part, value, ttl) for part, value in seen.body)
        return cls(seen.kind, seen.body, expiry, ttl, rows)

    def holds(self, kind: str, body: tuple[Part, ...]) -> bool:
        return self.kind == kind and self.body == body


Databases: TypeAlias = Mapping[int, Mapping[bytes, KeyState]]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What restores a server. Plain data, survives pickling."""

    dbs: Databases
    published: tuple[Row, ...]


def granted(remaining: int) -> float:
    """The time to live that was asked for, when `remaining` milliseconds of it are left a moment later."""
    # One millisecond too much is the rounding of floating point clocks, not a longer life.
    unit = 1000 if remaining > 5001 else 100
    return max(0, -((1 - remaining) // unit)) * unit / 1000


# -- reading ---------------------------------------------------------------------------------------------------------

Program: TypeAlias = Generator[list[Command], list[Reply], "Seen | None"]

_READ: dict[str, Callable[[bytes], list[Command]]] = {
    "string": lambda key: [("GET", key)],
    "list": lambda key: [("LRANGE", key, 0, -1)],
    "hash": lambda key: [("HGETALL", key)],
    "set": lambda key: [("SMEMBERS", key)],
    "zset": lambda key: [("ZRANGE", key, 0, -1, "WITHSCORES")],
    "stream": lambda key: [("XRANGE", key, "-", "+"), ("XINFO", "STREAM", key), ("XINFO", "GROUPS", key)],
    "ReJSON-RL": lambda key: [("JSON.GET", key)],
}


def read_key(key: bytes, guess: str, deadline: Command, stranger: Callable[[str], None]) -> Program:
    """The program that reads one key: one round trip if `guess` is its type. `deadline` asks when it ends.

    `stranger` is told of a type that can only be compared by its DUMP.
    """
    guess = guess if guess in _READ else "string"
    kind_reply, when, *replies = yield [("TYPE", key), deadline, *_READ[guess](key)]
    kind = str(as_text(kind_reply))
    if kind == "none":
        return None
    if kind not in _READ:
        stranger(kind)
        replies = yield [("DUMP", key)]
        if isinstance(replies[0], Exception):
            replies = [None]  # whoever wants to save it will say so
    elif kind != guess:
        replies = yield _READ[kind](key)
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    if kind == "stream":
        body = yield from _stream_parts(key, *replies)
    else:
        body = parts_of(kind, replies[0])
    return Seen(kind, when if isinstance(when, int) and when >= 0 else None, body)


def parts_of(kind: str, value: Any) -> tuple[Part, ...]:
    """The rows of a value as the server gave it. What has no order of its own is sorted."""
    if kind == "list":
        return tuple((index, as_text(item)) for index, item in enumerate(value))
    if kind == "set":
        return tuple((None, as_text(member)) for member in sorted(value))
    if kind == "hash":
        return tuple((as_text(name), as_text(item)) for name, item in sorted(_pairs(value)))
    if kind == "zset":
        return tuple((as_text(member), _score(score)) for member, score in sorted(_pairs(value)))
    return ((None, as_text(value)),)


def _score(score: Any) -> float | str | bytes:
    """A number, except for places on fakeredis, whose score is a geohash in letters."""
    try:
        return float(score)
    except ValueError:
        text: str | bytes = as_text(score)
        return text


def _pairs(value: Any) -> Iterable[tuple[bytes, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    return zip(value[::2], value[1::2], strict=True)


def _stream_parts(
    key: bytes, entries: list[Any], info: list[Any], groups: list[Any]
) -> Generator[list[Command], list[Reply], tuple[Part, ...]]:
    parts: list[Part] = [(as_text(name), tuple(map(as_text, values or ()))) for name, values in entries]
    last = as_text(dict(_pairs(info)).get(b"last-generated-id"))  # older fakeredis does not tell
    if last is not None and (not parts or parts[-1][0] != last):
        parts.append(("last-generated-id", last))
    facts = [dict(_pairs(group)) for group in groups]
    names = [fact[b"name"] for fact in facts]
    if not names:
        return tuple(parts)
    asked = [("XPENDING", key, name, "-", "+", 1_000_000) for name in names]
    replies = yield [*asked, *(("XINFO", "CONSUMERS", key, name) for name in names)]
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    for fact, pending, consumers in zip(facts, replies[: len(names)], replies[len(names) :], strict=True):
        group = f"group {as_text(fact[b'name'])}"
        parts.append((group, as_text(fact[b"last-delivered-id"])))
        members = sorted(dict(_pairs(consumer))[b"name"] for consumer in consumers)
        parts += [(f"{group} consumer", as_text(member)) for member in members]
        # Not how long it has been idle: that is the clock. How often it was delivered is what a job may act on.
        parts += [(f"{group} pending", (as_text(name), as_text(owner), times)) for name, owner, _idle, times in pending]
    return tuple(parts)
