"""Performs one plan: the deliveries of a token, one after the other, with a timeline."""

from __future__ import annotations

from dataclasses import dataclass

from retrychaos.explore.company import ENDS
from retrychaos.explore.runner import Runner
from retrychaos.model.errors import PlanError
from retrychaos.model.ledger import Facts
from retrychaos.model.plan import Plan, steps_mark
from retrychaos.model.report import Delivery
from retrychaos.runtime.delivery import REDELIVERY_DELAY, Order, Outcome, keep_all
from retrychaos.world.world import Saved


@dataclass(frozen=True)
class Performance:
    """What came of a plan. `end` is how the last delivery ended."""

    timeline: tuple[Delivery, ...]
    facts: Facts
    end: str
    error: str
    elapsed: float
    """Seconds on the clock from the first delivery to the end of the last."""
    saved: Saved | None = None


def perform(plan: Plan, runner: Runner, start: float, limit: float) -> Performance:
    """Run the deliveries of `plan` from the state before the check.

    Raises PlanError if the job no longer takes the steps that the plan was made for.
    """
    saved: Saved | None = None
    clock = start - REDELIVERY_DELAY
    timeline: list[Delivery] = []
    outcome: Outcome | None = None
    for number, leg in enumerate(plan.legs, start=1):
        at = clock + REDELIVERY_DELAY + leg.wait
        order = Order(saved, at, number, str(number), traced=True, limit=limit, fault=leg.fault)
        outcome = runner.run(order, keep_all)
        if outcome.cause is not None:
            raise outcome.cause
        if leg.fault is not None and not outcome.struck:
            raise PlanError(
                f"the token no longer fits: delivery {number} should have a fault ({leg.fault.kind}) at step "
                f"{leg.fault.step}, and there is none. The job or its data has changed; run the check again."
            )
        steps, end = outcome.steps, ENDS[outcome.end]
        if leg.crash_after is not None:
            if len(steps) < leg.crash_after or leg.mark != steps_mark(steps[: leg.crash_after]):
                raise PlanError(
                    f"the token no longer fits: delivery {number} should die after step {leg.crash_after}, but "
                    f"{_what(outcome, leg.crash_after)}. The job or its data has changed; run the check again."
                )
            saved, clock = _state_at(outcome, leg.crash_after, order)
            steps, end = steps[: leg.crash_after], "crashed"
        else:
            saved, clock = outcome.saved, outcome.clock
        error = outcome.error if leg.crash_after is None else ""
        timeline.append(Delivery(number, at - start, steps, end, error))
    assert outcome is not None
    return Performance(tuple(timeline), outcome.facts, outcome.end, outcome.error, outcome.clock - start, saved)


def _state_at(outcome: Outcome, boundary: int, order: Order) -> tuple[Saved | None, float]:
    """What a crash at a boundary leaves: the state of the last change up to there."""
    saved, clock = order.start, order.at
    for change in outcome.changes:
        if change.boundary <= boundary:
            saved, clock = change.saved, change.clock
    return saved, clock


def _what(outcome: Outcome, boundary: int) -> str:
    if len(outcome.steps) < boundary:
        return f"it has only {len(outcome.steps)} steps now"
    return f"its steps up to there are others now; the last is {outcome.steps[boundary - 1].detail!r}"
