"""A shop on a fresh PostgreSQL database, through each driver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine

from retrychaos import Chaos
from tests.postgres_server import Postgres
from tests.sql.engines import furnish

DRIVERS = ("psycopg", "psycopg2")


@pytest.fixture(params=DRIVERS)
def engine(request: pytest.FixtureRequest, postgres_server: Postgres, postgres: str) -> Iterator[Engine]:
    engine = create_engine(postgres_server.url(postgres, request.param))
    yield engine
    engine.dispose()


@pytest.fixture
def shop(engine: Engine) -> Engine:
    furnish(engine)
    return engine


@pytest.fixture
def check(chaos: Chaos, postgres_server: Postgres) -> Chaos:
    """A check that may rewind every database of the private server."""
    return chaos(scratch=[f"postgresql:///?host={postgres_server.folder}"])
