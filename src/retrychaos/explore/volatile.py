"""What volatile values look like: drawn at random, read off the clock, or made in the same way as two samples."""

from __future__ import annotations

import base64
import datetime
import functools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from retrychaos.model.ledger import Cell
from retrychaos.runtime.chance import Chance, uuid4_of
from retrychaos.runtime.delivery import FIRST_PID

_KNOWN, _EMBEDDED = 6, 8
"""Letters that are found where they stand by themselves, and within others, as in names of temporary files."""
_RUN = re.compile(rf"\w{{{_KNOWN},}}")
_ENCODED = 6
"""Bytes; what fewer are in base64 could be a word."""
_LONGEST = 2_000
"""Letters of a text in which drawn ones are looked for."""
_PIDS = range(FIRST_PID, FIRST_PID + 1_000_000)


@dataclass(frozen=True)
class Hole:
    """What stands in a template where a volatile value was."""

    kind: str

    def __repr__(self) -> str:
        return f"<{self.kind}>"


ROW_ID, RANDOM, TIME, VOLATILE, STREAM_ID = map(Hole, ("id", "random", "time", "volatile", "stream id"))


class Draws:
    """Recognises what was drawn at random in this check, in the usual notations, whole or cut off at the end."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._known = 0
        self._bytes: set[bytes] = set()
        self._numbers: set[int] = set()
        self._texts: dict[str, list[str]] = defaultdict(list)
        self._letters = chance.letters
        self._streams: dict[str, set[int]] = defaultdict(set)
        """Where letters follow each other in streams that were drawn one at a time."""
        self._heard: tuple[int, int] = (0, 0)
        self._lengths: list[int] = []
        self._worded = 0

    def raw(self, value: bytes) -> bool:
        self._update()
        return value in self._bytes

    def number(self, value: float) -> bool:
        self._update()
        return value in _PIDS or value in self._numbers

    def text(self, token: str) -> bool:
        self._update()
        return any(known.startswith(token) for known in self._texts.get(token[:8], ()))

    def words(self, text: str) -> Iterator[tuple[int, int]]:
        """Where in a text there are letters that were drawn one by one: beginnings and ends, from left to right.

        The shorter they are, the more must stand by themselves: else what comes about by chance would be found, too.
        """
        words = self._letters.words
        if not (words or self._letters.streams) or len(text) > _LONGEST:
            return
        if text in words:
            yield 0, len(text)
            return
        self._listen()
        for run in _RUN.finditer(text):
            if run.group() in words or any(run.group() in self._letters.streams[each] for each in self._near(run)):
                yield run.span()
            else:
                yield from self._inside(text, *run.span())

    def _near(self, run: re.Match[str]) -> Iterable[int]:
        """Streams in which that may be."""
        return () if run.group().isdigit() else self._streams.get(run.group()[:_KNOWN], ())

    def _inside(self, text: str, at: int, end: int) -> Iterator[tuple[int, int]]:
        while at <= end - _EMBEDDED:
            length = next((each for each in self._lengths if text[at : at + each] in self._letters.words), 0)
            if length:
                yield at, at + length
            at += length or 1

    def _listen(self) -> None:
        """The last stream may have grown since."""
        if len(self._letters.words) != self._worded:
            self._worded = len(self._letters.words)
            self._lengths = sorted({len(word) for word in self._letters.words if len(word) >= _EMBEDDED}, reverse=True)
        streams = self._letters.streams
        known, heard = self._heard
        for number in range(known, len(streams)):
            stream = streams[number]
            for at in range(max(0, heard - _KNOWN), len(stream) - _KNOWN + 1):
                self._streams[stream[at : at + _KNOWN]].add(number)
            heard = 0
        self._heard = (max(0, len(streams) - 1), len(streams[-1]) if streams else 0)

    def _update(self) -> None:
        drawn = self._chance.drawn
        while self._known < len(drawn):
            self._add(drawn[self._known])
            self._known += 1

    def _add(self, value: bytes) -> None:
        self._bytes.add(value)
        number = int.from_bytes(value, "big")
        self._numbers.add(number)
        notations = [value.hex()]
        if len(value) >= _ENCODED:
            notations += (base64.urlsafe_b64encode(value).decode(), base64.b64encode(value).decode())
        if len(value) == 16:
            uuid = uuid4_of(value)
            self._numbers.add(uuid)
            self._bytes.add(uuid.to_bytes(16, "big"))
            notations.append(f"{uuid:032x}")
        for notation in notations:
            self._texts[notation[:8]].append(notation)


def leaves_of(cell: Cell) -> Iterator[Any]:
    """A cell taken apart as far as its values are data of their own: JSON, tuples."""
    if type(cell) is str:
        if cell[:1] in "{[" and len(cell) > 1:
            try:
                yield from _json_leaves(json.loads(cell))
                return
            except ValueError:
                pass
        yield cell
    elif type(cell) is tuple:
        yield len(cell)
        for item in cell:
            yield from leaves_of(item)
    else:
        yield cell


def _json_leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield ("object", len(value))
        for key in sorted(value):
            yield key
            yield from _json_leaves(value[key])
    elif isinstance(value, list):
        yield ("array", len(value))
        for item in value:
            yield from _json_leaves(item)
    else:
        yield value


def moment(leaf: Any) -> int | None:
    """Whole seconds since the epoch that a value may stand for, or None."""
    if isinstance(leaf, str):
        if leaf.isdigit():
            leaf = int(leaf)
        else:
            return _parsed(leaf)
    if isinstance(leaf, bool) or not isinstance(leaf, int | float):
        return None
    for scale in (1, 1_000, 1_000_000, 1_000_000_000):
        if 1e8 < leaf / scale < 1e10:
            return int(leaf // scale)
    return None


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> int | None:
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return int(moment.timestamp() // 1)


def alike(leaf: Any, one: Any, two: Any) -> bool:
    """A value may be another draw of what gave `one` and `two`: a word in place of a token, or nothing, is not."""
    if not isinstance(leaf, Hole):  # what was recognised in one of the samples tells nothing of the make of the others
        known = [sample for sample in (one, two) if not isinstance(sample, Hole)]
        if not known:
            return False
        one, two = known[0], known[-1]
    kinds = {type(one), type(two)}
    if type(leaf) not in kinds and not (type(leaf) in (int, float) and kinds <= {int, float}):
        return False
    if leaf in (one, two):
        return True
    if isinstance(leaf, str):
        return _alike_texts(leaf, one, two)
    if isinstance(leaf, bytes):
        return len(leaf) in (len(one), len(two))
    if isinstance(leaf, float):
        return not leaf.is_integer() or float(one).is_integer() or float(two).is_integer()
    if isinstance(leaf, int) and not isinstance(leaf, bool) and kinds == {int}:
        digits = sorted((len(str(one)), len(str(two))))
        return digits[0] - 2 <= len(str(leaf)) <= digits[1] + 2
    return not isinstance(leaf, Hole)


def _alike_texts(leaf: str, one: str, two: str) -> bool:
    """The parts that `one` and `two` share are there, and the rest is made of the same kinds of characters."""
    leaf, one, two = (text.removeprefix("-") for text in (leaf, one, two))  # a sign comes and goes
    start = _shared(one, two)
    end = _shared(one[start:][::-1], two[start:][::-1])
    mixed = _classes(one[start : len(one) - end] + two[start : len(two) - end])
    while start and _class(one[start - 1]) in mixed:  # equal by chance
        start -= 1
    while end and _class(one[len(one) - end]) in mixed:
        end -= 1
    if not (leaf.startswith(one[:start]) and leaf[start:].endswith(one[len(one) - end :])):
        return False
    drawn, *samples = (text[start : len(text) - end] for text in (leaf, one, two))
    lengths = [len(sample) for sample in samples]
    if min(lengths) >= 8 and not min(lengths) / 2 <= len(drawn) <= 2 * max(lengths):
        return False
    if len(set(map(len, (drawn, *samples)))) == 1 and len(drawn) >= 8 and {"lower", "upper"} <= mixed:
        return _classes(drawn) <= mixed | _TOKEN  # that one has none of these is chance
    numeric = all("digit" in _classes(sample) for sample in samples)
    return _classes(drawn) <= mixed and (not numeric or "digit" in _classes(drawn))


_TOKEN = frozenset({"digit", "-", "_", "+", "/", "="})
"""Besides letters, what tokens of capital and small letters are made of."""


def _shared(one: str, two: str) -> int:
    """How many characters two texts have in common at their beginnings."""
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def _class(char: str) -> str:
    return "digit" if char.isdigit() else "lower" if char.islower() else "upper" if char.isupper() else char


def _classes(text: str) -> set[str]:
    """What kinds of characters a text is made of."""
    return set(map(_class, text))
