"""Where deliveries run: in this process, or each in a process forked before the first one."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from retrychaos.model.errors import SharedError
from retrychaos.model.ledger import Version
from retrychaos.runtime.delivery import Job, Keep, Order, Outcome, Workshop, keep_all, keep_none
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
    letters: tuple[set[str], list[str]]
    instants: set[float]
    found: dict[str, Version]
    """Resources that were touched there, as they were found."""


class Forked:
    """In a fresh process each, forked from one that has never run the job."""

    def __init__(self, workshop: Workshop, job: Job, others: Sequence[Job] = ()) -> None:
        self._workshop = workshop
        jobs = (job, *others)
        self._zygote = Zygote(lambda order: self._serve(jobs[order.job], order))
        self._begun: Order | None = None
        self._folder = os.path.join(tempfile.gettempdir(), f"retrychaos-{os.getpid()}-{time.monotonic_ns():x}")
        """Only there if the one that was begun needs it."""

    def _serve(self, job: Job, order: Order) -> _Reply:
        workshop = self._workshop
        if order.aside and order.start is not None:
            try:
                workshop.world.part(order.start, order.aside)
            except (SharedError, OSError) as problem:
                cause = SharedError(str(problem))
                return _Reply(Outcome("stopped", (), (), {}, None, order.at, cause=cause), [], (set(), []), set(), {})
        outcome = workshop.run(job, order, keep_all)
        if outcome.cause is not None:
            outcome = replace(outcome, cause=type(outcome.cause)(str(outcome.cause)))
        chance, letters = workshop.chance, (workshop.chance.letters.words, workshop.chance.letters.streams)
        return _Reply(outcome, chance.drawn, letters, workshop.clock.instants, workshop.world.found_facts)

    def begin(self, order: Order) -> None:
        """Do it at once, beside the deliveries here; begun() has the outcome."""
        self._begun = replace(order, aside=self._folder)
        self._zygote.send(self._begun)

    def begun(self, order: Order) -> Outcome | None:
        """What came of the delivery that was begun; None if that was another one, or could not be done beside."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        try:
            reply = self._receive(begun)
        except ForkError:
            return None
        if begun != replace(order, aside=begun.aside, limit=begun.limit):
            return None
        return None if isinstance(reply.outcome.cause, SharedError) else self._taken(order, reply, keep_none)

    def run(self, order: Order, keep: Keep) -> Outcome:
        workshop = self._workshop
        self.begun(order)  # if there is one, it has to end before
        workshop.clock.set(order.at)
        workshop.world.shifted = False
        workshop.world.restore(order.start)
        try:
            self._zygote.send(order)
            reply = self._receive(order)
        except ForkError as problem:
            doubt = f"hidden memory cannot be ruled out: {problem}"
            return Outcome("stopped", (), (), {}, None, order.at, doubts=(doubt,))
        finally:
            workshop.world.distrust()
        return self._taken(order, reply, keep)

    def _receive(self, order: Order) -> _Reply:
        reply: _Reply = self._zygote.receive(order.limit + _GRACE)
        return reply

    def _taken(self, order: Order, reply: _Reply, keep: Keep) -> Outcome:
        """The outcome, after all that was learned there is known here."""
        workshop = self._workshop
        known = set(workshop.chance.drawn)
        workshop.chance.drawn += [value for value in reply.drawn if value not in known]
        workshop.chance.letters.learn(*reply.letters)
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
        shutil.rmtree(self._folder, ignore_errors=True)
