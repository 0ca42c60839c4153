"""What the tests of files have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from retrychaos import Chaos, Report
from retrychaos.report.text import full_text

Judged: TypeAlias = Callable[..., Report]


@pytest.fixture
def folder(chaos: Chaos) -> Path:
    return chaos.files.path


@pytest.fixture
def judged(chaos: Chaos) -> Judged:
    """One delivery at a time: the verdict, and the kinds of what was found."""

    def explore(job: Callable[[], Any], verdict: str, *kinds: str) -> Report:
        return said(chaos.explore(job), verdict, *kinds)

    return explore


@pytest.fixture
def raced(chaos: Chaos) -> Judged:
    """Two deliveries that overlap."""

    def explore(job: Callable[[], Any], verdict: str, *kinds: str, **options: Any) -> Report:
        return said(chaos(duplicates=2, budget=120, **options).explore(job), verdict, *kinds)

    return explore


def said(report: Report, verdict: str, *kinds: str) -> Report:
    story = full_text(report)
    assert report.verdict == verdict, story
    if kinds:
        assert {finding.kind for finding in report.findings} == set(kinds), story
    return report
