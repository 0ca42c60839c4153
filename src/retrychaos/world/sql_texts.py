"""A SQL statement as a line for people, and as a template without the values written in it."""

from __future__ import annotations

import functools
from collections.abc import Iterator


@functools.lru_cache(maxsize=4096)
def texts(statement: str) -> tuple[str, str]:
    """A statement on one line, and the same without the values written in it: what two runs have in common."""
    text = " ".join(statement.split()).rstrip(";")
    return text, _template(text)


def _template(text: str) -> str:
    out: list[str] = []
    quoted = False
    for piece in text.split("'"):
        out.append("?" if quoted else "".join(_digits(piece)))
        quoted = not quoted
    return "".join(out)


def _digits(piece: str) -> Iterator[str]:
    number = False
    for char in piece:
        if char.isdigit():
            if not number:
                yield "?"
            number = True
        else:
            number = False
            yield char
