"""The virtual clock: it stands still while a job works, and moves when the job sleeps or the check says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import time_machine

from retrychaos.runtime.patching import Replacement

_real_sleep = time.sleep
_real_monotonic = time.monotonic
_DAY = 86_400.0
_MARGIN = 180.0


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
        self._now = self.base
        self._travel: time_machine.travel | None = None
        self._traveller: Any = None
        self._thread = threading.get_ident()
        self._started = _real_monotonic()

    def start(self, sleep: Callable[[float], None]) -> list[Replacement]:
        """Begin virtual time. `sleep` is called instead of time.sleep in the thread of the deliveries.

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

        self._travel = time_machine.travel(self.base, tick=False)
        self._traveller = self._travel.start()
        return [(time, "sleep", virtual_sleep), (time, "monotonic", monotonic)]

    def stop(self) -> None:
        """Back to real time."""
        self._thread = 0  # should anybody have kept a replacement
        if self._travel is not None:
            self._travel.stop()
            self._travel = None

    def live_in(self, thread: int) -> None:
        """The thread that lives in virtual time from now on."""
        self._thread = thread

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
