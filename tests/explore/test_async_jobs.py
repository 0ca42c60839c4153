"""Async jobs: each delivery has an event loop of its own, in virtual time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

import retrychaos
from retrychaos.model.errors import BaselineError, ChaosError

PAY = "https://api.pay.test"
DUPLICATES = pytest.mark.parametrize("duplicates", [1, 2])


@pytest.fixture
def pay(chaos: retrychaos.Chaos) -> Any:
    provider = chaos.http.provider(PAY, key_header="Idempotency-Key")
    provider.post("/charges", json={"id": "ch_1"}, status=201)
    return provider


async def charge(key: str | None = None, amount: int = 5) -> None:
    headers = {} if key is None else {"Idempotency-Key": key}
    async with httpx.AsyncClient(verify=False) as client:
        await client.post(f"{PAY}/charges", json={"amount": amount}, headers=headers)


async def charge_later(key: str | None) -> None:
    await asyncio.sleep(3_600)
    await charge(key)


async def charge_together(own_keys: bool) -> None:
    async def one(number: int) -> None:
        await asyncio.sleep(5 - number)
        await charge(f"order-{number if own_keys else 0}", number)

    async with asyncio.TaskGroup() as group:
        for number in (1, 2, 3):
            group.create_task(one(number))


async def charge_in_a_thread(key: str | None) -> None:
    def post() -> None:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        headers = {} if key is None else {"Idempotency-Key": key}
        httpx.post(f"{PAY}/charges", json={"amount": 5}, headers=headers, verify=False)

    await asyncio.to_thread(post)


async def charge_after_a_timeout(key: str | None) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5):
            await asyncio.sleep(10)
    await charge(key)


def charge_from_sync_code(key: str | None) -> None:
    asyncio.run(charge_later(key))


@DUPLICATES
@pytest.mark.parametrize(
    "job", [charge, charge_later, charge_in_a_thread, charge_after_a_timeout, charge_from_sync_code]
)
@pytest.mark.parametrize(("key", "verdict"), [("order-1", "proven"), (None, "failed")])
def test_a_job_on_asyncio(
    chaos: retrychaos.Chaos, pay: Any, job: Callable[..., Any], key: str | None, verdict: str, duplicates: int
) -> None:
    report = chaos(duplicates=duplicates).explore(job, key)
    assert report.verdict == verdict, report
    assert [finding.kind for finding in report.findings] == (["duplicated"] if verdict == "failed" else [])
    assert len(pay.calls) == 1


@DUPLICATES
def test_tasks_belong_to_their_delivery(chaos: retrychaos.Chaos, pay: Any, duplicates: int) -> None:
    report = chaos(duplicates=duplicates, budget=20.0).explore(charge_together, True)
    assert report.verdict == "proven", report
    assert [call.json["amount"] for call in pay.calls] == [3, 2, 1], "in the order of their timers"


def test_the_line_that_sleeps(chaos: retrychaos.Chaos, pay: Any) -> None:
    report = chaos.explore(charge_later, None)
    sleeps = [step for step in report.findings[0].timeline[0].steps if step.kind == "sleep"]
    assert [step.site and step.site.source for step in sleeps] == ["await asyncio.sleep(3_600)"]


def test_a_task_that_is_left_running(chaos: retrychaos.Chaos, pay: Any) -> None:
    async def later() -> None:
        await asyncio.sleep(5)
        await charge("order-2")

    async def job() -> None:
        await charge("order-1")
        job.task = asyncio.create_task(later())  # type: ignore[attr-defined]  # so that it is not collected

    report = chaos.explore(job)
    assert report.verdict == "inconclusive"
    assert "left the task 'later' running when it returned" in report.stop_reason


def test_waiting_for_what_never_comes(chaos: retrychaos.Chaos, pay: Any) -> None:
    async def job() -> None:
        await charge("order-1")
        await asyncio.Event().wait()

    with pytest.raises(BaselineError, match="waits for something that never comes"):
        chaos.explore(job)


def test_a_loop_that_is_left_open(chaos: retrychaos.Chaos, pay: Any) -> None:
    def job() -> None:
        asyncio.new_event_loop().run_until_complete(charge("order-1"))

    threads = threading.active_count()
    report = chaos.explore(job)
    assert report.verdict == "proven", report
    assert threading.active_count() == threads


def test_a_check_within_a_running_loop(chaos: retrychaos.Chaos, pay: Any) -> None:
    """As in a test of pytest-asyncio."""

    async def test() -> str:
        loop = asyncio.get_running_loop()
        verdict = chaos.explore(charge_later, "order-1").verdict
        await asyncio.sleep(0)
        assert asyncio.get_running_loop() is loop
        return verdict

    assert asyncio.run(test()) == "proven"


def test_loops_outside_of_deliveries_are_as_before(chaos: retrychaos.Chaos, pay: Any) -> None:
    before = asyncio.base_events.BaseEventLoop.run_in_executor, asyncio.SelectorEventLoop.__init__
    chaos.explore(charge, "order-1")
    assert (asyncio.base_events.BaseEventLoop.run_in_executor, asyncio.SelectorEventLoop.__init__) == before

    async def names() -> set[str]:
        return {threading.current_thread().name, await asyncio.to_thread(lambda: threading.current_thread().name)}

    assert len(asyncio.run(names())) == 2


def test_cleaning_up_after_an_error(chaos: retrychaos.Chaos, pay: Any) -> None:
    """What a job does on its way out of a fault counts."""

    def job_that(at_the_end: Callable[[], Awaitable[None]]) -> Callable[[], Any]:
        async def job() -> None:
            try:
                await charge("order-1")
            except httpx.HTTPError:
                await at_the_end()
                raise

        return job

    async def nothing() -> None:
        pass

    async def refund() -> None:
        await charge(None, -5)

    assert chaos(faults=True).explore(job_that(nothing)).verdict == "proven"
    assert chaos(faults=True).explore(job_that(refund)).verdict == "failed"


def test_a_generator_is_no_job(chaos: retrychaos.Chaos) -> None:
    async def job() -> Any:
        yield 1

    with pytest.raises(ChaosError, match="is a generator function: calling it runs nothing"):
        chaos.check(job)
