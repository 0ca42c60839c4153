"""Leases: columns of tables that say when a claim ends, or when it was made, as the option ``leases`` names them."""

from __future__ import annotations

import datetime
import difflib
import fnmatch
import functools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from retrychaos.model.durations import in_words, seconds_of
from retrychaos.model.errors import OptionError
from retrychaos.model.ledger import Cell, Facts, Relation

_SCALES = (1.0, 1e3, 1e6, 1e9)
"""Seconds, milliseconds, microseconds, nanoseconds since the epoch."""
_OVER = 1.0
"""Seconds after its end at which a claim is over for everybody: many compare whole seconds."""
_SHOWN = 3


class Lease(NamedTuple):
    """``"locks.expires_at"``: the claim ends then. ``"jobs.started_at+5m"``: it was made then, and lasts so long.

    column: table and column; a pattern with ``*`` works. lasts: seconds.
    """

    column: str
    lasts: float = 0.0

    def __str__(self) -> str:
        return f"{self.column} + {in_words(self.lasts)}" if self.lasts else self.column


def parse(text: str) -> Lease:
    """Raises ValueError if it has no such form."""
    column, plus, length = (part.strip() for part in text.partition("+"))
    lasts = seconds_of(length) if plus else 0.0
    if lasts is None or not 0 < column.find(".") < len(column) - 1 or " " in column:
        raise ValueError
    return Lease(column, lasts)


def ends(leases: Sequence[Lease], relations: Mapping[str, Relation]) -> dict[float, str]:
    """When claims are over (seconds since the epoch), past or to come, and which ones, for people."""
    found: dict[float, str] = {}
    for relation in relations.values() if leases else ():
        for index, lease in columns_of(leases, relation):
            name = f"{relation.name}.{relation.columns[index]}"
            for cell in {row[index] for row in relation.rows}:
                for instant in instants(cell) or ():
                    found[instant + lease.lasts + _OVER] = name
    return found


def columns_of(leases: Sequence[Lease], relation: Relation) -> Iterator[tuple[int, Lease]]:
    """The columns of a table that leases name."""
    if relation.external or relation.memory or relation.ttl is not None:
        return
    for lease in leases:
        for index, column in enumerate(relation.columns):
            if fnmatch.fnmatchcase(f"{relation.name}.{column}", lease.column):
                yield index, lease


def instants(cell: Cell) -> tuple[float, ...] | None:
    """The moments that a value may stand for: none if nothing is claimed (NULL, 0, infinity); None if it is no time.

    A time without a zone may be that of the place or that of Greenwich: both are given where they differ.
    """
    if cell is None or isinstance(cell, bool):
        return () if cell is None else None
    if isinstance(cell, str):
        return _read(cell)
    if isinstance(cell, float) and not math.isfinite(cell):
        return ()
    if isinstance(cell, int | float):
        return tuple(cell / scale for scale in _SCALES if 1e8 < cell / scale < 1e10) or (None if cell > 0 else ())
    return None


@functools.lru_cache(maxsize=4096)
def _read(text: str) -> tuple[float, ...] | None:
    text = text.strip()
    if text.lower() in ("", "infinity", "-infinity"):
        return ()
    try:
        return instants(float(text))
    except ValueError:
        pass
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.tzinfo is not None:
        return (moment.timestamp(),)
    instant = moment.replace(tzinfo=datetime.UTC).timestamp()
    try:
        here = time.localtime(instant).tm_gmtoff
    except (OverflowError, OSError, ValueError):
        here = 0
    return (instant,) if not here else (instant, instant - here)


def check(leases: Sequence[Lease], states: Iterable[Facts]) -> None:
    """Do these name columns that hold times? states: those of a clean run. Raises OptionError if not."""
    named: set[Lease] = set()
    known: set[str] = set()
    for relation in {
        relation for facts in states for version in facts.values() for relation in version.relations.values()
    }:
        if not (relation.external or relation.memory or relation.ttl is not None or relation.name == "schema"):
            known |= {f"{relation.name}.{column}" for column in relation.columns}
        for index, lease in columns_of(leases, relation):
            named.add(lease)
            wrong = next((row[index] for row in relation.rows if instants(row[index]) is None), None)
            if wrong is not None:
                raise OptionError(
                    f"leases: {relation.name}.{relation.columns[index]} holds {wrong!r}, which is no time. A lease is "
                    "a date and time (ISO 8601), or a number of seconds, milliseconds, microseconds or nanoseconds "
                    "since 1970."
                )
    for lease in leases:
        if lease not in named:
            raise OptionError(_unknown(lease, sorted(known)))


def idle(leases: Sequence[Lease], states: Iterable[tuple[float, Facts]]) -> list[str]:
    """Those that never name a time that is still to come. states: what the clock showed, and what was there then."""
    busy: set[Lease] = set()
    for now, facts in states if leases else ():
        for relation in (relation for version in facts.values() for relation in version.relations.values()):
            for index, lease in columns_of(leases, relation):
                times = (instants(row[index]) or () for row in relation.rows)
                if any(time + lease.lasts > now for some in times for time in some):
                    busy.add(lease)
    return [lease.column for lease in leases if lease not in busy]


def _unknown(lease: Lease, known: Sequence[str]) -> str:
    if not known:
        return f"leases: there is no column {lease.column!r}; the job has touched no table."
    near = difflib.get_close_matches(lease.column, known, n=_SHOWN, cutoff=0.5)
    if near:
        return f"leases: there is no column {lease.column!r}. Did you mean {' or '.join(map(repr, near))}?"
    table = lease.column.partition(".")[0]
    own = [column for column in known if column.partition(".")[0] == table]
    return f"leases: there is no column {lease.column!r}. Columns: {', '.join(own or known)}."
