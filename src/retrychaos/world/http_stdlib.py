"""Hooks on http.client and urllib.request. Imported when the job, or the test, has imported these."""

from __future__ import annotations

import errno
import http.client
import io
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from retrychaos.world.http_model import Answer, read_whole, request_of, visible
from retrychaos.world.http_patches import Patch
from retrychaos.world.http_traffic import Traffic


def genuine(module: str, kind: Any) -> Any:
    """The class of that name that the module has made, should a tool of the test stand in for it (vcrpy)."""
    if kind.__module__ == module:
        return kind
    name = kind.__name__.removeprefix("VCR")
    made = (each for each in _all_subclasses(object) if each.__module__ == module and each.__name__ == name)
    return next(made, kind)


def _all_subclasses(kind: type) -> Iterator[type]:
    found: list[type] = type.__subclasses__(kind)
    for each in found:
        yield each
        yield from _all_subclasses(each)


def connection_refused() -> ConnectionRefusedError:
    return ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


class HttpClient:
    """http.client. `native` is the method."""

    def answer(self, native: str, answer: Answer) -> http.client.HTTPResponse:
        response = http.client.HTTPResponse(_Wire(answer), method=native)  # type: ignore[arg-type]
        response.begin()
        return response

    def reading(self, reply: Any, whole: bool) -> tuple[Any, ...]:
        if not whole:
            return (reply.status,)
        body = reply.read()
        reply.fp = io.BytesIO(body)
        reply.length, reply.chunked = len(body), False
        return (reply.status, visible(reply.getheaders()), body)

    def refused(self, native: Any) -> BaseException:
        return connection_refused()

    def unanswered(self, native: Any) -> BaseException:
        return TimeoutError("timed out")


class UrllibRequest(HttpClient):
    """urllib.request, which wraps what happens before the answer."""

    def refused(self, native: Any) -> BaseException:
        import urllib.error

        return urllib.error.URLError(connection_refused())


class _Wire:
    """A socket as far as HTTPResponse needs one."""

    def __init__(self, answer: Answer) -> None:
        lines = [f"HTTP/1.1 {answer.status} {answer.reason}", *(f"{name}: {value}" for name, value in answer.headers)]
        self._raw = "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + answer.body

    def makefile(self, *args: Any, **kwargs: Any) -> io.BytesIO:
        return io.BytesIO(self._raw)


_HTTP, _URLLIB = HttpClient(), UrllibRequest()
_PENDING = "_retrychaos_reply"


def hook_client(traffic: Traffic, patch: Patch) -> None:
    """http.client used by itself; below urllib.request."""
    connection = genuine("http.client", http.client.HTTPConnection)

    def send_request(original: Any) -> Any:
        def _send_request(self: Any, method: str, url: str, body: Any, headers: Any, encode_chunked: bool) -> Any:
            if traffic.looks_away:
                return original(self, method, url, body, headers, encode_chunked)
            data, body = read_whole(body, "latin-1")
            request = request_of(method, _url(self, url), headers, data)
            if traffic.announced("http.client", request):
                return original(self, method, url, body, headers, encode_chunked)

            def through() -> Any:
                original(self, method, url, body, headers, encode_chunked)
                return _get_response(self)

            vars(self).pop(_PENDING, None)
            vars(self)[_PENDING] = traffic.exchange("http.client", _HTTP, method, request, through)
            return None

        return _send_request

    def get_response(original: Any) -> Any:
        def getresponse(self: Any) -> Any:
            reply = vars(self).pop(_PENDING, None)
            return original(self) if reply is None else reply

        return getresponse

    def connect(original: Any) -> Any:
        def connect(self: Any) -> Any:
            if not traffic.looks_away:
                if not traffic.may_connect(self.host, self.port):
                    raise connection_refused()
                traffic.keep(self.close)
            return original(self)

        return connect

    _get_response = connection.getresponse
    patch(connection, "_send_request", send_request)
    patch(connection, "getresponse", get_response)
    patch(connection, "connect", connect)


def hook_urllib(traffic: Traffic, patch: Patch) -> None:
    """urllib.request, below its redirects and its errors for status codes."""
    import urllib.request

    def do_open(original: Any) -> Any:
        def do_open(self: Any, http_class: Any, req: Any, **more: Any) -> Any:
            if traffic.looks_away or not req.host:
                return original(self, http_class, req, **more)
            data, req.data = read_whole(req.data, "latin-1")
            headers = {**req.headers, **req.unredirected_hdrs}
            request = request_of(req.get_method(), req.full_url, headers, data)
            reply = traffic.exchange(
                "urllib", _URLLIB, req.get_method(), request, lambda: original(self, http_class, req, **more)
            )
            if not hasattr(reply, "url") or reply.url != req.full_url:
                reply.url, reply.msg = req.get_full_url(), reply.reason
            return reply

        return do_open

    patch(urllib.request.AbstractHTTPHandler, "do_open", do_open)


def _url(connection: Any, url: str) -> str:
    if urlsplit(url).scheme in ("http", "https"):  # to a proxy
        return url
    scheme = "https" if isinstance(connection, getattr(http.client, "HTTPSConnection", ())) else "http"
    host, port = connection.host, connection.port
    if connection._tunnel_host:
        host, port = connection._tunnel_host, connection._tunnel_port or (443 if scheme == "https" else 80)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{url}"
