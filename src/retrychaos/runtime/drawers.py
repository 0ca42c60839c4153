"""Libraries that draw in a way of their own, or remember what they drew last: these follow from the seed, too.

What they remember belongs to a process, so each delivery begins without it. A library that is imported only while the
job runs is left alone.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

_MEMORY: tuple[tuple[str, tuple[str, ...], Any], ...] = (
    ("uuid", ("_last_timestamp",), None),
    ("uuid", ("_last_timestamp_v6",), None),
    ("uuid", ("_last_timestamp_v7",), None),
    ("tempfile", ("_name_sequence",), None),
    ("uuid6", ("_last_v6_timestamp",), None),
    ("uuid6", ("_last_v7_timestamp",), None),
    ("uuid6", ("_last_v8_timestamp",), None),
    ("ulid", ("ULID", "provider", "prev_timestamp"), 0),
    ("ulid", ("ULID", "provider", "prev_randomness"), b"\0" * 10),
    ("ulid", ("default_generator", "policy", "prev_timestamp"), 0),
    ("ulid", ("default_generator", "policy", "prev_randomness"), b"\0" * 10),
)
"""Module, where it remembers its last value, and what stands there in a new process."""


def forget() -> None:
    """A new process has drawn nothing yet."""
    for module, path, first in _MEMORY:
        if (owner := _owner(module, path)) is not None:
            setattr(owner, path[-1], first)


def state() -> tuple[Any, ...]:
    """What they remember now; to compare, and for recall()."""
    owners = ((_owner(module, path), path[-1]) for module, path, _ in _MEMORY)
    kept: list[Any] = [None if owner is None else getattr(owner, name) for owner, name in owners]
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        name, keys, *rest = numpy.get_state()
        kept.append((name, keys.tobytes(), *rest))
    return tuple(kept)


def recall(kept: tuple[Any, ...]) -> None:
    """Go on from what state() gave."""
    for (module, path, _), value in zip(_MEMORY, kept, strict=False):
        if (owner := _owner(module, path)) is not None:
            setattr(owner, path[-1], value)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and len(kept) > len(_MEMORY):
        name, keys, *rest = kept[-1]
        array = sys.modules["numpy"].frombuffer(keys, dtype="uint32")
        numpy.set_state((name, array, *rest))


def seed(value: bytes) -> None:
    """Begin a delivery."""
    forget()
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(int.from_bytes(value[:4], "big"))


def _owner(module: str, path: tuple[str, ...]) -> Any:
    owner: Any = sys.modules.get(module)
    for name in path[:-1]:
        owner = getattr(owner, name, None)
    return owner if hasattr(owner, path[-1]) else None


def replacements(draw: Callable[[int], bytes], note: Callable[[bytes], None]) -> list[tuple[Any, str, Any]]:
    """Functions of uuid_utils, which draws in Rust: what has to be replaced.

    draw: gives random bytes. note: is told what is made of them.
    """
    rust = sys.modules.get("uuid_utils")
    if rust is None:
        return []

    def made(number: int, version: int) -> int:
        number = number & ~(0xC000 << 48) & ~(0xF000 << 64) | (0x8000 << 48) | (version << 76)
        note(number.to_bytes(16, "big"))
        return number

    def number4() -> int:
        return made(int.from_bytes(draw(16), "big"), 4)

    def number7(timestamp: int | None = None, nanos: int | None = None, *, nanoseconds: int | None = None) -> int:
        now = time.time_ns() if nanoseconds is None else nanoseconds
        at = now // 1_000_000 if timestamp is None else timestamp * 1_000 + (nanos or 0) // 1_000_000
        return made(at << 80 | int.from_bytes(draw(10), "big"), 7)

    def number6(node: int | None = None, clock_seq: int | None = None) -> int:
        old = uuid.uuid1(node, clock_seq)
        number = (old.time >> 12) << 80 | (old.time & 0xFFF) << 64 | old.int & (1 << 64) - 1
        return made(number, 6)

    real8 = rust.uuid8

    def uuid8(a: int | None = None, b: int | None = None, c: int | None = None) -> Any:
        if None not in (a, b, c):
            return real8(a, b, c)
        drawn = int.from_bytes(draw(16), "big")
        high = drawn >> 80 if a is None else a
        middle = drawn >> 64 & 0xFFF if b is None else b
        return rust.UUID(int=made(high << 80 | middle << 64 | (drawn & (1 << 62) - 1 if c is None else c), 8))

    wanted: dict[str, Callable[..., Any]] = {
        "_uuid4_int": number4,
        "_uuid7_int": number7,
        "uuid1": lambda node=None, clock_seq=None: rust.UUID(int=uuid.uuid1(node, clock_seq).int),
        "uuid4": lambda: rust.UUID(int=number4()),
        "uuid6": lambda node=None, clock_seq=None: rust.UUID(int=number6(node, clock_seq)),
        "uuid7": lambda timestamp=None, nanos=None: rust.UUID(int=number7(timestamp, nanos)),
        "uuid8": uuid8,
    }
    return [(rust, name, value) for name, value in wanted.items() if hasattr(rust, name)]
