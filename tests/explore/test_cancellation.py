"""A worker cancels an async job that has to end: it may clean up, and the message comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from sqlalchemy import Engine, text

from retrychaos import Chaos, Report
from retrychaos.report.text import full_text


@pytest.fixture
def db(chaos: Chaos) -> Engine:
    with chaos.sql.begin() as connection:
        connection.execute(text("CREATE TABLE jobs (id INTEGER PRIMARY KEY, state TEXT)"))
        connection.execute(text("INSERT INTO jobs VALUES (1, 'new')"))
    return chaos.sql


@pytest.fixture
def state(db: Engine) -> Callable[[], str]:
    def look() -> str:
        with db.begin() as connection:
            return str(connection.execute(text("SELECT state FROM jobs")).scalar())

    return look


@pytest.fixture
def put(db: Engine) -> Callable[[str], None]:
    def write(state: str) -> None:
        with db.begin() as connection:
            connection.execute(text("UPDATE jobs SET state = :state"), {"state": state})

    return write


def only_cancelled(chaos: Chaos, duplicates: int = 1) -> Chaos:
    return chaos(faults=True, crashes=0, duplicates=duplicates)


def proves(report: Report) -> None:
    assert report.verdict == "proven", full_text(report)


def refutes(chaos: Chaos, job: object, report: Report, kind: str, put: Callable[[str], None]) -> None:
    assert [finding.kind for finding in report.findings] == [kind], full_text(report)
    (finding,) = report.findings
    assert finding.plan.faults in (("cancellation",), ("shutdown",)), full_text(report)
    put("new")
    assert chaos.run(job, plan=finding.token).kind == kind  # type: ignore[arg-type]  # a function


async def mark(put: Callable[[str], None]) -> None:
    """How it ended."""
    try:
        await asyncio.sleep(2)
        put("done")
    except asyncio.CancelledError:
        put("cancelled")
        raise


@pytest.mark.parametrize("duplicates", [1, 2])
def test_a_job_that_lets_itself_be_cancelled(
    chaos: Chaos, db: Engine, put: Callable[[str], None], duplicates: int
) -> None:
    async def work() -> None:
        put("begun")
        await asyncio.sleep(1)
        put("done")

    proves(only_cancelled(chaos, duplicates).explore(work))


@pytest.mark.parametrize("duplicates", [1, 2])
def test_who_swallows_it_has_acknowledged(
    chaos: Chaos, db: Engine, put: Callable[[str], None], duplicates: int
) -> None:
    async def work() -> None:
        try:
            await asyncio.sleep(1)
            put("done")
        except asyncio.CancelledError:
            return

    chaos = only_cancelled(chaos, duplicates)
    refutes(chaos, work, chaos.explore(work), "lost", put)


def test_cleaning_up_has_effects(chaos: Chaos, put: Callable[[str], None], state: Callable[[], str]) -> None:
    """So it has if the worker is asked to stop where the job is not: then its loop is closed, and cancels it, too."""

    async def work() -> None:
        if state() == "cancelled":
            return
        await mark(put)

    chaos = only_cancelled(chaos)
    refutes(chaos, work, chaos.explore(work), "changed", put)
    put("new")
    proves(chaos.explore(mark, put))


def test_while_another_one_is_faster(chaos: Chaos, db: Engine, put: Callable[[str], None]) -> None:
    """It cleans up after the other delivery has done the work, and its own message is then a copy that nobody sends."""

    async def work() -> None:
        await mark(put)

    proves(only_cancelled(chaos).explore(work))
    put("new")
    chaos = only_cancelled(chaos, 2)
    refutes(chaos, work, chaos.explore(work), "changed", put)


@pytest.mark.parametrize("group", ["gather", "TaskGroup"])
def test_tasks_of_the_job_are_cancelled_with_it(
    chaos: Chaos, put: Callable[[str], None], state: Callable[[], str], group: str
) -> None:
    """The worker cancels one task, the job; all others it waits for end with it, wherever they are."""

    async def quick() -> None:
        await asyncio.sleep(0.1)
        put("half")

    async def work() -> None:
        if state() == "cancelled":
            return
        if group == "gather":
            await asyncio.gather(quick(), mark(put))
        else:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(quick())
                tasks.create_task(mark(put))

    chaos = only_cancelled(chaos)
    refutes(chaos, work, chaos.explore(work), "changed", put)


def test_jobs_that_make_a_loop_of_their_own_are_not_cancelled(
    chaos: Chaos, db: Engine, put: Callable[[str], None]
) -> None:
    """Nobody holds the task that is in there."""

    async def inner() -> None:
        try:
            await asyncio.sleep(1)
            put("done")
        except asyncio.CancelledError:
            return

    def work() -> None:
        asyncio.run(inner())

    proves(only_cancelled(chaos).explore(work))


@pytest.mark.parametrize("duplicates", [1, 2])
def test_who_never_stops_is_killed(
    chaos: Chaos, state: Callable[[], str], put: Callable[[str], None], duplicates: int
) -> None:
    """A worker does not wait for ever for a job to clean up; the message comes back."""

    async def job() -> None:
        try:
            if state() == "new":
                put("done")
        except (SystemExit, asyncio.CancelledError):
            await asyncio.Event().wait()

    proves(chaos(faults=True, duplicates=duplicates).explore(job))


def test_who_waits_for_ever_without_being_asked_to_stop(
    chaos: Chaos, state: Callable[[], str], put: Callable[[str], None]
) -> None:
    async def job() -> None:
        if state() == "new":
            put("done")
        else:
            await asyncio.Event().wait()

    report = chaos(faults=True, duplicates=2).explore(job)
    assert [finding.kind for finding in report.findings] == ["stuck"], full_text(report)
