"""Codes made of letters drawn one by one: some have no digit, some have nothing else, and each is a new value."""

from __future__ import annotations

import random
import secrets
import string
import tempfile
from collections.abc import Callable

import pytest
from sqlalchemy import Engine, text

from retrychaos import Chaos
from retrychaos.report.text import full_text

ALPHABET = string.ascii_lowercase + string.digits[:2]
"""So few digits that every other code has none."""


def one_by_one(length: int) -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(length))


CODES: dict[str, Callable[[], str]] = {
    "choices": lambda: "".join(random.choices(ALPHABET, k=8)),
    "four": lambda: "".join(random.choices(ALPHABET, k=4)),
    "sample": lambda: "".join(random.sample(ALPHABET, 7)),
    "one by one": lambda: one_by_one(6),
    "random.choice": lambda: "".join([random.choice(ALPHABET) for _ in range(12)]),
    "two of them": lambda: f"{one_by_one(7)}/{one_by_one(9)}",
    "with a prefix": lambda: "ref-" + "".join(random.choices(ALPHABET, k=6)),
    "within a word": lambda: "tmp" + "".join(random.choices(ALPHABET, k=8)) + "x",
    "a generator of its own": lambda: "".join(random.Random().choices(ALPHABET, k=10)),
    "a generator of the system": lambda: "".join(random.SystemRandom().choice(ALPHABET) for _ in range(8)),
    "temporary file": lambda: tempfile.mktemp(),
}


@pytest.fixture
def shop(chaos: Chaos) -> Engine:
    with chaos.sql.begin() as db:
        db.execute(text("CREATE TABLE orders (id INTEGER PRIMARY KEY, ref TEXT)"))
        db.execute(text("CREATE TABLE log (ref TEXT)"))
    return chaos.sql


def store_once(engine: Engine, make: Callable[[], str]) -> None:
    with engine.begin() as db:
        db.execute(text("INSERT INTO orders VALUES (1, :ref) ON CONFLICT DO NOTHING"), {"ref": make()})
    for number in range(2, 7):
        with engine.begin() as db:
            db.execute(
                text("INSERT INTO orders VALUES (:n, :ref) ON CONFLICT DO NOTHING"), {"n": number, "ref": make()}
            )


def store_and_forget(engine: Engine, make: Callable[[], str]) -> None:
    """A redelivery finds the code, and puts a word in its place."""
    with engine.begin() as db:
        if not db.execute(text("UPDATE orders SET ref = 'released' WHERE id = 1")).rowcount:
            db.execute(text("INSERT INTO orders VALUES (1, :ref)"), {"ref": make()})


def store_apart(engine: Engine, make: Callable[[], str]) -> None:
    """The log says another code than the order after a crash between the two."""
    ref = make()
    with engine.begin() as db:
        db.execute(text("INSERT INTO orders VALUES (1, :ref) ON CONFLICT DO NOTHING"), {"ref": ref})
    with engine.begin() as db:
        if not db.execute(text("SELECT 1 FROM log")).first():
            db.execute(text("INSERT INTO log VALUES (:ref)"), {"ref": ref})


@pytest.mark.parametrize("code", CODES)
def test_a_code_is_new_on_every_attempt(chaos: Chaos, shop: Engine, code: str) -> None:
    report = chaos(duplicates=1, budget=60).explore(store_once, shop, CODES[code])
    assert report.verdict == "proven", full_text(report)


@pytest.mark.parametrize("code", CODES)
def test_a_word_in_place_of_a_code_is_a_change(chaos: Chaos, shop: Engine, code: str) -> None:
    report = chaos(duplicates=1).explore(store_and_forget, shop, CODES[code])
    assert [(each.kind, each.effect) for each in report.findings] == [("changed", "orders")], full_text(report)


@pytest.mark.parametrize("code", CODES)
def test_codes_that_belong_together(chaos: Chaos, shop: Engine, code: str) -> None:
    report = chaos(duplicates=1).explore(store_apart, shop, CODES[code])
    assert report.verdict == "failed", full_text(report)


def test_what_else_is_drawn(chaos: Chaos, shop: Engine) -> None:
    """Numbers, words, nothing: choices of all kinds, from all kinds of populations."""

    def job(engine: Engine) -> None:
        drawn = [random.choice([1, 2]), random.choice(range(3)), random.choice([None]), random.choice([("a", "b")])]
        drawn += [random.choices([1, 2, 3], weights=[1, 1, 1], k=5), random.choices("ab", cum_weights=[1, 2], k=2)]
        drawn += [random.sample(range(9), 5), random.sample(["red", "green"], 2), random.choice(["red", "green"])]
        drawn += [secrets.choice([1.5]), random.SystemRandom().sample([b"x", b"y"], 2), random.sample([], 0)]
        assert len(drawn) == 12
        store_once(engine, lambda: "x")

    report = chaos(duplicates=1).explore(job, shop)
    assert report.verdict == "proven", full_text(report)


def test_generators_are_as_before(chaos: Chaos, shop: Engine) -> None:
    before = [random.Random.choice, random.Random.choices, random.Random.sample, random.choice, secrets.choice]
    chaos(duplicates=1).explore(store_once, shop, CODES["choices"])
    assert before == [random.Random.choice, random.Random.choices, random.Random.sample, random.choice, secrets.choice]
    assert "choice" not in vars(random.SystemRandom)
