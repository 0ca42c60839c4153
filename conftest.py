"""What all tests of this repository share."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest
from tests.postgres_server import Postgres, running_server

pytest_plugins = ["pytester"]


def pytest_configure() -> None:
    """A shell that starts the tests in the background lets them ignore Ctrl-C, and some are about that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What was imported stays. To look at all of it again, after each test, would take most of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    """A private PostgreSQL server, one for each process of tests; skips where none is installed."""
    with running_server() as server:
        yield server


@pytest.fixture
def postgres(postgres_server: Postgres) -> Iterator[str]:
    """The name of a fresh, empty database on that server."""
    with postgres_server.database() as name:
        yield name
