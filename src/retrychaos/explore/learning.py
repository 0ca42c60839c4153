"""A real run beside the graph of all interleavings: what happens is learned, and compared with what was known."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING

from retrychaos.explore.company import VISITOR_PID
from retrychaos.explore.draws import Drawing, Renaming
from retrychaos.explore.transitions import (
    CLOCK,
    JAMMED,
    UNSTARTED,
    Did,
    Log,
    Move,
    Node,
    Outcome,
    Seat,
    Surprise,
    Waits,
    begins,
    index_of,
)
from retrychaos.model.ledger import Facts
from retrychaos.model.plan import FAULTS
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

    def __init__(self, search: Interleaving, play: Play, node: Node, numbers: Renaming) -> None:
        self.node = node
        self._search = search
        self._play = play
        self._drawing = Drawing(search.workshop.world, search.names.draws, numbers)
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
        if begins(self.node, move):
            self._begin(move.ident, search.names.logs[node.seats[index].log])
        seat = node.seats[index]
        log = search.names.logs[seat.log]
        if log.end == "done":
            del self._actors[seat.ident]
            self._arrive(search.rules.acknowledged(node, index))
            return
        if log.end:
            raise Over
        self._step(node, index, seat, log, move.kind)

    def _visit(self, node: Node, number: int) -> None:
        """Other code runs, whole; or it is learned that it cannot, here."""
        search, world = self._search, self._search.workshop.world
        key = search.rules.rival_key(node, number)
        commits = {name: resource.commits for name, resource in world.resources.items()}
        visitor = self._play.visit(search.company.job(number), number, VISITOR_PID * number)
        if visitor.end != "done":
            search.found(key, node, Outcome(0, 0, (), False, node.clock, "blocked"))
            raise Over
        facts = self._play.facts()
        drawn = self._drawing.look(search.rules.drawn(node), world.resources, (), facts.values())
        changes, _ = self._changes(node, facts, "", frozenset())
        stirs = tuple(name for name, resource in world.resources.items() if resource.commits > commits.get(name, 0))
        outcome = Outcome(0, 0, changes, bool(stirs), self._clock(node), "", stirs=tuple(sorted(stirs)), drawn=drawn)
        self._arrive(search.rules.visited(node, number, outcome))
        search.found(key, node, outcome)

    def _arrive(self, node: Node) -> None:
        """The state after a move; the world can be saved there."""
        self.node, renaming = self._search.rules.compact(node)
        self._drawing.rename(renaming, self._search.rules.drawn(self.node))
        self._search.keep(self.node, self._play.clock, self._drawing.numbers)

    def _kill(self, node: Node, index: int, ident: int) -> None:
        search = self._search
        felt = search.rules.is_felt(node, index)
        actor = self._actors.pop(ident)
        self._play.kill(actor)
        if not felt:
            self._arrive(search.rules.killed(node, index))
            return
        key = search.rules.key(node, index, "kill")
        facts = self._play.facts()
        drawn = self._draw(node, "", facts)
        back, stirred, taint = self._come_back(node)
        changes, _ = self._changes(node, facts, "", taint)
        others = self._others(node, back, changes, drawn)
        outcome = Outcome(0, 0, changes, stirred, self._clock(node), "killed", others, drawn=drawn)
        self._arrive(search.rules.after(node, index, outcome))
        search.found(key, node, outcome)

    def _draw(self, node: Node, touched: str, facts: Facts, seen: Iterable[object] | None = None) -> tuple[int, ...]:
        """Numbers that were drawn by this move, which has `touched` a resource, and whose delivery has `seen` that."""
        resources = self._search.workshop.world.resources
        if not self._play.returned:
            resources = {name: each for name, each in resources.items() if name == touched}
        texts = [value for value in seen or () if isinstance(value, str)]
        return self._drawing.look(self._search.rules.drawn(node), resources, texts, facts.values())

    def _come_back(self, node: Node) -> tuple[list[tuple[str, Seat]], bool, frozenset[int]]:
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
                taint |= log.taint | ({seat.ident} if log.drew else set())
        return back, committed, taint

    def _others(
        self, node: Node, back: list[tuple[str, Seat]], changes: tuple[tuple[str, int], ...], drawn: tuple[int, ...]
    ) -> tuple[tuple[int, int], ...]:
        """What those have open now that have come back."""
        names, resources = self._search.names, self._search.workshop.world.resources
        became: list[tuple[int, int]] = []
        for name, seat in back:
            version = dict(changes).get(name, node.version(name))
            shown = resources[name].holds(self._actors[seat.ident]) or BEGUN
            became.append((seat.context(name), names.back(seat.context(name), version, drawn, shown)))
        return tuple(sorted(became))

    def _begin(self, ident: int, log: Log) -> None:
        search = self._search
        actor = self._actors[ident] = self._play.begin(ident)
        if actor.end == "failed":
            raise Hung(
                "where deliveries overlap, each in a thread of its own, the job fails before its first step, and in "
                f"the clean run it does not: {actor.error}. Look for what belongs to one thread, or use duplicates=1."
            )
        for each in (search.names.logs[UNSTARTED], log):
            self._compare(each, actor.moved(), actor)
        search.begun()

    def _step(self, node: Node, index: int, seat: Seat, log: Log, kind: str) -> None:
        search, names = self._search, self._search.names
        kind, fault = ("run" if kind == "begin" else kind), (kind if kind in FAULTS else "")
        key = search.rules.key(node, index, kind)
        assert log.pending is not None
        name = log.pending.resource
        actor = self._actors[seat.ident]
        if name == CLOCK and not fault and search.rules.lingers(node, seat):
            self._linger(node, index, seat, actor, key)
            return
        world = search.workshop.world
        resource = world.resources.get(name)
        commits = resource.commits if resource is not None else 0
        known = search.known(key, node)
        if known is not None and known.end == JAMMED:
            self.node = search.rules.after(node, index, known)
            return
        circle = known is None or names.errs(known.log)
        moved = self._play.run(actor, surface=kind == "fail", circle=circle, fault=fault)
        if fault and not actor.struck:
            raise Surprise(f"{log.pending.detail}: a fault ({fault}) did not come")
        facts = self._play.facts()
        resource = world.resources.get(name)
        if moved.end == "blocked" and resource is not None and self._jams(node, index, resource, actor):
            search.jammed = True
            search.found(key, node, Outcome(seat.log, seat.context(name), (), False, node.clock, JAMMED))
            raise Over
        drawn = self._draw(node, name, facts, moved.seen)
        # What ends a transaction draws nothing: then it was those who waited for that.
        ends = log.pending.kind == "commit" or (moved.seen or ("",))[0] == "error"
        mine, theirs = ((), drawn) if ends and self._play.returned else (drawn, drawn)
        back, committed, stored = self._come_back(node)
        taint = log.taint | stored | ({seat.ident} if moved.drew else set())
        changes, read = self._changes(node, facts, name, taint)
        clock = self._clock(node)
        number = seat.log
        if moved.end != "blocked":
            number = self._grow(seat.log, moved, actor, (node.version(name), seat.context(name), key), clock, read)
        # What it shows to others takes a query to find out: of what is known, only a sample is asked again.
        if known is None or known.end != moved.end or search.moves % _SAMPLE == 0:
            context = self._context(node, index, resource, actor, moved, number, mine)
            if committed and context:
                context = names.moved(context, dict(changes).get(name, node.version(name)))
            closed = self._closed(seat, name, actor, moved)
        else:
            context, closed = known.context, known.closed
        stirred = resource is not None and resource.commits > commits
        others = self._others(node, back, changes, theirs)
        outcome = Outcome(number, context, changes, stirred, clock, moved.end, others, drawn=drawn)
        outcome = outcome._replace(closed=closed, chances=moved.chances)
        if actor.pause and not moved.end and (earlier := names.round_before(number)) is not None:
            outcome = outcome._replace(log=earlier[0], polled=earlier[1])
        if moved.end == "failed":
            del self._actors[seat.ident]
        self._arrive(search.rules.after(node, index, outcome, kind))
        search.found(key, node, outcome)

    def _closed(self, seat: Seat, touched: str, actor: Actor, moved: Moved) -> tuple[str, ...]:
        """Where else it has nothing open any more: it may have rolled back, which is no step."""
        if moved.end:
            return ()
        names, resources = self._search.names, self._search.workshop.world.resources
        return tuple(
            name
            for name, context in seat.open
            if name != touched and name in resources and names.level(context) and not resources[name].holds(actor)
        )

    def _grow(self, before: int, moved: Moved, actor: Actor, unseen: Hashable, clock: int, read: frozenset[int]) -> int:
        """The log after a step that was done.

        unseen: stands for what the job got back, where that is not known. read: whose random values it may hold.
        """
        names = self._search.names
        log = names.logs[before]
        assert log.pending is not None
        seen: Hashable = ("state", unseen) if moved.seen is None else tuple(map(self._drawing.text, moved.seen))
        number = names.log(before, log.pending.resource, log.pending.signature, seen, moved.end, clock)
        grown = names.logs[number]
        fresh = log.taint | read
        grown.taint = fresh if not grown.learned else grown.taint & fresh
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
                number = self._grow(number, moved, actor, key, clock, read)
                if changes or moved.end or actor.pause:
                    break
            if moved.end == "blocked":
                break
            earlier = names.round_before(number) if actor.pause and not moved.end else None
            if earlier is None or changes:
                outcome = Outcome(number, 0, changes, bool(changes), clock, moved.end, chances=moved.chances)
                if moved.end == "failed":
                    del self._actors[seat.ident]
                self._arrive(search.rules.after(node, index, outcome))
                search.found(key, node, outcome)
                return
            number = earlier[0]
        search.endless.add(search.rules.endless_of(node, index))
        search.found(key, node, Outcome(seat.log, seat.context(CLOCK), (), False, node.clock, "blocked"))
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
            names.found(name, world.found_facts[name], self._drawing.unspaced(name, world.found_serials[name]))
            before = node.version(name)
            if name == resource:
                read = names.taints[before]
            known_as, serials = self._drawing.version(version), self._drawing.serials_of(world.resources[name])
            number = names.version(name, known_as, serials, frozenset(names.taints[before] | taint), now)
            if number != before:
                changes.append((name, number))
        return tuple(changes), read

    def _context(
        self,
        node: Node,
        index: int,
        resource: Resource | None,
        actor: Actor,
        moved: Moved,
        log: int,
        drawn: tuple[int, ...],
    ) -> int:
        """What the delivery has open after its step, after which its log is `log`. drawn: see Outcome."""
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
            before, since = names.as_if_at_once(before, version)
            drawn = (*since, *drawn)
        others = [each.context(resource.name) for each in node.seats if each is not seat]
        if moved.end == "blocked":
            place = sum(map(names.waits, others))
            return names.context(before, Waits(seat.log, version, place, drawn), shown)
        beside: tuple[int, ...] = ()
        if shown == MORE:
            # What it holds after the same answer may depend on what others had written (a deferred constraint).
            # What they have done elsewhere since then has nothing to do with it.
            beside = tuple(sorted(names.log_behind(other) for other in others if names.level(other) == MORE))
        return names.context(before, Did(log, version, beside, drawn), shown)

    def _compare(self, log: Log, moved: Moved, actor: Actor) -> None:
        """What a delivery with this log does next: learned, or compared with what was learned."""
        pause = max(1, round(actor.pause * 1000)) if actor.pause else 0
        error = self._drawing.text(moved.error)
        if not log.learned:
            log.learned = True
            log.pending, log.end, log.error, log.drew, log.pause = moved.next, moved.end, error, moved.drew, pause
            log.place = actor.place if pause else 0
            return
        known: tuple[object, ...] = (log.pending.signature if log.pending else None, log.end, log.drew)
        now: tuple[object, ...] = (moved.next.signature if moved.next else None, moved.end, moved.drew)
        if not log.drew:  # else how long it sleeps, and what its error says, may be drawn: others draw other values
            known, now = (*known, log.error, log.pause), (*now, error, pause)
        if known != now:
            raise Surprise(f"after the same observations: {known} and {now}")

    def _clock(self, node: Node) -> int:
        return self._play.clock if self._search.timed else node.clock

    def _jump(self, node: Node) -> None:
        search = self._search
        passed = self._play.jump(node.rung)
        changes, _ = self._changes(node, self._play.facts(), "", frozenset())
        outcome = Outcome(0, 0, changes, False, self._clock(node), "" if passed else "vain")
        self._arrive(search.rules.after(node, -1, outcome))
        search.found(search.rules.key(node, -1), node, outcome)
