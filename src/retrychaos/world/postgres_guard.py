"""Ends statements of psycopg2 that do not come back: it waits in C, where no signal and no exception gets through."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

_EVERY = 0.25
_BRIEF = 1.0
"""Seconds that a statement may take, however late it is."""
_monotonic = time.monotonic


class Guard:
    """A thread that ends what still runs when time is up. It is started by the first statement that is watched."""

    def __init__(self, seconds: float) -> None:
        self._until = _monotonic() + seconds
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._cancel: Callable[[], None] | None = None
        self._since = 0.0

    @contextlib.contextmanager
    def watch(self, cancel: Callable[[], None]) -> Iterator[None]:
        """A statement runs inside, in the only thread that runs any; `cancel` ends it from another one."""
        if self._thread is None or not self._thread.is_alive():  # in a forked process it is not
            self._over.clear()
            self._thread = threading.Thread(target=self._look, name="retrychaos-guard", daemon=True)
            self._thread.start()
        self._since, self._cancel = _monotonic(), cancel
        try:
            yield
        finally:
            self._cancel = None

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        self._thread = None

    def _look(self) -> None:
        while not self._over.wait(_EVERY):
            cancel, now = self._cancel, _monotonic()
            if cancel is not None and now > self._until and now > self._since + _BRIEF:
                cancel()
