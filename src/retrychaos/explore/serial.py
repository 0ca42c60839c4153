"""Which of several serializable transactions did what first: what comes of them depends on more than their logs.

PostgreSQL refuses one of two that read what the other one writes, or lets both go on, by who did what when, and may
mark the victim long before it is told (Ports and Grittner, "Serializable Snapshot Isolation in PostgreSQL", VLDB 2012).
So for each pair of live ones it is noted where the other one stood at each step. Two that have only read are not in
the way of each other. When one commits, its notes are kept for as long as the other one lives; when one is rolled back,
they count for nothing, unless somebody had committed meanwhile.

The notes are contexts of a seat, under a name made of the resource and the other one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from retrychaos.explore.transitions import Names, Node, Noted, Seat
from retrychaos.world.resource import BEGUN, SERIAL, SERIAL_WRITES, WAITS

_SERIAL = (SERIAL, SERIAL_WRITES)


def _about(resource: str, other: Seat) -> str:
    return f"{resource}|{other.ident}"


def after_step(
    names: Names, seats: Sequence[Seat], index: int, before: Seat, resource: str, committed: bool
) -> list[Seat]:
    """The notes after a step of one delivery. before: its seat then; it may have none in which it can go on."""
    seat, others = seats[index], [each for at, each in enumerate(seats) if at != index]
    if seat == before:
        return list(seats)  # it waits, as before
    if names.level(before.context(resource)) in (*_SERIAL, WAITS) and not _is_open(names, seat, resource):
        others = ended(names, others, before, resource, committed)
        seat = _without_notes(seat, resource)
    else:
        seat = _noted(names, seat, others, resource, before.log)
    return [*others[:index], seat, *others[index:]]


def _is_open(names: Names, seat: Seat, resource: str) -> bool:
    return names.level(seat.context(resource)) in (*_SERIAL, WAITS)


def _noted(names: Names, seat: Seat, others: Sequence[Seat], resource: str, log: int) -> Seat:
    """Where the others stand when it has done a step; it stood at `log` before."""
    mine = names.level(seat.context(resource))
    for other in others:
        theirs = names.level(other.context(resource))
        if _in_the_way(mine, theirs):
            name = _about(resource, other)
            seat = seat.with_context(name, names.context(seat.context(name), Noted(log, other.log, theirs), BEGUN))
    return seat


def _in_the_way(one: str, other: str) -> bool:
    """At least one of both is serializable, and at least one has written."""
    if not {one, other} & set(_SERIAL):
        return False
    return {one, other} <= {*_SERIAL, WAITS} and {one, other} != {SERIAL}


def ended(names: Names, seats: Sequence[Seat], seat: Seat, resource: str, committed: bool) -> list[Seat]:
    """The transaction of `seat` is over; `seats`: the others. Gives these."""
    out = []
    for other in seats:
        name = _about(resource, seat)
        context = other.context(resource)
        if names.level(context) in _SERIAL and _is_open(names, seat, resource):
            if committed:
                notes = (other.context(name), seat.context(_about(resource, other)), seat.log)
                other = other.with_context(resource, names.beside(context, notes))
            elif names.has_moved(context):
                other = other.with_context(resource, names.beside(context, (0, 0, seat.log)))
        out.append(other.with_context(name, 0))
    return out


def rolled_back(names: Names, seats: Sequence[Seat], index: int, before: Seat, resource: str) -> list[Seat]:
    """The notes after the transaction of one delivery was rolled back, at a step of its that was elsewhere."""
    if names.level(before.context(resource)) not in (*_SERIAL, WAITS):
        return list(seats)
    others = ended(names, [each for at, each in enumerate(seats) if at != index], before, resource, committed=False)
    return [*others[:index], _without_notes(seats[index], resource), *others[index:]]


def _without_notes(seat: Seat, resource: str) -> Seat:
    """It has no transaction there any more."""
    return seat._replace(open=tuple([each for each in seat.open if not each[0].startswith(f"{resource}|")]))


def relation(node: Node, index: int, resource: str) -> Hashable:
    """All that was noted of the one that moves and of the others; empty where none is serializable."""
    start = f"{resource}|"
    if not any(name.startswith(start) for seat in node.seats for name, _ in seat.open):
        return ()
    seat = node.seats[index]
    others = [
        (other.context(resource), seat.context(_about(resource, other)), other.context(_about(resource, seat)))
        for at, other in enumerate(node.seats)
        if at != index
    ]
    between = [
        context
        for at, other in enumerate(node.seats)
        if at != index
        for name, context in other.open
        if name.startswith(start) and name != _about(resource, seat)
    ]
    return (tuple(sorted(others)), tuple(sorted(between)))
