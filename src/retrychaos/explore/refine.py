"""Renaming by colour refinement: names that are used in the same places get the same colour, whatever they are.

A name's colour is the multiset of the places where it occurs, refined until nothing more can be told apart. Unlike
renaming by order of appearance, this gives one form of a ledger whatever the order of its rows.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from retrychaos.model.ledger import Cell

Name: TypeAlias = tuple[str, Cell]
"""Kind of a drawn value, and the value."""


class Named(Protocol):
    """A row, seen as what is fixed in it and the names in their order."""

    @property
    def template(self) -> tuple[Any, ...]: ...
    @property
    def names(self) -> tuple[Name, ...]: ...


_Row = TypeVar("_Row", bound=Named)


def hash_of(value: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=16).digest(), "big")


def refine(forms: Sequence[tuple[Any, _Row]], common: set[Name]) -> dict[Name, int]:
    """Colours of the names that several rows share: equal exactly for names used in the same places."""
    colours = {name: hash_of(name[0]) for name in common}
    occurrences: dict[Name, list[tuple[int, int]]] = defaultdict(list)
    for number, (_, form) in enumerate(forms):
        for at, name in enumerate(form.names):
            if name in common:
                occurrences[name].append((number, at))
    classes = 0
    while True:
        rows = [hash_of((place, coloured(form, colours))) for place, form in forms]
        new = {name: hash_of(sorted((rows[number], at) for number, at in where)) for name, where in occurrences.items()}
        if len(set(new.values())) <= classes:
            return new
        classes = len(set(new.values()))
        colours = new


def coloured(form: Named, colours: Mapping[Name, int]) -> tuple[Any, ...]:
    own: dict[Name, int] = {}
    return (form.template, tuple(colours.get(name) or own.setdefault(name, len(own)) for name in form.names))
