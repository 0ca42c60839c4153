"""HTTP: ``chaos.http`` for users, and the source that hooks the clients a process has imported.

What a provider answers never leaves the process; see http_provider.py. What others answer, and how a request is seen
once whatever the layers of its client: http_traffic.py. The clients: http_urllib3.py, http_requests.py, http_httpx.py,
http_aiohttp.py, http_stdlib.py, each imported only when its library has been.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from retrychaos.model.errors import OptionError
from retrychaos.world.calls import Calls
from retrychaos.world.http_patches import Patches
from retrychaos.world.http_provider import Provider
from retrychaos.world.http_traffic import Traffic
from retrychaos.world.imports import Imports
from retrychaos.world.resource import Blob, Stage


class Http:
    """Providers that answer HTTP requests of jobs, during checks."""

    def __init__(self) -> None:
        self.providers: list[Provider] = []
        self.stage: Stage | None = None
        self._calls: Calls | None = None
        self._traffic: Traffic | None = None
        self._keyed: tuple[str, ...] = ()
        self._patches = Patches()
        self._imports: Imports | None = None

    # -- for users ---------------------------------------------------------------------------------------------------

    def provider(
        self,
        url: str,
        *,
        key_header: str | None = None,
        key_ttl: Any = None,
        on_conflict: int = 422,
        replay_header: str | None = None,
    ) -> Provider:
        """Somebody who answers at that address, in this process.

        key_header: the header on whose value repeated POST and PATCH requests are recognised; without it each counts.
        key_ttl: how long a key is remembered, as ``"24h"``, seconds or a timedelta; None: for ever. on_conflict: the
        status for a known key with other parameters. replay_header: a header that an answer from memory has besides,
        such as ``"Idempotent-Replayed"``; a job that can tell it from a first answer has more states, to be tried.
        Raises OptionError.
        """
        if self.stage is not None and self.stage.running:
            raise OptionError(
                f"the provider {url!r} was declared while a job was running: declare it before the check, so that "
                "every delivery finds the same world."
            )
        made = Provider(
            url, key_header=key_header, key_ttl=key_ttl, on_conflict=on_conflict, replay_header=replay_header
        )
        if any(each.url == made.url for each in self.providers):
            raise OptionError(
                f"{made.url} has a provider already, and one address has one: add routes to that one. (A provider for "
                "a path below it, with a longer address, is possible.)"
            )
        self.providers.append(made)
        return made

    # -- a check -----------------------------------------------------------------------------------------------------

    def begin(self, stage: Stage, calls: Calls) -> None:
        """A check is being set up."""
        self.stage, self._calls = stage, calls
        for provider in self.providers:
            provider.begin(stage)

    def adopt(self) -> None:
        """Every provider belongs to the world from the beginning."""
        assert self.stage is not None
        for provider in self.providers:
            self.stage.adopt(provider)

    def clean_run_done(self) -> None:
        for provider in self.providers:
            provider.clean_run_done()

    def over(self) -> None:
        """The check is over."""
        for provider in self.providers:
            provider.over()
        self.stage = None

    def notes(self) -> list[str]:
        """What helps to understand a report."""
        if not self._keyed:
            return []
        return [
            f"{', '.join(self._keyed)}: sent with an Idempotency-Key, and answered by a tool or server of which it is "
            "not known that it honours keys, so each request counted. If the real receiver does, answer by "
            'chaos.http.provider(..., key_header="Idempotency-Key").'
        ]

    def warnings(self) -> list[str]:
        """What somebody who declared providers should know after a check."""
        return [line for provider in self.providers for line in provider.warnings()]

    # -- Source ------------------------------------------------------------------------------------------------------

    def install(self) -> None:
        if self._imports is not None:
            return
        assert self.stage is not None
        traffic = self._traffic = Traffic(self.stage, self.providers, self._calls)
        self._imports = Imports({name: self._hooking(make, traffic) for name, make in _HOOKS.items()})
        self._imports.start()

    def uninstall(self) -> None:
        if self._imports is not None:
            self._imports.stop()
            self._imports = None
        self._patches.undo()
        if self._traffic is not None:
            self._traffic.end_delivery()
            self._keyed = tuple(self._traffic.keyed)
            self._traffic = None

    def part(self, blobs: Mapping[str, Blob], folder: str) -> None:
        """Providers are in the memory of the process."""

    def end_delivery(self) -> None:
        if self._traffic is not None:
            self._traffic.end_delivery()

    def leave(self, owner: object) -> None:
        if self._traffic is not None:
            self._traffic.leave(owner)

    def cancel(self, owner: object) -> None:
        """Nothing waits anywhere but here."""

    def _hooking(self, make: Callable[[Traffic, Patches], None], traffic: Traffic) -> Callable[[], None]:
        def hook() -> None:
            try:
                make(traffic, self._patches)
            except (ImportError, AttributeError, KeyError) as problem:
                self._unhooked(problem)

        return hook

    def _unhooked(self, problem: Exception) -> None:
        """Only a job that uses it has to know. It cannot be told whether it does, so escapes are left to tell."""
        if self.stage is not None:
            self.stage.doubt(f"an HTTP client could not be hooked, so requests it sends are not steps: {problem}")


# -- clients, by the module whose import makes them ------------------------------------------------------------------


def _http_client(traffic: Traffic, patches: Patches) -> None:
    from retrychaos.world.http_stdlib import hook_client

    hook_client(traffic, patches)


def _urllib(traffic: Traffic, patches: Patches) -> None:
    from retrychaos.world.http_stdlib import hook_urllib

    hook_urllib(traffic, patches)


def _urllib3(traffic: Traffic, patches: Patches) -> None:
    from retrychaos.world.http_urllib3 import hook

    hook(traffic, patches)


def _requests(traffic: Traffic, patches: Patches) -> None:
    from retrychaos.world.http_requests import hook

    hook(traffic, patches)


def _responses(traffic: Traffic, patches: Patches) -> None:
    from retrychaos.world.http_requests import hook_responses

    hook_responses(traffic, patches)


def _requests_mock(traffic: Traffic, patches: Patches) -> None:
    from retrychaos.world.http_requests import hook_requests_mock

    hook_requests_mock(traffic, patches)


def _httpx(traffic: Traffic, patches: Patches) -> None:
    from retrychaos.world.http_httpx import hook

    hook(traffic, patches)


def _httpcore(traffic: Traffic, patches: Patches) -> None:
    from retrychaos.world.http_httpx import hook_httpcore

    hook_httpcore(traffic, patches)


def _aiohttp(traffic: Traffic, patches: Patches) -> None:
    from retrychaos.world.http_aiohttp import hook

    hook(traffic, patches)


_HOOKS: Mapping[str, Callable[[Traffic, Patches], None]] = {
    "http.client": _http_client,
    "urllib.request": _urllib,
    "urllib3": _urllib3,
    "requests": _requests,
    "responses": _responses,
    "requests_mock.adapter": _requests_mock,
    "httpx": _httpx,
    "httpcore": _httpcore,
    "aiohttp": _aiohttp,
}
