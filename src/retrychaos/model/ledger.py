"""The committed state of a resource as plain rows, so that every store is compared in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Cell: TypeAlias = "bool | int | float | str | bytes | tuple[Cell, ...] | None"
Row: TypeAlias = tuple[Cell, ...]


@dataclass(frozen=True, eq=False)
class Relation:
    """A multiset of rows: a table, the keys of a Redis database, the calls that reached a receiver.

    Compared by identity, so that caches can hang on it: whoever reads a store again and finds the same rows keeps the
    old object.
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    generated: Mapping[int, frozenset[Cell]] = field(default_factory=dict)
    """Column index -> values which the store itself drew during this check (row ids): names, not content."""
    refs: Mapping[int, str] = field(default_factory=dict)
    """Column index -> relation whose generated ids it holds (foreign keys)."""
    keys: tuple[int, ...] = ()
    """Indexes of the columns of the primary key; two rows with equal keys are the same thing."""
    external: bool = False
    """An effect outside: no later delivery can undo it."""
    ttl: int | None = None
    """Index of the column with the time to live in seconds; rows where it is set vanish by themselves."""
    repeatable: bool = False
    """The first cell says what an effect acts on, and equal effects on that are one: an HTTP PUT, done again."""
    memory: bool = False
    """What somebody outside remembers, such as answers to known keys. States differ by it; ledgers do not."""


@dataclass(frozen=True, eq=False)
class Version:
    """One committed state of one resource. Compared by identity: the same object means that nothing changed."""

    relations: Mapping[str, Relation]
    expiries: tuple[float, ...] = ()
    """Instants of the virtual clock (seconds since the epoch) at which something in it ends."""
    ending: Mapping[float, str] = field(default_factory=dict)
    """What that is, for people, where it can be told."""
    real_time: bool = False
    """The store has a clock of its own, which shows real time: times in it may be that, too."""


Facts: TypeAlias = Mapping[str, Version]
"""The committed state of a whole world: resource name -> version."""
