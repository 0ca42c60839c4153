"""Errors and lost replies on a real Redis server: redis-py tries again by itself, and what that does counts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import closing

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis_server import running_server

from retrychaos import Chaos
from retrychaos.report.text import full_text


@pytest.fixture(scope="module")
def path() -> Iterator[str]:
    with running_server() as path:
        yield path


@pytest.fixture
def client(path: str) -> Iterator[redis.Redis]:
    """Tries a command once more when there is no answer, as redis-py does by default."""
    with closing(redis.Redis(unix_socket_path=path, retry=Retry(NoBackoff(), 1))) as client:
        yield client
        client.flushall()


@pytest.fixture
def hasty(path: str) -> Iterator[redis.Redis]:
    """Never tries again."""
    with closing(redis.Redis(unix_socket_path=path, retry=Retry(NoBackoff(), 0))) as client:
        yield client
        client.flushall()


@pytest.fixture
def check(chaos: Chaos, path: str) -> Chaos:
    return chaos(faults=True, scratch=[f"unix://{path}"])


def count_once(client: redis.Redis) -> None:
    if not client.exists("n"):
        client.incr("n")


def set_it(client: redis.Redis) -> None:
    client.set("a", "b")


def take(client: redis.Redis) -> None:
    """Whoever gets the flag does the work: here the client may get it, and never know."""
    if client.set("flag", "1", nx=True):
        client.set("work", "done")


def pipeline(client: redis.Redis) -> None:
    with client.pipeline(transaction=True) as pipe:
        pipe.set("a", "1").set("b", "2").execute()


def pipeline_that_counts(client: redis.Redis) -> None:
    if not client.exists("n"):
        with client.pipeline(transaction=True) as pipe:
            pipe.incr("n").execute()


@pytest.mark.parametrize("job", [set_it, pipeline])
def test_right(check: Chaos, client: redis.Redis, job: object) -> None:
    report = check.explore(job, client)  # type: ignore[arg-type]  # one of the jobs above
    assert report.verdict == "proven", full_text(report)
    assert "errors, lost replies and shutdowns" in report.guarantee


@pytest.mark.parametrize("job", [count_once, pipeline_that_counts])
def test_the_client_does_it_twice(check: Chaos, client: redis.Redis, job: object) -> None:
    report = check.explore(job, client)  # type: ignore[arg-type]  # one of the jobs above
    (finding,) = report.findings
    assert (finding.kind, finding.effect, finding.plan.crashes) == ("changed", "redis n", 0), full_text(report)
    assert "lost reply: TimeoutError: Timeout reading from socket" in full_text(report)
    assert [delivery.end for delivery in finding.timeline] == ["completed"]


@pytest.mark.parametrize("job", [count_once, pipeline_that_counts])
def test_a_client_that_does_not_try_again(check: Chaos, hasty: redis.Redis, job: object) -> None:
    report = check.explore(job, hasty)  # type: ignore[arg-type]  # one of the jobs above
    assert report.verdict == "proven", full_text(report)


def push_unless_it_fails(client: redis.Redis) -> None:
    with contextlib.suppress(redis.RedisError):
        client.set("a", "b")


def test_retries_do_not_last_for_ever(check: Chaos, client: redis.Redis, hasty: redis.Redis) -> None:
    for each in (client, hasty):
        (finding,) = check.explore(push_unless_it_fails, each).findings
        assert (finding.kind, finding.effect, finding.plan.crashes) == ("lost", "redis a", 0)
        each.flushall()
    assert client.get_retry()._retries == 1  # type: ignore[union-attr]  # it has one


def test_an_answer_to_set_nx_that_is_lost(check: Chaos, client: redis.Redis) -> None:
    (finding,) = check(crashes=0).explore(take, client).findings
    assert (finding.kind, finding.effect) == ("lost", "redis work")


# -- fakeredis ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", [count_once, pipeline_that_counts])
def test_fakeredis_tries_again_if_it_is_told_to(chaos: Chaos, job: object) -> None:
    check = chaos(faults=True)
    assert check.explore(job, chaos.redis).verdict == "proven"  # type: ignore[arg-type]  # one of the jobs above
    chaos.redis.flushall()
    chaos.redis.connection_pool.disconnect()
    chaos.redis.connection_pool.reset()
    chaos.redis.connection_pool.connection_kwargs["retry"] = Retry(NoBackoff(), 1)
    (finding,) = check.explore(job, chaos.redis).findings  # type: ignore[arg-type]  # one of the jobs above
    assert (finding.kind, finding.effect, finding.plan.crashes) == ("changed", "redis n", 0)
