"""Coroutines that are run by hand, and not, or not only, by an event loop."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any


def at_once(awaitable: Any) -> Any:
    """What comes of a coroutine that does not have to wait for anything."""
    try:
        awaitable.send(None)
    except StopIteration as done:
        return done.value
    awaitable.close()
    raise AssertionError(f"{awaitable!r} waits")


@types.coroutine
def driven(coroutine: Coroutine[Any, Any, Any], go_on: Callable[[Callable[[], Any]], Any]) -> Generator[Any, Any, Any]:
    """Run a coroutine, as `await` would. `go_on` gets each part of it to be run, and gives what it waits for then."""
    part = functools.partial(coroutine.send, None)
    while True:
        try:
            awaited = go_on(part)
        except StopIteration as done:
            return done.value
        try:
            answer = yield awaited
        except BaseException as problem:
            part = functools.partial(coroutine.throw, problem)
        else:
            part = functools.partial(coroutine.send, answer)
