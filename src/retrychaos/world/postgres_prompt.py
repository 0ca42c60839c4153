"""Connections of asyncpg that answer at once: plain sockets, read in the thread of the delivery.

No event loop knows of them, so a statement is one thing that happens between two turns of the tasks of a delivery, and
nothing is left to be closed when the loop is gone. The harness asks on them past asyncpg and its codecs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from retrychaos.world.coroutines import at_once, driven
from retrychaos.world.postgres_forks import is_of_parent
from retrychaos.world.postgres_wire import (
    ALL_GONE,
    FAILED,
    IDLE,
    IN_TRANSACTION,
    TERMINATE,
    UNKNOWN,
    Refused,
    Text,
    cancel_request,
    greeting_of,
    query,
    rows_of,
    state_after,
    until_ready,
)

_perf_counter = time.perf_counter
_SIZE = 262_144
_SLICE = 0.1
"""Seconds to wait at once; between them a delivery can be ended."""
_BRIEF = 5.0
"""Seconds for a statement that was interrupted to end, and for a server to hang up."""
_TO_CONNECT = 60.0


class Reply(asyncio.Future[Any]):
    """What a coroutine of asyncpg waits for on one of these connections."""


class Prompt(asyncio.Transport):
    """The transport below a connection of asyncpg. It stands for that connection where the harness looks at it.

    how: with what asyncpg's `_connect_addr` opens another one like it. greeting: of the server, if it has said that
    already. spares: where its session goes when it is closed.
    """

    def __init__(
        self,
        sock: socket.socket,
        protocol: Any,
        how: Mapping[str, Any],
        greeting: bytes = b"",
        spares: Spares | None = None,
    ) -> None:
        sock.setblocking(False)
        super().__init__({"socket": sock, "ssl_object": sock if isinstance(sock, ssl.SSLSocket) else None})
        self.how = how
        self.connection: Any = None
        """That of asyncpg, which complains if it is dropped before it is closed."""
        self.limit: float | None = None
        """Seconds after which asyncpg gives up the statement that runs."""
        self.announced: tuple[str, int] | None = None
        """What was just prepared, in which step of all."""
        self._sock = sock
        self._early = greeting
        """Came while something was sent."""
        self._is_known = bool(greeting)
        self._is_leaving = self._is_over = False
        self._greeting = b""
        self._spares = spares
        self._end = b""
        self._listeners: list[Callable[[Any], object]] = []
        self.set_protocol(protocol)

    # -- Transport ----------------------------------------------------------------------------------------------------

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol
        protocol.prompt = self  # the way back, for the hooks

    def get_protocol(self) -> Any:
        return self._protocol

    def write(self, data: Any) -> None:
        if self._is_known:  # the server need not be asked for what it has said
            self._is_known = False
            return
        if data == TERMINATE:
            self._is_leaving = True  # asyncpg will wait for the end, or close this itself
        else:
            self._send(data)

    def _send(self, data: Any) -> None:
        rest = memoryview(data)
        self._end = b""
        while rest:
            try:
                rest = rest[self._sock.send(rest) :]
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                # The server may wait for us to read what it has sent before it reads any further.
                if until_ready(self._sock.fileno(), True, _SLICE):
                    with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError, OSError):
                        self._early += self._sock.recv(_SIZE)
            except OSError:
                return  # who reads gets to know why

    def writelines(self, data: Iterable[Any]) -> None:
        self.write(b"".join(data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is kept back."""

    def pause_reading(self) -> None:
        """Nothing is read unless somebody waits for it."""

    def resume_reading(self) -> None:
        """See pause_reading."""

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        """The server has let go of everything before this returns, if it listens."""
        if self.closed:
            return
        if self.standing in (IDLE, IN_TRANSACTION, FAILED) and not (self._spares and self._spares.keep(self)):
            self._send(TERMINATE)
            until = _perf_counter() + _BRIEF
            while self._read(max(0.0, until - _perf_counter())):
                pass
        self._hang_up()

    def end(self) -> None:
        """Its process is gone."""
        with contextlib.suppress(Exception):  # whoever waits for it may have a loop that is gone, too
            self.close()

    def give_away(self) -> tuple[socket.socket, bytes]:
        """The socket, and how the server has greeted."""
        return socket.socket(fileno=self._sock.detach()), greeting_of(self._greeting)

    def abort(self) -> None:
        self.close()

    # -- answers ------------------------------------------------------------------------------------------------------

    def receive(self, patience: float | None = None) -> None:
        """Hand over what the server says next. patience: seconds after which TimeoutError is raised; None: never."""
        if self._is_leaving:
            self.close()
            return
        data = self._read(patience)
        if data is None:
            raise TimeoutError
        if data:
            if self.connection is None:
                self._greeting += data
            self._protocol.data_received(data)
        else:
            self._hang_up()

    def await_reply(self, reply: Reply) -> None:
        try:
            while not reply.done():
                self.receive()
        except (KeyboardInterrupt, SystemExit):
            with contextlib.suppress(Exception):  # else the connection would be of no use any more
                self.cancel()
                while not reply.done():
                    self.receive(_BRIEF)
                reply.exception()
            raise

    def ask(self, sql: str, patience: float) -> list[Text]:
        """The rows of the last of several statements, as text. Raises Refused, or TimeoutError."""
        self._send(query(sql))
        answer = b""
        while (rows := rows_of(answer)) is None:
            data = self._read(patience)
            if data is None:
                raise TimeoutError
            if not data:
                self._hang_up()
                raise Refused("the server has closed the connection", None)
            answer += data
        return rows

    def _read(self, patience: float | None) -> bytes | None:
        """What has come; empty: the server has hung up; None: nothing within so many seconds."""
        data, self._early = self._early, b""
        until = None if patience is None else _perf_counter() + patience
        while not data:
            try:
                data = self._sock.recv(_SIZE)
                if not data:
                    return data
            except (BlockingIOError, ssl.SSLWantReadError):
                left = _SLICE if until is None else min(_SLICE, until - _perf_counter())
                if left <= 0:
                    return None
                until_ready(self._sock.fileno(), False, left)
            except OSError:
                return b""
        self._end = (self._end + data[-6:])[-6:]
        return data

    def _hang_up(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._sock.close()
            self._protocol.connection_lost(None)

    # -- what the harness wants to know -------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._sock.fileno() < 0

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def standing(self) -> int:
        return UNKNOWN if self.closed else state_after(self._end)

    @property
    def info(self) -> Any:
        """What libpq's drivers say of a connection."""
        address, parameters = self.how["addr"], self.how["params"]
        if isinstance(address, str):
            host, port = os.path.dirname(address), address.rpartition(".")[2]
        else:
            host, port = address
        return SimpleNamespace(
            host=host,
            port=int(port),
            dbname=parameters.database or parameters.user,
            user=parameters.user,
            transaction_status=self.standing,
            backend_pid=self._protocol.get_server_pid(),
        )

    def cancel(self) -> None:
        """End the statement that runs."""
        pid, secret = self._protocol.backend_pid, self._protocol.backend_secret
        with _connected(self.how["addr"]) as sock:
            sock.sendall(cancel_request(pid, secret))
            sock.recv(1)

    def say(self, command: str) -> None:
        """Let asyncpg send a command. Raises what that makes of the answer."""
        at_once(prompt(self._protocol.query(command, None), self))

    def add_notice_handler(self, handler: Callable[[Any], object]) -> None:
        """It gets objects with a `source_function`."""
        self._listeners.append(handler)

    def notice(self, fields: Mapping[str, str]) -> None:
        for handler in self._listeners:
            handler(SimpleNamespace(source_function=fields.get("R")))


class Spares:
    """Sessions that are as new, for connections that are opened in the same way: to connect takes long, and a pool of
    asyncpg opens ten of them by itself."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, list[tuple[socket.socket, bytes]]] = {}
        self._is_over = False

    def keep(self, raw: Prompt) -> bool:
        """Take over the session of a connection, which is closed. False if it could not be cleared."""
        key = _key_of(raw.how)
        if key is None or self._is_over:
            return False
        try:
            raw.ask(ALL_GONE, _BRIEF)
        except (Refused, TimeoutError):
            return False
        if raw.standing != IDLE:
            return False
        self._kept.setdefault(key, []).append(raw.give_away())
        return True

    def take(self, how: Mapping[str, Any]) -> tuple[socket.socket, bytes] | None:
        kept = self._kept.get(_key_of(how), [])
        while kept:
            sock, greeting = kept.pop()
            if not is_of_parent(sock) and not until_ready(sock.fileno(), False, 0):
                return sock, greeting
            sock.close()  # the server has ended it, or it is that of another process
        return None

    def close(self) -> None:
        self._is_over = True
        for kept in self._kept.values():
            for sock, _ in kept:
                with contextlib.suppress(OSError):
                    if not is_of_parent(sock):
                        sock.send(TERMINATE)
                sock.close()
        self._kept.clear()


def _key_of(how: Mapping[str, Any]) -> Hashable:
    """What connections have in common that are opened in the same way; None if that cannot be told."""
    known = how["params"]
    if callable(known.password):
        return None
    settings = tuple(sorted((known.server_settings or {}).items()))
    return how["addr"], known.user, known.password, known.database, settings


# -- connecting --------------------------------------------------------------------------------------------------------


class PromptLoop:
    """What asyncpg opens a connection in: for everything else it is the loop that it is given.

    loop: None where none runs and nothing but a connection is wanted. patience: seconds in which not a byte comes from
    the server before it is given up. spares: sessions that may be had instead of new ones.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None,
        how: Mapping[str, Any],
        patience: float = _TO_CONNECT,
        spares: Spares | None = None,
    ) -> None:
        self._loop = loop
        self._how = how
        self._patience = patience
        self._spares = spares
        self._newest: Prompt | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def create_future(self) -> Reply:
        return Reply(loop=self._loop or self)  # type: ignore[arg-type]  # all that a future wants of one is below

    def get_debug(self) -> bool:
        return self._loop is not None and self._loop.get_debug()

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        if self._loop is not None:
            return self._loop.call_soon(callback, *args, context=context)
        return None  # it would look after a time limit, and there is none

    async def create_connection(self, factory: Callable[[], Any], host: str, port: int, *, ssl: Any = None) -> Any:
        if ssl is None:
            return self._begun((host, port), factory())
        sock = _connected((host, port))
        try:
            self._newest = Prompt(ssl.wrap_socket(sock, server_hostname=host), factory(), self._how)
        except BaseException:
            sock.close()
            raise
        self._newest.get_protocol().connection_made(self._newest)
        return self._newest, self._newest.get_protocol()

    async def create_unix_connection(self, factory: Callable[[], Any], path: str) -> Any:
        return self._begun(path, factory())

    def _begun(self, address: Any, protocol: Any) -> tuple[Prompt, Any]:
        spares = self._spares if hasattr(protocol, "get_server_pid") else None  # not while TLS is negotiated
        spare = spares.take(self._how) if spares else None
        sock, greeting = spare or (_connected(address), b"")
        self._newest = Prompt(sock, protocol, self._how, greeting, spares)
        protocol.connection_made(self._newest)
        return self._newest, protocol

    async def start_tls(self, transport: Prompt, protocol: Any, context: Any, *, server_hostname: str) -> Prompt:
        plain = transport._sock
        plain.settimeout(_TO_CONNECT)
        self._newest = Prompt(context.wrap_socket(plain, server_hostname=server_hostname), protocol, self._how)
        return self._newest

    def await_reply(self, reply: Reply) -> None:
        while not reply.done():
            assert self._newest is not None
            self._newest.receive(self._patience)


def _connected(address: Any) -> socket.socket:
    if not isinstance(address, str):
        return socket.create_connection(address, _TO_CONNECT)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(_TO_CONNECT)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


async def prompt(coroutine: Coroutine[Any, Any, Any], source: Prompt | PromptLoop) -> Any:
    """Run a coroutine of asyncpg: what it awaits of that connection comes at once, anything else from the loop."""

    def go_on(part: Callable[[], Any]) -> Any:
        awaited = part()
        while isinstance(awaited, Reply):
            awaited._asyncio_future_blocking = False
            try:
                source.await_reply(awaited)
            except BaseException:
                coroutine.close()
                raise
            awaited = coroutine.send(None)
        return awaited

    return await driven(coroutine, go_on)
