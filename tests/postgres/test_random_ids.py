"""UUIDs that the server draws by itself, where deliveries overlap."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest
import requests
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import IntegrityError

from retrychaos import Chaos
from retrychaos.report.text import full_text
from tests.postgres_server import Postgres

Job: TypeAlias = Callable[[Engine], None]
ORDER = uuid.UUID("0d9f0e1c-3f52-4b0a-9d57-1f7f3d2f8a11")


@pytest.fixture
def engine(postgres_server: Postgres, postgres: str) -> Iterator[Engine]:
    postgres_server.run(
        "CREATE TABLE parcels (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), ord uuid, n int);"
        "CREATE TABLE labels (parcel uuid PRIMARY KEY REFERENCES parcels, said text);"
        f"CREATE TABLE carts (id uuid PRIMARY KEY, status text); INSERT INTO carts VALUES ('{ORDER}', 'new')",
        postgres,
    )
    engine = create_engine(postgres_server.url(postgres))
    yield engine
    engine.dispose()


def status(db: object, lock: str = "") -> bool:
    return bool(db.execute(text(f"SELECT status FROM carts {lock}")).scalar() == "new")  # type: ignore[attr-defined]


DONE = text("UPDATE carts SET status = 'done'")


def guarded(engine: Engine) -> None:
    with engine.begin() as db:
        if status(db, "FOR UPDATE"):
            db.execute(text("INSERT INTO parcels (ord, n) VALUES (:id, 1)"), {"id": ORDER})
            db.execute(DONE)


def not_guarded(engine: Engine) -> None:
    with engine.begin() as db:
        if status(db):
            db.execute(text("INSERT INTO parcels (ord, n) VALUES (:id, 1)"), {"id": ORDER})
            db.execute(DONE)


def in_two(engine: Engine) -> None:
    with engine.begin() as db:
        if not status(db):
            return
        db.execute(text("INSERT INTO parcels (ord, n) VALUES (:id, 1)"), {"id": ORDER})
    with engine.begin() as db:
        db.execute(DONE)


def links(engine: Engine) -> None:
    """The job gets to know what the server has drawn, and hands it on."""
    with engine.begin() as db:
        if status(db, "FOR UPDATE"):
            parcel = db.execute(text("INSERT INTO parcels (n) VALUES (1) RETURNING id")).scalar_one()
            db.execute(text("INSERT INTO labels VALUES (:id, :said)"), {"id": parcel, "said": f"parcel {parcel.hex}"})
            db.execute(DONE)


def links_without_a_lock(engine: Engine) -> None:
    with engine.begin() as db:
        if status(db):
            parcel = db.execute(text("INSERT INTO parcels (n) VALUES (1) RETURNING id")).scalar_one()
            db.execute(text("INSERT INTO labels VALUES (:id, 'x')"), {"id": parcel})
            db.execute(DONE)


def several(engine: Engine) -> None:
    with engine.begin() as db:
        if status(db, "FOR UPDATE"):
            db.execute(text("INSERT INTO parcels (n) VALUES (1), (2), (3)"))
            db.execute(DONE)


def goes_on(engine: Engine) -> None:
    """Each step is committed by itself; what another delivery has begun is gone on with."""
    with engine.begin() as db:
        db.execute(text("SELECT pg_advisory_xact_lock(1)"))
        if not db.execute(text("SELECT id FROM parcels")).first():
            db.execute(text("INSERT INTO parcels (n) VALUES (1)"))
    with engine.begin() as db:
        parcel = db.execute(text("SELECT id FROM parcels")).scalar_one()
        db.execute(text("INSERT INTO labels VALUES (:id, 'x') ON CONFLICT DO NOTHING"), {"id": parcel})


def labels_twice(engine: Engine) -> None:
    """As goes_on; only that the first part looks at nothing."""
    with engine.begin() as db:
        parcel = db.execute(text("INSERT INTO parcels (n) VALUES (1) RETURNING id")).scalar_one()
    with engine.begin() as db:
        db.execute(text("INSERT INTO labels VALUES (:id, 'x') ON CONFLICT DO NOTHING"), {"id": parcel})


def keeps_the_id_of_its_message(engine: Engine) -> None:
    """What is drawn by nobody: the default is not used."""
    try:
        with engine.begin() as db:
            db.execute(text("INSERT INTO parcels (id, n) VALUES (:id, 1)"), {"id": ORDER})
            db.execute(DONE)
    except IntegrityError:
        pass


@pytest.mark.parametrize(
    "job", [guarded, links, several, goes_on, keeps_the_id_of_its_message], ids=lambda job: job.__name__
)
def test_right(check: Chaos, engine: Engine, job: Job) -> None:
    report = check(duplicates=2, budget=60).explore(job, engine)
    assert report.verdict == "proven", full_text(report)
    assert "in every order of their steps" in report.guarantee


@pytest.mark.parametrize("job", [not_guarded, links_without_a_lock], ids=lambda job: job.__name__)
def test_wrong_where_two_overlap(check: Chaos, engine: Engine, job: Job) -> None:
    assert check(duplicates=1).explore(job, engine).verdict == "proven"
    report = check(duplicates=2, budget=60).explore(job, engine)
    assert {each.kind for each in report.findings} == {"duplicated"}, full_text(report)
    assert "parcels  id=" in full_text(report)
    assert not check.run(job, engine, plan=report.findings[0].token).ok


@pytest.mark.parametrize("job", [in_two, labels_twice], ids=lambda job: job.__name__)
def test_wrong_after_a_crash(check: Chaos, engine: Engine, job: Job) -> None:
    report = check(duplicates=2, budget=60).explore(job, engine)
    assert ("duplicated", "parcels") in {(each.kind, each.effect) for each in report.findings}, full_text(report)


def goes_by_what_it_looks_like(engine: Engine) -> None:
    """Leaves as many notes as its id has bits at its end."""
    with engine.begin() as db:
        if status(db, "FOR UPDATE"):
            parcel = db.execute(text("INSERT INTO parcels (n) VALUES (1) RETURNING id")).scalar_one()
            for bit in range(12):
                if parcel.int >> bit & 1:
                    db.execute(text("UPDATE parcels SET n = n + :n"), {"n": 2**bit})
            db.execute(DONE)


def outbox(engine: Engine, key: str) -> None:
    """The request is made inside of a transaction, beside which another one may begin."""
    with engine.begin() as db:
        db.execute(text("SELECT FROM carts FOR UPDATE"))
    with engine.begin() as db:
        parcel = db.execute(text("SELECT id, n FROM parcels FOR UPDATE")).one()
        if not parcel.n:
            headers = {"Idempotency-Key": str(parcel.id if key == "row" else uuid.uuid4())}
            requests.post("https://api.pay.test/charges", json={"parcel": str(parcel.id)}, headers=headers)
            db.execute(text("UPDATE parcels SET n = 1"))


@pytest.mark.parametrize(("key", "verdict"), [("row", "proven"), ("fresh", "failed")])
def test_a_key_that_the_server_has_drawn(check: Chaos, engine: Engine, key: str, verdict: str) -> None:
    provider = check.http.provider("https://api.pay.test", key_header="Idempotency-Key")
    provider.post("/charges", json={"id": "ch_1"}, status=201)
    with engine.begin() as db:
        db.execute(text("INSERT INTO parcels (n) VALUES (0)"))
    report = check(duplicates=2, budget=60, late=False).explore(outbox, engine, key)
    assert report.verdict == verdict, full_text(report)


def test_who_goes_by_a_random_value_is_not_proven(check: Chaos, engine: Engine) -> None:
    report = check(duplicates=2, budget=20).explore(goes_by_what_it_looks_like, engine)
    assert report.verdict != "proven", full_text(report)
