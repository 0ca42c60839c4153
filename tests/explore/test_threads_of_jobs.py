"""Jobs with threads of their own: one at a time has an order, several have many."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from retrychaos import Chaos
from retrychaos.report.text import full_text

PAY = "https://api.pay.test"
ORDERS = range(4)


@pytest.fixture
def pay(chaos: Chaos) -> Any:
    provider = chaos.http.provider(PAY, key_header="Idempotency-Key")
    provider.post("/charges", json={"paid": True})
    return provider


def charge(order: int, key: str) -> None:
    headers = {"Idempotency-Key": key} if key else {}
    requests.post(f"{PAY}/charges", json={"order": order}, headers=headers, timeout=10).raise_for_status()


def charge_all(workers: int, keyed: bool) -> None:
    together = threading.Barrier(workers)  # so that a pool of several has several
    with ThreadPoolExecutor(workers, initializer=together.wait) as pool:
        list(pool.map(charge, ORDERS, [f"order {each}" if keyed else "" for each in ORDERS]))


@pytest.mark.parametrize(("keyed", "verdict"), [(True, "proven"), (False, "failed")])
def test_a_pool_of_one(chaos: Chaos, pay: Any, keyed: bool, verdict: str) -> None:
    report = chaos(duplicates=1).explore(charge_all, 1, keyed)
    assert report.verdict == verdict, full_text(report)


def test_a_pool_of_several_is_not_proven(chaos: Chaos, pay: Any) -> None:
    report = chaos(duplicates=1).explore(charge_all, 3, True)
    assert report.verdict == "inconclusive", full_text(report)
    assert "several threads of its own" in report.guarantee
    assert "max_workers=1" in report.guarantee
