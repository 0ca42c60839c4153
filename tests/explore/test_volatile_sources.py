"""Where new values come from: each is another one on every attempt, and needs no declaration.

A job that stores such a value once is proven, also where deliveries overlap; one that takes it as a key for somebody
who deduplicates is refuted, since the next attempt has another one.
"""

from __future__ import annotations

import datetime
import email.utils
import importlib
import os
import random
import secrets
import string
import tempfile
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text

from retrychaos import Chaos
from retrychaos.report.text import full_text


class Payments:
    def charge(self, order: int, key: Any) -> None: ...


def library(module: str, make: Callable[[Any], Any]) -> Callable[[], Any]:
    """Of a library that need not be installed; imported before the check, as jobs do."""

    def draw() -> Any:
        return make(importlib.import_module(module))

    draw.module = module  # type: ignore[attr-defined]
    return draw


def elapsed() -> float:
    begun = time.perf_counter()
    sum(range(1000))
    return time.perf_counter() - begun


def drawn_until(good: Callable[[str], bool], draw: Callable[[], str]) -> str:
    """What chance gives now and then."""
    return next(token for token in iter(draw, None) if good(token))


LETTERS = string.ascii_letters + string.digits
DRAWN: dict[str, Callable[[], Any]] = {
    "uuid1": lambda: str(uuid.uuid1()),
    "uuid4": lambda: str(uuid.uuid4()),
    "uuid4, capital letters": lambda: str(uuid.uuid4()).upper(),
    "uuid4, cut off": lambda: uuid.uuid4().hex[:6],
    "uuid4, cut off, sometimes digits": lambda: drawn_until(
        str.isdigit if secrets.randbelow(2) else str.isalnum, lambda: uuid.uuid4().hex[:12]
    ),
    "uuid5 of uuid4": lambda: str(uuid.uuid5(uuid.NAMESPACE_URL, str(uuid.uuid4()))),
    "urandom": lambda: os.urandom(16),
    "getrandom": lambda: os.getrandom(16),
    "token_urlsafe": lambda: secrets.token_urlsafe(8),
    "token_urlsafe, sometimes in two": lambda: drawn_until(
        (lambda token: token[5] == "-") if secrets.randbelow(2) else str.isalnum, lambda: secrets.token_urlsafe(8)
    ),
    "choice": lambda: "".join(secrets.choice(LETTERS) for _ in range(16)),
    "pin": lambda: f"{secrets.randbelow(10**6):06d}",
    "random": random.random,
    "order number": lambda: f"ORD-{random.randint(10_000, 99_999)}",
    "a generator of its own": lambda: random.Random().random(),
    "seeded anew": lambda: (random.seed(), random.random())[1],
    "name of a temporary file": lambda: next(tempfile._get_candidate_names()),  # type: ignore[attr-defined]
    "uuid6": library("uuid6", lambda uuid6: str(uuid6.uuid6())),
    "uuid7": library("uuid6", lambda uuid6: str(uuid6.uuid7())),
    "uuid4 of uuid_utils": library("uuid_utils", lambda rust: str(rust.uuid4())),
    "uuid6 of uuid_utils": library("uuid_utils", lambda rust: str(rust.uuid6())),
    "uuid7 of uuid_utils": library("uuid_utils", lambda rust: str(rust.uuid7())),
    "uuid7 of uuid_utils.compat": library("uuid_utils.compat", lambda rust: str(rust.uuid7())),
    "ulid": library("ulid", lambda ulid: str(ulid.ULID())),
    "nanoid": library("nanoid", lambda nanoid: nanoid.generate(size=10)),
    "ksuid": library("ksuid", lambda ksuid: str(ksuid.Ksuid())),
    "numpy": library("numpy.random", lambda numpy: float(numpy.rand())),
    "a generator of numpy": library("numpy.random", lambda numpy: float(numpy.default_rng().random())),
}
TIMES: dict[str, Callable[[], Any]] = {
    "now": datetime.datetime.now,
    "now with a zone": lambda: datetime.datetime.now(datetime.timezone(datetime.timedelta(hours=5.5))).isoformat(),
    "compact": lambda: datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ"),
    "written by hand": lambda: time.strftime("%d/%m/%Y %H:%M:%S"),
    "ctime": lambda: time.ctime(),
    "of a mail": email.utils.formatdate,
    "time_ns": time.time_ns,
    "milliseconds": lambda: int(time.time() * 1000),
    "in a month": lambda: str(datetime.datetime.now() + datetime.timedelta(days=30)),
}
DAYS: dict[str, Callable[[], Any]] = {
    "today": lambda: str(datetime.date.today()),
    "this week": lambda: datetime.date.today().strftime("%G-W%V"),
    "this hour": lambda: time.strftime("%Y-%m-%dT%H"),
}


@pytest.fixture
def shop(chaos: Chaos) -> Engine:
    with chaos.sql.begin() as db:
        db.execute(text("CREATE TABLE orders (id INTEGER PRIMARY KEY, ref, note TEXT)"))
        db.execute(text("CREATE TABLE done (id INTEGER PRIMARY KEY)"))
        db.execute(text("CREATE TABLE paid (id INTEGER PRIMARY KEY)"))
    chaos.watch(Payments, "charge", result=None, key="key")
    return chaos.sql


def plain(value: Any) -> Any:
    return str(value) if isinstance(value, datetime.datetime) else value


def store_once(engine: Engine, make: Callable[[], Any]) -> None:
    with engine.begin() as db:
        row = {"ref": plain(make())}
        db.execute(text("INSERT INTO orders VALUES (1, :ref, 'x') ON CONFLICT DO NOTHING"), row)
    with engine.begin() as db:
        db.execute(text("SELECT ref FROM orders")).one()
        db.execute(text("INSERT INTO done VALUES (1) ON CONFLICT DO NOTHING"))


def take_for_a_key(engine: Engine, make: Callable[[], Any]) -> None:
    with engine.begin() as db:
        if not db.execute(text("SELECT 1 FROM paid")).first():
            Payments().charge(1, plain(make()))
            db.execute(text("INSERT INTO paid VALUES (1)"))


def installed(make: Callable[[], Any]) -> Callable[[], Any]:
    if module := getattr(make, "module", ""):
        pytest.importorskip(module)
    return make


@pytest.mark.parametrize("source", [*DRAWN, *TIMES])
def test_a_value_that_is_new_on_every_attempt(chaos: Chaos, shop: Engine, source: str) -> None:
    make = installed({**DRAWN, **TIMES}[source])
    for late in (True, False):
        report = chaos(duplicates=1 if late else 2, late=late, budget=60).explore(store_once, shop, make)
        assert report.verdict == "proven", full_text(report)
        assert not report.warnings
    report = chaos(late=False).explore(take_for_a_key, shop, make)
    assert [(each.kind, each.effect) for each in report.findings] == [("duplicated", "Payments.charge")], report


@pytest.mark.parametrize("source", DAYS)
def test_a_value_that_is_new_every_day(chaos: Chaos, shop: Engine, source: str) -> None:
    make = DAYS[source]
    report = chaos(late=True).explore(store_once, shop, make)
    assert report.verdict == "proven", full_text(report)
    assert chaos(late=False).explore(take_for_a_key, shop, make).verdict == "proven"
    (finding,) = chaos(late=True).explore(take_for_a_key, shop, make).findings
    assert (finding.kind, finding.effect) == ("duplicated", "Payments.charge")
    assert "21 d late" in finding.late


def test_how_long_something_took(chaos: Chaos, shop: Engine) -> None:
    """Stored by many jobs: another number in each run of production, and nothing to go by here."""
    for duplicates in (1, 2):
        report = chaos(duplicates=duplicates, late=False, budget=60).explore(store_once, shop, elapsed)
        assert report.verdict == "proven", full_text(report)


def test_generators_of_the_test_go_on_as_before(chaos: Chaos, shop: Engine) -> None:
    numpy = pytest.importorskip("numpy")
    numpy.random.seed(7)
    random.seed(7)
    expected = (numpy.random.rand(), random.random())
    numpy.random.seed(7)
    random.seed(7)
    chaos.check(store_once, shop, lambda: str(numpy.random.rand() + random.random()))
    assert (numpy.random.rand(), random.random()) == expected
    assert random.Random(3).random() == random.Random(3).random()
    assert time.perf_counter() != time.perf_counter()


SERVER = {
    "ORM default": "TEXT",
    "randomblob": "BLOB DEFAULT (randomblob(16))",
    "hex of randomblob": "TEXT DEFAULT (lower(hex(randomblob(16))))",
    "random": "INTEGER DEFAULT (random())",
    "CURRENT_TIMESTAMP": "TEXT DEFAULT CURRENT_TIMESTAMP",
    "strftime": "TEXT DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))",
    "unixepoch": "INTEGER DEFAULT (unixepoch())",
    "julianday": "REAL DEFAULT (julianday('now'))",
    "autoincrement": "",
}


@pytest.mark.parametrize("default", SERVER)
def test_values_of_sqlite(chaos: Chaos, shop: Engine, default: str) -> None:
    with chaos.sql.begin() as db:
        drawn = f"ref {SERVER[default]}" if SERVER[default] else "ref INTEGER PRIMARY KEY AUTOINCREMENT"
        db.execute(text(f"CREATE TABLE made ({drawn}, order_id INTEGER UNIQUE)"))

    def fill(db: Connection) -> None:
        if default == "ORM default":
            insert = "INSERT INTO made (order_id, ref) VALUES (1, :ref) ON CONFLICT DO NOTHING"
            db.execute(text(insert), {"ref": str(uuid.uuid4())})
        else:
            db.execute(text("INSERT INTO made (order_id) VALUES (1) ON CONFLICT DO NOTHING"))

    def make_once(engine: Engine) -> None:
        with engine.begin() as db:
            fill(db)
        with engine.begin() as db:
            db.execute(text("INSERT INTO done VALUES (1) ON CONFLICT DO NOTHING"))

    def take_for_a_key(engine: Engine) -> None:
        with engine.begin() as db:
            if not db.execute(text("SELECT 1 FROM done")).first():
                fill(db)
                Payments().charge(1, db.execute(text("SELECT ref FROM made")).scalar())
                db.execute(text("INSERT INTO done VALUES (1)"))

    for late in (True, False):
        report = chaos(duplicates=1 if late else 2, late=late, budget=60).explore(make_once, shop)
        assert report.verdict == "proven", full_text(report)
    with chaos.sql.begin() as db:
        db.execute(text("DELETE FROM made"))
        db.execute(text("DELETE FROM done"))
    verdict = chaos(late=False).explore(take_for_a_key, shop).verdict
    assert verdict == (
        "proven" if default == "autoincrement" else "failed"
    )  # a number that was rolled back comes again
