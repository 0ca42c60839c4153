"""The clean run: what every other ledger is compared with. Run twice, so that volatile values show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from retrychaos.explore.canon import Canon, Place
from retrychaos.explore.judge import Judge
from retrychaos.explore.runner import Runner
from retrychaos.model.errors import BaselineError
from retrychaos.model.ledger import Cell, Facts, Relation
from retrychaos.model.options import Options
from retrychaos.model.step import Step
from retrychaos.runtime.delivery import Order, Outcome, keep_all, keep_none

SECOND_RUN_LATER = 97.0
"""Seconds between the clocks of the two clean runs: whole, prime, and few enough that the day stays the same."""


@dataclass(frozen=True)
class Baseline:
    """The clean run and the judge of all others; or, in `unstable`, why two clean runs cannot be compared."""

    run: Outcome
    whole: Outcome
    """With all that follows the job."""
    second: Outcome
    judge: Judge
    unstable: str = ""
    knows_ids: bool = False
    """The job does something else if its rows get other ids than usual."""


def first_run(runner: Runner, at: float, limit: float, alone: bool = True) -> Outcome:
    """A clean run. Raises BaselineError if it fails, does not end or does nothing; or what made the world refuse.

    alone: nobody else is there for whom it could wait; else it may also fail or do nothing.
    """
    outcome = runner.run(Order(None, at, 1, "1", traced=True, limit=limit), keep_all)
    if outcome.cause is not None:
        raise outcome.cause
    if outcome.end == "failed" and alone:
        locked = "database is locked" in outcome.error
        hint = " Does the test, or a fixture, hold a transaction open? Commit it before the check." if locked else ""
        raise BaselineError(
            f"the job failed in the clean run, without any fault: {outcome.error}. So no baseline exists to compare "
            f"with. Make it pass once by itself, then check it again.{hint}\n\n{outcome.trace}"
        )
    if outcome.end in ("stopped", "hung"):
        why = "it waits for something that never comes" if outcome.end == "hung" else f"{limit:.0f} s were not enough"
        last = f", the last: {outcome.steps[-1].detail}" if outcome.steps else ""
        done = f"{len(outcome.steps)} steps were made{last}"
        raise BaselineError(
            f"the job did not end in the clean run ({why}; {done}). So no baseline exists to compare with. Look for an "
            "endless loop, or raise the option budget."
        )
    if not outcome.changes and not outcome.doubts and alone:
        seen = f"{len(outcome.steps)} steps were seen, none changed anything" if outcome.steps else "no step was seen"
        raise BaselineError(
            f"the job had no effect in the clean run ({seen}), so there is nothing to check. Arrange data that makes "
            "it work, and see that it uses a SQLAlchemy engine or redis client that the check can see; declare other "
            "effects with chaos.watch(owner, 'name'). A database in memory that the job opens itself dies with it."
        )
    return outcome


def establish(
    runner: Runner,
    canon: Canon,
    first: Outcome,
    found: Facts,
    options: Options,
    at: float,
    limit: float,
    follow: Callable[[Outcome, bool], Outcome] = lambda outcome, _: outcome,
) -> Baseline:
    """Run the clean run again with other clock, chance and ids, and learn from the differences.

    follow: adds to a run what comes after it.
    """
    whole = follow(first, False)
    for shifted in (True, False):  # a job may know the ids that its rows get; then those are no names
        order = Order(
            None, at + SECOND_RUN_LATER, 2, "second clean run", traced=True, shifted=shifted, limit=limit, ends=True
        )
        second = runner.run(order, keep_none)
        if second.cause is not None:
            raise second.cause
        unstable = _differing_steps(first, second)
        if not unstable:
            second = follow(second, shifted)
            unstable = _differing_steps(whole, second)
        if not unstable:
            break
    unstable = unstable or learn(canon, whole, second, options)
    judge = make_judge(canon, whole, found, options)
    if unstable:
        deviation = judge.judge(second.facts)
        if deviation is not None and deviation.differences:
            cells = ", ".join(repr(cell) for cell in dict.fromkeys(deviation.cells))
            unstable += f" If a value is random or comes from outside, declare it: volatile=[{cells}]."
            lines = "; ".join(f"{line.effect}: {line.row}" for line in deviation.differences[:3])
            unstable += f" First difference: {lines}."
    return Baseline(first, whole, second, judge, unstable, knows_ids=not shifted)


def make_judge(canon: Canon, first: Outcome, found: Facts, options: Options) -> Judge:
    """A judge with the clean run as baseline, and what is volatile as known now."""
    path = [found, *(change.facts for change in first.changes), first.facts]
    memory = any(relation.memory for version in first.facts.values() for relation in version.relations.values())
    judge = Judge(canon.judging(options.volatile, memory), first.facts, path, options.tolerate, options.leases)
    for resource, version in first.facts.items():
        for name, relation in version.relations.items():
            if relation.external and judge.tolerates(name.removeprefix("call ")):
                canon.cap((resource, name), canon.templates((resource, name), relation))
    return judge


def relearn(canon: Canon, first: Outcome, other: Outcome) -> bool:
    """A further clean run, perhaps at another time: was anything in it volatile that was not known to be?"""
    if _differing_steps(first, other):
        return False
    learned = False
    for one, two in zip(first.changes, other.changes, strict=False):
        ids = {
            place[1]: (_drawn(mine), _drawn(theirs))
            for place, mine, theirs in _both(one.facts, two.facts)
            if mine.generated and theirs.generated
        }
        for place, mine, theirs in _both(one.facts, two.facts):
            learned = canon.learn(place, mine, theirs, ids, (one.clock, two.clock)) or learned
    if learned:
        for one, two in zip(first.changes, other.changes, strict=False):
            for place, mine, theirs in _both(one.facts, two.facts):
                canon.settle(place, mine, theirs)
        for place, mine, _ in _both(canon.neutral, canon.neutral):
            canon.settle(place, mine, mine)
    return learned


def learn(canon: Canon, first: Outcome, second: Outcome, options: Options) -> str:
    """Learn from the differences of two clean runs. Gives the reason if they cannot be compared."""
    canon.fingerprint(first.facts)  # row ids that were drawn are known before rows are compared
    canon.fingerprint(second.facts)
    relearn(canon, first, second)
    stages = [(one.facts, two.facts) for one, two in zip(first.changes, second.changes, strict=False)]
    stages.append((first.facts, second.facts))
    if _same(canon, stages):
        return ""
    for one_facts, two_facts in stages:
        for place, _, _ in _both(one_facts, two_facts):
            canon.mask(place)
    if _same(canon, stages) and len(first.changes) == len(second.changes):
        return ""
    if options.volatile and _same(canon.judging(options.volatile), stages):
        canon.blind_to(options.volatile)
        return ""
    if canon.fingerprint(first.facts) == canon.fingerprint(second.facts):
        return (
            "two clean runs of the job came to one ledger by different ways, so it decides by random values, ids or "
            "the time: what a redelivery does is open. Make them fixed in the test."
        )
    return "two clean runs of the job left different ledgers, so it cannot be told what a fault changes."


def _same(canon: Canon, stages: Sequence[tuple[Facts, Facts]]) -> bool:
    return all(canon.fingerprint(one) == canon.fingerprint(two) for one, two in stages)


def _differing_steps(first: Outcome, second: Outcome) -> str:
    if second.end != "done":
        return (
            f"the job passed the first clean run and not the second ({second.error or second.end}), which started "
            f"{SECOND_RUN_LATER:.0f} s later with other random values. Make it independent of them in the test."
        )
    for number, (one, two) in enumerate(zip_longest(first.steps, second.steps), start=1):
        if one is None or two is None or one.signature != two.signature:
            return (
                f"two clean runs of the job took different steps; the first difference is step {number}: "
                f"{_shown(one)} against {_shown(two)}. Runs from the same state must do the same: look for random "
                "choices, iteration over sets, or the time of day, and fix them in the test."
            )
    return ""


def _shown(step: Step | None) -> str:
    if step is None:
        return "the end"
    return f"{step.detail!r}" + (f" ({step.site})" if step.site else "")


def _drawn(relation: Relation) -> frozenset[Cell]:
    return frozenset().union(*relation.generated.values())


def _both(one: Facts, two: Facts) -> Iterator[tuple[Place, Relation, Relation]]:
    for resource, version in one.items():
        other = two.get(resource)
        if other is None:
            continue
        for name, relation in version.relations.items():
            if name in other.relations:
                yield (resource, name), relation, other.relations[name]
