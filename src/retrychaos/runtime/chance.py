"""Randomness of a delivery: new on every attempt, the same when a check is repeated, and remembered.

Values are never pinned across attempts: a key that is drawn anew on each attempt is a common bug.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
from typing import Any

from retrychaos.runtime.patching import Replacement

_real_urandom = os.urandom


def uuid4_of(value: bytes) -> int:
    """Sixteen random bytes as uuid4 uses them, with version and variant set (RFC 9562, 5.4)."""
    number = int.from_bytes(value, "big")
    number = number & ~(0xC000 << 48) | (0x8000 << 48)
    return number & ~(0xF000 << 64) | (4 << 76)


class Chance:
    """Replaces ``os.urandom`` (and with it uuid4 and secrets), seeds ``random``, and keeps what was drawn.

    salt: tells checks apart, so that a later one does not draw what an earlier one has left somewhere.
    """

    def __init__(self, salt: str = "") -> None:
        self._salt = salt
        self.drawn: list[bytes] = []
        """Every random value of this check of four bytes or more, in the order drawn."""
        self._state: Any = None
        self._seed = b""
        self._count = 0
        self._thread = threading.get_ident()

    def start(self) -> list[Replacement]:
        """Begin to decide what is drawn. Returns what has to be replaced."""
        self._thread = threading.get_ident()
        self._state = random.getstate()
        return [(os, "urandom", self._urandom), (random, "_urandom", self._urandom)]

    def stop(self) -> None:
        self._thread = 0  # should anybody have kept a replacement
        if self._state is not None:
            random.setstate(self._state)
            self._state = None

    def seed(self, seed: str) -> None:
        """Begin a delivery: all that it draws follows from `seed`."""
        self._seed = hashlib.blake2b(f"{self._salt} {seed}".encode(), digest_size=32).digest()
        self._count = 0
        random.seed(self._seed)

    def drew(self, uuid: str) -> bool:
        """A random UUID (version 4, 32 hexadecimal digits) was drawn in this check."""
        number = int(uuid, 16)
        return any(len(value) == 16 and uuid4_of(value) == number for value in self.drawn)

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
