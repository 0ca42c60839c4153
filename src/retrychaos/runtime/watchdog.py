"""Ends a delivery that would never end by itself: an endless loop without steps, a wait for nothing."""

from __future__ import annotations

import ctypes
import signal
import threading
from types import FrameType
from typing import Any

_EVERY = 0.2


class Stopped(BaseException):
    """Raised inside a job to end it. The verdict does not depend on what the job makes of it."""


class Watchdog:
    """Raises Stopped in the thread of the deliveries when time is up, and again if the job swallows it.

    In the main thread a timer signal does it, which also interrupts a blocking call; elsewhere, or when the timer
    belongs to somebody else, a helper thread raises it as soon as the job's thread runs Python code.
    """

    def __init__(self) -> None:
        self.expired = False
        self._timer: threading.Timer | None = None
        self._handler: Any = None
        self._signals = False
        self._armed = False

    def arm(self, seconds: float) -> None:
        self.expired = False
        self._armed = True
        in_main = threading.current_thread() is threading.main_thread()
        self._signals = in_main and signal.getitimer(signal.ITIMER_REAL)[0] == 0
        if self._signals:
            self._handler = signal.signal(signal.SIGALRM, self._on_signal)
            signal.setitimer(signal.ITIMER_REAL, seconds, _EVERY)
        else:
            self._start_thread(threading.get_ident(), seconds)

    def disarm(self) -> None:
        if not self._armed:
            return
        self._armed = False
        if self._signals:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._handler)
        elif self._timer is not None:
            self._timer.cancel()
            self._timer.join()
            self._timer = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._armed:
            self.expired = True
            raise Stopped

    def _start_thread(self, thread: int, seconds: float) -> None:
        def bark() -> None:
            if self._armed:
                self.expired = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Stopped))
                self._start_thread(thread, _EVERY)

        self._timer = threading.Timer(seconds, bark)
        self._timer.name = "retrychaos-watchdog"
        self._timer.daemon = True
        self._timer.start()
