"""Other jobs around the one that is checked: what comes after it, and how a ledger is judged with them.

A follow-up (option ``then``) is an ordinary job that is run, once, when the message has settled: acknowledged, and
nobody running. What the message has left behind only hurts the next job, so the ledger that counts is the one after the
follow-ups; a clean run has them, too. Wherever a ledger is judged at the end, it goes through :class:`Company`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from retrychaos.explore.judge import Deviation, Judge
from retrychaos.explore.runner import Runner
from retrychaos.model.errors import BaselineError
from retrychaos.model.ledger import Facts
from retrychaos.model.options import Other
from retrychaos.model.report import Delivery
from retrychaos.runtime.delivery import LADDER, REDELIVERY_DELAY, Order, Outcome, keep_all
from retrychaos.world.world import Saved

_MOST_ATTEMPTS = 25
"""Deliveries of one follow-up."""
_FIRST_NUMBER = 1_000
"""Their deliveries are other processes than all those of the job."""
_REPLAYED = 10.0
"""Seconds for a follow-up that has been run before."""
ENDS = {"done": "completed", "failed": "failed", "hung": "hung", "stopped": "hung"}


@dataclass(frozen=True)
class Point:
    """A durable state at which nobody is running, and what the clock shows."""

    facts: Facts
    saved: Saved | None
    at: float


@dataclass(frozen=True)
class Ran:
    """What came of running other jobs. stuck: which one never finishes, and why; empty if all did."""

    end: Point
    attempts: tuple[tuple[Delivery, Outcome], ...] = ()
    stuck: str = ""

    @property
    def timeline(self) -> tuple[Delivery, ...]:
        return tuple(delivery for delivery, _ in self.attempts)


class Around:
    """Runs other jobs by their numbers, one after the other, each until it has finished once.

    fingerprint: equal for equal states. limit: gives the seconds for a delivery, or raises that the time is up, as it
    is told also by the exception `spent`.
    """

    def __init__(
        self,
        runner: Runner,
        others: Sequence[Other],
        fingerprint: Callable[[Facts], bytes],
        start: float,
        limit: Callable[[], float],
        spent: type[Exception],
    ) -> None:
        self.others = tuple(others)
        self.doubts: list[str] = []
        self.notes: list[str] = []
        self.runs = 0
        self.limit = limit
        self.spent = spent
        self.start = start
        self._runner = runner
        self._fingerprint = fingerprint

    def run(
        self,
        numbers: Sequence[int],
        point: Point,
        *,
        first: int = 1,
        traced: bool = False,
        shifted: bool = False,
        limit: float | None = None,
    ) -> Ran:
        """Run these from a state on.

        first: the number of the first delivery in a timeline. limit: seconds for a delivery whatever is left; one that
        takes longer never ends.
        """
        attempts: list[tuple[Delivery, Outcome]] = []
        for number in numbers:
            stuck = ""
            for order, outcome in self._attempts(number, point, traced, shifted, limit):
                point = Point(outcome.facts, outcome.saved, outcome.clock)
                end = ENDS[outcome.end]
                after = order.at - self.start
                name = self.others[number - 1].name
                delivery = Delivery(first + len(attempts), after, outcome.steps, end, outcome.error, name)
                attempts.append((delivery, outcome))
                stuck = "" if outcome.end == "done" else f"{name}: {outcome.error or 'it waits for ever'}"
            if stuck:
                return Ran(point, tuple(attempts), stuck)
        return Ran(point, tuple(attempts))

    def _attempts(
        self, number: int, point: Point, traced: bool, shifted: bool, limit: float | None
    ) -> Iterator[tuple[Order, Outcome]]:
        """Deliver it until it is done. A failure is a nack: it comes again, and later where that leads nowhere."""
        seen = {self._fingerprint(point.facts)}
        waits: Iterator[float] | None = None
        wait: float = 0
        for attempt in range(_MOST_ATTEMPTS):
            order = Order(
                point.saved,
                point.at + REDELIVERY_DELAY + wait,
                _FIRST_NUMBER * number + attempt,
                f"{'again ' if shifted else ''}{number}, attempt {attempt}",
                traced=traced,
                shifted=shifted,
                limit=self.limit() if limit is None else limit,
                job=number,
                ends=True,
            )
            outcome = self._runner.run(order, keep_all)
            self._note(outcome, limit is None)
            yield order, outcome
            if outcome.end != "failed":
                return
            point = Point(outcome.facts, outcome.saved, outcome.clock)
            mark = self._fingerprint(point.facts)
            wait = 0
            if mark in seen:
                waits = waits or iter([*_until_ends(point), *LADDER])
                longer = next(waits, None)
                if longer is None:
                    return
                wait = longer
            seen.add(mark)

    def _note(self, outcome: Outcome, counts: bool) -> None:
        self.runs += counts
        if outcome.cause is not None:
            raise outcome.cause
        if outcome.end == "stopped" and counts:
            raise self.spent
        self.doubts += [doubt for doubt in outcome.doubts if doubt not in self.doubts]
        self.notes += [note for note in outcome.notes if note not in self.notes]


class Company:
    """The judge of ledgers at the end, other jobs included."""

    def __init__(self, around: Around, judge: Judge, then: Sequence[int]) -> None:
        self.around = around
        self.canon = judge.canon
        self._judge = judge
        self._then = tuple(then)
        self._known: dict[bytes, tuple[Facts, float, str]] = {}

    @property
    def waits(self) -> bool:
        """Something comes after an end state, so it has to be saved."""
        return bool(self._then)

    def judge(self, facts: Facts, elapsed: float, saved: Callable[[], Saved | None]) -> Deviation | None:
        """None if the ledger is that of the clean run, once all that follows has run.

        elapsed: seconds on the clock since the first delivery began. saved: gives the state; asked where it is new.
        """
        if not self._then:
            return self._judge.judge(facts, elapsed)
        mark = self.canon.fingerprint(facts)
        known = self._known.get(mark)
        if known is None:
            ran = self.around.run(self._then, Point(facts, saved(), self.around.start + elapsed))
            seconds = ran.end.at - self.around.start - elapsed
            known = self._known[mark] = (ran.end.facts, seconds, ran.stuck)
        after, seconds, stuck = known
        return self._deviation(after, elapsed + seconds, stuck)

    def follow(self, facts: Facts, elapsed: float, saved: Saved | None, first: int) -> tuple[Deviation | None, Ran]:
        """As judge(), with the timeline of what follows; `first` is the number of its first delivery."""
        point = Point(facts, saved, self.around.start + elapsed)
        ran = self.around.run(self._then, point, first=first, traced=True, limit=_REPLAYED)
        return self._deviation(ran.end.facts, ran.end.at - self.around.start, ran.stuck), ran

    def excess(self, facts: Facts) -> bool:
        """An effect too many, which no later delivery can undo."""
        return self._judge.excess(facts)

    def compare(self, facts: Facts, elapsed: float) -> Deviation | None:
        """How a ledger differs, with nothing to follow."""
        return self._judge.judge(facts, elapsed)

    def _deviation(self, facts: Facts, elapsed: float, stuck: str) -> Deviation | None:
        found = self._judge.judge(facts, elapsed)
        if not stuck:
            return found
        reason = "a job that follows cannot finish any more"
        return Deviation("stuck", stuck, found.differences if found else (), reason)


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """Deliveries that follow each other, as one."""
    if len(outcomes) == 1:
        return outcomes[0]
    begins = accumulate((len(outcome.steps) for outcome in outcomes), initial=0)
    return replace(
        outcomes[-1],
        steps=tuple(step for outcome in outcomes for step in outcome.steps),
        changes=tuple(
            replace(change, boundary=begin + change.boundary)
            for begin, outcome in zip(begins, outcomes, strict=False)
            for change in outcome.changes
        ),
        notes=tuple(dict.fromkeys(note for outcome in outcomes for note in outcome.notes)),
        doubts=tuple(dict.fromkeys(doubt for outcome in outcomes for doubt in outcome.doubts)),
    )


def whole_run(around: Around, outcome: Outcome, then: Sequence[int], shifted: bool, limit: float) -> Outcome:
    """A clean run of the job and of all that follows. Raises BaselineError if one of these never finishes."""
    if not then or outcome.end != "done":
        return outcome
    ran = around.run(
        then, Point(outcome.facts, outcome.saved, outcome.clock), traced=True, shifted=shifted, limit=limit
    )
    if ran.stuck:
        raise BaselineError(
            f"a job that follows never finishes after the clean run, without any fault: {ran.stuck}. So no baseline "
            "exists to compare with. Make it pass after one clean run of the job, then check again."
        )
    return joined([outcome, *(each for _, each in ran.attempts)])


def _until_ends(point: Point) -> list[float]:
    """Seconds until each thing has ended that ends by itself."""
    ends = {end for version in point.facts.values() for end in version.expiries}
    return [end - point.at for end in sorted(ends) if end > point.at + REDELIVERY_DELAY]
