"""Routes of a provider: which request is answered by what, and the answer of the user's own code made sure of."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from retrychaos.model.durations import seconds_of
from retrychaos.model.errors import OptionError, WorldError
from retrychaos.model.values import copied, short
from retrychaos.world.http_model import Answer, Request, Response, origin, packed

MISSING: Final = object()
_PLACE = re.compile(r"\{(\w+)\}")
_METHOD = re.compile(r"[A-Z]+")


@dataclass(frozen=True)
class Route:
    """One declared route. `answer` is what it gives: a callable, or a packed response."""

    method: str
    path: str
    answer: Callable[[Request], Any] | Answer
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    pattern: re.Pattern[str] = field(default=re.compile(""), compare=False)

    @property
    def is_own_code(self) -> bool:
        """It runs code of the user, which may change the provider's state."""
        return not isinstance(self.answer, Answer)

    def match(self, request: Request, path: str) -> Request | None:
        """The request with its parameters, if it is for this route."""
        if request.method != self.method and not (request.method == "HEAD" and self.method == "GET"):
            return None
        found = self.pattern.fullmatch(path)
        if found is None:
            return None
        params = {name: unquote(value) for name, value in found.groupdict().items()}
        return replace(request, params=params) if params else request

    def ask(self, request: Request, provider: str) -> Answer:
        """Raises WorldError if the code of the test fails, or answers something that cannot be sent."""
        if isinstance(self.answer, Answer):
            return self.answer
        where = f"The route {self.method} {self.path} of the provider {provider}"
        try:
            value = self.answer(request)
        except Exception as problem:
            raise WorldError(
                f"{where} raised {type(problem).__name__}: {problem}. It is code of the test, so this is no failure of "
                "the job. To answer with an error, return Response(status=402, json=...) (from retrychaos)."
            ) from problem
        if isinstance(value, tuple):
            raise WorldError(
                f"{where} returned the tuple {short(value)}, and it is not clear what of it is what. Return "
                "Response(status=201, json=...) (from retrychaos), or only the JSON value."
            )
        try:
            return packed(_response(value, self.status, self.headers))
        except (TypeError, ValueError) as problem:
            raise WorldError(
                f"{where} returned {short(value)}, which cannot be sent: {problem}. Return a JSON value, bytes, or "
                "Response(status=..., json=...)."
            ) from problem


def _response(value: Any, status: int, headers: Mapping[str, str]) -> Response:
    if isinstance(value, Response):
        return value
    if isinstance(value, bytes):
        return Response(status, headers=headers, body=value)
    return Response(status, json=value, headers=headers)


def route(
    method: str,
    path: str,
    answer: Any,
    *,
    json: Any,
    status: int,
    headers: Mapping[str, str] | None,
    body: bytes | str | None,
) -> Route:
    """A route as declared. Raises OptionError if it can never work."""
    method = method.upper()
    if not _METHOD.fullmatch(method):
        raise OptionError(f"{method!r} is no HTTP method; use e.g. 'POST'.")
    if not isinstance(path, str) or not path.startswith("/") or "?" in path:
        raise OptionError(
            f"the path {path!r} of a route must begin with a slash, relative to the provider's address, and have no "
            "query (a callable sees request.query): '/charges/{id}'."
        )
    given = [name for name, value in (("json", json), ("body", body)) if value is not MISSING and value is not None]
    if answer is not None and given:
        raise OptionError(f"the route {method} {path} has an answer and {' and '.join(given)}; give one of them.")
    value = answer
    if answer is None or not callable(answer):
        fixed = json if answer is None else answer
        if isinstance(fixed, Response):
            response = fixed
        elif isinstance(fixed, bytes):
            response = Response(status, headers=headers or {}, body=fixed)
        else:
            response = Response(status, None if fixed is MISSING else copied(fixed), headers or {}, body)
        try:
            value = packed(response)
        except (TypeError, ValueError) as problem:
            raise OptionError(f"the route {method} {path} cannot answer that: {problem}.") from None
    else:
        try:
            packed(Response(status))
        except ValueError as problem:
            raise OptionError(f"the route {method} {path} cannot answer that: {problem}.") from None
    text = "".join(
        f"(?P<{part}>[^/]+)" if number % 2 else re.escape(part) for number, part in enumerate(_PLACE.split(path))
    )
    try:
        pattern = re.compile(text)
    except re.error as problem:
        raise OptionError(f"the path {path!r} of a route cannot be understood: {problem}.") from None
    return Route(method, path, value, status, dict(headers or {}), pattern)


def base_of(url: Any) -> str:
    """The address of a provider in one form, without a slash at its end. Raises OptionError."""
    example = '"https://api.pay.test"'
    if not isinstance(url, str) or not url:
        raise OptionError(f"a provider needs its address as a text, such as {example}, not {short(url)}.")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        guess = f'. Did you mean "https://{url.lstrip("/")}"?' if "://" not in url else ""
        raise OptionError(
            f"the address {url!r} of a provider needs a scheme (http or https) and a host, such as {example}{guess}"
        )
    if parts.query or parts.fragment:
        raise OptionError(f"the address {url!r} of a provider has a query or a fragment; routes begin at its path.")
    try:
        return origin(url) + parts.path.rstrip("/")
    except ValueError as problem:
        raise OptionError(f"the address {url!r} of a provider cannot be understood: {problem}.") from None


def seconds(ttl: Any) -> float | None:
    """How long keys are remembered: ``"24h"``, ``"30m"``, ``"7d"``, ``"90s"``, seconds, a timedelta; None: for ever."""
    if ttl is None:
        return None
    value: float | None = None
    if isinstance(ttl, datetime.timedelta):
        value = ttl.total_seconds()
    elif isinstance(ttl, int | float) and not isinstance(ttl, bool):
        value = float(ttl)
    elif isinstance(ttl, str):
        value = seconds_of(ttl)
    if value is None or not 0 < value < float("inf"):
        raise OptionError(
            f"key_ttl={ttl!r} is no time: write '24h', '30m', '7d', '90s', a number of seconds, a timedelta, or None "
            "for keys that are never forgotten."
        )
    return value
