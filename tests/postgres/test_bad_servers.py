"""Servers that stop answering or refuse connections while a job runs: the check ends, says why, and leaves nothing."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, text

from retrychaos import BaselineError, Chaos, WorldError
from tests.postgres_server import Postgres, running_server

Job = Callable[[Engine], None]


@pytest.fixture
def marks(engine: Engine) -> Engine:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE marks (k text PRIMARY KEY)"))
    return engine


@pytest.fixture
def twice(check: Chaos) -> Chaos:
    return check(duplicates=2, budget=20)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    gc.collect()  # what tests before this one have dropped
    threads, sockets = set(threading.enumerate()), set(_sockets())
    yield
    assert set(threading.enumerate()) == threads
    assert not set(_sockets()) - sockets


def _sockets() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "socket" in (target := os.readlink(f"/proc/self/fd/{number}")):
                yield target


def mark(engine: Engine, key: str = "7") -> int:
    with engine.begin() as connection:
        statement = text("INSERT INTO marks VALUES (:key) ON CONFLICT DO NOTHING")
        return int(connection.execute(statement, {"key": key}).rowcount)


def count(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM marks")).scalar_one())


def overtaken(engine: Engine) -> bool:
    """Another delivery has come between two steps of this one."""
    seen = count(engine)
    return not mark(engine) and not seen


# -- statements that never return -------------------------------------------------------------------------------------


def test_a_statement_that_never_returns(twice: Chaos, marks: Engine, nothing_left: None) -> None:
    def job(engine: Engine) -> None:
        if overtaken(engine):
            with engine.begin() as connection:
                connection.execute(text("SELECT pg_sleep(100000)"))

    report = twice.explore(job, marks)
    assert (report.verdict, report.budget_spent) == ("inconclusive", False)
    assert "did not come back within" in report.stop_reason and "pg_sleep" in report.stop_reason
    assert count(marks) == 1  # as one clean run leaves it
    with marks.connect() as connection:
        asleep = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%'"
        assert connection.execute(text(asleep)).scalar_one() == 0
    marks.dispose()


def test_a_statement_that_never_returns_to_a_delivery_alone(check: Chaos, marks: Engine, nothing_left: None) -> None:
    def job(engine: Engine) -> None:
        if not mark(engine):
            with engine.begin() as connection:
                connection.execute(text("SELECT pg_sleep(100000)"))

    report = check(budget=2).explore(job, marks)
    assert (report.verdict, report.budget_spent) == ("inconclusive", True)
    assert "the budget of 2 s ran out" in report.stop_reason
    assert count(marks) == 1
    marks.dispose()


def test_a_job_that_forks_while_others_run(twice: Chaos, marks: Engine, nothing_left: None) -> None:
    def job(engine: Engine) -> None:
        if overtaken(engine):
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)

    report = twice.explore(job, marks)
    assert (report.verdict, report.budget_spent) == ("inconclusive", False)
    assert "os.fork" in report.stop_reason and "test_bad_servers.py" in report.stop_reason
    assert count(marks) == 1
    marks.dispose()


# -- connections that are refused -------------------------------------------------------------------------------------


@contextmanager
def role_with(connections: int, marks: Engine, server: Postgres, database: str) -> Iterator[Engine]:
    """An engine of a role that may have so many connections at a time."""
    role = f"few_{database}"
    server.run(
        f"CREATE ROLE {role} LOGIN CONNECTION LIMIT {connections}; GRANT ALL ON marks TO {role}; "
        f"GRANT SET ON PARAMETER session_replication_role TO {role}",
        database,
    )
    engine = create_engine(str(marks.url).replace("postgres@", f"{role}@"))
    try:
        yield engine
    finally:
        engine.dispose()
        server.run(f"DROP OWNED BY {role}; DROP ROLE {role}", database)


def test_a_connection_of_the_check_that_is_refused(
    twice: Chaos, marks: Engine, postgres_server: Postgres, postgres: str
) -> None:
    with role_with(1, marks, postgres_server, postgres) as engine:
        with pytest.raises(WorldError, match=r"connection of its own .*too many connections"):
            twice.check(mark, engine)
    assert count(marks) == 0


# -- a server that stops answering ------------------------------------------------------------------------------------


class Frozen:
    """A server of its own, all of whose processes can be stopped."""

    def __init__(self, server: Postgres) -> None:
        self.server = server

    @property
    def _processes(self) -> list[int]:
        postmaster = int(Path(self.server.folder, "data", "postmaster.pid").read_text().split("\n")[0])
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text()
        return [postmaster, *map(int, children.split())]

    def stop(self) -> None:
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, what: signal.Signals) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):  # one that has ended meanwhile
                os.kill(process, what)


@pytest.fixture
def own_server() -> Iterator[Frozen]:
    with running_server() as server:
        frozen = Frozen(server)
        yield frozen
        frozen.go_on()


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
@pytest.mark.parametrize("duplicates", [1, 2])
def test_a_server_that_stops_answering(
    chaos: Chaos,
    own_server: Frozen,
    driver: str,
    duplicates: int,
    monkeypatch: pytest.MonkeyPatch,
    nothing_left: None,
) -> None:
    monkeypatch.setattr("retrychaos.world.postgres_line._PATIENCE", 1.0)

    def job(engine: Engine) -> None:
        if overtaken(engine) if duplicates > 1 else not mark(engine):
            own_server.stop()
            mark(engine)

    with own_server.server.database() as name:
        engine = create_engine(own_server.server.url(name, driver))
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE marks (k text PRIMARY KEY)"))
        engine.dispose()
        check = chaos(duplicates=duplicates, budget=5, scratch=[f"postgresql:///?host={own_server.server.folder}"])
        with pytest.raises((WorldError, BaselineError), match=r"has not answered for"):
            check.check(job, engine)
        own_server.go_on()
        assert count(engine) <= 1
        engine.dispose()
