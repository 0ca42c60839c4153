"""Keeps the answers that tasks of one event loop wait for in an order: one is on its way at a time.

Tasks of a delivery would overlap as chance has it; a boundary between two of their steps would mean nothing.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any


class Hope(abc.ABC):
    """A task that waits for what another delivery may do, or another task of its own.

    loop: where it waits. since: how many steps had been made in all when its own step was made.
    """

    MOVED = "moved"
    """Another delivery has moved."""
    SAY = "say"
    """Its step is no longer the last one of its delivery: it has to announce it once more."""
    LATE = "late"
    """Its time is over."""

    def __init__(self, loop: asyncio.AbstractEventLoop, since: int) -> None:
        self.loop = loop
        self.since = since

    @abc.abstractmethod
    def wake(self, why: str) -> None:
        """It is to go on, in its turn."""


class Gate:
    """Through which every step passes whose answer comes from outside of the process, while a loop runs on."""

    def __init__(self) -> None:
        self._locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Turn] = weakref.WeakKeyDictionary()
        self._waiting: dict[int, int] = {}
        self.hopes: list[Hope] = []
        self.steps = 0
        """Made in all."""

    @property
    def answer_is_due(self) -> bool:
        """A task of this thread waits for an answer, which comes in real time."""
        return self._waiting.get(threading.get_ident(), 0) > 0

    def ask_others(self, loop: asyncio.AbstractEventLoop, blocked: Callable[[], bool]) -> bool:
        """A loop has nothing to do before time goes by. May other deliveries help? `blocked` lets them move, and says
        if one has. True if there is something to do now."""
        hopes = [hope for hope in self.hopes if hope.loop is loop]
        if not hopes:
            return False
        if hopes[0].since != self.steps:
            hopes[0].wake(Hope.SAY)
            return True
        if not blocked():
            return False
        for hope in hopes:
            hope.wake(Hope.MOVED)
        return True

    @contextlib.asynccontextmanager
    async def passing(self, real: bool = True) -> AsyncIterator[None]:
        """The answer is on its way inside, in real time. Layers of one client may be inside each other.

        real: if not, nobody outside of this process is asked, and time inside is the virtual one.
        """
        turn = self._locks.setdefault(asyncio.get_running_loop(), _Turn())
        async with turn:
            if not real:
                yield
                return
            thread = threading.get_ident()
            self._waiting[thread] = self._waiting.get(thread, 0) + 1
            try:
                yield
            finally:
                self._waiting[thread] -= 1


def settle(future: asyncio.Future[Any], value: Any = None) -> None:
    """Whoever waits for it goes on, if that is not settled already."""
    if not future.done():
        future.set_result(value)


class _Turn:
    """A lock that a task may take again."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._holder: asyncio.Task[object] | None = None
        self._depth = 0

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        if task is not self._holder:
            await self._lock.acquire()
            self._holder = task
        self._depth += 1

    async def __aexit__(self, *exc: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None
            self._lock.release()
