"""The virtual clock: it stands still while a job works, and moves when the job sleeps or the check says so."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import time_machine

from retrychaos.runtime.patching import Replacement

_real_sleep = time.sleep
_real_monotonic = time.monotonic
_real_ctime = time.ctime
_MEASURING = ("perf_counter", "process_time", "thread_time")
"""Clocks that only tell how long something takes."""
_TICK = 1_000
"""Nanoseconds between two looks at one of these."""
_DAY = 86_400.0
_MARGIN = 180.0
_READ_ANYWAY = (
    "time_machine",
    "retrychaos",
    "logging",
    "threading",
    "redis",
    "fakeredis",
    "sqlalchemy.pool",
    "sqlalchemy.log",
    "http.cookiejar",
    "urllib3",
)
"""Packages that read the clock for themselves, and let no job go by it."""
_FOR_THE_JOB = "retrychaos.world.sqlite_clock"
"""Reads it because the job asks SQLite for the time."""


class Clock:
    """Moves ``time`` and ``datetime`` with time-machine; ``sleep`` and ``monotonic`` by replacing them.

    Only the thread that runs deliveries lives in virtual time for the latter two: other threads must not spin, nor see
    a monotonic clock that jumps back after the check.
    """

    def __init__(self) -> None:
        self._real = time.time()
        self.base = _away_from_midnight(self._real)
        self.instants: set[float] = set()
        """Every instant (seconds since the epoch) at which a job of this check could read the clock."""
        self.read = False
        """The job, or what it uses, has looked at it since this was set to False."""
        self._now = self.base
        self._travel: time_machine.travel | None = None
        self._traveller: Any = None
        self._thread = threading.get_ident()
        self._started = _real_monotonic()

    def start(self, sleep: Callable[[float], None], tick: Callable[[], int]) -> list[Replacement]:
        """Begin virtual time. `sleep` is called instead of time.sleep in the thread of the deliveries. `tick` gives one
        more on each call.

        Returns what else has to be replaced.
        """
        self._thread = threading.get_ident()
        self._started = _real_monotonic()

        def virtual_sleep(seconds: float) -> None:
            if threading.get_ident() != self._thread:
                _real_sleep(seconds)
            else:
                if seconds < 0:
                    raise ValueError("sleep length must be non-negative")
                sleep(seconds)

        def monotonic() -> float:
            # It goes on in real time as well: an event loop sleeps by it, and would never wake.
            slept = self._now - self.base if threading.get_ident() == self._thread else 0.0
            return _real_monotonic() + slept

        def ctime(seconds: float | None = None) -> str:
            return _real_ctime(time.time() if seconds is None else seconds)

        self._travel = time_machine.travel(self.base, tick=False)
        self._traveller = self._travel.start()
        self._traveller.time_ns = self._noticed(self._traveller.time_ns)  # all functions that tell the time ask it
        measuring: list[Replacement] = []
        for name in _MEASURING:
            if hasattr(time, name):
                measuring += [
                    (time, name, self._measured(getattr(time, name), tick, 1e9)),
                    (time, f"{name}_ns", self._measured(getattr(time, f"{name}_ns"), tick, 1)),
                ]
        return [(time, "sleep", virtual_sleep), (time, "monotonic", monotonic), (time, "ctime", ctime), *measuring]

    def _measured(self, real: Callable[[], float], tick: Callable[[], int], unit: float) -> Callable[[], float]:
        """How long something takes is the same whenever a delivery is repeated, and never nothing."""
        start = real()

        def measured() -> float:
            if threading.get_ident() != self._thread:
                return real()
            passed = round((self._now - self.base) * 1e9) + tick() * _TICK
            return start + (passed / unit if unit != 1 else passed)

        return measured

    def _noticed(self, time_ns: Callable[[], int]) -> Callable[[], int]:
        def noticed() -> int:
            self.read = self.read or _reads_for_the_job(sys._getframe(1))
            return time_ns()

        return noticed

    def stop(self) -> None:
        """Back to real time."""
        self._thread = 0  # should anybody have kept a replacement
        if self._travel is not None:
            self._travel.stop()
            self._travel = None

    def live_in(self, thread: int) -> None:
        """The thread that lives in virtual time from now on."""
        self._thread = thread

    def lives_in(self, thread: int) -> bool:
        """Is it the thread that lives in virtual time?"""
        return thread == self._thread

    def now(self) -> float:
        """Virtual seconds since the epoch."""
        return self._now

    def ahead(self) -> float:
        """Seconds by which virtual time is ahead of the real one."""
        return self._now - (self._real + _real_monotonic() - self._started)

    def real(self) -> tuple[float, float]:
        """Real seconds since the epoch: when the check began, and now. A database server stamps rows with these."""
        return self._real, self._real + _real_monotonic() - self._started

    def set(self, instant: float) -> None:
        """Move the clock to `instant`."""
        self._now = instant
        self.instants.add(instant)
        self._traveller.move_to(instant, tick=False)


def _reads_for_the_job(frame: FrameType | None) -> bool:
    """Whoever asks for the time may do something else at another time."""
    name = ""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name != "time_machine":
            break
        frame = frame.f_back
    return name == _FOR_THE_JOB or not any(name == each or name.startswith(f"{each}.") for each in _READ_ANYWAY)


def _away_from_midnight(now: float) -> float:
    """A start from which some minutes can pass without a new day: dates must not change by the time a check is run.

    Somebody who has frozen the clock before midnight wants it to be midnight.
    """
    if time.time() == now == time.time():
        return now
    local = time.localtime(now).tm_gmtoff
    for offset in (0, local):
        left = _DAY - (now + offset) % _DAY
        if left < _MARGIN:
            now += left + 1
    return now
