"""Fixtures of the tests on HTTP: orders in a database, and a provider that takes money."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, text

from retrychaos import Chaos
from retrychaos.world.http_provider import Provider

PAY = "https://api.pay.test"


@pytest.fixture
def orders(chaos: Chaos) -> Engine:
    """Orders 1 to 3 over 4200 each."""
    with chaos.sql.begin() as db:
        db.execute(text("CREATE TABLE orders (id INTEGER PRIMARY KEY, cents INTEGER, paid BOOLEAN, ref TEXT)"))
        db.execute(text("INSERT INTO orders VALUES (1, 4200, 0, NULL), (2, 4200, 0, NULL), (3, 4200, 0, NULL)"))
    return chaos.sql


@pytest.fixture
def pay(chaos: Chaos) -> Provider:
    """Honours keys for a day."""
    pay = chaos.http.provider(PAY, key_header="Idempotency-Key", key_ttl="24h")
    pay.post("/charges", json={"id": "ch_1"}, status=201)
    return pay


def findings(report: Any) -> list[tuple[str, str]]:
    return [(finding.kind, finding.effect) for finding in report.findings]


def set_paid(engine: Engine, order: int, ref: str) -> None:
    with engine.begin() as db:
        db.execute(text("UPDATE orders SET paid = 1, ref = :ref WHERE id = :id"), {"ref": ref, "id": order})


def is_paid(engine: Engine, order: int) -> bool:
    with engine.begin() as db:
        return bool(db.execute(text("SELECT paid FROM orders WHERE id = :id"), {"id": order}).scalar())


def fresh(engine: Engine) -> None:
    """Nothing has been paid yet."""
    with engine.begin() as db:
        db.execute(text("UPDATE orders SET paid = 0, ref = NULL, cents = 4200"))
