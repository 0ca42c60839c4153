"""Clients and pools of redis.asyncio: what they remember from one command to the next is memory of one process.

A client is often made once, when a module is imported, and its connections and locks belong to the event loop in which
it was used first. Each delivery has a loop of its own, so it finds such a client as it was before its first command.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import redis.asyncio.client
import redis.asyncio.connection

_ABSENT = object()
_REMEMBERED: tuple[tuple[type, tuple[str, ...]], ...] = (
    (redis.asyncio.client.Redis, ("connection", "_single_conn_lock", "_usage_lock", "_usage_counter")),
    (
        redis.asyncio.connection.ConnectionPool,
        ("_available_connections", "_in_use_connections", "_lock", "_condition"),
    ),
)


class Memories:
    """What each delivery that runs remembers. `now` gives the delivery, or None if none runs."""

    def __init__(self, now: Callable[[], Any]) -> None:
        self.now = now
        self._kept: dict[int, weakref.WeakKeyDictionary[Any, dict[str, Any]]] = {}

    def of(self, thing: Any) -> dict[str, Any] | None:
        """None: no delivery runs, the thing is that of the test."""
        delivery = self.now()
        if delivery is None:
            return None
        return self._kept.setdefault(id(delivery), weakref.WeakKeyDictionary()).setdefault(thing, {})

    def forget(self) -> None:
        self._kept.clear()

    def install(self) -> None:
        for owner, names in _REMEMBERED:
            for name in names:
                setattr(owner, name, _Remembered(self, name))

    def uninstall(self) -> None:
        for owner, names in _REMEMBERED:
            for name in names:
                if isinstance(owner.__dict__.get(name), _Remembered):
                    delattr(owner, name)


class _Remembered:
    """An attribute that has a value of its own in each delivery. That of the object itself waits untouched."""

    def __init__(self, memories: Memories, name: str) -> None:
        self._memories = memories
        self._name = name

    def __get__(self, thing: Any, owner: type) -> Any:
        if thing is None:
            return self
        memory = self._memories.of(thing)
        if memory is None or self._name not in memory:
            value = thing.__dict__.get(self._name, _ABSENT)
            if value is _ABSENT:
                raise AttributeError(self._name)
            if memory is None:
                return value
            memory[self._name] = _fresh(self._name, value)
        return memory[self._name]

    def __set__(self, thing: Any, value: Any) -> None:
        memory = self._memories.of(thing)
        if memory is None:
            thing.__dict__[self._name] = value
        else:
            memory[self._name] = value
            if self._name not in thing.__dict__:  # made in a delivery; who has it when that is over finds it new
                thing.__dict__[self._name] = _fresh(self._name, value)


def _fresh(name: str, value: Any) -> Any:
    """As it is in an object that is new."""
    return None if name == "connection" else type(value)()
