"""Crash closure: run one delivery from every durable state that a crash can leave, until no new state appears.

A redelivered job knows nothing but its payload and the durable state. So one run from a state shows every state that a
crash of that run could leave, and when the set of states is closed, any number of crashes is covered. States are
visited breadth first: the first counterexample has the fewest crashes.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from retrychaos.explore.baseline import Baseline, relearn
from retrychaos.explore.canon import Canon
from retrychaos.explore.company import Company
from retrychaos.explore.runner import Runner
from retrychaos.model.durations import in_words
from retrychaos.model.ledger import Facts
from retrychaos.model.plan import Fault, Leg, Plan, steps_mark
from retrychaos.model.step import Step
from retrychaos.runtime.delivery import HORIZON, LADDER, REDELIVERY_DELAY, Change, Order, Outcome, keep_none
from retrychaos.world.world import Saved

MAX_DELIVERIES = 25
"""Deliveries of one message: what Sidekiq's default retry policy allows."""
_MOST_TWINS = 2
_HORIZON = "every window of time (the end of the retry horizon)"
_MARK = 16
"""Bytes of a fingerprint; more tells deliveries from the same state apart."""
_LONGEST_ROUND = 5
"""Steps of a loop that waits, its sleep included."""


@dataclass(frozen=True)
class Scope:
    """How far to go: at most so many crashes (None: any number), and whether deliveries also come late.

    thorough: faults come in every delivery, not only in the first.
    """

    crashes: int | None
    late: bool
    thorough: bool = False


@dataclass(eq=False)
class State:
    """A durable state, how a message got there, and what a delivery from there does."""

    mark: bytes
    saved: Saved | None
    at: float
    deliveries: int
    crashes: int
    parent: State | None = None
    leg: Leg = field(default_factory=Leg)
    place: str = ""
    """Where the process died, for people."""
    ending: Mapping[float, str] = field(default_factory=dict)
    """When something ends by itself, and what that is."""
    raw: int = 0
    """Tells it from states that are equal only after renaming."""
    kept: Saved | None = None
    """As saved, for the one state that is looked at again when everything was run."""
    beyond_repair: bool = False
    """It shows an effect too many: what it leads to is not explored."""
    end: str = ""
    error: str = ""
    next: State | None = None
    """Where a failed delivery from here leads."""
    digest: bytes = b""
    wait: int = 0
    """Seconds that pass before a delivery from here, on top of the usual delay."""
    ended: tuple[str, ...] = ()
    """What has ended in them."""
    waits: int = 0
    """How many waits were tried before a delivery from here."""
    fault: Fault | None = None
    """What goes wrong in the delivery from here."""
    faults: int = 0
    """How many deliveries on the way here had a fault."""

    def legs(self) -> list[Leg]:
        """The plan that leads here."""
        legs: list[Leg] = []
        state: State | None = self
        while state is not None and state.parent is not None:
            legs.append(state.leg)
            state = state.parent
        return legs[::-1]


@dataclass(frozen=True)
class Suspect:
    """A state from which a delivery does not lead to the baseline."""

    state: State
    kind: str
    effect: str
    plan: Plan
    late: str = ""
    """Which delivery came late, and what had ended then."""

    @property
    def size(self) -> tuple[int, int, int]:
        """Of several that show the same, the smallest is told: crashes, deliveries, time."""
        legs = self.plan.legs
        return self.plan.crashes, len(legs), sum(leg.wait for leg in legs)


class OutOfBudget(Exception):
    """Time was up between two deliveries."""


class Relearned(Exception):
    """A further clean run showed that more is volatile than was known: states have to be told apart anew."""


class Closure:
    """Explores the states of one job. ``limit()`` gives the seconds left for a delivery, or raises OutOfBudget."""

    def __init__(
        self,
        job: str,
        runner: Runner,
        canon: Canon,
        baseline: Baseline,
        found: Facts,
        start: float,
        scope: Scope,
        limit: Callable[[], float],
        company: Company,
        learned_at: set[int],
        has_time: Callable[[], bool] = lambda: True,
    ) -> None:
        self.states: dict[bytes, State] = {}
        self.runs = 2  # the clean ones
        self.boundaries = 0
        self.bounded = False
        """States were left out because they take more than MAX_DELIVERIES."""
        self.doubts: list[str] = []
        self.notes: list[str] = []
        self.suspects: list[Suspect] = []
        self.last: tuple[State, Saved] | None = None
        """The state that was run from last, as a sample of deliveries that could be hit by hidden memory."""
        self._job = job
        self._runner = runner
        self._canon = canon
        self._baseline = baseline
        self._company = company
        self._scope = scope
        self._limit = limit
        self.faults = 0
        """How many faults other than crashes were tried."""
        self.passed_over = 0
        """How many were not, since there was no time."""
        self._has_time = has_time
        """There is time for one more of them."""
        self.calm_closed = False
        """All was tried that can happen without these."""
        self.telling: set[Fault] = set()
        """Those of the first delivery that a crash cannot stand for: the job goes on after them, or leaves something
        new."""
        self._faulted: list[State] = []
        """The states from which deliveries were begun that have a fault, once for each."""
        self._to_fault: list[State] = []
        """The same, to come."""
        self._queue: deque[State] = deque()
        self._looks = 3
        self._learned_at = learned_at
        """Times of clean runs that have shown what is volatile, since the check began."""
        self._twins: list[Change] = []
        self._twin_marks: set[bytes] = set()
        self.root = State(canon.mark(found, start), None, start, 0, 0)
        self.states[self.root.mark] = self.root
        for run in (baseline.whole, baseline.second):
            self._note(run)
        order = Order(None, start, 1, "1")
        self._absorb(self.root, baseline.run, list(baseline.run.changes), order)
        ended = baseline.run.changes[-1].clock if baseline.run.changes else start
        self.final = self.states.get(canon.mark(baseline.run.facts, ended))
        if self.final is not None:
            self.final.kept = self.final.saved

    @property
    def waiting(self) -> int:
        """States found and not yet run from."""
        return len(self._queue)

    def explore(self) -> None:
        """Run until closed, or until a fault was found and all that takes as few crashes was tried.

        Raises OutOfBudget.
        """
        while True:
            crashes = self._queue[0].crashes if self._queue else 0
            self._explore_level(crashes)
            self._report_stuck()
            if self.suspects or not self._queue:
                break
        self._try_twins()

    def explore_faults(self) -> None:
        """The first delivery again, with an error, a lost reply or a shutdown at each of its steps, and then all that
        can follow from that. If it is to be thorough, then all other deliveries as well.

        Raises OutOfBudget. Call it when explore() has closed, and found nothing.
        """
        self.calm_closed = True
        while self._to_fault and not self.suspects:
            faulted, self._to_fault = self._varied(self._to_fault), []
            for number, state in enumerate(faulted):
                if not self._has_time():
                    self.passed_over += len(faulted) - number
                    break
                self._visit(state)
                self.faults += 1
                self._faulted.append(state)
            self.explore()

    def _varied(self, faulted: list[State]) -> list[State]:
        """The first of each kind at steps that look alike, then the second of each, and so on: loops are long."""
        seen: Counter[tuple[str, object]] = Counter()
        order: list[tuple[int, State]] = []
        for state in faulted:
            assert state.fault is not None
            steps = self._baseline.run.steps
            step = steps[state.fault.step - 1].signature if state.fault.step <= len(steps) else None
            seen[state.fault.kind, step] += 1
            order.append((seen[state.fault.kind, step], state))
        return [state for _, state in sorted(order, key=lambda each: each[0])]

    def _note_chances(self, state: State, outcome: Outcome, wait: int) -> None:
        """What could have gone wrong in that delivery."""
        if state.fault is not None or state.beyond_repair or not (self._scope.thorough or state is self.root):
            return
        for chance in outcome.chances:
            mark = state.mark + f"{chance.kind} {chance.step} {wait}".encode()
            self._to_fault.append(replace(state, mark=mark, end="", fault=chance, wait=wait, waits=0, next=None))

    def _explore_level(self, crashes: int) -> None:
        """Visit the states that take so many crashes, and let those wait that lead nowhere."""
        while True:
            while self._queue and self._queue[0].crashes <= crashes:
                self._visit(self._queue.popleft())
            stuck = next((state for state in self._unfinished() if state.waits < len(self._waits(state))), None)
            if stuck is None:
                return
            self._visit(stuck)

    # -- one state --------------------------------------------------------------------------------------------------

    def order(self, state: State, wait: int = 0) -> Order:
        """The delivery from a state."""
        order = redelivery(state.saved, state.at + wait, state.deliveries + 1, self._limit())
        if state.parent is None:  # the first one
            order = Order(None, state.at, 1, "1", limit=order.limit)
        order = replace(order, fault=state.fault)
        return replace(order, ends=True) if self._company.waits else order

    def digest(self, outcome: Outcome) -> bytes:
        """What two runs from one state must have in common; not how often they looked whether they may go on."""
        seen = repr([*_without_rounds([step.signature for step in outcome.steps]), outcome.end])
        return hashlib.blake2b(seen.encode() + self._canon.fingerprint(outcome.facts)).digest()

    def _visit(self, state: State) -> None:
        """Deliver from there."""
        wait = state.wait
        if state.end:  # not the first visit: the clock goes on before this one
            wait = self._waits(state)[state.waits]
            state.waits += 1
        assert state.saved is not None or state.parent is None
        marks: set[bytes] = set()
        twins: set[int] = set()

        def keep(boundary: int, facts: Facts) -> bool:
            mark = self._canon.mark(facts)
            if mark in self.states or mark in marks:
                if not self._is_new_twin(mark, facts):
                    return False
                twins.add(boundary)
            marks.add(mark)
            return True

        order = self.order(state, wait)
        outcome = self._runner.run(order, keep)
        self.runs += 1
        if outcome.cause is not None:
            raise outcome.cause
        self._note(outcome)
        if outcome.end == "stopped":
            raise OutOfBudget
        if state.fault is not None and not outcome.struck:
            self.doubts.append(
                f"a fault ({state.fault.kind}) at step {state.fault.step}, {state.place or 'in the first delivery'}, "
                "did not come: the job did other steps than before from the same state. Look for random choices and "
                "the time of day."
            )
            return
        known = len(self.states)
        self._add_last(state, outcome)
        kept = [change for change in outcome.changes if change.saved is not None]
        self._absorb(state, outcome, [change for change in kept if change.boundary not in twins], order)
        self._twins += [change for change in kept if change.boundary in twins]
        if state.fault is not None and state.parent is None:
            goes_on = outcome.end != "failed" or outcome.steps[-1].kind != "fault"
            if goes_on or len(self.states) > known:
                self.telling.add(state.fault)
        if state.saved is not None and not wait:
            self.last = (state, state.saved)
        if state.end != "failed":
            state.saved = None

    def _is_new_twin(self, mark: bytes, facts: Facts) -> bool:
        """Equal to a known state only after renaming, and to be tried out as a sample of such pairs."""
        known = self.states.get(mark)
        if known is None or known is self.root or len(self._twin_marks) >= _MOST_TWINS or mark in self._twin_marks:
            return False
        if known.raw == _raw(facts):
            return False
        self._twin_marks.add(mark)
        return True

    def _try_twins(self) -> None:
        """States that are equal after renaming must behave equally; where they do not, the renaming was wrong."""
        for twin in self._twins:
            state = self.states[self._canon.mark(twin.facts, twin.clock)]
            if state.waits or not state.end:
                continue
            # Other random values than those that made the twin, or they would come up twice.
            seed = f"twin {state.deliveries}"
            order = replace(self.order(state), start=twin.saved, at=twin.clock + REDELIVERY_DELAY, seed=seed)
            outcome = self._runner.run(order, keep_none)
            self._note(outcome)
            if outcome.end != "stopped" and self.digest(outcome) != state.digest:
                self.doubts.append(
                    f"two states that differ only in volatile values (ids, tokens, times) made the job behave "
                    f"differently, {state.place}: it decides by such a value, so equal states cannot be told. "
                    "Make the value fixed in the test."
                )

    def _absorb(self, state: State, outcome: Outcome, fresh: list[Change], order: Order) -> None:
        self.boundaries += len(outcome.steps) + 1
        state.end, state.error, state.next = outcome.end, outcome.error, None
        if not state.waits:
            state.digest = self.digest(outcome)
        wait = round(order.at - state.at - REDELIVERY_DELAY) if state.parent or state.wait else 0
        if outcome.end == "done":
            deviation = self._company.judge(outcome.facts, outcome.clock - self.root.at, lambda: outcome.saved)
            if deviation is not None:
                if wait and self._is_clean(outcome, order.at):
                    return
                if deviation.kind == "changed":
                    self._look_again(order.at)
                self._suspect(state, deviation.kind, deviation.effect, wait)
                return
        self._note_chances(state, outcome, wait)
        for change in fresh if not state.beyond_repair else ():
            self._add(state, outcome, change, wait)
        if outcome.end != "done":
            last = Change(len(outcome.steps), outcome.facts, outcome.clock, outcome.saved)
            state.next = self._add(state, outcome, last, wait)
            if state.wait and state.next is not None and state.next.mark[:_MARK] == state.mark[:_MARK]:
                # It is not earlier again after a failure; but where it is too late for a clean run, too, that is right.
                state.next = state if self._clean_run(order.at).end == "done" else state.next

    def _add(self, state: State, outcome: Outcome, change: Change, wait: int) -> State | None:
        """The state at a boundary of a delivery from `state`; None if it is out of bounds."""
        mark = self._canon.mark(change.facts, change.clock)
        boundary = change.boundary
        nacked = outcome.end == "failed" and boundary == len(outcome.steps)
        crashes = state.crashes + (0 if nacked else 1)
        leg = Leg(None, wait=wait) if nacked else Leg(boundary, steps_mark(outcome.steps[:boundary]), wait)
        leg = replace(leg, fault=state.fault)
        known = self.states.get(mark)
        if known is not None:
            if crashes < known.crashes and not known.end:  # found by a crash first, and now without it
                known.crashes, known.deliveries = crashes, state.deliveries + 1
                known.parent, known.leg, known.saved, known.at = state, leg, change.saved or known.saved, change.clock
                self._queue.remove(known)
                self._queue.appendleft(known)
            return known
        if self._scope.crashes is not None and crashes > self._scope.crashes:
            return None
        if state.deliveries + 1 >= MAX_DELIVERIES:
            self.bounded = True
            return None
        place = _place(outcome.steps[boundary - 1] if boundary else None, boundary)
        new = State(mark, change.saved, change.clock, state.deliveries + 1, crashes, state, leg, place)
        new.faults = state.faults + (state.fault is not None)
        new.raw = _raw(change.facts)
        new.ending = {end: version.ending.get(end, "") for version in change.facts.values() for end in version.expiries}
        new.beyond_repair = self._company.excess(change.facts)
        self.states[mark] = new
        # States are visited in the order of their crashes, so that the first counterexample has the fewest.
        if nacked:
            self._queue.appendleft(new)
        else:
            self._queue.append(new)
        self._add_late(new)
        return new

    def _add_late(self, state: State) -> None:
        """The same state, with a message that comes back only when something in it has ended."""
        for end in sorted(state.ending, reverse=True) if self._scope.late else ():
            if state.at + REDELIVERY_DELAY < end < self.root.at + HORIZON - REDELIVERY_DELAY:
                ended = sorted({name for each, name in state.ending.items() if state.at < each <= end and name})
                late = replace(state, mark=state.mark + repr(end).encode(), wait=_until(end, state), ended=tuple(ended))
                self.states[late.mark] = late
                self._queue.insert(self._queue.index(state) + 1, late)  # it takes no more crashes

    def _add_last(self, state: State, outcome: Outcome) -> None:
        """The same state, with a message that comes back only at the end of the retry horizon.

        What has looked at the clock may do something else then: windows of time have closed.
        """
        wait = int(self.root.at + HORIZON - state.at - REDELIVERY_DELAY)
        mark = state.mark[:_MARK] + b"last"
        wanted = self._scope.late and outcome.looked and state.parent is not None and mark not in self.states
        if wanted and wait > state.wait and not state.waits:
            last = replace(state, mark=mark, wait=wait, ended=(_HORIZON,))
            self.states[mark] = last
            self._queue.appendleft(last)

    def _is_clean(self, outcome: Outcome, at: float) -> bool:
        """A job that does something else at another time is right if it leaves what a clean run at that time does."""
        if self._company.waits:
            return False
        other = self._clean_run(at)
        if other.end != "done":
            return False
        mark = self._canon.fingerprint(other.facts)
        if mark == self._canon.fingerprint(outcome.facts):
            return True
        new = mark != self._canon.fingerprint(self._baseline.run.facts) and round(at) not in self._learned_at
        if new and relearn(self._canon, self._baseline.run, other):
            self._learned_at.add(round(at))
            raise Relearned
        return False

    def _clean_run(self, at: float) -> Outcome:
        """What would a clean run do at that time?"""
        order = Order(None, at, 2, f"clean run, late at {at - self.root.at:g}", limit=self._limit())
        return self._runner.run(order, keep_none)

    def _look_again(self, at: float) -> None:
        """A coin flip, or a value that comes from the date, is not a fault: what does a clean run do at that time?"""
        if self._looks == 0:
            return
        self._looks -= 1
        order = Order(None, at, 2, f"clean run at {at - self.root.at:g}", limit=self._limit())
        other = self._runner.run(order, keep_none)
        if other.end == "done" and relearn(self._canon, self._baseline.run, other):
            raise Relearned

    def _note(self, outcome: Outcome) -> None:
        self.doubts += [doubt for doubt in outcome.doubts if doubt not in self.doubts]
        self.notes += [note for note in outcome.notes if note not in self.notes]

    def _suspect(self, state: State, kind: str, effect: str, wait: int = 0) -> None:
        plan = Plan(self._job, (*state.legs(), Leg(wait=wait, fault=state.fault)))
        self.suspects.append(Suspect(state, kind, effect, plan, _lateness(state)))

    # -- progress ---------------------------------------------------------------------------------------------------

    def _unfinished(self) -> Iterator[State]:
        """States at the end of a chain of failed deliveries that leads nowhere; each once."""
        seen: set[int] = set()
        for state in list(self.states.values()):
            if state.end not in ("failed", "hung"):
                continue
            last = self._end_of_chain(state)
            if last is not None and id(last) not in seen:
                seen.add(id(last))
                yield last

    def _end_of_chain(self, state: State) -> State | None:
        """Where retries from `state` come to turn in a circle; None if they reach the end of the job."""
        visited: set[int] = set()
        while state.end in ("failed", "hung"):
            visited.add(id(state))
            if state.next is None or id(state.next) in visited:
                return state
            state = state.next
        return None

    def _waits(self, state: State) -> list[int]:
        """Seconds to wait before further attempts from a state that leads nowhere: past every expiry, then longer."""
        if state.end == "hung" or state.saved is None:
            return []  # it has waited already
        ends = [end for end in sorted(state.ending) if end > state.at + REDELIVERY_DELAY + state.wait]
        return [*(_until(end, state) for end in ends), *(int(rung) + state.wait for rung in LADDER)]

    def _report_stuck(self) -> None:
        if self._company.cast.siblings:
            return  # another message may be what it waits for, which is seen where they overlap
        for state in (*self.states.values(), *self._faulted):
            if state.end not in ("failed", "hung"):
                continue
            last = self._end_of_chain(state)
            if last is None or not last.end:
                continue
            if last.next is None and self.bounded and state.crashes + state.faults > 1:
                continue  # the bound on deliveries was reached by crashes and faults, not by failures alone
            self._suspect(state, "stuck", state.error or "it waits for ever", state.wait)


def redelivery(start: Saved | None, at: float, number: int, limit: float) -> Order:
    """The delivery that comes of a crash at `at`."""
    return Order(start, at + REDELIVERY_DELAY, number, str(number), limit=limit)


def _lateness(state: State) -> str:
    """The deliveries on the way that came late, for people."""
    late: list[str] = []
    here: State | None = state
    while here is not None:
        if here.wait and here.ended:
            late.append(
                f"delivery {here.deliveries + 1} came {in_words(here.wait, 2)} late, past {' and '.join(here.ended)}"
            )
        here = here.parent
    return "; ".join(reversed(late))


def _until(end: float, state: State) -> int:
    """Seconds from a state until something has ended."""
    return int(end - state.at) + 1


def _without_rounds(steps: list[tuple[str, str, str]]) -> list[object]:
    """The steps, with loops that wait gone round once: an expiry ends them a millisecond sooner or later."""
    out: list[object] = []
    waits = any(kind == "sleep" for kind, _, _ in steps)
    for step in steps:
        out.append(step)
        for size in range(2, _LONGEST_ROUND + 1) if waits else ():
            if len(out) >= 2 * size and out[-size:] == out[-2 * size : -size]:
                del out[-size:]
                break
    return out


def _raw(facts: Facts) -> int:
    return hash(
        frozenset(
            (resource, name, relation.rows)
            for resource, version in facts.items()
            for name, relation in version.relations.items()
        )
    )


def _place(step: Step | None, boundary: int) -> str:
    if step is None:
        return "before the first step"
    where = f" ({step.site})" if step.site else ""
    return f"after step {boundary}: {step.detail}{where}"
