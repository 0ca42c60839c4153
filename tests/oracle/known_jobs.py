"""Jobs written by hand, for faults that random ones have found or cannot reach."""

from __future__ import annotations

from contextlib import closing

from sqlalchemy import Connection, text

from tests.oracle.jobs import HalfDone, Shop


def status(connection: Connection) -> str:
    return str(connection.execute(text("SELECT status FROM orders WHERE id = 1")).scalar_one())


def move(shop: Shop, to: str) -> None:
    with shop.engine.begin() as connection:
        connection.execute(text("UPDATE orders SET status = :to WHERE id = 1"), {"to": to})


def raw_commit_after_a_read(shop: Shop) -> None:
    """The commit of a transaction that wrote nothing sends no COMMIT; the next one on that connection is another's."""
    with shop.engine.begin() as connection:
        if status(connection) == "done":
            return
    for statement in ("INSERT INTO items (name) VALUES ('a')", "UPDATE orders SET status = 'done' WHERE id = 1"):
        with closing(shop.engine.raw_connection()) as raw:
            raw.cursor().execute(statement)
            raw.commit()


def crash_failure_crash(shop: Shop) -> None:
    """Breaks by a crash while busy, a delivery that fails, and a second crash."""
    with shop.engine.begin() as connection:
        found = status(connection)
    if found == "new":
        move(shop, "busy")
        move(shop, "done")
    elif found == "busy":
        move(shop, "retry")
        with shop.engine.begin() as connection:
            raise HalfDone(status(connection))  # a failure may look at the state that it leaves
    elif found == "retry":
        with shop.engine.begin() as connection:
            if connection.execute(text("SELECT 1 FROM items WHERE name = 'a'")).first():
                return
            connection.execute(text("INSERT INTO items (name) VALUES ('a')"))
        with shop.engine.begin() as connection:
            connection.execute(text("DELETE FROM items WHERE name = 'a'"))
        move(shop, "done")


def failure_leads_back(shop: Shop) -> None:
    """A crash leads to deliveries that fail for ever, each of which ends in a state that it has passed already."""
    with shop.engine.begin() as connection:
        found = status(connection)
    if found == "new":
        move(shop, "retry")
        move(shop, "done")
    if found == "busy":
        with shop.engine.begin() as connection:
            if not connection.execute(text("SELECT 1 FROM items WHERE name = 'b'")).first():
                connection.execute(text("INSERT INTO items (name) VALUES ('b')"))
        move(shop, "retry")
    if found in ("busy", "retry"):
        move(shop, "busy")
        raise HalfDone


def redis_only_after_a_crash(shop: Shop) -> None:
    """The clean run does not touch Redis at all."""
    with shop.engine.begin() as connection:
        found = status(connection)
    if found == "busy":
        shop.redis.set("key", "recovered")
    if found in ("new", "busy"):
        move(shop, "busy")
        move(shop, "done")


def locked_until_the_lock_ends(shop: Shop) -> None:
    """A delivery that begins while the lock is held fails, until the lock has ended by itself."""
    if not shop.redis.set("lock", "1", nx=True, ex=600):
        raise HalfDone
    move(shop, "done")


def beyond_repair_and_not_stuck(shop: Shop) -> None:
    """After a crash it sends twice and fails once, but then it comes to an end."""
    with shop.engine.begin() as connection:
        found = status(connection)
    if found in ("new", "busy"):
        shop.send("a")
    if found == "busy":
        move(shop, "retry")
        raise HalfDone
    if found == "new":
        move(shop, "busy")
    if found != "done":
        move(shop, "done")
