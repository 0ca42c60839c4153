"""Finding the Redis server behind a connection, and refusing those that a check must not touch.

Those are servers that hold somebody's data, and all that are more than one server.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
import weakref
from collections.abc import Callable
from typing import Any

from retrychaos.model.errors import WorldError
from retrychaos.world import redis_fake
from retrychaos.world.redis_line import Line, info
from retrychaos.world.redis_server import RedisServer, left
from retrychaos.world.resource import Stage


class Servers:
    """The servers of a check, found when a job first sends a command there."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._known: dict[Any, RedisServer] = {}
        """By address or server object; real ones by their run id, too."""
        self._born: weakref.WeakSet[Any] = weakref.WeakSet()
        self._unwatched = False
        self._met: set[str] = set()
        """Names of servers that the running delivery has used."""
        self._kept: list[Any] = []
        """Server objects that were seen; a free one could give its id to another."""

    def of(self, connection: Any) -> RedisServer:
        """The server that a connection goes to. Raises WorldError, or ends the delivery, if it cannot be checked."""
        fake = getattr(connection, "_server", None)
        place: Any = id(fake) if fake is not None else _address(connection)
        server = self._known.get(place)
        if server is None:
            line = Line(connection, self._stage)
            server = self._fake_server(line, fake) if fake is not None else self._real_server(line, connection)
            self._known[place] = server
        self._met.add(server.name)
        return server

    def _fake_server(self, line: Line, fake: Any) -> RedisServer:
        if not hasattr(fake, "script_cache"):
            raise WorldError(
                "This fakeredis is too old: each of its connections has scripts of its own, so a Redis lock would not"
                " work as it does on a server. Install a newer one (2.41 is known to do)."
            )
        others = sum(server.label.startswith("fakeredis") for server in self._known.values())
        label = f"fakeredis {others + 1}" if others else "fakeredis"
        self._kept.append(fake)
        name = f"redis:fake:{redis_fake.name_of(fake)}"
        if self._is_made(fake):
            # To the job it is a server that has been there all along: the first, second, ... that are made in a
            # delivery are the same in all of them, unless one has outlived an earlier delivery.
            name = next(name for name in map("redis:fake:made {}".format, itertools.count(1)) if name not in self._met)
        known = self._stage.find(name)
        if isinstance(known, RedisServer):
            known.move(line, fake)
            return known
        return self._adopt(name, label, line, fake)

    def _is_made(self, fake: Any) -> bool:
        """The running delivery has made it, or the client that it belongs to."""
        drawn = redis_fake.drawn_name(fake)
        if drawn is not None:
            return self._stage.drew(drawn)
        return redis_fake.name_of(fake) == f"{id(fake):x}" and (self._unwatched or fake in self._born)

    def watch_births(self) -> Callable[[], None]:
        """Note which servers of fakeredis are made while deliveries run. Returns what ends it."""
        fakeredis = sys.modules.get("fakeredis")
        if fakeredis is None:  # then all that there will be are made by the job
            self._unwatched = True
            return lambda: None
        kind = fakeredis.FakeServer
        original = kind.__init__

        @functools.wraps(original)
        def born(server: Any, *args: Any, **kwargs: Any) -> None:
            original(server, *args, **kwargs)
            if self._stage.running:
                self._born.add(server)

        kind.__init__ = born

        def stop() -> None:
            kind.__init__ = original

        return stop

    def end_delivery(self) -> None:
        self._met.clear()

    def _real_server(self, line: Line, connection: Any) -> RedisServer:
        address = _address(connection)
        path = getattr(connection, "path", None)
        self._stage.claim_address(path or (connection.host, connection.port))
        about = info(line, "server")
        mode = "sentinel" if "Sentinel" in type(connection).__name__ else about.get("redis_mode", "standalone")
        if mode != "standalone":
            line.hang_up()
            self._stage.refuse(
                WorldError(
                    f"redis {address} is used through {mode}, which is not supported: the check must see and rewind all"
                    " that a job touches, on one server. Point the client at a single scratch server in tests."
                )
            )
        run = about.get("run_id")
        if run in self._known:  # the same server by another address
            line.hang_up()
            return self._known[run]
        name = f"redis:{address}"
        if not self._is_ours(name, line):
            self._refuse_data(line, address)
        server = self._adopt(name, f"redis {address}", line, None)
        if run:
            self._known[run] = server
        return server

    def _is_ours(self, name: str, line: Line) -> bool:
        """Nothing is there but what this check, in another process, or the one before it has left."""
        if self._stage.expects(name):
            return True
        return name in left and RedisServer(self._stage, name, name, line).rows() <= left[name]

    def _refuse_data(self, line: Line, address: str) -> None:
        scratch = {address_of_url(url) for url in self._stage.options("scratch")}
        held = {} if address in scratch else info(line, "keyspace")
        if not held:
            return
        line.hang_up()
        url = f"unix://{address}" if address.startswith("/") else f"redis://{address}"
        where = "; ".join(f"{db} has {facts.split(',')[0].removeprefix('keys=')} keys" for db, facts in held.items())
        self._stage.refuse(
            WorldError(
                f"The Redis server at {address} is not empty ({where}). A check rewinds the whole server again and"
                " again, all databases of it, so it never touches one that may hold somebody's data; nothing was"
                f' changed. If this server is there for tests, say so: scratch=["{url}"].'
                " What it holds now is then kept, and put back after every run."
            )
        )

    def _adopt(self, name: str, label: str, line: Line, fake: Any) -> RedisServer:
        known = self._stage.find(name)
        if isinstance(known, RedisServer):
            line.hang_up()
            return known
        server = RedisServer(self._stage, name, label, line, fake)
        self._stage.adopt(server)
        return server


# -- addresses ---------------------------------------------------------------------------------------------------------

_LOCAL = frozenset(("localhost", "127.0.0.1", "::1", "0.0.0.0"))


def _address(connection: Any) -> str:
    path = getattr(connection, "path", None)
    return os.path.realpath(path) if path else _tcp_address(connection.host, connection.port)


def _tcp_address(host: Any, port: Any) -> str:
    """host:port, the same for all names of this machine."""
    return f"{'localhost' if str(host) in _LOCAL else host}:{port}"


def address_of_url(url: str) -> str:
    """The server that a URL names, without user, password and database."""
    match = re.fullmatch(r"(?P<scheme>[a-z+]+)://(?:[^@/]*@)?(?P<rest>[^?]*)(?:\?.*)?", url.strip())
    if match is None:
        return url
    if match["scheme"].endswith("unix"):
        path = match["rest"] if match["rest"].startswith("/") else f"/{match['rest']}"
        return re.sub(r"(?<=[^/])/\d+$", "", path)
    place = match["rest"].split("/")[0]
    host, _, port = place.rpartition(":") if re.search(r":\d+$", place) else (place, "", "6379")
    return _tcp_address(host.strip("[]") or "localhost", port)
