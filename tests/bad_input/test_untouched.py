"""The witness itself: proven and refuted checks leave only what the clean run did; and it does see what is left."""

from __future__ import annotations
import pytest
from typing import Any
import os, threading, time, random
import retrychaos
from sqlalchemy import text


def test_explore_proven(shop: Any, untouched: Any) -> None:
    with retrychaos.Chaos() as chaos, untouched():
        report = chaos.explore(shop.pay, 1)
    print(report)
    assert report.verdict == "proven"
    assert (shop.payments, shop.status) == (1, "paid")

def test_explore_failed(shop: Any, untouched: Any) -> None:
    with retrychaos.Chaos() as chaos, untouched():
        report = chaos.explore(shop.pay_twice, 1)
    assert report.verdict == "failed"
    assert (shop.payments, shop.status) == (1, "paid")
