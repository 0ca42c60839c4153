"""Replacing attributes for the time of a check, and putting back exactly what was there."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any, TypeAlias

_MISSING: Any = object()
Replacement: TypeAlias = tuple[Any, str, Any]
"""Owner, name of the attribute, new value."""
_Newest: TypeAlias = tuple[int, Any]


class Patches:
    """A pile of replaced attributes, undone in reverse order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []
        self._everywhere: dict[str, list[tuple[Any, Any]]] = {}
        """Originals and what stands in for them, by name."""
        self._modules: _Newest = (0, None)

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def set_everywhere(self, *wanted: Replacement) -> None:
        """Also in modules that imported them by that name earlier (``from time import sleep``).

        All at once, because there may be a thousand modules to look at. Call it once.
        """
        for owner, name, value in wanted:
            self._everywhere.setdefault(name, []).append((getattr(owner, name), value))
            self.set(owner, name, value)
        for module, name, (_, value) in self._holding(0):
            self.set(module, name, value)
        self._modules = _newest()

    def undo(self) -> None:
        # Modules that were imported meanwhile have got the replacement. Looking at them all writes to them all (their
        # reference counts), so to memory that a fork still shares: not if there are none.
        if self._everywhere and self._modules != _newest():
            for module, name, (original, _) in self._holding(1):
                self._undo.insert(0, (module, name, original))
        self._everywhere = {}
        while self._undo:
            owner, name, value = self._undo.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

    def _holding(self, which: int) -> Iterator[tuple[Any, str, tuple[Any, Any]]]:
        """Modules that have an original (0) or a replacement (1) under its name."""
        for module in _modules_with(frozenset(self._everywhere), _newest()):
            namespace = vars(module)
            for name, pairs in self._everywhere.items():
                held = namespace.get(name)
                for pair in pairs if held is not None else ():
                    if held is pair[which]:
                        yield module, name, pair


@functools.lru_cache(maxsize=1)  # most checks of a test suite import nothing, and see the comment in undo()
def _modules_with(names: frozenset[str], _: _Newest) -> list[Any]:
    """Modules that have something under one of the names."""
    return [
        module
        for module in list(sys.modules.values())
        if not names.isdisjoint(getattr(module, "__dict__", ())) and not _ours(vars(module))
    ]


def _newest() -> _Newest:
    """Changes when a module is imported."""
    return len(sys.modules), next(reversed(sys.modules.values()))


def _ours(namespace: dict[str, Any]) -> bool:
    return str(namespace.get("__name__", "")).startswith(("retrychaos.", "time_machine", "_pytest."))
