"""Jobs that cannot be checked: each gets an error that says why and how to go on, and nothing is lost."""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session
from sqlalchemy.pool import QueuePool, StaticPool

import retrychaos
from retrychaos import BaselineError, ChaosError, IdempotencyError, WorldError


@pytest.fixture
def chaos() -> Iterator[retrychaos.Chaos]:
    with retrychaos.Chaos(budget=0.5, duplicates=1) as made:
        yield made


# -- no baseline ----------------------------------------------------------------------------------------------------


def test_a_job_that_fails_shows_its_traceback(shop: Any, chaos: Any, untouched: Any) -> None:
    def broken(order: int) -> None:
        shop.pay(order)
        raise ValueError("no such customer")

    with untouched(shop.engine):
        with pytest.raises(BaselineError) as caught:
            chaos.check(broken, 1)
    message = str(caught.value)
    assert "failed in the clean run" in message and "no baseline exists" in message
    assert "ValueError: no such customer" in message
    assert 'raise ValueError("no such customer")' in message and "test_bad_jobs.py" in message


def test_a_job_that_exits_has_failed(shop: Any, chaos: Any, untouched: Any) -> None:
    def leaves(order: int) -> None:
        shop.pay(order)
        sys.exit(3)

    with untouched(shop.engine):
        with pytest.raises(BaselineError, match=r"failed in the clean run.*SystemExit: 3"):
            chaos.check(leaves, 1)


def test_wrong_arguments_are_told_like_a_failing_job(shop: Any, chaos: Any, untouched: Any) -> None:
    with untouched(shop.engine):
        with pytest.raises(BaselineError, match="missing 1 required positional argument: 'order'"):
            chaos.check(shop.pay)


def test_a_job_without_effect(shop: Any, chaos: Any, untouched: Any) -> None:
    with untouched(shop.engine):
        with pytest.raises(BaselineError) as caught:
            chaos.check(shop.pay, 2)  # paid already
    message = str(caught.value)
    assert "had no effect in the clean run" in message
    assert "steps were seen, none changed anything" in message
    assert "chaos.watch(owner, 'name')" in message


def test_a_job_without_any_step(chaos: Any, untouched: Any) -> None:
    with untouched():
        with pytest.raises(BaselineError, match="no step was seen"):
            chaos.check(lambda: None)


def test_a_job_that_only_rolls_back_has_no_effect(shop: Any, chaos: Any, untouched: Any) -> None:
    def forgets_to_commit() -> None:
        connection = shop.engine.connect()
        connection.execute(text("UPDATE orders SET status = 'paid' WHERE id = 1"))

    with untouched(shop.engine):
        with pytest.raises(BaselineError, match="had no effect"):
            chaos.check(forgets_to_commit)


# -- the baseline differs -------------------------------------------------------------------------------------------


def test_a_baseline_with_other_steps_names_the_first_that_differs(shop: Any, chaos: Any, untouched: Any) -> None:
    def draws() -> None:
        with shop.engine.begin() as connection:
            connection.execute(text("UPDATE orders SET status = 'open' WHERE id = 1"))
            for _ in range(random.randrange(1_000)):
                connection.execute(text("INSERT INTO payments (order_id, amount) VALUES (1, 1)"))

    with untouched():
        with pytest.raises(IdempotencyError) as caught:
            chaos.check(draws)
    report = caught.value.report
    assert report.verdict == "inconclusive" and not report.budget_spent
    assert "two clean runs of the job took different steps; the first difference is step " in report.stop_reason
    assert "INSERT INTO payments" in report.stop_reason and "test_bad_jobs.py:" in report.stop_reason
    assert report.stop_reason in str(caught.value)


def many_rows(shop: Any) -> Callable[[], None]:
    def fills() -> None:
        with shop.engine.begin() as connection:
            connection.execute(text("UPDATE orders SET status = 'open' WHERE id = 1"))
            connection.execute(
                text(
                    "INSERT INTO payments (order_id, amount) WITH RECURSIVE c (x) AS "
                    "(SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < :n) SELECT 1, 50 FROM c"
                ),
                {"n": random.randrange(2, 100)},
            )

    return fills


def test_a_baseline_with_other_rows_says_how_to_declare_them(shop: Any, chaos: Any, untouched: Any) -> None:
    with untouched():
        with pytest.raises(IdempotencyError) as caught:
            chaos.check(many_rows(shop))
    reason = caught.value.report.stop_reason
    assert "two clean runs of the job left different ledgers" in reason
    assert "First difference: payments:" in reason
    assert "volatile=['payments']" in reason


def test_the_declaration_that_the_error_names_helps(shop: Any, chaos: Any) -> None:
    report = chaos(volatile=["payments"]).explore(many_rows(shop))
    assert report.verdict == "proven", report.stop_reason
    assert "not compared: payments" in report.guarantee


def test_a_job_that_fails_in_the_second_clean_run_only(shop: Any, chaos: Any, untouched: Any) -> None:
    start = time.time()

    def expires(order: int) -> None:
        if time.time() > start + 60:
            raise TimeoutError("offer expired")
        shop.pay(order)

    with untouched():
        with pytest.raises(IdempotencyError) as caught:
            chaos.check(expires, 1)
    reason = caught.value.report.stop_reason
    assert "passed the first clean run and not the second" in reason and "offer expired" in reason


# -- never ends -----------------------------------------------------------------------------------------------------


def busy() -> None:
    while True:
        pass


def waits() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def waits_for_a_thread() -> None:
    threading.Event().wait()


@pytest.mark.parametrize("never", [busy, waits, waits_for_a_thread])
def test_a_job_that_never_ends(never: Callable[[], None], shop: Any, chaos: Any, untouched: Any) -> None:
    def job(order: int) -> None:
        shop.pay(order)
        never()

    with untouched(shop.engine):
        with pytest.raises(BaselineError) as caught:
            chaos.check(job, 1)
    message = str(caught.value)
    assert "did not end in the clean run" in message and "no baseline exists" in message
    assert "steps were made, the last: COMMIT" in message
    assert "option budget" in message


def test_an_endless_loop_of_steps(shop: Any, chaos: Any, untouched: Any) -> None:
    def polls() -> None:
        while not shop.rows("SELECT 1 FROM orders WHERE status = 'shipped'"):
            pass

    with untouched(shop.engine):
        with pytest.raises(BaselineError, match=r"did not end.*the last: SELECT 1 FROM orders"):
            chaos.check(polls)


def test_an_endless_loop_of_commits(shop: Any, chaos: Any, untouched: Any) -> None:
    def grows() -> None:
        while True:
            with shop.engine.begin() as connection:
                connection.execute(text("INSERT INTO payments (order_id, amount) VALUES (1, 1)"))

    with untouched(shop.engine):
        with pytest.raises(BaselineError, match="did not end"):
            chaos.check(grows)


def test_an_endless_poll_with_sleeps_ends_without_waiting(shop: Any, chaos: Any, untouched: Any) -> None:
    def polls() -> None:
        while not shop.rows("SELECT 1 FROM orders WHERE status = 'shipped'"):
            time.sleep(5)

    with untouched(shop.engine):
        with pytest.raises(BaselineError, match="did not end"):
            chaos(budget=60).check(polls)


def test_a_job_that_never_ends_in_another_thread(shop: Any, chaos: Any, untouched: Any) -> None:
    """There is no signal there: a helper thread ends it."""
    caught: list[BaseException] = []

    def job(order: int) -> None:
        shop.pay(order)
        busy()

    def check() -> None:
        try:
            chaos.check(job, 1)
        except BaseException as error:
            caught.append(error)

    with untouched(shop.engine):
        thread = threading.Thread(target=check)
        thread.start()
        thread.join()
    assert [type(error) for error in caught] == [BaselineError]
    assert "did not end in the clean run" in str(caught[0])


def test_a_job_that_swallows_everything_is_ended_too(shop: Any, chaos: Any, untouched: Any) -> None:
    def stubborn(order: int) -> None:
        shop.pay(order)
        for _ in range(3):
            try:
                busy()
            except BaseException:
                continue

    with untouched(shop.engine):
        with pytest.raises(BaselineError, match="did not end"):
            chaos.check(stubborn, 1)


def test_a_redelivery_that_never_ends_does_not_pass_as_proven(shop: Any, chaos: Any, untouched: Any) -> None:
    def second_half(order: int) -> None:
        if shop.payments:
            busy()
        shop.pay(order)

    with untouched():
        report = chaos.explore(second_half, 1)
    assert report.verdict == "inconclusive" and report.budget_spent
    assert "budget of 0.5 s ran out" in report.stop_reason


def test_an_endless_job_on_a_database_in_memory(chaos: Any, untouched: Any) -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE jobs (id INTEGER PRIMARY KEY, status TEXT)"))
        connection.execute(text("INSERT INTO jobs VALUES (1, 'new')"))

    def polls() -> None:
        with engine.begin() as connection:
            connection.execute(text("UPDATE jobs SET status = 'open'"))
        while True:
            with engine.connect() as connection:
                connection.execute(text("SELECT 1")).all()

    with untouched(engine):
        with pytest.raises(BaselineError, match="did not end"):
            chaos.check(polls)
    engine.dispose()


# -- worlds that cannot be kept -------------------------------------------------------------------------------------


def test_a_lock_of_another_connection(shop: Any, chaos: Any, untouched: Any, tmp_path: Path) -> None:
    """The job has its own file locked by a process that nobody told us of."""
    lock = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
sys.stdin.readline()
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""

    def job(order: int) -> None:
        shop.pay(order)
        os.write(asking, b"\n")
        os.read(answering, 10)

    command = [sys.executable, "-c", lock, str(tmp_path / "shop.db")]
    with untouched(), subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        asking, answering = other.stdin.fileno(), other.stdout.fileno()
        with pytest.raises(WorldError) as caught:
            chaos.check(job, 1)
    assert "cannot be restored" in str(caught.value) and "shop.db" in str(caught.value)
    assert "Close other connections with open transactions" in str(caught.value)
    assert (shop.payments, shop.status) in [(0, "new"), (1, "paid")]


def test_a_file_that_is_locked_from_the_start(tmp_path: Path, shop: Any, chaos: Any, untouched: Any) -> None:
    impatient = create_engine(f"sqlite:///{tmp_path / 'shop.db'}", connect_args={"timeout": 0})

    def job() -> None:
        with impatient.begin() as connection:
            connection.execute(text("UPDATE orders SET status = 'paid' WHERE id = 1"))

    with untouched(shop.engine), closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(ChaosError, match="database is locked"):
            chaos.check(job)
        assert other.in_transaction
    impatient.dispose()


def test_a_read_only_file(tmp_path: Path, shop: Any, chaos: Any, untouched: Any) -> None:
    engine = create_engine(f"sqlite:///file:{tmp_path / 'shop.db'}?mode=ro&uri=true")

    def job() -> None:
        with engine.begin() as connection:
            connection.execute(text("UPDATE orders SET status = 'paid' WHERE id = 1"))

    with untouched(shop.engine):
        with pytest.raises(ChaosError) as caught:
            chaos.check(job)
    assert "attempt to write a readonly database" in str(caught.value)
    engine.dispose()


def test_reading_through_a_read_only_engine_is_no_obstacle(
    tmp_path: Path, shop: Any, chaos: Any, untouched: Any
) -> None:
    """Two engines on one file, the first to be seen a read-only one: a correct job is not refused."""
    replica = create_engine(f"sqlite:///file:{tmp_path / 'shop.db'}?mode=ro&uri=true")

    def job(order: int) -> None:
        with replica.connect() as connection:
            connection.execute(text("SELECT status FROM orders")).all()
        shop.pay(order)

    with untouched():
        report = chaos.explore(job, 1)
    assert report.verdict == "proven"
    assert shop.payments == 1
    replica.dispose()


def test_attach_by_the_job(tmp_path: Path, shop: Any, chaos: Any, untouched: Any) -> None:
    def job() -> None:
        with shop.engine.connect() as connection:
            connection.execute(text(f"ATTACH '{tmp_path / 'archive.db'}' AS archive"))
            connection.execute(text("UPDATE orders SET status = 'paid' WHERE id = 1"))
            connection.commit()

    with untouched(shop.engine):
        with pytest.raises(WorldError, match=r"attaches a database .*one engine for each database"):
            chaos.check(job)


def test_attach_before_the_check(tmp_path: Path, shop: Any, chaos: Any, untouched: Any) -> None:
    with shop.engine.connect() as connection:
        connection.execute(text(f"ATTACH '{tmp_path / 'archive.db'}' AS archive"))
    with untouched(shop.engine):
        with pytest.raises(WorldError, match=r"archive.* is attached .*one engine for each database"):
            chaos.check(shop.pay, 1)


def test_a_shared_cache_in_memory(chaos: Any, untouched: Any) -> None:
    engine = create_engine("sqlite:///file:shared_shop?mode=memory&cache=shared&uri=true", poolclass=QueuePool)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE jobs (id INTEGER PRIMARY KEY)"))

    def job() -> None:
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO jobs VALUES (1)"))

    with untouched():
        with pytest.raises(WorldError, match=r"shared-cache .*SQLite file in tmp_path"):
            chaos.check(job)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM jobs")).scalar() == 0
    engine.dispose()


def test_an_outer_transaction_names_the_recipe_and_the_remedy(shop: Any, chaos: Any, untouched: Any) -> None:
    """The 'rollback after each test' recipe of SQLAlchemy's documentation."""
    with shop.engine.connect() as connection:
        outer = connection.begin()
        session = Session(bind=connection, join_transaction_mode="create_savepoint")

        def job() -> None:
            session.execute(text("UPDATE orders SET status = 'paid' WHERE id = 1"))
            session.commit()

        with untouched(shop.engine):
            with pytest.raises(WorldError) as caught:
                chaos.check(job)
        message = str(caught.value)
        assert "rollback after each test" in message and "Remedy:" in message and "chaos.sql" in message
        assert session.execute(text("SELECT status FROM orders WHERE id = 1")).scalar() == "new"
        session.close()
        outer.rollback()


def test_the_recipe_in_memory(chaos: Any, untouched: Any) -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE jobs (id INTEGER PRIMARY KEY)"))
    with engine.connect() as connection:
        outer = connection.begin()
        connection.execute(text("INSERT INTO jobs VALUES (1)"))

        def job() -> None:
            with Session(bind=connection, join_transaction_mode="create_savepoint") as session:
                session.execute(text("INSERT INTO jobs VALUES (2)"))
                session.commit()

        with untouched():
            with pytest.raises(WorldError, match="rollback after each test"):
                chaos.check(job)
        assert connection.execute(text("SELECT id FROM jobs")).scalars().all() == [1]
        outer.rollback()
    engine.dispose()


def test_a_fixture_that_never_committed(chaos: Any, untouched: Any) -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE jobs (id INTEGER PRIMARY KEY, status TEXT)"))
    session = Session(engine)
    session.execute(text("INSERT INTO jobs VALUES (1, 'new')"))

    def job() -> None:
        session.execute(text("UPDATE jobs SET status = 'done'"))
        session.commit()

    with untouched():
        with pytest.raises(WorldError, match=r"uncommitted changes .*Remedy: commit in the fixture"):
            chaos.check(job)
    assert session.execute(text("SELECT status FROM jobs")).scalars().all() == ["new"]
    session.close()
    engine.dispose()


def test_a_fixture_that_never_committed_to_a_file(shop: Any, chaos: Any, untouched: Any) -> None:
    session = Session(shop.engine)
    session.execute(text("INSERT INTO orders VALUES (9, 'new')"))

    def job() -> None:
        session.execute(text("UPDATE orders SET status = 'paid' WHERE id = 9"))
        session.commit()

    with untouched(shop.engine):
        with pytest.raises(WorldError, match=r"uncommitted changes .*Remedy: commit in the fixture"):
            chaos.check(job)
    session.close()


def test_uncommitted_work_of_an_unrelated_session_is_not_lost(
    shop: Any, chaos: Any, untouched: Any, tmp_path: Path
) -> None:
    """Another database, which the job does not touch."""
    engine = create_engine(f"sqlite:///{tmp_path / 'other.db'}")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE notes (body TEXT)"))
    with Session(engine) as session:
        session.execute(text("INSERT INTO notes VALUES ('draft')"))
        with untouched():
            assert chaos.check(shop.pay, 1).verdict == "proven"
        assert session.execute(text("SELECT body FROM notes")).scalars().all() == ["draft"]
    engine.dispose()
