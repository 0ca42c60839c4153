"""Hooks on asyncpg: what it asks of the server is asked at once, in the delivery's thread (see postgres_prompt.py).

Everything that its connections, cursors, prepared statements and pools want of a server passes the methods of its
`Protocol`. A statement that is not known yet is prepared first: both together are one step.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Collection, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from retrychaos.model.errors import WorldError
from retrychaos.world.postgres_async import let_others_go_on
from retrychaos.world.postgres_drivers import below, standing
from retrychaos.world.postgres_pools import Pools
from retrychaos.world.postgres_prompt import Prompt, PromptLoop, Spares, prompt
from retrychaos.world.postgres_steps import Steps
from retrychaos.world.postgres_wire import IDLE
from retrychaos.world.resource import Stage

_Asking: TypeAlias = Callable[[], Coroutine[Any, Any, Any]]

_COMMIT = re.compile(r"\s*(COMMIT|END)(\s+(WORK|TRANSACTION))?\s*;?\s*", re.IGNORECASE)
_NO_STEP = re.compile(
    r"\s*(BEGIN|START\s+TRANSACTION|ABORT|ROLLBACK(?!\s+(WORK\s+|TRANSACTION\s+)?TO\b)(?!\s+PREPARED\b))\b[^;]*;?\s*"
    r"|\s*SELECT pg_advisory_unlock_all\(\);\s*CLOSE ALL;.*",  # what a pool does with a connection that comes back
    re.IGNORECASE | re.DOTALL,
)
_NAME = re.compile(r"__asyncpg_(\w+?)_[0-9a-f]+__")
"""Numbered through the whole process."""
_ELDER = (
    "the job uses a connection of asyncpg that was opened before the check, or in another event loop. Each delivery "
    "has an event loop of its own, as every worker process has, and a connection of asyncpg works in no other than "
    "that which has opened it. Open it in the job, or take it from a pool."
)


@dataclass
class _Said:
    """What the server has called what it has done, as a cursor says it."""

    statusmessage: str | None = None
    rowcount: int = -1


class Asyncpg:
    """The hooks, to be put in the place of methods."""

    def __init__(self, stage: Stage, steps: Steps) -> None:
        self._stage = stage
        self._steps = steps
        self._opened: list[tuple[object, Prompt]] = []
        self._spares = Spares()
        self._pools = Pools(lambda: self._stage.running)

    def hooks(self) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
        """(class or module, name, what makes a hook of the original)"""
        from asyncpg import connect_utils
        from asyncpg.connection import Connection
        from asyncpg.protocol import Protocol

        yield connect_utils, "_connect_addr", self._connect_addr
        yield from self._pools.hooks()
        yield Connection, "_introspect_types", self._introspect
        yield Connection, "_introspect_type", self._introspect
        yield Connection, "_process_log_message", self._process_log_message
        yield Protocol, "prepare", lambda _: self._prepare(Protocol.__base__.prepare)
        yield Protocol, "query", lambda _: self._query(Protocol.__base__.query)
        yield Protocol, "bind_execute", lambda _: self._bind_execute(Protocol.__base__.bind_execute)
        yield Protocol, "bind_execute_many", lambda _: self._bind_execute_many(Protocol.__base__.bind_execute_many)
        yield Protocol, "bind", lambda _: self._bind(Protocol.__base__.bind)
        yield Protocol, "execute", lambda _: self._execute(Protocol.__base__.execute)
        yield Protocol, "copy_in", lambda _: self._copy_in(Protocol.__base__.copy_in)
        yield Protocol, "copy_out", lambda _: self._copy_out(Protocol.__base__.copy_out)
        for name in ("close_statement", "close_portal", "close"):
            yield Protocol, name, functools.partial(self._silent, getattr(Protocol.__base__, name))

    def leave(self, owner: object, but: Collection[int] = ()) -> None:
        """Close what a delivery has opened. but: those with these ids, which somebody else closes."""
        for whose, raw in self._opened:
            if whose is owner and id(raw) not in but:
                raw.end()
        self._opened = [each for each in self._opened if each[0] is not owner]
        self._pools.forget()

    def close(self) -> None:
        """The check is over."""
        self._spares.close()

    # -- connections --------------------------------------------------------------------------------------------------

    def _connect_addr(self, original: Any) -> Any:
        @functools.wraps(original)
        async def _connect_addr(*, loop: Any, **how: Any) -> Any:
            if not (self._stage.running or self._stage.quiet) or isinstance(loop, PromptLoop):
                return await original(loop=loop, **how)
            self._stage.claim_address(how["addr"])
            opening = PromptLoop(loop, how, spares=self._spares)
            connection = await prompt(original(loop=opening, **how), opening)
            connection._loop = loop
            raw: Prompt = below(connection)
            raw.connection = connection
            self._opened.append((self._stage.owner, raw))
            return connection

        return _connect_addr

    def _introspect(self, original: Any) -> Any:
        """asyncpg asks the catalog how to read values of a type."""

        @functools.wraps(original)
        async def introspect(*args: Any, **kwargs: Any) -> Any:
            with self._steps.set_up():
                return await original(*args, **kwargs)

        return introspect

    def _process_log_message(self, original: Any) -> Any:
        @functools.wraps(original)
        def _process_log_message(connection: Any, fields: Any, last_query: Any) -> None:
            raw = _prompt_of(connection._protocol)
            if raw is not None:
                raw.notice(fields)
            if fields.get("V") != "LOG":  # else only the harness has asked for it
                original(connection, fields, last_query)

        return _process_log_message

    # -- statements ---------------------------------------------------------------------------------------------------

    def _follow(self, protocol: Any, timeout: float | None = None) -> Prompt | None:
        raw = _prompt_of(protocol)
        if raw is None:
            if not self._steps.looks_away():
                self._stage.refuse(WorldError(_ELDER))
        elif not self._steps.looks_away():
            raw.limit = timeout or raw.connection._config.command_timeout
        return raw

    def _prepare(self, original: Any) -> Any:
        @functools.wraps(original)
        async def prepare(protocol: Any, stmt_name: str, query: str, *args: Any, **kwargs: Any) -> Any:
            raw = self._follow(protocol)
            asking = functools.partial(original, protocol, stmt_name, query, *args, **kwargs)
            if raw is None or self._steps.looks_away():
                return await _answered(raw, asking())
            async with self._stage.gate.passing():
                self._steps.announce(raw, _NAME.sub(r"\1", query), None)
                with self._steps.preparing(raw):
                    state = await prompt(asking(), raw)
            raw.announced = (query, self._stage.gate.steps)
            return state

        return prepare

    def _query(self, original: Any) -> Any:
        @functools.wraps(original)
        async def query(protocol: Any, query: str, timeout: Any) -> Any:
            raw = self._follow(protocol, timeout)
            asking = functools.partial(original, protocol, query, timeout)
            if raw is None or self._steps.looks_away():
                return await _answered(raw, asking())
            said = _Said()
            async with self._stage.gate.passing():
                if _COMMIT.fullmatch(query):
                    within = self._steps.commit(raw)
                elif _NO_STEP.fullmatch(query):
                    within = self._steps.command(raw, query, said)
                else:
                    within = self._steps.statement(raw, _NAME.sub(r"\1", query), None, said)
                with within:
                    said.statusmessage = await prompt(asking(), raw)
                self._steps.streamed(said.statusmessage)
            await let_others_go_on(raw)
            return said.statusmessage

        return query

    def _bind_execute(self, original: Any) -> Any:
        @functools.wraps(original)
        async def bind_execute(
            protocol: Any, state: Any, args: Any, portal_name: str, limit: int, return_extra: bool, timeout: Any
        ) -> Any:
            raw = self._follow(protocol, timeout)
            asking = functools.partial(original, protocol, state, args, portal_name, limit)
            if raw is None or self._steps.looks_away():
                return await _answered(raw, asking(return_extra, timeout))
            result = await self._asked(raw, state.query, args, functools.partial(asking, True, timeout))
            return result if return_extra else result[0]

        return bind_execute

    def _execute(self, original: Any) -> Any:
        """Rows of a cursor: only now the server looks for them, and may lock them."""

        @functools.wraps(original)
        async def execute(
            protocol: Any, state: Any, portal_name: str, limit: int, return_extra: bool, timeout: Any
        ) -> Any:
            raw = self._follow(protocol, timeout)
            asking = functools.partial(original, protocol, state, portal_name, limit)
            if raw is None or self._steps.looks_away():
                return await _answered(raw, asking(return_extra, timeout))
            result = await self._asked(raw, f"FETCH {limit or 'ALL'}", None, functools.partial(asking, True, timeout))
            return result if return_extra else result[0]

        return execute

    async def _asked(self, raw: Prompt, query: str, args: Any, asking: _Asking) -> Any:
        said = _Said()
        async with self._stage.gate.passing():
            with self._step(raw, query, args, said):
                result = await prompt(asking(), raw)
                said.statusmessage = (result[1] or b"").decode()
            self._steps.streamed(([tuple(row) for row in result[0] or ()], said.statusmessage))
        await let_others_go_on(raw)
        return result

    def _bind_execute_many(self, original: Any) -> Any:
        @functools.wraps(original)
        async def bind_execute_many(protocol: Any, state: Any, args: Any, *more: Any, **kwargs: Any) -> Any:
            raw = self._follow(protocol)
            if raw is None or self._steps.looks_away():
                return await _answered(raw, original(protocol, state, args, *more, **kwargs))
            said, args = _Said(), list(args)
            async with self._stage.gate.passing():
                with self._step(raw, state.query, args, said):
                    rows = await prompt(original(protocol, state, args, *more, **kwargs), raw)
                    said.statusmessage = f"{state.query.split()[0].upper()} {len(args)}"
                self._steps.streamed([tuple(row) for row in rows or ()])
            await let_others_go_on(raw)
            return rows

        return bind_execute_many

    def _bind(self, original: Any) -> Any:
        """A cursor is opened."""

        @functools.wraps(original)
        async def bind(protocol: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
            raw = self._follow(protocol)
            asking = functools.partial(original, protocol, state, *args, **kwargs)
            if raw is None or self._steps.looks_away():
                return await _answered(raw, asking())
            async with self._stage.gate.passing():
                if not self._is_announced(raw, state.query):
                    self._steps.announce(raw, state.query, args[0] if args else None)
                with self._steps.preparing(raw):
                    return await prompt(asking(), raw)

        return bind

    def _step(self, raw: Prompt, query: str, args: Any, said: _Said) -> contextlib.AbstractContextManager[None]:
        if self._is_announced(raw, query):
            return self._steps.answer(raw, said, standing(raw) == IDLE, query)
        return self._steps.statement(raw, query, args, said)

    def _is_announced(self, raw: Prompt, query: str) -> bool:
        """It has been prepared just now, in a step that goes on."""
        announced, raw.announced = raw.announced, None
        return announced == (query, self._stage.gate.steps)

    # -- COPY ---------------------------------------------------------------------------------------------------------

    def _copy_in(self, original: Any) -> Any:
        @functools.wraps(original)
        async def copy_in(
            protocol: Any, copy_stmt: str, reader: Any, data: Any, records: Any, *more: Any, **kwargs: Any
        ) -> Any:
            raw = self._follow(protocol)
            if raw is None or self._steps.looks_away():
                return await _answered(raw, original(protocol, copy_stmt, reader, data, records, *more, **kwargs))
            # What the job does to get its data are steps of their own: they come before that of the COPY.
            if hasattr(reader, "__aiter__"):
                reader = _Again([chunk async for chunk in reader])
            if hasattr(records, "__aiter__"):
                records = [record async for record in records]
            asking = functools.partial(original, protocol, copy_stmt, reader, data, records, *more, **kwargs)
            return await self._copied(raw, copy_stmt, asking)

        return copy_in

    def _copy_out(self, original: Any) -> Any:
        @functools.wraps(original)
        async def copy_out(protocol: Any, copy_stmt: str, sink: Any, *more: Any, **kwargs: Any) -> Any:
            raw = self._follow(protocol)
            if raw is None or self._steps.looks_away():
                return await _answered(raw, original(protocol, copy_stmt, sink, *more, **kwargs))
            got: list[bytes] = []

            async def keep(data: bytes) -> None:
                got.append(data)

            asking = functools.partial(original, protocol, copy_stmt, keep, *more, **kwargs)
            status = await self._copied(raw, copy_stmt, asking, got)
            for data in got:
                await sink(data)
            return status

        return copy_out

    async def _copied(self, raw: Prompt, statement: str, asking: _Asking, got: Collection[bytes] = ()) -> Any:
        said = _Said()
        async with self._stage.gate.passing():
            with self._steps.statement(raw, statement, None, said):
                said.statusmessage = await prompt(asking(), raw)
            self._steps.streamed((b"".join(got), said.statusmessage))
        await let_others_go_on(raw)
        return said.statusmessage

    # -- what is no step ----------------------------------------------------------------------------------------------

    def _silent(self, original: Any, _: Any) -> Any:
        @functools.wraps(original)
        async def ask(protocol: Any, *args: Any, **kwargs: Any) -> Any:
            return await _answered(_prompt_of(protocol), original(protocol, *args, **kwargs))

        return ask


class _Again:
    """What has been read from an iterator that is asynchronous."""

    def __init__(self, chunks: list[Any]) -> None:
        self._chunks = iter(chunks)

    def __aiter__(self) -> _Again:
        return self

    async def __anext__(self) -> Any:
        for chunk in self._chunks:
            return chunk
        raise StopAsyncIteration


def _prompt_of(protocol: Any) -> Prompt | None:
    found: Prompt | None = getattr(protocol, "prompt", None)
    return found


async def _answered(raw: Prompt | None, asking: Coroutine[Any, Any, Any]) -> Any:
    return await (asking if raw is None else prompt(asking, raw))
