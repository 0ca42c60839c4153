"""Random schedules of deliveries that overlap, fewest switches first: for what is left when a search did not close.

Most faults of this kind need one or two switches at the right steps, so schedules with few of them come first
(Musuvathi and Qadeer, "Iterative context bounding for systematic testing", PLDI 2007).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from retrychaos.explore.company import VISITOR_PID, Company
from retrychaos.explore.interleaving import MAX_DELIVERIES, OutOfTime, Scope
from retrychaos.model.ledger import Facts
from retrychaos.model.plan import Plan, Turn
from retrychaos.runtime.delivery import Job, Workshop
from retrychaos.runtime.turns import Actor, Play
from retrychaos.world.world import Saved

_STEPS_EACH = 40
"""Times the steps of a clean run, after which a schedule is given up."""


@dataclass(frozen=True)
class Sampled:
    """How many schedules were tried, and the plan of one that left a wrong ledger."""

    tried: int
    plan: Plan | None = None


def sample(
    name: str,
    workshop: Workshop,
    job: Job,
    company: Company,
    start: float,
    scope: Scope,
    steps: int,
    limit: Callable[[], float],
) -> Sampled:
    """Try random schedules until one fails or ``limit()`` raises OutOfTime. steps: of a clean run."""
    chooser = random.Random(f"{name} {steps}")
    tried = 0
    for switches, kills in _sizes(scope):
        try:
            still = limit()
        except OutOfTime:
            return Sampled(tried)
        places = sorted(chooser.sample(range(1, 2 * steps + 3), min(switches, 2 * steps)))
        deaths = sorted(chooser.sample(range(1, 2 * steps + 3), kills))
        with Play(workshop, job, None, start, still) as play:
            tried += 1
            visits = {
                chooser.randrange(1, 2 * steps + 3): number for number in company.visitors if chooser.random() < 0.8
            }
            schedule = _Schedule(play, scope.duplicates, places, deaths, visits, company)
            ended = schedule.run(_STEPS_EACH * (steps + 5))
            facts, elapsed = play.facts(), play.clock / 1000
            saved = workshop.world.save() if ended and company.waits else None
        if ended and _is_wrong(company, facts, elapsed, saved, schedule.ran):
            return Sampled(tried, Plan(name, turns=tuple(schedule.turns)))
    return Sampled(tried)


def _is_wrong(company: Company, facts: Facts, elapsed: float, saved: Saved | None, ran: set[int]) -> bool:
    try:
        return company.judge(facts, elapsed, lambda: saved, frozenset(ran)) is not None
    except OutOfTime:
        return False  # what follows did not end in time


def _sizes(scope: Scope) -> Iterator[tuple[int, int]]:
    """How many switches, and how many crashes: small numbers often."""
    for most in itertools.count(1):
        for switches in range(1, most + 1):
            yield switches, 0
            if scope.crashes is None or scope.crashes:
                yield switches, 1


class _Schedule:
    """One schedule: goes on with one delivery up to the next place for a switch."""

    def __init__(
        self,
        play: Play,
        duplicates: int,
        switches: list[int],
        kills: list[int],
        visits: dict[int, int],
        company: Company,
    ) -> None:
        self.turns: list[Turn] = []
        self.ran: set[int] = set()
        self._visits = visits
        self._company = company
        self._play = play
        self._idle = duplicates
        self._switches = switches
        self._kills = kills
        self._live: dict[int, Actor] = {}
        self._blocked: set[int] = set()
        self._acked = False
        self._current = 0

    def run(self, most: int) -> bool:
        """False if it did not come to an end."""
        for step in range(1, most):
            if not self._live and (self._acked or not self._idle):
                return self._acked
            if (number := self._visits.get(step)) is not None:
                visitor = self._play.visit(self._company.job(number), number, VISITOR_PID * number)
                if visitor.end != "done":
                    return False  # it cannot run there, and has left things half done
                self.ran.add(number)
                self.turns.append(Turn("rival", ident=number))
            elif step in self._kills and self._current in self._live:
                self._die(self._current)
            elif step in self._switches:
                self._switch()
            else:
                self._go_on()
        return False

    def _switch(self) -> None:
        others = [number for number in self._live if number != self._current]
        if self._idle and not self._acked and len(self.turns) < 10_000 and not others:
            self._begin()
        elif others:
            self._current = others[0]
            self._step()

    def _go_on(self) -> None:
        if self._current not in self._live or self._current in self._blocked:
            free = [number for number in self._live if number not in self._blocked]
            if free:
                self._current = free[0]
            elif self._idle and not self._acked and self._begun < MAX_DELIVERIES:
                self._begin()
                return
            elif self._live:
                self._current = next(iter(self._live))
                self._step(fail=True)
                return
            else:
                self._idle = 0
                return
        self._step()

    @property
    def _begun(self) -> int:
        return len(self._play.actors)

    def _begin(self) -> None:
        number = self._begun + 1
        self._idle -= 1
        self._live[number] = self._play.begin(number - 1)
        self._current = number
        self._step(kind="begin")

    def _die(self, number: int) -> None:
        self._play.kill(self._live.pop(number))
        self._blocked.clear()
        self._idle += not self._acked
        self.turns.append(Turn("kill", number))

    def _step(self, kind: str = "run", fail: bool = False) -> None:
        number, actor = self._current, self._live[self._current]
        kind = "fail" if fail else kind
        self.turns.append(Turn(kind, number, number - 1 if kind == "begin" else 0))
        if actor.end == "done":
            del self._live[number]
            self._acked, self._idle = True, 0
            self._blocked.clear()
            return
        moved = self._play.run(actor, surface=fail)
        if moved.end == "blocked":
            self._blocked.add(number)
            return
        self._blocked.clear()
        if moved.end == "failed":
            del self._live[number]
            self._idle += not self._acked
