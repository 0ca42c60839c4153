"""The harness's own connection to a Redis server: to look and to put back, never to be seen by the hooks."""

from __future__ import annotations

import contextlib
import copy
import os
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import redis.connection
from redis.backoff import NoBackoff
from redis.retry import Retry

from retrychaos.model.errors import WorldError
from retrychaos.world.redis_clients import is_async, twin_of
from retrychaos.world.redis_commands import Command, Reply, as_text
from retrychaos.world.resource import Stage

_CHUNK = 1000


class Line:
    """The harness's own connection to a server: raw bytes, no callbacks, and hooks look away while it is used."""

    _all: ClassVar[weakref.WeakSet[Line]] = weakref.WeakSet()

    def __init__(self, connection: Any, stage: Stage) -> None:
        self._stage = stage
        self._connection = _own_connection(connection)
        self._selected: int | None = None
        Line._all.add(self)

    def ask(self, commands: Sequence[Command], db: int | None = None) -> list[Reply]:
        """All replies in one round trip; the exception in place of the reply of a command that failed."""
        quiet, self._stage.quiet = self._stage.quiet, True
        try:
            try:
                return self._ask(commands, db)
            except redis.ConnectionError:
                self.hang_up()  # the server may have closed it for being idle
                return self._ask(commands, db)
        except redis.RedisError as error:  # must not look like a failure of the job
            self.hang_up()
            self._stage.refuse(
                WorldError(
                    f"A Redis server that the job uses does not answer the check, which is lost without it: {error}"
                )
            )
        except Exception as error:  # fakeredis runs in this process, and raises what went wrong in it
            self.hang_up()
            if len(commands) == 1:
                return [error]
            return [reply for command in commands for reply in self.ask([command], db)]
        finally:
            self._stage.quiet = quiet

    def _ask(self, commands: Sequence[Command], db: int | None) -> list[Reply]:
        connection = self._connection
        if connection._sock is None:
            connection.connect()
            self._selected = 0
        if db is not None and db != self._selected:
            self._talk([("SELECT", db)])
            self._selected = db
        return [
            reply for start in range(0, len(commands), _CHUNK) for reply in self._talk(commands[start : start + _CHUNK])
        ]

    def _talk(self, commands: Sequence[Command]) -> list[Reply]:
        connection = self._connection
        connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        replies: list[Reply] = []
        for _ in commands:
            try:
                replies.append(connection.read_response())
            except redis.ResponseError as error:
                replies.append(error)
        return replies

    def hang_up(self) -> None:
        self._connection.disconnect()

    def drop(self) -> None:
        """In a forked child: give up the socket without a word, the parent goes on using it."""
        sock, self._connection._sock = self._connection._sock, None
        if sock is not None:
            sock.close()


def _drop_lines() -> None:
    for line in list(Line._all):
        with contextlib.suppress(Exception):
            line.drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_lines)


def _own_connection(connection: Any) -> Any:
    """A connection to where `connection` goes, with its credentials and TLS settings, but nothing of its manners.

    A copy, because a connection does not keep the arguments that it was made with.
    """
    own = twin_of(connection) if is_async(connection) else copy.copy(connection)
    own._sock = None
    own.pid = os.getpid()
    own.db = 0
    own.protocol = 2
    own.encoder = type(connection.encoder)("utf-8", "strict", False)
    own.set_parser(redis.connection.DefaultParser)
    own._command_packer = own._construct_command_packer(None)
    own._connect_callbacks = []
    own.client_name = own.driver_info = own.redis_connect_func = None
    own.health_check_interval = 0
    own.retry = Retry(NoBackoff(), 0)
    own.lib_name = own.lib_version = None  # before redis-py 7
    if hasattr(own, "_client_info"):  # fakeredis: what the server believes about its client
        own._client_info = type(own._client_info)(**{**own._client_info, "resp": 2})
    return own


def info(line: Line, section: str) -> dict[str, str]:
    reply = line.ask([("INFO", section)])[0]
    if isinstance(reply, Exception):
        raise WorldError(
            f"A Redis server does not answer INFO {section}: {reply}. Without it nobody can tell whether it is safe to"
            " rewind that server, so the check does not touch it."
        )
    lines = str(as_text(reply)).splitlines()
    return dict(each.split(":", 1) for each in lines if ":" in each and not each.startswith("#"))
