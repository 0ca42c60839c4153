"""What all tests of this repository share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.postgres_server import Postgres, running_server

pytest_plugins = ["pytester"]


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
