"""Jobs that use ``sqlite3`` without SQLAlchemy: each right one is proven, each broken one is caught in the act."""

from __future__ import annotations

import gc
import os
import sqlite3
import sys
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from retrychaos import Chaos
from retrychaos.model.errors import WorldError
from retrychaos.report.text import full_text

SCHEMA = """
CREATE TABLE orders (id INTEGER PRIMARY KEY, status TEXT, n INTEGER DEFAULT 0);
CREATE TABLE payments (id INTEGER PRIMARY KEY, ord INTEGER, at TEXT DEFAULT CURRENT_TIMESTAMP);
CREATE TABLE marks (k TEXT PRIMARY KEY, v INTEGER);
CREATE TABLE files (id INTEGER PRIMARY KEY, data BLOB);
INSERT INTO orders (id, status) VALUES (1, 'new'), (2, 'new');
INSERT INTO files VALUES (1, zeroblob(4));
"""
Job = Callable[[str], None]


def furnish(connection: sqlite3.Connection) -> None:
    connection.executescript(SCHEMA)
    connection.commit()


@pytest.fixture(params=["journal", "wal"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A file with a shop in it."""
    path = str(tmp_path / "shop.db")
    with closing(sqlite3.connect(path)) as connection:
        if request.param == "wal":
            connection.execute("PRAGMA journal_mode = WAL")
        furnish(connection)
    return path


def one_transaction(path: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        if db.execute("SELECT status FROM orders WHERE id = ?", (1,)).fetchone() == ("new",):
            db.execute("INSERT INTO payments (ord) VALUES (:id)", {"id": 1})
            db.execute("UPDATE orders SET status = 'paid' WHERE id = 1")
        db.execute("COMMIT")


def two_transactions(path: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        if db.execute("SELECT status FROM orders WHERE id = ?", (1,)).fetchone() == ("new",):
            with db:
                db.execute("INSERT INTO payments (ord) VALUES (?)", (1,))
            with db:
                db.execute("UPDATE orders SET status = 'paid' WHERE id = 1")


def look_before(path: str) -> None:
    """Right under crashes, wrong for two at once."""
    with closing(sqlite3.connect(path)) as db, db:
        if not db.execute("SELECT 1 FROM payments WHERE ord = 1").fetchall():
            db.execute("INSERT INTO payments (ord) VALUES (1)")


def exclusive(path: str) -> None:
    with closing(sqlite3.connect(path, isolation_level="EXCLUSIVE")) as db, db:
        db.execute("INSERT OR IGNORE INTO marks VALUES ('a', 1)")
        db.execute("UPDATE orders SET n = (SELECT sum(v) FROM marks)")


def rows_in_one_transaction(path: str) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        if db.execute("SELECT count(*) FROM marks").fetchone()[0] == 0:
            db.executemany("INSERT INTO marks VALUES (?, ?)", [("a", 1), ("b", 2)])


def rows_one_by_one(path: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        if db.execute("SELECT count(*) FROM marks").fetchone()[0] == 0:
            assert db.executemany("INSERT INTO marks VALUES (?, ?)", iter([("a", 1), ("b", 2)])).rowcount == 2


def script_in_transaction(path: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        if not db.execute("SELECT 1 FROM marks").fetchall():
            db.executescript("BEGIN; INSERT INTO marks VALUES ('a', 1); INSERT INTO marks VALUES ('b;', 1); COMMIT")


def script(path: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        if not db.execute("SELECT 1 FROM marks").fetchall():
            db.executescript(
                "INSERT INTO marks VALUES ('a', 1); SELECT * FROM orders; INSERT INTO marks VALUES ('b', 1)"
            )


def savepoint(path: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("SAVEPOINT one")
        db.execute("INSERT OR REPLACE INTO marks VALUES ('a', 1)")
        db.execute("UPDATE orders SET n = 7 WHERE id = 1")
        db.execute("RELEASE one")


def level_none_commits(path: str) -> None:
    """To set the isolation level to None commits: here between two things that belong together."""
    with closing(sqlite3.connect(path)) as db:
        if not db.execute("SELECT 1 FROM marks").fetchall():
            db.execute("INSERT INTO marks VALUES ('a', 1)")
            db.isolation_level = None
            db.execute("INSERT INTO marks VALUES ('b', 1)")


def copy_by_backup(path: str) -> None:
    """A copy of the shop, made in one step, and only if it is not there."""
    with closing(sqlite3.connect(path)) as db, closing(sqlite3.connect(f"{path}.copy")) as copy:
        db.backup(copy)
        assert copy.execute("SELECT count(*) FROM orders").fetchone() == (2,)


def copy_and_count(path: str) -> None:
    with closing(sqlite3.connect(path)) as db, closing(sqlite3.connect(f"{path}.copy")) as copy:
        with db:
            db.execute("UPDATE orders SET n = n + 1")
        db.backup(copy)


def write_blob(path: str) -> None:
    with closing(sqlite3.connect(path)) as db, db.blobopen("files", "data", 1) as blob:
        blob.write(b"abcd")


def append_blob(path: str) -> None:
    with closing(sqlite3.connect(path)) as db, db.blobopen("files", "data", 1) as blob:
        blob[0] = blob[0] + 1


def left_open(path: str) -> None:
    """What is not committed when the job returns is lost, in the clean run too."""
    db = sqlite3.connect(path)
    with db:
        db.execute("INSERT OR IGNORE INTO marks VALUES ('a', 1)")
    db.execute("INSERT INTO marks VALUES ('lost', 1)")


def rolled_back(path: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("INSERT INTO marks VALUES ('no', 1)")
        db.rollback()
        with db:
            db.execute("INSERT OR IGNORE INTO marks VALUES ('a', 1)")


RIGHT = [
    one_transaction,
    look_before,
    exclusive,
    rows_in_one_transaction,
    script_in_transaction,
    savepoint,
    copy_by_backup,
    write_blob,
    left_open,
    rolled_back,
]
WRONG = [
    (two_transactions, "duplicated", "payments"),
    (rows_one_by_one, "lost", "marks"),
    (script, "lost", "marks"),
    (level_none_commits, "lost", "marks"),
    (copy_and_count, "changed", "orders"),
    (append_blob, "changed", "files"),
]


@pytest.mark.parametrize("job", RIGHT, ids=lambda job: job.__name__)
def test_right(chaos: Chaos, shop: str, job: Job) -> None:
    report = chaos.explore(job, shop)
    assert report.verdict == "proven", (report.findings, report.stop_reason)
    assert report.runs == report.states + 1


@pytest.mark.parametrize(("job", "kind", "effect"), WRONG, ids=lambda value: getattr(value, "__name__", value))
def test_wrong(chaos: Chaos, shop: str, job: Job, kind: str, effect: str) -> None:
    report = chaos.explore(job, shop)
    assert report.verdict == "failed", (report.guarantee, report.stop_reason)
    found = report.findings[0]
    assert (found.kind, found.plan.crashes) == (kind, 1) and found.effect.startswith(effect)
    assert chaos.run(job, shop, plan=found.token).kind == kind


def test_two_at_once(chaos: Chaos, shop: str) -> None:
    both = chaos(duplicates=2)
    for job in (one_transaction, exclusive, rows_in_one_transaction, savepoint, script_in_transaction):
        with closing(sqlite3.connect(shop)) as db, db:
            db.execute("UPDATE orders SET status = 'new'")
            db.execute("DELETE FROM marks")
            db.execute("DELETE FROM payments")
        report = both.explore(job, shop)
        assert report.verdict == "proven", (job, report.findings, report.stop_reason)


def test_to_look_is_not_to_lock(chaos: Chaos, shop: str) -> None:
    report = chaos(duplicates=2).explore(look_before, shop)
    assert [(found.kind, found.effect) for found in report.findings] == [("duplicated", "payments")]
    assert report.findings[0].plan.crashes == 0
    assert chaos(duplicates=2).run(look_before, shop, plan=report.findings[0].token).kind == "duplicated"


# -- classes of the user's ---------------------------------------------------------------------------------------------


class Ledger(sqlite3.Connection):
    """A connection of the user's own, with a cursor of its own, that counts."""

    statements = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.row_factory = lambda cursor, row: dict(zip([each[0] for each in cursor.description], row, strict=True))

    def cursor(self, factory: Any = None) -> Any:
        return super().cursor(factory or Counting)

    def pay(self, order: int) -> None:
        self.execute("INSERT INTO payments (ord) VALUES (?)", (order,))


class Counting(sqlite3.Cursor):
    def execute(self, *args: Any) -> Any:
        Ledger.statements += 1
        return super().execute(*args)


def with_factory(path: str) -> None:
    db = sqlite3.connect(path, factory=Ledger)
    assert isinstance(db, Ledger)
    with db:
        db.execute("UPDATE orders SET n = 1 WHERE id = 1")
        if db.execute("SELECT count(*) AS paid FROM payments").fetchone() == {"paid": 0}:
            db.pay(1)
    assert [row["ord"] for row in db.execute("SELECT ord FROM payments")] == [1]
    assert isinstance(db.cursor(), Counting)
    db.close()


def with_factory_in_vain(path: str) -> None:
    if sys.version_info < (3, 12):  # later Pythons do not like it
        db = sqlite3.connect(path, 5.0, 0, "", True, Ledger)
    else:
        db = sqlite3.connect(path, factory=Ledger)
    with db:
        db.pay(1)
    with db:
        db.execute("UPDATE orders SET status = 'paid' WHERE id = 1")
    db.close()


def test_classes_of_the_user(chaos: Chaos, shop: str) -> None:
    report = chaos(duplicates=2).explore(with_factory, shop)
    assert report.verdict == "proven", (report.findings, report.stop_reason)
    assert Ledger.statements > 0
    report = chaos.explore(with_factory_in_vain, shop)
    assert [(found.kind, found.effect) for found in report.findings] == [("duplicated", "payments")]


def raw_rows(path: str) -> None:
    db = sqlite3.connect(path, check_same_thread=False)
    db.row_factory = sqlite3.Row
    db.text_factory = bytes
    with db:
        row = db.execute("SELECT status FROM orders WHERE id = 1").fetchone()
        assert row["status"] in (b"new", b"paid")
        if row["status"] == b"new":
            db.execute("UPDATE orders SET status = 'paid' WHERE id = 1")
            db.execute("INSERT INTO payments (ord) VALUES (1)")
    db.close()


def test_row_and_text_factory(chaos: Chaos, shop: str) -> None:
    assert chaos.explore(raw_rows, shop).verdict == "proven"


# -- connections that live longer --------------------------------------------------------------------------------------

kept: dict[str, sqlite3.Connection] = {}


def through_kept(path: str) -> None:
    with kept["db"] as db:
        if not db.execute("SELECT 1 FROM payments WHERE ord = 1").fetchall():
            db.execute("INSERT INTO payments (ord) VALUES (1)")


def through_kept_in_vain(path: str) -> None:
    with kept["db"] as db:
        db.execute("INSERT INTO payments (ord) VALUES (1)")


@pytest.mark.parametrize("place", ["file", ":memory:"])
def test_a_connection_from_before_the_check(chaos: Chaos, tmp_path: Path, place: str) -> None:
    db = kept["db"] = sqlite3.connect(place if place == ":memory:" else tmp_path / "kept.db")
    furnish(db)
    try:
        report = chaos.explore(through_kept, "")
        assert report.verdict == "proven", report.stop_reason
        assert db.execute("SELECT count(*) FROM payments").fetchone() == (1,)
        with db:
            db.execute("DELETE FROM payments")
        report = chaos.explore(through_kept_in_vain, "")
        assert [(found.kind, found.effect) for found in report.findings] == [("duplicated", "payments")]
        assert db.execute("SELECT count(*) FROM payments").fetchone() == (1,)
        with db:
            db.execute("DELETE FROM payments")
        report = chaos(duplicates=2).explore(through_kept, "")
        assert report.verdict == "inconclusive" and "duplicates=1" in report.stop_reason
    finally:
        kept.pop("db").close()


def test_a_connection_that_nobody_uses_is_left_alone(chaos: Chaos, shop: str) -> None:
    with closing(sqlite3.connect(":memory:")) as other:
        other.execute("CREATE TABLE t (k)")
        assert chaos.explore(one_transaction, shop).verdict == "proven"
        other.execute("INSERT INTO t VALUES (1)")
        assert other.in_transaction


def test_a_connection_inside_a_transaction_is_refused(chaos: Chaos) -> None:
    kept["db"] = sqlite3.connect(":memory:")
    furnish(kept["db"])
    kept["db"].execute("INSERT INTO marks VALUES ('open', 1)")
    try:
        with pytest.raises(WorldError, match="Commit in the fixture"):
            chaos.explore(through_kept, "")
        assert kept["db"].execute("SELECT v FROM marks").fetchall() == [(1,)]
    finally:
        kept.pop("db").close()


def lazily(path: str) -> None:
    """Opens its connection once in a process."""
    if "lazy" not in kept:
        kept["lazy"] = sqlite3.connect(path)
    with kept["lazy"] as db:
        if not db.execute("SELECT 1 FROM payments WHERE ord = 1").fetchall():
            db.execute("INSERT INTO payments (ord) VALUES (1)")


def test_a_connection_that_the_job_keeps(chaos: Chaos, shop: str) -> None:
    try:
        assert chaos.explore(lazily, shop).verdict == "proven"
        assert kept["lazy"].execute("SELECT count(*) FROM payments").fetchone() == (1,)  # it is of use after the check
    finally:
        kept.pop("lazy").close()


class Repository:
    """Refers to itself, so that only the collector ends it."""

    def __init__(self, path: str) -> None:
        self.db = sqlite3.connect(path)
        self.me = self


def never_closes(path: str) -> None:
    for number in range(12):
        db = sqlite3.connect(path) if number % 2 else Repository(path).db
        with db:
            db.execute("INSERT OR IGNORE INTO marks VALUES (?, 1)", (str(number),))


def test_connections_that_nobody_closes_do_not_pile_up(
    chaos: Chaos, shop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0
    real = sqlite3.connect

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal most
        here = [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]
        most = max(most, here.count(shop))
        return real(*args, **kwargs)

    monkeypatch.setattr(sqlite3, "connect", counting)
    report = chaos.explore(never_closes, shop)
    assert report.verdict == "proven", report.stop_reason
    assert report.runs > 12 and 5 <= most < 60
    with warnings.catch_warnings():  # Python 3.13 says of each that nobody has closed it
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def test_engine_and_driver_on_one_file_are_one_resource(chaos: Chaos, shop: str) -> None:
    engine = create_engine(f"sqlite:///{shop}")

    def job() -> None:
        with closing(sqlite3.connect(shop)) as db, db:
            db.execute("INSERT OR IGNORE INTO marks VALUES ('a', 1)")
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO marks SELECT 'b', 1 WHERE NOT EXISTS (SELECT 1 FROM payments)"))
            connection.execute(text("INSERT INTO payments (ord) SELECT 1 WHERE NOT EXISTS (SELECT 1 FROM payments)"))

    report = chaos.explore(job)
    engine.dispose()
    assert report.verdict == "proven", report.stop_reason
    assert report.states == 3


# -- faults ------------------------------------------------------------------------------------------------------------


def gives_up(path: str) -> None:
    """Takes "database is locked" for done."""
    try:
        one_transaction(path)
    except sqlite3.OperationalError:
        pass


def tries_again(path: str) -> None:
    try:
        one_transaction(path)
    except sqlite3.OperationalError:
        one_transaction(path)


def test_an_error_is_that_of_the_driver(chaos: Chaos, shop: str) -> None:
    faulty = chaos(faults=True)
    report = faulty.explore(gives_up, shop)
    assert report.verdict == "failed" and report.findings[0].kind == "lost"
    assert report.findings[0].plan.crashes == 0
    with closing(sqlite3.connect(shop)) as db, db:
        db.executescript("UPDATE orders SET status = 'new'; DELETE FROM payments")
    assert faulty.explore(tries_again, shop).verdict == "proven"


@pytest.mark.parametrize("pragma", ["busy_timeout = 2000", "foreign_keys = ON", "journal_mode = WAL", "optimize"])
def test_what_a_job_sets_before_it_begins(chaos: Chaos, shop: str, pragma: str) -> None:
    def pays_once(path: str) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute(f"PRAGMA {pragma}")
            db.execute("BEGIN IMMEDIATE")
            if not db.execute("SELECT 1 FROM payments").fetchall():
                db.execute("INSERT INTO payments (ord) VALUES (1)")
            db.execute("COMMIT")

    report = chaos(duplicates=2, budget=60).explore(pays_once, shop)
    assert report.verdict == "proven", full_text(report)


# -- newer Pythons -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.version_info < (3, 12), reason="autocommit= is of Python 3.12")
def test_autocommit_off_and_on(chaos: Chaos, shop: str) -> None:
    def off(path: str) -> None:
        with closing(sqlite3.connect(path, autocommit=False)) as db:  # type: ignore[call-overload,unused-ignore]
            if not db.execute("SELECT 1 FROM payments").fetchall():
                db.execute("INSERT INTO payments (ord) VALUES (1)")
                db.execute("UPDATE orders SET status = 'paid' WHERE id = 1")
            db.commit()

    def on(path: str) -> None:
        with closing(sqlite3.connect(path, autocommit=True)) as db:  # type: ignore[call-overload,unused-ignore]
            if not db.execute("SELECT 1 FROM payments").fetchall():
                db.execute("INSERT INTO payments (ord) VALUES (1)")
                db.execute("UPDATE orders SET status = 'paid' WHERE id = 1")

    assert chaos.explore(off, shop).verdict == "proven"
    with closing(sqlite3.connect(shop)) as db, db:
        db.executescript("UPDATE orders SET status = 'new'; DELETE FROM payments")
    report = chaos.explore(on, shop)
    assert [(found.kind, found.effect) for found in report.findings] == [("lost", "orders")]


def test_a_connection_that_is_closed_within_a_transaction(chaos: Chaos, tmp_path: Path) -> None:
    """That rolls it back, and nothing of it is ever committed, whichever connection lies where it has lain."""
    path = tmp_path / "closed.db"
    with closing(sqlite3.connect(path)) as db:
        db.executescript("CREATE TABLE jobs (state TEXT); INSERT INTO jobs VALUES ('new');")

    def finish() -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute("BEGIN")
            if db.execute("SELECT state FROM jobs").fetchone() == ("new",):
                db.execute("UPDATE jobs SET state = 'done'")
            db.execute("COMMIT")

    def finish_in_vain() -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute("INSERT INTO jobs VALUES ('seen')")
            db.execute("BEGIN")
            db.execute("UPDATE jobs SET state = 'done'")

    report = chaos(duplicates=2, late=False).explore(finish)
    assert report.verdict == "proven", full_text(report)
    assert chaos(duplicates=1).explore(finish_in_vain).verdict == "failed"


@pytest.mark.parametrize("duplicates", [1, 2])
def test_a_closed_connection_holds_nothing_while_its_error_is_dealt_with(
    chaos: Chaos, tmp_path: Path, duplicates: int
) -> None:
    """The frames of the error refer to its cursor. SQLite itself would keep the transaction until that is gone."""
    path = tmp_path / "closed.db"
    with closing(sqlite3.connect(path)) as db:
        db.executescript("CREATE TABLE done (id INTEGER PRIMARY KEY); CREATE TABLE seen (id INTEGER PRIMARY KEY);")

    def see() -> None:
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("INSERT OR IGNORE INTO seen VALUES (7)")

    def finish() -> None:
        try:
            with closing(sqlite3.connect(path)) as db:
                db.execute("INSERT INTO done VALUES (7)")  # the second time, this leaves a transaction open
                db.commit()
        except sqlite3.IntegrityError:
            see()
        else:
            see()

    report = chaos(duplicates=duplicates, budget=120).explore(finish)
    assert report.verdict == "proven", full_text(report)
