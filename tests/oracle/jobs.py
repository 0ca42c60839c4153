"""Random background jobs, right and wrong: programs of a few operations on a shop.

A program is plain data whose repr can be pasted into a test. Called with a shop it is a job; the same call is given to
the oracle and to retrychaos.
"""

from __future__ import annotations

import random
import sqlite3
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

SCHEMA = """
    CREATE TABLE orders (id INTEGER PRIMARY KEY, status TEXT NOT NULL, n INTEGER NOT NULL, attempts INTEGER NOT NULL);
    CREATE TABLE items (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL);
    CREATE TABLE lines (id INTEGER PRIMARY KEY, item_id INTEGER NOT NULL REFERENCES items (id), product TEXT NOT NULL);
    CREATE TABLE once (key TEXT PRIMARY KEY);
    INSERT INTO orders VALUES (1, 'new', 0, 0), (2, 'new', 7, 0);
    INSERT INTO items (name) VALUES ('old');
    INSERT INTO lines (item_id, product) VALUES (1, 'pen');
    INSERT INTO once VALUES ('taken');
"""
DELAY = 600
"""Seconds until a lock ends by itself: longer than any test, so that only a simulated clock gets there."""


ATTEMPTS = "orders.attempts"


class Base(DeclarativeBase):
    pass


class Item(Base):
    __tablename__ = "items"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


@dataclass(frozen=True)
class Block:
    """Operations on one connection.

    style: how SQL is run and when it is committed, see STYLES. swallow: what an IntegrityError leads to: "" it fails
    the job, "skip" the job goes on behind the block, "stop" it returns. nested: each operation in a savepoint.
    """

    style: str
    operations: tuple[tuple[Any, ...], ...]
    swallow: str = ""
    nested: bool = False


@dataclass(frozen=True)
class Program:
    """A job. journal: the journal mode of its SQLite database."""

    blocks: tuple[Block, ...]
    journal: str = "delete"

    @property
    def operations(self) -> list[str]:
        """Names of all operations."""
        return [name for block in self.blocks for name in _names(block.operations)]

    @property
    def volatile(self) -> tuple[str, ...]:
        """A counter of attempts differs by its nature, so it is not compared."""
        return (ATTEMPTS,) if "give_up_after" in self.operations else ()

    def __call__(self, shop: Shop) -> None:
        for block in self.blocks:
            try:
                if _perform(block, shop):
                    return
            except (IntegrityError, sqlite3.IntegrityError):
                if not block.swallow:
                    raise
                if block.swallow == "stop":
                    return


def _names(operations: Iterable[tuple[Any, ...]]) -> Iterator[str]:
    for name, *arguments in operations:
        yield name
        if name == "when":
            yield from _names(arguments[1:])


# -- the world of a job ---------------------------------------------------------------------------------------------


@dataclass
class Shop:
    """What jobs touch: a database, a Redis server, and somebody who takes calls."""

    folder: Path
    redis: Any = None
    inbox: Path = field(init=False)

    def __post_init__(self) -> None:
        self.database = self.folder / "shop.db"
        self.inbox = self.folder / "inbox"
        self.engine = create_engine(f"sqlite:///{self.database}")
        self.autocommit = self.engine.execution_options(isolation_level="AUTOCOMMIT")

    def furnish(self, journal: str) -> None:
        """As before the first delivery."""
        for path in self.folder.glob("shop.db*"):
            path.unlink()
        with closing(sqlite3.connect(self.database)) as connection:
            connection.execute("PRAGMA page_size = 512")
            connection.execute(f"PRAGMA journal_mode = {journal}")
            connection.executescript(SCHEMA)
        self.inbox.write_text("")
        if self.redis is not None:
            self.redis.flushall()
            self.redis.rpush("queue", "a", "b")
            self.redis.set("hits", 5)
            self.redis.sadd("done", "old")

    @property
    def scratch(self) -> tuple[str, ...]:
        """The address of a real Redis server."""
        path = self.redis and self.redis.get_connection_kwargs().get("path")
        return (f"unix://{path}",) if path else ()

    def send(self, what: str) -> None:
        """An effect at a receiver that takes everything."""
        with open(self.inbox, "a") as inbox:
            inbox.write(f"send {what}\n")

    def charge(self, key: str, what: str) -> None:
        """An effect at a receiver that takes each key once."""
        with open(self.inbox, "a") as inbox:
            inbox.write(f"charge {key} {what}\n")

    def close(self) -> None:
        self.engine.dispose()


def drawn() -> str:
    return f"drawn-{uuid.uuid4().hex}"


# -- operations -----------------------------------------------------------------------------------------------------

STOP = True
"""What an operation returns to make the job return early."""


class HalfDone(Exception):
    """Raised by jobs that find the work of another delivery half done, or a lock taken."""


class Core:
    """SQL on a SQLAlchemy connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, statement: str, **values: Any) -> list[Any]:
        result = self._connection.execute(text(statement), values)
        return list(result) if result.returns_rows else []

    def many(self, statement: str, rows: list[dict[str, Any]]) -> None:
        self._connection.execute(text(statement), rows)

    def add_item(self, name: str) -> int:
        return int(self._connection.execute(text("INSERT INTO items (name) VALUES (:name)"), {"name": name}).lastrowid)

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        with self._connection.begin_nested():
            yield


class Orm(Core):
    """The same through a session."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)  # type: ignore[arg-type]  # executes just as a connection does
        self._session = session

    def add_item(self, name: str) -> int:
        item = Item(name=name)
        self._session.add(item)
        self._session.flush()
        return item.id


class Raw:
    """SQL on a connection of the driver."""

    def __init__(self, connection: Any) -> None:
        self._cursor = connection.cursor()

    def run(self, statement: str, **values: Any) -> list[Any]:
        return list(self._cursor.execute(statement, values).fetchall())

    def many(self, statement: str, rows: list[dict[str, Any]]) -> None:
        self._cursor.executemany(statement, rows)

    def add_item(self, name: str) -> int:
        return int(self._cursor.execute("INSERT INTO items (name) VALUES (:name)", {"name": name}).lastrowid)

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        self._cursor.execute("SAVEPOINT here")
        try:
            yield
        except sqlite3.Error:
            self._cursor.execute("ROLLBACK TO here")
            raise
        finally:
            self._cursor.execute("RELEASE here")


def _has(sql: Any, name: str) -> bool:
    return bool(sql.run("SELECT 1 FROM items WHERE name = :name", name=name))


def _status(sql: Any) -> str:
    return str(sql.run("SELECT status FROM orders WHERE id = 1")[0][0])


def insert(shop: Shop, sql: Any, name: str) -> None:
    sql.add_item(name)


def insert_guarded(shop: Shop, sql: Any, name: str) -> None:
    if not _has(sql, name):
        sql.add_item(name)


def insert_drawn(shop: Shop, sql: Any) -> None:
    """A row with a token that is new on every attempt, unless there is one already."""
    if not sql.run("SELECT 1 FROM items WHERE name LIKE 'drawn-%'"):
        sql.add_item(drawn())


def insert_many(shop: Shop, sql: Any, *names: str) -> None:
    sql.many("INSERT INTO items (name) VALUES (:name)", [{"name": name} for name in names])


def insert_family(shop: Shop, sql: Any, name: str) -> None:
    """An item and a line that refers to it."""
    item = sql.add_item(name)
    sql.run("INSERT INTO lines (item_id, product) VALUES (:item, 'ink')", item=item)


def insert_child(shop: Shop, sql: Any, name: str) -> None:
    """A line for an item, unless there is one already."""
    for (item,) in sql.run("SELECT id FROM items WHERE name = :name", name=name):
        if not sql.run("SELECT 1 FROM lines WHERE item_id = :item", item=item):
            sql.run("INSERT INTO lines (item_id, product) VALUES (:item, 'cap')", item=item)


def claim(shop: Shop, sql: Any, key: str) -> None:
    """Fails the second time."""
    sql.run("INSERT INTO once VALUES (:key)", key=key)


def claim_quietly(shop: Shop, sql: Any, *keys: str) -> None:
    sql.many("INSERT OR IGNORE INTO once VALUES (:key)", [{"key": key} for key in keys])


def unclaim(shop: Shop, sql: Any, key: str) -> None:
    sql.run("DELETE FROM once WHERE key = :key", key=key)


def delete(shop: Shop, sql: Any, name: str) -> None:
    sql.run("DELETE FROM lines WHERE item_id IN (SELECT id FROM items WHERE name = :name)", name=name)
    sql.run("DELETE FROM items WHERE name = :name", name=name)


def set_status(shop: Shop, sql: Any, status: str) -> None:
    sql.run("UPDATE orders SET status = :status WHERE id = 1", status=status)


def move_status(shop: Shop, sql: Any, old: str, new: str) -> None:
    sql.run("UPDATE orders SET status = :new WHERE id = 1 AND status = :old", old=old, new=new)


def increment(shop: Shop, sql: Any, order: int) -> None:
    sql.run("UPDATE orders SET n = n + 1 WHERE id = :order", order=order)


def set_n(shop: Shop, sql: Any, n: int) -> None:
    sql.run("UPDATE orders SET n = :n WHERE id = 2", n=n)


def count_items(shop: Shop, sql: Any) -> None:
    """A value that is computed from others."""
    sql.run("UPDATE orders SET n = (SELECT count(*) FROM items) WHERE id = 2")


def stop_if(shop: Shop, sql: Any, status: str) -> bool:
    return _status(sql) == status


def stop_unless(shop: Shop, sql: Any, status: str) -> bool:
    return _status(sql) != status


def stop_if_there(shop: Shop, sql: Any, name: str) -> bool:
    return _has(sql, name)


def give_up_after(shop: Shop, sql: Any, attempts: int) -> bool:
    """A counter of attempts, and an early return when there were too many."""
    sql.run("UPDATE orders SET attempts = attempts + 1 WHERE id = 1")
    return bool(sql.run("SELECT attempts FROM orders WHERE id = 1")[0][0] > attempts)


def fail_if_half_done(shop: Shop, sql: Any, name: str, status: str) -> None:
    if _has(sql, name) and _status(sql) != status:
        raise HalfDone(name)


def fail(shop: Shop, sql: Any) -> None:
    raise HalfDone


def fail_if_twice(shop: Shop, sql: Any, name: str) -> None:
    if len(sql.run("SELECT 1 FROM items WHERE name = :name", name=name)) > 1:
        raise HalfDone(name)


def send(shop: Shop, sql: Any, what: str) -> None:
    shop.send(what)


def send_guarded(shop: Shop, sql: Any, name: str) -> None:
    if not _has(sql, name):
        shop.send(name)


def charge(shop: Shop, sql: Any, key: str) -> None:
    shop.charge(key, f"for {key}")


def charge_drawn(shop: Shop, sql: Any, what: str) -> None:
    """With a key that is new on every attempt, so of no use."""
    shop.charge(drawn(), what)


def r_set(shop: Shop, sql: Any, key: str, value: str) -> None:
    shop.redis.set(key, value)


def r_increment(shop: Shop, sql: Any, key: str) -> None:
    shop.redis.incr(key)


def r_once(shop: Shop, sql: Any, key: str) -> bool:
    """A mark that stays for good: whoever sets it first goes on."""
    return not shop.redis.setnx(key, "1")


def r_lock(shop: Shop, sql: Any, key: str, patient: bool) -> bool:
    """A lock that ends by itself; if it is taken, fail or return."""
    if shop.redis.set(key, "1", nx=True, ex=DELAY):
        return not STOP
    if patient:
        raise HalfDone(key)
    return STOP


def r_delete(shop: Shop, sql: Any, key: str) -> None:
    shop.redis.delete(key)


def r_push(shop: Shop, sql: Any, value: str) -> None:
    shop.redis.rpush("queue", value)


def r_take(shop: Shop, sql: Any) -> None:
    """Takes one from the queue, and only then writes it down."""
    value = shop.redis.lpop("queue")
    if value is not None:
        sql.add_item(value.decode())


def r_add(shop: Shop, sql: Any, value: str) -> None:
    shop.redis.sadd("done", value)


def r_stop_if_added(shop: Shop, sql: Any, value: str) -> bool:
    return bool(shop.redis.sismember("done", value))


def r_field(shop: Shop, sql: Any, name: str, value: str) -> None:
    shop.redis.hset("card", name, value)


def r_together(shop: Shop, sql: Any, atomic: bool, value: str) -> None:
    """Two commands in one pipeline, with MULTI or without."""
    pipeline = shop.redis.pipeline(transaction=atomic)
    pipeline.rpush("queue", value)
    pipeline.sadd("done", value)
    pipeline.execute()


def r_push_once(shop: Shop, sql: Any, value: str, atomic: bool) -> None:
    if not shop.redis.sismember("done", value):
        r_together(shop, sql, atomic, value)


OPERATIONS: dict[str, Callable[..., bool | None]] = {
    function.__name__: function
    for function in (
        *(insert, insert_guarded, insert_drawn, insert_many, insert_family, insert_child),
        *(claim, claim_quietly, unclaim, delete, set_status, move_status, increment, set_n, count_items),
        *(stop_if, stop_unless, stop_if_there, give_up_after, fail, fail_if_half_done, fail_if_twice),
        *(send, send_guarded, charge, charge_drawn),
        *(r_set, r_increment, r_once, r_lock, r_delete, r_push, r_take, r_add, r_stop_if_added, r_field),
        *(r_together, r_push_once),
    )
}

# -- styles ---------------------------------------------------------------------------------------------------------


@contextmanager
def _begin(shop: Shop) -> Iterator[tuple[Any, Callable[[], None]]]:
    with shop.engine.begin() as connection:
        yield Core(connection), lambda: None


@contextmanager
def _each(shop: Shop) -> Iterator[tuple[Any, Callable[[], None]]]:
    with shop.engine.connect() as connection:
        yield Core(connection), connection.commit


@contextmanager
def _forgotten(shop: Shop) -> Iterator[tuple[Any, Callable[[], None]]]:
    with shop.engine.connect() as connection:
        yield Core(connection), lambda: None


@contextmanager
def _autocommit(shop: Shop) -> Iterator[tuple[Any, Callable[[], None]]]:
    with shop.autocommit.connect() as connection:
        yield Core(connection), lambda: None


@contextmanager
def _orm(shop: Shop) -> Iterator[tuple[Any, Callable[[], None]]]:
    with Session(shop.engine) as session:
        yield Orm(session), lambda: None
        session.commit()


@contextmanager
def _orm_each(shop: Shop) -> Iterator[tuple[Any, Callable[[], None]]]:
    with Session(shop.engine) as session:
        yield Orm(session), session.commit


@contextmanager
def _raw(shop: Shop) -> Iterator[tuple[Any, Callable[[], None]]]:
    with closing(shop.engine.raw_connection()) as connection:
        yield Raw(connection), lambda: None
        connection.commit()


@contextmanager
def _raw_each(shop: Shop) -> Iterator[tuple[Any, Callable[[], None]]]:
    with closing(shop.engine.raw_connection()) as connection:
        yield Raw(connection), connection.commit


@contextmanager
def _raw_immediate(shop: Shop) -> Iterator[tuple[Any, Callable[[], None]]]:
    with closing(shop.engine.raw_connection()) as connection:
        sql = Raw(connection)
        sql.run("BEGIN IMMEDIATE")
        yield sql, lambda: None
        connection.commit()


STYLES = {
    "begin": _begin,  # one transaction
    "each": _each,  # a commit after every operation
    "autocommit": _autocommit,  # a commit after every statement, by the engine
    "orm": _orm,
    "orm each": _orm_each,
    "raw": _raw,  # past the engine
    "raw each": _raw_each,
    "raw immediate": _raw_immediate,
    "forgotten": _forgotten,  # no commit at all
}


def _perform(block: Block, shop: Shop) -> bool:
    with STYLES[block.style](shop) as (sql, after_each):
        return _run(block.operations, block, shop, sql, after_each)


def _run(
    operations: Sequence[tuple[Any, ...]], block: Block, shop: Shop, sql: Any, after_each: Callable[[], None]
) -> bool:
    for name, *arguments in operations:
        if name == "when":  # a branch, for an order of this status only
            status, *inner = arguments
            if _status(sql) == status and _run(inner, block, shop, sql, after_each):
                return STOP
            continue
        with sql.savepoint() if block.nested else nullcontext():
            if OPERATIONS[name](shop, sql, *arguments):
                return STOP
        after_each()
    return not STOP


# -- chance ---------------------------------------------------------------------------------------------------------

NAMES = ("a", "b")
STATUSES = ("new", "busy", "done")
SHAPES = ("wild", "careful", "marked", "machine")
SAFE = ("insert_guarded", "insert_drawn", "insert_child", "claim_quietly", "delete", "set_status", "set_n", "charge")
GUARDS = ("stop_if", "stop_unless", "stop_if_there", "fail_if_half_done", "fail_if_twice", "give_up_after", "claim")
R_SAFE = ("r_set", "r_delete", "r_add", "r_field", "r_push_once")
R_GUARDS = ("r_once", "r_lock", "r_stop_if_added")


def random_program(seed: int, with_redis: bool) -> Program:
    """The job of a seed. Many keep to operations that can be repeated, so that about half are right."""
    rng = random.Random(seed)
    shape = rng.choice(SHAPES)
    names = [name for name in OPERATIONS if with_redis or not name.startswith("r_")]
    names.remove("fail")
    if shape != "wild":
        names = [*SAFE, *(R_SAFE if with_redis else ())]
        names += rng.sample((*GUARDS, *(R_GUARDS if with_redis else ())), 2)
    operations = [_random_operation(rng, rng.choice(names)) for _ in range(rng.randint(2, 6))]
    if shape == "marked":  # work, and a mark that it was done
        operations = [("stop_if", "done"), *operations[:5], ("set_status", "done")]
    if shape == "machine":
        operations = list(_random_branches(rng, operations))
    return Program(tuple(_random_blocks(rng, operations)), rng.choice(("delete", "delete", "wal")))


def _random_branches(rng: random.Random, operations: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """A branch for each status of an order, most of them leading to the next one; some fail."""
    statuses = ("new", "busy", "retry")
    for number, status in enumerate(statuses):
        inner = [operations.pop() for _ in range(rng.randint(0, 2)) if operations]
        onward = ("done", "done", "busy", "retry")[number:] if rng.random() < 0.85 else statuses
        inner.insert(rng.randint(0, len(inner)), ("set_status", rng.choice(onward)))
        if rng.random() < 0.3:
            inner.append(("set_status", "done"))
        if number and rng.random() < 0.4:
            inner.append(rng.choice((("fail",), ("fail_if_twice", "a"), ("stop_if_there", "b"))))
        yield ("when", status, *inner)


def _random_blocks(rng: random.Random, operations: Sequence[tuple[Any, ...]]) -> Iterator[Block]:
    rest = list(operations)
    while rest:
        size = rng.randint(1, len(rest))
        style = rng.choices(list(STYLES), [3, 3, 2, 3, 2, 2, 1, 1, 0.3])[0]
        yield Block(style, tuple(rest[:size]), rng.choice(("", "", "skip", "stop")), rng.random() < 0.15)
        del rest[:size]


def _random_operation(rng: random.Random, name: str) -> tuple[Any, ...]:
    label = rng.choice(NAMES)
    keys = (label, *rng.sample((*NAMES, "taken"), rng.randint(0, 2)))
    arguments: dict[str, tuple[Any, ...]] = {
        "insert_drawn": (),
        "insert_many": keys,
        "claim_quietly": keys,
        "unclaim": (rng.choice((label, "taken")),),
        "delete": (rng.choice((label, "old")),),
        "set_status": (rng.choice(STATUSES[1:]),),
        "move_status": tuple(rng.sample(STATUSES, 2)),
        "increment": (rng.choice((1, 2)),),
        "set_n": (rng.choice((1, 7)),),
        "count_items": (),
        "stop_if": (rng.choice(STATUSES[1:]),),
        "stop_unless": (rng.choice(("new", "new", "busy")),),
        "give_up_after": (rng.choice((1, 2, 3)),),
        "fail": (),
        "fail_if_half_done": (label, rng.choice(STATUSES[1:])),
        "r_set": (f"key-{label}", rng.choice(NAMES)),
        "r_increment": (rng.choice(("hits", f"key-{label}")),),
        "r_once": (f"mark-{label}",),
        "r_lock": ("lock", rng.random() < 0.5),
        "r_delete": (rng.choice(("lock", f"mark-{label}", "hits")),),
        "r_take": (),
        "r_field": (label, rng.choice(NAMES)),
        "r_together": (rng.random() < 0.5, label),
        "r_push_once": (label, rng.random() < 0.5),
    }
    return (name, *arguments.get(name, (label,)))
