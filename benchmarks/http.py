"""What an HTTP step costs on top of the client's own work. ``python -m benchmarks.http``

A job of many requests is delivered in a check, which answers them by a provider, and plainly, with the mock transport
that is usual for its client and answers in the process, too. The difference is what a check adds to a request.
"""

from __future__ import annotations

import asyncio
import io
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import aiohttp
import httpx
import requests
import responses
import respx
import urllib3
import urllib3.connectionpool

import retrychaos
from retrychaos.runtime.chance import Chance
from retrychaos.runtime.clock import Clock
from retrychaos.runtime.delivery import Job, Order, Workshop, keep_all
from retrychaos.world.world import World

REQUESTS = 200
RUNS = 7
MOST = 0.3
"""Milliseconds that are promised for one step, on top of what the client takes."""
URL = "https://api.pay.test/charges"

Send = Callable[[Any, int], Any]


def main() -> int:
    rows = [
        _row("requests", by_requests, below_requests),
        _row("requests", by_requests, with_responses),
        _row("httpx", by_httpx, with_mock_transport),
        _row("httpx", by_httpx, with_respx),
        _row("httpx, async", by_httpx_async, with_async_mock_transport),
        _row("aiohttp", by_aiohttp, None),
    ]
    print("| client | a request in a check | plain, with | | ratio | added | |")
    print("|---|---:|---|---:|---:|---:|---|")
    for client, inside, how, plain in rows:
        if plain is None:
            print(f"| {client} | {inside:.3f} ms | | | | | |")
            continue
        ok = "ok" if inside - plain <= MOST else "too slow"
        print(
            f"| {client} | {inside:.3f} ms | {how} | {plain:.3f} ms | {inside / plain:.2f} "
            f"| {inside - plain:+.3f} <= {MOST} ms | {ok} |"
        )
    return 1 if any(plain is not None and inside - plain > MOST for _, inside, _, plain in rows) else 0


def _row(client: str, job: Callable[[Any], None], plainly: Any) -> tuple[str, float, str, float | None]:
    inside, plain = [], []
    for _ in range(RUNS):  # in turn, so that a slow minute hits both
        inside.append(_in_a_check(job))
        if plainly is not None:
            plain.append(plainly(job))
    if plainly is None:
        return client, statistics.median(inside), "", None
    return client, statistics.median(inside), plainly.__doc__, statistics.median(plain)


def _in_a_check(job: Callable[[Any], None]) -> float:
    """Milliseconds of one request in one delivery, without what a check does around it."""
    with retrychaos.Chaos() as chaos:
        pay = chaos.http.provider("https://api.pay.test", key_header="Idempotency-Key", key_ttl="24h")
        pay.post("/charges", json={"id": "ch_1"}, status=201)
        clock, chance = Clock(), Chance("benchmark")
        world = World(now=clock.now, options=vars(chaos.options), drew=chance.drew, aside=chance.aside)
        workshop = Workshop(world, clock, chance)
        chaos._furnish(world, workshop)
        spent: list[float] = []

        def timed() -> None:
            spent.append(_timed(job, None))

        try:
            workshop.start()
            chaos.http.adopt()
            outcome = workshop.run(Job(timed), Order(None, clock.base, 1, "1", limit=60), keep_all)
        finally:
            workshop.stop()
            world.close()
            chaos.http.over()
        assert outcome.end == "done", outcome.error
        assert len(outcome.steps) == REQUESTS
    return spent[0]


def _timed(job: Callable[[Any], None], transport: Any) -> float:
    began = _real()
    job(transport)
    return 1000 * (_real() - began) / REQUESTS


def _real() -> float:
    """Seconds; perf_counter is virtual in a check."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


# -- jobs --------------------------------------------------------------------------------------------------------------


def _more(number: int) -> dict[str, Any]:
    return {"json": {"order": number, "cents": 4200}, "headers": {"Idempotency-Key": f"order-{number}"}}


def by_requests(transport: Any) -> None:
    with requests.Session() as session:
        for number in range(REQUESTS):
            assert session.post(URL, **_more(number)).json() == {"id": "ch_1"}


_verify = httpx.create_ssl_context()


def by_httpx(transport: Any) -> None:
    with httpx.Client(transport=transport, verify=_verify) as client:
        for number in range(REQUESTS):
            assert client.post(URL, **_more(number)).json() == {"id": "ch_1"}


def by_httpx_async(transport: Any) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(transport=transport, verify=_verify) as client:
            for number in range(REQUESTS):
                assert (await client.post(URL, **_more(number))).json() == {"id": "ch_1"}

    asyncio.run(main())


def by_aiohttp(transport: Any) -> None:
    async def main() -> None:
        async with aiohttp.ClientSession() as session:
            for number in range(REQUESTS):
                async with session.post(URL, **_more(number)) as reply:
                    assert await reply.json() == {"id": "ch_1"}

    asyncio.run(main())


# -- mocks -------------------------------------------------------------------------------------------------------------


def below_requests(job: Callable[[Any], None]) -> float:
    """an answer in place of urllib3's `_make_request`"""

    def answer(pool: Any, conn: Any, method: str, url: str, **more: Any) -> Any:
        response = urllib3.HTTPResponse(
            body=io.BytesIO(b'{"id": "ch_1"}'), status=201, preload_content=False, request_method=method
        )
        pool._put_conn(more["response_conn"])
        return response

    with mock.patch.object(urllib3.connectionpool.HTTPConnectionPool, "_make_request", answer):
        return _timed(job, None)


def with_responses(job: Callable[[Any], None]) -> float:
    """responses"""
    with responses.RequestsMock() as answers:
        answers.post(URL, json={"id": "ch_1"}, status=201)
        return _timed(job, None)


def _answer(request: httpx.Request) -> httpx.Response:
    return httpx.Response(201, json={"id": "ch_1"})


def with_mock_transport(job: Callable[[Any], None]) -> float:
    """MockTransport"""
    return _timed(job, httpx.MockTransport(_answer))


async def _answer_async(request: httpx.Request) -> httpx.Response:
    return _answer(request)


def with_async_mock_transport(job: Callable[[Any], None]) -> float:
    """MockTransport"""
    return _timed(job, httpx.MockTransport(_answer_async))


def with_respx(job: Callable[[Any], None]) -> float:
    """respx"""
    with respx.mock:
        respx.post(URL).respond(201, json={"id": "ch_1"})
        return _timed(job, None)


if __name__ == "__main__":
    sys.exit(main())
