"""Which row of one ledger is which row of another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

_Row = TypeVar("_Row")


def pairs(
    left: Sequence[_Row], right: Sequence[_Row], distance: Callable[[_Row, _Row], int | None]
) -> Iterator[tuple[_Row, _Row]]:
    """Rows that belong together, nearest first, each used once. `distance` gives None where two cannot be one."""
    options = sorted(
        (apart, i, j)
        for i, mine in enumerate(left)
        for j, theirs in enumerate(right)
        if (apart := distance(mine, theirs)) is not None
    )
    used: tuple[set[int], set[int]] = (set(), set())
    for _, i, j in options:
        if i not in used[0] and j not in used[1]:
            used[0].add(i)
            used[1].add(j)
            yield left[i], right[j]
