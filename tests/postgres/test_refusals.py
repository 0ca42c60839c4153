"""What cannot be judged on PostgreSQL is refused or doubted, never guessed; and nothing is changed by that."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, select, text, update
from sqlalchemy.orm import Session

from retrychaos import Chaos
from retrychaos.model.errors import BaselineError, ChaosError, WorldError
from retrychaos.world.postgres_servers import declared
from tests.postgres_server import Postgres
from tests.sql.engines import Order


def execute(engine: Engine, *statements: str) -> None:
    with engine.begin() as connection:
        raw: Any = connection.connection.dbapi_connection
        for statement in statements:
            raw.cursor().execute(statement)


def finish(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(update(Order).where(Order.id == 1).values(status="done"))


def status(engine: Engine) -> str:
    with engine.connect() as connection:
        return str(connection.scalar(select(Order.status).where(Order.id == 1)))


# -- somebody's data --------------------------------------------------------------------------------------------------


def test_a_database_that_was_not_declared_is_refused_untouched(chaos: Chaos, shop: Engine) -> None:
    with pytest.raises(WorldError, match=r"is not empty \(tables: invoices, lines, once and 1 more\)") as refusal:
        chaos.check(finish, shop)
    assert status(shop) == "new"
    url = str(refusal.value).partition('scratch=["')[2].partition('"]')[0]
    assert chaos(scratch=[url]).check(finish, shop).verdict == "proven"


def test_another_database_of_the_server_does_not_count(chaos: Chaos, shop: Engine, postgres_server: Postgres) -> None:
    with pytest.raises(WorldError, match="is not empty"):
        chaos(scratch=[f"postgresql:///other?host={postgres_server.folder}"]).check(finish, shop)


@pytest.mark.parametrize(
    ("url", "place", "name"),
    [
        ("postgresql://localhost/db", "localhost:5432", "db"),
        ("postgresql://localhost", "localhost:5432", "db"),
        ("postgresql+psycopg://user:p%40ss@127.0.0.1:5433/db?sslmode=disable", "localhost:5433", "db"),
        ("postgres://db.test:5432/", "db.test:5432", "db"),
        ("postgresql://%2Ftmp/db", "/tmp:5432", "db"),
        ("postgresql:///db?host=/tmp&port=5433", "/tmp:5433", "db"),
        ("postgresql://[::1]/a%20b", "localhost:5432", "a b"),
    ],
)
def test_an_address_names_a_database(url: str, place: str, name: str) -> None:
    assert declared((url,), place, name)
    assert not declared((url,), "elsewhere:5432", name)
    assert not declared((url,), place.rpartition(":")[0] + ":1", name)
    assert declared((url,), place, "another") == (url.count("/") < 3 or url.endswith("/"))


def test_a_role_that_cannot_put_rows_back_is_refused(
    check: Chaos, shop: Engine, postgres_server: Postgres, postgres: str
) -> None:
    role = f"plain_{postgres}"
    postgres_server.run(
        f"CREATE ROLE {role} LOGIN; GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}; "
        f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role}",
        postgres,
    )
    engine = create_engine(str(shop.url).replace("postgres@", f"{role}@"))
    try:
        with pytest.raises(WorldError, match=r"may not set session_replication_role .*GRANT SET ON PARAMETER"):
            check.check(finish, engine)
        assert status(shop) == "new"
        postgres_server.run(f"GRANT SET ON PARAMETER session_replication_role TO {role}", postgres)
        assert check.check(finish, engine).verdict == "proven"
    finally:
        engine.dispose()
        postgres_server.run(f"DROP OWNED BY {role}; DROP ROLE {role}", postgres)


def test_other_drivers_are_refused(check: Chaos, shop: Engine) -> None:
    shop.dialect.driver, before = "pg8000", shop.dialect.driver  # the driver itself need not be installed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("retrychaos.world.sql.driver_of", lambda raw: "pg8000")
        with pytest.raises(WorldError, match=r"driver 'pg8000' are not covered.*postgresql\+psycopg://"):
            check.check(finish, shop)
    shop.dialect.driver = before
    assert status(shop) == "new"


# -- transactions of the test ---------------------------------------------------------------------------------------


def test_an_outer_transaction_is_refused(check: Chaos, shop: Engine) -> None:
    with shop.connect() as connection, connection.begin():
        session = Session(bind=connection, join_transaction_mode="create_savepoint")

        def job() -> None:
            session.get_one(Order, 1).status = "done"
            session.commit()

        with pytest.raises(WorldError, match=r"already inside a transaction .*Remedy"):
            check.check(job)


def test_pending_changes_of_a_fixture_are_refused(check: Chaos, shop: Engine) -> None:
    with Session(shop) as session:
        session.get_one(Order, 1).n = 5
        session.flush()

        def job() -> None:
            session.get_one(Order, 1).status = "done"
            session.commit()

        with pytest.raises(WorldError, match=r"Remedy: commit in the fixture before the check"):
            check.check(job)


def test_an_attribute_that_a_fixture_has_read_is_no_obstacle(check: Chaos, shop: Engine) -> None:
    with Session(shop) as session:
        order = session.get_one(Order, 1)
        order.n = 5
        session.commit()
        assert order.id == 1  # begins a transaction that holds nothing

        def job() -> None:
            session.get_one(Order, 1).status = "done"
            session.commit()

        assert check.check(job).verdict == "proven"


def test_a_connection_that_is_open_but_idle_is_no_obstacle(check: Chaos, shop: Engine) -> None:
    with shop.connect() as idle:
        idle.execute(text("SELECT 1"))
        idle.rollback()
        assert check.check(finish, shop).verdict == "proven"


def test_work_left_uncommitted_is_lost_and_said(check: Chaos, shop: Engine) -> None:
    kept = []

    def job() -> None:
        finish(shop)
        raw = shop.raw_connection()
        kept.append(raw)
        raw.cursor().execute("UPDATE orders SET n = 99")

    with pytest.warns(match="was left uncommitted when the job returned"):
        check.check(job)
    with shop.connect() as connection:
        assert connection.scalar(text("SELECT max(n) FROM orders")) == 0


# -- what is not rows -------------------------------------------------------------------------------------------------

SCHEMA_CHANGES = {
    "table": "CREATE TABLE more (n int)",
    "column": "ALTER TABLE orders ADD COLUMN more int",
    "drop": "DROP TABLE once",
    "index": "CREATE INDEX more ON orders (n)",
    "function": "CREATE FUNCTION more() RETURNS int AS 'SELECT 1' LANGUAGE sql",
    "enum": "CREATE TYPE more AS ENUM ('a')",
    "hidden": "DO $$ BEGIN EXECUTE 'CREATE VIEW more AS SELECT 1'; END $$",
    "trigger": "ALTER TABLE orders DISABLE TRIGGER ALL",
    "sequence": "ALTER SEQUENCE orders_id_seq INCREMENT 5",
    "partition": "CREATE TABLE more PARTITION OF parted FOR VALUES IN (1)",
    "copy": "SELECT * INTO more FROM orders",
}


@pytest.mark.parametrize("kind", list(SCHEMA_CHANGES))
def test_a_changed_schema_is_refused_before_it_is_committed(check: Chaos, shop: Engine, kind: str) -> None:
    execute(shop, "CREATE TABLE parted (n int) PARTITION BY LIST (n)")

    def job() -> None:
        finish(shop)
        with shop.begin() as connection:
            connection.execute(text(SCHEMA_CHANGES[kind]))

    with pytest.raises(WorldError, match=r"is about to change the schema .*Remedy: .*temporary tables"):
        check.check(job)
    assert status(shop) == "new"
    with shop.connect() as connection:
        assert connection.scalar(text("SELECT to_regclass('more')")) is None
        assert connection.scalar(text("SELECT to_regclass('once')")) == "once"


def test_a_changed_schema_is_refused_in_autocommit_too(check: Chaos, shop: Engine) -> None:
    def job() -> None:
        finish(shop)
        with shop.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("CREATE TABLE IF NOT EXISTS more (n int)"))

    with pytest.raises(WorldError, match=r"has changed the schema"):
        check.check(job)
    assert status(shop) == "new"
    assert check.check(job).verdict == "proven"  # now it is there, and the command does nothing


def test_a_schema_that_is_put_together_and_rolled_back_is_none_of_our_business(check: Chaos, shop: Engine) -> None:
    def job() -> None:
        with shop.connect() as connection:
            connection.execute(text("CREATE TABLE more (n int)"))
            connection.rollback()
            connection.execute(text("TRUNCATE once"))
            connection.execute(text("LOCK TABLE orders IN EXCLUSIVE MODE"))
            connection.commit()
        finish(shop)

    assert check.check(job).verdict == "proven"


def test_large_objects_are_refused(check: Chaos, shop: Engine) -> None:
    def job() -> None:
        with shop.begin() as connection:
            connection.execute(text(r"SELECT lo_from_bytea(0, '\x00')"))

    with pytest.raises(WorldError, match="large objects"):
        check.check(job)
    with shop.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM pg_largeobject_metadata")) == 0


def test_a_foreign_table_is_refused(check: Chaos, shop: Engine, postgres_server: Postgres, postgres: str) -> None:
    execute(
        shop,
        "CREATE EXTENSION postgres_fdw",
        f"CREATE SERVER far FOREIGN DATA WRAPPER postgres_fdw OPTIONS (host '{postgres_server.folder}', "
        f"dbname '{postgres}')",
        "CREATE USER MAPPING FOR postgres SERVER far OPTIONS (user 'postgres')",
        "CREATE FOREIGN TABLE far_orders (id int, n int) SERVER far OPTIONS (table_name 'orders')",
    )

    def job() -> None:
        with shop.begin() as connection:
            connection.execute(text("UPDATE far_orders SET n = 7"))

    with pytest.raises(WorldError, match="foreign table far_orders"):
        check.check(job)
    with shop.connect() as connection:
        assert connection.scalar(text("SELECT max(n) FROM orders")) == 0


def two_phases(engine: Engine) -> None:
    with engine.connect() as connection:
        transaction = connection.begin_twophase()
        connection.execute(text("UPDATE orders SET n = 1"))
        transaction.prepare()
        transaction.commit()


def two_phases_by_hand(engine: Engine) -> None:
    raw: Any = engine.raw_connection()
    raw.cursor().execute("UPDATE orders SET n = 1")
    raw.cursor().execute("PREPARE TRANSACTION 'x'")
    raw.cursor().execute("COMMIT PREPARED 'x'")
    raw.close()


def two_phases_by_the_driver(engine: Engine) -> None:
    raw: Any = engine.raw_connection()
    own = raw.driver_connection
    if engine.dialect.driver == "psycopg2":  # whose own method cannot be hooked
        return two_phases_by_hand(engine)
    own.tpc_begin("x")
    raw.cursor().execute("UPDATE orders SET n = 1")
    own.tpc_prepare()
    own.tpc_commit()
    raw.close()
    return None


@pytest.mark.parametrize("job", [two_phases, two_phases_by_hand, two_phases_by_the_driver])
def test_two_phase_commit_is_refused(check: Chaos, shop: Engine, job: Callable[[Engine], None]) -> None:
    with pytest.raises(WorldError, match=r"two-phase commit .*Use plain transactions"):
        check.check(job, shop)
    with shop.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM pg_prepared_xacts")) == 0
        assert connection.scalar(text("SELECT max(n) FROM orders")) == 0


def test_the_pipeline_mode_of_psycopg_is_refused(check: Chaos, shop: Engine) -> None:
    if shop.dialect.driver != "psycopg":
        return

    def job() -> None:
        raw: Any = shop.raw_connection()
        with raw.driver_connection.pipeline():
            raw.cursor().execute("UPDATE orders SET n = 1")
        raw.commit()
        raw.close()

    with pytest.raises(WorldError, match="pipeline mode"):
        check.check(job)


OUTSIDE = {
    "notify": "NOTIFY work",
    "function": "SELECT pg_notify('work', 'x')",
    "own function": "SELECT ring()",
    "function of a function": "SELECT ring_twice()",
    "terminate": "SELECT pg_terminate_backend(0)",
    "program": "COPY (SELECT 1) TO PROGRAM 'cat >/dev/null'",
}


@pytest.mark.parametrize("kind", list(OUTSIDE))
def test_effects_outside_of_rows_are_doubted(check: Chaos, shop: Engine, kind: str) -> None:
    execute(
        shop,
        "CREATE FUNCTION ring() RETURNS void AS 'SELECT pg_notify(''work'', ''x'')' LANGUAGE sql",
        "CREATE FUNCTION ring_twice() RETURNS void AS 'SELECT ring(); SELECT ring()' LANGUAGE sql",
    )

    def job() -> None:
        with shop.begin() as connection:
            connection.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))
            connection.execute(text(OUTSIDE[kind]))

    report = check.explore(job)
    assert report.verdict == "inconclusive"
    assert "effect outside the ledger" in report.stop_reason


def test_a_notify_that_does_no_harm_can_be_declared(check: Chaos, shop: Engine) -> None:
    def job() -> None:
        with shop.begin() as connection:
            connection.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))
            connection.execute(text("NOTIFY work"))

    report = check(volatile=["notify"]).check(job)
    assert report.verdict == "proven" and "not compared: notify" in report.guarantee


def test_a_trigger_that_notifies_is_doubted(check: Chaos, shop: Engine) -> None:
    execute(
        shop,
        "CREATE FUNCTION tell() RETURNS trigger AS 'BEGIN PERFORM pg_notify(''w'', ''''); RETURN NULL; END' "
        "LANGUAGE plpgsql",
        "CREATE TRIGGER tell AFTER UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION tell()",
    )
    report = check.explore(finish, shop)
    assert report.verdict == "inconclusive"
    assert "a trigger" in report.stop_reason


def test_a_procedure_that_may_commit_is_doubted(check: Chaos, shop: Engine) -> None:
    execute(
        shop,
        "CREATE PROCEDURE step_by_step() AS 'BEGIN UPDATE orders SET n = 1; COMMIT; UPDATE orders SET n = 2; END' "
        "LANGUAGE plpgsql",
    )

    def job() -> None:
        with shop.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("CALL step_by_step()"))

    report = check.explore(job)
    assert report.verdict == "inconclusive"
    assert "may commit on its own" in report.stop_reason


def test_several_statements_with_a_commit_are_doubted(check: Chaos, shop: Engine) -> None:
    def job() -> None:
        raw: Any = shop.raw_connection()
        raw.cursor().execute("UPDATE orders SET n = 1; COMMIT; UPDATE orders SET n = 2")
        raw.commit()
        raw.close()

    report = check.explore(job)
    assert report.verdict == "inconclusive"
    assert "with a COMMIT among them" in report.stop_reason


def test_a_connection_that_nobody_saw_is_noticed(check: Chaos, shop: Engine) -> None:
    def job() -> None:
        finish(shop)
        import subprocess

        command = ["psql", "-h", str(shop.url.query["host"]), "-U", "postgres", str(shop.url.database)]
        subprocess.run([*command, "-c", "UPDATE orders SET n = n + 1"], check=True, capture_output=True)

    report = check.explore(job)
    assert report.verdict in ("inconclusive", "failed")


# -- the server's clock -----------------------------------------------------------------------------------------------


def test_a_job_that_waits_by_the_servers_clock_is_not_called_stuck(check: Chaos, shop: Engine) -> None:
    """The check cannot move that clock, so it cannot tell; and must not say that the job is wrong."""
    execute(
        shop, "CREATE TABLE lease (id int PRIMARY KEY, until timestamptz); INSERT INTO lease VALUES (1, '2024-01-01')"
    )

    def job() -> None:
        with shop.begin() as connection:
            taken = text("UPDATE lease SET until = now() + interval '1 minute' WHERE until <= now()")
            if not connection.execute(taken).rowcount:
                raise RuntimeError("somebody else is at work")
        with shop.begin() as connection:
            connection.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))
            connection.execute(text("UPDATE lease SET until = '2024-01-01'"))

    with pytest.raises(WorldError, match=r"looks at the clock of .* which the check cannot move"):
        check.check(job)
    assert status(shop) == "new"


def test_the_servers_clock_is_no_obstacle_where_nothing_waits_for_it(check: Chaos, shop: Engine, chaos: Chaos) -> None:
    """The job is delivered after its lock in Redis has ended, and stamps a row then."""
    execute(shop, "ALTER TABLE orders ADD COLUMN touched timestamptz")

    def job() -> None:
        if not chaos.redis.set("lock", 1, nx=True, ex=900):
            raise RuntimeError("somebody else is at work")
        with shop.begin() as connection:
            connection.execute(text("UPDATE orders SET status = 'done', touched = now() WHERE id = 1"))
        chaos.redis.delete("lock")

    assert check.check(job).verdict == "proven"


def test_a_lease_by_the_clock_of_the_job_is_waited_for(check: Chaos, shop: Engine) -> None:
    from datetime import UTC, datetime, timedelta

    execute(
        shop, "CREATE TABLE lease (id int PRIMARY KEY, until timestamptz); INSERT INTO lease VALUES (1, '2024-01-01')"
    )

    def job() -> None:
        now = datetime.now(UTC)
        with shop.begin() as connection:
            taken = text("UPDATE lease SET until = :until WHERE until <= :now")
            if not connection.execute(taken, {"now": now, "until": now + timedelta(minutes=1)}).rowcount:
                raise RuntimeError("somebody else is at work")
        with shop.begin() as connection:
            connection.execute(text("UPDATE orders SET status = 'done' WHERE id = 1"))
            connection.execute(text("UPDATE lease SET until = '2024-01-01'"))

    assert check.check(job).verdict == "proven"


def test_time_goes_by_on_the_server_while_a_check_runs(check: Chaos, shop: Engine) -> None:
    execute(
        shop, "CREATE TABLE stamps (key int PRIMARY KEY, at timestamptz DEFAULT now(), ends timestamp(0), day date)"
    )

    def job() -> None:
        time.monotonic()
        for key in range(4):
            with shop.begin() as connection:
                connection.execute(
                    text(
                        "INSERT INTO stamps (key, ends, day, at) SELECT :key, localtimestamp, current_date, "
                        "clock_timestamp() FROM pg_sleep(0.3) ON CONFLICT DO NOTHING"
                    ),
                    {"key": key},
                )

    report = check.check(job)
    assert report.verdict == "proven" and report.seconds > 1.5


def test_a_job_that_fails_without_any_fault_is_no_baseline(check: Chaos, shop: Engine) -> None:
    def job() -> None:
        with shop.begin() as connection:
            connection.execute(text("INSERT INTO orders (id, status, n) VALUES (1, 'new', 0)"))

    with pytest.raises(BaselineError, match="UniqueViolation"):
        check.check(job)
    assert issubclass(BaselineError, ChaosError)
