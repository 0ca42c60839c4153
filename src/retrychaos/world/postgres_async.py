"""psycopg's AsyncConnection: what its event loop would wait for is waited for in the delivery's thread, at once.

So a statement is one step, whatever other tasks do, and a delivery whose statement waits in the server stands still
with its thread, as with a synchronous driver. Other tasks of the delivery go on where a transaction has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import select
from collections.abc import AsyncIterator
from typing import Any

from retrychaos.world.coroutines import at_once
from retrychaos.world.postgres_drivers import standing
from retrychaos.world.postgres_steps import Steps
from retrychaos.world.postgres_wire import IDLE
from retrychaos.world.resource import Stage

_SLICE = 100
"""Milliseconds to wait at once; between them a delivery can be ended."""
_BRIEF = 5_000
"""Milliseconds for a statement that was interrupted to end."""
_READ, _WRITE = 1, 2
"""What generators of psycopg wait for, and get when it has come."""


class AsyncPsycopg:
    """The hooks, to be put in the place of methods."""

    def __init__(self, stage: Stage, steps: Steps) -> None:
        self._stage = stage
        self._steps = steps

    @property
    def _is_ours(self) -> bool:
        """A delivery runs, or the harness is at work for it."""
        return self._stage.running or self._stage.quiet

    # -- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, original: Any) -> Any:
        @functools.wraps(original)
        async def wait(raw: Any, gen: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_ours or kwargs.get("timeout") is not None:
                return await original(raw, gen, *args, **kwargs)
            return _wait(raw, gen)

        return wait

    def wait_conn_async(self, original: Any) -> Any:
        """To connect."""

        @functools.wraps(original)
        async def wait_conn_async(*args: Any, **kwargs: Any) -> Any:
            if not self._is_ours:
                return await original(*args, **kwargs)
            from psycopg import waiting

            return waiting.wait_conn(*args, **kwargs)

        return wait_conn_async

    # -- steps --------------------------------------------------------------------------------------------------------

    def execute(self, original: Any) -> Any:
        @functools.wraps(original)
        async def execute(cursor: Any, query: Any, params: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self._steps.looks_away():
                return await original(cursor, query, params, *args, **kwargs)
            if not isinstance(params, dict | list | tuple | None) and original.__name__ == "executemany":
                params = list(params)
            async with self._stage.gate.passing():
                with self._steps.statement(cursor._conn, query, params, cursor):
                    result = await original(cursor, query, params, *args, **kwargs)
            await let_others_go_on(cursor._conn)
            return result

        return execute

    def stream(self, original: Any) -> Any:
        @functools.wraps(original)
        async def stream(cursor: Any, query: Any, params: Any = None, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            async with self._stage.gate.passing():
                with self._steps.statement(cursor._conn, query, params, None):
                    rows = [row async for row in original(cursor, query, params, *args, **kwargs)]
                self._steps.streamed(rows)
            for row in rows:
                yield row

        return stream

    def copy(self, original: Any) -> Any:
        @functools.wraps(original)
        @contextlib.asynccontextmanager
        async def copy(cursor: Any, statement: Any, params: Any = None, **kwargs: Any) -> AsyncIterator[Any]:
            if self._steps.looks_away():
                async with original(cursor, statement, params, **kwargs) as copying:
                    yield copying
                return
            raw, was_idle = cursor._conn, standing(cursor._conn) == IDLE
            async with contextlib.AsyncExitStack() as stack:
                async with self._stage.gate.passing():
                    with self._steps.statement(raw, statement, params, None):
                        copying = await stack.enter_async_context(original(cursor, statement, params, **kwargs))
                stack.push_async_exit(self._finishing(stack.pop_all(), raw, cursor, was_idle))
                yield copying
            await let_others_go_on(raw)

        return copy

    def _finishing(self, copying: contextlib.AsyncExitStack, raw: Any, cursor: Any, was_idle: bool) -> Any:
        """The last data are on their way, and the server may wait now for what another delivery has locked."""

        async def finish(*problem: Any) -> bool | None:
            async with self._stage.gate.passing():
                with self._steps.answer(raw, cursor, was_idle):
                    return await copying.__aexit__(*problem)

        return finish

    def commit(self, original: Any) -> Any:
        """In which the COMMIT is seen by others (see PostgresSource); here its task lets others go on after it."""

        @functools.wraps(original)
        async def commit(raw: Any) -> None:
            await original(raw)
            if not self._steps.looks_away():
                await let_others_go_on(raw)

        return commit

    def leave(self, original: Any) -> Any:
        """A block of a transaction ends."""

        @functools.wraps(original)
        async def __aexit__(transaction: Any, *problem: Any) -> Any:
            result = await original(transaction, *problem)
            if not self._steps.looks_away():
                await let_others_go_on(transaction._conn)
            return result

        return __aexit__


async def let_others_go_on(raw: Any) -> None:
    """A task that waits for an answer lets other tasks run. Here it does so where it holds no locks: another task that
    came to wait for them in the server would keep it from ever letting them go."""
    if standing(raw) == IDLE:
        await asyncio.sleep(0)


def rows_of(cursor: Any) -> Any:
    """The rows that a cursor has got, which can be read again after that."""
    rows = at_once(cursor.fetchall())
    if rows:
        at_once(cursor.scroll(0, "absolute"))
    return rows


def _wait(raw: Any, gen: Any) -> Any:
    """What comes of a generator of psycopg, which waits for the server now and then."""
    try:
        return _driven(gen, raw.pgconn.socket)
    except (KeyboardInterrupt, SystemExit):
        if standing(raw) == 1:  # else it would be of no use any more
            with contextlib.suppress(Exception):
                raw.cancel()
                _driven(gen, raw.pgconn.socket, _BRIEF)
        raise


def _driven(gen: Any, socket: int, most: int | None = None) -> Any:
    poll = select.poll()
    try:
        wanted = next(gen)
        while True:
            poll.register(socket, (select.POLLIN if wanted & _READ else 0) | (select.POLLOUT if wanted & _WRITE else 0))
            while not (found := poll.poll(_SLICE)):
                if most is not None and (most := most - _SLICE) <= 0:
                    raise TimeoutError
            events = found[0][1]
            failed = events & ~(select.POLLIN | select.POLLOUT)  # who reads or writes gets to know what it is
            ready = (_READ if failed or events & select.POLLIN else 0) | (
                _WRITE if failed or events & select.POLLOUT else 0
            )
            wanted = gen.send(ready)
    except StopIteration as done:
        return done.value
