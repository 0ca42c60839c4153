"""Hooks on urllib3 (2), where requests and botocore end up, too. Imported when urllib3 has been imported.

`HTTPConnectionPool._make_request` is called once for every real request: below urllib3's retries and redirects.
"""

from __future__ import annotations

import http.client
import io
from dataclasses import dataclass
from typing import Any

import urllib3
import urllib3.connection
import urllib3.connectionpool
import urllib3.exceptions
import urllib3.response

from retrychaos.world.http_model import Answer, is_local, read_whole, request_of, visible
from retrychaos.world.http_patches import Patch
from retrychaos.world.http_stdlib import connection_refused, genuine
from retrychaos.world.http_traffic import Traffic


@dataclass
class _Asked:
    """One call of _make_request."""

    pool: Any
    conn: Any
    method: str
    url: str
    options: dict[str, Any]


class Urllib3:
    def answer(self, native: _Asked, answer: Answer) -> Any:
        options = native.options
        response = response_of(
            answer,
            request_method=native.method,
            request_url=native.url,
            preload_content=options.get("preload_content", True),
            decode_content=options.get("decode_content", True),
            retries=options.get("retries"),
        )
        response._pool = native.pool
        if options.get("response_conn") is not None:  # the response would give it back when it has been read
            native.pool._put_conn(options["response_conn"])
        return response

    def reading(self, reply: Any, whole: bool) -> tuple[Any, ...]:
        if not whole:
            return (reply.status,)
        return (reply.status, visible(reply.headers.items()), _body(reply))

    def refused(self, native: _Asked) -> BaseException:
        return new_connection_error(native.conn)

    def unanswered(self, native: _Asked) -> BaseException:
        timeout = native.pool._get_timeout(native.options.get("timeout")).read_timeout
        text = f"Read timed out. (read timeout={timeout})"
        error = urllib3.exceptions.ReadTimeoutError(native.pool, native.url, text)
        error.__cause__ = TimeoutError("timed out")
        return error


class _Original:
    """The response of http.client under one of urllib3, as far as others look at it: for cookies."""

    def __init__(self, message: http.client.HTTPMessage, method: str | None) -> None:
        self.msg = message
        self._method = method

    def isclosed(self) -> bool:
        return True

    def close(self) -> None:
        """It has been read."""


def response_of(answer: Answer, **more: Any) -> Any:
    """An urllib3 response."""
    headers = urllib3.HTTPHeaderDict()
    original: Any = None
    for name, value in answer.headers:
        headers.add(name, value)
        if name.lower() == "set-cookie":  # only for that does anybody look at it, and looking costs
            original = original or _Original(http.client.HTTPMessage(), more.get("request_method"))
            original.msg[name] = value
    return urllib3.response.HTTPResponse(
        body=io.BytesIO(answer.body),
        headers=headers,
        status=answer.status,
        version=11,
        version_string="HTTP/1.1",
        reason=answer.reason,
        enforce_content_length=False,
        original_response=original,
        **more,
    )


def new_connection_error(conn: Any) -> BaseException:
    problem = connection_refused()
    error = urllib3.exceptions.NewConnectionError(conn, f"Failed to establish a new connection: {problem}")
    error.__cause__ = problem
    return error


def _body(reply: Any) -> bytes:
    """The body of a reply, which the job can still read: as it came, not unpacked."""
    if getattr(reply, "_body", None):
        return bytes(reply._body)
    pieces = []
    while piece := reply.read(65536, decode_content=False):
        pieces.append(piece)
    body = b"".join(pieces)
    reply.release_conn()
    reply._fp, reply._fp_bytes_read, reply.length_remaining = io.BytesIO(body), 0, len(body)
    reply.chunked = False
    return body


_CLIENT = Urllib3()


def hook(traffic: Traffic, patch: Patch) -> None:
    """Patch urllib3. Raises ImportError for one that is too old to be hooked."""
    version = str(vars(urllib3)["__version__"])
    if version.startswith(("0.", "1.")):
        raise ImportError(f"urllib3 {version} is too old")

    def make_request(original: Any) -> Any:
        def _make_request(
            self: Any, conn: Any, method: str, url: str, body: Any = None, *args: Any, **more: Any
        ) -> Any:
            if traffic.looks_away:
                return original(self, conn, method, url, body, *args, **more)
            data, body = read_whole(body)
            headers = args[0] if args else more.get("headers")
            request = request_of(method, _url(self, url), headers, data)

            def through() -> Any:
                if not conn.is_closed and not traffic.may_connect(conn.host, conn.port):
                    conn.close()
                return original(self, conn, method, url, body, *args, **more)

            return traffic.exchange("urllib3", _CLIENT, _Asked(self, conn, method, url, more), request, through)

        return _make_request

    def new_conn(original: Any) -> Any:
        def _new_conn(self: Any) -> Any:
            if not traffic.looks_away:
                if not traffic.may_connect(self._dns_host, self.port):
                    raise new_connection_error(self)
                traffic.keep(self.close)
            return original(self)

        return _new_conn

    def prepare_proxy(original: Any) -> Any:
        def _prepare_proxy(self: Any, conn: Any) -> Any:
            """No tunnel is made for a request that does not leave this machine, or is not let out."""
            if not traffic.looks_away and not traffic.is_covered and not is_local(self.host):
                return None
            return original(self, conn)

        return _prepare_proxy

    patch(urllib3.connectionpool.HTTPConnectionPool, "_make_request", make_request)
    patch(urllib3.connectionpool.HTTPSConnectionPool, "_prepare_proxy", prepare_proxy)
    patch(genuine("urllib3.connection", urllib3.connection.HTTPConnection), "_new_conn", new_conn)


def _url(pool: Any, url: str) -> str:
    if url.startswith(("http://", "https://")):  # to a proxy
        return url
    host = pool.host
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{pool.scheme}://{host}{'' if pool.port is None else f':{pool.port}'}{url}"
