"""Streams for connections of redis.asyncio that answer at once: plain sockets, read in the thread of the delivery.

No event loop knows of them, so a command is one thing that happens between two turns of the tasks of a delivery, and
there is nothing to close when the loop is gone.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import weakref
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, ClassVar

_AT_ONCE = 0.002
"""Real seconds in which a server of this machine has sent what it has to say."""
_SOON = 1.0
"""Those in which it has answered."""
_SIZE = 65_536


class PromptReader(asyncio.StreamReader):
    """Reads from the socket itself."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self._sock = sock
        self.due = False
        """Something was asked, and not all of the answer has come yet."""
        self._owed = 0
        """How often something was sent for which no line of an answer has come."""
        self.idle: Callable[[], Awaitable[None]] | None = None
        """Set where the server speaks unasked: called as long as it says nothing."""

    def asked(self) -> None:
        """Something was sent."""
        self.due = True
        self._owed += 1

    async def _wait_for_data(self, func_name: str) -> None:
        # Several commands may have been sent, whose replies do not come together: nobody else has his turn in between.
        while not (self.due and self.idle is None) and not self.ready(_SOON if self.due else _AT_ONCE):
            # Older versions of redis-py look whether there is something, with a time limit of zero.
            await (asyncio.sleep(0) if self.idle is None else self.idle())
        data = self._sock.recv(_SIZE)
        self._owed = max(0, self._owed - max(1, data.count(b"\r\n")))
        self.due = bool(data) and (self._owed > 0 or not data.endswith(b"\r\n"))
        if data:
            self.feed_data(data)
        else:
            self.feed_eof()

    def ready(self, patience: float = _AT_ONCE) -> bool:
        """Something is there to be read, or comes within so many real seconds."""
        pending = self._sock.pending() if isinstance(self._sock, ssl.SSLSocket) else 0
        return bool(self._buffer or pending or select.select([self._sock], [], [], patience)[0])  # type: ignore[attr-defined]


class PromptWriter:
    """Writes to the socket itself. It is its own transport."""

    _all: ClassVar[weakref.WeakSet[PromptWriter]] = weakref.WeakSet()

    def __init__(self, sock: socket.socket, reader: PromptReader) -> None:
        self._sock = sock
        self._reader = reader
        self.transport = self
        PromptWriter._all.add(self)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "socket":
            return self._sock
        if name == "peername" and not self.is_closing():
            return self._sock.getpeername()
        return default

    def write(self, data: Any) -> None:
        self._reader.asked()
        self._sock.sendall(data)

    def writelines(self, data: Iterable[Any]) -> None:
        self.write(b"".join(data))

    async def drain(self) -> None:
        """Everything is sent."""

    def is_closing(self) -> bool:
        return self._sock.fileno() < 0

    def close(self) -> None:
        self._sock.close()

    async def wait_closed(self) -> None:
        """It is closed."""


def connected(connection: Any, path: str | None, host: str, port: int, context: Any, name: str | None) -> Any:
    """A reader and a writer for a connection that redis.asyncio opens."""
    if path is not None:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(connection.socket_connect_timeout)
    else:
        sock = socket.create_connection((host, port), connection.socket_connect_timeout)
    try:
        if path is not None:
            sock.connect(path)
        if context is not None:
            sock = context.wrap_socket(sock, server_hostname=name or host)
        sock.settimeout(connection.socket_timeout)
        reader = PromptReader(sock)
        return reader, PromptWriter(sock, reader)
    except BaseException:
        sock.close()
        raise


def close_all() -> None:
    """Nothing of a process that is gone stays open."""
    for writer in list(PromptWriter._all):
        writer.close()
    PromptWriter._all.clear()
