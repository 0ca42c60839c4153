"""Other jobs around the one that is checked: what follows it, who interferes, which order messages come in."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from sqlalchemy import Engine, text

from retrychaos import BaselineError, Chaos, OptionError
from retrychaos.model.options import from_text
from retrychaos.report.text import full_text

PLENTY = 120
"""Seconds: verdicts must not depend on the machine."""


@pytest.fixture
def db(chaos: Chaos) -> Engine:
    with chaos.sql.begin() as connection:
        connection.execute(text("CREATE TABLE items (id INTEGER PRIMARY KEY, k TEXT)"))
        connection.execute(text("CREATE TABLE marks (k TEXT PRIMARY KEY, n INTEGER)"))
    return chaos.sql


def run(db: Engine, sql: str, **values: Any) -> Any:
    with db.begin() as connection:
        result = connection.execute(text(sql), values)
        return result.fetchall() if result.returns_rows else None


def crashing(chaos: Chaos, **options: Any) -> Chaos:
    return chaos(duplicates=1, budget=PLENTY, **options)


def racing(chaos: Chaos, **options: Any) -> Chaos:
    return chaos(duplicates=2, crashes=0, budget=PLENTY, **options)


class Busy(Exception):
    """The lock is taken."""


# -- follow-ups -----------------------------------------------------------------------------------------------------


def visit(chaos: Chaos, visitor: str, ends: int | None) -> None:
    """Count a visit under a lock; once it is counted there is nothing to do, so a lock that is left stays."""
    client = chaos.redis
    if client.sismember("visits", visitor):
        return
    if not client.set("lock", 1, nx=True, ex=ends):
        raise Busy
    client.sadd("visits", visitor)
    client.delete("lock")


def test_a_lock_that_is_left_hurts_the_next_job(chaos: Chaos) -> None:
    visit_of = functools.partial(visit, chaos)
    checks = crashing(chaos, then=[(visit_of, ("bob", None))])
    report = checks.explore(visit_of, "ann", None)
    findings = {found.effect: found for found in report.findings}
    assert {found.kind for found in report.findings} == {"stuck"}
    assert set(findings) == {"Busy", "visit: Busy"}, full_text(report)  # killed before it has counted: it waits itself
    finding = findings["visit: Busy"]
    assert finding.plan.crashes == 1
    own = [delivery.job for delivery in finding.timeline]
    assert own[:2] == ["", ""] and set(own[2:]) == {"visit"}
    assert [delivery.end for delivery in finding.timeline[2:]] == ["failed"] * (len(own) - 2)
    assert [delivery.number for delivery in finding.timeline] == list(range(1, len(own) + 1))
    assert "then visit, " in full_text(report)
    chaos.redis.flushall()
    again = checks.run(visit_of, "ann", None, plan=finding.token)
    assert (again.kind, again.effect) == ("stuck", "visit: Busy")


def test_a_lock_that_ends_is_waited_for(chaos: Chaos) -> None:
    visit_of = functools.partial(visit, chaos)
    report = crashing(chaos, then=[(visit_of, ("bob", 60))]).explore(visit_of, "ann", 60)
    assert report.verdict == "proven", full_text(report)
    assert "followed by: visit" in report.guarantee


def count_items(db: Engine) -> None:
    (number,) = run(db, "SELECT count(*) FROM items")[0]
    run(db, "INSERT OR REPLACE INTO marks VALUES ('items', :n)", n=number)


def add_unless_there(db: Engine) -> None:
    if not run(db, "SELECT 1 FROM items WHERE k = 'a'"):
        run(db, "INSERT INTO items (k) VALUES ('a')")


def test_what_follows_is_a_part_of_the_ledger(chaos: Chaos, db: Engine) -> None:
    counts = functools.partial(count_items, db)
    report = crashing(chaos, then=[counts]).explore(add_unless_there, db)
    assert report.verdict == "proven", full_text(report)
    assert set(report.baseline.rows) == {"items", "marks"}
    assert run(db, "SELECT * FROM marks") == []  # what is left to the test is the clean run of the job alone

    run(db, "DELETE FROM items")
    report = racing(chaos, then=[counts]).explore(add_unless_there, db)
    found = {(difference.effect, difference.found) for difference in report.findings[0].differences}
    assert report.verdict == "failed"
    assert ("items", 2) in found and ("marks", 1) in found, full_text(report)
    assert [delivery.job for delivery in report.findings[0].timeline] == ["", "", "count_items"]
    assert "then count_items" in full_text(report)


def only_one(db: Engine) -> None:
    if len(run(db, "SELECT * FROM items WHERE k = 'a'")) > 1:
        raise LookupError("two where one was expected")
    run(db, "INSERT OR IGNORE INTO marks VALUES ('seen', 1)")


def test_a_race_hurts_the_next_job(chaos: Chaos, db: Engine) -> None:
    checks = racing(chaos, then=[(only_one, (db,))])
    report = checks.explore(add_unless_there, db)
    expected = ("stuck", "only_one: LookupError: two where one was expected")
    assert [(found.kind, found.effect) for found in report.findings] == [expected], full_text(report)
    run(db, "DELETE FROM items")
    again = checks.run(add_unless_there, db, plan=report.findings[0].token)
    assert (again.kind, again.effect) == expected

    def add_once(db: Engine) -> None:
        run(db, "INSERT OR IGNORE INTO items VALUES (1, 'a')")

    run(db, "DELETE FROM items")
    report = checks(crashes="any").explore(add_once, db)
    assert report.verdict == "proven", full_text(report)


def test_a_follow_up_that_never_finishes_after_a_clean_run_is_no_baseline(chaos: Chaos, db: Engine) -> None:
    def never(db: Engine) -> None:
        raise LookupError("no such thing")

    with pytest.raises(BaselineError, match=r"never finishes after the clean run.*never: LookupError: no such thing"):
        crashing(chaos, then=[(never, (db,))]).explore(add_unless_there, db)
    assert run(db, "SELECT * FROM items") == []


def test_follow_ups_run_once_each_in_order(chaos: Chaos, db: Engine) -> None:
    def note(db: Engine, what: str) -> None:
        run(db, "INSERT INTO marks SELECT :k, count(*) FROM marks", k=what)

    checks = crashing(chaos, then=[(note, (db, "one")), (note, (db, "two"))])
    report = checks.explore(add_unless_there, db)
    assert report.verdict == "proven", full_text(report)
    assert report.baseline.rows["marks"] == {"k='one' n=0": 1, "k='two' n=1": 1}
    assert "followed by: note, note" in report.guarantee


def test_memory_of_a_follow_up_is_gone_with_its_process(chaos: Chaos, db: Engine) -> None:
    report = crashing(chaos, isolation="process", then=[(count_items, (db,))]).explore(add_unless_there, db)
    assert report.verdict == "proven", full_text(report)


# -- what options take ----------------------------------------------------------------------------------------------


def nothing() -> None:
    """Anything callable."""


async def later() -> None:
    """Async."""


MISTAKES = {
    "no list": (nothing, r"does not take <function nothing.*: it takes a list, such as {}=\[clean_up, \(report"),
    "a pair for a list": ((nothing, (1,)), r"takes a list of pairs, and this is one pair: write {}=\[\(<function"),
    "called": ([None], "takes functions, and None is not callable. Write the function and its arguments apart"),
    "a text": (["nightly"], "takes functions, and 'nightly' is not callable"),
    "no tuple": ([(nothing, 1)], "does not take the element .*it takes functions, and pairs of a function"),
    "three": ([(nothing, (1,), {})], "does not take the element"),
    "async": ([later], "is async"),
}
HOLD_FUNCTIONS = ["then"]


@pytest.mark.parametrize("name", HOLD_FUNCTIONS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_cannot_be_run_is_refused(chaos: Chaos, name: str, mistake: str) -> None:
    value, message = MISTAKES[mistake]
    with pytest.raises(OptionError, match=f"option '{name}'.*{message.replace('{}', name)}"):
        chaos(**{name: value})


@pytest.mark.parametrize("name", HOLD_FUNCTIONS)
def test_functions_cannot_be_written_in_an_ini_file(name: str) -> None:
    with pytest.raises(OptionError, match=f"option '{name}' takes functions, which cannot be written in an ini file"):
        from_text(name, "nothing")
