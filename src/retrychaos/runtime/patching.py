"""Replacing attributes for the time of a check, and putting back exactly what was there."""

from __future__ import annotations

import sys
from typing import Any

_MISSING: Any = object()


class Patches:
    """A pile of replaced attributes, undone in reverse order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []
        self._everywhere: list[tuple[str, Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def set_everywhere(self, owner: Any, name: str, value: Any) -> None:
        """Also in modules that imported it by that name earlier (``from time import sleep``)."""
        original = getattr(owner, name)
        self._everywhere.append((name, original, value))
        self.set(owner, name, value)
        for module in list(sys.modules.values()):
            namespace = getattr(module, "__dict__", None)
            if namespace is not None and namespace.get(name) is original and not _ours(namespace):
                self.set(module, name, value)

    def undo(self) -> None:
        self._catch_up()
        while self._undo:
            owner, name, value = self._undo.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

    def _catch_up(self) -> None:
        """Modules that were imported meanwhile have got the replacement."""
        wanted, self._everywhere = self._everywhere, []
        for module in list(sys.modules.values()) if wanted else ():
            namespace = getattr(module, "__dict__", None) or {}
            for name, original, value in wanted:
                if namespace.get(name) is value and not _ours(namespace):
                    self._undo.insert(0, (module, name, original))


def _ours(namespace: dict[str, Any]) -> bool:
    return str(namespace.get("__name__", "")).startswith(("retrychaos.", "time_machine", "_pytest."))
