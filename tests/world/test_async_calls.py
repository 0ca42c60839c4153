"""Declared calls of coroutine functions: an effect happens when they are awaited."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias
from unittest import mock

import pytest
from sqlalchemy import Engine, text
from tests.conftest import Shop

from retrychaos import Chaos, ChaosError
from retrychaos.report.text import full_text

Job: TypeAlias = Callable[[Engine], Coroutine[Any, Any, None]]
HERE = sys.modules[__name__]


async def charge(order: int, amount: int = 5, key: str | None = None) -> str:
    """Takes its time, as a client does."""
    await asyncio.sleep(3)
    return f"charge of {order}"


def in_disguise(order: int) -> Any:
    return charge(order)


class Gateway:
    async def send(self, order: int) -> str:
        return f"sent {order}"


gateway = Gateway()
pay = mock.AsyncMock(return_value="ok")


@pytest.fixture
def engine(shop: Shop) -> Engine:
    return shop.engine


def status(engine: Engine) -> str:
    with engine.connect() as db:
        return str(db.scalar(text("SELECT status FROM orders WHERE id = 1")))


def finish(engine: Engine) -> None:
    with engine.begin() as db:
        db.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))


async def charges(engine: Engine) -> None:
    if status(engine) != "done":
        assert await charge(1) == "charge of 1"
        finish(engine)


async def charges_with_key(engine: Engine) -> None:
    await charge(1, key="order-1")
    finish(engine)


async def never_awaited(engine: Engine) -> None:
    charge(1).close()
    finish(engine)


async def sends(engine: Engine) -> None:
    assert await gateway.send(1) == "sent 1"
    finish(engine)


async def pays(engine: Engine) -> None:
    assert await pay(1) == "ok"
    finish(engine)


async def together(engine: Engine) -> None:
    assert await asyncio.gather(charge(1), charge(2)) == ["charge of 1", "charge of 2"]
    finish(engine)


def findings(report: Any) -> set[tuple[str, str]]:
    return {(each.kind, each.effect.rpartition(".")[2]) for each in report.findings}


@pytest.mark.parametrize(
    ("job", "owner", "name"),
    [
        *((charges, HERE, "charge"), (sends, Gateway, "send"), (sends, gateway, "send"), (pays, HERE, "pay")),
        (together, HERE, "charge"),
    ],
)
def test_a_call_that_is_repeated(chaos: Chaos, engine: Engine, job: Job, owner: Any, name: str) -> None:
    watched = chaos.watch(owner, name)
    report = chaos.explore(job, engine)
    assert findings(report) == {("duplicated", name)}, full_text(report)
    assert watched.calls[0].args == (1,)
    assert not chaos.run(job, engine, plan=report.findings[0].token).ok
    assert inspect.iscoroutinefunction(charge) and inspect.iscoroutinefunction(Gateway.send)


def test_a_receiver_that_knows_its_keys(chaos: Chaos, engine: Engine) -> None:
    chaos.watch(HERE, "charge", key="key", result=lambda *args, **kwargs: mock.sentinel.receipt)
    report = chaos(duplicates=2, faults=True).explore(charges_with_key, engine)
    assert report.verdict == "proven", full_text(report)


def test_no_key_for_two_at_once(chaos: Chaos, engine: Engine) -> None:
    chaos.watch(HERE, "charge", result="charge of 1")
    report = chaos(duplicates=2, crashes=0).explore(charges, engine)
    assert findings(report) == {("duplicated", "charge")}, full_text(report)


def test_what_is_never_awaited_is_no_call(chaos: Chaos, engine: Engine) -> None:
    watched = chaos.watch(HERE, "charge")
    assert chaos.explore(never_awaited, engine).verdict == "proven"
    assert watched.calls == []


@pytest.mark.parametrize("result", ["declared", mock.AsyncMock(return_value="declared"), OSError("down")])
def test_declared_results(chaos: Chaos, engine: Engine, result: Any) -> None:
    chaos.watch(HERE, "charge", result=result)

    async def job(engine: Engine) -> None:
        try:
            got = await charge(1, key="k")
        except OSError as error:
            got = str(error)
        with engine.begin() as db:
            db.execute(text("UPDATE orders SET status = :got WHERE id = 1"), {"got": got})

    chaos(crashes=0).explore(job, engine)
    assert status(engine) == ("down" if isinstance(result, OSError) else "declared")


def test_the_time_that_a_call_takes_is_virtual(chaos: Chaos, engine: Engine) -> None:
    """Its limit may be reached before it is done: then it has not arrived."""
    watched = chaos.watch(HERE, "charge")

    async def job(engine: Engine, limit: float) -> None:
        try:
            await asyncio.wait_for(charge(1), limit)
        except TimeoutError:
            pass
        finish(engine)

    chaos(crashes=0).explore(job, engine, 2.0)
    assert watched.calls == []
    with engine.begin() as db:
        db.execute(text("UPDATE orders SET status = 'new' WHERE id = 1"))
    chaos(crashes=0).explore(job, engine, 4.0)
    assert len(watched.calls) == 1


def test_what_other_tasks_do_meanwhile_is_not_covered(chaos: Chaos, engine: Engine, tmp_path: Any) -> None:
    chaos.watch(HERE, "charge")

    async def write() -> None:
        await asyncio.sleep(1)
        (tmp_path / "log").write_text("written")

    async def job(engine: Engine) -> None:
        await asyncio.gather(charge(1, key="k"), write())
        finish(engine)

    report = chaos(crashes=0).explore(job, engine)
    assert report.verdict == "inconclusive" and "effect outside the ledger" in full_text(report)


@pytest.mark.parametrize(("fault", "kind"), [("error", "lost"), ("lost reply", "duplicated")])
def test_faults(chaos: Chaos, engine: Engine, fault: str, kind: str) -> None:
    chaos.watch(HERE, "charge")

    async def swallows(engine: Engine) -> None:
        try:
            await charge(1)
        except ConnectionError:
            pass
        except TimeoutError:
            await charge(1)
        finish(engine)

    report = chaos(faults=True, crashes=0).explore(swallows, engine)
    assert (kind, "charge") in findings(report), full_text(report)
    assert fault in {each for finding in report.findings for each in finding.plan.faults}


def test_an_awaitable_in_disguise_is_refused(chaos: Chaos, engine: Engine) -> None:
    chaos.watch(HERE, "in_disguise")

    async def job(engine: Engine) -> None:
        await in_disguise(1)
        finish(engine)

    with pytest.raises(ChaosError, match="gives something to be awaited, and does not say so"):
        chaos.explore(job, engine)
