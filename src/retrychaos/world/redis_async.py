"""Hooks on redis.asyncio: every command that an async job sends to a Redis server is a step.

Other tasks of the delivery have their turn before each command. Then it is sent and answered at once (redis_prompt.py),
so nothing comes between a step and its outcome. A command that waits, waits in the virtual time of its loop.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import redis
import redis.asyncio.client
import redis.asyncio.connection

from retrychaos.model.errors import WorldError
from retrychaos.world import redis_fake
from retrychaos.world.gate import Gate, Hope, settle
from retrychaos.world.redis_clients import hang_up
from retrychaos.world.redis_commands import LISTENING, Call, blocking_time, call_of, impatient
from retrychaos.world.redis_pools import Memories
from retrychaos.world.redis_prompt import PromptReader, PromptWriter, close_all, connected
from retrychaos.world.redis_server import RedisServer, Wire
from retrychaos.world.redis_wires import Wires, transaction_text
from retrychaos.world.resource import Stage
from retrychaos.world.silence import silence

_FOR_EVER = 3_650 * 86_400.0
Patch = Callable[[Any, str, Callable[[Any], Any]], None]


class AsyncClients:
    """Sees every command of the clients of redis.asyncio."""

    def __init__(self, stage: Stage, wires: Wires) -> None:
        self._stage = stage
        self._wires = wires
        self._memories = Memories(lambda: (stage.owner or self) if stage.running else None)
        self._connecting: Any = None
        """The connection that is about to open its streams."""
        self._waiting: list[_Waiting] = []
        self._faults = False
        """Replies may get lost."""

    def install(self, patch: Patch) -> None:
        self._faults = bool(self._stage.options("faults"))
        connection, pipeline = redis.asyncio.connection.AbstractConnection, redis.asyncio.client.Pipeline
        patch(connection, "send_command", self._send_command)
        patch(connection, "send_packed_command", self._send_packed_command)
        patch(connection, "__del__", self._end)
        patch(redis.asyncio.connection.Connection, "_connect", self._connect)
        patch(redis.asyncio.connection.UnixDomainSocketConnection, "_connect", self._connect)
        patch(asyncio, "open_connection", self._open_connection)
        patch(asyncio, "open_unix_connection", self._open_unix_connection)
        patch(pipeline, "_execute_transaction", self._execute_transaction)
        patch(pipeline, "_execute_pipeline", self._execute_pipeline)
        self._memories.install()

    def uninstall(self) -> None:
        self._memories.uninstall()

    def end_delivery(self) -> None:
        self._waiting.clear()
        self._stage.gate.hopes.clear()
        self._memories.forget()
        close_all()

    # -- connections ---------------------------------------------------------------------------------------------------

    def _connect(self, original: Any) -> Any:
        async def _connect(connection: Any) -> None:
            self._connecting = connection if self._stage.running else None
            try:
                await original(connection)
            finally:
                self._connecting = None

        return _connect

    def _open_connection(self, original: Any) -> Any:
        async def open_connection(host: Any = None, port: Any = None, **kwargs: Any) -> Any:
            connection, self._connecting = self._connecting, None
            if connection is None:
                return await original(host, port, **kwargs)
            return connected(connection, None, host, port, kwargs.get("ssl"), kwargs.get("server_hostname"))

        return open_connection

    def _open_unix_connection(self, original: Any) -> Any:
        async def open_unix_connection(path: Any = None, **kwargs: Any) -> Any:
            connection, self._connecting = self._connecting, None
            if connection is None:
                return await original(path, **kwargs)
            return connected(connection, path, "", 0, None, None)

        return open_unix_connection

    def _end(self, original: Any) -> Any:
        def __del__(connection: Any, *args: Any) -> None:
            if isinstance(getattr(connection, "_writer", None), PromptWriter):
                hang_up(connection)  # it ends with its process, which warns of nothing
            original(connection, *args)

        return __del__

    def _wire(self, connection: Any) -> Wire | None:
        """None: what is sent now is no step of its own."""
        if not self._stage.running:
            return None
        wire = self._wires.of(connection)
        if wire.announced:
            return None
        if not isinstance(connection._writer, PromptWriter | None) and getattr(connection, "_server", None) is None:
            self._stage.refuse(
                WorldError(
                    "The job used a connection of redis.asyncio that was opened before the check, or in a way of its "
                    "own. It belongs to another event loop than the delivery, as it would in another process. Let the "
                    "job use a client, which opens connections when it needs them."
                )
            )
        return wire

    # -- the hooks -----------------------------------------------------------------------------------------------------

    def _send_command(self, original: Any) -> Any:
        async def send_command(connection: Any, *args: Any, **kwargs: Any) -> None:
            wire = self._wire(connection)
            if wire is None:
                await original(connection, *args, **kwargs)
                return
            call = call_of(args)
            if self._wires.is_no_step(connection, wire, call):
                await _send(connection, wire, original, *args, **kwargs)
                self._wires.note(connection, wire, call)
                return
            await asyncio.sleep(0)
            if call.name == "EXEC":  # sent by itself
                calls, wire.queued, wire.watching = wire.queued or [], None, False
                self._wires.step(connection, wire, calls, transaction_text(calls))
                await _send(connection, wire, original, *args, **kwargs)
                self._on_reply(connection, wire, lambda reply: calls if reply is not None else [])
                return
            wait = blocking_time(call)
            self._wires.step(connection, wire, [call], call.text)
            if call.name in LISTENING and isinstance(connection._reader, PromptReader):
                connection._reader.idle = lambda: self._idle(self._wires.server(connection, wire))
            if wait is None:
                await _send(connection, wire, original, *args, **kwargs)
                self._on_reply(connection, wire, lambda _: [call])
                return

            async def ask() -> None:
                if not connection.is_connected:
                    await _send(connection, wire, type(connection).connect)
                with redis_fake.impatient(connection):
                    await _send(connection, wire, original, *impatient(call), **kwargs)

            async def again() -> Any:
                self._wires.expect(connection, wire, [call])
                await ask()
                return await self._read_hurried(connection, wire)

            await ask()
            self._on_late_reply(connection, wire, call, wait or _FOR_EVER, again)

        return send_command

    def _send_packed_command(self, original: Any) -> Any:
        async def send_packed_command(connection: Any, command: Any, *args: Any, **kwargs: Any) -> None:
            wire = self._wire(connection)
            if wire is None:
                await original(connection, command, *args, **kwargs)
                return
            pieces = [command] if isinstance(command, (str, bytes)) else list(command)
            packed = b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces)
            calls, steps = self._wires.read(connection, wire, packed)
            if steps:
                await asyncio.sleep(0)
                self._wires.step(connection, wire, steps, " ".join(call.text for call in calls))
            await _send(connection, wire, original, pieces, *args, **kwargs)
            self._wires.published(connection, wire, steps)
            for call in calls:
                self._wires.note(connection, wire, call)
            await self._serve(connection, wire)

        return send_packed_command

    def _execute_transaction(self, original: Any) -> Any:
        async def _execute_transaction(pipeline: Any, connection: Any, commands: Any, raise_on_error: bool) -> Any:
            wire = self._wire(connection)
            if wire is None:
                return await original(pipeline, connection, commands, raise_on_error)
            calls = [call_of(args) for args, _ in commands]
            await asyncio.sleep(0)
            self._wires.step(connection, wire, calls, transaction_text(calls))
            wire.watching = False
            responses = await _send(connection, wire, original, commands, False, pipeline=pipeline)
            done = [call for call, reply in zip(calls, responses, strict=True) if not isinstance(reply, Exception)]
            await self._conclude(connection, wire, done, responses)
            if raise_on_error:
                pipeline.raise_first_error(commands, responses)
            return responses

        return _execute_transaction

    def _execute_pipeline(self, original: Any) -> Any:
        async def _execute_pipeline(pipeline: Any, connection: Any, commands: Any, raise_on_error: bool) -> Any:
            wire = self._wire(connection)
            if wire is None:
                return await original(pipeline, connection, commands, raise_on_error)
            responses = []
            for command in commands:  # a process can die between any two of them
                call = call_of(command[0])
                silent = self._wires.is_no_step(connection, wire, call)
                if not silent:
                    await asyncio.sleep(0)
                    self._wires.step(connection, wire, [call], call.text)
                wait = blocking_time(call)
                one = [command if wait is None else (impatient(call), *command[1:])]

                async def ask(one: list[Any] = one) -> Any:
                    with redis_fake.impatient(connection):
                        return (await _send(connection, wire, original, one, False, pipeline=pipeline))[0]

                async def again(call: Call = call, ask: Callable[[], Any] = ask) -> Any:
                    self._wires.expect(connection, wire, [call])
                    return await ask()

                reply = await ask()
                if wait is not None and not reply:
                    reply = await self._wait(connection, wire, call, wait or _FOR_EVER, again)
                responses.append(reply)
                if silent:
                    self._wires.note(connection, wire, call)
                    continue
                await self._conclude(connection, wire, [] if isinstance(reply, Exception) else [call], reply)
            if raise_on_error:
                pipeline.raise_first_error(commands, responses)
            return responses

        return _execute_pipeline

    # -- replies -------------------------------------------------------------------------------------------------------

    async def _conclude(self, connection: Any, wire: Wire, done: list[Call], reply: Any) -> None:
        """A step is over: these commands were carried out, and the job gets that reply."""
        self._wires.published(connection, wire, done)
        await self._serve(connection, wire)
        await self._lose(connection)
        self._stage.observed(reply)

    async def _lose(self, connection: Any) -> None:
        """Here a reply may get lost."""
        await silence(connection.socket_timeout, functools.partial(self._wires.lose, connection))

    def _on_reply(self, connection: Any, wire: Wire, done: Callable[[Any], list[Call]]) -> None:
        """When the next reply is read, `done` says for which commands it means that they were carried out."""
        read_response = connection.read_response

        async def once(*args: Any, **kwargs: Any) -> Any:
            connection.__dict__.pop("read_response", None)
            try:
                reply = await read_response(*args, **kwargs)
                self._wires.published(connection, wire, done(reply))
                await self._serve(connection, wire)
                if self._faults:
                    await self._lose(connection)
            except redis.RedisError as error:
                self._stage.observed("error", type(error).__name__, str(error))
                raise
            self._stage.observed(reply)
            return reply

        connection.read_response = once

    def _on_late_reply(
        self, connection: Any, wire: Wire, call: Call, seconds: float, again: Callable[[], Awaitable[Any]]
    ) -> None:
        """The reply to a command that waits: others may do what it waits for, or its time runs out."""

        async def once(*args: Any, **kwargs: Any) -> Any:
            connection.__dict__.pop("read_response", None)
            try:
                reply = await self._read_hurried(connection, wire, *args, **kwargs)
                if not reply:
                    reply = await self._wait(connection, wire, call, seconds, again)
            except redis.RedisError as error:
                self._stage.observed("error", type(error).__name__, str(error))
                raise
            self._stage.observed(reply)
            return reply

        connection.read_response = once

    async def _read_hurried(self, connection: Any, wire: Wire, *args: Any, **kwargs: Any) -> Any:
        reader = connection._reader
        if isinstance(reader, PromptReader):
            self._wires.server(connection, wire).hurry(reader.ready)
        return await connection.read_response(*args, **kwargs)

    # -- waiting -------------------------------------------------------------------------------------------------------

    async def _wait(
        self, connection: Any, wire: Wire, call: Call, seconds: float, again: Callable[[], Awaitable[Any]]
    ) -> Any:
        """Nothing is there yet. What the command gives in the end; None when its time has run out."""
        end = asyncio.get_running_loop().time() + seconds
        try:
            while True:
                outcome = await self._sleep(self._wires.server(connection, wire), end, again)
                if outcome is Hope.LATE:
                    return None
                if outcome is Hope.SAY:  # what came after it was another step
                    self._wires.step(connection, wire, [call], call.text)
                if outcome in (Hope.SAY, Hope.MOVED):
                    outcome = await again()
                if outcome:
                    return outcome
        except asyncio.CancelledError:
            hang_up(connection)  # as the client does with one whose reply it has not read
            raise

    async def _idle(self, server: RedisServer) -> None:
        """A connection listens, and nothing has come. Who listens sets the time himself."""

        async def look() -> bool:
            return True

        end = asyncio.get_running_loop().time() + _FOR_EVER
        if await self._sleep(server, end, look) is Hope.SAY:
            self._stage.step("redis", server, "(listens)", "(listens)")

    async def _sleep(self, server: RedisServer, end: float, again: Callable[[], Awaitable[Any]]) -> Any:
        """Until `again` has brought something, or its time is over, or somebody may have done something."""
        waiting = _Waiting(self._stage.gate, server, again)
        timer = waiting.loop.call_at(end, settle, waiting.answer, Hope.LATE)
        self._waiting.append(waiting)
        self._stage.gate.hopes.append(waiting)
        try:
            return await waiting.answer
        finally:
            timer.cancel()
            for waits in (self._waiting, self._stage.gate.hopes):
                if waiting in waits:  # else the delivery is over, and only now its coroutine is collected
                    waits.remove(waiting)

    async def _serve(self, connection: Any, wire: Wire) -> None:
        """Tasks of this delivery may have waited for what was just done: the server gives it to the first of them."""
        if not self._waiting:
            return
        server, loop = self._wires.server(connection, wire), asyncio.get_running_loop()
        for waiting in [each for each in self._waiting if each.server is server and each.loop is loop]:
            if not waiting.answer.done():
                await waiting.attempt()


class _Waiting(Hope):
    """A command that waits in a loop of the job."""

    def __init__(self, gate: Gate, server: RedisServer, again: Callable[[], Awaitable[Any]]) -> None:
        super().__init__(asyncio.get_running_loop(), gate.steps)
        self.server = server
        self.answer: asyncio.Future[Any] = self.loop.create_future()
        self._again = again

    def wake(self, why: str) -> None:
        settle(self.answer, why)

    async def attempt(self) -> None:
        """Ask once more."""
        try:
            reply = await self._again()
        except redis.RedisError as error:
            self.answer.set_exception(error)
        else:
            if reply:
                self.answer.set_result(reply)


async def _send(connection: Any, wire: Wire, original: Any, *args: Any, pipeline: Any = None, **kwargs: Any) -> Any:
    """Let it through, whole: in older Pythons a time limit for writing would be a task of its own."""
    wire.announced = True
    limit, connection.socket_timeout = connection.socket_timeout, None
    try:
        if pipeline is not None:
            return await original(pipeline, connection, *args, **kwargs)
        return await original(connection, *args, **kwargs)
    finally:
        wire.announced = False
        connection.socket_timeout = limit
