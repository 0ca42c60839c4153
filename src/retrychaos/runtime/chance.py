"""Randomness of a delivery: new on every attempt, the same when a check is repeated, and remembered.

Values are never pinned across attempts: a key that is drawn anew on each attempt is a common bug.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from retrychaos.runtime import drawers
from retrychaos.runtime.letters import Letters
from retrychaos.runtime.patching import Replacement

_real_urandom = os.urandom
_real_uuid1 = uuid.uuid1
_real_seed = random.Random.seed


def uuid4_of(value: bytes) -> int:
    """Sixteen random bytes as uuid4 uses them, with version and variant set (RFC 9562, 5.4)."""
    number = int.from_bytes(value, "big")
    number = number & ~(0xC000 << 48) | (0x8000 << 48)
    return number & ~(0xF000 << 64) | (4 << 76)


class Stream:
    """The randomness of one delivery, while another one runs."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self.key = b""
        self.count = 0
        self.state: Any = None
        self.others: tuple[Any, ...] = ()
        """Of libraries that draw by themselves."""
        self.ticks = 0
        self.drew = False
        """It was asked for something, as far as known."""


class Chance:
    """Replaces ``os.urandom`` (and with it uuid4 and secrets), seeds ``random``, and keeps what was drawn.

    salt: tells checks apart, so that a later one does not draw what an earlier one has left somewhere.
    """

    def __init__(self, salt: str = "") -> None:
        self._salt = salt
        self.drawn: list[bytes] = []
        """Every random value of this check of four bytes or more, in the order drawn."""
        self._state: Any = None
        self._others: tuple[Any, ...] = ()
        self.ticks = 0
        """How often the delivery has looked at a clock that never shows the same twice."""
        self._seed = b""
        self._count = 0
        self._ticks = 0x01B21DD213814000 + int(time.time()) * 10_000_000  # of 100 ns since 1582 (RFC 9562, 5.1)
        self._thread = threading.get_ident()
        self.letters = Letters(lambda: self._thread)

    def start(self) -> list[Replacement]:
        """Begin to decide what is drawn. Returns what has to be replaced."""
        self._thread = threading.get_ident()
        self._state, self._others = random.getstate(), drawers.state()
        getrandom = [(os, "getrandom", lambda size, *_: self._urandom(size))] if hasattr(os, "getrandom") else []
        return [
            (os, "urandom", self._urandom),
            *getrandom,
            (random, "_urandom", self._urandom),
            (random, "seed", lambda a=None, version=2: self._sow(random._inst, a, version)),
            (random.Random, "seed", self._sow_as_method()),
            (uuid, "uuid1", self._uuid1),
            *drawers.replacements(self._urandom, self.drawn.append),
            *self.letters.replacements(),
        ]

    def stop(self) -> None:
        self._thread = 0  # should anybody have kept a replacement
        if self._state is not None:
            random.setstate(self._state)
            drawers.recall(self._others)
            self._state = None

    def seed(self, seed: str) -> None:
        """Begin a delivery: all that it draws follows from `seed`."""
        self._seed = hashlib.blake2b(f"{self._salt} {seed}".encode(), digest_size=32).digest()
        self._count = self.ticks = 0
        random.seed(self._seed)
        drawers.seed(self._seed)
        self.letters.part()

    def enter(self, stream: Stream) -> None:
        """Go on with the draws of a delivery, in the calling order of its own thread."""
        self.letters.part()
        if stream.state is None:
            self.seed(stream.seed)
            stream.key, stream.state, stream.others = self._seed, random.getstate(), drawers.state()
        else:
            self._seed, self._count, self.ticks = stream.key, stream.count, stream.ticks
            random.setstate(stream.state)
            drawers.recall(stream.others)

    def note(self, stream: Stream) -> None:
        """Has the delivery that runs drawn anything?"""
        stream.drew = stream.drew or self._count > 0 or random.getstate() != stream.state
        stream.drew = stream.drew or drawers.state() != stream.others

    def leave(self, stream: Stream) -> None:
        """Another delivery goes on."""
        self.note(stream)
        stream.count, stream.state, stream.others = self._count, random.getstate(), drawers.state()
        stream.ticks = self.ticks

    @contextmanager
    def aside(self, seed: str) -> Iterator[None]:
        """What is drawn meanwhile is not drawn by the delivery, but by somebody outside, and follows from `seed`."""
        drawn, key, count, state = self.drawn, self._seed, self._count, random.getstate()
        others = drawers.state()
        try:
            self.drawn, self.letters.heard = [], False
            self._seed = hashlib.blake2b(seed.encode(), digest_size=32).digest()
            self._count = 0
            random.seed(self._seed)
            drawers.seed(self._seed)
            yield
        finally:
            self.drawn, self.letters.heard, self._seed, self._count = drawn, True, key, count
            random.setstate(state)
            drawers.recall(others)

    def live_in(self, thread: int) -> None:
        """The thread that draws from now on."""
        self._thread = thread

    def drew(self, uuid: str) -> bool:
        """A random UUID (version 4, 32 hexadecimal digits) was drawn in this check."""
        number = int(uuid, 16)
        return any(len(value) == 16 and uuid4_of(value) == number for value in self.drawn)

    def _sow_as_method(self) -> Callable[..., None]:
        def seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
            self._sow(generator, a, version)

        return seed

    def _sow(self, generator: random.Random, a: Any, version: int) -> None:
        """A generator that is to begin anywhere takes that from the system, below Python."""
        if a is None and threading.get_ident() == self._thread:
            a = int.from_bytes(self._urandom(32), "big")
        _real_seed(generator, a, version)

    def tick(self) -> int:
        """One more each time it is asked, in each delivery."""
        self.ticks += 1
        return self.ticks

    def _uuid1(self, node: int | None = None, clock_seq: int | None = None) -> uuid.UUID:
        """The standard library's takes the real time, and counts on from the last one that the process has made.

        Not the virtual time either: what a delivery draws must not depend on when it runs.
        """
        if threading.get_ident() != self._thread:
            return _real_uuid1(node, clock_seq)
        drawn = int.from_bytes(self._urandom(8), "big")
        ticks = self._ticks + self._count
        node = (drawn >> 16) | 1 << 40 if node is None else node  # a random node has the multicast bit (6.10)
        clock_seq = drawn & 0x3FFF if clock_seq is None else clock_seq
        high, low = (ticks >> 48) & 0x0FFF, ticks & 0xFFFFFFFF
        fields = (low, (ticks >> 32) & 0xFFFF, high, clock_seq >> 8, clock_seq & 0xFF, node & 0xFFFFFFFFFFFF)
        value = uuid.UUID(fields=fields, version=1)
        self.drawn.append(value.bytes)
        return value

    def _urandom(self, size: int) -> bytes:
        if threading.get_ident() != self._thread:
            return _real_urandom(size)
        out = b""
        while len(out) < size:
            self._count += 1
            out += hashlib.blake2b(self._count.to_bytes(8, "big"), key=self._seed).digest()
        out = out[:size]
        if size >= 4:
            self.drawn.append(out)
        return out
