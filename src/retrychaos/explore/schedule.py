"""Performs one plan of deliveries that overlap, and finds the smallest that leads to a state."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from retrychaos.explore.company import VISITOR_PID
from retrychaos.explore.interleaving import Interleaving
from retrychaos.explore.transitions import Move, Node, begins
from retrychaos.model.durations import in_words
from retrychaos.model.errors import PlanError
from retrychaos.model.ledger import Facts
from retrychaos.model.options import Other
from retrychaos.model.plan import ACTS, FAULTS, SHUTDOWNS, Plan, Turn, steps_mark
from retrychaos.model.report import Delivery, Moment
from retrychaos.model.step import Step
from retrychaos.runtime.delivery import Job, Workshop
from retrychaos.runtime.turns import Actor, Moved, Play
from retrychaos.world.world import Saved


@dataclass(frozen=True)
class Performed:
    """What came of a plan. open: somebody was still alive at its end."""

    timeline: tuple[Delivery, ...]
    moments: tuple[Moment, ...]
    facts: Facts
    open: bool
    error: str
    elapsed: float
    mark: str
    saved: Saved | None = None
    ran: frozenset[int] = frozenset()
    """Other code that has run, by its number."""
    late: str = ""
    """What has ended meanwhile, for people."""


def smallest(search: Interleaving, targets: frozenset[Node]) -> list[tuple[Node, Move]]:
    """The way to one of these states with the fewest crashes and faults, then switches, then steps.

    Each move comes with the state that it is made in.
    """
    order = count()
    start = (search.root, -1)
    best: dict[tuple[Node, int], tuple[int, int, int]] = {start: (0, 0, 0)}
    came: dict[tuple[Node, int], tuple[tuple[Node, int], Move]] = {}
    heap = [((0, 0, 0), next(order), start)]
    while heap:
        cost, _, here = heapq.heappop(heap)
        if cost > best[here]:
            continue
        node, last = here
        if node in targets:
            way: list[tuple[Node, Move]] = []
            while here in came:
                here, move = came[here]
                way.append((here[0], move))
            return way[::-1]
        for move, after in search.edges.get(node, ()):
            acts = move.kind in ACTS
            switches = acts and move.ident != last and any(seat.ident == last for seat in node.seats)
            to = (after, move.ident if acts else last)
            price = (cost[0] + (move.kind in ("kill", *FAULTS)), cost[1] + switches, cost[2] + 1)
            if to not in best or price < best[to]:
                best[to] = price
                came[to] = (here, move)
                heapq.heappush(heap, (price, next(order), to))
    return []


def plan_of(job: str, search: Interleaving, way: list[tuple[Node, Move]]) -> Plan:
    """The moves of a way as turns of numbered deliveries."""
    numbers: dict[int, int] = {}
    turns: list[Turn] = []
    for node, move in way:
        if move.kind == "jump":
            turns.append(Turn("jump", ident=node.rung))
            continue
        if move.kind == "rival":
            turns.append(Turn("rival", ident=move.ident))
            continue
        starts = begins(node, move)
        if starts:
            numbers[move.ident] = max((turn.delivery for turn in turns), default=0) + 1
        turns.append(Turn(move.kind, numbers[move.ident], move.ident if starts else 0))
    return Plan(job, turns=tuple(turns))


def perform_turns(
    plan: Plan, workshop: Workshop, job: Job, start: float, limit: float, others: Sequence[Other] = ()
) -> Performed:
    """Run a plan of deliveries that overlap. Raises PlanError if the job does other steps than those it was made
    for."""
    stage = _Stage(workshop, start, others)
    with Play(workshop, job, None, start, limit, traced=True) as play:
        for turn in plan.turns:
            stage.turn(play, turn)
        facts = play.facts()
        mark = steps_mark([moment.step for moment in stage.moments if moment.step is not None])
        elapsed = workshop.clock.now() - start
        saved = workshop.world.save()
    if plan.mark and mark != plan.mark:
        raise PlanError(
            "the token no longer fits: the deliveries do other steps now. The job or its data has changed; run the "
            "check again."
        )
    acked = any(end == "completed" for end, _ in stage.ends.values())
    alive = bool(stage.actors) or not acked
    return Performed(
        stage.timeline(),
        tuple(stage.moments),
        facts,
        alive,
        stage.error,
        elapsed,
        mark,
        saved,
        frozenset(stage.ran),
        "; ".join(stage.late),
    )


class _Stage:
    """The deliveries of a plan, and what happened to them in order."""

    def __init__(self, workshop: Workshop, start: float, others: Sequence[Other]) -> None:
        self.ran: set[int] = set()
        self.moments: list[Moment] = []
        self.actors: dict[int, Actor] = {}
        self.error = ""
        self.late: list[str] = []
        self._workshop = workshop
        self._start = start
        self._others = others
        self._began: dict[int, float] = {}
        self._steps: dict[int, list[Step]] = {}
        self.ends: dict[int, tuple[str, str]] = {}

    def turn(self, play: Play, turn: Turn) -> None:
        if turn.kind == "jump":
            before = play.clock
            if play.jump(turn.ident):
                took = in_words((play.clock - before) / 1000, 2)
                self.late.append(f"{took} go by while they are at work, past {' and '.join(play.ended) or 'an expiry'}")
            self.moments.append(Moment(0, event="later", detail=f"{(play.clock - before) / 1000:g}"))
            return
        if turn.kind == "rival":
            self._visit(play, turn.ident)
            return
        number = turn.delivery
        if turn.kind == "begin" or (turn.kind in FAULTS and number not in self._began):
            self.actors[number] = play.begin(turn.ident)
            self._began[number] = self._workshop.clock.now() - self._start
            self._steps[number] = []
        actor = self.actors.get(number)
        if actor is None:
            raise PlanError(
                f"the token no longer fits: delivery {number} has ended already. The job or its data has changed; run "
                "the check again."
            )
        if turn.kind == "kill":
            play.kill(actor)
            self._close(number, "crashed", "dies")
        elif actor.end == "done":
            self._close(number, "completed", "acknowledged")
        else:
            fault = turn.kind if turn.kind in FAULTS else ""
            self._moved(number, actor, play.run(actor, surface=turn.kind == "fail", fault=fault), fault)

    def _visit(self, play: Play, number: int) -> None:
        if not 0 < number <= len(self._others):
            raise PlanError(
                f"the token no longer fits: it has other code number {number} run, and rivals and siblings hold "
                f"{len(self._others)}. Give the options of the check that it came from."
            )
        other = self._others[number - 1]
        visitor = play.visit(Job(other.function, other.args), number, VISITOR_PID * number)
        if visitor.end != "done":
            raise PlanError(f"the token no longer fits: {other.name} cannot run there any more ({visitor.error}).")
        self.ran.add(number)
        self.moments.append(Moment(0, event="rival", detail=other.name))
        self.moments += [Moment(0, step, "rival", other.name) for step in visitor.steps]

    def _moved(self, number: int, actor: Actor, moved: Moved, fault: str) -> None:
        if fault and not actor.struck:
            raise PlanError(
                f"the token no longer fits: delivery {number} should have a fault ({fault}) here, and there is none. "
                "The job or its data has changed; run the check again."
            )
        if moved.end == "blocked":
            step = moved.next
            self.moments.append(Moment(number, event="waits", detail=step.detail if step else ""))
            return
        if moved.did is not None and fault not in SHUTDOWNS:
            self._steps[number].append(moved.did)
            self.moments.append(Moment(number, moved.did))
        if fault:
            self._steps[number].append(Step("fault", "", fault, actor.struck))
            self.moments.append(Moment(number, event="fault", detail=actor.struck))
        elif moved.did is not None and moved.seen is not None and moved.seen[:1] == ("error",):
            self.moments.append(Moment(number, event="refused", detail=moved.seen[1]))
        if moved.end == "failed":
            self.error = moved.error
            self._close(number, "failed", "raises", moved.error)

    def _close(self, number: int, end: str, event: str, detail: str = "") -> None:
        del self.actors[number]
        self.ends[number] = (end, detail)
        self.moments.append(Moment(number, event=event, detail=detail))

    def timeline(self) -> tuple[Delivery, ...]:
        return tuple(
            Delivery(number, began, tuple(self._steps[number]), *self.ends.get(number, ("hung", "")))
            for number, began in self._began.items()
        )
