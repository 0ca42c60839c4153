"""A provider: somebody who answers HTTP requests inside the process, remembers what he has accepted, and honours keys.

He is a resource: what he has accepted, the answers that he keeps for keys, and ``state`` are snapshotted and restored.
The ledger is what he has accepted, and ``state``; the answers kept tell states apart, but nobody is judged by them.
"""

from __future__ import annotations

import pickle
from bisect import bisect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from retrychaos.model.errors import OptionError, WorldError
from retrychaos.model.ledger import Cell, Relation, Row, Version
from retrychaos.model.values import plain
from retrychaos.world.http_model import REPEATABLE, Answer, Request, Response, body_cell, packed, url_cell
from retrychaos.world.http_routes import MISSING, Route, base_of, route, seconds
from retrychaos.world.resource import Plain, Stage

_KEYED = frozenset({"POST", "PATCH"})
"""Methods on which a key counts; the others can be repeated anyway."""
_NOT_KEPT = frozenset({401, 429})
"""Answers that are given before a provider looks at the key, so they are not kept for it."""


@dataclass(frozen=True)
class Kept:
    """The answer kept for a key, and for which request; `until` is when it is forgotten (None: never)."""

    request: Cell
    answer: Answer
    until: float | None


@dataclass(frozen=True)
class Held:
    """All that a provider remembers. Plain data."""

    effects: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)
    """By name. In an order of their own: it makes no difference which came first."""
    keys: Mapping[str, Kept] = field(default_factory=dict)
    key_rows: tuple[Row, ...] = ()
    """The keys as rows, in an order of their own."""
    state: bytes = b""


class Provider(Plain):
    """Made by ``chaos.http.provider(...)``.

    ``state`` is a dictionary for callables that answer: it is put back when a crash or another delivery begins from an
    earlier state. ``calls`` lists the requests of the clean run that were accepted, ``requests`` all that arrived.
    """

    def __init__(
        self, url: str, *, key_header: str | None, key_ttl: Any, on_conflict: int, replay_header: str | None
    ) -> None:
        self.url = base_of(url)
        self.name = f"http:{self.url}"
        self.label = self.url
        self.state: dict[str, Any] = {}
        self.calls: list[Request] = []
        self.requests: list[Request] = []
        self.key_header = key_header
        self.unknown: dict[str, None] = {}
        """Requests that no route answers, for people."""
        self.keyed = self.keyless = 0
        """Requests of this check on which a key would count: with one, and without."""
        self.version = Version({})
        self.commits = 0
        self.stage: Stage | None = None
        if key_header is not None and (not isinstance(key_header, str) or not key_header.strip()):
            raise OptionError(f"key_header={key_header!r} is no name of a header; use e.g. 'Idempotency-Key'.")
        if key_ttl is not None and key_header is None:
            raise OptionError("key_ttl says how long keys are remembered, but no key_header says where they are sent.")
        if replay_header is not None and key_header is None:
            raise OptionError("replay_header marks answers that were kept for a key, but no key_header is given.")
        self._ttl = seconds(key_ttl)
        self._replayed = () if replay_header is None else ((replay_header, "true"),)
        try:
            self._conflict = packed(
                Response(on_conflict, {"error": "this key was used before with other parameters (retrychaos)"})
            )
        except (TypeError, ValueError) as problem:
            raise OptionError(f"on_conflict={on_conflict!r} cannot be answered: {problem}.") from None
        self._routes: list[Route] = []
        self._held = Held()
        self._stale = False
        self._relations: dict[tuple[str, tuple[Row, ...]], Relation] = {}
        self._log: list[tuple[Request, bool]] = []
        self._last: list[tuple[Request, bool]] = []
        self._found: tuple[bytes, bytes] | None = None
        """The state before the last check and after it, pickled."""

    def __repr__(self) -> str:
        return f"<provider {self.url}>"

    # -- for users ---------------------------------------------------------------------------------------------------

    def route(
        self,
        method: str,
        path: str,
        answer: Any = None,
        /,
        *,
        json: Any = MISSING,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        body: bytes | str | None = None,
    ) -> None:
        """Answer requests of that method and path, which may have places: ``/charges/{id}``.

        answer: called with the :class:`Request`, gives a JSON value, bytes or a :class:`Response`; or such a value
        itself. A later route goes before an earlier one. Raises OptionError for what can never be sent.
        """
        if self.stage is not None and self.stage.running:
            raise OptionError(
                f"{self!r} got the route {method} {path} while a job was running: declare routes before the check, so "
                "that every delivery finds the same world. A callable may answer differently each time."
            )
        made = route(method, path, answer, json=json, status=status, headers=headers, body=body)
        self._routes.insert(0, made)

    def get(self, path: str, answer: Any = None, /, **more: Any) -> None:
        """See route()."""
        self.route("GET", path, answer, **more)

    def post(self, path: str, answer: Any = None, /, **more: Any) -> None:
        """See route()."""
        self.route("POST", path, answer, **more)

    def put(self, path: str, answer: Any = None, /, **more: Any) -> None:
        """See route()."""
        self.route("PUT", path, answer, **more)

    def patch(self, path: str, answer: Any = None, /, **more: Any) -> None:
        """See route()."""
        self.route("PATCH", path, answer, **more)

    def delete(self, path: str, answer: Any = None, /, **more: Any) -> None:
        """See route()."""
        self.route("DELETE", path, answer, **more)

    # -- requests ----------------------------------------------------------------------------------------------------

    def covers(self, url: str) -> bool:
        """The address, in its one form, is under that of this provider."""
        return url.startswith(self.url) and url[len(self.url) : len(self.url) + 1] in ("", "/", "?")

    def path_of(self, request: Request) -> str:
        return request.url[len(self.url) :].partition("?")[0] or "/"

    def find(self, request: Request) -> tuple[Request, Route] | None:
        """The route for a request, and the request with what stands in the route's places."""
        path = self.path_of(request)
        for each in self._routes:
            found = each.match(request, path)
            if found is not None:
                return found, each
        return None

    def effect(self, request: Request, route: Route | None) -> str:
        """The name of the effect."""
        return f"{request.method} {self.url}{route.path if route else self.path_of(request)}"

    def with_key(self, request: Request) -> Request:
        if self.key_header is None:
            return request
        return replace(request, key=request.headers.get(self.key_header, "").strip() or None)

    def answer(self, request: Request) -> Answer:
        """Answer as it is done in reality: a known key from memory, the rest by its route. Raises WorldError."""
        assert self.stage is not None
        now = self.stage.now()
        found = self.find(request)
        key = request.key if request.method in _KEYED else None
        if self.key_header is not None and request.method in _KEYED:
            self.keyed, self.keyless = self.keyed + (key is not None), self.keyless + (key is None)
        url, body = url_cell(request.url), None if request.is_read else body_cell(request)
        asked: Cell = (request.method, url, body)
        if key is not None and (kept := self._kept(key, now)) is not None:
            self._log.append((request, False))
            if kept.request != asked:
                return self._conflict
            return replace(kept.answer, headers=(*kept.answer.headers, *self._replayed))
        if found is None:
            self._log.append((request, False))
            self.unknown[f"{request.method} {self.url}{self.path_of(request)}"] = None
            said = f"{self!r} has no route for {request.method} {self.path_of(request)}"
            return packed(Response(404, {"error": said}))
        request, route = found
        with self.stage.aside(self._moment()) if route.is_own_code else nullcontext():
            answer = route.ask(request, self.url)
        acted = not request.is_read and answer.status < 400
        self._log.append((request, acted))
        held = self._held
        if key is not None and answer.status not in _NOT_KEPT:
            until = None if self._ttl is None else now + self._ttl
            kept = Kept(asked, answer, until)
            held = replace(held, keys={**held.keys, key: kept}, key_rows=_with(held.key_rows, _key_row(key, kept)))
        if acted:
            honours = self.key_header is not None and request.method not in REPEATABLE
            row: Row = (request.key, url, body) if honours else (url, body)
            name = self.effect(request, route)
            before = held.effects.get(name, ())
            if request.method not in REPEATABLE or row not in before:
                held = replace(held, effects={**held.effects, name: _with(before, row)})
        if route.is_own_code:
            state = self._pickled()
            if state != held.state:
                held = replace(held, state=state)
        if held is not self._held:
            self._held, self._stale = held, True
        if request.method == "HEAD":
            return replace(answer, body=b"")
        return answer

    def _kept(self, key: str, now: float) -> Kept | None:
        kept = self._held.keys.get(key)
        return None if kept is None or (kept.until is not None and kept.until <= now) else kept

    def _moment(self) -> str:
        """What a provider draws follows from how much he has accepted: an id of his own is another one each time, but
        the same wherever the check goes back to that moment. So it is no random value of the delivery that asks."""
        return f"{self.url} {sorted((name, len(rows)) for name, rows in self._held.effects.items())}"

    def _pickled(self) -> bytes:
        try:
            return pickle.dumps(self.state) if self.state else b""
        except Exception as problem:
            raise WorldError(
                f"The state of {self!r} cannot be pickled ({problem}), so it cannot be put back after a crash. Keep "
                "plain data in provider.state: numbers, texts, lists, dictionaries."
            ) from problem

    def warnings(self) -> list[str]:
        """What somebody who declared this should know after a check."""
        lines = []
        if self.unknown:
            lines.append(
                f"{', '.join(self.unknown)}: answered with 404, as no route of the provider fits. If the job needs an "
                f"answer, declare it: provider.{next(iter(self.unknown)).split()[0].lower()}(path, json=...)."
            )
        if self.keyless and not self.keyed:
            lines.append(
                f"{self.url}: key_header={self.key_header!r} was declared, and none of {self.keyless} requests carried "
                "it, so each of them counted. Send the key, or spell the header as the job does."
            )
        return lines

    # -- a check -----------------------------------------------------------------------------------------------------

    def begin(self, stage: Stage) -> None:
        """A check begins: nothing has arrived yet, and no key is known.

        The state is what the test has put there; what only the check before left there counts for nothing.
        """
        self.stage = stage
        self.unknown, self.keyed, self.keyless = {}, 0, 0
        self._log, self._last, self._relations = [], [], {}
        state = self._pickled()
        if self._found is not None and self._is_as_left(state, self._found[1]):
            state = self._found[0]
            self._load(state)
        self._found = (state, state)
        self._held, self._stale = Held(state=state), False
        self.version = Version({})
        self.version = self._build()

    def _is_as_left(self, state: bytes, left: bytes) -> bool:
        """Nobody has changed the state since the last check. Equal data may be pickled in two ways."""
        return state == left or (bool(state and left) and bool(pickle.loads(left) == self.state))

    def over(self) -> None:
        """The check is over, and everything is as the clean run left it, or as it was found."""
        if self._found is not None:
            self._found = (self._found[0], self._held.state)
        self.stage = None

    def clean_run_done(self) -> None:
        self.requests = [request for request, _ in self._last]
        self.calls = [request for request, acted in self._last if acted]

    def _load(self, state: bytes) -> None:
        fresh = pickle.loads(state) if state else {}
        self.state.clear()  # callables may hold on to it
        self.state.update(fresh)

    # -- Resource ----------------------------------------------------------------------------------------------------

    private = True
    alone = ""

    def refresh(self) -> Version:
        self._forget_keys()
        if self._stale:
            self._stale = False
            self.commits += 1
            built = self._build()
            if built.expiries != self.version.expiries or not _same(built, self.version):
                self.version = built
        return self.version

    def sweep(self) -> Version:
        return self.refresh()

    def save(self) -> Held:
        return self._held

    def restore(self, version: Version, blob: Held) -> None:
        if blob.state != self._held.state or self._pickled() != blob.state:
            self._load(blob.state)
        self._held, self._stale = blob, False
        self._log, self._last = [], []
        self.version = version
        self._forget_keys()
        if self._stale:
            self._stale = False
            self.version = self._build()

    def end_delivery(self) -> Sequence[str]:
        if self._log:
            self._last, self._log = self._log, []
        return ()

    def holds(self, owner: object) -> str:
        return ""  # a request is answered whole

    def shift(self, seconds: float) -> None:
        """He has the virtual clock."""

    def land(self, ahead: float) -> None:
        """Keys are forgotten with the check."""

    def shift_ids(self, by: int) -> None:
        """He draws no ids of his own."""

    def distrust(self) -> None:
        """Nothing can have changed unseen: it is all in the memory of this process."""

    def close(self) -> None:
        self._log, self._last, self._relations = [], [], {}

    # -- versions ----------------------------------------------------------------------------------------------------

    def _forget_keys(self) -> None:
        ends = self.version.expiries
        if not ends or self.stage is None or self._held.keys == {} or ends[0] > self.stage.now():
            return
        now = self.stage.now()
        keys = {key: kept for key, kept in self._held.keys.items() if kept.until is None or kept.until > now}
        if len(keys) < len(self._held.keys):
            rows: tuple[Row, ...] = ()
            for key, kept in keys.items():
                rows = _with(rows, _key_row(key, kept))
            self._held, self._stale = replace(self._held, keys=keys, key_rows=rows), True

    def _build(self) -> Version:
        relations = {name: self._effects(name, rows) for name, rows in self._held.effects.items()}
        name = f"{self.url} state"
        relations[name] = self._relation(name, ("name", "item", "value"), _state_rows(self.state), keys=(0, 1))
        if self.key_header is not None:
            name = f"{self.url} keys"
            columns = ("sent key", "request", "status", "answer")
            relations[name] = self._relation(name, columns, self._held.key_rows, memory=True)
        ending = {
            kept.until: f"the key {key!r} at {self.url}"
            for key, kept in self._held.keys.items()
            if kept.until is not None
        }
        return Version(relations, tuple(sorted(ending)), ending)

    def _effects(self, name: str, rows: tuple[Row, ...]) -> Relation:
        if name.split()[0] in REPEATABLE:
            return self._relation(name, ("url", "body"), rows, external=True, repeatable=True)
        columns = ("url", "body") if self.key_header is None else (self.key_header, "url", "body")
        return self._relation(name, columns, rows, external=True)

    def _relation(self, name: str, columns: tuple[str, ...], rows: tuple[Row, ...], **more: Any) -> Relation:
        """The same object for the same rows, over all states of the check."""
        current = self.version.relations.get(name)
        if current is not None and current.rows is rows:
            return current
        known = self._relations.get((name, rows))
        if known is None:
            known = self._relations[name, rows] = Relation(name, columns, rows, **more)
        return known


def _with(rows: tuple[Row, ...], row: Row) -> tuple[Row, ...]:
    at = bisect(rows, repr(row), key=repr)
    return (*rows[:at], row, *rows[at:])


def _key_row(key: str, kept: Kept) -> Row:
    return (key, kept.request, kept.answer.status, kept.answer.body.decode("utf-8", "replace"))


def _same(one: Version, other: Version) -> bool:
    """The same relations, which are the same objects for the same rows."""
    return one.relations.keys() == other.relations.keys() and all(
        relation is other.relations[name] for name, relation in one.relations.items()
    )


def _state_rows(state: Mapping[str, Any]) -> tuple[Row, ...]:
    """What a test keeps in ``state``: each item of its dictionaries and lists is a row."""
    rows: list[Row] = []
    for name, value in state.items():
        if isinstance(value, dict):
            rows += [(plain(name), plain(key), plain(item)) for key, item in value.items()]
        elif isinstance(value, list | set | tuple):
            rows += [(plain(name), None, plain(item)) for item in value]
        else:
            rows.append((plain(name), None, plain(value)))
    return tuple(sorted(rows, key=repr))
