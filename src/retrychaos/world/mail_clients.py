"""Hooks on smtplib and aiosmtplib: a connection leads to the mailbox, and no further.

Only if somebody listens on this very machine, that is who is meant; then the client is watched instead.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import smtplib
import socket
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from retrychaos.world.mail_dialogue import GREETING, Dialogue
from retrychaos.world.mailbox import Mail
from retrychaos.world.sockets import peer_of

if TYPE_CHECKING:
    from retrychaos.world.mail import Mails


def refused() -> OSError:
    """What smtplib raises when nobody listens: nothing was sent."""
    return ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def unanswered() -> smtplib.SMTPException:
    """What smtplib raises when the mail was accepted and the answer does not come in time."""
    return smtplib.SMTPServerDisconnected("Connection unexpectedly closed: timed out")


def _is_here(host: str) -> bool:
    peer = peer_of((host, 0))
    return peer is not None and peer[1] == "localhost"


class _Patches:
    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = vars(owner)[name]
        self._before.append((owner, name, original))
        setattr(owner, name, make(original))

    def undo(self) -> None:
        while self._before:
            owner, name, original = self._before.pop()
            setattr(owner, name, original)


class _Envelopes:
    """Sender and recipients of the mail that each real connection is about to send."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, tuple[str, list[str]]] = weakref.WeakKeyDictionary()

    def begin(self, client: Any, sender: str) -> None:
        self._known[client] = (sender, [])

    def add(self, client: Any, recipient: str) -> None:
        if client in self._known:
            self._known[client][1].append(recipient)

    def mail(self, client: Any, data: bytes) -> Mail:
        sender, recipients = self._known.pop(client, ("", []))
        return Mail(sender, tuple(recipients), data)


def _bytes(message: Any) -> bytes:
    data = message if isinstance(message, bytes) else str(message).encode("ascii", "replace")
    return data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")


def _asking_once(original: Any) -> Any:
    """Mails carry the name of the machine. A name server takes longer to tell it than a job that sends one."""
    return functools.cache(original)


# -- smtplib ---------------------------------------------------------------------------------------------------------


class _Line:
    """In the place of a socket: what is written goes to the mailbox, and what it answers can be read."""

    def __init__(self, mails: Mails, secure: bool) -> None:
        self._dialogue = Dialogue(mails.accept, mails.mailbox.refused, secure)
        self._answers = bytearray(GREETING)
        self._timeout: float | None = None

    def sendall(self, data: Any) -> None:
        if self._dialogue.ended:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        self._answers += self._dialogue.feed(bytes(data))

    def send(self, data: Any) -> int:
        self.sendall(data)
        return len(data)

    def recv(self, size: int) -> bytes:
        found = bytes(self._answers[:size])
        del self._answers[:size]
        return found

    def readinto(self, buffer: Any) -> int:
        found = self.recv(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def makefile(self, mode: str = "rb", buffering: int = -1, **_: Any) -> Any:
        return io.BufferedReader(_Reader(self))

    def settimeout(self, timeout: float | None) -> None:
        self._timeout = timeout

    def gettimeout(self) -> float | None:
        return self._timeout

    def getpeername(self) -> tuple[str, int]:
        return ("127.0.0.1", 25)

    getsockname = getpeername

    def setsockopt(self, *args: Any) -> None:
        """Nothing to set."""

    def shutdown(self, how: int) -> None:
        self._dialogue.ended = True

    def close(self) -> None:
        self._dialogue.ended = True


class _Reader(io.RawIOBase):
    def __init__(self, line: _Line) -> None:
        self._line = line

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._line.readinto(buffer)


class _NoTls:
    """In the place of an SSL context: there is no wire that anybody could listen to."""

    def wrap_socket(self, sock: Any, **_: Any) -> Any:
        return sock


def hook_smtplib(mails: Mails) -> Callable[[], None]:
    patches, envelopes = _Patches(), _Envelopes()

    def get_socket(secure: bool) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def _get_socket(client: Any, host: str, port: int, timeout: Any) -> Any:
                if not mails.watching or not isinstance(host, str):
                    return original(client, host, port, timeout)
                if timeout is not None and not timeout:
                    raise ValueError("Non-blocking socket (timeout=0) is not supported")
                if _is_here(host):
                    mails.reach(host, port)
                    try:
                        return original(client, host, port, timeout)
                    except ConnectionRefusedError:
                        pass  # nobody is there
                return _Line(mails, secure)

            return _get_socket

        return make

    def connect(original: Any) -> Any:
        """LMTP connects to a Unix socket by itself."""

        def lmtp_connect(client: Any, host: str = "localhost", port: int = 0, source_address: Any = None) -> Any:
            if not mails.watching or not host.startswith("/") or os.path.exists(host):
                return original(client, host, port, source_address)
            client.sock = _Line(mails, secure=False)
            client.file = None
            return client.getreply()

        return lmtp_connect

    def starttls(original: Any) -> Any:
        def starttls(client: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(client.sock, _Line):
                return original(client, *args, **kwargs)
            return original(client, context=_NoTls())

        return starttls

    def noting(note: Callable[[Any, str], None]) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def command(client: Any, address: str, *args: Any, **kwargs: Any) -> Any:
                code, answer = original(client, address, *args, **kwargs)
                if mails.watching and not isinstance(client.sock, _Line) and code // 100 == 2:
                    note(client, smtplib.quoteaddr(address).strip("<>"))
                return code, answer

            return command

        return make

    def data(original: Any) -> Any:
        def data(client: Any, msg: Any) -> Any:
            if not mails.watching or isinstance(client.sock, _Line):
                return original(client, msg)
            mail = envelopes.mail(client, _bytes(msg))
            mails.before(mail.recipients, mail.subject)
            code, answer = original(client, msg)
            if code == 250:
                mails.after(mail)
            return code, answer

        return data

    patches.set(socket, "getfqdn", _asking_once)
    patches.set(smtplib.SMTP, "_get_socket", get_socket(False))
    if hasattr(smtplib, "SMTP_SSL"):
        patches.set(smtplib.SMTP_SSL, "_get_socket", get_socket(True))
    patches.set(smtplib.LMTP, "connect", connect)
    patches.set(smtplib.SMTP, "starttls", starttls)
    patches.set(smtplib.SMTP, "mail", noting(envelopes.begin))
    patches.set(smtplib.SMTP, "rcpt", noting(envelopes.add))
    patches.set(smtplib.SMTP, "data", data)
    return patches.undo


# -- aiosmtplib ------------------------------------------------------------------------------------------------------


class _Transport:
    """In the place of a transport of asyncio."""

    def __init__(self, mails: Mails, loop: Any, protocol: Any, tls: Any) -> None:
        accept = functools.partial(mails.accept, faults=False)
        self._dialogue = Dialogue(accept, mails.mailbox.refused, tls is not None)
        self._loop = loop
        self._protocol = protocol
        self._closing = False
        self.tls = tls

    def answer(self, data: bytes) -> None:
        if data:
            self._loop.call_soon(self._protocol.data_received, data)

    def write(self, data: Any) -> None:
        self.answer(self._dialogue.feed(bytes(data)))
        if self._dialogue.ended:
            self.close()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"sslcontext": self.tls, "peername": ("127.0.0.1", 25)}.get(name, default)

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self._protocol.connection_lost, None)

    abort = close

    def is_reading(self) -> bool:
        return not self._closing

    def pause_reading(self) -> None:
        """Nothing comes that was not asked for."""

    resume_reading = pause_reading


class _Loop:
    """An event loop whose connections lead to the mailbox."""

    def __init__(self, mails: Mails, loop: Any) -> None:
        self._mails = mails
        self._real = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    async def create_connection(self, factory: Callable[[], Any], *args: Any, ssl: Any = None, **_: Any) -> Any:
        protocol = factory()
        transport = _Transport(self._mails, self._real, protocol, ssl)
        protocol.connection_made(transport)
        transport.answer(GREETING)
        return transport, protocol

    async def start_tls(self, transport: Any, protocol: Any, context: Any, **_: Any) -> Any:
        transport.tls = context
        return transport


def hook_aiosmtplib(mails: Mails) -> Callable[[], None]:
    patches, envelopes = _Patches(), _Envelopes()
    client_class: Any = sys.modules["aiosmtplib"].SMTP
    refused_here: Any = sys.modules["aiosmtplib"].SMTPConnectError

    def in_memory(client: Any) -> bool:
        return isinstance(client.transport, _Transport)

    def create_connection(original: Any) -> Any:
        async def _create_connection(client: Any, timeout: Any) -> Any:
            if not mails.watching or client.sock is not None or client.socket_path is not None:
                return await original(client, timeout)
            host = client.hostname or "localhost"
            if _is_here(host):
                mails.reach(host, client.port or 25)
                try:
                    return await original(client, timeout)
                except refused_here as problem:
                    if not isinstance(problem.__cause__, ConnectionRefusedError | OSError):
                        raise
            client.loop = _Loop(mails, client.loop)
            return await original(client, timeout)

        return _create_connection

    def tls_context(original: Any) -> Any:
        async def _get_tls_context(client: Any) -> Any:
            return _NoTls() if isinstance(client.loop, _Loop) else await original(client)

        return _get_tls_context

    def noting(note: Callable[[Any, str], None]) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            async def command(client: Any, address: str, *args: Any, **kwargs: Any) -> Any:
                answer = await original(client, address, *args, **kwargs)
                if mails.watching and not in_memory(client):
                    note(client, address)
                return answer

            return command

        return make

    def data(original: Any) -> Any:
        async def data(client: Any, message: Any, *args: Any, **kwargs: Any) -> Any:
            if not mails.watching or in_memory(client):
                return await original(client, message, *args, **kwargs)
            mail = envelopes.mail(client, _bytes(message))
            mails.before(mail.recipients, mail.subject)
            answer = await original(client, message, *args, **kwargs)
            mails.after(mail)
            return answer

        return data

    patches.set(client_class, "_create_connection", create_connection)
    if "_get_tls_context" in vars(client_class):  # which takes long, and is not needed
        patches.set(client_class, "_get_tls_context", tls_context)
    patches.set(client_class, "mail", noting(envelopes.begin))
    patches.set(client_class, "rcpt", noting(envelopes.add))
    patches.set(client_class, "data", data)
    return patches.undo
