"""fakeredis from the inside: servers that run in this process can be looked into instead of asked."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from retrychaos.world.redis_commands import as_text
from retrychaos.world.redis_contents import Seen, parts_of


def can_peek(fake: Any) -> bool:
    """It is a fakeredis that we know our way about in."""
    return hasattr(fake, "dbs")


def peek(fake: Any, db: int, key: bytes, now: float) -> Any:
    """A key as it is there at `now`, or None; some twenty times faster than asking. NotImplemented: ask.

    Raises AttributeError or TypeError if it is another fakeredis than the ones we know.
    """
    with fake.lock:
        database = fake.dbs[db]
        database.time = now
        item = database.get(key)
        if item is None:
            return None
        kind, value = _typed(item.value)
        deadline = None if item.expireat is None else round(item.expireat * 1000)
    return Seen(kind, deadline, parts_of(kind, value)) if kind else NotImplemented


def _typed(value: Any) -> tuple[str, Any]:
    """The type and the contents of a value of fakeredis, as its server would answer; "" if we do not know the type."""
    if isinstance(value, bytes):
        return "string", value
    if isinstance(value, list):
        return "list", value
    kind = as_text(value.model_type())
    if kind == "hash":
        return kind, value.getall()
    if kind == "set":
        return kind, list(value)
    if kind == "zset":
        return kind, dict(value.items())
    return "", None


def name_of(fake: Any) -> str:
    """The name of a server of fakeredis, the same in all processes if it, or its client, is older than the check."""
    return _shared_name(fake) or f"{id(fake):x}"


def drawn_name(fake: Any) -> str | None:
    """What its client drew at random for the name of its host; None if it has one that was given, or none."""
    found = re.match("[0-9a-f]{32}(?=:)", _shared_name(fake) or "")
    return found[0] if found else None


def _shared_name(fake: Any) -> str | None:
    shared: dict[str, Any] = getattr(type(fake), "_servers_map", {})
    return next((name for name, server in shared.items() if server is fake), None)


@contextlib.contextmanager
def impatient(connection: Any) -> Iterator[None]:
    """Commands do not wait, as within a transaction. One of asyncio would do so in a task of its own."""
    sock = getattr(connection, "_sock", None)
    if sock is None:
        yield
        return
    before, sock._in_transaction = sock._in_transaction, True
    try:
        yield
    finally:
        sock._in_transaction = before
