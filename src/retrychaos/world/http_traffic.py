"""One HTTP request of a job, whichever client sends it: the boundary before it, who answers it, and what is noted then.

Clients are built in layers, and any of them may be replaced by a tool of the test (responses, respx, ...), so several
layers are hooked. The outermost that sees a request announces it; the first layer below that sees the same request
lets it pass. So a request counts once, and one that a client repeats by itself counts again.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from retrychaos.model.errors import WorldError
from retrychaos.model.plan import ERROR, LOST_REPLY
from retrychaos.world.calls import Calls
from retrychaos.world.http_elsewhere import Elsewhere
from retrychaos.world.http_model import (
    REPEATABLE,
    Answer,
    Request,
    body_text,
    is_local,
    origin,
    place_of,
)
from retrychaos.world.http_provider import Provider
from retrychaos.world.resource import Stage
from retrychaos.world.silence import silence
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


class AsyncClient(Client, Protocol):
    """One that is used by tasks of an event loop."""

    def patience(self, native: Any) -> float | None:
        """Seconds in which an answer has to come; None: it has all the time."""
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


class Traffic:
    """What the hooks of all clients share during a check."""

    def __init__(self, stage: Stage, providers: Sequence[Provider], calls: Calls | None) -> None:
        self.stage = stage
        self.providers = sorted(providers, key=lambda each: -len(each.url))
        self.elsewhere = Elsewhere()
        self._calls = calls
        self._elders = frozenset(threading._active) - {threading.get_ident()}  # type: ignore[attr-defined]
        self.keyed: dict[str, None] = {}
        """Effects whose requests had a key, at somebody of whom it is not known whether he honours keys."""
        self._answering: set[int] = set()
        """Threads in which code of a route is on."""
        self._connections: list[tuple[object, Callable[[], None]]] = []

    # -- the hooks ---------------------------------------------------------------------------------------------------

    @property
    def looks_away(self) -> bool:
        """What happens now is none of our business: no delivery runs, or it is the thread of a server or a tool."""
        if not self.stage.running:
            return True
        # A pool of threads that an earlier delivery has filled runs code of the user.
        return threading.get_ident() in self._elders and user_site(sys._getframe(1)) is None

    def provider_for(self, url: str) -> Provider | None:
        """Who answers for an address in its one form."""
        return next((each for each in self.providers if each.covers(url)), None) if self.providers else None

    def exchange(self, layer: object, client: Client, native: Any, request: Request, through: Callable[[], Any]) -> Any:
        """One request of a synchronous client. `through` lets it pass on to whatever is below `layer`."""
        crossing = self.announced(layer, request)
        token = None
        if crossing is None:
            crossing = self._enter(layer, request)
            if crossing is None:
                return through()
            self.stage.strike(ERROR, lambda: client.refused(native))
            if crossing.provider is not None:
                answer = self._answer(crossing, crossing.provider)
                self.stage.strike(LOST_REPLY, lambda: client.unanswered(native))
                return client.answer(native, answer)
            token = _open.set((*_open.get(), crossing))
        try:
            reply = through()
        except Exception as problem:
            self._failed(crossing, problem)
            raise
        finally:
            if token is not None:
                _open.reset(token)
        if self._passed(crossing, client.reading(reply, False)[0]):
            self.stage.strike(LOST_REPLY, lambda: client.unanswered(native))
            self.stage.observed(*client.reading(reply, True))
        return reply

    async def exchange_async(
        self,
        layer: object,
        client: AsyncClient,
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
            self.stage.strike(ERROR, lambda: client.refused(native))
            if crossing.provider is not None:
                answer = self._answer(crossing, crossing.provider)
                await self._silence(client, native)
                return client.answer(native, answer)
            token = _open.set((*_open.get(), crossing))
        try:
            async with self.stage.gate.passing():
                reply = await through()
        except (Exception, asyncio.CancelledError) as problem:  # cancelled: a time limit of the job's own
            self._failed(crossing, problem)
            raise
        finally:
            if token is not None:
                _open.reset(token)
        if self._passed(crossing, client.reading(reply, False)[0]):
            await read(reply)
            await self._silence(client, native)
            self.stage.observed(*client.reading(reply, True))
        return reply

    async def _silence(self, client: AsyncClient, native: Any) -> None:
        """Here a reply may get lost."""
        lose = functools.partial(self.stage.strike, LOST_REPLY, lambda: client.unanswered(native))
        await silence(client.patience(native), lose)

    # -- before and after --------------------------------------------------------------------------------------------

    def announced(self, layer: object, request: Request) -> Crossing | None:
        """What a layer above has announced, if it is this very request, and no other has let it pass since."""
        for above in reversed(_open.get()):
            if above.seen_below or above.layer == layer or above.owner is not self.stage.owner:
                continue
            if above.request.method == request.method and above.request.url == request.url:
                above.seen_below = True
                return above
            if above.request.method == request.method and request.body and above.request.body == request.body:
                # Something in between sends it to another address: this is the request that arrives, not that one.
                above.seen_below = above.noted = True
                return None
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

    def _passed(self, crossing: Crossing, status: int) -> bool:
        """Somebody else has answered. A refusal is no effect. Does it matter what the job gets to see?"""
        if crossing.noted:
            return False  # by a layer below, which has seen the very answer
        crossing.noted = True
        if status < 400:
            self._arrived(crossing)
        return self.stage.concurrent

    def _failed(self, crossing: Crossing, problem: BaseException) -> None:
        """There is no answer. The request has arrived nevertheless, unless nobody was there to take it."""
        if not crossing.noted:
            crossing.noted = True
            if may_have_arrived(problem):
                self._arrived(crossing)
        self.stage.observed("error", type(problem).__name__, str(problem))

    def _arrived(self, crossing: Crossing) -> None:
        request = crossing.request
        if request.is_read:
            return
        self.elsewhere.arrived(crossing.effect, request)
        self.stage.touched(self.elsewhere)
        if request.method not in REPEATABLE and "Idempotency-Key" in request.headers:
            self.keyed[crossing.effect] = None

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


_NOT_SENT = ("Connect", "NewConnection", "NameResolution", "Pool", "ClientConnector", "Proxy", "SSL", "Invalid")
_SENT = ("Timeout", "Read", "Write", "Protocol", "Disconnected", "Reset", "Cancelled", "Incomplete", "BrokenPipe")


def may_have_arrived(problem: BaseException) -> bool:
    """An error of a client after the request was sent: whether it was carried out, the client cannot know."""
    names = {type(each).__name__ for each in _chain(problem)}
    if any(name.startswith(_NOT_SENT) and name not in ("ConnectionResetError", "ConnectionError") for name in names):
        return False
    return any(part in name for name in names for part in _SENT)


def _chain(problem: BaseException) -> Iterator[BaseException]:
    """An error, and those that it comes from."""
    seen: list[BaseException] = []
    waiting = [problem]
    while waiting:
        each = waiting.pop()
        if any(each is other for other in seen):
            continue
        seen.append(each)
        yield each
        inner = (each.__cause__, each.__context__, getattr(each, "reason", None), *each.args)
        waiting += [other for other in inner if isinstance(other, BaseException)]
