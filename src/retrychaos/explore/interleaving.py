"""Every interleaving of deliveries that overlap, with crashes in the same space.

The graph of all interleavings is searched in memory with the transitions that are known. Where one is missing, a real
run goes to the nearest place that lacks it, and on from there; all that it passes is learned, and compared with what
was known. States are visited by the number of crashes, so that a counterexample has the fewest.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from retrychaos.explore.company import Company
from retrychaos.explore.draws import Draws, Renaming, uuids_in
from retrychaos.explore.learning import Over, Run
from retrychaos.explore.rules import Rules
from retrychaos.explore.transitions import (
    CLOCK,
    JAMMED,
    UNSTARTED,
    Draw,
    Move,
    Names,
    Node,
    Outcome,
    Seat,
    Surprise,
    begins,
    index_of,
    move_of,
)
from retrychaos.model.ledger import Facts
from retrychaos.model.plan import ACTS, FAULTS, LOST_REPLY, SHUTDOWN
from retrychaos.runtime.delivery import HORIZON, LADDER, Job, Workshop
from retrychaos.runtime.turns import Play
from retrychaos.world.resource import RandomIds, SerialCounter
from retrychaos.world.world import Saved

MAX_DELIVERIES = 25
"""Deliveries of one message in one plan."""
MOST_STEPS = 2_000
"""Steps on the way to a state; more is an endless loop."""
_NEAR = 6
"""Steps that cost about as much as a new run: so far away, something unknown is worth going on for."""


@dataclass(frozen=True)
class Scope:
    """duplicates: live deliveries at most. crashes: at most so many (None: any number). late: the clock may pass an
    expiry although somebody could go on. leased: a job goes by times that are stored in rows.

    faults: one error, lost reply or shutdown at most, in the first delivery before another one begins; `anywhere`: in
    any delivery at any time. telling: the only ones to try, with the steps (None: all).
    """

    duplicates: int = 2
    crashes: int | None = None
    late: bool = False
    faults: bool = False
    anywhere: bool = False
    telling: frozenset[tuple[str, Hashable]] | None = None
    leased: bool = False


@dataclass(slots=True)
class _Reached:
    """How a state was reached: from where, by which move, after how many crashes, switches, steps, and so on.

    node: the state itself. There can be very many, so each is kept once.
    """

    node: Node
    before: Node | None
    move: Move | None
    crashes: int
    switches: int
    steps: int
    deliveries: int
    clock: int
    jumps: int


@dataclass(frozen=True)
class Ending:
    """A state in which all is over and the ledger is wrong, or from which the job can never end."""

    node: Node
    kind: str
    effect: str
    last: Move | None = None
    """One move more, to show what happens there."""


@dataclass(frozen=True)
class _Kept:
    """A state of the world to begin from, and its clock. numbers: as whom its numbers from sequences are known."""

    saved: Saved | None
    clock: int
    numbers: Renaming


class OutOfTime(Exception):
    """The budget is spent."""


class Interleaving:
    """Explores deliveries of one job that overlap. ``limit()`` gives the seconds left, or raises OutOfTime.

    shared: see Rules. timed: states are told apart by the time of day; else a job is taken not to go by it. spaces:
    sequences may give other numbers than usual. fixed(): UUIDs that are the same in each clean run.
    """

    def __init__(
        self,
        workshop: Workshop,
        job: Job,
        company: Company,
        start: float,
        scope: Scope,
        limit: Callable[[], float],
        shared: bool = True,
        timed: bool = False,
        spaces: bool = True,
        fixed: Callable[[], frozenset[int]] = frozenset,
    ) -> None:
        self.names = Names(timed, start)
        self._spaces = spaces
        self._fixed = fixed
        self.runs = 0
        self.moves = 0
        self.bounded = False
        self.jammed = False
        """A delivery had to stand aside where it would have waited in a server for the same as another one."""
        self.doubts: list[str] = []
        self.notes: list[str] = []
        self.endings: list[Ending] = []
        self._rivals = company.visitors
        self.root = Node((), 0, (), scope.duplicates, False, rivals=self._rivals, calm=scope.faults)
        self.reached: dict[Node, _Reached] = {}
        self.edges: dict[Node, list[tuple[Move, Node]]] = {}
        self.workshop = workshop
        self._job = job
        self.company = company
        self._start = start
        self._scope = scope
        self._limit = limit
        self.timed = timed
        self.rules = Rules(self.names, shared, scope.anywhere)
        self._table: dict[Hashable, Outcome | Draw] = {}
        self._saved: dict[tuple[tuple[tuple[str, int], ...], tuple[int, int]], _Kept] = {}
        self._queue: list[tuple[int, int, int, Node]] = []
        self.switches = 0
        """All that takes less switches between deliveries was tried, with as many crashes as are looked at now."""
        self._later: list[tuple[Node, Move]] = []
        """Moves that take one crash more."""
        self._last: list[tuple[Node, Move]] = []
        """Faults."""
        self.cut = False
        """Time was up before all was tried that can follow from faults."""
        self._missing: dict[Hashable, list[tuple[Node, Move]]] = {}
        self.endless: set[Hashable] = set()
        """Loops that wait, and go on for as long as nobody else does something."""
        self._good: set[Node] = set()
        """States from which somebody gets to the end without a further crash."""
        self._back: dict[Node, list[Node]] = {}
        self._waited: set[Node] = set()
        self._excess: dict[Hashable, bool] = {}

    @property
    def states(self) -> int:
        return len(self.reached)

    # -- the search -------------------------------------------------------------------------------------------------

    def explore(self) -> None:
        """Search until closed, or until a fault was found and all that takes as few crashes was tried.

        What can go wrong but for crashes is tried when the rest is closed.
        """
        self.reached[self.root] = _Reached(self.root, None, None, 0, 0, 0, 0, 0, 0)
        self._saved[self.root.versions, self.root.time] = _Kept(self._spaced(), 0, {})
        self._enqueue(self.root)
        self._explore_on()
        try:
            while self._last and not self.endings:
                self._later, self._last = self._last, []
                self._explore_on()
        except OutOfTime:
            self.cut = True

    def _explore_on(self) -> None:
        while True:
            self._close()
            self._excuse_those_asked_to_stop()
            if not self._wait_where_stuck():
                if self.endings:
                    return
                self._report_stuck()
                if self.endings or not self._later:
                    return
                later, self._later = self._later, []
                for node, move in later:
                    self._try(node, move)

    def _spaced(self) -> Saved | None:
        """The world as it was found, with sequences moved to where their numbers can be told from others."""
        if not self._spaces:
            return None
        world = self.workshop.world
        self.workshop.clock.set(self._start)
        world.restore(None)
        counters: list[SerialCounter | RandomIds] = []
        for resource in world.resources.values():
            counters += resource.space_serials(len(counters))
        self.names.draws = Draws(counters)
        if any(isinstance(counter, RandomIds) for counter in counters):
            is_known = functools.partial(self._is_known, uuids_in(world.found_facts) | self._fixed())
            self.names.draws = Draws(counters, functools.cache(is_known))
        return world.save() if counters else None

    def _is_known(self, known: frozenset[int], uuid: int) -> bool:
        return uuid in known or self.workshop.chance.drew(f"{uuid:032x}")

    def _close(self) -> None:
        """All that takes no further crash: what needs few switches between deliveries first."""
        self.switches = 0
        while self._queue or self._missing:
            while self._queue and self._queue[0][0] <= self.switches:
                self._expand(heapq.heappop(self._queue)[-1])
            key = min(self._missing, key=self._remoteness, default=None)
            if key is None or self._remoteness(key)[0] > self.switches:
                if self._queue or key is not None:
                    self.switches += 1
                continue
            node, move = self._missing[key][0]
            self._learn(node, move)
            if key in self._missing:
                raise Surprise(f"the transition at {move} was not reached")

    def _remoteness(self, key: Hashable) -> tuple[int, int]:
        reached = self.reached[self._missing[key][0][0]]
        return reached.switches, reached.steps

    def _expand(self, node: Node) -> None:
        self.edges.setdefault(node, [])
        if node.acked and not node.seats:
            self._judge_at(node)
            self._finishes(node)
            return
        reached = self.reached[node]
        if self._is_cut_off(node):  # nothing is known of what comes after it
            self._finishes(node)
        if reached.steps > MOST_STEPS:
            self.bounded = True
            return
        stays = True
        for move in self._moves(node):
            stays = not self._try(node, move) and stays
        for number in node.rivals:
            self._try(node, move_of("rival", number))
        hopeless = self._beyond_repair(node)
        for seat in node.seats:
            if self.names.is_unstarted(seat.log) or hopeless:
                continue
            if self._scope.crashes is None or reached.crashes < self._scope.crashes:
                self._later.append((node, move_of("kill", seat.ident)))
        if stays and node.seats and all(self._is_blocked(node, index) for index in range(len(node.seats))):
            for seat in node.seats:  # nobody can go on: the step of any one fails
                if not self.rules.is_away(seat):
                    self._try(node, move_of("fail", seat.ident))

    def _moves(self, node: Node) -> Iterator[Move]:
        if node.idle and not node.acked:
            if self.reached[node].deliveries < MAX_DELIVERIES:
                yield move_of("begin", self.rules.free_ident(node))
            else:
                self.bounded = True
        for seat in node.seats:
            yield move_of("run", seat.ident)
        reached = self.reached[node]
        if self._scope.late and node.seats and reached.jumps < self._scope.duplicates:  # each may be slow once
            left = self.rules.until_expiry(node)
            if left is not None and reached.clock + left < (HORIZON - 1) * 1000:
                yield Move("jump")

    def _try(self, node: Node, move: Move) -> bool:
        """Go over an edge if what it does is known. False if nobody gets anywhere by it."""
        if move.kind == "begin" and not self.names.logs[UNSTARTED].learned:
            self._missing.setdefault("begin", []).append((node, move))
            return True
        if move.kind == "rival":
            return self._try_rival(node, move)
        entered = self.rules.seated(node, move)
        index = index_of(entered, move.ident)
        if move.kind == "kill" and not self.rules.is_felt(node, index):
            self._reach(node, self.rules.killed(node, index), move)
            return True
        if move.kind == "run" and self.rules.is_away(entered.seats[index]):
            return False
        if move.kind in ("begin", "run") and self.names.logs[entered.seats[index].log].end == "done":
            self._reach(node, self.rules.acknowledged(entered, index), move)
            return True
        if move.kind == "begin" and self.names.logs[UNSTARTED].end:
            return False  # it raises before its first step, whatever the world is like
        if move.kind in ("begin", "run") and not self._may_sleep(entered, index):
            return False
        key, outcome = self._look_up(self.rules.key(entered, index, move.kind), entered)
        if outcome is None and move.kind == "run" and self.rules.endless_of(entered, index) in self.endless:
            return False
        if outcome is None:
            self._missing.setdefault(key, []).append((node, move))
            return True
        if node.calm and entered.calm and move.kind in ("begin", "run"):
            self._expect_faults(node, entered, index, outcome)
        after = self.rules.after(entered, index, outcome, move.kind)
        if after == node:
            return False
        self._reach(node, after, move)
        return True

    def _expect_faults(self, node: Node, entered: Node, index: int, outcome: Outcome) -> None:
        """What could go wrong at a step comes after all that goes well. What waits in a server is let alone."""
        seat = entered.seats[index]
        pending = self.names.logs[seat.log].pending
        assert pending is not None
        kinds = outcome.chances or (SHUTDOWN,)
        if self._beyond_repair(node):
            return
        if self.names.has_waited(seat.context(pending.resource)):
            kinds = tuple(kind for kind in kinds if kind == LOST_REPLY)
        for kind in kinds:
            if self._scope.telling is None or (kind, pending.signature) in self._scope.telling:
                self._last.append((node, move_of(kind, seat.ident)))

    def _try_rival(self, node: Node, move: Move) -> bool:
        key, outcome = self._look_up(self.rules.rival_key(node, move.ident), node)
        if outcome is None:
            self._missing.setdefault(key, []).append((node, move))
            return True
        if outcome.end:
            return False  # it cannot run whole here
        self._reach(node, self.rules.visited(node, move.ident, outcome), move)
        return True

    def _reach(self, before: Node, node: Node, move: Move) -> None:
        node, _ = self.rules.compact(node)
        known = self.reached.get(node)
        if known is not None:
            node = known.node
        self.edges[before].append((move, node))
        if move.kind not in ("kill", *FAULTS) and not (move.kind == "rival" and self.company.may_stay_away(move.ident)):
            if node in self._good:
                self._finishes(before)
            else:
                self._back.setdefault(node, []).append(before)
        if known is not None:
            return
        was = self.reached[before]
        self.reached[node] = _Reached(
            node,
            was.node,
            move,
            was.crashes + (move.kind == "kill"),
            was.switches + self._switches(before, was.move, move),
            was.steps + 1,
            was.deliveries + begins(before, move),
            was.clock + self._takes(before, move),
            was.jumps + (move.kind == "jump"),
        )
        self._enqueue(node)

    def _enqueue(self, node: Node) -> None:
        reached = self.reached[node]
        heapq.heappush(self._queue, (reached.switches, reached.steps, len(self.reached), node))

    @staticmethod
    def _switches(node: Node, last: Move | None, move: Move) -> bool:
        """Another delivery goes on although the last one could."""
        if last is None or last.kind == "rival" or last.ident == move.ident:
            return False
        if move.kind not in ACTS:
            return False
        return any(seat.ident == last.ident for seat in node.seats)

    def _takes(self, node: Node, move: Move) -> int:
        """For how long the clock goes on."""
        if move.kind == "jump":
            return self._wait_of(node) or 0
        index = index_of(node, move.ident)
        return self.names.logs[node.seats[index].log].pause if move.kind == "run" and index >= 0 else 0

    def _is_blocked(self, node: Node, index: int) -> bool:
        """It waits for others, or is in a sleep that must not pass an expiry."""
        log = self.names.logs[node.seats[index].log]
        if log.end:
            return False
        if self.rules.is_away(node.seats[index]):
            return True
        if self.rules.endless_of(node, index) in self.endless:
            return True
        outcome = self.known(self.rules.key(node, index), node)
        return outcome is not None and outcome.end in ("blocked", JAMMED)

    def _may_sleep(self, node: Node, index: int) -> bool:
        """Time passes an expiry only when nobody could do something instead, unless that is asked for."""
        log = self.names.logs[node.seats[index].log]
        if self._scope.late or log.pending is None or log.pending.resource != CLOCK:
            return True
        left = self.rules.until_expiry(node)
        if left is None or log.pause < left:
            return True
        return all(self._rests(node, at) for at in range(len(node.seats)) if at != index)

    def _rests(self, node: Node, index: int) -> bool:
        log = self.names.logs[node.seats[index].log]
        return log.pending is not None and (log.pending.resource == CLOCK or self._is_blocked(node, index))

    def _facts(self, node: Node) -> Facts:
        found = self.workshop.world.found_facts
        mine = {name: self.names.versions[number] for name, number in node.versions}
        return {**found, **{name: version for name, version in mine.items() if version is not None}}

    # -- judging ----------------------------------------------------------------------------------------------------

    def _judge_at(self, node: Node) -> None:
        elapsed = self.reached[node].clock / 1000
        deviation = self.company.judge(self._facts(node), elapsed, lambda: self._saved_at(node), self._ran(node))
        if deviation is not None:
            self.endings.append(Ending(node, deviation.kind, deviation.effect))

    def _ran(self, node: Node) -> frozenset[int]:
        return frozenset(self._rivals) - frozenset(node.rivals)

    def _beyond_repair(self, node: Node) -> bool:
        key = (node.versions, node.rivals)
        known = self._excess.get(key)
        if known is None:
            known = self._excess[key] = self.company.excess(self._facts(node), self._ran(node))
        return known

    def _stuck(self) -> list[Node]:
        """States from which nobody gets to the end without a crash."""
        return [node for node in self.reached if node not in self._good]

    def _finishes(self, node: Node) -> None:
        """From here somebody gets to the end, and so from wherever one comes here without a crash."""
        found = [node]
        while found:
            node = found.pop()
            if node not in self._good:
                self._good.add(node)
                found += self._back.pop(node, ())

    def _is_cut_off(self, node: Node) -> bool:
        reached = self.reached[node]
        return reached.steps > MOST_STEPS or (bool(node.idle) and reached.deliveries >= MAX_DELIVERIES)

    def _excuse_those_asked_to_stop(self) -> None:
        """Whoever has asked a worker to stop kills it if it never does: a state where only such ones are left, and wait
        for ever, is no dead end. What their death leaves is tried as any other."""
        for node in self._stuck():
            seats = enumerate(node.seats)
            if node.seats and all(self._will_be_killed(node, index, seat) for index, seat in seats):
                self._finishes(node)

    def _will_be_killed(self, node: Node, index: int, seat: Seat) -> bool:
        return self.rules.endless_of(node, index) in self.endless and self.names.was_stopped(seat.log)

    def _wait_where_stuck(self) -> bool:
        """Where nobody gets to the end, let the clock go on. True if anything new was found to do."""
        new = False
        for node in self._stuck():
            if node not in self._waited:
                self._waited.add(node)
                if self._wait_of(node) is not None:
                    self._try(node, Move("jump"))
                    new = True
        return new

    def _wait_of(self, node: Node) -> int | None:
        """For how long the clock goes on from a state that leads nowhere; None if that was tried."""
        left = self.rules.until_expiry(node)
        if left is not None:
            return left
        return round(LADDER[node.rung] * 1000) if node.rung < len(LADDER) else None

    def _report_stuck(self) -> None:
        stuck = self._stuck()
        if stuck:
            first = min(stuck, key=lambda node: (self.reached[node].crashes, self.reached[node].steps))
            errors = [self.names.logs[seat.log].error for seat in first.seats]
            error = next(filter(None, errors), "")
            self.endings.append(self._failing(stuck) or Ending(first, "stuck", error or "it waits for ever"))

    def _failing(self, stuck: list[Node]) -> Ending | None:
        """The first delivery that fails where nothing leads on."""
        ways = [
            (self.reached[node].crashes, self.reached[node].steps, number, node, move, error)
            for number, node in enumerate(stuck)
            for move, _ in self.edges.get(node, ())
            if move.kind in ("run", "fail") and (error := self._error_of(node, move))
        ]
        if not ways:
            return None
        *_, node, move, error = min(ways, key=lambda way: way[:3])
        return Ending(node, "stuck", error, move)

    def _error_of(self, node: Node, move: Move) -> str:
        index = index_of(node, move.ident)
        if self.names.logs[node.seats[index].log].end:
            return ""
        outcome = self.known(self.rules.key(node, index, move.kind), node)
        return self.names.logs[outcome.log].error if outcome is not None and outcome.end == "failed" else ""

    # -- learning ---------------------------------------------------------------------------------------------------

    def _saved_at(self, node: Node) -> Saved | None:
        """The world in a state at which nobody is running; gone to for real, if only known from parts of runs."""
        key = (node.versions, node.time)
        if key not in self._saved:
            self._learn(node)
        if key not in self._saved:
            raise Surprise("a state at the end was not reached")
        return self._saved[key].saved

    def _learn(self, node: Node, *last: Move) -> None:
        """Run to a state whose next transition is not known, and on from there as long as that is new."""
        moves: list[Move] = list(last)
        start = node
        while not (start.quiet and (start.versions, start.time) in self._saved):
            reached = self.reached[start]
            assert reached.before is not None
            assert reached.move is not None
            moves.append(reached.move)
            start = reached.before
        kept = self._saved[start.versions, start.time]
        self.runs += 1
        with Play(self.workshop, self._job, kept.saved, self._start, self._limit(), clock=kept.clock) as play:
            run = Run(self, play, start, kept.numbers)
            with contextlib.suppress(Over):
                for each in reversed(moves):
                    run.go(each)
                while len(play.actors) < MAX_DELIVERIES and (onward := self._onward(run.node)):
                    self._limit()
                    for each in onward:
                        run.go(each)
        self.doubts += [each for each in play.doubts if each not in self.doubts]
        self.notes += [each for each in play.notes if each not in self.notes]

    def _onward(self, node: Node) -> list[Move]:
        """The shortest way from here to a transition that is not known; empty if none is near."""
        ways: deque[tuple[Node, list[Move]]] = deque([(node, [])])
        seen = {node}
        while ways:
            here, way = ways.popleft()
            if (death := self._unknown_death(here)) is not None:
                return [*way, death]
            for move in self._onward_moves(here):
                entered = self.rules.seated(here, move)
                index = index_of(entered, move.ident)
                log = self.names.logs[entered.seats[index].log]
                if log.end or not self._may_sleep(entered, index):
                    continue
                outcome = self.known(self.rules.key(entered, index), entered)
                if outcome is None and self.rules.endless_of(entered, index) in self.endless:
                    continue
                if outcome is None:
                    return [*way, move]
                after, _ = self.rules.compact(self.rules.after(entered, index, outcome))
                if len(way) + 1 < _NEAR and after not in seen:
                    seen.add(after)
                    ways.append((after, [*way, move]))
        return []

    def _unknown_death(self, node: Node) -> Move | None:
        """The death of a delivery that others notice, where it is not known what becomes of them."""
        if self._scope.crashes == 0:
            return None
        for index, seat in enumerate(node.seats):
            if self.names.logs[seat.log].end or not self.rules.is_felt(node, index):
                continue
            if self.known(self.rules.key(node, index, "kill"), node) is None:
                return move_of("kill", seat.ident)
        return None

    def _onward_moves(self, node: Node) -> Iterator[Move]:
        for seat in node.seats:
            yield move_of("run", seat.ident)
        if node.idle and not node.acked:
            yield move_of("begin", self.rules.free_ident(node))

    def _look_up(self, key: Hashable, node: Node) -> tuple[Hashable, Outcome | None]:
        """What is known of a transition; and under which key, if it draws from sequences."""
        known = self._table.get(key)
        if isinstance(known, Draw):
            key = (key, self.rules.place(node, known))
            known = self._table.get(key)
        assert not isinstance(known, Draw)
        return key, known

    def known(self, key: Hashable, node: Node) -> Outcome | None:
        return self._look_up(key, node)[1]

    def found(self, key: Hashable, node: Node, outcome: Outcome) -> None:
        """A transition was seen, from that state."""
        waiting = self._missing.pop(key, [])
        if outcome.drawn:
            draw = Draw(tuple(sorted(set(map(self.names.draws.sequence_of, outcome.drawn)))))
            known = self._table.setdefault(key, draw)
            if known != draw:
                raise Surprise(f"{key}: {known} and {draw}")
            key = (key, self.rules.place(node, draw))
        known = self._table.setdefault(key, outcome)
        if known != outcome:
            raise Surprise(f"{key}: {known} and {outcome}")
        for each, move in (*waiting, *self._missing.pop(key, ())):
            self._try(each, move)

    def begun(self) -> None:
        for node, move in self._missing.pop("begin", ()):
            self._try(node, move)

    def keep(self, node: Node, clock: int, numbers: Renaming) -> None:
        """The world is in a state that one can come back to. numbers: as whom those from sequences are known."""
        node = node._replace(seats=())
        quiet, renaming = self.rules.compact(node)
        key = (quiet.versions, quiet.time)
        if key not in self._saved:
            stored = self.rules.drawn(node)
            left = {real: renaming.get(name, name) for real, name in numbers.items() if name in stored}
            self._saved[key] = _Kept(self.workshop.world.save(), clock, left)
