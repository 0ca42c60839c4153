"""What the clients raise when a connection is refused, or no answer comes: the very same as in reality.

Each client has `refused` and `unanswered` for that. Here a hook raises them in place of a real request, and the error
that reaches the job is compared with that of a closed port, and of a server that says nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import botocore.awsrequest
import botocore.exceptions
import botocore.httpsession
import httpx
import pytest
import requests
import requests.adapters
import urllib3
import urllib3.connectionpool

from retrychaos.world.http_aiohttp import Aiohttp
from retrychaos.world.http_httpx import Httpx
from retrychaos.world.http_requests import Requests
from retrychaos.world.http_stdlib import HttpClient, UrllibRequest
from retrychaos.world.http_urllib3 import Urllib3, _Asked

TIMEOUT = 0.2


@pytest.fixture
def closed() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.fixture
def silent() -> Iterator[int]:
    """Takes requests and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections: list[Any] = []

        def take() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connections.append(server.accept()[0])

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for each in connections:
            each.close()


def by_requests(port: int) -> Any:
    return requests.post(f"http://127.0.0.1:{port}/x", json={}, timeout=TIMEOUT)


def by_urllib3(port: int) -> Any:
    pool = urllib3.PoolManager()
    return pool.request("POST", f"http://127.0.0.1:{port}/x", timeout=TIMEOUT, retries=False)


def by_botocore(port: int) -> Any:
    session = botocore.httpsession.URLLib3Session(timeout=TIMEOUT)
    return session.send(botocore.awsrequest.AWSRequest("POST", f"http://127.0.0.1:{port}/x", {}, b"{}").prepare())


def by_httpx(port: int) -> Any:
    return httpx.post(f"http://127.0.0.1:{port}/x", json={}, timeout=TIMEOUT)


def by_httpx_async(port: int) -> Any:
    async def send() -> Any:
        async with httpx.AsyncClient(timeout=TIMEOUT) as client:
            return await client.post(f"http://127.0.0.1:{port}/x", json={})

    return asyncio.run(send())


def by_aiohttp(port: int) -> Any:
    async def send() -> Any:
        timeout = aiohttp.ClientTimeout(sock_read=TIMEOUT)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            return await session.post(f"http://127.0.0.1:{port}/x", json={})

    return asyncio.run(send())


def by_urllib_request(port: int) -> Any:
    return urllib.request.urlopen(f"http://127.0.0.1:{port}/x", data=b"{}", timeout=TIMEOUT)


def by_http_client(port: int) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    try:
        connection.request("POST", "/x", "{}")
        return connection.getresponse()
    finally:
        connection.close()


def error_of(send: Callable[[int], Any], port: int) -> BaseException:
    with pytest.raises(Exception) as raised:
        send(port)
    return raised.value


Raising = Callable[[pytest.MonkeyPatch, str], None]


def in_urllib3(patch: pytest.MonkeyPatch, what: str) -> None:
    def fake(pool: Any, conn: Any, method: str, url: str, *args: Any, **more: Any) -> Any:
        raise getattr(Urllib3(), what)(_Asked(pool, conn, method, url, more))

    patch.setattr(urllib3.connectionpool.HTTPConnectionPool, "_make_request", fake)


def in_requests(patch: pytest.MonkeyPatch, what: str) -> None:
    def fake(adapter: Any, prepared: Any, **more: Any) -> Any:
        raise getattr(Requests(), what)((adapter, prepared))

    patch.setattr(requests.adapters.HTTPAdapter, "send", fake)


def in_httpx(patch: pytest.MonkeyPatch, what: str) -> None:
    def fake(transport: Any, request: Any) -> Any:
        raise getattr(Httpx(), what)(request)

    async def fake_async(transport: Any, request: Any) -> Any:
        raise getattr(Httpx(), what)(request)

    patch.setattr(httpx.HTTPTransport, "handle_request", fake)
    patch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", fake_async)


def in_aiohttp(patch: pytest.MonkeyPatch, what: str) -> None:
    original = aiohttp.ClientSession._request

    async def fake(request: Any, handler: Any) -> Any:
        raise getattr(Aiohttp(), what)((None, request))

    async def send(session: Any, *args: Any, **more: Any) -> Any:
        return await original(session, *args, middlewares=(fake,), **more)

    patch.setattr(aiohttp.ClientSession, "_request", send)


def in_urllib_request(patch: pytest.MonkeyPatch, what: str) -> None:
    def fake(handler: Any, kind: Any, req: Any, **more: Any) -> Any:
        raise getattr(UrllibRequest(), what)("POST")

    patch.setattr(urllib.request.AbstractHTTPHandler, "do_open", fake)


def in_http_client(patch: pytest.MonkeyPatch, what: str) -> None:
    def fake(connection: Any, *args: Any) -> Any:
        raise getattr(HttpClient(), what)("POST")

    patch.setattr(http.client.HTTPConnection, "_send_request", fake)


@pytest.mark.parametrize(
    ("send", "raising"),
    [
        (by_requests, in_urllib3),
        (by_requests, in_requests),
        (by_urllib3, in_urllib3),
        (by_botocore, in_urllib3),
        (by_httpx, in_httpx),
        (by_httpx_async, in_httpx),
        (by_aiohttp, in_aiohttp),
        (by_urllib_request, in_urllib_request),
        (by_http_client, in_http_client),
    ],
)
def test_the_very_exceptions(
    monkeypatch: pytest.MonkeyPatch, closed: int, silent: int, send: Callable[[int], Any], raising: Raising
) -> None:
    for what, port in (("refused", closed), ("unanswered", silent)):
        real = error_of(send, port)
        with monkeypatch.context() as patch:
            raising(patch, what)
            made = error_of(send, port)
        assert type(made) is type(real), (what, real, made)
        if raising is not in_requests:
            inner = isinstance(real, httpx.HTTPError | botocore.exceptions.HTTPClientError)  # chains of their own
            assert inner or type(made.__cause__) is type(real.__cause__), what
        for each in (real, made):
            if isinstance(each, requests.RequestException | httpx.HTTPError):
                assert each.request is not None
