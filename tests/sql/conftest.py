from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from tests.sql.engines import ENGINES, furnish


@pytest.fixture(params=list(ENGINES))
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """A shop on each kind of engine."""
    engine = ENGINES[request.param](tmp_path)
    furnish(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def file_shop(tmp_path: Path) -> Iterator[Engine]:
    engine = ENGINES["file"](tmp_path)
    furnish(engine)
    yield engine
    engine.dispose()
