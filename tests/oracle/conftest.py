"""The oracle, one for each process that tests run in, with a Redis server where one is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.oracle.brute_force import Oracle
from tests.world.redis_server import running_server


@pytest.fixture(scope="session")
def oracle() -> Iterator[Oracle]:
    with closing(Oracle()) as handle:
        yield handle


@pytest.fixture(scope="session")
def redis_socket() -> Iterator[str]:
    with running_server() as path:
        yield path


@pytest.fixture(scope="session")
def redis_oracle(redis_socket: str) -> Iterator[Oracle]:
    with closing(Oracle(redis_socket)) as handle:
        yield handle
