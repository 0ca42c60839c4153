"""Both kinds of connections of redis-py, synchronous and of asyncio, seen alike: how they end, what they raise then."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import redis
import redis.asyncio.connection


def is_async(connection: Any) -> bool:
    return isinstance(connection, redis.asyncio.connection.AbstractConnection)


def session_of(connection: Any) -> Any:
    """What is another object each time that it is connected; None if it is not."""
    return connection._writer if is_async(connection) else connection._sock


def hang_up(connection: Any) -> None:
    """End a connection of the job, and all that the server or the client kept for it."""
    connection.__dict__.pop("read_response", None)
    if is_async(connection):
        _drop(connection)
        return
    for party in (*_cache_proxies(connection), connection):
        with contextlib.suppress(Exception):
            party.disconnect()


def _drop(connection: Any) -> None:
    """As disconnect() of asyncio, which needs a running loop; that of the connection may be gone."""
    writer = connection._writer
    connection._writer = connection._reader = None
    if hasattr(connection, "_sock"):  # fakeredis
        connection._sock = None
    with contextlib.suppress(Exception):
        connection._parser.on_disconnect()
    with contextlib.suppress(Exception):
        if writer is not None:
            writer.close()


def _cache_proxies(connection: Any) -> list[Any]:
    """What caches replies on the client's side for this connection: memory of the process that is gone."""
    callbacks = [reference() for reference in getattr(connection, "_connect_callbacks", ())]
    parties = [getattr(callback, "__self__", None) for callback in callbacks]
    return [party for party in parties if hasattr(party, "_cache") and hasattr(party, "disconnect")]


def refused(connection: Any) -> Exception:
    """What the client raises if nobody is there."""
    if is_async(connection):
        return redis.ConnectionError(f"Error 111 connecting to {connection._host_error()}. Connection refused.")
    return redis.ConnectionError("Connection refused.")


def lost(connection: Any) -> Exception:
    """What it raises if no reply comes."""
    return redis.TimeoutError(f"Timeout reading from {connection._host_error() if is_async(connection) else 'socket'}")


def twin_of(connection: Any) -> Any:
    """A synchronous connection to where one of asyncio goes."""
    fake = getattr(connection, "_server", None)
    if fake is not None:
        return sys.modules["fakeredis"].FakeRedis(server=fake).connection_pool.make_connection()
    options: dict[str, Any] = {
        name: getattr(connection, name)
        for name in ("username", "password", "credential_provider", "socket_timeout", "socket_connect_timeout")
    }
    client: Any = redis  # its constructors are not typed
    path = getattr(connection, "path", None)
    if path:
        return client.UnixDomainSocketConnection(path=path, **options)
    twin = client.Connection(host=connection.host, port=connection.port, **options)
    context = connection._connection_arguments().get("ssl")
    if context is not None:
        connect = twin._connect
        twin._connect = lambda: context.wrap_socket(connect(), server_hostname=connection.host)
    return twin
