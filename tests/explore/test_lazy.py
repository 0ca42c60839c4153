"""What a job makes for itself, in the middle of a delivery: clients, engines, servers of fakeredis."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import fakeredis
import pytest
from sqlalchemy import create_engine, text

from retrychaos import BaselineError, Chaos


def count(client: Any, items: list[str]) -> None:
    for item in items:
        if not client.sismember("seen", item):
            client.pipeline(transaction=True).sadd("seen", item).incr("total").execute()


@pytest.mark.parametrize("isolation", ["sample", "process"])
def test_the_embedded_redis_may_be_touched_first_by_the_job(chaos: Chaos, isolation: str) -> None:
    def right(items: list[str]) -> None:
        count(chaos.redis, items)

    report = chaos(isolation=isolation).explore(right, ["a", "b"])
    assert (report.verdict, report.states) == ("proven", 3)
    assert chaos.redis.get("total") == b"2"


@pytest.mark.parametrize("isolation", ["sample", "process"])
def test_the_embedded_database_may_be_touched_first_by_the_job(chaos: Chaos, isolation: str) -> None:
    def right() -> None:
        with chaos.sql.begin() as connection:
            connection.execute(text("CREATE TABLE IF NOT EXISTS t (k PRIMARY KEY)"))
            connection.execute(text("INSERT OR IGNORE INTO t VALUES (1)"))

    assert chaos(isolation=isolation).explore(right).verdict == "proven"


@functools.lru_cache
def client() -> fakeredis.FakeRedis:
    return fakeredis.FakeRedis()


@pytest.mark.parametrize("isolation", ["sample", "process"])
def test_a_client_that_is_made_once_per_process(chaos: Chaos, isolation: str) -> None:
    client.cache_clear()

    def right() -> None:
        count(client(), ["a", "b"])

    def wrong() -> None:
        client().incr("total")

    some = chaos(isolation=isolation)
    assert some.explore(right).verdict == "proven"
    client.cache_clear()
    assert [found.kind for found in some.explore(wrong).findings] == ["changed"]
    client.cache_clear()


def test_a_client_that_is_made_in_every_delivery(chaos: Chaos) -> None:
    """A server of its own each: to the job it is one that has been there all along."""

    def right() -> None:
        count(fakeredis.FakeRedis(server=fakeredis.FakeServer()), ["a", "b"])

    def wrong() -> None:
        fakeredis.FakeRedis(server=fakeredis.FakeServer()).rpush("queue", "mail")

    assert chaos.explore(right).verdict == "proven"
    assert [(found.kind, found.effect) for found in chaos.explore(wrong).findings] == [("duplicated", "redis queue")]


@pytest.mark.parametrize("isolation", ["sample", "process"])
def test_an_engine_that_is_made_in_every_delivery(chaos: Chaos, tmp_path: Path, isolation: str) -> None:
    url = f"sqlite:///{tmp_path / 'own.db'}"
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE t (k TEXT)"))
    engine.dispose()

    def job() -> None:
        own = create_engine(url)
        with own.begin() as connection:
            connection.execute(text("INSERT INTO t VALUES ('x')"))
        own.dispose()

    report = chaos(isolation=isolation).explore(job)
    assert [(found.kind, found.effect) for found in report.findings] == [("duplicated", "t")]


def test_a_database_in_memory_that_the_job_opens_dies_with_it(chaos: Chaos) -> None:
    def job() -> None:
        own = create_engine("sqlite://")
        with own.begin() as connection:
            connection.execute(text("CREATE TABLE t (k TEXT)"))
            connection.execute(text("INSERT INTO t VALUES ('x')"))
        own.dispose()

    with pytest.raises(BaselineError, match="had no effect"):
        chaos.check(job)
