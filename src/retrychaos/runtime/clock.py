"""The virtual clock: it stands still while a job works, and moves when the job sleeps or the check says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import time_machine

from retrychaos.runtime.patching import Patches

_real_sleep = time.sleep
_real_monotonic = time.monotonic
_HOUR = 3600.0
_MARGIN = 600.0


class Clock:
    """Moves ``time`` and ``datetime`` with time-machine; ``sleep`` and ``monotonic`` by replacing them.

    Only the thread that runs deliveries lives in virtual time for the latter two: other threads must not spin, nor see
    a monotonic clock that jumps back after the check.
    """

    def __init__(self) -> None:
        self.base = _whole(time.time())
        self.instants: set[float] = set()
        """Every instant (seconds since the epoch) at which a job of this check could read the clock."""
        self._now = self.base
        self._travel: time_machine.travel | None = None
        self._traveller: Any = None
        self._patches = Patches()
        self._thread = threading.get_ident()
        self._started = _real_monotonic()

    def start(self, sleep: Callable[[float], None]) -> None:
        """Begin virtual time. `sleep` is called instead of time.sleep in the thread of the deliveries."""
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
            if threading.get_ident() != self._thread:
                return _real_monotonic()
            return self._started + (self._now - self.base)

        self._travel = time_machine.travel(self.base, tick=False)
        self._traveller = self._travel.start()
        self._patches.set_everywhere(time, "sleep", virtual_sleep)
        self._patches.set_everywhere(time, "monotonic", monotonic)

    def stop(self) -> None:
        """Back to real time."""
        self._patches.undo()
        if self._travel is not None:
            self._travel.stop()
            self._travel = None

    def now(self) -> float:
        """Virtual seconds since the epoch."""
        return self._now

    def set(self, instant: float) -> None:
        """Move the clock to `instant`."""
        self._now = instant
        self.instants.add(instant)
        self._traveller.move_to(instant, tick=False)


def _whole(now: float) -> float:
    """A start from which minutes can pass without a new hour: dates must not change by the time a check is run."""
    # Later than anything that fixtures have noted, so that their times are not taken for the job's; and with a fraction
    # that floats hold exactly.
    seconds = float(int(now)) + 2.25
    into = seconds % _HOUR
    if into > _HOUR - _MARGIN:
        seconds += _HOUR - into + 1
    return seconds
