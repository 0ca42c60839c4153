"""Sockets: who is at the other end, and what is sent on connections that may be older than the check."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeAlias

Peer: TypeAlias = tuple[str, str, int]
"""``("inet", host, port)`` or ``("unix", path, 0)``."""

_FAMILIES = {socket.AF_INET, socket.AF_INET6, getattr(socket, "AF_UNIX", socket.AF_INET)}


def has_peers(sock: socket.socket) -> bool:
    """It belongs to a family whose addresses we can read."""
    return sock.family in _FAMILIES


def peer_of_socket(sock: socket.socket) -> Peer | None:
    if not has_peers(sock):
        return None
    try:
        return peer_of(sock.getpeername())
    except OSError:
        return None


def peer_of(address: Any) -> Peer | None:
    """None for the nameless end of a socket pair: it leads to this process or to a child of it."""
    if isinstance(address, str | bytes | os.PathLike):
        path = os.fsdecode(address)
        return ("unix", path, 0) if path else None
    if isinstance(address, tuple) and len(address) >= 2:
        return ("inet", _host(str(address[0])), int(address[1]))
    return None


def _host(host: str) -> str:
    if host.lower() in ("localhost", "", "0.0.0.0", "::"):
        return "localhost"
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host.lower()
    mapped = getattr(address, "ipv4_mapped", None)
    address = mapped or address
    return "localhost" if address.is_loopback else str(address)


def addresses(host: str) -> set[str]:
    """The addresses behind a name; none for an address."""
    try:
        ipaddress.ip_address(host)
        return set()
    except ValueError:
        pass
    try:
        return {_host(str(found[4][0])) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return set()


class Sends:
    """Patches the ``send`` methods of sockets, to tell `sending` of each call with the frame that makes it."""

    def __init__(self, sending: Callable[[socket.socket, FrameType], None]) -> None:
        self._sending = sending
        self._patched: list[tuple[type, str, object]] = []

    def install(self) -> None:
        ssl = sys.modules.get("ssl")
        for owner in (socket.socket, *((ssl.SSLSocket,) if ssl is not None else ())):
            for name in ("send", "sendall", "sendfile"):
                self._patched.append((owner, name, vars(owner).get(name)))
                setattr(owner, name, self._sender(getattr(owner, name)))

    def uninstall(self) -> None:
        while self._patched:
            owner, name, before = self._patched.pop()
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def _sender(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def send(sock: socket.socket, *args: Any, **kwargs: Any) -> Any:
            self._sending(sock, sys._getframe(1))
            return original(sock, *args, **kwargs)

        send.__name__ = send.__qualname__ = original.__name__
        return send
