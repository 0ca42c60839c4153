"""Event loops of deliveries: they live in virtual time, and what they would do in other threads is done in theirs.

A loop that has nothing to do before its next timer makes a step `sleep`, like a job that calls time.sleep. What goes
to an executor (asyncio.to_thread) is done at once, in the thread of the delivery, which does one thing at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import selectors
import threading
import time
import weakref
from asyncio.base_events import BaseEventLoop
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from types import FrameType
from typing import TYPE_CHECKING, Any

from retrychaos.model.plan import CANCELLATION, SHUTDOWN
from retrychaos.model.step import Site
from retrychaos.runtime.clock import Clock
from retrychaos.runtime.patching import Patches
from retrychaos.world.sites import origin, site_of
from retrychaos.world.world import World

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

_real_monotonic = time.monotonic
_A_MOMENT = 0.02
"""Real seconds in which somebody may answer of whom nothing is known: a thread, a socket."""
_SLICE = 0.05
"""Real seconds to wait at once for an answer that is on its way; between them a delivery can be ended."""
_LONGEST_ANSWER = 0.5
"""Real seconds that an answer has, however near the next timer is: a busy machine must not make a timeout of it."""
_RESOLUTION = 0.001
"""Timers that are so near to each other are due together: the clock goes in milliseconds."""
_MOST_ROUNDS = 3
"""Of tasks that are ended, and begin others for that."""
_STOP = "the worker is asked to stop"
_LEFT_TASK = (
    "the job left the task {!r} running when it returned: the message is acknowledged then, so what the task does "
    "later is lost in a crash. Await tasks before the job returns (asyncio.gather, asyncio.TaskGroup)."
)


class Loops:
    """Makes event loops of deliveries virtual while installed, and runs async jobs."""

    def __init__(self, world: World, clock: Clock) -> None:
        self._world = world
        self._clock = clock
        self._patches = Patches()
        self._threads = 0
        """How many there were when the first loop was made."""
        self._ours: weakref.WeakSet[BaseEventLoop] = weakref.WeakSet()
        self._jobs: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[object]] = (
            weakref.WeakKeyDictionary()
        )
        """The task that is the job, where a worker has made it."""

    def start(self) -> None:
        self._patches.set(BaseSelectorEventLoop, "__init__", self._init(BaseSelectorEventLoop.__init__))
        self._patches.set(BaseEventLoop, "run_in_executor", self._run_in_executor(BaseEventLoop.run_in_executor))

    def stop(self) -> None:
        self._patches.undo()
        self.end_delivery()

    def end_delivery(self) -> None:
        """Loops are memory of the process."""
        for loop in list(self._ours):
            if not loop.is_running() and not loop.is_closed():
                for task in asyncio.all_tasks(loop):
                    task._log_destroy_pending = False  # type: ignore[attr-defined]  # it dies with its process
                loop.close()
        self._ours.clear()

    # -- async jobs -------------------------------------------------------------------------------------------------

    def complete(self, job: Coroutine[Any, Any, object]) -> None:
        """Run what an async job gave to its end, in a loop of its own, as the worker of a queue does."""
        # The test may itself be a coroutine, whose loop stands still meanwhile.
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        loop = asyncio.SelectorEventLoop()
        task = self._jobs[loop] = loop.create_task(job)
        try:
            loop.run_until_complete(task)
            self._doubt_tasks(loop)
        finally:
            try:
                _end_tasks(loop)
                loop.run_until_complete(loop.shutdown_asyncgens())
            finally:
                if task.done() and not task.cancelled():
                    task.exception()  # it is raised, or something worse is
                loop.close()
                asyncio._set_running_loop(outer)

    def shutdowns(self) -> dict[str, Callable[[], BaseException]]:
        """What a worker can do now to have the job end, by kind of fault, as what the job sees of it."""
        found: dict[str, Callable[[], BaseException]] = {SHUTDOWN: lambda: SystemExit(_STOP)}
        loop = asyncio._get_running_loop()
        task = self._jobs.get(loop) if loop is not None else None
        if loop is not None and task is not None and not task.done():
            found[CANCELLATION] = functools.partial(_cancel, loop, task)
        return found

    def _doubt_tasks(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tasks of libraries (that keep a connection alive) may be left; the job's own may not."""
        for task in asyncio.all_tasks(loop):
            coroutine = task.get_coro()
            code = getattr(coroutine, "cr_code", None)
            if code is not None and origin(code.co_filename) == "user":
                self._world.doubt(_LEFT_TASK.format(code.co_name))

    # -- loops ------------------------------------------------------------------------------------------------------

    def _init(self, original: Callable[..., None]) -> Callable[..., None]:
        def __init__(loop: Any, selector: selectors.BaseSelector | None = None) -> None:
            if selector is not None or not self.in_delivery():
                original(loop, selector)
                return
            selector = _Patient(self)
            original(loop, selector)
            if not self._ours:
                self._threads = threading.active_count()
            loop.time = selector.time
            loop._clock_resolution = _RESOLUTION
            self._ours.add(loop)

        return __init__

    def _run_in_executor(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run_in_executor(loop: Any, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
            if loop not in self._ours or isinstance(executor, ProcessPoolExecutor) or not self.in_delivery():
                return original(loop, executor, func, *args)
            future = loop.create_future()
            asyncio._set_running_loop(None)  # there is none in the thread of an executor
            try:
                result = func(*args)
            except Exception as problem:
                future.set_exception(problem)
            else:
                future.set_result(result)
            finally:
                asyncio._set_running_loop(loop)
            return future

        return run_in_executor

    def in_delivery(self) -> bool:
        """The thread that asks runs a delivery."""
        return self._world.running and self._clock.lives_in(threading.get_ident())

    @property
    def answer_is_due(self) -> bool:
        return self._world.gate.answer_is_due

    def patience(self, sockets: int) -> float:
        """Real seconds to wait for somebody outside, before time passes for a loop that has nothing to do."""
        if self.answer_is_due:
            return _SLICE
        alone = self._world.concurrent or threading.active_count() <= self._threads
        return _A_MOMENT if sockets or not alone else 0.0

    def ask_others(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Before time goes by for a loop, other deliveries may do what a task of it waits for."""
        return self._world.concurrent and self._world.gate.ask_others(loop, self._world.blocked)

    def sleep(self, seconds: float | None, loop: asyncio.AbstractEventLoop) -> None:
        """Nothing can happen to a loop before so many seconds have gone by (None: at all)."""
        self._world.sleep(seconds, _site_of_first(loop) if self._world.traced else None)


class _Patient(selectors.BaseSelector):
    """The usual selector, which asks before it waits."""

    def __init__(self, loops: Loops) -> None:
        self._loops = loops
        self._slept = 0.0
        self._waited = 0.0
        """Real seconds for which nothing but an answer from outside has been waited for."""
        self._usual = selectors.DefaultSelector()

    def register(self, fileobj: FileDescriptorLike, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._usual.register(fileobj, events, data)

    def unregister(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        return self._usual.unregister(fileobj)

    def modify(self, fileobj: FileDescriptorLike, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._usual.modify(fileobj, events, data)

    def time(self) -> float:
        """The time of the loop: that for which it has slept. So timers end in the same order each time, whatever other
        deliveries do meanwhile."""
        return self._slept

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._usual.select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if not self._loops.in_delivery():
            return self._usual.select(timeout)
        patience = self._loops.patience(len(self._usual.get_map()) - 1)  # one is the loop's own, to be woken by
        if patience:
            began = _real_monotonic()
            ready = self._usual.select(patience)
            if ready:
                self._waited = 0.0
                return ready
            if self._loops.answer_is_due:
                self._waited += _real_monotonic() - began
                if timeout is None or self._waited < max(timeout, _LONGEST_ANSWER):
                    return ready
        self._waited = 0.0
        loop = asyncio.get_running_loop()
        try:
            if self._loops.ask_others(loop):
                return self._usual.select(0)
            self._loops.sleep(timeout, loop)
        except asyncio.CancelledError:  # the job has been cancelled, and wakes up
            return self._usual.select(0)
        self._slept += timeout or 0.0
        return self._usual.select(0)

    def get_key(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        return self._usual.get_key(fileobj)

    def get_map(self) -> Mapping[FileDescriptorLike, selectors.SelectorKey]:
        return self._usual.get_map()

    def close(self) -> None:
        self._usual.close()


def _cancel(loop: asyncio.AbstractEventLoop, job: asyncio.Task[object]) -> BaseException:
    """A worker cancels the task that is the job. What is raised is what the step that is awaited gives."""
    current = asyncio.current_task(loop)
    if current is None:
        job.cancel(_STOP)
    elif current is not job:
        loop.call_soon(job.cancel, _STOP)  # the job waits for the task, or will; whom else it waits for ends, too
    return asyncio.CancelledError(_STOP)


def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """As asyncio.run does with what is left when the main task has ended; also with what that begins to clean up."""
    for _ in range(_MOST_ROUNDS):
        left = asyncio.all_tasks(loop)
        if not left:
            break
        for task in left:
            task.cancel()
        with contextlib.suppress(SystemExit):  # which has ended the loop once, and a task may only now get to know
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))


def _site_of_first(loop: Any) -> Site | None:
    """The line of user code that waits for the next timer of a loop."""
    ends = min(loop._scheduled)._args or () if loop._scheduled else ()
    for task in asyncio.all_tasks(loop):
        if getattr(task, "_fut_waiter", None) in ends:
            for frame in reversed(list(_frames(task.get_coro()))):
                if origin(frame.f_code.co_filename) == "user":
                    return site_of(frame)
    return None


def suspended() -> tuple[tuple[int, int], ...]:
    """Where the tasks of the loop that runs in this thread stand, so that two places in async code differ."""
    loop = asyncio._get_running_loop()
    if loop is None:
        return ()
    frames = (frame for task in asyncio.all_tasks(loop) for frame in _frames(task.get_coro()))
    return tuple(sorted((id(frame.f_code), frame.f_lasti) for frame in frames))


def _frames(awaited: Any) -> Iterator[FrameType]:
    """From the coroutine of a task down to what it waits in."""
    while inspect.iscoroutine(awaited):
        if awaited.cr_frame is not None:
            yield awaited.cr_frame
        awaited = awaited.cr_await
