"""Hooks on redis-py's synchronous clients: every command that a job sends to a Redis server is a step.

Each passes `AbstractConnection`, so that is where they are seen, whatever client, pipeline or lock it comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import redis.client
import redis.connection

from retrychaos.world.redis_async import AsyncClients
from retrychaos.world.redis_commands import Command, blocking_time, call_of, impatient
from retrychaos.world.redis_server import Wire
from retrychaos.world.redis_wires import Wires, transaction_text
from retrychaos.world.resource import Stage


def _nothing() -> None:
    pass


class RedisSource:
    """Sees every command of redis-py's clients; those of asyncio are in redis_async.py."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._wires = Wires(stage)
        self._async = AsyncClients(stage, self._wires)
        self._patched: list[tuple[Any, str, Any]] = []
        self._stop_births: Callable[[], None] = _nothing
        self._faults = False
        """Replies may get lost."""

    def install(self) -> None:
        if self._patched:
            return
        self._faults = bool(self._stage.options("faults"))
        connection, pipeline = redis.connection.AbstractConnection, redis.client.Pipeline
        self._patch(connection, "send_command", self._send_command)
        self._patch(connection, "send_packed_command", self._send_packed_command)
        self._patch(pipeline, "_execute_transaction", self._execute_transaction)
        self._patch(pipeline, "_execute_pipeline", self._execute_pipeline)
        self._stop_births = self._wires.servers.watch_births()
        self._async.install(self._patch)

    def part(self, blobs: Mapping[str, Any], folder: str) -> None:
        """fakeredis is in the memory of the process, and other servers are not private."""

    def end_delivery(self) -> None:
        self._wires.end_delivery()
        self._async.end_delivery()

    def cancel(self, owner: object) -> None:
        """Nothing waits anywhere but here."""

    def leave(self, owner: object) -> None:
        self._wires.leave(owner)

    def uninstall(self) -> None:
        self._stop_births()
        self._stop_births = _nothing
        while self._patched:
            owner, name, original = self._patched.pop()
            setattr(owner, name, original)
        self._async.uninstall()
        self._wires.renew()

    def _patch(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = owner.__dict__[name]
        self._patched.append((owner, name, original))
        setattr(owner, name, make(original))

    # -- the hooks ---------------------------------------------------------------------------------------------------

    def _send_command(self, original: Any) -> Any:
        def send_command(connection: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._stage.running or (wire := self._wires.of(connection)).announced:
                return original(connection, *args, **kwargs)
            call = call_of(args)
            if self._wires.is_no_step(connection, wire, call):
                sent = _send(wire, original, connection, *args, **kwargs)
                self._wires.note(connection, wire, call)
                return sent
            if call.name == "EXEC":
                return self._exec(connection, wire, original, args, kwargs)
            wait = blocking_time(call)
            self._wires.step(connection, wire, [call], call.text)
            hasty = args if wait is None else impatient(call)
            sent = _send(wire, original, connection, *hasty, **kwargs)
            self._wires.published(connection, wire, [call])
            if self._faults and wait is None:
                _on_reply(connection, lambda _: self._wires.lose(connection))
            if self._stage.concurrent:

                def again() -> None:
                    self._wires.expect(connection, wire, [call])
                    _send(wire, original, connection, *hasty, **kwargs)

                self._observe(connection, wait, None if wait is None else again)
            elif wait is not None:
                seconds, server = wait or None, self._wires.server(connection, wire)
                # If nothing came, the whole time would have passed, as nobody else is running.
                _on_reply(
                    connection,
                    lambda reply: None if reply else self._stage.sleep(seconds),
                    lambda: server.hurry(lambda: bool(connection.can_read(timeout=0.002))),
                )
            return sent

        return send_command

    def _send_packed_command(self, original: Any) -> Any:
        def send_packed_command(connection: Any, command: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._stage.running or (wire := self._wires.of(connection)).announced:
                return original(connection, command, *args, **kwargs)
            pieces = [command] if isinstance(command, (str, bytes)) else list(command)
            packed = b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces)
            calls, steps = self._wires.read(connection, wire, packed)
            if steps:
                self._wires.step(connection, wire, steps, " ".join(call.text for call in calls))
            sent = _send(wire, original, connection, pieces, *args, **kwargs)
            self._wires.published(connection, wire, steps)
            for call in calls:
                self._wires.note(connection, wire, call)
            return sent

        return send_packed_command

    def _execute_transaction(self, original: Any) -> Any:
        def _execute_transaction(pipeline: Any, connection: Any, commands: Any, raise_on_error: bool) -> Any:
            if not self._stage.running or (wire := self._wires.of(connection)).announced:
                return original(pipeline, connection, commands, raise_on_error)
            calls = [call_of(args) for args, _ in commands]
            self._wires.step(connection, wire, calls, transaction_text(calls))
            wire.watching = False
            responses = _send(wire, original, pipeline, connection, commands, False)
            done = [call for call, reply in zip(calls, responses, strict=True) if not isinstance(reply, Exception)]
            self._wires.published(connection, wire, done)
            self._wires.lose(connection)
            self._stage.observed(responses)
            if raise_on_error:
                pipeline.raise_first_error(commands, responses)
            return responses

        return _execute_transaction

    def _execute_pipeline(self, original: Any) -> Any:
        def _execute_pipeline(pipeline: Any, connection: Any, commands: Any, raise_on_error: bool) -> Any:
            if not self._stage.running or (wire := self._wires.of(connection)).announced:
                return original(pipeline, connection, commands, raise_on_error)
            responses = []
            for command in commands:  # a process can die between any two of them
                call = call_of(command[0])
                silent = self._wires.is_no_step(connection, wire, call)
                if not silent:
                    self._wires.step(connection, wire, [call], call.text)
                reply = _send(wire, original, pipeline, connection, [command], False)[0]
                responses.append(reply)
                if silent:
                    self._wires.note(connection, wire, call)
                elif not isinstance(reply, Exception):
                    self._wires.published(connection, wire, [call])
                if not silent:
                    self._wires.lose(connection)
                    self._stage.observed(reply)
            if raise_on_error:
                pipeline.raise_first_error(commands, responses)
            return responses

        return _execute_pipeline

    def _observe(self, connection: Any, wait: float | None, again: Callable[[], Any] | None) -> None:
        """Deliveries overlap: what this one is told is what it knows, and a command that waits waits for the others."""
        read_response = connection.read_response

        def once(*args: Any, **kwargs: Any) -> Any:
            connection.__dict__.pop("read_response", None)
            try:
                reply = read_response(*args, **kwargs)
                while again is not None and not reply and self._stage.blocked():
                    again()
                    reply = read_response(*args, **kwargs)
            except redis.RedisError as error:
                self._stage.observed("error", type(error).__name__, str(error))
                raise
            if again is not None and not reply:
                self._stage.sleep(wait or None)
            self._stage.observed(reply)
            return reply

        connection.read_response = once

    def _exec(self, connection: Any, wire: Wire, original: Any, args: Command, kwargs: dict[str, Any]) -> Any:
        """An EXEC that was sent by itself."""
        calls, wire.queued, wire.watching = wire.queued or [], None, False
        self._wires.step(connection, wire, calls, transaction_text(calls))
        sent = _send(wire, original, connection, *args, **kwargs)
        _on_reply(
            connection, lambda reply: self._wires.published(connection, wire, calls) if reply is not None else None
        )
        return sent


def _send(wire: Wire, original: Any, *args: Any, **kwargs: Any) -> Any:
    wire.announced = True
    try:
        return original(*args, **kwargs)
    finally:
        wire.announced = False


def _on_reply(connection: Any, then: Callable[[Any], None], first: Callable[[], None] | None = None) -> None:
    """Call `first` before and `then` with the next reply that is read. On the instance: other commands pay nothing."""
    read_response = connection.read_response

    def once(*args: Any, **kwargs: Any) -> Any:
        connection.__dict__.pop("read_response", None)
        if first is not None:
            first()
        reply = read_response(*args, **kwargs)
        then(reply)
        return reply

    connection.read_response = once
