"""Locking that is right on PostgreSQL, and each way spoiled by one change. The counterpart of test_correct_locking.py.

Every job credits an order to its customer once. Jobs get the engine that they work on; the isolation level is READ
COMMITTED, PostgreSQL's own, unless a job asks for another.
"""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import IntegrityError, OperationalError

from scenarios.conftest import proven, refuted

pytest.importorskip("psycopg", reason="these jobs talk to a PostgreSQL server through psycopg")

engines: list[Engine] = []
"""The engine of the test that is running."""

TABLES = """
    DROP TABLE IF EXISTS customers, orders, credits, loose_credits;
    CREATE TABLE customers (id INTEGER PRIMARY KEY, points INTEGER NOT NULL);
    CREATE TABLE orders (id INTEGER PRIMARY KEY, credited BOOLEAN NOT NULL);
    CREATE TABLE credits (order_id INTEGER PRIMARY KEY);
    CREATE TABLE loose_credits (order_id INTEGER NOT NULL);
    INSERT INTO customers VALUES (1, 0);
    INSERT INTO orders VALUES (1, false);
"""


@pytest.fixture
def engine(postgres_server, postgres):
    """On a fresh database of a private server; see conftest.py of the repository."""
    engine = create_engine(postgres_server.url(postgres))
    engines[:] = [engine]
    yield engine
    engine.dispose()


@pytest.fixture
def chaos(chaos, postgres_server):
    """A check that may rewind what is on that server."""
    return chaos(scratch=[f"postgresql:///?host={postgres_server.folder}"])


def arrange() -> None:
    with engines[0].begin() as db:
        for statement in TABLES.split(";")[:-1]:
            db.execute(text(statement))


def is_credited(db: Connection, order_id: int, lock: str = "") -> bool:
    return db.execute(text(f"SELECT credited FROM orders WHERE id = :id {lock}"), {"id": order_id}).scalar_one()


def credit(db: Connection, order_id: int) -> None:
    db.execute(text("UPDATE customers SET points = points + 10 WHERE id = 1"))
    db.execute(text("UPDATE orders SET credited = true WHERE id = :id"), {"id": order_id})


# -- advisory locks ---------------------------------------------------------------------------------------------------


def credit_under_advisory_lock(engine: Engine, order_id: int) -> None:
    with engine.begin() as db:
        db.execute(text("SELECT pg_advisory_xact_lock(:id)"), {"id": order_id})
        if not is_credited(db, order_id):
            credit(db, order_id)


def credit_without_lock(engine: Engine, order_id: int) -> None:
    with engine.begin() as db:
        if not is_credited(db, order_id):
            credit(db, order_id)


def credit_under_lock_after_a_look(engine: Engine, order_id: int) -> None:
    with engine.begin() as db:
        if not is_credited(db, order_id):
            db.execute(text("SELECT pg_advisory_xact_lock(:id)"), {"id": order_id})
            credit(db, order_id)


def credit_under_lock_of_an_earlier_transaction(engine: Engine, order_id: int) -> None:
    with engine.connect() as db:
        db.execute(text("SELECT pg_advisory_xact_lock(:id)"), {"id": order_id})
        done = is_credited(db, order_id)
        db.commit()  # and the lock is gone
        if not done:
            credit(db, order_id)
            db.commit()


def credit_or_return_if_locked(engine: Engine, order_id: int) -> None:
    with engine.begin() as db:
        if not db.execute(text("SELECT pg_try_advisory_xact_lock(:id)"), {"id": order_id}).scalar_one():
            return
        if not is_credited(db, order_id):
            credit(db, order_id)


def test_an_advisory_lock(crashing, racing, both, engine):
    """A lock that belongs to the transaction ends with it, and with the process. Take it before the look.

    Spoiled: no lock; the lock after the look; the lock of another transaction; `try`, and to return if it is taken:
    that is an acknowledgement, and nobody is left when the holder dies.
    """
    proven(both, credit_under_advisory_lock, engine, 1)

    proven(crashing, credit_without_lock, engine, 1)
    refuted(racing, credit_without_lock, engine, 1, changed="customers")
    refuted(racing, credit_under_lock_after_a_look, engine, 1, changed="customers")
    refuted(racing, credit_under_lock_of_an_earlier_transaction, engine, 1, changed="customers")

    proven(crashing, credit_or_return_if_locked, engine, 1)
    proven(racing, credit_or_return_if_locked, engine, 1)
    refuted(both, credit_or_return_if_locked, engine, 1, lost="customers")


# -- SELECT FOR UPDATE ------------------------------------------------------------------------------------------------


def credit_for_update(engine: Engine, order_id: int) -> None:
    with engine.begin() as db:
        if not is_credited(db, order_id, "FOR UPDATE"):
            credit(db, order_id)


def credit_for_share(engine: Engine, order_id: int) -> None:
    with engine.begin() as db:
        if not is_credited(db, order_id, "FOR SHARE"):
            credit(db, order_id)


def credit_after_a_commit(engine: Engine, order_id: int) -> None:
    with engine.connect() as db:
        done = is_credited(db, order_id, "FOR UPDATE")
        db.commit()  # and the row is free
        if not done:
            credit(db, order_id)
            db.commit()


def credit_unless_locked(engine: Engine, order_id: int) -> None:
    skip = text("SELECT credited FROM orders WHERE id = :id FOR UPDATE SKIP LOCKED")
    with engine.begin() as db:
        order = db.execute(skip, {"id": order_id}).one_or_none()
        if order is not None and not order.credited:
            credit(db, order_id)


def test_select_for_update(racing, both, engine):
    """The row that says whether it is done is the lock. Who has waited for it reads what is true now.

    FOR SHARE is right too, and slow: both read, both want to write, and one of them dies of the deadlock and comes
    again. Spoiled: a commit between the look and the write; SKIP LOCKED, which takes *locked* for *done*.
    """
    proven(both, credit_for_update, engine, 1)
    proven(both, credit_for_share, engine, 1)

    refuted(racing, credit_after_a_commit, engine, 1, changed="customers")
    proven(racing, credit_unless_locked, engine, 1)
    refuted(both, credit_unless_locked, engine, 1, lost="customers")


# -- a unique index ---------------------------------------------------------------------------------------------------


def credit_unless_in_conflict(engine: Engine, order_id: int) -> None:
    with engine.begin() as db:
        new = db.execute(text("INSERT INTO credits VALUES (:id) ON CONFLICT DO NOTHING"), {"id": order_id}).rowcount
        if new:
            credit(db, order_id)


def credit_or_catch(engine: Engine, order_id: int) -> None:
    try:
        with engine.begin() as db:
            db.execute(text("INSERT INTO credits VALUES (:id)"), {"id": order_id})
            credit(db, order_id)
    except IntegrityError:
        pass  # somebody was faster, and has committed it all


def credit_without_index(engine: Engine, order_id: int) -> None:
    with engine.begin() as db:
        known = db.execute(text("SELECT 1 FROM loose_credits WHERE order_id = :id"), {"id": order_id}).scalar()
        if not known:
            db.execute(text("INSERT INTO loose_credits VALUES (:id)"), {"id": order_id})
            credit(db, order_id)


def credit_after_the_row_is_committed(engine: Engine, order_id: int) -> None:
    with engine.connect() as db:
        new = db.execute(text("INSERT INTO credits VALUES (:id) ON CONFLICT DO NOTHING"), {"id": order_id}).rowcount
        db.commit()
        if new:
            credit(db, order_id)
            db.commit()


def test_a_unique_index(crashing, racing, both, engine):
    """Who inserts second waits for the first to end: if that one has committed there is a conflict, else there is none.

    Spoiled: no index; the effect in another transaction.
    """
    proven(both, credit_unless_in_conflict, engine, 1)
    proven(both, credit_or_catch, engine, 1)

    proven(crashing, credit_without_index, engine, 1)
    refuted(racing, credit_without_index, engine, 1, duplicated="loose_credits")  # and the points
    proven(racing, credit_after_the_row_is_committed, engine, 1)
    refuted(crashing, credit_after_the_row_is_committed, engine, 1, lost="customers")


# -- compare and set --------------------------------------------------------------------------------------------------


def credit_if_new(engine: Engine, order_id: int) -> None:
    new = text("UPDATE orders SET credited = true WHERE id = :id AND NOT credited")
    with engine.begin() as db:
        if db.execute(new, {"id": order_id}).rowcount:
            credit(db, order_id)


def credit_whatever_the_count(engine: Engine, order_id: int) -> None:
    new = text("UPDATE orders SET credited = true WHERE id = :id AND NOT credited")
    with engine.begin() as db:
        db.execute(new, {"id": order_id})
        credit(db, order_id)


def test_compare_and_set(racing, both, engine):
    """Under READ COMMITTED a waiting UPDATE looks at its condition again when the row is free."""
    proven(both, credit_if_new, engine, 1)
    refuted(racing, credit_whatever_the_count, engine, 1, changed="customers")


# -- SERIALIZABLE -----------------------------------------------------------------------------------------------------


def credit_serializable(engine: Engine, order_id: int) -> None:
    strict = engine.execution_options(isolation_level="SERIALIZABLE")
    for attempt in range(3):
        try:
            with strict.begin() as db:
                if not is_credited(db, order_id):
                    credit(db, order_id)
            return
        except OperationalError:  # could not serialize access: what was read is no longer true
            if attempt == 2:
                raise


def credit_read_committed(engine: Engine, order_id: int) -> None:
    loose = engine.execution_options(isolation_level="READ COMMITTED")
    for attempt in range(3):
        try:
            with loose.begin() as db:
                if not is_credited(db, order_id):
                    credit(db, order_id)
            return
        except OperationalError:
            if attempt == 2:
                raise


def credit_serializable_with_old_knowledge(engine: Engine, order_id: int) -> None:
    strict = engine.execution_options(isolation_level="SERIALIZABLE")
    with strict.begin() as db:
        done = is_credited(db, order_id)
    for attempt in range(3):
        try:
            with strict.begin() as db:
                if not done:
                    credit(db, order_id)
            return
        except OperationalError:
            if attempt == 2:
                raise


def credit_serializable_or_never_mind(engine: Engine, order_id: int) -> None:
    strict = engine.execution_options(isolation_level="SERIALIZABLE")
    try:
        with strict.begin() as db:
            if not is_credited(db, order_id):
                credit(db, order_id)
    except OperationalError:
        pass  # somebody else was faster, so it is done


def test_serializable(racing, both, engine):
    """The database notices that each decides on what the other one changes, and refuses one. Try again from the look.

    Spoiled: a weaker level; a look outside of the transaction. To take the refusal for "somebody else has done it" is
    right as long as nobody else is there but the other delivery, and no other error comes.
    """
    proven(both, credit_serializable, engine, 1)
    refuted(racing, credit_read_committed, engine, 1, changed="customers")
    refuted(racing, credit_serializable_with_old_knowledge, engine, 1, changed="customers")
    proven(both(faults=False), credit_serializable_or_never_mind, engine, 1)
    refuted(both, credit_serializable_or_never_mind, engine, 1, crashes=0, lost="customers")
