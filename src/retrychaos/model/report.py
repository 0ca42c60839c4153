"""What a check found out: verdict, guarantee, findings with their plans and timelines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from retrychaos.model.plan import Plan
from retrychaos.model.step import Step

PROVEN, FAILED, INCONCLUSIVE = "proven", "failed", "inconclusive"


@dataclass(frozen=True)
class Delivery:
    """One delivery in a timeline.

    after: seconds on the clock since the message was delivered first.
    end: ``crashed``, ``completed``, ``failed`` (it raised: a nack) or ``hung`` (it waited without end).
    """

    number: int
    after: float
    steps: tuple[Step, ...]
    end: str
    error: str = ""
    job: str = ""
    """Of another job than the one that is checked: its name."""


@dataclass(frozen=True)
class Moment:
    """One moment in a run of deliveries that overlap: `delivery` did a step, or something happened to it.

    event: ``begins``, ``waits``, ``refused`` (its step has raised an error), ``dies``, ``acknowledged``, ``raises``,
    ``later`` (the clock goes on), ``rival`` (other code runs, or this is a step of it).
    """

    delivery: int
    step: Step | None = None
    event: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Difference:
    """A row or effect that is there more or less often than after the clean run.

    effect: the table, key or call. row: the row for people, volatile values blanked.
    """

    effect: str
    row: str
    expected: int
    found: int


@dataclass(frozen=True)
class Finding:
    """One way in which the job deviates, with the smallest plan that shows it.

    kind: ``duplicated``, ``lost``, ``changed``, ``stuck`` or ``reordered``.
    effect: what is affected: a table, a Redis key, a call.
    also_at: other places where a crash has the same consequence.
    """

    kind: str
    effect: str
    plan: Plan
    timeline: tuple[Delivery, ...]
    differences: tuple[Difference, ...]
    also_at: tuple[str, ...] = ()
    more_places: int = 0
    reason: str = ""
    moments: tuple[Moment, ...] = ()
    """In which order deliveries that overlap did what; empty if they follow each other."""
    late: str = ""
    """Which delivery came late, and past what; empty if that makes no difference."""

    @property
    def token(self) -> str:
        return self.plan.token


@dataclass(frozen=True)
class Ledger:
    """What effects left behind: effect (table, key, call) -> rows for people, with counts."""

    rows: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(sum(rows.values()) for rows in self.rows.values())


@dataclass(frozen=True)
class Report:
    """The outcome of a check.

    verdict: ``proven``, ``failed`` or ``inconclusive``. guarantee: exactly what was covered, in one line.
    states: distinct durable states from which a delivery was run. runs: deliveries run for them.
    boundaries: places where a crash was tried. stop_reason: why an inconclusive check stopped.
    budget_spent: it stopped for want of time only, so that it is no failure.
    """

    job: str
    verdict: str
    guarantee: str
    findings: tuple[Finding, ...]
    baseline: Ledger
    states: int
    runs: int
    boundaries: int
    stop_reason: str = ""
    budget_spent: bool = False
    seconds: float = 0.0
    steps: int = 0
    """Steps of the clean run."""
    notes: tuple[str, ...] = ()
    """What a user should know although it does not decide the verdict."""
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """A test with this report passes."""
        return self.verdict == PROVEN or (self.verdict == INCONCLUSIVE and self.budget_spent)


@dataclass(frozen=True)
class Run:
    """One plan, performed: how its deliveries went, and how the ledger differs from that of the clean run."""

    plan: Plan
    timeline: tuple[Delivery, ...]
    differences: tuple[Difference, ...]
    kind: str = ""
    """As in Finding, or empty if the ledger is as after the clean run."""
    effect: str = ""
    moments: tuple[Moment, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.kind
