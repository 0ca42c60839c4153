"""Messages that come late, and claims that end while somebody works: leases, expiries, the end of the retry horizon."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, text

from retrychaos import Chaos, Report
from retrychaos.model.errors import OptionError
from retrychaos.report.text import full_text

DAY = 86_400
UTC = datetime.UTC


class Payments:
    def charge(self, order: int) -> None: ...


class Busy(Exception):
    """Somebody else has it."""


@pytest.fixture
def shop(chaos: Chaos) -> Engine:
    with chaos.sql.begin() as db:
        db.execute(text("CREATE TABLE orders (id INTEGER PRIMARY KEY, done INTEGER, until, began)"))
        db.execute(text("CREATE TABLE seen (k TEXT PRIMARY KEY, at)"))
        db.execute(text("INSERT INTO orders VALUES (1, 0, NULL, NULL)"))
    return chaos.sql


def found(chaos: Chaos, report: Report, job: Callable[..., None], *args: Any) -> list[tuple[str, str]]:
    """What was found; every token must show it again."""
    for finding in report.findings:
        again = chaos.run(job, *args, plan=finding.token)
        assert (again.kind, again.effect) == (finding.kind, finding.effect), full_text(report)
    return [(finding.kind, finding.effect) for finding in report.findings]


# -- leases in a column -----------------------------------------------------------------------------------------------

FORMS: dict[str, Callable[[float], Any]] = {
    "naive": lambda seconds: str(datetime.datetime.now() + datetime.timedelta(seconds=seconds)),
    "aware": lambda seconds: (datetime.datetime.now(UTC) + datetime.timedelta(seconds=seconds)).isoformat(),
    "seconds": lambda seconds: time.time() + seconds,
    "whole seconds": lambda seconds: int(time.time() + seconds),
    "milliseconds": lambda seconds: int((time.time() + seconds) * 1000),
}


def charge_under_lease(engine: Engine, form: str) -> None:
    later = FORMS[form]
    with engine.begin() as db:
        if db.execute(text("SELECT done FROM orders")).scalar():
            return
        claim = text("UPDATE orders SET until = :u WHERE done = 0 AND (until IS NULL OR until < :now)")
        if not db.execute(claim, {"u": later(600), "now": later(0)}).rowcount:
            raise Busy
    Payments().charge(1)
    with engine.begin() as db:
        db.execute(text("UPDATE orders SET done = 1, until = NULL"))


@pytest.mark.parametrize("form", FORMS)
def test_a_lease_that_runs_out_while_its_holder_is_slow(chaos: Chaos, shop: Engine, form: str) -> None:
    chaos.watch(Payments, "charge", result=None)
    chaos = chaos(leases=["orders.until"], duplicates=2, crashes=0, budget=60)
    patient = chaos(late=False).explore(charge_under_lease, shop, form)
    assert patient.verdict == "proven", full_text(patient)
    slow = chaos(late="slow")
    report = slow.explore(charge_under_lease, shop, form)
    assert found(slow, report, charge_under_lease, shop, form) == [("duplicated", "Payments.charge")]
    assert "10 min go by while they are at work, past orders.until" in full_text(report)


@pytest.mark.parametrize("form", ["aware", "milliseconds"])
def test_a_slow_holder_does_no_harm_where_the_receiver_knows_the_order(chaos: Chaos, shop: Engine, form: str) -> None:
    chaos.watch(Payments, "charge", result=None, key="order")
    slow = chaos(leases=["orders.until"], duplicates=2, crashes=0, budget=60, late="slow")
    report = slow.explore(charge_under_lease, shop, form)
    assert report.verdict == "proven", full_text(report)
    assert "workers as slow" in report.guarantee


def test_a_message_that_comes_when_the_lease_is_over(chaos: Chaos, shop: Engine) -> None:
    chaos.watch(Payments, "charge", result=None)
    late = chaos(leases=["orders.until"], late=True)
    report = late.explore(charge_under_lease, shop, "aware")
    assert found(late, report, charge_under_lease, shop, "aware") == [("duplicated", "Payments.charge")]
    assert report.findings[0].late == "delivery 2 came 10 min late, past orders.until"


def begin_and_charge(engine: Engine) -> None:
    """The claim has the time when it was made; how long it lasts is in the code."""
    now = time.time()
    with engine.begin() as db:
        if db.execute(text("SELECT done FROM orders")).scalar():
            return
        claim = text("UPDATE orders SET began = :now WHERE began IS NULL OR began < :now - 300")
        if not db.execute(claim, {"now": now}).rowcount:
            raise Busy
    Payments().charge(1)
    with engine.begin() as db:
        db.execute(text("UPDATE orders SET done = 1"))


def test_a_claim_with_the_time_when_it_was_made(chaos: Chaos, shop: Engine) -> None:
    chaos.watch(Payments, "charge", result=None)
    slow = chaos(leases=["orders.began+5m"], duplicates=2, crashes=0, budget=60, late="slow")
    report = slow.explore(begin_and_charge, shop)
    assert found(slow, report, begin_and_charge, shop) == [("duplicated", "Payments.charge")]
    assert "5 min go by while they are at work, past orders.began" in full_text(report)


def test_a_lease_is_waited_for_before_the_word_stuck(chaos: Chaos, shop: Engine) -> None:
    chaos = chaos(leases=["orders.until"], late=False)

    def held_and_released(engine: Engine) -> None:
        with engine.begin() as db:
            claim = text("UPDATE orders SET until = :u WHERE until IS NULL OR until < :now")
            if not db.execute(claim, {"u": time.time() + 5_000, "now": time.time()}).rowcount:
                raise Busy
        with engine.begin() as db:
            db.execute(text("UPDATE orders SET done = 1, until = NULL"))

    report = chaos.explore(held_and_released, shop)
    assert report.verdict == "proven", full_text(report)


def test_a_lock_row_that_ends_by_itself_is_no_fault(chaos: Chaos, shop: Engine) -> None:
    def under_a_lock_row(engine: Engine) -> None:
        now = time.time()
        with engine.begin() as db:
            if db.execute(text("SELECT done FROM orders")).scalar():
                return
            db.execute(text("DELETE FROM seen WHERE at < :now"), {"now": now})
            lock = text("INSERT INTO seen VALUES ('lock', :u) ON CONFLICT DO NOTHING")
            if not db.execute(lock, {"u": now + 60}).rowcount:
                raise Busy
        with engine.begin() as db:
            db.execute(text("UPDATE orders SET done = 1"))
        with engine.begin() as db:
            db.execute(text("DELETE FROM seen"))

    assert chaos.explore(under_a_lock_row, shop).findings[0].kind == "lost"  # a row like any other
    report = chaos(leases=["seen.at"]).explore(under_a_lock_row, shop)
    assert report.verdict == "proven", full_text(report)
    assert any("seen behind until it expires" in note for note in report.notes)


def test_a_claimed_row_that_is_not_worked_on_any_more_is_a_fault(chaos: Chaos, shop: Engine) -> None:
    def claims_and_forgets(engine: Engine) -> None:
        with engine.begin() as db:
            claim = text("UPDATE orders SET until = :u WHERE until IS NULL")
            if not db.execute(claim, {"u": time.time() + 60}).rowcount:
                return  # somebody is at it
        with engine.begin() as db:
            db.execute(text("UPDATE orders SET done = 1, until = NULL"))

    report = chaos(leases=["orders.until"]).explore(claims_and_forgets, shop)
    assert [(finding.kind, finding.effect) for finding in report.findings] == [("lost", "orders")], full_text(report)


@pytest.mark.parametrize(
    ("lease", "said"),
    [
        ("orders.untill", "Did you mean 'orders.until'"),
        ("order.until", "Did you mean 'orders.until'"),
        ("orders.a_column_of_another_name", "Columns: orders.began, orders.done, orders.id, orders.until."),
        ("orders.done", "holds 1, which is no time"),
    ],
)
def test_a_name_that_fits_no_column_of_times(chaos: Chaos, shop: Engine, lease: str, said: str) -> None:
    def job(engine: Engine) -> None:
        with engine.begin() as db:
            db.execute(text("UPDATE orders SET done = 1"))

    with pytest.raises(OptionError) as raised:
        chaos(leases=[lease]).explore(job, shop)
    assert said in str(raised.value)


def test_a_lease_that_is_never_still_to_come_is_told(chaos: Chaos, shop: Engine) -> None:
    chaos.watch(Payments, "charge", result=None, key="order")
    report = chaos(leases=["orders.began"]).explore(begin_and_charge, shop)
    assert any("such as 'orders.began+5m'" in warning for warning in report.warnings)
    assert not chaos(leases=["orders.began+5m"]).explore(begin_and_charge, shop).warnings


@pytest.mark.parametrize("wrong", ["orders", "orders.until+", "orders.until+5x", "orders.", ".until", "a b.c", ""])
def test_a_lease_that_cannot_be_read(chaos: Chaos, wrong: str) -> None:
    with pytest.raises(OptionError, match="take"):
        chaos(leases=[wrong])


# -- keys that run out ------------------------------------------------------------------------------------------------


def add_then_mark(engine: Engine, redis: Any, lives: int) -> None:
    if not redis.exists("added:1"):
        with redis.pipeline(transaction=True) as both:
            both.incr("balance")
            both.set("added:1", 1, ex=lives)
            both.execute()


@pytest.mark.parametrize(("lives", "verdict"), [(DAY, "failed"), (20 * DAY, "failed"), (21 * DAY, "proven")])
def test_a_mark_must_outlive_the_retries(chaos: Chaos, shop: Engine, lives: int, verdict: str) -> None:
    """A mark that lives longer than messages come again is as good as one that lives for ever."""
    late = chaos(late=True)
    report = late.explore(add_then_mark, shop, chaos.redis, lives)
    assert report.verdict == verdict, full_text(report)
    assert chaos(late=False).explore(add_then_mark, shop, chaos.redis, lives).verdict == "proven"
    if verdict == "failed":
        assert found(late, report, add_then_mark, shop, chaos.redis, lives) == [("changed", "redis balance")]
        assert f"delivery 2 came {lives // DAY} d late, past the Redis key added:1" in full_text(report)


# -- the end of the retry horizon -------------------------------------------------------------------------------------


def once_an_hour(engine: Engine) -> None:
    """A window as a guard."""
    with engine.begin() as db:
        if not db.execute(text("SELECT 1 FROM seen WHERE at > :then"), {"then": time.time() - 3600}).first():
            row = {"k": str(int(time.time() // 3600)), "now": time.time()}
            db.execute(text("INSERT INTO seen VALUES (:k, :now)"), row)


def once_with_sqlite_now(engine: Engine) -> None:
    with engine.begin() as db:
        recent = "SELECT 1 FROM seen WHERE at > datetime('now', '-1 hour')"
        if not db.execute(text(recent)).first():
            db.execute(text("INSERT INTO seen VALUES (hex(randomblob(4)), datetime('now'))"))


def sweep_then_once(engine: Engine) -> None:
    with engine.begin() as db:
        db.execute(text("DELETE FROM seen WHERE at < :then"), {"then": time.time() - DAY})
        if db.execute(
            text("INSERT INTO seen VALUES ('1', :now) ON CONFLICT DO NOTHING"), {"now": time.time()}
        ).rowcount:
            db.execute(text("UPDATE orders SET done = done + 1"))


def once_a_day(engine: Engine) -> None:
    with engine.begin() as db:
        day = {"day": str(datetime.date.today())}
        db.execute(text("INSERT INTO seen VALUES (:day, NULL) ON CONFLICT DO NOTHING"), day)


@pytest.mark.parametrize(
    ("job", "kind", "effect"),
    [
        (once_an_hour, "duplicated", "seen"),
        (once_with_sqlite_now, "duplicated", "seen"),
        (sweep_then_once, "changed", "orders"),
        (once_a_day, "duplicated", "seen"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_window_that_has_closed(chaos: Chaos, shop: Engine, job: Any, kind: str, effect: str) -> None:
    assert chaos(late=False).explore(job, shop).verdict == "proven"
    late = chaos(late=True)
    report = late.explore(job, shop)
    assert found(late, report, job, shop) == [(kind, effect)], full_text(report)
    assert "21 d late, past every window of time" in report.findings[0].late


def for_the_day(engine: Engine, day: str) -> None:
    """The message says which day it is about."""
    with engine.begin() as db:
        row = {"day": day, "now": datetime.datetime.now().isoformat()}
        db.execute(text("INSERT INTO seen VALUES (:day, :now) ON CONFLICT DO NOTHING"), row)
    with engine.begin() as db:
        db.execute(text("UPDATE orders SET done = 1, began = :day"), {"day": str(datetime.date.today())})


def unless_too_old(engine: Engine, asked: float) -> None:
    """A message that is out of date is dropped: at that time, a clean run does the same."""
    with engine.begin() as db:
        db.execute(text("INSERT INTO seen VALUES ('got it', NULL) ON CONFLICT DO NOTHING"))
    if time.time() - asked < DAY:
        with engine.begin() as db:
            db.execute(text("UPDATE orders SET done = 1"))


def test_what_goes_by_the_time_and_is_right(chaos: Chaos, shop: Engine) -> None:
    for job, argument in ((for_the_day, "2026-11-30"), (unless_too_old, time.time())):
        report = chaos(late=True).explore(job, shop, argument)
        assert report.verdict == "proven", full_text(report)
        assert "after 21 d" in report.guarantee


def finish_what_is_fresh(engine: Engine) -> None:
    """Gives up for ever what was begun long ago, although nothing is done yet."""
    now = time.time()
    with engine.begin() as db:
        begun = db.execute(text("SELECT began FROM orders")).scalar()
        if begun is None:
            db.execute(text("UPDATE orders SET began = :now"), {"now": now})
        elif begun < now - DAY:
            raise TimeoutError("begun long ago")
    with engine.begin() as db:
        db.execute(text("UPDATE orders SET done = 1"))


def refuse_what_is_old(engine: Engine, asked: float) -> None:
    with engine.begin() as db:
        db.execute(text("INSERT INTO seen VALUES ('got it', NULL) ON CONFLICT DO NOTHING"))
    if time.time() - asked > DAY:
        raise TimeoutError("asked long ago")
    with engine.begin() as db:
        db.execute(text("UPDATE orders SET done = 1"))


def test_too_late_for_the_rest_of_the_work(chaos: Chaos, shop: Engine) -> None:
    """Stuck is what cannot be finished any more, and could be begun: not what is refused for its age anyway."""
    assert chaos(late=False).explore(finish_what_is_fresh, shop).verdict == "proven"
    late = chaos(late=True)
    report = late.explore(finish_what_is_fresh, shop)
    assert found(late, report, finish_what_is_fresh, shop) == [("stuck", "TimeoutError: begun long ago")]
    report = late.explore(refuse_what_is_old, shop, time.time())
    assert report.verdict == "proven", full_text(report)


def test_who_does_not_look_at_the_clock_is_not_asked_at_another_time(chaos: Chaos, shop: Engine) -> None:
    def job(engine: Engine) -> None:
        for step in range(3):
            with engine.begin() as db:
                db.execute(text("INSERT INTO seen VALUES (:k, 1) ON CONFLICT DO NOTHING"), {"k": step})

    early, late = (chaos(late=late, duplicates=1).explore(job, shop) for late in (False, True))
    assert (early.verdict, late.verdict) == ("proven", "proven")
    assert early.runs == late.runs and early.states == late.states


def test_the_option_takes_three_values(chaos: Chaos) -> None:
    assert [chaos(late=value).options.late for value in (True, False, "slow")] == [True, False, "slow"]
    for wrong in ("fast", 1, None):
        with pytest.raises(OptionError, match='True, False, or "slow"'):
            chaos(late=wrong)
