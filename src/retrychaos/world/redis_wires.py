"""What is known of the connections of a job to Redis servers, and what the commands mean that go through them.

The hooks on the clients (redis.py, redis_async.py) tell it what is about to be sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import redis

from retrychaos.model.errors import WorldError
from retrychaos.model.plan import ERROR, LOST_REPLY
from retrychaos.world.redis_clients import hang_up, lost, refused, session_of
from retrychaos.world.redis_commands import FIELD_EXPIRY, FIRST_KEY, SILENT, UNSEEN, Call, as_text, calls_in
from retrychaos.world.redis_server import RedisServer, Wire
from retrychaos.world.redis_servers import Servers
from retrychaos.world.resource import Stage

_WATCHING = frozenset({"WATCH", "EXEC"})
_SUSPICIOUS = FIELD_EXPIRY | UNSEEN.keys() | {"EVAL", "EVALSHA"}


class Wires:
    """All connections of a check."""

    def __init__(self, stage: Stage) -> None:
        self.servers = Servers(stage)
        self._stage = stage
        self._wires: weakref.WeakKeyDictionary[Any, Wire] = weakref.WeakKeyDictionary()
        self._publishing: set[Any] = set()
        """SHA of scripts that call PUBLISH."""
        self._spent: list[tuple[Any, int]] = []
        """What lets clients try again, and does not now; and how often it would."""

    # -- what a command means ----------------------------------------------------------------------------------------

    def is_no_step(self, connection: Any, wire: Wire, call: Call) -> bool:
        if call.name in SILENT:
            return True
        if wire.queued is not None and call.name != "EXEC":
            self.server(connection, wire)  # whose end_delivery tells if no EXEC follows
            return True
        if call.name != "EVALSHA" or not call.args:
            return False
        # One that is not loaded is only answered with NOSCRIPT, and tried again once it is. Later runs find it loaded,
        # and must not show a step less.
        server = self.server(connection, wire)
        if server.knows_script(call.args[0]):
            return False
        server.mark(wire.db, None, "string")  # in case another connection knows better than ours
        self._stage.touched(server)
        return True

    def note(self, connection: Any, wire: Wire, call: Call) -> None:
        """Follow the state that a server keeps for a connection."""
        wire.session = session_of(connection)
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

    def read(self, connection: Any, wire: Wire, packed: bytes) -> tuple[list[Call], list[Call]]:
        """The commands in bytes that are ready for the wire, and those of them that are part of a step."""
        calls = calls_in(packed)
        if calls is None:
            calls = [Call("(unreadable)", "", (packed,))]
        if wire.queued is not None:  # a MULTI went before, alone
            if all(call.name != "EXEC" for call in calls):
                self.server(connection, wire)
                calls, queued = [], calls
                wire.queued += queued
            else:
                calls = [Call("MULTI", "", ()), *wire.queued, *calls]
        return calls, [call for call in calls if call.name not in SILENT and call.name != "EXEC"]

    def _note_script(self, connection: Any, wire: Wire, call: Call) -> None:
        if call.sub == "FLUSH":
            self.server(connection, wire).forget_scripts()
        elif call.sub == "LOAD" and call.args and _publishes(call.args[0]):
            source = connection.encoder.encode(call.args[0])
            self._publishing.add(hashlib.sha1(source, usedforsecurity=False).hexdigest())

    def step(self, connection: Any, wire: Wire, calls: Sequence[Call], text: str) -> None:
        """Here is a boundary; after it, note what the commands are about to change."""
        server = self.server(connection, wire)
        self.renew()
        # Values are for people, and cost more than the rest of the step.
        detail = "; ".join(call.detail for call in calls) if self._stage.traced else text
        self._stage.step("redis", server, text, detail)
        self._stage.strike(ERROR, lambda: self._away(connection))
        self.expect(connection, wire, calls)

    def expect(self, connection: Any, wire: Wire, calls: Sequence[Call]) -> None:
        """Note what commands are about to change."""
        server = self.server(connection, wire)
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

    def lose(self, connection: Any) -> None:
        """The command was done, and the client may not get to know it."""
        self._stage.strike(LOST_REPLY, lambda: _broken(connection, lost(connection)))

    def _away(self, connection: Any) -> Exception:
        """Nothing was done, and the server is away for longer than the client tries again: else it would be as if
        nothing had happened, and a job that makes light of a failure would never see one."""
        retry = connection.retry
        if retry._retries > 0:  # who tries for ever does
            self._spent.append((retry, retry._retries))
            retry._retries = 0
        return _broken(connection, refused(connection))

    def renew(self) -> None:
        """Servers are there again."""
        while self._spent:
            retry, often = self._spent.pop()
            retry._retries = often

    def published(self, connection: Any, wire: Wire, calls: Sequence[Call]) -> None:
        for call in calls:
            if call.name in ("PUBLISH", "SPUBLISH") and len(call.args) == 2:
                channel, message = (as_text(bytes(connection.encoder.encode(arg))) for arg in call.args)
                self.server(connection, wire).publish((call.name, channel, message))

    # -- connections ---------------------------------------------------------------------------------------------------

    def of(self, connection: Any) -> Wire:
        wire = self._wires.get(connection)
        session = session_of(connection)
        if wire is None:
            wire = self._wires[connection] = Wire(connection.db or 0, session)
        elif wire.session is not session:  # it has been connected again: the server knows nothing of what was before
            wire.db, wire.session, wire.queued = connection.db or 0, session, None
        return wire

    def server(self, connection: Any, wire: Wire) -> RedisServer:
        if wire.server is None:
            try:
                wire.server = self.servers.of(connection)
            except WorldError as problem:  # must not look like a failure of the job
                self._stage.refuse(problem)
        wire.server.connections[connection] = wire
        wire.owner = self._stage.owner
        return wire.server

    def end_delivery(self) -> None:
        """Connections that never got further than their greeting belong to no server; they go as well."""
        for connection, wire in list(self._wires.items()):
            if wire.server is None:
                hang_up(connection)
        self._wires.clear()
        self.renew()
        self.servers.end_delivery()

    def leave(self, owner: object) -> None:
        for connection, wire in list(self._wires.items()):
            if wire.owner is owner:
                hang_up(connection)
                if wire.server is not None:
                    wire.server.connections.pop(connection, None)
                del self._wires[connection]


def _broken(connection: Any, error: Exception) -> Exception:
    """What the client raises; it also gives the connection up."""
    hang_up(connection)
    return error


def _publishes(script: Any) -> bool:
    return b"publish" in script.lower() if isinstance(script, bytes) else "publish" in str(script).lower()


def transaction_text(calls: Sequence[Call]) -> str:
    return " ".join(["MULTI", *(call.text for call in calls), "EXEC"])
