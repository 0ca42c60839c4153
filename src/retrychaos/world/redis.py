"""Hooks on redis-py's synchronous clients: every command that a job sends to a Redis server is a step.

Each passes `AbstractConnection`, so that is where they are seen, whatever client, pipeline or lock it comes from.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis.asyncio.connection
import redis.client
import redis.connection

from retrychaos.model.errors import WorldError
from retrychaos.model.plan import ERROR, LOST_REPLY
from retrychaos.world.redis_commands import (
    FIELD_EXPIRY,
    FIRST_KEY,
    SILENT,
    UNSEEN,
    Call,
    Command,
    as_text,
    blocking_time,
    call_of,
    calls_in,
    impatient,
)
from retrychaos.world.redis_server import RedisServer, Wire, hang_up
from retrychaos.world.redis_servers import Servers
from retrychaos.world.resource import Stage

_WATCHING = frozenset({"WATCH", "EXEC"})
_SUSPICIOUS = FIELD_EXPIRY | UNSEEN.keys() | {"EVAL", "EVALSHA"}


def _nothing() -> None:
    pass


class RedisSource:
    """Sees every command of redis-py's synchronous clients."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._wires: weakref.WeakKeyDictionary[Any, Wire] = weakref.WeakKeyDictionary()
        self._servers = Servers(stage)
        self._publishing: set[Any] = set()
        """SHA of scripts that call PUBLISH."""
        self._patched: list[tuple[type, str, Any]] = []
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
        self._stop_births = self._servers.watch_births()
        self._patch(redis.asyncio.connection.AbstractConnection, "send_packed_command", self._refuse_async)

    def part(self, blobs: Mapping[str, Any], folder: str) -> None:
        """fakeredis is in the memory of the process, and other servers are not private."""

    def end_delivery(self) -> None:
        """Connections that never got further than their greeting belong to no server; they go as well."""
        for connection, wire in list(self._wires.items()):
            if wire.server is None:
                hang_up(connection)
        self._wires.clear()
        self._servers.end_delivery()

    def cancel(self, owner: object) -> None:
        """Nothing waits anywhere but here."""

    def leave(self, owner: object) -> None:
        for connection, wire in list(self._wires.items()):
            if wire.owner is owner:
                hang_up(connection)
                if wire.server is not None:
                    wire.server.connections.pop(connection, None)
                del self._wires[connection]

    def uninstall(self) -> None:
        self._stop_births()
        self._stop_births = _nothing
        while self._patched:
            owner, name, original = self._patched.pop()
            setattr(owner, name, original)

    def _patch(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        original = owner.__dict__[name]
        self._patched.append((owner, name, original))
        setattr(owner, name, make(original))

    # -- the hooks ---------------------------------------------------------------------------------------------------

    def _send_command(self, original: Any) -> Any:
        def send_command(connection: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._stage.running or (wire := self._wire(connection)).announced:
                return original(connection, *args, **kwargs)
            call = call_of(args)
            if self._is_no_step(connection, wire, call):
                sent = _send(wire, original, connection, *args, **kwargs)
                self._note(connection, wire, call)
                return sent
            if call.name == "EXEC":
                return self._exec(connection, wire, original, args, kwargs)
            wait = blocking_time(call)
            self._step(connection, wire, [call], call.text)
            hasty = args if wait is None else impatient(call)
            sent = _send(wire, original, connection, *hasty, **kwargs)
            self._published(connection, wire, [call])
            if self._faults and wait is None:
                _on_reply(connection, lambda _: self._lose(connection))
            if self._stage.concurrent:

                def again() -> None:
                    self._expect(connection, wire, [call])
                    _send(wire, original, connection, *hasty, **kwargs)

                self._observe(connection, wait, None if wait is None else again)
            elif wait is not None:
                seconds, server = wait or None, self._server(connection, wire)
                # If nothing came, the whole time would have passed, as nobody else is running.
                _on_reply(
                    connection,
                    lambda reply: None if reply else self._stage.sleep(seconds),
                    lambda: server.hurry(connection),
                )
            return sent

        return send_command

    def _send_packed_command(self, original: Any) -> Any:
        def send_packed_command(connection: Any, command: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._stage.running or (wire := self._wire(connection)).announced:
                return original(connection, command, *args, **kwargs)
            pieces = [command] if isinstance(command, (str, bytes)) else list(command)
            packed = b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces)
            calls = calls_in(packed)
            if calls is None:
                calls = [Call("(unreadable)", "", (packed,))]
            if wire.queued is not None:  # a MULTI went before, alone
                if all(call.name != "EXEC" for call in calls):
                    self._server(connection, wire)
                    calls, queued = [], calls
                    wire.queued += queued
                else:
                    calls = [Call("MULTI", "", ()), *wire.queued, *calls]
            steps = [call for call in calls if call.name not in SILENT and call.name != "EXEC"]
            if steps:
                self._step(connection, wire, steps, " ".join(call.text for call in calls))
            sent = _send(wire, original, connection, pieces, *args, **kwargs)
            self._published(connection, wire, steps)
            for call in calls:
                self._note(connection, wire, call)
            return sent

        return send_packed_command

    def _execute_transaction(self, original: Any) -> Any:
        def _execute_transaction(pipeline: Any, connection: Any, commands: Any, raise_on_error: bool) -> Any:
            if not self._stage.running or (wire := self._wire(connection)).announced:
                return original(pipeline, connection, commands, raise_on_error)
            calls = [call_of(args) for args, _ in commands]
            self._step(connection, wire, calls, _transaction_text(calls))
            wire.watching = False
            responses = _send(wire, original, pipeline, connection, commands, False)
            done = [call for call, reply in zip(calls, responses, strict=True) if not isinstance(reply, Exception)]
            self._published(connection, wire, done)
            self._lose(connection)
            self._stage.observed(responses)
            if raise_on_error:
                pipeline.raise_first_error(commands, responses)
            return responses

        return _execute_transaction

    def _execute_pipeline(self, original: Any) -> Any:
        def _execute_pipeline(pipeline: Any, connection: Any, commands: Any, raise_on_error: bool) -> Any:
            if not self._stage.running or (wire := self._wire(connection)).announced:
                return original(pipeline, connection, commands, raise_on_error)
            responses = []
            for command in commands:  # a process can die between any two of them
                call = call_of(command[0])
                silent = self._is_no_step(connection, wire, call)
                if not silent:
                    self._step(connection, wire, [call], call.text)
                reply = _send(wire, original, pipeline, connection, [command], False)[0]
                responses.append(reply)
                if silent:
                    self._note(connection, wire, call)
                elif not isinstance(reply, Exception):
                    self._published(connection, wire, [call])
                if not silent:
                    self._lose(connection)
                    self._stage.observed(reply)
            if raise_on_error:
                pipeline.raise_first_error(commands, responses)
            return responses

        return _execute_pipeline

    def _lose(self, connection: Any) -> None:
        """The command was done, and the client may not get to know it."""
        self._stage.strike(LOST_REPLY, lambda: _broken(connection, redis.TimeoutError("Timeout reading from socket")))

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

    def _refuse_async(self, original: Any) -> Any:
        async def send_packed_command(connection: Any, *args: Any, **kwargs: Any) -> Any:
            if self._stage.running:
                self._stage.refuse(
                    WorldError(
                        "The job used redis.asyncio, which is not supported: its commands cannot be made steps, so a"
                        " verdict would not cover them. Use redis-py's synchronous client in the job under test."
                    )
                )
            return await original(connection, *args, **kwargs)

        return send_packed_command

    # -- what a command means ----------------------------------------------------------------------------------------

    def _is_no_step(self, connection: Any, wire: Wire, call: Call) -> bool:
        if call.name in SILENT:
            return True
        if wire.queued is not None and call.name != "EXEC":
            self._server(connection, wire)  # whose end_delivery tells if no EXEC follows
            return True
        if call.name != "EVALSHA" or not call.args:
            return False
        # One that is not loaded is only answered with NOSCRIPT, and tried again once it is. Later runs find it loaded,
        # and must not show a step less.
        server = self._server(connection, wire)
        if server.knows_script(call.args[0]):
            return False
        server.mark(wire.db, None, "string")  # in case another connection knows better than ours
        self._stage.touched(server)
        return True

    def _note(self, connection: Any, wire: Wire, call: Call) -> None:
        """Follow the state that a server keeps for a connection."""
        wire.sock = connection._sock
        if call.name == "SELECT":
            with contextlib.suppress(ValueError):
                wire.db = int(call.args[0])
        elif call.name == "RESET":
            wire.db, wire.queued = 0, None
        elif call.name == "MULTI":
            wire.queued = []
        elif call.name in ("DISCARD", "EXEC"):
            wire.queued, wire.watching = None, False
        elif call.name == "UNWATCH":
            wire.watching = False
        elif call.name == "SCRIPT":
            self._note_script(connection, wire, call)
        elif wire.queued is not None:
            wire.queued.append(call)

    def _note_script(self, connection: Any, wire: Wire, call: Call) -> None:
        if call.sub == "FLUSH":
            self._server(connection, wire).forget_scripts()
        elif call.sub == "LOAD" and call.args and _publishes(call.args[0]):
            source = connection.encoder.encode(call.args[0])
            self._publishing.add(hashlib.sha1(source, usedforsecurity=False).hexdigest())

    def _exec(self, connection: Any, wire: Wire, original: Any, args: Command, kwargs: dict[str, Any]) -> Any:
        """An EXEC that was sent by itself."""
        calls, wire.queued, wire.watching = wire.queued or [], None, False
        self._step(connection, wire, calls, _transaction_text(calls))
        sent = _send(wire, original, connection, *args, **kwargs)
        _on_reply(connection, lambda reply: self._published(connection, wire, calls) if reply is not None else None)
        return sent

    def _step(self, connection: Any, wire: Wire, calls: Sequence[Call], text: str) -> None:
        """Here is a boundary; after it, note what the commands are about to change."""
        server = self._server(connection, wire)
        # Values are for people, and cost more than the rest of the step.
        detail = "; ".join(call.detail for call in calls) if self._stage.traced else text
        self._stage.step("redis", server, text, detail)
        self._stage.strike(ERROR, lambda: _broken(connection, redis.ConnectionError("Connection refused.")))
        self._expect(connection, wire, calls)

    def _expect(self, connection: Any, wire: Wire, calls: Sequence[Call]) -> None:
        """Note what commands are about to change."""
        server = self._server(connection, wire)
        for call in calls:
            if call.name in _WATCHING:
                wire.watching = call.name == "WATCH"
            if call.name in _SUSPICIOUS:
                self._suspect(server, call)
            keys = call.keys()
            if keys == ():
                continue
            if keys is not None:
                encode = connection.encoder.encode
                with contextlib.suppress(redis.DataError):  # the command will fail for the same reason
                    server.mark(wire.db, [bytes(encode(key)) for key in keys], FIRST_KEY.get(call.name, "string"))
            else:
                server.mark(wire.db, None, "string")
            self._stage.touched(server)

    def _suspect(self, server: RedisServer, call: Call) -> None:
        if call.name in FIELD_EXPIRY:
            self._stage.doubt(
                f"{call.text} lets fields of a hash expire: {server.label} is compared without these expiries."
            )
        elif call.sub in UNSEEN.get(call.name, ()):
            self._stage.doubt(f"{call.text} changes {server.label} itself, which is neither compared nor put back.")
        elif call.args and (call.args[0] in self._publishing or _publishes(call.args[0])):
            self._stage.doubt(f"a Lua script on {server.label} calls PUBLISH: what it publishes is not in the ledger.")

    def _published(self, connection: Any, wire: Wire, calls: Sequence[Call]) -> None:
        for call in calls:
            if call.name in ("PUBLISH", "SPUBLISH") and len(call.args) == 2:
                channel, message = (as_text(bytes(connection.encoder.encode(arg))) for arg in call.args)
                self._server(connection, wire).publish((call.name, channel, message))

    # -- connections ---------------------------------------------------------------------------------------------------

    def _wire(self, connection: Any) -> Wire:
        wire = self._wires.get(connection)
        sock = connection._sock
        if wire is None:
            wire = self._wires[connection] = Wire(connection.db or 0, sock)
        elif wire.sock is not sock:  # it has been connected again: the server knows nothing of what was before
            wire.db, wire.sock, wire.queued = connection.db or 0, sock, None
        return wire

    def _server(self, connection: Any, wire: Wire) -> RedisServer:
        if wire.server is None:
            try:
                wire.server = self._servers.of(connection)
            except WorldError as problem:  # must not look like a failure of the job
                self._stage.refuse(problem)
        wire.server.connections[connection] = wire
        wire.owner = self._stage.owner
        return wire.server


def _broken(connection: Any, error: Exception) -> Exception:
    """What the client raises; it also gives the connection up."""
    connection.disconnect()
    return error


def _send(wire: Wire, original: Any, *args: Any, **kwargs: Any) -> Any:
    wire.announced = True
    try:
        return original(*args, **kwargs)
    finally:
        wire.announced = False


def _transaction_text(calls: Sequence[Call]) -> str:
    return " ".join(["MULTI", *(call.text for call in calls), "EXEC"])


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


def _publishes(script: Any) -> bool:
    return b"publish" in script.lower() if isinstance(script, bytes) else "publish" in str(script).lower()
