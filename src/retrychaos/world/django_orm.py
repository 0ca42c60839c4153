"""Django's connections: put aside for the time of a check, so that each delivery opens its own under the hooks.

Django keeps a wrapper for each database and thread (``django.db.connections``), mostly with an open connection. A
process that was just started has none, so every delivery finds new wrappers, for the same databases. What runs on their
connections is seen by the hooks on the drivers (sqlite_hooks.py, postgres_hooks.py). Django is never imported here.
"""

from __future__ import annotations

import functools
import sqlite3
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from retrychaos.model.errors import WorldError
from retrychaos.world.http_patches import Patches
from retrychaos.world.imports import Imports
from retrychaos.world.resource import Stage
from retrychaos.world.sqlite_hooks import SqliteSource

if TYPE_CHECKING:
    from retrychaos.world.postgres_hooks import PostgresSource

_BASE = "django.db.backends.base.base"
_NESTED = (
    "Django's database {!r}: the test is inside a transaction (TestCase, pytest-django's fixture `db` or a plain "
    "@pytest.mark.django_db). There a commit of the job commits nothing, so a crash cannot be told from success, and "
    "every verdict would be wrong. Remedy: a test with real transactions, which is @pytest.mark.django_db("
    "transaction=True), the fixture `transactional_db`, or TransactionTestCase instead of TestCase."
)
_PENDING = (
    "Django's database {!r}: there were uncommitted changes when the check began, which no other process would see. "
    "Remedy: commit in the fixture before the check."
)
_HELD = (
    "the job uses a connection of Django's (database {!r}) that was taken from django.db.connections before the check. "
    "A worker has connections of its own: let the job use django.db.connection, or models."
)


class _Record:
    """What a connection has to be taken away from when its delivery is over."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def invalidate(self) -> None:
        self._wrapper.connection = None


class DjangoSource:
    """Hooks into Django while installed, from the moment on that it is imported."""

    def __init__(self, stage: Stage, sqlite: SqliteSource, servers: PostgresSource | None) -> None:
        self._stage = stage
        self._sqlite = sqlite
        self._servers = servers
        self._imports = Imports({_BASE: self._hook})
        self._patches = Patches()
        self._aside: dict[str, Any] = {}
        """The wrappers from before the check, by alias."""
        self._left: frozenset[str] = frozenset()
        """Aliases whose wrappers stay in their place."""
        self._refused: dict[str, str] = {}
        """Why a delivery must not use that alias."""

    # -- Source -----------------------------------------------------------------------------------------------------

    def install(self) -> None:
        self._imports.start()
        present = _present()
        self._left = frozenset(alias for alias, wrapper in present.items() if "connect" in vars(wrapper))
        for alias, wrapper in present.items():
            raw = wrapper.connection
            if alias in self._left:
                continue  # a test case has forbidden it
            if wrapper.in_atomic_block:
                self._refused[alias] = _NESTED.format(alias)
            elif isinstance(raw, sqlite3.Connection) and raw.in_transaction:
                self._refused[alias] = _PENDING.format(alias)
            if isinstance(raw, sqlite3.Connection):
                self._sqlite.held[id(raw)] = self._refused.get(alias, _HELD.format(alias))
                if _is_alone(wrapper) and alias not in self._refused:
                    self._left |= {alias}  # nobody else can come to that database
                    self._sqlite.held.pop(id(raw))
                    self._sqlite.use(raw)
            if alias not in self._left:
                self._aside[alias] = wrapper
        self._renew()

    def uninstall(self) -> None:
        self._imports.stop()
        self._patches.undo()
        connections = _connections()
        if connections is not None:
            for alias in _present().keys() - self._aside.keys() - self._left:
                del connections[alias]
            for alias, wrapper in self._aside.items():
                connections[alias] = wrapper
        self._aside.clear()
        self._refused.clear()
        self._sqlite.held.clear()

    def end_delivery(self) -> None:
        self._renew()

    def leave(self, owner: object) -> None:
        """Its wrappers are those of its thread; what they have open, the drivers' sources close."""

    def cancel(self, owner: object) -> None:
        """The drivers see to it."""

    def part(self, blobs: Mapping[str, Any], folder: str) -> None:
        """The drivers see to it."""

    def _renew(self) -> None:
        """Nobody is connected."""
        connections = _connections()
        if connections is None:
            return
        for alias in _present().keys() - self._left:
            if alias in self._aside:
                connections[alias] = self._aside[alias].copy()
            else:
                del connections[alias]

    # -- hooks ------------------------------------------------------------------------------------------------------

    def _hook(self) -> None:
        wrapper = sys.modules[_BASE].BaseDatabaseWrapper
        self._patches(wrapper, "connect", self._connect)
        self._patches(wrapper, "_commit", self._commit)

    def _connect(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def connect(wrapper: Any) -> None:
            if not self._stage.running:
                original(wrapper)
                return
            if wrapper.alias in self._refused:
                self._stage.refuse(WorldError(self._refused[wrapper.alias]))
            with ExitStack() as stack:
                stack.enter_context(self._sqlite.set_up())
                if self._servers is not None:
                    stack.enter_context(self._servers.set_up())
                original(wrapper)
            if isinstance(wrapper.connection, sqlite3.Connection):
                try:
                    self._sqlite.track(wrapper.connection, _Record(wrapper))
                except WorldError as problem:
                    self._stage.refuse(problem)

        return connect

    def _commit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _commit(wrapper: Any) -> Any:
            if self._servers is None or wrapper.connection is None or not self._stage.running:
                return original(wrapper)
            with self._servers.committing(wrapper.connection):
                return original(wrapper)

        return _commit


def _connections() -> Any:
    """``django.db.connections``, if it is in use."""
    connections = getattr(sys.modules.get("django.db"), "connections", None)
    return connections if connections is not None and "settings" in vars(connections) else None


def _present() -> dict[str, Any]:
    """The wrappers of this thread."""
    connections = _connections()
    if connections is None:
        return {}
    return {wrapper.alias: wrapper for wrapper in connections.all(initialized_only=True)}


def _is_alone(wrapper: Any) -> bool:
    """A database in the memory of one connection."""
    name = str(wrapper.settings_dict.get("NAME", ""))
    return name == ":memory:"
