"""Deliveries in forked processes, connections that others own, and what a check leaves behind on the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psycopg
import psycopg2
import pytest
from psycopg2.extras import DictCursor
from sqlalchemy import Engine, create_engine, event, select, text, update
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.dialects.postgresql.psycopg2 import PGDialect_psycopg2
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool, QueuePool
from sqlalchemy.pool.base import _ConnectionFairy

from retrychaos import Chaos
from retrychaos.model.errors import WorldError
from tests.postgres_server import Postgres, find_binaries
from tests.sql.engines import Invoice, Order, furnish

seen: set[int] = set()


def good(engine: Engine) -> None:
    with Session(engine) as session:
        order = session.get_one(Order, 1)
        if order.status == "new":
            session.add(Invoice(order_id=1, note="x"))
            order.status = "done"
            session.commit()


def remembering(engine: Engine) -> None:
    """The set in memory hides in one process that the job pays again."""
    if 1 not in seen:
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO invoices (order_id) VALUES (1)"))
        seen.add(1)


@pytest.mark.parametrize("isolation", ["sample", "process"])
def test_forked_deliveries_have_connections_of_their_own(check: Chaos, shop: Engine, isolation: str) -> None:
    with shop.connect() as kept:  # open in the parent, and in its pool
        kept.execute(text("SELECT 1"))
        kept.commit()
        assert check(isolation=isolation).check(good, shop).verdict == "proven"
        assert kept.scalar(text("SELECT count(*) FROM invoices")) == 1
    with shop.connect() as connection:
        assert connection.scalar(text("SELECT status FROM orders WHERE id = 1")) == "done"


def test_memory_is_found_by_forks(check: Chaos, shop: Engine) -> None:
    seen.clear()
    report = check.explore(remembering, shop)
    assert {(finding.kind, finding.effect) for finding in report.findings} == {("duplicated", "invoices")}


def test_a_pool_that_asks_first_is_followed(check: Chaos, shop: Engine) -> None:
    engine = create_engine(shop.url, pool_pre_ping=True)
    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))
    for isolation in ("sample", "process"):
        assert check(isolation=isolation).explore(good, engine).verdict == "proven"
        with shop.begin() as connection:
            connection.execute(text("UPDATE orders SET status = 'new'; DELETE FROM invoices"))
    engine.dispose()


def test_an_open_connection_as_payload_is_refused_in_a_fork(check: Chaos, shop: Engine) -> None:
    with shop.connect() as connection:
        raw: Any = connection.connection.dbapi_connection
        connection.rollback()

        def job() -> None:
            with raw.cursor() as cursor:
                cursor.execute("UPDATE orders SET n = 1")
            raw.commit()

        if shop.dialect.driver == "psycopg":
            with pytest.raises(WorldError, match="Pass the engine to the job, not an open connection"):
                check(isolation="process").check(job)
        connection.invalidate()
    with shop.connect() as connection:
        assert connection.scalar(text("SELECT max(n) FROM orders")) == 0


LEFTOVERS = {
    "setting": ("SET application_name = 'left'", "SELECT current_setting('application_name') = 'left'"),
    "role": ("SET ROLE pg_read_all_data; RESET ROLE; SET ROLE postgres", "SELECT current_setting('role') <> 'none'"),
    "lock": ("SELECT pg_advisory_lock(5)", "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory')"),
    "temporary": ("CREATE TEMP TABLE left_over (n int)", "SELECT to_regclass('left_over') IS NOT NULL"),
    "prepared": (
        "PREPARE left_over AS SELECT 1",
        "SELECT EXISTS (SELECT FROM pg_prepared_statements WHERE name = 'left_over')",
    ),
    "listening": ("LISTEN left_over", "SELECT EXISTS (SELECT FROM pg_listening_channels())"),
    "currval": ("SELECT setval('invoices_id_seq', 5)", "SELECT lastval() > 0"),
}


@pytest.mark.parametrize("kind", list(LEFTOVERS))
def test_nothing_of_a_session_survives_a_delivery(check: Chaos, shop: Engine, kind: str) -> None:
    leave, ask = LEFTOVERS[kind]
    found: list[Any] = []

    def job() -> None:
        with shop.connect() as connection:
            try:
                found.append(connection.scalar(text(ask)))
            except DBAPIError:  # lastval() of a new session
                found.append(False)
            connection.rollback()
            connection.execute(text(leave))
            connection.commit()
        with shop.begin() as connection:
            connection.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))

    # A lock that is kept is gone with the process, but would not be in a worker that lives on.
    assert check.explore(job).verdict == ("inconclusive" if kind == "lock" else "proven")
    assert len(found) >= 3 and not any(found)


@pytest.mark.parametrize("where", ["info", "driver"])
def test_what_a_job_leaves_on_a_connection_of_the_pool_is_gone(check: Chaos, shop: Engine, where: str) -> None:
    found: list[Any] = []

    def job() -> None:
        raw: Any = shop.raw_connection()
        if where == "info":
            found.append(raw.info.get("left"))
            raw.info["left"] = True
        else:
            found.append(raw.driver_connection.autocommit)
            raw.driver_connection.autocommit = True
        raw.close()
        with shop.begin() as connection:
            connection.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))

    assert check.check(job).verdict == "proven"
    assert not any(found)


def test_connections_are_used_again(check: Chaos, shop: Engine) -> None:
    """Connecting takes longer than all else in a small delivery."""
    pids = set()

    def job() -> None:
        for key in range(5):
            with shop.begin() as connection:
                raw: Any = connection.connection.dbapi_connection
                pids.add(raw.info.backend_pid)
                connection.execute(text("INSERT INTO once (key) VALUES (:k) ON CONFLICT DO NOTHING"), {"k": str(key)})

    with shop.connect() as connection:  # of the pool before the check: closed after the first delivery
        connection.execute(text("SELECT 1"))
    report = check.check(job)
    assert report.runs >= 7 and len(pids) <= 3


@pytest.mark.parametrize("pool", [NullPool, QueuePool])
def test_engines_with_settings_of_their_own(check: Chaos, shop: Engine, pool: Any) -> None:
    """What a listener sets on each new connection is there in every delivery, and is no step."""
    engine = create_engine(shop.url, poolclass=pool)

    @event.listens_for(engine, "connect")
    def settings(raw: Any, record: Any) -> None:
        raw.cursor().execute("SET search_path = app, public")
        raw.commit()

    with shop.begin() as connection:
        connection.execute(text("CREATE SCHEMA app; CREATE TABLE app.only_here (n int)"))

    def job() -> None:
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM only_here"))
            connection.execute(text("INSERT INTO only_here VALUES (1)"))

    report = check.check(job)
    assert report.verdict == "proven" and report.steps == 3
    assert list(report.baseline.rows) == ["app.only_here"]


def test_two_databases_in_one_job(check: Chaos, shop: Engine, postgres_server: Postgres) -> None:
    with postgres_server.database() as other_name:
        other = create_engine(postgres_server.url(other_name, shop.dialect.driver))
        furnish(other)

        def transfer() -> None:
            with shop.begin() as one, other.begin() as two:
                if one.scalar(select(Order.status).where(Order.id == 1)) == "new":
                    one.execute(update(Order).where(Order.id == 1).values(status="done"))
                    two.execute(text("INSERT INTO invoices (order_id) VALUES (1)"))

        report = check.explore(transfer)
        assert {(finding.kind, finding.effect) for finding in report.findings} == {("duplicated", "invoices")}
        other.dispose()


def test_two_engines_on_one_database_are_one(check: Chaos, shop: Engine) -> None:
    other = create_engine(shop.url)

    def job() -> None:
        with other.begin() as connection:
            new = connection.scalar(select(Order.status).where(Order.id == 1)) == "new"
        if new:
            with shop.begin() as connection:
                connection.execute(text("INSERT INTO invoices (order_id) VALUES (1)"))
                connection.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))

    report = check.check(job)
    assert report.verdict == "proven" and report.states == 2
    other.dispose()


@pytest.mark.parametrize("factory", [None, DictCursor])
def test_a_plain_psycopg2_connection_is_followed(check: Chaos, shop: Engine, factory: Any) -> None:
    host, name = str(shop.url.query["host"]), str(shop.url.database)

    def pay(once: bool) -> None:
        connection = psycopg2.connect(host=host, dbname=name, user="postgres", cursor_factory=factory)
        cursor = connection.cursor()
        cursor.execute("SELECT status FROM orders WHERE id = 1")
        if cursor.fetchone()[0] == "new":
            cursor.execute("INSERT INTO invoices (order_id) VALUES (1)")
            if not once:
                connection.commit()
            cursor.execute("UPDATE orders SET status = 'done' WHERE id = 1")
        connection.commit()
        connection.close()

    report = check.explore(pay, False)
    assert {(finding.kind, finding.effect) for finding in report.findings} == {("duplicated", "invoices")}
    with shop.begin() as connection:
        connection.execute(text("UPDATE orders SET status = 'new'; DELETE FROM invoices"))
    assert check.check(pay, True).verdict == "proven"


def test_a_plain_psycopg_connection_is_followed(check: Chaos, shop: Engine) -> None:
    host, name = str(shop.url.query["host"]), str(shop.url.database)

    def pay(once: bool) -> None:
        with psycopg.connect(host=host, dbname=name, user="postgres") as connection:
            if connection.execute("SELECT status FROM orders WHERE id = 1").fetchone() == ("new",):
                connection.execute("INSERT INTO invoices (order_id) VALUES (1)")
                if not once:
                    connection.commit()
                with connection.transaction():
                    connection.execute("UPDATE orders SET status = 'done' WHERE id = 1")

    report = check.explore(pay, False)
    assert {(finding.kind, finding.effect) for finding in report.findings} == {("duplicated", "invoices")}
    with shop.begin() as connection:
        connection.execute(text("UPDATE orders SET status = 'new'; DELETE FROM invoices"))
    assert check.check(pay, True).verdict == "proven"


def test_copy_is_a_step(check: Chaos, shop: Engine) -> None:
    host, name = str(shop.url.query["host"]), str(shop.url.database)

    def load() -> None:
        with psycopg.connect(host=host, dbname=name, user="postgres", autocommit=True) as connection:
            with connection.cursor().copy("COPY invoices (order_id) FROM STDIN") as copy:
                copy.write_row((1,))
            connection.execute("UPDATE orders SET n = 1")

    report = check.explore(load)
    assert {(finding.kind, finding.effect) for finding in report.findings} == {("duplicated", "invoices")}


# -- afterwards -------------------------------------------------------------------------------------------------------


def test_nothing_is_left_behind(check: Chaos, shop: Engine) -> None:
    classes = (
        psycopg.Cursor,
        psycopg.ServerCursor,
        psycopg.Connection,
        psycopg.Connection.__mro__[1],
        _ConnectionFairy,
        PGDialect_psycopg,
        PGDialect_psycopg2,
        psycopg2,
    )
    before = [dict(vars(each)) for each in classes]
    raw = shop.raw_connection()
    factory = getattr(raw.dbapi_connection, "cursor_factory", None)
    raw.close()
    check.check(good, shop)
    assert [dict(vars(each)) for each in classes] == before
    with shop.connect() as connection:
        own: Any = connection.connection.dbapi_connection
        assert getattr(own, "cursor_factory", None) == factory
        others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        for _ in range(100):
            if connection.scalar(text(others)) == 0:
                break
            connection.rollback()
            time.sleep(0.02)
        else:
            pytest.fail("a connection of the check is still there")
        assert connection.scalar(text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")) == 0
        assert connection.scalar(text("SHOW session_replication_role")) == "origin"


def test_after_a_check_the_database_goes_on_as_after_one_clean_run(check: Chaos, shop: Engine) -> None:
    def job() -> None:
        with shop.begin() as connection:
            connection.execute(text("INSERT INTO invoices (order_id) VALUES (1)"))

    assert check.explore(job).verdict == "failed"
    with shop.begin() as connection:
        assert connection.execute(text("SELECT id FROM invoices")).scalars().all() == [1]
        assert connection.scalar(text("INSERT INTO invoices (order_id) VALUES (2) RETURNING id")) == 2
    with shop.begin() as connection:  # triggers and foreign keys work as ever
        with pytest.raises(Exception, match="foreign key"):
            connection.execute(text("INSERT INTO lines (invoice_id, product) VALUES (99, 'x')"))


def test_a_server_of_a_killed_test_process_ends(tmp_path: Path) -> None:
    if find_binaries() is None:
        pytest.skip("no PostgreSQL server installed (looked for initdb and postgres)")
    program = (
        "import sys, time; from tests.postgres_server import running_server\n"
        "with running_server() as server: print(server.folder, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    assert process.stdout is not None
    folder = process.stdout.readline().strip()
    pid = int(Path(folder, "data", "postmaster.pid").read_text().split()[0])
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    until = time.monotonic() + 20
    while time.monotonic() < until and (Path(folder).exists() or Path(f"/proc/{pid}").exists()):
        time.sleep(0.05)
    assert not Path(folder).exists() and not Path(f"/proc/{pid}").exists()
