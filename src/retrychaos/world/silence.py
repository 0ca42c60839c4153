"""An answer that does not come, as the tasks of an event loop see it: somebody may lose patience before the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

_FOR_EVER = 365 * 86_400.0


async def silence(limit: float | None, strike: Callable[[], Any]) -> None:
    """Strike; if it raises, that comes after `limit` seconds (None: never), in which the time limit of a task may end.

    Time only passes if somebody waits for a part of it: where nothing else would happen, the client gives up at once.
    """
    try:
        strike()
    except asyncio.CancelledError:
        raise
    except Exception:
        seconds = _FOR_EVER if limit is None else limit
        if _ends_before(seconds):
            await asyncio.sleep(seconds)
        raise


def _ends_before(seconds: float) -> bool:
    """A timer of the loop does."""
    loop: Any = asyncio.get_running_loop()
    end = loop.time() + seconds
    return any(not timer.cancelled() and timer.when() < end for timer in getattr(loop, "_scheduled", ()))
