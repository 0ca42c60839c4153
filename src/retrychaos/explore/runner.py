"""Where deliveries run: in this process, or each in a process forked before the first one."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Protocol

from retrychaos.model.errors import SharedError
from retrychaos.model.ledger import Version
from retrychaos.runtime.delivery import Job, Keep, Order, Outcome, Workshop, keep_all
from retrychaos.runtime.fork import ForkError, Zygote

_GRACE = 10.0
_perf_counter = time.perf_counter


class Runner(Protocol):
    """Runs one delivery."""

    def run(self, order: Order, keep: Keep) -> Outcome: ...


class Here:
    """In this process."""

    def __init__(self, workshop: Workshop, job: Job) -> None:
        self._workshop = workshop
        self._job = job

    def run(self, order: Order, keep: Keep) -> Outcome:
        return self._workshop.run(self._job, order, keep)


@dataclass(frozen=True)
class _Reply:
    outcome: Outcome
    drawn: list[bytes]
    instants: set[float]
    found: dict[str, Version]
    """Resources that were touched there, as they were found."""


class Forked:
    """In a fresh process each, forked from one that has never run the job."""

    def __init__(self, workshop: Workshop, job: Job) -> None:
        self._workshop = workshop
        self._zygote = Zygote(lambda order: self._serve(job, order))
        self._begun: Order | None = None

    def _serve(self, job: Job, order: Order) -> _Reply:
        workshop = self._workshop
        outcome = workshop.run(job, order, keep_all)
        if outcome.cause is not None:
            outcome = replace(outcome, cause=type(outcome.cause)(str(outcome.cause)))
        return _Reply(outcome, workshop.chance.drawn, workshop.clock.instants, workshop.world.found_facts)

    def begin(self, order: Order) -> None:
        """Do at once what run() is going to be asked for, beside the deliveries here."""
        self._begun = replace(order, beside=True)
        self._zygote.send(self._begun)

    def run(self, order: Order, keep: Keep) -> Outcome:
        workshop = self._workshop
        try:
            reply = self._done_beside(order) or self._do(order)
        except ForkError as problem:
            doubt = f"hidden memory cannot be ruled out: {problem}"
            return Outcome("stopped", (), (), {}, None, order.at, doubts=(doubt,))
        known = set(workshop.chance.drawn)
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

    def _done_beside(self, order: Order) -> _Reply | None:
        """The reply to what was begun, if that was the same and could be done."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        reply = self._receive(begun)
        usable = begun == replace(order, beside=True, limit=begun.limit)
        return reply if usable and not isinstance(reply.outcome.cause, SharedError) else None

    def _do(self, order: Order) -> _Reply:
        workshop = self._workshop
        workshop.clock.set(order.at)
        workshop.world.shifted = False
        workshop.world.restore(order.start)
        self._zygote.send(order)
        try:
            return self._receive(order)
        finally:
            workshop.world.distrust()

    def _receive(self, order: Order) -> _Reply:
        reply: _Reply = self._zygote.receive(order.limit + _GRACE)
        return reply

    def end(self) -> None:
        """No delivery will be asked for any more."""
        self._zygote.end()

    def close(self) -> None:
        self._zygote.close()
