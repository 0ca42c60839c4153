"""The world of the gallery, and the two sentences in which its tests speak: ``proven(...)`` and ``refuted(...)``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from retrychaos import Chaos, Report
from retrychaos.report.text import full_text
from scenarios.shop import Session, redis


@pytest.fixture(autouse=True)
def database(chaos: Chaos) -> None:
    Session.configure(bind=chaos.sql)


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
    """The job leaves the world of one clean run, however often it crashes."""
    fresh_world(job)
    report = chaos.explore(job, *args)
    assert report.verdict == "proven", full_text(report)
    assert not report.findings
    return report


def refuted(
    chaos: Chaos, job: Callable[..., Any], *args: Any, crashes: int = 1, **effects: str | tuple[str, ...]
) -> Report:
    """The job is refuted for these reasons and no others, by that few crashes, and the token of each replays it.

    effects: what is ``duplicated``, ``lost``, ``changed``: a table, a call, a Redis key, or several. For ``stuck`` the
    error that never ends.
    """
    fresh_world(job)
    report = chaos.explore(job, *args)
    story = full_text(report)
    assert report.verdict == "failed", story
    expected = {
        (kind, effect) for kind, some in effects.items() for effect in ([some] if isinstance(some, str) else some)
    }
    assert {(finding.kind, finding.effect) for finding in report.findings} == expected, story
    for finding in report.findings:
        assert finding.plan.crashes == crashes, story
        fresh_world(job)
        again = chaos.run(job, *args, plan=finding.token)
        assert (again.kind, again.effect) == (finding.kind, finding.effect), story
    return report
