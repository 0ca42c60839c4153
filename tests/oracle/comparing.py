"""What two searches for ledgers disagree about, and the smallest program that shows it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from tests.oracle.moves import Found, Ledger, TooMany
from tests.oracle.overlapping_jobs import smaller

MOST_SMALLER = 80
"""Simpler programs that are tried to find the simplest."""
_Case = TypeVar("_Case", bound=Any)
"""A dataclass with a ``program``."""
Outcome = Found | str | None
"""None: the job is too big, or no use. A text: why the search gave up."""


def chosen(usual: range) -> range:
    """The seeds to try."""
    wanted = os.environ.get("RETRYCHAOS_INTERLEAVING_SEEDS")
    if wanted is None:
        return usual
    first, last = map(int, wanted.split("-"))
    return range(first, last + 1)


def outcome(search: Callable[[], Found]) -> Outcome:
    """None: the job is too big. A text: why it gave up, which is as wrong as missing something."""
    try:
        return search()
    except TooMany:
        return None
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"


def difference(tool: Outcome, other: Outcome, name: str) -> str:
    """In which ledgers the tool and a slow search disagree; empty if in none."""
    if isinstance(tool, str):
        return f"  the tool gives up: {tool}"
    if isinstance(other, str):
        return f"  {name} gives up: {other}"
    if tool is None or other is None or not tool.whole:
        return ""
    lines = []
    for what, mine, theirs in (("left", tool.left, other.left), ("while idle", tool.idle, other.idle)):
        if other.whole:
            lines += [f"  {what}, only by the tool: {shown(each)}" for each in mine - theirs]
        lines += [f"  {what}, only by {name}: {shown(each)}" for each in theirs - mine]
    return "\n".join(lines)


def shown(ledger: Ledger) -> str:
    return ", ".join(f"{name} {list(rows)}" for name, rows in sorted(ledger) if rows)


def simplest(case: _Case, disagrees: Callable[[_Case], str]) -> tuple[_Case, str]:
    """The smallest program found that shows a disagreement, and which."""
    left, found = MOST_SMALLER, disagrees(case)
    again = True
    while again:
        again = False
        for program in smaller(case.program):
            left -= 1
            other = replace(case, program=program)
            if left > 0 and (differs := disagrees(other)):
                case, found, again = other, differs, True
                break
    return case, found
