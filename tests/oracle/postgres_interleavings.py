"""What programs run on under the tool where deliveries overlap on PostgreSQL: a database, isolation levels, a receiver.

Numbers that a sequence has drawn are compared by their order only: the tool takes states for one that differ in nothing
else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import psycopg
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from retrychaos.model.ledger import Facts
from retrychaos.runtime.turns import Actor
from retrychaos.world.postgres import PostgresDatabase
from tests.oracle.interleavings import ledger_of
from tests.oracle.moves import Ledger
from tests.oracle.overlapping_jobs import Duplicate, Locked
from tests.postgres_server import Postgres

_Answer = TypeVar("_Answer")
STYLES = ("", "", "REPEATABLE READ", "SERIALIZABLE", "AUTOCOMMIT")
"""Isolation levels; empty: READ COMMITTED."""
TABLES = ("counters", "notes", "once", "refs", "links")
_SCHEMA = """
    CREATE TABLE counters (id INTEGER PRIMARY KEY, n INTEGER NOT NULL);
    CREATE TABLE notes (id SERIAL PRIMARY KEY, what TEXT NOT NULL);
    CREATE TABLE once (key TEXT PRIMARY KEY);
    CREATE TABLE refs (counter INTEGER NOT NULL REFERENCES counters (id));
    CREATE TABLE links (note INTEGER NOT NULL);
"""
CONTENTS = f"""
    TRUNCATE {", ".join(TABLES)} RESTART IDENTITY;
    INSERT INTO counters VALUES (1, 0), (2, 0);
    INSERT INTO once VALUES ('taken');
"""
_JAM = """
    SELECT CASE WHEN count(*) FILTER (WHERE locktype = 'tuple') > 0 THEN 'unsure'
    WHEN count(transactionid) > count(DISTINCT transactionid::text) THEN 'jammed' ELSE '' END
    FROM pg_locks WHERE NOT granted AND pid IN (SELECT pid FROM pg_stat_activity WHERE datname = current_database())
"""
RECEIVER = "calls call PostgresShop.send"
"""Where a ledger has what was sent."""


def normal(tables: Mapping[str, Iterable[tuple[Any, ...]]]) -> Ledger:
    """The rows of a database, from wherever they are read."""
    rank = {id_: number for number, (id_, _) in enumerate(sorted(tables["notes"]), start=1)}
    rows: dict[str, list[tuple[Any, ...]]] = {
        **{name: list(tables[name]) for name in ("counters", "once", "refs")},
        "notes": [(rank[id_], what) for id_, what in tables["notes"]],
        "links": [(rank.get(note, "of nobody"),) for (note,) in tables["links"]],
    }
    return frozenset((name, tuple(sorted(each, key=repr))) for name, each in rows.items())


def jam(monitor: psycopg.Connection[Any]) -> str:
    """All who wait for a transaction are woken at once when it ends. One who waits for its turn at a row, behind
    another one, waits no longer for that if the row has been changed: so it may come first.
    """
    ((found,),) = monitor.execute(_JAM.encode()).fetchall()
    return str(found)


class Store:
    """A database for programs, and somebody who looks at it from outside."""

    def __init__(self, server: Postgres, name: str) -> None:
        self.server = server
        self.name = name
        self.monitor = psycopg.connect(host=server.folder, user="postgres", dbname=name, autocommit=True)
        self.monitor.execute(_SCHEMA)
        self.furnish()

    def furnish(self) -> None:
        """As before the first delivery."""
        self.monitor.execute(CONTENTS.encode())

    def close(self) -> None:
        self.monitor.close()


class PostgresShop:
    """A database of a PostgreSQL server, through SQLAlchemy, and somebody who takes calls."""

    keeps = True

    def __init__(self, store: Store, driver: str) -> None:
        store.furnish()
        self._store = store
        self._engine = create_engine(store.server.url(store.name, driver))
        self.scratch = [f"postgresql:///?host={store.server.folder}"]
        self.traces: dict[threading.Thread, list[Any]] = {}

    @contextmanager
    def connect(self, database: int, style: str) -> Iterator[_Core]:
        with self._with(style).connect() as connection:
            yield _Core(self, connection)

    def _with(self, style: str) -> Engine:
        return self._engine.execution_options(isolation_level=style) if style else self._engine

    def redis(self, command: str, key: str) -> NoReturn:
        raise NotImplementedError

    def send(self, what: str) -> None:
        """An effect at a receiver that takes everything: watched, with a declared result."""
        raise AssertionError("the call went through")

    def note(self, *what: Any) -> None:
        thread = threading.current_thread()
        if what == ("begins",):
            self.traces[thread] = []
        self.traces[thread].append(what)

    def touch(self) -> None:
        with self._engine.connect() as connection:
            connection.execute(text("SELECT 1 FROM once"))

    def ledger_of(self, facts: Facts) -> Ledger:
        calls = ledger_of({name: version for name, version in facts.items() if not name.startswith("postgresql")})
        (database,) = (version for name, version in facts.items() if name.startswith("postgresql"))
        return calls | normal({name: relation.rows for name, relation in database.relations.items()})

    def is_open(self, resource: Any, actor: Actor) -> bool:
        if not isinstance(resource, PostgresDatabase):
            return bool(resource.holds(actor))
        if actor.away:
            return True
        mine = [handle.raw for handle in resource.handles.values() if handle.owner is actor]
        return any(raw.info.transaction_status != psycopg.pq.TransactionStatus.IDLE for raw in mine)

    def jam(self) -> str:
        return jam(self._store.monitor)

    def close(self) -> None:
        self._engine.dispose()


class _Core:
    """SQL through SQLAlchemy. Notes what it answers."""

    def __init__(self, shop: PostgresShop, connection: Connection) -> None:
        self._shop = shop
        self._connection = connection

    def run(self, statement: str, **values: Any) -> tuple[list[tuple[Any, ...]], int]:
        def perform() -> tuple[list[tuple[Any, ...]], int]:
            result = self._connection.execute(text(statement), values)
            return [tuple(row) for row in result] if result.returns_rows else [], result.rowcount

        return self._noted(statement, values, perform)

    def commit(self) -> None:
        self._noted("COMMIT", {}, self._connection.commit)

    def rollback(self) -> None:
        self._connection.rollback()
        self._shop.note("ROLLBACK")

    def _noted(self, statement: str, values: dict[str, Any], perform: Callable[[], _Answer]) -> _Answer:
        try:
            answer = perform()
        except IntegrityError as error:
            self._shop.note(statement, values, "IntegrityError")
            raise Duplicate from error
        except DBAPIError as error:
            self._shop.note(statement, values, type(error.orig).__name__)
            raise Locked from error
        self._shop.note(statement, values, answer)
        return answer
