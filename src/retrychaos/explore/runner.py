"""Where deliveries run: in this process, or each in a process forked before the first one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from retrychaos.model.ledger import Version
from retrychaos.runtime.delivery import Job, Keep, Order, Outcome, Workshop, keep_all
from retrychaos.runtime.fork import ForkError, Zygote

_GRACE = 10.0
_perf_counter = time.perf_counter


class Runner(Protocol):
    """Runs one delivery."""

    def run(self, order: Order, keep: Keep) -> Outcome: ...


class Here:
    """In this process. `others` are the jobs around it, which an order tells by their number."""

    def __init__(self, workshop: Workshop, job: Job, others: Sequence[Job] = ()) -> None:
        self._workshop = workshop
        self._jobs = (job, *others)

    def run(self, order: Order, keep: Keep) -> Outcome:
        return self._workshop.run(self._jobs[order.job], order, keep)


@dataclass(frozen=True)
class _Reply:
    outcome: Outcome
    drawn: list[bytes]
    instants: set[float]
    found: dict[str, Version]
    """Resources that were touched there, as they were found."""


class Forked:
    """In a fresh process each, forked from one that has never run the job."""

    def __init__(self, workshop: Workshop, job: Job, others: Sequence[Job] = ()) -> None:
        self._workshop = workshop
        jobs = (job, *others)
        self._zygote = Zygote(lambda order: self._serve(jobs[order.job], order))

    def _serve(self, job: Job, order: Order) -> _Reply:
        workshop = self._workshop
        outcome = workshop.run(job, order, keep_all)
        if outcome.cause is not None:
            outcome = replace(outcome, cause=type(outcome.cause)(str(outcome.cause)))
        return _Reply(outcome, workshop.chance.drawn, workshop.clock.instants, workshop.world.found_facts)

    def run(self, order: Order, keep: Keep) -> Outcome:
        workshop = self._workshop
        workshop.clock.set(order.at)
        workshop.world.shifted = False
        workshop.world.restore(order.start)
        known = set(workshop.chance.drawn)
        try:
            reply: _Reply = self._zygote.ask(order, order.limit + _GRACE)
        except ForkError as problem:
            doubt = f"hidden memory cannot be ruled out: {problem}"
            return Outcome("stopped", (), (), {}, None, order.at, doubts=(doubt,))
        finally:
            workshop.world.distrust()
        workshop.chance.drawn += [value for value in reply.drawn if value not in known]
        workshop.clock.instants |= reply.instants
        started = order.start.facts if order.start is not None else {}
        for name, version in reply.found.items():
            if name not in started:  # else it is as it was after a crash
                workshop.world.found_facts.setdefault(name, version)
        changes = tuple(
            change if keep(change.boundary, change.facts) else replace(change, saved=None)
            for change in reply.outcome.changes
        )
        return replace(reply.outcome, changes=changes)

    def end(self) -> None:
        """No delivery will be asked for any more."""
        self._zygote.end()

    def close(self) -> None:
        self._zygote.close()
