"""The part of a check in which deliveries overlap: explore, find the smallest plans, replay them, judge."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from retrychaos.explore.company import Company
from retrychaos.explore.interleaving import Ending, Interleaving, OutOfTime, Scope
from retrychaos.explore.judge import Deviation
from retrychaos.explore.sampling import sample
from retrychaos.explore.schedule import Performed, perform_turns, plan_of, smallest
from retrychaos.explore.transitions import Surprise
from retrychaos.model.errors import PlanError, SharingError
from retrychaos.model.plan import Plan
from retrychaos.model.report import Delivery, Finding
from retrychaos.runtime.delivery import Job, Workshop
from retrychaos.runtime.turns import Hung

_MOST_FINDINGS = 4
_FOR_SEARCH = 0.8
"""Share of the time for the search; the rest is for random schedules, if it does not close."""
_MOST_STILL = 5.0
"""Seconds that a delivery may stand still."""
_perf_counter = time.perf_counter


class Limit:
    """The seconds that are left. Called, it gives how long a delivery may stand still, or raises OutOfTime."""

    def __init__(self, seconds: float) -> None:
        self._end = _perf_counter() + seconds

    def __call__(self) -> float:
        left = self._end - _perf_counter()
        if left < 0:
            raise OutOfTime
        return max(1.0, min(_MOST_STILL, left))

    def part(self, share: float) -> Limit:
        """A share of what is left."""
        return Limit(share * max(0.0, self._end - _perf_counter()))


@dataclass(frozen=True)
class Overlapped:
    """What came of deliveries that overlap.

    reason: why it is not known whether the job is right; empty if it is, or is not. spent: only time was missing.
    """

    findings: tuple[Finding, ...] = ()
    states: int = 0
    runs: int = 0
    reason: str = ""
    spent: bool = False
    sampled: int = 0
    """Random schedules that were tried when time ran out."""
    switches: int = 0
    """All orders with less switches were tried, without a crash."""
    bounded: bool = False
    jammed: bool = False
    """No two were let wait in a server for the same transaction."""
    cut: bool = False
    """Not all was tried that can follow from an error, a lost reply or a shutdown."""
    notes: tuple[str, ...] = ()


def overlap(
    name: str,
    workshop: Workshop,
    job: Job,
    company: Company,
    start: float,
    scope: Scope,
    steps: int,
    limit: Limit,
    spaces: bool = True,
    fixed: Callable[[], frozenset[int]] = frozenset,
) -> Overlapped:
    """Explore deliveries of one message that overlap. steps: of a clean run. spaces, fixed: see Interleaving."""
    alone = next(filter(None, (resource.alone for resource in workshop.world.resources.values())), "")
    if alone:
        return Overlapped(reason=alone)
    explore = functools.partial(_explore, name, workshop, job, company, start, scope, spaces=spaces, fixed=fixed)
    done = explore(limit=limit.part(_FOR_SEARCH), careful=False)
    if done is None:
        # What was learned from one delivery did not hold for another, or at another time: tell these apart.
        done = explore(limit=limit.part(_FOR_SEARCH), careful=True)
    assert done is not None
    if not done.spent:
        return done
    tried = sample(name, workshop, job, company, start, scope, steps, limit)
    done = replace(done, runs=done.runs + tried.tried, sampled=tried.tried)
    if tried.plan is None:
        return done
    performed = perform_turns(tried.plan, workshop, job, start, 5.0, company.cast.others)
    deviation, timeline = deviation_of(performed, company)
    if deviation is None:
        return replace(
            done, reason="a fault was found that does not repeat, so the job is not deterministic", spent=False
        )
    finding = _finding(tried.plan, performed, deviation.kind, deviation.effect, deviation, timeline)
    return replace(done, findings=(finding,), spent=False)


def _explore(
    name: str,
    workshop: Workshop,
    job: Job,
    company: Company,
    start: float,
    scope: Scope,
    limit: Callable[[], float],
    spaces: bool,
    fixed: Callable[[], frozenset[int]],
    careful: bool,
) -> Overlapped | None:
    timed = careful or scope.leased
    search = Interleaving(workshop, job, company, start, scope, limit, not careful, timed, spaces, fixed)
    reason, spent = "", False
    try:
        search.explore()
    except OutOfTime:
        spent = True
    except Surprise as surprise:
        if not careful:
            return None
        reason = (
            "two deliveries in the same situation did not do the same, so it cannot be told what overlapping ones "
            "do: the "
            f"job decides by something outside of its world, such as a random choice or the order of a set "
            f"({surprise}). "
            "Make it fixed in the test, or use duplicates=1."
        )
    except (SharingError, Hung) as problem:
        reason = str(problem)
    found = Overlapped(
        states=search.states,
        runs=search.runs,
        reason=reason,
        spent=spent or (search.cut and scope.anywhere),
        cut=search.cut,
        bounded=search.bounded,
        jammed=search.jammed,
        notes=tuple(search.notes),
        switches=search.switches,
    )
    search.doubts += [doubt for doubt in company.around.doubts if doubt not in search.doubts]
    findings, unconfirmed = (
        _findings(name, search, workshop, job, company, start, limit) if search.endings else ([], "")
    )
    if findings:
        return replace(found, findings=tuple(findings), reason="", spent=False)
    if not reason and (search.doubts or unconfirmed):
        return replace(found, reason=search.doubts[0] if search.doubts else unconfirmed, spent=False)
    return found


def _findings(
    name: str,
    search: Interleaving,
    workshop: Workshop,
    job: Job,
    company: Company,
    start: float,
    limit: Callable[[], float],
) -> tuple[list[Finding], str]:
    """The smallest plan of each kind of fault, replayed; and why some could not be confirmed."""
    groups: dict[tuple[str, str], list[Ending]] = {}
    for ending in search.endings:
        groups.setdefault((ending.kind, ending.effect), []).append(ending)
    findings: list[Finding] = []
    unconfirmed = ""
    for (kind, effect), endings in list(groups.items())[:_MOST_FINDINGS]:
        way = smallest(search, frozenset(ending.node for ending in endings))
        if endings[0].last is not None:
            way.append((endings[0].node, endings[0].last))
        plan = plan_of(name, search, way)
        try:
            done = perform_turns(plan, workshop, job, start, 5.0, company.cast.others)
        except (PlanError, Hung, SharingError) as problem:
            unconfirmed = f"a fault was found that does not repeat: {problem}"
            continue
        deviation, timeline = deviation_of(done, company)
        if deviation is None or deviation.kind != kind:
            unconfirmed = (
                f"a fault was found that does not repeat ({kind} {effect}), so the job is not deterministic. Look for "
                "random choices and the time of day."
            )
            continue
        findings.append(_finding(plan, done, kind, effect, deviation, timeline))
    return findings, unconfirmed


def _finding(
    plan: Plan, done: Performed, kind: str, effect: str, deviation: Deviation, timeline: tuple[Delivery, ...]
) -> Finding:
    plan = replace(plan, steps=sum(len(delivery.steps) for delivery in done.timeline), mark=done.mark)
    return Finding(
        kind,
        effect,
        plan,
        timeline,
        deviation.differences,
        reason=deviation.reason,
        moments=done.moments,
        late=done.late,
    )


def deviation_of(done: Performed, company: Company) -> tuple[Deviation | None, tuple[Delivery, ...]]:
    """How the ledger that a plan leaves differs from the baseline; and the timeline, with all that follows."""
    if not done.open:
        found, ran = company.follow(done.facts, done.elapsed, done.saved, len(done.timeline) + 1, done.ran)
        return found, (*done.timeline, *ran.timeline)
    found = company.compare(done.facts, done.elapsed, done.ran)
    differences = found.differences if found else ()
    reason = "no delivery gets any further"
    return Deviation("stuck", done.error or "it waits for ever", differences, reason), done.timeline
