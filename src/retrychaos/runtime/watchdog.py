"""Ends a delivery that would never end by itself: an endless loop without steps, a wait for nothing."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_EVERY = 0.2


class Stopped(BaseException):
    """Raised inside a job to end it. The verdict does not depend on what the job makes of it."""


class Watchdog:
    """Calls `warn` when time is up, so that the next step ends the delivery where that does no harm.

    If none comes soon, it raises Stopped in the thread of the deliveries, and again if the job swallows it.

    In the main thread a timer signal does it, which also interrupts a blocking call; elsewhere, or when the timer
    belongs to somebody else, a helper thread raises it as soon as the job's thread runs Python code.
    """

    def __init__(self, warn: Callable[[], None]) -> None:
        self.expired = False
        self._warn = warn
        self._handler: Any = None
        self._signals = False
        self._armed = False
        self._helper: threading.Thread | None = None
        self._done = threading.Event()

    def arm(self, seconds: float) -> None:
        self.expired = False
        self._armed = True
        in_main = threading.current_thread() is threading.main_thread()
        self._signals = in_main and signal.getitimer(signal.ITIMER_REAL)[0] == 0
        if self._signals:
            self._handler = signal.signal(signal.SIGALRM, self._on_signal)
            signal.setitimer(signal.ITIMER_REAL, seconds, _EVERY)
        else:
            self._done.clear()
            arguments = (threading.get_ident(), seconds)
            self._helper = threading.Thread(target=self._watch, args=arguments, name="retrychaos-watchdog", daemon=True)
            self._helper.start()

    def disarm(self) -> None:
        """No Stopped comes any more after this."""
        if not self._armed:
            return
        self._armed = False
        if self._signals:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._handler)
            return
        while self._helper is not None:
            try:
                self._done.set()
                self._helper.join()
                self._helper = None
                _raise_in(threading.get_ident(), None)
            except Stopped:  # one that was on its way
                continue

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._armed and not self._is_first():
            raise Stopped

    def _watch(self, thread: int, seconds: float) -> None:
        wait = seconds
        while not self._done.wait(wait):
            if not self._is_first():
                _raise_in(thread, Stopped)
            wait = _EVERY

    def _is_first(self) -> bool:
        first, self.expired = not self.expired, True
        if first:
            self._warn()
        return first


def _raise_in(thread: int, what: type[BaseException] | None) -> None:
    """Raise an exception in another thread; None takes back one that has not been raised yet."""
    target = ctypes.py_object(what) if what is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), target)
