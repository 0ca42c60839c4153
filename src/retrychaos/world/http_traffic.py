"""One HTTP request of a job, whichever client sends it: the boundary before it, who answers it, and what is noted then.

Clients are built in layers, and any of them may be replaced by a tool of the test (responses, respx, ...), so several
layers are hooked. The outermost that sees a request announces it; the first layer below that sees the same request
lets it pass. So a request counts once, and one that a client repeats by itself counts again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from retrychaos.model.errors import WorldError
from retrychaos.model.ledger import Relation, Row, Version
from retrychaos.world.calls import Calls
from retrychaos.world.http_model import (
    REPEATABLE,
    Answer,
    Request,
    body_cell,
    body_text,
    is_local,
    origin,
    place_of,
    url_cell,
)
from retrychaos.world.http_provider import Provider
from retrychaos.world.resource import Stage
from retrychaos.world.sites import user_site


class Client(Protocol):
    """What is particular to a client library. `native` is whatever its hook knows of the request."""

    def answer(self, native: Any, answer: Answer) -> Any:
        """A response of the library's own kind."""
        ...

    def reading(self, reply: Any, whole: bool) -> tuple[Any, ...]:
        """What the job can see of a response: first the status. The body only if `whole`, as it has to be read then."""
        ...

    def refused(self, native: Any) -> BaseException:
        """What the library raises when the connection is refused: nothing has been done."""
        ...

    def unanswered(self, native: Any) -> BaseException:
        """What it raises when no answer comes in time, though the request has been carried out."""
        ...


@dataclass(eq=False)
class Crossing:
    """A request on its way."""

    request: Request
    provider: Provider | None
    effect: str
    owner: object
    layer: object
    """Who announced it."""
    seen_below: bool = False
    noted: bool = False
    """What came of it is known."""


_open: ContextVar[tuple[Crossing, ...]] = ContextVar("retrychaos_http", default=())


class Elsewhere:
    """What reached others than providers: servers on this machine, and tools of the test that answer requests.

    Only what arrived is known of them; their own state is not put back.
    """

    name = "http"
    label = "HTTP servers"
    alone = ""

    def __init__(self) -> None:
        self.version = Version({})
        self.commits = 0
        self.shared = False
        """A real server was spoken to, which forks have in common."""
        self._rows: tuple[tuple[str, Row], ...] = ()
        self._relations: dict[tuple[str, tuple[Row, ...]], Relation] = {}

    def arrived(self, effect: str, request: Request) -> None:
        row = (url_cell(request.url), body_cell(request))
        if request.method not in REPEATABLE or (effect, row) not in self._rows:
            self._rows = (*self._rows, (effect, row))

    @property
    def private(self) -> bool:
        return not self.shared

    def refresh(self) -> Version:
        if len(self._rows) != sum(len(relation.rows) for relation in self.version.relations.values()):
            self.commits += 1
            grouped: dict[str, list[Row]] = {}
            for effect, row in self._rows:
                grouped.setdefault(effect, []).append(row)
            self.version = Version({name: self._relation(name, tuple(rows)) for name, rows in grouped.items()})
        return self.version

    def _relation(self, name: str, rows: tuple[Row, ...]) -> Relation:
        known = self._relations.get((name, rows))
        if known is None:
            again = name.split()[0] in REPEATABLE
            known = Relation(name, ("url", "body"), rows, external=True, repeatable=again)
            self._relations[name, rows] = known
        return known

    def sweep(self) -> Version:
        return self.refresh()

    def save(self) -> tuple[tuple[str, Row], ...]:
        return self._rows

    def restore(self, version: Version, blob: tuple[tuple[str, Row], ...]) -> None:
        self._rows, self.version = blob, version

    def end_delivery(self) -> Sequence[str]:
        return ()

    def waits(self, owner: object) -> str:
        return ""

    def came_back(self, owner: object) -> bool:
        return False  # nothing waits in there

    def races(self, owner: object) -> bool:
        return False

    def serials(self) -> Hashable:
        return None

    def rewind_serials(self, serials: Any) -> None:
        """There are none."""

    def holds(self, owner: object) -> str:
        return ""

    def shift(self, seconds: float) -> None:
        """Servers have clocks of their own."""

    def land(self, ahead: float) -> None:
        """What has arrived stays."""

    def shift_ids(self, by: int) -> None:
        """Nothing is known of ids that servers draw."""

    def distrust(self) -> None:
        """Only what this process has sent is known anyway."""

    def close(self) -> None:
        self._rows, self._relations = (), {}


class Traffic:
    """What the hooks of all clients share during a check."""

    def __init__(self, stage: Stage, providers: Sequence[Provider], calls: Calls | None) -> None:
        self.stage = stage
        self.providers = sorted(providers, key=lambda each: -len(each.url))
        self.elsewhere = Elsewhere()
        self._calls = calls
        self._elders = frozenset(threading._active) - {threading.get_ident()}  # type: ignore[attr-defined]
        self._answering: set[int] = set()
        """Threads in which code of a route is on."""
        self._connections: list[tuple[object, Callable[[], None]]] = []

    # -- the hooks ---------------------------------------------------------------------------------------------------

    @property
    def looks_away(self) -> bool:
        """What happens now is none of our business: no delivery runs, or it is the thread of a server of the test."""
        return not self.stage.running or threading.get_ident() in self._elders

    def provider_for(self, url: str) -> Provider | None:
        """Who answers for an address in its one form."""
        return next((each for each in self.providers if each.covers(url)), None) if self.providers else None

    def exchange(self, layer: object, client: Client, native: Any, request: Request, through: Callable[[], Any]) -> Any:
        """One request of a synchronous client. `through` lets it pass on to whatever is below `layer`.

        When _enter() has returned, nothing has happened yet: ``client.refused(native)`` raised there is an error before
        the step. When _answer() or _passed() has, it is done: ``client.unanswered(native)`` there is a lost reply.
        """
        crossing = self.announced(layer, request)
        token = None
        if crossing is None:
            crossing = self._enter(layer, request)
            if crossing is None:
                return through()
            if crossing.provider is not None:
                return client.answer(native, self._answer(crossing, crossing.provider))
            token = _open.set((*_open.get(), crossing))
        try:
            reply = through()
        except Exception as problem:
            self._failed(crossing, problem)
            raise
        finally:
            if token is not None:
                _open.reset(token)
        self._passed(crossing, client.reading(reply, self.stage.concurrent))
        return reply

    async def exchange_async(
        self,
        layer: object,
        client: Client,
        native: Any,
        request: Request,
        through: Callable[[], Awaitable[Any]],
        read: Callable[[Any], Awaitable[None]],
    ) -> Any:
        """As exchange(). `read` reads the body of a reply, so that the client has it."""
        crossing = self.announced(layer, request)
        token = None
        if crossing is None:
            crossing = self._enter(layer, request)
            if crossing is None:
                return await through()
            if crossing.provider is not None:
                return client.answer(native, self._answer(crossing, crossing.provider))
            token = _open.set((*_open.get(), crossing))
        try:
            reply = await through()
            if self.stage.concurrent:
                await read(reply)
        except Exception as problem:
            self._failed(crossing, problem)
            raise
        finally:
            if token is not None:
                _open.reset(token)
        self._passed(crossing, client.reading(reply, self.stage.concurrent))
        return reply

    # -- before and after --------------------------------------------------------------------------------------------

    def announced(self, layer: object, request: Request) -> Crossing | None:
        """What a layer above has announced, if it is this very request, and no other has let it pass since."""
        for above in reversed(_open.get()):
            same = above.request.method == request.method and above.request.url == request.url
            if same and not above.seen_below and above.layer != layer and above.owner is self.stage.owner:
                above.seen_below = True
                return above
        return None

    def _enter(self, layer: object, request: Request) -> Crossing | None:
        """Here is the boundary before a request; None if it is covered by a declared call."""
        if threading.get_ident() in self._answering:
            self.stage.refuse(
                WorldError(
                    f"The code of a route sent a request itself ({request.method} {request.url}). What a provider does "
                    "is no step of the job, and a request is answered whole. Keep what it has to know in "
                    "provider.state."
                )
            )
        provider = self.provider_for(request.url)
        if provider is None:
            if self.is_covered:
                return None
            if self.stage.find(self.elsewhere.name) is not self.elsewhere:
                self.stage.adopt(self.elsewhere)
            effect = f"{request.method} {place_of(request.url)}"
        else:
            request = provider.with_key(request)
            found = provider.find(request)
            effect = provider.effect(request, None if found is None else found[1])
            if found is None:
                effect = f"{request.method} {place_of(request.url)}"
        said = body_text(request) if self.stage.traced else ""
        detail = f"{request.method} {request.url}{' ' + said if said else ''}"
        self.stage.step("http", provider or self.elsewhere, effect, detail)
        return Crossing(request, provider, effect, self.stage.owner, layer)

    def _answer(self, crossing: Crossing, provider: Provider) -> Answer:
        """A provider answers, and what it has accepted is there at the next boundary."""
        thread = threading.get_ident()
        self._answering.add(thread)
        try:
            answer = provider.answer(crossing.request)
        except WorldError as problem:  # must not look like a failure of the job
            self.stage.refuse(problem)
        finally:
            self._answering.discard(thread)
        self.stage.touched(provider)
        self.stage.observed(answer.status, answer.headers, answer.body)
        return answer

    def _passed(self, crossing: Crossing, seen: tuple[Any, ...]) -> None:
        """Somebody else has answered. A refusal is no effect."""
        if crossing.noted:
            return  # by a layer below, which has seen the very answer
        crossing.noted = True
        if not crossing.request.is_read and seen[0] < 400:
            self.elsewhere.arrived(crossing.effect, crossing.request)
            self.stage.touched(self.elsewhere)
        self.stage.observed(*seen)

    def _failed(self, crossing: Crossing, problem: Exception) -> None:
        """Nobody has answered; nothing is known to have happened."""
        crossing.noted = True
        self.stage.observed("error", type(problem).__name__, str(problem))

    # -- real connections --------------------------------------------------------------------------------------------

    @property
    def is_covered(self) -> bool:
        """A declared call is on in this thread: what it does is the user's business."""
        return self._calls is not None and self._calls.inside(threading.get_ident())

    def may_connect(self, host: str, port: int) -> bool:
        """A real connection is about to be made. Only to this machine: else nobody answers for that address here."""
        if self.looks_away or self.is_covered:
            return True
        ways = _open.get()
        target = ways[-1].request.url if ways else f"//{host}:{port}"
        if is_local(host) and is_local(urlsplit(target).hostname or ""):
            if not ways:
                return True  # no request that was seen: an escape like any other
            if not self.elsewhere.shared:
                self.stage.keep_off(f"a server at {host}:{port}")
                self.elsewhere.shared = True
            self.stage.claim_address((host, port))
            return True
        self._nobody(ways[-1].request if ways else None, host, port)
        return False

    def keep(self, close: Callable[[], None]) -> None:
        """A connection of the running delivery, which ends with it."""
        self._connections.append((self.stage.owner, close))

    def leave(self, owner: object) -> None:
        self._hang_up([each for each in self._connections if each[0] is owner])

    def end_delivery(self) -> None:
        self._hang_up(self._connections)

    def _hang_up(self, some: Sequence[tuple[object, Callable[[], None]]]) -> None:
        gone = list(some)
        self._connections = [each for each in self._connections if each not in gone]
        for _, close in gone:
            try:
                close()
            except Exception:
                pass  # it is closed already, or its loop is

    def _nobody(self, request: Request | None, host: str, port: int) -> None:
        what = f"{request.method} {request.url}" if request else f"a connection to {host}:{port}"
        where = origin(request.url) if request else f"http://{host}:{port}"
        site = user_site(sys._getframe(1))
        at = f" at {site} in {site.function}" if site else ""
        text = (
            f"effect outside the ledger: {what}{at} — nobody answers for that address in this check, and a check never "
            "uses the network, so the job was told that the connection is refused. Declare "
            f'chaos.http.provider("{where}") with the routes that the job needs, or let responses, respx or '
            "pytest-httpserver answer."
        )
        self.stage.doubt(text)
        self.stage.excuse(WorldError(text))
