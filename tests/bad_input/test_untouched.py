"""What a check that ends well leaves: the world of the clean run, and nothing else."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

import fakeredis
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import StaticPool

import retrychaos


@pytest.mark.parametrize("isolation", ["sample", "process"])
@pytest.mark.parametrize(("job", "verdict"), [("pay", "proven"), ("pay_twice", "failed")])
def test_the_world_is_that_of_one_plain_run(job: str, verdict: str, isolation: str, shop: Any, untouched: Any) -> None:
    with retrychaos.Chaos(isolation=isolation, duplicates=1) as chaos:
        with untouched():
            report = chaos.explore(getattr(shop, job), 1)
    assert report.verdict == verdict
    checked = shop.contents()
    with shop.engine.begin() as connection:
        connection.execute(text("DELETE FROM payments WHERE order_id = 1"))
        connection.execute(text("UPDATE orders SET status = 'new' WHERE id = 1"))
        connection.execute(text("UPDATE sqlite_sequence SET seq = 1"))
    getattr(shop, job)(1)
    assert checked == shop.contents()


@pytest.mark.parametrize(("job", "verdict"), [("pay", "proven"), ("pay_twice", "failed")])
def test_check_and_run_leave_the_same_as_explore(job: str, verdict: str, shop: Any, untouched: Any) -> None:
    with retrychaos.Chaos(duplicates=1) as chaos:
        with untouched():
            if verdict == "failed":
                with pytest.raises(retrychaos.IdempotencyError) as caught:
                    chaos.check(getattr(shop, job), 1)
                token = caught.value.report.findings[0].token
                run = chaos.run(getattr(shop, job), 1, plan=token)
                assert (run.kind, run.effect, run.plan.token) == ("duplicated", "payments", token)
            else:
                assert chaos.check(getattr(shop, job), 1).verdict == "proven"
    assert (shop.payments, shop.status) == (1, "paid")
    assert shop.rows("SELECT id, order_id, amount FROM payments") == [(1, 2, 70), (2, 1, 50)]


def test_all_kinds_of_resources_at_once(shop: Any, untouched: Any) -> None:
    client = fakeredis.FakeRedis(server=fakeredis.FakeServer())
    memory = create_engine("sqlite://", poolclass=StaticPool)
    with memory.begin() as connection:
        connection.execute(text("CREATE TABLE notes (id INTEGER PRIMARY KEY)"))

    def job(order: int) -> None:
        client.set(f"order:{order}", "seen", ex=60)
        shop.pay(order)
        with memory.begin() as connection:
            connection.execute(text("INSERT OR IGNORE INTO notes VALUES (:id)"), {"id": order})

    with retrychaos.Chaos(duplicates=1) as chaos:
        with untouched():
            assert chaos.check(job, 1).verdict == "proven"
    assert client.get("order:1") == b"seen" and 0 < client.ttl("order:1") <= 60
    with memory.connect() as connection:
        assert connection.execute(text("SELECT id FROM notes")).scalars().all() == [1]
    assert shop.status == "paid"
    client.close()
    memory.dispose()


def test_an_open_pool_still_works_and_others_can_write(shop: Any, untouched: Any) -> None:
    with shop.engine.connect() as kept:
        kept.execute(text("SELECT 1")).all()
        kept.rollback()
        with retrychaos.Chaos(duplicates=1) as chaos:
            with untouched():
                chaos.check(shop.pay, 1)
        assert kept.execute(text("SELECT status FROM orders WHERE id = 1")).scalar() == "paid"
    with closing(sqlite3.connect(shop.engine.url.database, timeout=0)) as other:
        other.execute("INSERT INTO orders VALUES (3, 'new')")
        other.commit()
    shop.pay(3)
    assert shop.rows("SELECT order_id FROM payments ORDER BY id") == [(2,), (1,), (3,)]


def test_watched_functions_are_themselves_again(shop: Any, untouched: Any) -> None:
    sent = []

    def send(order: int) -> None:
        sent.append(order)

    class Mail:
        def send(self, order: int) -> None:
            sent.append(order)

    def job(order: int) -> None:
        Mail().send(order)
        shop.pay(order)

    with untouched(functions=(send, Mail.send)):
        with retrychaos.Chaos(duplicates=1) as chaos:
            watched = chaos.watch(Mail, "send", result=None)
            assert chaos.explore(job, 1).verdict == "failed"
            assert len(watched.calls) == 1
    assert sent == []
    Mail().send(7)
    assert sent == [7]


def test_the_embedded_world_is_gone_at_the_end(untouched: Any) -> None:
    with untouched():
        with retrychaos.Chaos(duplicates=1) as chaos:
            engine, client = chaos.sql, chaos.redis
            client.set("a", 1)
            with engine.begin() as connection:
                connection.execute(text("CREATE TABLE notes (id INTEGER PRIMARY KEY)"))
            with pytest.raises(ZeroDivisionError), chaos:
                raise ZeroDivisionError
