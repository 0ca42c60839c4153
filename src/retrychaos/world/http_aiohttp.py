"""Hooks on aiohttp's client. Imported when aiohttp has been imported.

A middleware, put innermost for the time of a check, sees each request below aiohttp's redirects.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import aiohttp
import aiohttp.client
import aiohttp.connector
from aiohttp.base_protocol import BaseProtocol
from aiohttp.helpers import TimerNoop
from aiohttp.http import HttpVersion11
from multidict import CIMultiDict, CIMultiDictProxy

from retrychaos.world.http_model import Answer, Request, read_whole, request_of, visible
from retrychaos.world.http_patches import Patch
from retrychaos.world.http_stdlib import connection_refused
from retrychaos.world.http_traffic import Traffic

_GENUINE = "aiohttp.client"


class Aiohttp:
    """`native` is the session and the aiohttp.ClientRequest."""

    def answer(self, native: tuple[Any, Any], answer: Answer) -> Any:
        session, asked = native
        response = asked.response_class(
            asked.method,
            asked.original_url,
            writer=None,
            continue100=None,
            timer=TimerNoop(),
            request_info=asked.request_info,
            traces=[],
            loop=asked.loop,
            session=session,
            **_STREAM_WRITER,
        )
        headers = CIMultiDict(answer.headers)
        response.version, response.status, response.reason = HttpVersion11, answer.status, answer.reason
        response._headers = CIMultiDictProxy(headers)
        response._raw_headers = tuple((name.encode(), value.encode()) for name, value in answer.headers)
        response._raw_cookie_headers = tuple(headers.getall("Set-Cookie", ())) or None
        response._closed = False
        content = aiohttp.StreamReader(BaseProtocol(asked.loop), 2**16, loop=asked.loop)
        content.feed_data(answer.body)
        content.feed_eof()
        response.content = content
        return response

    def reading(self, reply: Any, whole: bool) -> tuple[Any, ...]:
        if not whole:
            return (reply.status,)
        return (reply.status, visible(reply.headers.items()), reply._body)

    def refused(self, native: tuple[Any, Any]) -> BaseException:
        return _refused(native[1])

    def unanswered(self, native: tuple[Any, Any]) -> BaseException:
        return aiohttp.SocketTimeoutError("Timeout on reading data from socket")

    def patience(self, native: tuple[Any, Any]) -> float | None:
        limits = native[0].timeout
        return limits.sock_read or limits.total or None


def _refused(asked: Any) -> BaseException:
    problem = connection_refused()
    error = aiohttp.ClientConnectorError(asked.connection_key, problem)
    error.__cause__ = problem
    return error


class _Written:
    """A request that has been sent, as far as a response looks at it."""

    output_size = 0


_STREAM_WRITER: dict[str, Any] = (
    {"stream_writer": _Written()} if "stream_writer" in inspect.signature(aiohttp.ClientResponse).parameters else {}
)
_CLIENT = Aiohttp()


def hook(traffic: Traffic, patch: Patch) -> None:
    """Patch aiohttp. Raises ImportError for one that is too old to be hooked."""
    if not hasattr(aiohttp, "ClientMiddlewareType"):
        raise ImportError(f"aiohttp {aiohttp.__version__} is too old: it has no client middlewares (3.12)")

    def send(original: Any) -> Any:
        async def _request(self: Any, method: str, str_or_url: Any, **more: Any) -> Any:
            if traffic.looks_away:
                return await original(self, method, str_or_url, **more)
            if getattr(original, "__module__", "") != _GENUINE:
                return await _mocked(traffic, original, self, method, str_or_url, more)

            async def see(asked: Any, handler: Any) -> Any:
                request = await _request_of(asked)
                return await traffic.exchange_async(
                    "aiohttp", _CLIENT, (self, asked), request, lambda: handler(asked), _read
                )

            given = more.pop("middlewares", None)
            others = self._middlewares if given is None else given
            return await original(self, method, str_or_url, middlewares=(*(others or ()), see), **more)

        return _request

    def connect(original: Any) -> Any:
        async def connect(self: Any, req: Any, *args: Any, **more: Any) -> Any:
            if not traffic.looks_away and isinstance(self, aiohttp.TCPConnector):
                target = req.proxy or req.url
                if not traffic.may_connect(target.host or "", target.port or 80):
                    raise _refused(req)
            return await original(self, req, *args, **more)

        return connect

    patch(aiohttp.ClientSession, "_request", send)
    patch(aiohttp.connector.BaseConnector, "connect", connect)


async def _mocked(traffic: Traffic, original: Any, session: Any, method: str, url: Any, more: dict[str, Any]) -> Any:
    """A tool of the test stands in for aiohttp (aioresponses)."""
    full = session._build_url(url).update_query(more.get("params") or {})
    made = aiohttp.FormData(more["data"])() if isinstance(more.get("data"), dict) else more.get("data")
    if more.get("json") is not None:
        made = aiohttp.JsonPayload(more["json"])
    body = await made.as_bytes() if isinstance(made, aiohttp.Payload) else read_whole(made)[0]
    request = request_of(method, str(full), more.get("headers"), body)
    asked = session._request_class(
        method.upper(),
        full,
        headers=session._prepare_headers(more.get("headers")),
        loop=asyncio.get_running_loop(),
        response_class=session._response_class,
        session=session,
    )
    return await traffic.exchange_async(
        "aiohttp", _CLIENT, (session, asked), request, lambda: original(session, method, url, **more), _read
    )


async def _request_of(asked: Any) -> Request:
    body = asked.body
    # A payload keeps what it has read, or goes back to its beginning.
    data = await body.as_bytes() if hasattr(body, "as_bytes") else read_whole(body)[0]
    return request_of(asked.method, str(asked.url), asked.headers, data)


async def _read(reply: Any) -> None:
    await reply.read()
