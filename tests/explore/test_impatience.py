"""An answer that does not come: a task's own time limit ends before that of the client, and other code sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import fakeredis
import httpx
import pytest
import redis
from sqlalchemy import Engine, text

from retrychaos import Chaos
from retrychaos.report.text import full_text

PAY = "https://api.pay.test"
LIMIT, LONG = 2.0, 10.0
Limited = Callable[[Awaitable[Any]], Awaitable[None]]


async def by_timeout(asking: Awaitable[Any]) -> None:
    async with asyncio.timeout(LIMIT):
        await asking


async def by_wait_for(asking: Awaitable[Any]) -> None:
    await asyncio.wait_for(asking, LIMIT)


async def by_wait(asking: Awaitable[Any]) -> None:
    done, pending = await asyncio.wait([asyncio.ensure_future(asking)], timeout=LIMIT)
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending)
        raise TimeoutError
    for task in done:
        task.result()


async def with_httpx() -> None:
    async with httpx.AsyncClient(timeout=LONG) as client:
        (await client.post(f"{PAY}/charges", json={"order": 1}, headers={"Idempotency-Key": "1"})).raise_for_status()


async def with_aiohttp() -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LONG)) as session:
        async with session.post(f"{PAY}/charges", json={"order": 1}, headers={"Idempotency-Key": "1"}) as response:
            response.raise_for_status()


Ask = Callable[[], Awaitable[None]]
HTTP: list[Ask] = [with_httpx, with_aiohttp]


def settle(engine: Engine, state: str) -> None:
    with engine.begin() as db:
        db.execute(text("UPDATE orders SET state = :state WHERE state = 'new'"), {"state": state})


async def gives_up(engine: Engine, ask: Ask, limited: Limited) -> None:
    """Whoever gives up says that nothing was paid."""
    try:
        await limited(ask())
    except (TimeoutError, redis.TimeoutError):
        settle(engine, "failed")
    else:
        settle(engine, "paid")


async def gives_up_when_the_client_does(engine: Engine, ask: Ask, limited: Limited) -> None:
    """The client never does: it has more time than the task."""
    try:
        await limited(ask())
    except httpx.ReadTimeout:
        settle(engine, "failed")
    else:
        settle(engine, "paid")


async def leaves_it_to_the_retry(engine: Engine, ask: Ask, limited: Limited) -> None:
    await limited(ask())
    settle(engine, "paid")


@pytest.fixture
def shop(chaos: Chaos) -> Engine:
    chaos.http.provider(PAY, key_header="Idempotency-Key").post("/charges", json={"paid": True})
    with chaos.sql.begin() as db:
        db.execute(text("CREATE TABLE orders (id INTEGER PRIMARY KEY, state TEXT)"))
        db.execute(text("INSERT INTO orders VALUES (1, 'new')"))
    return chaos.sql


LIMITS: list[Limited] = [by_timeout, by_wait_for, by_wait]


@pytest.mark.parametrize("limited", LIMITS)
@pytest.mark.parametrize("ask", HTTP)
def test_the_limit_of_the_task_comes_first(chaos: Chaos, shop: Engine, ask: Ask, limited: Limited) -> None:
    report = chaos(duplicates=1, crashes=0, faults=True).explore(gives_up, shop, ask, limited)
    (finding,) = report.findings
    assert (finding.kind, finding.effect) == ("changed", "orders"), full_text(report)
    assert chaos.run(gives_up, shop, ask, limited, plan=finding.token).effect == "orders"


@pytest.mark.parametrize("limited", LIMITS)
@pytest.mark.parametrize("ask", HTTP)
def test_it_is_left_to_the_retry(chaos: Chaos, shop: Engine, ask: Ask, limited: Limited) -> None:
    report = chaos(duplicates=1, faults=True).explore(leaves_it_to_the_retry, shop, ask, limited)
    assert report.verdict == "proven", full_text(report)


@pytest.mark.parametrize("limited", LIMITS)
def test_what_the_client_would_raise_later_is_not_raised(chaos: Chaos, shop: Engine, limited: Limited) -> None:
    report = chaos(duplicates=1, faults=True).explore(gives_up_when_the_client_does, shop, with_httpx, limited)
    assert report.verdict == "proven", full_text(report)


def test_a_client_with_less_time_than_the_task(chaos: Chaos, shop: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.LONG", 1.0)
    report = chaos(duplicates=1, faults=True).explore(gives_up_when_the_client_does, shop, with_httpx, by_timeout)
    assert [(each.kind, each.effect) for each in report.findings] == [("changed", "orders")], full_text(report)


def test_a_client_that_waits_for_ever(chaos: Chaos, shop: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.LONG", None)
    assert chaos(duplicates=1, faults=True).explore(gives_up, shop, with_httpx, by_timeout).verdict == "failed"


async def gives_up_before_redis(engine: Engine, ask: Ask) -> None:
    try:
        await by_timeout(ask())
    except redis.TimeoutError:
        raise
    except TimeoutError:
        settle(engine, "failed")
    else:
        settle(engine, "paid")


@pytest.mark.parametrize(("patience", "verdict"), [(None, "failed"), (30, "failed"), (1, "proven")])
def test_an_answer_of_redis(chaos: Chaos, shop: Engine, patience: float | None, verdict: str) -> None:
    client = fakeredis.FakeAsyncRedis(server=fakeredis.FakeServer(), socket_timeout=patience)

    async def ask() -> None:
        await client.set("paid", "1")

    report = chaos(duplicates=1, faults=True).explore(gives_up_before_redis, shop, ask)
    assert report.verdict == verdict, full_text(report)
    assert {(each.kind, each.effect) for each in report.findings} <= {("changed", "orders")}
