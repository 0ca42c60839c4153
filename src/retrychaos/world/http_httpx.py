"""Hooks on httpx, synchronous and asynchronous. Imported when httpx has been imported.

A client asks `_transport_for_url` for each request, redirects and authentication included, whatever its transport is.
"""

from __future__ import annotations

from typing import Any

import httpx

from retrychaos.world.http_model import Answer, Request, request_of, visible
from retrychaos.world.http_patches import Patch
from retrychaos.world.http_stdlib import connection_refused
from retrychaos.world.http_traffic import Traffic


class Httpx:
    """`native` is the httpx.Request."""

    def answer(self, native: Any, answer: Answer) -> Any:
        headers = [(name, value.encode("utf-8")) for name, value in answer.headers]
        return httpx.Response(
            answer.status,
            headers=headers,  # type: ignore[arg-type]
            content=answer.body,
            request=native,
            extensions={"http_version": b"HTTP/1.1", "reason_phrase": answer.reason.encode()},
        )

    def reading(self, reply: Any, whole: bool) -> tuple[Any, ...]:
        if not whole:
            return (reply.status_code,)
        if isinstance(reply.stream, httpx.SyncByteStream) and not hasattr(reply, "_content"):
            reply.read()
        return (reply.status_code, visible(reply.headers.items()), reply.content)

    def refused(self, native: Any) -> BaseException:
        return httpx.ConnectError(str(connection_refused()), request=native)

    def unanswered(self, native: Any) -> BaseException:
        return httpx.ReadTimeout("timed out", request=native)

    def patience(self, native: Any) -> float | None:
        limit: float | None = native.extensions.get("timeout", {}).get("read")
        return limit


_CLIENT = Httpx()
_OWN = (httpx.HTTPTransport, httpx.AsyncHTTPTransport)


class _Seen(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """A transport of which each request is seen."""

    def __init__(self, traffic: Traffic, transport: Any) -> None:
        self._traffic = traffic
        self._transport = transport

    def handle_request(self, native: Any) -> Any:
        native.read()
        request = _request_of(native)
        transport = self._transport
        if self._is_left_to_below(request):
            return transport.handle_request(native)
        return self._traffic.exchange(
            "httpx client", _CLIENT, native, request, lambda: transport.handle_request(native)
        )

    async def handle_async_request(self, native: Any) -> Any:
        await native.aread()
        request = _request_of(native)
        transport = self._transport
        if self._is_left_to_below(request):
            return await transport.handle_async_request(native)
        through = transport.handle_async_request
        return await self._traffic.exchange_async(
            "httpx client", _CLIENT, native, request, lambda: through(native), _read
        )

    def _is_left_to_below(self, request: Request) -> bool:
        """A transport that stands before httpx's own may repeat requests: then the provider answers below it."""
        if self._traffic.provider_for(request.url) is None or type(self._transport) in _OWN:
            return False
        return any(isinstance(each, _OWN) for each in vars(self._transport).values())


def hook(traffic: Traffic, patch: Patch) -> None:
    def transport_for_url(original: Any) -> Any:
        def _transport_for_url(self: Any, url: Any) -> Any:
            transport = original(self, url)
            return transport if traffic.looks_away else _Seen(traffic, transport)

        return _transport_for_url

    def handle_request(original: Any) -> Any:
        def handle_request(self: Any, native: Any) -> Any:
            if traffic.looks_away:
                return original(self, native)
            native.read()
            return traffic.exchange(
                "httpx transport", _CLIENT, native, _request_of(native), lambda: original(self, native)
            )

        return handle_request

    def handle_async_request(original: Any) -> Any:
        async def handle_async_request(self: Any, native: Any) -> Any:
            if traffic.looks_away:
                return await original(self, native)
            await native.aread()
            request = _request_of(native)
            return await traffic.exchange_async(
                "httpx transport", _CLIENT, native, request, lambda: original(self, native), _read
            )

        return handle_async_request

    patch(httpx.Client, "_transport_for_url", transport_for_url)
    patch(httpx.AsyncClient, "_transport_for_url", transport_for_url)
    patch(httpx.HTTPTransport, "handle_request", handle_request)
    patch(httpx.AsyncHTTPTransport, "handle_async_request", handle_async_request)


def hook_httpcore(traffic: Traffic, patch: Patch) -> None:
    """Real connections of httpx, below respx, which stands in for httpcore's pools."""
    import httpcore
    from httpcore._backends.auto import AutoBackend
    from httpcore._backends.sync import SyncBackend

    def connect_tcp(original: Any) -> Any:
        def connect_tcp(self: Any, host: str, port: int, *args: Any, **more: Any) -> Any:
            if traffic.looks_away:
                return original(self, host, port, *args, **more)
            if not traffic.may_connect(host, port):
                raise httpcore.ConnectError(connection_refused())
            stream = original(self, host, port, *args, **more)
            traffic.keep(stream.close)
            return stream

        return connect_tcp

    def connect_async(original: Any) -> Any:
        async def connect_tcp(self: Any, host: str, port: int, *args: Any, **more: Any) -> Any:
            if not traffic.looks_away and not traffic.may_connect(host, port):
                raise httpcore.ConnectError(connection_refused())
            return await original(self, host, port, *args, **more)

        return connect_tcp

    patch(SyncBackend, "connect_tcp", connect_tcp)
    patch(AutoBackend, "connect_tcp", connect_async)


async def _read(reply: Any) -> None:
    await reply.aread()


def _request_of(native: Any) -> Request:
    return request_of(native.method, str(native.url), native.headers, native.content)
