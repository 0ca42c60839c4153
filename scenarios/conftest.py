"""The world of the gallery, and the two sentences in which its tests speak: ``proven(...)`` and ``refuted(...)``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from retrychaos import Chaos, Report
from retrychaos.model.errors import OptionError
from retrychaos.report.text import full_text
from scenarios.shop import Session, redis

BUDGET = 120
"""Seconds for one check: far more than any of them takes, for verdicts must not depend on the machine."""


@pytest.fixture
def chaos(chaos: Chaos) -> Chaos:
    """With the product's own defaults, not with those of its tests; how many deliveries overlap is said below."""
    return chaos(faults=True, late=True)


@pytest.fixture(autouse=True)
def database(chaos: Chaos) -> None:
    Session.configure(bind=chaos.sql)


@pytest.fixture
def crashing(chaos: Chaos) -> Chaos:
    """One delivery at a time, and each may die anywhere, any number of times."""
    return chaos(duplicates=1)


@pytest.fixture
def racing(chaos: Chaos) -> Chaos:
    """Two deliveries at the same time, in every order of their steps, and nothing else goes wrong."""
    return chaos(duplicates=2, crashes=0, faults=False)


@pytest.fixture
def both(chaos: Chaos) -> Chaos:
    """Two deliveries at the same time, and each may die anywhere."""
    return chaos(duplicates=2)


def later(chaos: Chaos, **options: Any) -> Chaos:
    """The same world with options that a version to come will have. Until then the test is skipped, and says why."""
    try:
        return chaos(**options)
    except OptionError as not_yet:
        pytest.skip(str(not_yet))


def fresh_world(job: Callable[..., Any]) -> None:
    """The world as the module of the job wants it: its tables (``Base``), its rows and keys (``arrange``)."""
    module = sys.modules[job.__module__]
    redis.flushall()
    if (base := getattr(module, "Base", None)) is not None:
        engine = Session.kw["bind"]
        base.metadata.drop_all(engine)
        base.metadata.create_all(engine)
    if (arrange := getattr(module, "arrange", None)) is not None:
        arrange()


def proven(chaos: Chaos, job: Callable[..., Any], *args: Any) -> Report:
    """The job leaves the world of one clean run, whatever happens to it."""
    fresh_world(job)
    report = chaos(budget=BUDGET).explore(job, *args)
    assert report.verdict == "proven", full_text(report)
    assert not report.findings
    return report


def refuted(
    chaos: Chaos, job: Callable[..., Any], *args: Any, crashes: int | None = None, **effects: str | tuple[str, ...]
) -> Report:
    """The job is refuted for these reasons and no others, by that few crashes, and the token of each replays it.

    crashes: 1 unless said otherwise; in a race in which nobody dies none.
    effects: what is ``duplicated``, ``lost``, ``changed``: a table, a call, a Redis key, or several. For ``stuck`` the
    error that never ends.
    """
    fresh_world(job)
    report = chaos(budget=BUDGET).explore(job, *args)
    story = full_text(report)
    assert report.verdict == "failed", story
    expected = {
        (kind, effect) for kind, some in effects.items() for effect in ([some] if isinstance(some, str) else some)
    }
    assert {(finding.kind, finding.effect) for finding in report.findings} == expected, story
    if crashes is None:
        crashes = 0 if chaos.options.crashes == 0 else 1
    for finding in report.findings:
        assert finding.plan.crashes == crashes, story
        fresh_world(job)
        again = chaos.run(job, *args, plan=finding.token)
        assert (again.kind, again.effect) == (finding.kind, finding.effect), story
    return report
