"""Noticing that a module is imported, so that it can be hooked then, and nothing is imported before the job does."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Imports:
    """Calls ``wanted[name]()`` for modules that are loaded, at once or when they come to be."""

    def __init__(self, wanted: Mapping[str, Callable[[], None]]) -> None:
        self._wanted = dict(wanted)
        self._asking: set[str] = set()
        self._loaders: list[Any] = []

    def start(self) -> None:
        for name in list(self._wanted):
            if _is_loaded(name):
                self._wanted.pop(name)()
        if self._wanted:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        while self._loaders:
            vars(self._loaders.pop()).pop("exec_module", None)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Asked for every module that is not loaded: leaves the finding to others, and has a word with the loader."""
        if name not in self._wanted or name in self._asking:
            return None
        self._asking.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.discard(name)
        loader: Any = None if spec is None else spec.loader
        if loader is None or not hasattr(loader, "exec_module") or not hasattr(loader, "__dict__"):
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            then = self._wanted.pop(name, None)
            if then is not None and self in sys.meta_path:
                then()

        loader.exec_module = exec_module
        self._loaders.append(loader)
        return spec


def _is_loaded(name: str) -> bool:
    """And not only begun, by a thread or by us."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return module is not None and not getattr(spec, "_initializing", False)
