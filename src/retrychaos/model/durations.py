"""Lengths of time as users write them: ``"24h"``, ``"30m"``, ``"7d"``, ``"90s"``."""

from __future__ import annotations

import re

_UNITS = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*")


def seconds_of(text: str) -> float | None:
    """The seconds that a text stands for; None if it is none of these."""
    found = _WRITTEN.fullmatch(text)
    return float(found[1]) * _UNITS[found[2]] if found else None


def in_words(seconds: float, digits: int = 3) -> str:
    """For people: a number of the largest unit that it fills."""
    for size, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.{digits}g} {name}"
    return f"{seconds:.{digits}g} s"
