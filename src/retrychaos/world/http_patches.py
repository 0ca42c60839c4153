"""Replaced attributes of HTTP clients, and putting back exactly what was there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

_MISSING = object()
Make: TypeAlias = Callable[[Any], Any]
"""Gives the replacement for an original."""
Patch: TypeAlias = Callable[[Any, str, Make], None]


class Patches:
    """A pile of replaced attributes. As a function it replaces one."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, Any]] = []

    def __call__(self, owner: Any, name: str, make: Make) -> None:
        own = vars(owner).get(name, _MISSING)
        made = make(getattr(owner, name) if own is _MISSING else own)
        self._undo.append((owner, name, own, made))
        setattr(owner, name, made)

    def undo(self) -> None:
        """Put everything back, the last first; but not over what others have put there since and not taken away."""
        while self._undo:
            owner, name, own, made = self._undo.pop()
            if vars(owner).get(name) is not made:
                continue
            if own is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
