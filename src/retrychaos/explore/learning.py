"""A real run beside the graph of all interleavings: what happens is learned, and compared with what was known."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from retrychaos.explore.company import VISITOR_PID
from retrychaos.explore.transitions import (
    CLOCK,
    JAMMED,
    UNSTARTED,
    Log,
    Move,
    Node,
    Outcome,
    Seat,
    Surprise,
    Waits,
    index_of,
)
from retrychaos.model.ledger import Facts
from retrychaos.runtime.turns import Actor, Hung, Moved, Play
from retrychaos.world.resource import BEGUN, MORE, SERIAL, SERIAL_WRITES, Resource

if TYPE_CHECKING:
    from retrychaos.explore.interleaving import Interleaving

PATIENCE = 60
"""Rounds of a loop that waits, after which it is taken to wait for ever."""
_SAMPLE = 8
"""Of so many steps that are known, one is looked at in full."""


class Over(Exception):
    """The real run has come to where the graph does not follow it."""


class Run:
    """A real run beside the graph: what happens is learned and compared."""

    def __init__(self, search: Interleaving, play: Play, node: Node) -> None:
        self.node = node
        self._search = search
        self._play = play
        world = search.workshop.world
        self._serials: dict[str, Any] = {name: resource.serials() for name, resource in world.resources.items()}
        """Where counters stand."""
        self._floor: dict[str, Any] = dict(self._serials)
        """Below this their numbers are stored, or were drawn by deliveries long gone."""
        self._drawn: dict[int, dict[str, Any]] = {}
        """Where counters stood when a delivery had last drawn from them."""
        self._stored: set[int] = set()
        """Deliveries that have left something behind since they drew."""
        self._actors: dict[int, Actor] = {}

    def go(self, move: Move) -> None:
        search = self._search
        search.moves += 1
        if move.kind == "rival":
            self._visit(self.node, move.ident)
            return
        node = search.rules.seated(self.node, move)
        index = index_of(node, move.ident) if move.kind != "jump" else -1
        if move.kind == "kill":
            self._kill(node, index, move.ident)
            return
        if move.kind == "jump":
            self._jump(node)
            return
        if move.kind == "begin":
            self._begin(move.ident, search.names.logs[node.seats[index].log])
        seat = node.seats[index]
        log = search.names.logs[seat.log]
        if log.end == "done":
            del self._actors[seat.ident]
            self.node = search.rules.acknowledged(node, index)
            return
        if log.end:
            raise Over
        self._step(node, index, seat, log, move.kind == "fail")

    def _visit(self, node: Node, number: int) -> None:
        """Other code runs, whole; or it is learned that it cannot, here."""
        search, world = self._search, self._search.workshop.world
        key = search.rules.rival_key(node, number)
        commits = {name: resource.commits for name, resource in world.resources.items()}
        serials = {name: resource.serials() for name, resource in world.resources.items()}
        visitor = self._play.visit(search.company.job(number), number, VISITOR_PID * number)
        if visitor.end != "done":
            search.found(key, Outcome(0, 0, (), False, node.clock, "blocked"))
            raise Over
        facts = self._play.facts()
        for name, resource in world.resources.items():
            self._serials[name] = resource.serials()
            if self._serials[name] != serials.get(name, self._serials[name]):  # drawn for good
                self._drawn.setdefault(-number, {})[name] = self._serials[name]
        changes, _ = self._changes(node, facts, "", frozenset())
        stirs = tuple(name for name, resource in world.resources.items() if resource.commits > commits.get(name, 0))
        outcome = Outcome(0, 0, changes, bool(stirs), self._clock(node), "", stirs=tuple(sorted(stirs)))
        self.node = search.rules.visited(node, number, outcome)
        search.keep(self.node, self._play.clock)
        search.found(key, outcome)

    def _kill(self, node: Node, index: int, ident: int) -> None:
        search = self._search
        felt = search.rules.is_felt(node, index)
        actor = self._actors.pop(ident)
        self._play.kill(actor)
        if not felt:
            self.node = search.rules.killed(node, index)
            return
        key = search.rules.key(node, index, "kill")
        facts = self._play.facts()
        self._note_serials(None, "")
        back, stirred, taint = self._come_back(node, facts)
        self._rewind(ident)
        changes, _ = self._changes(node, facts, "", taint)
        others = self._others(node, back, changes)
        outcome = Outcome(0, 0, changes, stirred, self._clock(node), "killed", others)
        self.node = search.rules.after(node, index, outcome)
        search.keep(self.node, self._play.clock)
        search.found(key, outcome)

    def _rewind(self, ident: int) -> None:
        """Numbers that a delivery has drawn, and nobody can know, are free again when it is over.

        Else each death would make a new state, for ever. If something that it did can hold them, they stay burnt.
        """
        drawn = self._drawn.pop(ident, None)
        for name, last in (drawn or {}).items():
            if ident in self._stored:
                self._floor[name] = _highest(self._floor[name], last)
            target = self._floor[name]
            for each in self._drawn.values():
                target = _highest(target, each.get(name, target))
            resource = self._search.workshop.world.resources[name]
            resource.rewind_serials(target)
            self._serials[name] = resource.serials()

    def _come_back(self, node: Node, facts: Facts) -> tuple[list[tuple[str, Seat]], bool, frozenset[int]]:
        """Those whose statement waited in a server for what was done here, and where; whether any was committed by
        that; and whose random values it may store."""
        names = self._search.names
        back = [
            (name, seat)
            for seat in node.seats
            if self._actors.get(seat.ident) in self._play.returned
            for name, context in seat.open
            if names.waits(context)
        ]
        committed, taint = False, frozenset[int]()
        for _, seat in back:
            if self._play.returned[self._actors[seat.ident]]:
                log, committed = names.logs[seat.log], True
                taint |= log.taint | ({seat.ident} if log.drew or seat.ident in self._drawn else set())
            if seat.ident in self._drawn and self._has_stored(node, facts):
                self._stored.add(seat.ident)
        return back, committed, taint

    def _others(
        self, node: Node, back: list[tuple[str, Seat]], changes: tuple[tuple[str, int], ...]
    ) -> tuple[tuple[int, int], ...]:
        """What those have open now that have come back."""
        names, resources = self._search.names, self._search.workshop.world.resources
        became: list[tuple[int, int]] = []
        for name, seat in back:
            version = dict(changes).get(name, node.version(name))
            shown = resources[name].holds(self._actors[seat.ident]) or BEGUN
            became.append((seat.context(name), names.back(seat.context(name), version, shown)))
        return tuple(sorted(became))

    def _begin(self, ident: int, log: Log) -> None:
        search = self._search
        self._stored.discard(ident)
        actor = self._actors[ident] = self._play.begin(ident)
        if actor.end == "failed":
            raise Hung(
                "where deliveries overlap, each in a thread of its own, the job fails before its first step, and in "
                f"the clean run it does not: {actor.error}. Look for what belongs to one thread, or use duplicates=1."
            )
        for each in (search.names.logs[UNSTARTED], log):
            self._compare(each, actor.moved(), actor)
        search.begun()

    def _step(self, node: Node, index: int, seat: Seat, log: Log, fail: bool) -> None:
        search, names = self._search, self._search.names
        key = search.rules.key(node, index, "fail" if fail else "run")
        assert log.pending is not None
        name = log.pending.resource
        actor = self._actors[seat.ident]
        if name == CLOCK and search.rules.lingers(node, seat):
            self._linger(node, index, seat, actor, key)
            return
        world = search.workshop.world
        resource = world.resources.get(name)
        commits = resource.commits if resource is not None else 0
        known = search.known(key)
        if known is not None and known.end == JAMMED:
            self.node = search.rules.after(node, index, known)
            return
        moved = self._play.run(actor, surface=fail, circle=known is None or names.errs(known.log))
        facts = self._play.facts()
        resource = world.resources.get(name)
        if moved.end == "blocked" and resource is not None and self._jams(node, index, resource, actor):
            search.jammed = True
            search.found(key, Outcome(seat.log, seat.context(name), (), False, node.clock, JAMMED))
            raise Over
        # What ends a transaction draws nothing: then it was those who waited for that.
        ends = log.pending.kind == "commit" or (moved.seen or ("",))[0] == "error"
        self._note_serials(None if ends and self._play.returned else seat.ident, name)
        if seat.ident in self._drawn and self._has_stored(node, facts):
            self._stored.add(seat.ident)
        back, committed, stored = self._come_back(node, facts)
        taint = log.taint | stored | ({seat.ident} if moved.drew or seat.ident in self._drawn else set())
        if moved.end in ("done", "failed"):
            self._rewind(seat.ident)
        changes, read = self._changes(node, facts, name, taint)
        clock = self._clock(node)
        number = seat.log
        if moved.end != "blocked":
            serial = seat.ident in self._drawn and not moved.end
            number = self._grow(
                seat.log, moved, actor, (node.version(name), seat.context(name), key), clock, read, serial
            )
        # What it shows to others takes a query to find out: of what is known, only a sample is asked again.
        if known is None or known.end != moved.end or search.moves % _SAMPLE == 0:
            context = self._context(node, index, resource, actor, moved, number)
            if committed and context:
                context = names.moved(context, dict(changes).get(name, node.version(name)))
        else:
            context = known.context
        stirred = resource is not None and resource.commits > commits
        outcome = Outcome(number, context, changes, stirred, clock, moved.end, self._others(node, back, changes))
        if actor.pause and not moved.end and (earlier := names.round_before(number)) is not None:
            outcome = outcome._replace(log=earlier[0], polled=earlier[1])
        self.node = search.rules.after(node, index, outcome)
        if moved.end == "failed":
            del self._actors[seat.ident]
        search.keep(self.node, self._play.clock)
        search.found(key, outcome)

    def _grow(
        self, before: int, moved: Moved, actor: Actor, unseen: Hashable, clock: int, read: frozenset[int], serial: bool
    ) -> int:
        """The log after a step that was done.

        unseen: stands for what the job got back, where that is not known. read: whose random values it may hold.
        serial: numbers were drawn that no rollback brings back.
        """
        names = self._search.names
        log = names.logs[before]
        assert log.pending is not None
        seen: Hashable = ("state", unseen) if moved.seen is None else moved.seen
        number = names.log(before, log.pending.resource, log.pending.signature, seen, moved.end, clock)
        grown = names.logs[number]
        fresh = log.taint | read
        grown.taint = fresh if not grown.learned else grown.taint & fresh
        grown.serial = serial
        self._compare(grown, moved, actor)
        return number

    def _jams(self, node: Node, index: int, resource: Resource, actor: Actor) -> bool:
        """Another one waits for the same already, and it cannot be told who of both would get it first: so this one
        has not sent its statement yet."""
        names = self._search.names
        others = any(names.waits(each.context(resource.name)) for at, each in enumerate(node.seats) if at != index)
        return others and not names.waits(node.seats[index].context(resource.name)) and resource.races(actor)

    def _linger(self, node: Node, index: int, seat: Seat, actor: Actor, key: Hashable) -> None:
        """Let it go round and round, until it observes something new or gives up; or find that it waits for ever.

        Time passes, but no expiry: that is another move.
        """
        search, names = self._search, self._search.names
        number = seat.log
        for _ in range(PATIENCE):
            left = self._play.until_expiry()
            if left is not None and actor.pause >= left:
                break
            while True:
                log = names.logs[number]
                assert log.pending is not None
                moved = self._play.run(actor)
                facts = self._play.facts()
                clock = self._clock(node)
                changes, read = self._changes(node, facts, log.pending.resource, log.taint)
                if moved.end == "blocked":
                    break
                number = self._grow(number, moved, actor, key, clock, read, log.serial)
                if changes or moved.end or actor.pause:
                    break
            if moved.end == "blocked":
                break
            earlier = names.round_before(number) if actor.pause and not moved.end else None
            if earlier is None or changes:
                outcome = Outcome(number, 0, changes, bool(changes), clock, moved.end)
                self.node = search.rules.after(node, index, outcome)
                if moved.end == "failed":
                    del self._actors[seat.ident]
                search.keep(self.node, self._play.clock)
                search.found(key, outcome)
                return
            number = earlier[0]
        search.endless.add(search.rules.endless_of(node, index))
        search.found(key, Outcome(seat.log, seat.context(CLOCK), (), False, node.clock, "blocked"))
        raise Over

    def _changes(
        self, node: Node, facts: Facts, resource: str, taint: frozenset[int] | set[int]
    ) -> tuple[tuple[tuple[str, int], ...], frozenset[int]]:
        """Which versions are others now; and whose random values may be in what was read."""
        search, names = self._search, self._search.names
        world = search.workshop.world
        now = search.workshop.clock.now()
        changes: list[tuple[str, int]] = []
        read: frozenset[int] = frozenset()
        for name, version in facts.items():
            if name not in self._serials:
                self._serials[name] = world.resources[name].serials()
            names.found(name, world.found_facts[name], world.found_serials[name])
            before = node.version(name)
            if name == resource:
                read = names.taints[before]
            number = names.version(name, version, self._serials[name], frozenset(names.taints[before] | taint), now)
            if number != before:
                changes.append((name, number))
        return tuple(changes), read

    def _has_stored(self, node: Node, facts: Facts) -> bool:
        """Something is there now that was not there before the step."""
        names, found = self._search.names, self._search.workshop.world.found_facts
        return any(names.differ(version, node.version(name), found[name]) for name, version in facts.items())

    def _note_serials(self, mover: int | None, touched: str) -> None:
        """Who has drawn numbers by this move? Those whose statement has come back by it may have, too, elsewhere than
        on the resource that was `touched`."""
        world = self._search.workshop.world
        drawers = [ident for ident, actor in self._actors.items() if actor in self._play.returned]
        for name, resource in world.resources.items():
            if name != touched and not drawers:
                continue
            serials = resource.serials()
            before = self._serials.setdefault(name, world.found_serials.get(name, serials))
            self._floor.setdefault(name, before)
            self._serials[name] = serials
            if serials != before:
                for ident in drawers if mover is None else [*drawers, mover]:
                    self._drawn.setdefault(ident, {})[name] = serials

    def _context(self, node: Node, index: int, resource: Resource | None, actor: Actor, moved: Moved, log: int) -> int:
        """What the delivery has open after its step, after which its log is `log`."""
        if resource is None or moved.end in ("done", "failed"):
            return 0
        names = self._search.names
        seat = node.seats[index]
        before = seat.context(resource.name)
        shown = resource.holds(actor)
        if moved.end == "blocked" and names.level(before) == shown:
            return before
        version = node.version(resource.name)
        if shown not in (SERIAL, SERIAL_WRITES):
            before = names.as_if_at_once(before, version)
        others = [(each.log, each.context(resource.name)) for each in node.seats if each is not seat]
        entry: Hashable = (log, version)
        if shown == MORE:
            # What it holds after the same answer may depend on what others had written (a deferred constraint).
            entry = (entry, tuple(sorted(other for other, context in others if names.level(context) == MORE)))
        if moved.end == "blocked":
            entry = Waits(seat.log, version, sum(names.waits(context) for _, context in others))
        return names.context(before, entry, shown)

    def _compare(self, log: Log, moved: Moved, actor: Actor) -> None:
        """What a delivery with this log does next: learned, or compared with what was learned."""
        pause = max(1, round(actor.pause * 1000)) if actor.pause else 0
        if not log.learned:
            log.learned = True
            log.pending, log.end, log.error, log.drew, log.pause = moved.next, moved.end, moved.error, moved.drew, pause
            log.place = actor.place if pause else 0
            return
        known: tuple[object, ...] = (log.pending.signature if log.pending else None, log.end, log.drew)
        now: tuple[object, ...] = (moved.next.signature if moved.next else None, moved.end, moved.drew)
        if not log.drew:  # else how long it sleeps, and what its error says, may be drawn: others draw other values
            known, now = (*known, log.error, log.pause), (*now, moved.error, pause)
        if known != now:
            raise Surprise(f"after the same observations: {known} and {now}")

    def _clock(self, node: Node) -> int:
        return self._play.clock if self._search.timed else node.clock

    def _jump(self, node: Node) -> None:
        search = self._search
        passed = self._play.jump(node.rung)
        changes, _ = self._changes(node, self._play.facts(), "", frozenset())
        outcome = Outcome(0, 0, changes, False, self._clock(node), "" if passed else "vain")
        self.node = search.rules.after(node, -1, outcome)
        search.keep(self.node, self._play.clock)
        search.found(search.rules.key(node, -1), outcome)


def _highest(one: Any, other: Any) -> Any:
    """Where counters stand when they have come as far as in both."""
    ahead = dict(other)
    return tuple((counter, max(value, ahead.get(counter, value))) for counter, value in one)
