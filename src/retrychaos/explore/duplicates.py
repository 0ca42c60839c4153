"""The part of a check in which deliveries overlap: explore, find the smallest plans, replay them, judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from retrychaos.explore.interleaving import Ending, Interleaving, OutOfTime, Scope
from retrychaos.explore.judge import Deviation, Judge
from retrychaos.explore.schedule import Performed, perform_turns, plan_of, smallest
from retrychaos.explore.transitions import Surprise
from retrychaos.model.errors import PlanError, SharingError
from retrychaos.model.plan import Plan
from retrychaos.model.report import Finding
from retrychaos.runtime.delivery import Job, Workshop
from retrychaos.runtime.turns import Hung

_MOST_FINDINGS = 4


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
    bounded: bool = False
    notes: tuple[str, ...] = ()


def overlap(
    name: str,
    workshop: Workshop,
    job: Job,
    judge: Judge,
    start: float,
    scope: Scope,
    limit: Callable[[], float],
) -> Overlapped:
    """Explore deliveries of one message that overlap. ``limit()`` gives the seconds left, or raises OutOfTime."""
    done = _explore(name, workshop, job, judge, start, scope, limit, careful=False)
    if done is None:
        # What was learned from one delivery did not hold for another, or at another time: tell these apart.
        done = _explore(name, workshop, job, judge, start, scope, limit, careful=True)
    assert done is not None
    return done


def _explore(
    name: str,
    workshop: Workshop,
    job: Job,
    judge: Judge,
    start: float,
    scope: Scope,
    limit: Callable[[], float],
    careful: bool,
) -> Overlapped | None:
    search = Interleaving(workshop, job, judge, start, scope, limit, shared=not careful, timed=careful)
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
    found = Overlapped((), search.states, search.runs, reason, spent, search.bounded, tuple(search.notes))
    findings, unconfirmed = _findings(name, search, workshop, job, judge, start, limit) if search.endings else ([], "")
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
    judge: Judge,
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
        plan = plan_of(name, search, smallest(search, frozenset(ending.node for ending in endings)))
        try:
            done = perform_turns(plan, workshop, job, start, 5.0)
        except (PlanError, Hung, SharingError) as problem:
            unconfirmed = f"a fault was found that does not repeat: {problem}"
            continue
        deviation = deviation_of(done, judge)
        if deviation is None or deviation.kind != kind:
            unconfirmed = (
                f"a fault was found that does not repeat ({kind} {effect}), so the job is not deterministic. Look for "
                "random choices and the time of day."
            )
            continue
        findings.append(_finding(plan, done, kind, effect, deviation))
    return findings, unconfirmed


def _finding(plan: Plan, done: Performed, kind: str, effect: str, deviation: Deviation) -> Finding:
    plan = replace(plan, steps=sum(len(delivery.steps) for delivery in done.timeline), mark=done.mark)
    return Finding(
        kind,
        effect,
        plan,
        done.timeline,
        deviation.differences,
        reason=deviation.reason,
        moments=done.moments,
    )


def deviation_of(done: Performed, judge: Judge) -> Deviation | None:
    """How the ledger that a plan leaves differs from the baseline."""
    found = judge.judge(done.facts, done.elapsed)
    if not done.open:
        return found
    differences = found.differences if found else ()
    return Deviation("stuck", done.error or "it waits for ever", differences, "no delivery gets any further")
