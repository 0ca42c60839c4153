"""Requests and responses as values, the same for every client, and what of a request counts when two are compared.

Headers never count: they carry dates, signatures and trace ids. Of a body counts what it says, not how it is packed.
"""

from __future__ import annotations

import functools
import gzip
import json as _json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit

from retrychaos.model.ledger import Cell
from retrychaos.model.values import short

READS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""Methods without an effect (RFC 9110, 9.2.1)."""
REPEATABLE: Final = frozenset({"PUT", "DELETE"})
"""Methods whose equal requests count once (RFC 9110, 9.2.2)."""

_PORTS = {"http": 80, "https": 443}
_SIGNATURES = re.compile(r"(?i)x-(amz|goog)-(signature|date|credential|security-token|algorithm|signedheaders)$")
_ID = re.compile(
    r"\d+|[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}|(?=.*\d)[0-9a-fA-F]{8,}|(?=.*\d)[\w~+=-]{16,}"
)
_BINARY_LIMIT = 64
_FLEETING = frozenset(
    {"date", "age", "expires", "server-timing", "x-request-id", "x-amzn-requestid", "x-amz-request-id", "cf-ray"}
)


class Headers(Mapping[str, str]):
    """Header fields by name, whatever the case."""

    def __init__(self, items: Mapping[str, Any] | Iterable[tuple[Any, Any]] = ()) -> None:
        pairs = items.items() if hasattr(items, "items") else items
        self._items: dict[str, tuple[str, str]] = {}
        for name, value in pairs:
            name, value = _header_text(name), _header_text(value)
            old = self._items.get(name.lower())
            self._items[name.lower()] = (name, value if old is None else f"{old[1]}, {value}")

    def __getitem__(self, name: str) -> str:
        return self._items[name.lower()][1]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"Headers({dict(self)})"


@dataclass(frozen=True)
class Request:
    """One request, as who answers it sees it."""

    method: str
    url: str
    """With the query, without user, password and fragment."""
    path: str
    query: Mapping[str, str]
    """The last value of each parameter."""
    headers: Mapping[str, str]
    body: bytes
    key: str | None = None
    """The value of the provider's key header; None if it was not sent, or counts for nothing."""
    params: Mapping[str, str] = field(default_factory=dict)
    """What stood in the places of a route's path: ``{"id": "17"}`` for ``/charges/{id}``."""

    @property
    def json(self) -> Any:
        """The body as JSON, or None if it is not."""
        try:
            return _json.loads(self.body) if self.body else None
        except ValueError:
            return None

    @property
    def form(self) -> Mapping[str, str]:
        """The fields of a form (``application/x-www-form-urlencoded``), the last value of each."""
        return dict(parse_qsl(self.body.decode("utf-8", "replace"), keep_blank_values=True))

    @property
    def is_read(self) -> bool:
        """It asks for no effect."""
        return self.method in READS


@dataclass(frozen=True)
class Response:
    """What a provider answers. Either `json`, which may be any JSON value, or `body`, or neither."""

    status: int = 200
    json: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | str | None = None


@dataclass(frozen=True)
class Answer:
    """A response as it goes over the wire."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def reason(self) -> str:
        try:
            return HTTPStatus(self.status).phrase
        except ValueError:
            return ""


def packed(response: Response) -> Answer:
    """Raises ValueError or TypeError with the reason if it cannot be sent."""
    status = response.status
    if isinstance(status, bool) or not isinstance(status, int) or not 200 <= status <= 599:
        raise ValueError(f"status {status!r} is not a number from 200 to 599")
    headers = [(str(name), str(value)) for name, value in dict(response.headers).items()]
    names = {name.lower() for name, _ in headers}
    if response.body is not None:
        if response.json is not None:
            raise ValueError("it has a body and json, and only one of them can be sent")
        if not isinstance(response.body, bytes | str):
            raise TypeError(f"its body {short(response.body)} is neither bytes nor str")
        body = response.body.encode() if isinstance(response.body, str) else response.body
        kind = "text/plain; charset=utf-8" if isinstance(response.body, str) else "application/octet-stream"
    elif response.json is not None:
        body, kind = _json.dumps(response.json).encode(), "application/json"
    else:
        body, kind = b"", ""
    if kind and "content-type" not in names:
        headers.append(("Content-Type", kind))
    if "content-length" not in names and status not in (204, 304):
        headers.append(("Content-Length", str(len(body))))
    return Answer(status, tuple(headers), body)


def request_of(method: Any, url: str, headers: Any, body: bytes) -> Request:
    """A request, its address brought to one form."""
    text = _header_text(method).upper()
    url = address(url)
    parts = urlsplit(url)
    return Request(text, url, parts.path or "/", dict(parse_qsl(parts.query, True)), Headers(headers or ()), body)


@functools.lru_cache(maxsize=1024)
def address(url: str) -> str:
    """The URL in one form: lower-case host, no default port, no user, no fragment, at least a slash."""
    parts = urlsplit(url)
    return f"{origin(url)}{parts.path or '/'}{'?' + parts.query if parts.query else ''}"


@functools.lru_cache(maxsize=1024)
def origin(url: str) -> str:
    """Scheme, host and port (unless it is the scheme's own). Raises ValueError for a port that is no number."""
    parts = urlsplit(url)
    scheme, host, port = parts.scheme.lower(), (parts.hostname or "").lower(), parts.port
    if not host.isascii():  # as clients send it
        try:
            host = host.encode("idna").decode()
        except UnicodeError:
            pass
    host = f"[{host}]" if ":" in host else host
    return f"{scheme}://{host}{'' if port is None or port == _PORTS.get(scheme) else f':{port}'}"


@functools.lru_cache(maxsize=1024)
def is_local(host: str) -> bool:
    """An address of this machine; no name is looked up for that."""
    host = host.lower().strip("[]").rstrip(".")
    return (
        host in ("localhost", "::1", "0.0.0.0")
        or host.endswith(".localhost")
        or bool(re.match(r"127(\.\d+){3}$", host))
    )


# -- what counts -----------------------------------------------------------------------------------------------------


def url_cell(url: str) -> str:
    """The address as it is compared: without a signature."""
    base, mark, query = url.partition("?")
    if not mark or "-" not in query:
        return url
    kept = [(name, value) for name, value in parse_qsl(query, keep_blank_values=True) if not _SIGNATURES.match(name)]
    return f"{base}?{urlencode(kept)}" if kept else base


@functools.lru_cache(maxsize=1024)
def place_of(url: str) -> str:
    """An address as the name of an effect: without query, ids in the path left open, and no port on this machine."""
    parts = urlsplit(url)
    start = f"{parts.scheme}://localhost" if is_local(parts.hostname or "") else origin(url)
    return start + "/".join("{}" if _ID.fullmatch(part) else part for part in (parts.path or "/").split("/"))


def body_cell(request: Request) -> Cell:
    """What the body says. JSON and forms as JSON in a fixed order, so that each value can be compared by itself."""
    body = request.body
    if not body:
        return None
    headers = request.headers
    if headers.get("Content-Encoding", "").lower() == "gzip":
        try:
            body = gzip.decompress(body)
        except (OSError, EOFError):
            pass  # it says so, and is not
    kind = headers.get("Content-Type", "").lower()
    if kind.startswith("multipart/"):
        parts = _parts(body, headers["Content-Type"])
        if parts is not None:
            return _json.dumps(parts, sort_keys=True)
    if kind.startswith("application/x-www-form-urlencoded"):
        return _form(body)
    return _text(body)


def _text(body: bytes) -> Cell:
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return body
    if text.lstrip()[:1] in ("{", "["):
        try:
            return _json.dumps(_json.loads(text), sort_keys=True, ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    return text


def _form(body: bytes) -> Cell:
    fields: dict[str, Any] = {}
    for name, value in parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True):
        fields[name] = value if name not in fields else [*_listed(fields[name]), value]
    return _json.dumps(fields, sort_keys=True, ensure_ascii=False) if fields else _text(body)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _parts(body: bytes, kind: str) -> list[Any] | None:
    """The parts of a multipart body, whose boundary is drawn anew each time."""
    match = re.search(r'boundary="?([^";]+)', kind)
    if match is None:
        return None
    out: list[Any] = []
    for part in body.split(b"--" + match[1].encode())[1:-1]:
        head, _, content = part.strip(b"\r\n").partition(b"\r\n\r\n") if part.strip(b"\r\n") else (b"", b"", b"")
        lines = sorted(
            line
            for line in head.decode("utf-8", "replace").splitlines()
            if line.lower().startswith("content-disposition")
        )
        found = _text(content)
        if isinstance(found, bytes):
            found = (
                found.hex() if len(found) <= _BINARY_LIMIT else f"{len(found)} bytes {blake2b(found).hexdigest()[:32]}"
            )
        out.append([*lines, found])
    return out


def body_text(request: Request, limit: int = 60) -> str:
    """The body for people, on one line."""
    cell = body_cell(request)
    return "" if cell is None else (cell if isinstance(cell, str) else short(cell, limit))[:limit]


def visible(headers: Iterable[tuple[Any, Any]]) -> list[tuple[str, str]]:
    """Headers of an answer that a job may go by: not those that are new in every answer."""
    pairs = ((_header_text(name).lower(), _header_text(value)) for name, value in headers)
    return sorted((name, value) for name, value in pairs if name not in _FLEETING)


# -- bodies ----------------------------------------------------------------------------------------------------------


def read_whole(body: Any, encoding: str = "utf-8") -> tuple[bytes, Any]:
    """All of a body that is about to be sent, and what to send instead: a generator can be read only once."""
    if body is None:
        return b"", None
    if isinstance(body, bytes):
        return body, body
    if isinstance(body, str):
        return body.encode(encoding), body
    if isinstance(body, bytearray | memoryview):
        return bytes(body), body
    if hasattr(body, "read"):
        return _read_file(body)
    data = b"".join(piece.encode(encoding) if isinstance(piece, str) else bytes(piece) for piece in body)
    return data, data


def _read_file(body: Any) -> tuple[bytes, Any]:
    try:
        place = body.tell()
    except Exception:
        place = None
    data = body.read()
    data = data.encode() if isinstance(data, str) else bytes(data)
    if place is not None:
        try:
            body.seek(place)
        except Exception:
            return data, data
        return data, body
    return data, data


def _header_text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
