"""Other jobs around the one that is checked: what comes after it, and how a ledger is judged with them.

A follow-up (option ``then``) is an ordinary job that is run, once, when the message has settled: acknowledged, and
nobody running. What the message has left behind only hurts the next job, so the ledger that counts is the one after the
follow-ups; a clean run has them, too. Wherever a ledger is judged at the end, it goes through :class:`Company`.

A rival (option ``rivals``) is other code that may run once, whole, at any boundary. A ledger is then right if some
serial order of whole clean runs gives it. Where it raises, or would have to wait for a delivery, it does not run.

A sibling (option ``siblings``) is another message in the queue. It comes like a rival, but it does come: at the latest
when the message has settled, as a follow-up. With ``order`` it is a finding if serial orders of the messages differ.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, permutations
from typing import NoReturn

from retrychaos.explore.baseline import SECOND_RUN_LATER, learn
from retrychaos.explore.canon import Canon
from retrychaos.explore.judge import Deviation, Judge
from retrychaos.explore.runner import Runner
from retrychaos.model.errors import BaselineError, PlanError
from retrychaos.model.ledger import Facts
from retrychaos.model.options import Options, Other
from retrychaos.model.plan import Plan, Turn, steps_mark
from retrychaos.model.report import Delivery, Finding
from retrychaos.runtime.delivery import LADDER, REDELIVERY_DELAY, Job, Order, Outcome, keep_all
from retrychaos.world.world import Saved

_MOST_ATTEMPTS = 25
"""Deliveries of one follow-up."""
VISITOR_PID = 1_000
"""Times its number: the deliveries of another job are other processes than all those of the job."""
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


@dataclass(frozen=True)
class Served:
    """A serial order of whole runs, as one. stuck: who did not finish, and why."""

    outcome: Outcome
    own: Outcome
    """The last delivery of the job that is checked."""
    timeline: tuple[Delivery, ...]
    stuck: str


@dataclass(frozen=True)
class Cast:
    """Who is there besides the job. Each is told by its number in `others`, counted from 1."""

    others: tuple[Other, ...]
    rivals: tuple[int, ...]
    siblings: tuple[int, ...]
    then: tuple[int, ...]

    @staticmethod
    def of(options: Options) -> Cast:
        """As the options say."""
        others = (*options.rivals, *options.siblings, *options.then)
        numbers = tuple(range(1, len(others) + 1))
        siblings = len(options.rivals)
        then = siblings + len(options.siblings)
        return Cast(others, numbers[:siblings], numbers[siblings:then], numbers[then:])

    @property
    def visits(self) -> bool:
        """Somebody may come while deliveries are alive."""
        return bool(self.rivals or self.siblings)


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
                VISITOR_PID * number + attempt,
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

    def deliver(self, order: Order) -> Outcome:
        """One delivery of a clean run."""
        outcome = self._runner.run(order, keep_all)
        self._note(outcome, counts=False)
        self.runs += 1
        return outcome

    def _note(self, outcome: Outcome, counts: bool) -> None:
        self.runs += counts
        if outcome.cause is not None:
            raise outcome.cause
        if outcome.end == "stopped" and counts:
            raise self.spent
        self.doubts += [doubt for doubt in outcome.doubts if doubt not in self.doubts]
        self.notes += [note for note in outcome.notes if note not in self.notes]


class Company:
    """The judge of ledgers at the end, other jobs included.

    judges: for each set of rivals that have run, one judge for each serial order; a ledger is right if one says so.
    """

    def __init__(
        self, around: Around, judge: Judge, cast: Cast, judges: Mapping[frozenset[int], Sequence[Judge]]
    ) -> None:
        self.around = around
        self.canon = judge.canon
        self.cast = cast
        self._judge = judge
        self._judges = judges
        self._known: dict[Hashable, tuple[Facts, float, str]] = {}
        for other in (each for some in judges.values() for each in some):
            other.tolerated, other.faded = judge.tolerated, judge.faded

    @property
    def waits(self) -> bool:
        """Something comes after an end state, so it has to be saved."""
        return bool(self.cast.siblings or self.cast.then)

    @property
    def visitors(self) -> tuple[int, ...]:
        """Other code that may run while deliveries are alive."""
        return (*self.cast.rivals, *self.cast.siblings)

    def may_stay_away(self, number: int) -> bool:
        """It need not run at all, so nobody may have to wait for it."""
        return number in self.cast.rivals

    def job(self, number: int) -> Job:
        """Other code by its number."""
        other = self.cast.others[number - 1]
        return Job(other.function, other.args)

    def judge(
        self, facts: Facts, elapsed: float, saved: Callable[[], Saved | None], ran: frozenset[int] = frozenset()
    ) -> Deviation | None:
        """None if the ledger is that of some clean runs, once all that follows has run.

        elapsed: seconds on the clock since the first delivery began. saved: gives the state; asked where it is new.
        ran: other code that has run already.
        """
        rest = self._rest(ran)
        if not rest:
            return self._nearest(facts, elapsed, ran)
        mark = (rest, self.canon.fingerprint(facts))
        known = self._known.get(mark)
        if known is None:
            done = self.around.run(rest, Point(facts, saved(), self.around.start + elapsed))
            seconds = done.end.at - self.around.start - elapsed
            known = self._known[mark] = (done.end.facts, seconds, done.stuck)
        after, seconds, stuck = known
        return self._deviation(after, elapsed + seconds, stuck, ran)

    def follow(
        self, facts: Facts, elapsed: float, saved: Saved | None, first: int, ran: frozenset[int] = frozenset()
    ) -> tuple[Deviation | None, Ran]:
        """As judge(), with the timeline of what follows; `first` is the number of its first delivery."""
        point = Point(facts, saved, self.around.start + elapsed)
        done = self.around.run(self._rest(ran), point, first=first, traced=True, limit=_REPLAYED)
        return self._deviation(done.end.facts, done.end.at - self.around.start, done.stuck, ran), done

    def compare(self, facts: Facts, elapsed: float, ran: frozenset[int] = frozenset()) -> Deviation | None:
        """How a ledger differs, with nothing to follow."""
        return self._nearest(facts, elapsed, ran)

    def excess(self, facts: Facts, ran: frozenset[int] = frozenset()) -> bool:
        """An effect too many, which no later delivery can undo."""
        judges = self._alternatives(ran)
        return bool(judges) and all(judge.excess(facts) for judge in judges)

    def _rest(self, ran: frozenset[int]) -> tuple[int, ...]:
        return (*(number for number in self.cast.siblings if number not in ran), *self.cast.then)

    def _alternatives(self, ran: frozenset[int]) -> Sequence[Judge]:
        return self._judges.get(ran & frozenset(self.cast.rivals), ()) if self._judges else (self._judge,)

    def _nearest(self, facts: Facts, elapsed: float, ran: frozenset[int]) -> Deviation | None:
        """How the ledger differs from that serial order which it is nearest to."""
        found: list[Deviation] = []
        for judge in self._alternatives(ran):
            deviation = judge.judge(facts, elapsed)
            if deviation is None:
                return None
            found.append(deviation)
        # What is an old value in one order, and never was in another, is rather a value that should not be there.
        return min(found, key=lambda each: (len(each.differences), each.kind != "changed"), default=None)

    def _deviation(self, facts: Facts, elapsed: float, stuck: str, ran: frozenset[int]) -> Deviation | None:
        found = self._nearest(facts, elapsed, ran)
        if not stuck:
            return found
        reason = "a job that follows cannot finish any more"
        return Deviation("stuck", stuck, found.differences if found else (), reason)


class Orders:
    """Serial orders of whole clean runs from the state in which the world was found; 0 is the job that is checked."""

    def __init__(self, job: str, around: Around, cast: Cast, limit: Callable[[], float]) -> None:
        self._job = job
        self._around = around
        self._cast = cast
        self._limit = limit
        self._histories: dict[tuple[bool, tuple[int, ...]], tuple[float, Outcome]] = {}
        self._served: dict[tuple[bool, tuple[int, ...]], Served] = {}
        self.reference = (*cast.siblings, 0)
        """What other orders are compared with: the job comes last."""

    def messages(self) -> Iterator[tuple[int, ...]]:
        """All orders of the messages, without rivals."""
        yield from permutations(self.reference)

    def _sets(self) -> Iterator[frozenset[int]]:
        rivals = self._cast.rivals
        for size in range(len(rivals) + 1):
            yield from map(frozenset, combinations(rivals, size))

    def learn(self, canon: Canon, options: Options) -> str:
        """Run each order twice, and learn what is volatile. Gives the reason if two runs cannot be compared.

        Raises BaselineError if there is nothing to compare with.
        """
        for rivals in self._sets():
            done = 0
            for order in permutations((*self.reference, *sorted(rivals))):
                first, second = self.serve(order), self.serve(order, shifted=True)
                if first.stuck or second.stuck:
                    continue
                done += 1
                if unstable := learn(canon, first.outcome, second.outcome, options):
                    return f"{unstable} (Whole runs one after the other: {self._said(order)}.)"
            if not done and len(rivals) <= 1:
                self._refuse(rivals)
        return ""

    def _refuse(self, rivals: frozenset[int]) -> NoReturn:
        order = (*self.reference, *rivals)
        stuck = self.serve(order).stuck
        raise BaselineError(
            f"whole clean runs of {', '.join(self.name(number) for number in order)} do not all finish, in whatever "
            f"order: {stuck}. So no baseline exists to compare with. Make them pass one after the other, then check "
            "again."
        )

    def judges(self, make: Callable[[Outcome], Judge]) -> dict[frozenset[int], list[Judge]]:
        """The judges of all orders that come to an end."""
        judges: dict[frozenset[int], list[Judge]] = {}
        for rivals in self._sets():
            orders = permutations((0, *self._cast.siblings, *sorted(rivals)))
            served = [self.serve(order) for order in orders]
            judges[rivals] = [make(each.outcome) for each in served if not each.stuck]
        return judges

    def reordered(self, make: Callable[[Outcome], Judge]) -> list[Finding]:
        """Serial orders that leave another ledger than the first that comes to an end; one for each effect."""
        expected = next(order for order in self.messages() if not self.serve(order).stuck)
        judge = make(self.serve(expected).outcome)
        findings: dict[str, Finding] = {}
        for order in self.messages():
            deviation = self.compare(order, judge)
            if deviation is not None and deviation.effect not in findings:
                served = self.serve(order)
                steps = [step for delivery in served.timeline for step in delivery.steps]
                turns = tuple(Turn("order", ident=number) for number in order)
                plan = Plan(self._job, steps=len(steps), turns=turns, mark=steps_mark(steps))
                findings[deviation.effect] = Finding(
                    "reordered",
                    deviation.effect,
                    plan,
                    served.timeline,
                    deviation.differences,
                    reason=f"{self._said(order)} leaves another ledger than {self._said(expected)}",
                )
        return list(findings.values())

    def compare(self, order: tuple[int, ...], judge: Judge) -> Deviation | None:
        """How the ledger of an order differs."""
        served = self.serve(order)
        found = judge.judge(served.outcome.facts, served.outcome.clock - self._around.start)
        if served.stuck:
            return Deviation("reordered", served.stuck, found.differences if found else ())
        return replace(found, kind="reordered") if found else None

    def replay(self, plan: Plan, make: Callable[[Outcome], Judge]) -> tuple[Deviation | None, Served]:
        """The order of a plan. Raises PlanError if it does not fit."""
        order = tuple(turn.ident for turn in plan.turns)
        if sorted(order) != sorted(self.reference):
            raise PlanError(
                f"the token no longer fits: it is an order of {len(order)} messages, and there are "
                f"{len(self.reference)} now. Give the option siblings of the check that it came from."
            )
        served = self.serve(order)
        if plan.mark != steps_mark([step for delivery in served.timeline for step in delivery.steps]):
            raise PlanError(
                "the token no longer fits: the messages do other steps now. A job or its data has changed; run the "
                "check again."
            )
        expected = next(order for order in self.messages() if not self.serve(order).stuck)
        return self.compare(order, make(self.serve(expected).outcome)), served

    def _said(self, order: tuple[int, ...]) -> str:
        return ", then ".join(self.name(number) for number in order)

    def name(self, number: int) -> str:
        """What a job is called here."""
        return self._cast.others[number - 1].name if number else self._job.rpartition(".")[2]

    def serve(self, order: tuple[int, ...], shifted: bool = False) -> Served:
        """Run them in an order. A message that fails goes to the end of the queue, as long as others get further."""
        known = self._served.get((shifted, order))
        if known is None:
            known = self._served[shifted, order] = self._serve(order, shifted)
        return known

    def _serve(self, order: tuple[int, ...], shifted: bool) -> Served:
        queue = list(order)
        history: tuple[int, ...] = ()
        outcomes: list[Outcome] = []
        own = self._last_of((0,), shifted)[1]
        timeline: list[Delivery] = []
        failed = 0  # in a row
        while queue:
            number = queue.pop(0)
            history = (*history, number)
            delivery, outcome = self._last_of(history, shifted)
            timeline.append(delivery)
            outcomes.append(outcome)
            own = own if number else outcome
            failed = failed + 1 if outcome.end != "done" else 0
            if not failed:
                continue
            queue.append(number)
            comes_again = outcome.end == "failed" and number not in self._cast.rivals and bool(self._cast.siblings)
            if not comes_again or failed == len(queue):
                stuck = f"{self.name(number)}: {outcome.error or 'it waits for ever'}"
                return Served(joined(outcomes), own, tuple(timeline), stuck)
        last = outcomes[-1]
        point = Point(last.facts, last.saved, last.clock)
        then = self._around.run(
            self._cast.then, point, first=len(timeline) + 1, traced=True, shifted=shifted, limit=self._limit()
        )
        outcomes += [outcome for _, outcome in then.attempts]
        return Served(joined(outcomes), own, (*timeline, *then.timeline), then.stuck)

    def _last_of(self, history: tuple[int, ...], shifted: bool) -> tuple[Delivery, Outcome]:
        """The last delivery of such a history, whose beginning may have been run for another order."""
        known = self._histories.get((shifted, history))
        if known is None:
            number, start = history[-1], self._around.start
            before = self._last_of(history[:-1], shifted)[1] if history[1:] else None
            at = start + (SECOND_RUN_LATER if shifted else 0.0) if before is None else before.clock + REDELIVERY_DELAY
            pid = VISITOR_PID * number + history.count(number) + shifted
            outcome = self._around.deliver(
                Order(
                    None if before is None else before.saved,
                    at,
                    pid,
                    f"{number} in turn{' again' if shifted else ''}",
                    traced=True,
                    shifted=shifted,
                    limit=self._limit(),
                    job=number,
                    ends=True,
                )
            )
            known = self._histories[shifted, history] = (at, outcome)
        at, outcome = known
        number = history[-1]
        name = self.name(number) if number else ""
        end = ENDS[outcome.end]
        return Delivery(len(history), at - self._around.start, outcome.steps, end, outcome.error, name), outcome


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


def whole_run(around: Around, outcome: Outcome, cast: Cast, shifted: bool, limit: float) -> Outcome:
    """A clean run of the job and of all that follows. Raises BaselineError if one of these never finishes."""
    then = (*cast.siblings, *cast.then)
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
