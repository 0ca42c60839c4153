"""From the text that PostgreSQL writes for a value to a cell of a ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from retrychaos.model.ledger import Cell

Convert: TypeAlias = Callable[[str], Cell]


def _float(text: str) -> Cell:
    value = float(text)
    return text.lower() if value != value else value  # nan differs from itself


def _numeric(text: str) -> Cell:
    """A whole number may be an id. All others stay as written: a float would lose digits."""
    return int(text) if text.lstrip("-").isdecimal() else text


def _bytes(text: str) -> Cell:
    return bytes.fromhex(text[2:])


def _bool(text: str) -> Cell:
    return text in ("t", "true")


_BY_NAME: dict[str, Convert] = {
    "int2": int,
    "int4": int,
    "int8": int,
    "oid": int,
    "float4": _float,
    "float8": _float,
    "numeric": _numeric,
    "bool": _bool,
    "bytea": _bytes,
}


def converter(name: str, kind: str, element: str | None) -> Convert:
    """For a type of PostgreSQL: its name (of a domain: that of its base), its typtype, its elements' type."""
    if element is not None:
        inner = converter(element, "b", None)
        return lambda text: _array(text, inner)
    if kind != "b":
        return str
    return _BY_NAME.get(name, str)


def _array(text: str, inner: Convert) -> Cell:
    """An array as a tuple of cells, so that an id or a time in it is found. With bounds of its own it stays a text."""
    if not text.startswith("{"):
        return text
    stack: list[list[Cell]] = [[]]
    at = 0
    while at < len(text):
        char = text[at]
        if char == "{":
            stack.append([])
            at += 1
        elif char == "}":
            done = tuple(stack.pop())
            stack[-1].append(done)
            at += 1
        elif char == ",":
            at += 1
        elif char == '"':
            value, at = _quoted(text, at + 1)
            stack[-1].append(inner(value))
        else:
            end = at
            while text[end] not in ",}":
                end += 1
            word = text[at:end]
            stack[-1].append(None if word == "NULL" else inner(word))
            at = end
    return stack[0][0]


def _quoted(text: str, at: int) -> tuple[str, int]:
    out: list[str] = []
    while text[at] != '"':
        at += text[at] == "\\"
        out.append(text[at])
        at += 1
    return "".join(out), at + 1
