"""Hooks on requests, for what answers above urllib3: adapters of others, and tools of tests. Imported with requests.

Where a request goes down to urllib3 anyway, that is where it is seen; see http_urllib3.py.
"""

from __future__ import annotations

import sys
from typing import Any

import requests
import requests.adapters
import requests.sessions
import urllib3.exceptions

from retrychaos.world.http_model import Answer, Request, read_whole, request_of, visible
from retrychaos.world.http_patches import Patch
from retrychaos.world.http_stdlib import connection_refused
from retrychaos.world.http_traffic import Traffic
from retrychaos.world.http_urllib3 import Urllib3, response_of

_GENUINE = "requests.adapters"


class Requests:
    """`native` is the adapter and the prepared request."""

    def answer(self, native: tuple[Any, Any], answer: Answer) -> Any:
        adapter, prepared = native
        raw = response_of(answer, preload_content=False, request_method=prepared.method)
        builder = adapter if hasattr(adapter, "build_response") else requests.adapters.HTTPAdapter()
        return builder.build_response(prepared, raw)

    def reading(self, reply: Any, whole: bool) -> tuple[Any, ...]:
        if not whole:
            return (reply.status_code,)
        return (reply.status_code, visible(reply.headers.items()), reply.content)

    def refused(self, native: tuple[Any, Any]) -> BaseException:
        prepared = native[1]
        cause = urllib3.exceptions.NewConnectionError(
            None,  # type: ignore[arg-type]
            f"Failed to establish a new connection: {connection_refused()}",
        )
        problem = urllib3.exceptions.MaxRetryError(None, prepared.url, cause)  # type: ignore[arg-type]
        return requests.exceptions.ConnectionError(problem, request=prepared)

    def unanswered(self, native: tuple[Any, Any]) -> BaseException:
        prepared = native[1]
        problem = urllib3.exceptions.ReadTimeoutError(None, prepared.url, "Read timed out.")  # type: ignore[arg-type]
        return requests.exceptions.ReadTimeout(problem, request=prepared)


class Answered(Urllib3):
    """responses, which answers as urllib3 does. `native` is the prepared request."""

    def answer(self, native: Any, answer: Answer) -> Any:
        return response_of(answer, preload_content=False, request_method=native.method)

    def refused(self, native: Any) -> BaseException:
        return Requests().refused((None, native))

    def unanswered(self, native: Any) -> BaseException:
        return Requests().unanswered((None, native))


_CLIENT, _ANSWERED = Requests(), Answered()


class _Seen:
    """An adapter of which each request is seen."""

    def __init__(self, traffic: Traffic, adapter: Any) -> None:
        self._traffic = traffic
        self._adapter = adapter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    def send(self, prepared: Any, **more: Any) -> Any:
        request = _request_of(prepared)
        adapter = self._adapter
        if _goes_down(adapter) and self._traffic.provider_for(request.url) is not None:
            return adapter.send(prepared, **more)  # down there he answers, below the adapter's retries
        return self._traffic.exchange(
            "requests", _CLIENT, (adapter, prepared), request, lambda: adapter.send(prepared, **more)
        )


def hook(traffic: Traffic, patch: Patch) -> None:
    def get_adapter(original: Any) -> Any:
        def get_adapter(self: Any, url: Any) -> Any:
            adapter = original(self, url)
            if traffic.looks_away or sys._getframe(1).f_globals.get("__name__") != "requests.sessions":
                return adapter
            return adapter if _is_plain(adapter) else _Seen(traffic, adapter)

        return get_adapter

    patch(requests.sessions.Session, "get_adapter", get_adapter)


def hook_responses(traffic: Traffic, patch: Patch) -> None:
    """responses repeats requests by itself, and asks for an answer each time."""
    import responses

    def get_response(original: Any) -> Any:
        def get_response(self: Any, prepared: Any) -> Any:
            if traffic.looks_away:
                return original(self, prepared)
            request = _request_of(prepared)
            return traffic.exchange("responses", _ANSWERED, prepared, request, lambda: original(self, prepared))

        return get_response

    for kind in (responses.Response, responses.CallbackResponse):
        patch(kind, "get_response", get_response)


def hook_requests_mock(traffic: Traffic, patch: Patch) -> None:
    import requests_mock.adapter

    def send(original: Any) -> Any:
        def send(self: Any, prepared: Any, **more: Any) -> Any:
            if traffic.looks_away:
                return original(self, prepared, **more)
            request = _request_of(prepared)
            return traffic.exchange(
                "requests_mock", _CLIENT, (self, prepared), request, lambda: original(self, prepared, **more)
            )

        return send

    patch(requests_mock.adapter.Adapter, "send", send)


def _request_of(prepared: Any) -> Request:
    data, prepared.body = read_whole(prepared.body)
    return request_of(prepared.method, prepared.url, prepared.headers, data)


def _is_plain(adapter: Any) -> bool:
    """What it sends goes down to urllib3, and nowhere else."""
    return getattr(type(adapter).send, "__module__", "") == _GENUINE and _goes_down(adapter)


def _goes_down(adapter: Any) -> bool:
    """It is built on the adapter for urllib3, and no tool of the test stands in for that."""
    genuine = vars(requests.adapters.HTTPAdapter)["send"]
    return isinstance(adapter, requests.adapters.HTTPAdapter) and getattr(genuine, "__module__", "") == _GENUINE
