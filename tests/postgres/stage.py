"""A stage without deliveries: to look at the resource alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from sqlalchemy import Engine

from retrychaos.world.postgres import PostgresDatabase
from retrychaos.world.postgres_servers import Servers


class Stage:
    """Notes what a resource tells. Refusals are raised."""

    def __init__(self, scratch: tuple[str, ...]) -> None:
        self.running = self.traced = False
        self.quiet = False
        self.scratch = scratch
        self.doubts: list[str] = []
        self.found: dict[str, Any] = {}

    def touched(self, resource: Any) -> None: ...

    def find(self, name: str) -> Any:
        return self.found.get(name)

    def adopt(self, resource: Any) -> None:
        self.found[resource.name] = resource

    def refuse(self, problem: Exception) -> NoReturn:
        raise problem

    def doubt(self, reason: str) -> None:
        self.doubts.append(reason)

    def now(self) -> float:
        return time.time()

    def options(self, name: str) -> Any:
        return {"scratch": self.scratch, "leases": ()}[name]


@contextmanager
def resource_on(engine: Engine, *scratch: str) -> Iterator[PostgresDatabase]:
    """The resource for the database of an engine, all of whose server is there for tests."""
    host = engine.url.query.get("host")
    stage = Stage(scratch or (f"postgresql:///?host={host}",))
    raw = engine.raw_connection()
    try:
        database = Servers(stage).of(raw.dbapi_connection)  # type: ignore[arg-type]
    finally:
        raw.close()
    yield database
    database.close()
