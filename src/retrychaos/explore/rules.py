"""What moves come to: the state after a step, an ack or a death; and all that a step can depend on."""

from __future__ import annotations

from collections.abc import Hashable

from retrychaos.explore import serial
from retrychaos.explore.draws import Renaming
from retrychaos.explore.transitions import (
    CLOCK,
    Draw,
    Move,
    Names,
    Node,
    Outcome,
    Polled,
    Seat,
    begins,
    shown_by_others,
)
from retrychaos.model.plan import FAULTS
from retrychaos.world.resource import BEGUN


class Rules:
    """How states follow from each other.

    shared: what one delivery does is taken to hold for others, as long as it has drawn nothing at random. anywhere:
    a fault may come in any delivery; else only in the first, before another one begins.
    """

    def __init__(self, names: Names, shared: bool, anywhere: bool = False) -> None:
        self._names = names
        self._shared = shared
        self._anywhere = anywhere

    def free_ident(self, node: Node) -> int:
        """The least number of a delivery whose random values are neither stored nor known to anybody."""
        names = self._names
        taken = {seat.ident for seat in node.seats}
        for _, version in node.versions:
            taken |= names.taints[version]
        for seat in node.seats:
            taken |= names.logs[seat.log].taint
        return next(ident for ident in range(len(taken) + 1) if ident not in taken)

    def seated(self, node: Node, move: Move) -> Node:
        """The state in which the delivery that moves is there."""
        if not begins(node, move):
            return node
        seats = tuple(sorted((*node.seats, Seat(move.ident, self._names.begun(node.clock)))))
        return node._replace(seats=seats, idle=node.idle - 1, calm=node.calm and (self._anywhere or not node.seats))

    def key(self, node: Node, index: int, kind: str = "run") -> Hashable:
        """All that a step of this delivery can depend on."""
        if index < 0:
            return ("jump", node.time, node.versions)
        seat = node.seats[index]
        log = self._names.logs[seat.log]
        if kind == "kill":
            return ("kill", node.clock, *self._released(node, index))
        assert log.pending is not None
        resource = log.pending.resource
        ident = self._nameless(seat).ident
        if resource == CLOCK and kind not in FAULTS:
            return (ident, seat.log, node.time, node.versions, self.lingers(node, seat))
        shown = shown_by_others(self._names, (s for s in node.seats if s is not seat), resource)
        how: Hashable = kind == "fail"
        if kind in FAULTS:  # what is open elsewhere may be rolled back, and others may come back from waiting for that
            how = (kind, seat.open, self._released(node, index))
        notes = serial.relation(node, index, resource) if self._names.serial else ()
        elsewhere = tuple(name for name, _ in seat.open if name != resource and "|" not in name)
        here = (resource, node.version(resource), seat.context(resource), elsewhere)
        return (ident, seat.log, node.time, here, shown, notes, how)

    def _released(self, node: Node, index: int) -> tuple[Hashable, ...]:
        """All that it can depend on what becomes of those who wait when a delivery dies."""
        dead, others = node.seats[index], [seat for at, seat in enumerate(node.seats) if at != index]
        places = {name for seat in node.seats for name, context in seat.open if self._names.waits(context)}
        return tuple(
            (
                name,
                node.version(name),
                dead.context(name),
                tuple(sorted((seat.log, seat.context(name)) for seat in others)),
            )
            for name in sorted(places)
        )

    def _nameless(self, seat: Seat) -> Seat:
        """What one delivery does holds for others, as long as it has drawn nothing at random."""
        return seat if self._names.logs[seat.log].drew or not self._shared else seat._replace(ident=-1)

    @staticmethod
    def rival_key(node: Node, number: int) -> Hashable:
        """All that the whole run of other code can depend on: the world, and what deliveries have open there."""
        return ("rival", number, node.time, node.versions, tuple(seat.open for seat in node.seats if seat.open))

    def visited(self, node: Node, number: int, outcome: Outcome) -> Node:
        """The state after other code has run."""
        after = _changed(node.versions, outcome.changes)
        seats = node.seats
        for resource in outcome.stirs:
            seats = tuple(self._stirred(seat, resource, after) for seat in seats)
        rivals = tuple(each for each in node.rivals if each != number)
        rung = 0 if outcome.changes else node.rung
        return node._replace(versions=after, clock=outcome.clock, seats=seats, rivals=rivals, rung=rung)

    def after(self, node: Node, index: int, outcome: Outcome, kind: str = "run") -> Node:
        versions = _changed(node.versions, outcome.changes) if outcome.changes else node.versions
        seats = list(node.seats)
        idle = node.idle
        if index >= 0:
            log = self._names.logs[seats[index].log]
            resource = log.pending.resource if log.pending else ""
            if outcome.others:
                became = dict(outcome.others)
                seats = [_became(each, became) if at != index else each for at, each in enumerate(seats)]
            if outcome.stirred:
                seats = [
                    each if at == index else self._stirred(each, resource, versions) for at, each in enumerate(seats)
                ]
            before = seats[index]
            closed = outcome.closed
            if outcome.end in ("done", "failed", "killed"):
                seats[index] = Seat(before.ident, outcome.log)
                closed = tuple(name for name, _ in before.open if name != resource)
            else:
                for name in closed:
                    before = before.with_context(name, 0)
                seat = before._replace(log=outcome.log).with_context(resource, outcome.context)
                if outcome.polled is not None:
                    polled = tuple((name, version) for name, version in versions if name in outcome.polled)
                    seat = seat.with_context(CLOCK, self._names.context(0, Polled(outcome.polled, polled), BEGUN))
                seats[index] = seat
            if self._names.serial:
                committed = outcome.end != "killed" and not self._names.errs(outcome.log)
                seats = serial.after_step(self._names, seats, index, before, resource, committed)
                for name in closed:
                    seats = serial.rolled_back(self._names, seats, index, node.seats[index], name)
            if outcome.end in ("failed", "killed"):
                del seats[index]
                idle += not node.acked
        # Where something has changed, the clock may have to go on in vain as often as before.
        rung = node.rung + 1 if outcome.end == "vain" else 0 if outcome.changes else node.rung
        calm = node.calm and kind not in FAULTS and (self._anywhere or outcome.end not in ("failed", "killed"))
        return Node(versions, outcome.clock, tuple(seats), idle, node.acked, rung, node.rivals, calm)

    def endless_of(self, node: Node, index: int) -> Hashable:
        """A loop that waits and will not end by itself does not end at another time of day either."""
        seat = node.seats[index]
        return (seat.ident, seat.log, seat.context(CLOCK)) if self.lingers(node, seat) else None

    def lingers(self, node: Node, seat: Seat) -> bool:
        """It goes round in a loop that waits, and nothing that it looks at has changed since it looked."""
        context = seat.context(CLOCK)
        if not context:
            return False
        resources, polled = self._names.polled(context)
        return bool(polled == tuple((name, version) for name, version in node.versions if name in resources))

    def _stirred(self, seat: Seat, resource: str, versions: tuple[tuple[str, int], ...]) -> Seat:
        """Somebody has committed while it has something open: what becomes of that may depend on it."""
        context = seat.context(resource)
        if not context or self._names.shown(context) == BEGUN:
            return seat
        return seat.with_context(resource, self._names.moved(context, dict(versions).get(resource, 0)))

    def acknowledged(self, node: Node, index: int) -> Node:
        seats = node.seats[:index] + node.seats[index + 1 :]
        return node._replace(seats=seats, idle=0, acked=True, calm=node.calm and self._anywhere)

    def killed(self, node: Node, index: int) -> Node:
        dead = node.seats[index]
        seats = node.seats[:index] + node.seats[index + 1 :]
        for resource, _ in dead.open:
            seats = tuple(serial.ended(self._names, seats, dead, resource, committed=False))
        calm = node.calm and self._anywhere
        return node._replace(seats=seats, idle=node.idle + (not node.acked), calm=calm)

    def is_felt(self, node: Node, index: int) -> bool:
        """Others can notice the death of this delivery at once, so it is not enough to think of it."""
        return any(self.is_away(seat) for at, seat in enumerate(node.seats) if at != index)

    def is_away(self, seat: Seat) -> bool:
        """Its statement waits in a server."""
        return any(self._names.waits(context) for _, context in seat.open)

    # -- numbers of sequences -----------------------------------------------------------------------------------------

    def drawn(self, node: Node) -> frozenset[int]:
        """Numbers that somebody remembers: the world, or a delivery that is alive."""
        names = self._names
        if not names.draws.counters:
            return frozenset()
        known = [names.drawn[version] for _, version in node.versions]
        known += [names.logs[seat.log].drawn for seat in node.seats]
        known += [names.contexts[context].drawn for seat in node.seats for _, context in seat.open]
        return frozenset().union(*known)

    def compact(self, node: Node) -> tuple[Node, Renaming]:
        """The same state, in which those numbers are the first ones; and what has become of them."""
        names = self._names
        if not names.draws.counters:
            return node, {}
        renaming = names.draws.compact(self.drawn(node))
        versions = tuple((name, names.renamed_version(version, renaming)) for name, version in node.versions)
        seats = tuple(
            Seat(
                seat.ident,
                names.renamed_log(seat.log, renaming),
                tuple(sorted((name, names.renamed_context(context, renaming)) for name, context in seat.open)),
            )
            for seat in node.seats
        )
        return node._replace(versions=versions, seats=seats), renaming

    def place(self, node: Node, draw: Draw) -> Hashable:
        """On what numbers a step depends that draws some."""
        counts = self._names.draws.counted(self.drawn(node))
        return tuple(counts[sequence] for sequence in draw.sequences)

    def until_expiry(self, node: Node) -> int | None:
        """Milliseconds until the next thing ends by itself, as far as known without running."""
        ends = [end - node.clock for _, version in node.versions for end in self._names.ends[version]]
        return min((left for left in ends if left > 0), default=None)


def _changed(
    versions: tuple[tuple[str, int], ...], changes: tuple[tuple[str, int], ...]
) -> tuple[tuple[str, int], ...]:
    """The versions after some of them have changed."""
    after = {**dict(versions), **dict(changes)}
    return tuple(sorted((name, version) for name, version in after.items() if version))


def _became(seat: Seat, became: dict[int, int]) -> Seat:
    """Some of what it has open is something else now."""
    return seat._replace(open=tuple([(name, became.get(context, context)) for name, context in seat.open]))
