"""The verdict is that of real processes that are killed, at every step, on the same server."""

from __future__ import annotations

import os
import signal
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text

from retrychaos import Chaos
from tests.postgres import test_jobs
from tests.postgres.test_jobs import AGAIN, WORLD, Job, execute

JOBS: list[Job] = [
    test_jobs.orm,
    test_jobs.orm_in_two,
    test_jobs.relative,
    test_jobs.on_conflict,
    test_jobs.autocommit_twice,
    test_jobs.savepoints,
    test_jobs.savepoint_then_another,
    test_jobs.cascading_away,
    test_jobs.two_connections,
    test_jobs.two_connections_apart,
    test_jobs.temporary_counts,
    test_jobs.isolated_in_two,
]
MOST_STEPS = 40


@pytest.fixture
def world(shop: Engine) -> Engine:
    execute(shop, "\n".join(line for line in WORLD.splitlines() if not line.startswith("CREATE TRIGGER")))
    return shop


def ledger(engine: Engine) -> Counter[str]:
    """Everything but row ids, which are names."""
    parts = ["orders t", "(SELECT order_id, note FROM invoices) t", "(SELECT product FROM lines) t"]
    with engine.begin() as connection:
        keys = connection.execute(text("SELECT length(key)::text FROM once")).scalars()
        rows = [row for part in parts for row in connection.execute(text(f"SELECT t::text FROM {part}")).scalars()]
        return Counter([*rows, *keys])


def deliver(job: Job, url: Any, die_before: int | None) -> bool:
    """Run the job in a process of its own, which is killed before that step. Did it come to its end?"""
    child = os.fork()
    if child == 0:
        try:
            engine = create_engine(url)
            steps = iter(range(MOST_STEPS))

            def step(*anything: Any) -> None:
                if next(steps) == die_before:
                    os.kill(os.getpid(), signal.SIGKILL)

            event.listen(engine, "before_cursor_execute", step)
            event.listen(engine, "commit", step)
            job(engine)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFEXITED(status)


def outcomes(job: Job, engine: Engine) -> Iterator[Counter[str]]:
    """The ledger after one crash and a redelivery, for each boundary; and the last one without a crash."""
    for step in range(MOST_STEPS):
        execute(engine, AGAIN)
        finished = deliver(job, engine.url, step)
        clean = ledger(engine)
        deliver(job, engine.url, None)
        yield ledger(engine)
        if finished:  # it died between its last step and the ack
            yield clean
            return


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_a_verdict_is_what_real_crashes_show(check: Chaos, world: Engine, job: Job) -> None:
    world.dispose()  # nothing to be inherited
    *crashed, clean = outcomes(job, world)
    execute(world, AGAIN)
    report = check(crashes=1).explore(job, world)
    assert report.verdict == ("proven" if all(one == clean for one in crashed) else "failed")
    assert report.steps == len(crashed) - 1
