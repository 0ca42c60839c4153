"""Pools of asyncpg that another event loop has made: when a module was imported, by a test, by an earlier delivery.

A connection works in no other loop than its own. A worker process makes such a pool when it starts; so in each loop of
a delivery another one stands for it, with the same settings and without a connection.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class _Twin:
    pool: Any
    own: Any
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Several tasks may come first."""


class Pools:
    """The hooks, to be put in the place of methods. `running`: a delivery is."""

    def __init__(self, running: Callable[[], bool]) -> None:
        self._running = running
        self._twins: list[_Twin] = []

    def hooks(self) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
        """(class, name, what makes a hook of the original)"""
        from asyncpg.pool import Pool

        yield Pool, "_acquire", self._acquire
        yield Pool, "release", self._release
        yield Pool, "close", self._close
        yield Pool, "terminate", self._terminate
        if hasattr(Pool, "_schedule_min_size_maintenance"):  # from 0.32 on
            yield Pool, "_schedule_min_size_maintenance", self._schedule

    def forget(self) -> None:
        """Those of loops that are gone."""
        self._twins = [twin for twin in self._twins if not twin.own._loop.is_closed()]

    def _twin(self, pool: Any) -> _Twin | None:
        """What stands for a pool in the loop that runs; None if it is at home there, or not opened at all."""
        loop = asyncio._get_running_loop()
        if not self._running() or loop is None or pool._loop is loop or not pool._initialized:
            return None
        for twin in self._twins:
            if twin.pool is pool and twin.own._loop is loop:
                return twin
        own = copy.copy(pool)
        own._loop, own._queue, own._holders = loop, None, []
        own._initialized = own._initializing = False
        if hasattr(own, "_maintenance_task"):
            own._maintenance_task = None
        self._twins.append(_Twin(pool, own))
        return self._twins[-1]

    def _acquire(self, original: Any) -> Any:
        @functools.wraps(original)
        async def _acquire(pool: Any, *args: Any, **kwargs: Any) -> Any:
            twin = self._twin(pool)
            if twin is None:
                return await original(pool, *args, **kwargs)
            async with twin.opening:
                await twin.own
            return await original(twin.own, *args, **kwargs)

        return _acquire

    def _release(self, original: Any) -> Any:
        @functools.wraps(original)
        async def release(pool: Any, connection: Any, *args: Any, **kwargs: Any) -> Any:
            return await original(self._own(pool), connection, *args, **kwargs)

        return release

    def _close(self, original: Any) -> Any:
        @functools.wraps(original)
        async def close(pool: Any) -> Any:
            own = self._own(pool)
            return await original(own) if own._initialized else None

        return close

    def _terminate(self, original: Any) -> Any:
        @functools.wraps(original)
        def terminate(pool: Any) -> Any:
            own = self._own(pool)
            return original(own) if own._initialized else None

        return terminate

    def _schedule(self, original: Any) -> Any:
        """A connection has gone, and the pool wants another one; not where its whole process is gone."""

        @functools.wraps(original)
        def _schedule_min_size_maintenance(pool: Any) -> None:
            if asyncio._get_running_loop() is pool._loop:
                original(pool)

        return _schedule_min_size_maintenance

    def _own(self, pool: Any) -> Any:
        twin = self._twin(pool)
        return pool if twin is None else twin.own
