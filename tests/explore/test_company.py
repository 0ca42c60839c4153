"""Other jobs around the one that is checked: what follows it, who interferes, which order messages come in."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from tests.postgres_server import Postgres

from retrychaos import BaselineError, Chaos, OptionError, PlanError
from retrychaos.explore import duplicates
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


class Post:
    def send(self, to: str, key: str) -> None:
        """Watched."""


post = Post()


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


# -- rivals ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def logo(chaos: Chaos, db: Engine) -> Engine:
    run(db, "CREATE TABLE companies (id INTEGER PRIMARY KEY, logo TEXT)")
    run(db, "INSERT INTO companies VALUES (1, NULL)")
    return db


def upload(db: Engine, what: str = "by hand") -> None:
    run(db, "UPDATE companies SET logo = :what", what=what)


def attach_if_missing_when_asked(db: Engine) -> None:
    """The guard stands where the work is asked for, and the work does not look again."""
    if run(db, "SELECT 1 FROM companies WHERE logo IS NULL"):
        run(db, "UPDATE companies SET logo = 'from the web'")


def attach_if_missing(db: Engine) -> None:
    run(db, "UPDATE companies SET logo = 'from the web' WHERE logo IS NULL")


def reset(db: Engine) -> None:
    run(db, "UPDATE companies SET logo = NULL")


@pytest.mark.parametrize("most", [1, 2])
def test_an_admin_in_between(chaos: Chaos, logo: Engine, most: int) -> None:
    """S22."""
    checks = chaos(duplicates=most, budget=PLENTY, rivals=[(upload, (logo,))])
    report = checks.explore(attach_if_missing_when_asked, logo)
    assert [(found.kind, found.effect) for found in report.findings] == [("changed", "companies")], full_text(report)
    finding = report.findings[0]
    assert finding.plan.crashes == 0
    assert "├─ upload runs, whole" in full_text(report)
    reset(logo)
    again = checks.run(attach_if_missing_when_asked, logo, plan=finding.token)
    assert (again.kind, again.effect) == ("changed", "companies")

    reset(logo)
    report = checks.explore(attach_if_missing, logo)
    assert report.verdict == "proven", full_text(report)
    assert "with rivals: upload" in report.guarantee


def test_a_token_wants_the_rivals_that_it_was_made_with(chaos: Chaos, logo: Engine) -> None:
    checks = chaos(duplicates=1, budget=PLENTY)
    report = checks(rivals=[(upload, (logo,))]).explore(attach_if_missing_when_asked, logo)
    reset(logo)
    with pytest.raises(PlanError, match="other code number 1 run, and rivals and siblings hold 0"):
        checks.run(attach_if_missing_when_asked, logo, plan=report.findings[0].token)


def test_a_rival_that_would_have_to_wait_does_not_run_there(chaos: Chaos, logo: Engine) -> None:
    """Under a lock nobody comes in between, so whoever looks and writes in one transaction is right."""

    def attach_under_a_lock(db: Engine) -> None:
        with db.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            if connection.execute(text("SELECT 1 FROM companies WHERE logo IS NULL")).fetchall():
                connection.execute(text("UPDATE companies SET logo = 'from the web'"))
            connection.commit()

    report = crashing(chaos, rivals=[(upload, (logo,))]).explore(attach_under_a_lock, logo)
    assert report.verdict == "proven", full_text(report)


def test_a_database_in_memory_is_no_place_for_rivals(chaos: Chaos) -> None:
    engine = create_engine("sqlite://")
    run(engine, "CREATE TABLE marks (k TEXT PRIMARY KEY)")

    def mark(what: str) -> None:
        run(engine, "INSERT OR IGNORE INTO marks VALUES (:k)", k=what)

    report = crashing(chaos, rivals=[(mark, ("b",))]).explore(mark, "a")
    assert report.verdict == "inconclusive"
    assert report.stop_reason.endswith("so with them duplicates=1 is not enough.")
    engine.dispose()


def test_what_others_do_outside_of_the_ledger_counts(chaos: Chaos, db: Engine, tmp_path: Path) -> None:
    def writes() -> None:
        (tmp_path / "note").write_text("hello")

    for name in ("then", "rivals", "siblings"):
        run(db, "DELETE FROM items")
        report = crashing(chaos, **{name: [writes]}).explore(add_unless_there, db)
        assert report.verdict == "inconclusive"
        assert "effect outside the ledger" in report.stop_reason and "in writes" in report.stop_reason


def test_several_rivals_in_any_order(chaos: Chaos, logo: Engine) -> None:
    rivals = [(upload, (logo, name)) for name in ("ann", "bob")]
    report = crashing(chaos, rivals=rivals).explore(attach_if_missing, logo)
    assert report.verdict == "proven", full_text(report)
    assert "with rivals: upload, upload" in report.guarantee
    reset(logo)
    report = crashing(chaos, rivals=rivals).explore(attach_if_missing_when_asked, logo)
    assert report.verdict == "failed"
    runs = [turn.ident for turn in report.findings[0].plan.turns if turn.kind == "rival"]
    assert len(runs) == 1  # one is enough to show it


def test_a_rival_comes_between_a_crash_and_the_next_delivery(chaos: Chaos, db: Engine) -> None:
    """The job takes a place and gives it back at the end; a reaper gives back the place of whoever seems dead."""
    client = chaos.redis

    def work(token: str) -> None:
        if client.get("place") != token.encode():
            client.set("place", token)
        client.set("work", "done")
        client.delete("place")
        client.incr("free") if client.get("given") is None else None
        client.set("given", 1)

    def reap() -> None:
        if client.delete("place"):
            client.incr("free")

    report = crashing(chaos, crashes=0, rivals=[reap]).explore(work, "t")
    assert report.verdict == "failed"
    assert ("changed", "redis free") in [(found.kind, found.effect) for found in report.findings], full_text(report)


def test_a_rival_that_never_can_run_is_refused(chaos: Chaos, logo: Engine) -> None:
    def broken() -> None:
        raise LookupError("no such thing")

    with pytest.raises(
        BaselineError, match=r"whole clean runs of attach_if_missing, broken do not all finish.*no such thing"
    ):
        crashing(chaos, rivals=[broken]).explore(attach_if_missing, logo)


def test_a_rival_is_no_help_to_a_job_that_waits(chaos: Chaos, db: Engine) -> None:
    """It may come, and need not: a job that gets on only with it is stuck."""
    client = chaos.redis

    def locked() -> None:
        if not client.set("lock", 1, nx=True):
            raise Busy
        client.set("work", "done")
        client.delete("lock")

    report = crashing(chaos, rivals=[functools.partial(client.delete, "lock")]).explore(locked)
    assert ("stuck", "Busy") in [(found.kind, found.effect) for found in report.findings], full_text(report)


def test_rivals_and_follow_ups(chaos: Chaos, logo: Engine) -> None:
    def copy(db: Engine) -> None:
        run(db, "INSERT INTO items (k) SELECT logo FROM companies")

    checks = crashing(chaos, rivals=[(upload, (logo,))], then=[(copy, (logo,))])
    report = checks.explore(attach_if_missing, logo)
    assert report.verdict == "proven", full_text(report)
    assert "with rivals: upload; followed by: copy" in report.guarantee
    reset(logo)
    report = checks.explore(attach_if_missing_when_asked, logo)
    assert {difference.effect for difference in report.findings[0].differences} == {"companies", "items"}


def test_random_schedules_have_rivals_too(chaos: Chaos, logo: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left when the search does not close."""
    monkeypatch.setattr(duplicates, "_FOR_SEARCH", 0.0)
    checks = chaos(duplicates=1, crashes=0, budget=PLENTY, rivals=[(upload, (logo,))])
    report = checks.explore(attach_if_missing_when_asked, logo)
    assert [(found.kind, found.effect) for found in report.findings] == [("changed", "companies")], full_text(report)


def test_a_user_that_is_deleted_meanwhile(chaos: Chaos, db: Engine) -> None:
    """S12: whoever raises then is retried in vain; whoever returns is done."""
    chaos.watch(post, "send", result=None, key="key")
    run(db, "INSERT INTO items (id, k) VALUES (1, 'ann')")

    def delete() -> None:
        run(db, "DELETE FROM items")

    def welcome(*, early: bool) -> None:
        found = run(db, "SELECT k FROM items WHERE id = 1")
        if not found and early:
            return
        post.send(found[0][0], key="welcome 1")

    checks = crashing(chaos, rivals=[delete])
    report = checks.explore(welcome, early=False)
    expected = ("stuck", "IndexError: list index out of range")
    assert [(found.kind, found.effect) for found in report.findings] == [expected], full_text(report)
    assert [delivery.end for delivery in report.findings[0].timeline] == ["failed"], full_text(report)
    again = checks.run(welcome, early=False, plan=report.findings[0].token)
    assert (again.kind, again.effect) == expected

    report = checks.explore(welcome, early=True)
    assert report.verdict == "proven", full_text(report)


def test_a_rival_in_a_server_that_would_have_to_wait(chaos: Chaos, postgres_server: Postgres, postgres: str) -> None:
    """On PostgreSQL the server says that it waits: under a row lock nobody comes in between."""
    db = create_engine(postgres_server.url(postgres, "psycopg"))
    run(db, "CREATE TABLE companies (id INTEGER PRIMARY KEY, logo TEXT)")
    run(db, "INSERT INTO companies VALUES (1, NULL)")

    def attach(db: Engine, lock: str) -> None:
        with db.begin() as connection:
            if connection.execute(text(f"SELECT 1 FROM companies WHERE logo IS NULL {lock}")).fetchall():
                connection.execute(text("UPDATE companies SET logo = 'from the web'"))

    checks = crashing(chaos, scratch=[f"postgresql:///?host={postgres_server.folder}"], rivals=[(upload, (db,))])
    report = checks.explore(attach, db, "")
    assert [(found.kind, found.effect) for found in report.findings] == [("changed", "companies")], full_text(report)
    reset(db)
    report = checks.explore(attach, db, "FOR UPDATE")
    assert report.verdict == "proven", full_text(report)
    db.dispose()


# -- siblings -------------------------------------------------------------------------------------------------------


@pytest.fixture
def orders(chaos: Chaos, db: Engine) -> Engine:
    chaos.watch(post, "send", result=None, key="key")
    run(db, "CREATE TABLE orders (id INTEGER PRIMARY KEY, shipped INTEGER, notified INTEGER)")
    run(db, "INSERT INTO orders VALUES (1, 0, 0)")
    return db


def unship(db: Engine) -> None:
    run(db, "UPDATE orders SET shipped = 0, notified = 0")


def ship(db: Engine) -> None:
    run(db, "UPDATE orders SET shipped = 1")


class NotYet(Exception):
    """What comes before has not come yet."""


def notify(db: Engine, *, later: bool = False, key: bool = True) -> None:
    """Returns unless shipped (or comes again later), returns if notified, sends, marks."""
    ((shipped, notified),) = run(db, "SELECT shipped, notified FROM orders")
    if notified:
        return
    if not shipped:
        if later:
            raise NotYet
        return
    post.send("ann", key="shipped 1" if key else None)
    run(db, "UPDATE orders SET notified = 1")


def test_a_notice_that_is_faster_than_the_parcel(chaos: Chaos, orders: Engine) -> None:
    """S16, second part."""
    checks = crashing(chaos, siblings=[(ship, (orders,))], order=True)
    report = checks.explore(notify, orders)
    found = {(found.kind, found.effect): found for found in report.findings}
    assert set(found) == {("reordered", "Post.send")}, full_text(report)
    finding = report.findings[0]
    assert finding.plan.crashes == 0
    assert finding.reason == "notify, then ship leaves another ledger than ship, then notify"
    assert [delivery.job for delivery in finding.timeline] == ["", "ship"]
    assert "REORDERED Post.send: notify, then ship leaves" in full_text(report)
    unship(orders)
    again = checks.run(notify, orders, plan=finding.token)
    assert (again.kind, again.effect, len(again.timeline)) == ("reordered", "Post.send", 2)
    unship(orders)
    with pytest.raises(PlanError, match="an order of 2 messages, and there are 3 now"):
        checks(siblings=[(ship, (orders,))] * 2).run(notify, orders, plan=finding.token)
    unship(orders)
    ship(orders)  # now it has an effect by itself
    with pytest.raises(PlanError, match="no siblings are given now"):
        crashing(chaos).run(notify, orders, plan=finding.token)


@pytest.mark.parametrize("most", [1, 2])
def test_a_notice_that_comes_again_once_shipped(chaos: Chaos, orders: Engine, most: int) -> None:
    """It fails by itself, and waits for the other message."""
    checks = chaos(duplicates=most, budget=PLENTY, siblings=[(ship, (orders,))], order=True)
    report = checks.explore(functools.partial(notify, later=True), orders)
    assert report.verdict == "proven", full_text(report)
    assert "with siblings in every order: ship" in report.guarantee


def test_the_order_matters_only_if_asked_for(chaos: Chaos, orders: Engine) -> None:
    checks = crashing(chaos, siblings=[(ship, (orders,))])
    report = checks.explore(notify, orders)
    assert report.verdict == "proven", full_text(report)  # it does nothing alone, and something after its sibling
    assert "with siblings: ship" in report.guarantee


def test_a_fault_that_shows_only_after_a_sibling(chaos: Chaos, orders: Engine) -> None:
    checks = crashing(chaos, siblings=[(ship, (orders,))])
    for job in (functools.partial(notify, key=False), functools.partial(notify, key=False, later=True)):
        unship(orders)
        report = checks.explore(job, orders)
        assert [(found.kind, found.effect) for found in report.findings] == [("duplicated", "Post.send")], full_text(
            report
        )
        finding = report.findings[0]
        assert finding.plan.crashes == 1
        unship(orders)
        again = checks.run(job, orders, plan=finding.token)
        assert (again.kind, again.effect) == ("duplicated", "Post.send")


def take(db: Engine, result: str, images: int, by_counting: bool) -> None:
    """Takes a result in, and notes how many images are left: read, subtracted and written, or subtracted in place."""
    if by_counting:
        with db.begin() as connection:
            done = connection.execute(text("INSERT OR IGNORE INTO marks VALUES (:k, 0)"), {"k": result})
            if done.rowcount:
                connection.execute(text("UPDATE marks SET n = n - :n WHERE k = 'left'"), {"n": images})
        return
    if run(db, "SELECT 1 FROM marks WHERE k = :k", k=result):
        return
    ((left,),) = run(db, "SELECT n FROM marks WHERE k = 'left'")
    with db.begin() as connection:
        connection.execute(text("INSERT OR IGNORE INTO marks VALUES (:k, 0)"), {"k": result})
        connection.execute(text("UPDATE marks SET n = :n WHERE k = 'left'"), {"n": left - images})


def test_two_messages_about_one_thing(chaos: Chaos, db: Engine) -> None:
    def begin() -> None:
        run(db, "DELETE FROM marks")
        run(db, "INSERT INTO marks VALUES ('left', 5)")

    begin()
    assert crashing(chaos).explore(take, db, "r1", 3, False).verdict == "proven"
    begin()
    report = crashing(chaos, siblings=[(take, (db, "r2", 2, False))]).explore(take, db, "r1", 3, False)
    assert report.verdict == "failed" and report.findings[0].effect == "marks", full_text(report)
    begin()
    report = crashing(chaos, siblings=[(take, (db, "r2", 2, True))], order=True).explore(take, db, "r1", 3, True)
    assert report.verdict == "proven", full_text(report)


def test_siblings_that_wait_for_each_other(chaos: Chaos, orders: Engine) -> None:
    def never(db: Engine) -> None:
        if not run(db, "SELECT 1 FROM orders WHERE notified"):
            raise NotYet("not notified")

    def not_before(db: Engine) -> None:
        raise NotYet("never")

    with pytest.raises(BaselineError, match=r"whole clean runs of never, .*not_before do not all finish"):
        crashing(chaos, siblings=[(never, (orders,))]).explore(not_before, orders)


def test_four_messages(chaos: Chaos, db: Engine) -> None:
    def put(db: Engine, what: str) -> None:
        run(db, "INSERT OR IGNORE INTO marks VALUES (:k, 1)", k=what)

    siblings = [(put, (db, what)) for what in "bcd"]
    report = crashing(chaos, siblings=siblings, order=True).explore(put, db, "a")
    assert report.verdict == "proven", full_text(report)

    def count(db: Engine, what: str) -> None:
        run(db, "INSERT OR IGNORE INTO marks SELECT :k, count(*) FROM marks", k=what)

    run(db, "DELETE FROM marks")
    report = crashing(chaos, siblings=[*siblings[:2], (count, (db, "d"))], order=True).explore(put, db, "a")
    assert {found.kind for found in report.findings} == {"reordered"}


def test_orders_want_messages(chaos: Chaos, db: Engine) -> None:
    with pytest.raises(OptionError, match="order=True compares the orders of several messages, and there is only one"):
        crashing(chaos, order=True).explore(add_unless_there, db)


def test_not_too_many(chaos: Chaos, db: Engine) -> None:
    for name in ("rivals", "siblings"):
        with pytest.raises(OptionError, match=rf"option '{name}' takes 3 at most.*these are 4"):
            chaos(**{name: [nothing] * 4})
    with pytest.raises(OptionError, match=r"rivals and siblings together are 3 at most.*these are 2 and 2"):
        chaos(rivals=[nothing] * 2, siblings=[nothing] * 2).explore(add_unless_there, db)


# -- what options take ----------------------------------------------------------------------------------------------


def nothing() -> None:
    """Anything callable."""


MISTAKES = {
    "no list": (nothing, r"does not take <function nothing.*: it takes a list, such as {}=\[clean_up, \(report"),
    "a pair for a list": ((nothing, (1,)), r"takes a list of pairs, and this is one pair: write {}=\[\(<function"),
    "called": ([None], "takes functions, and None is not callable. Write the function and its arguments apart"),
    "a text": (["nightly"], "takes functions, and 'nightly' is not callable"),
    "no tuple": ([(nothing, 1)], "does not take the element .*it takes functions, and pairs of a function"),
    "three": ([(nothing, (1,), {})], "does not take the element"),
}
HOLD_FUNCTIONS = ["then", "rivals", "siblings"]


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


@pytest.mark.parametrize("written", ["flag", "ini"])
def test_a_flag_for_functions_says_where_they_go(pytester: pytest.Pytester, written: str) -> None:
    pytester.makepyfile("def test(): pass")
    if written == "ini":
        pytester.makeini("[pytest]\nchaos_rivals = shop.upload\n")
    result = pytester.runpytest_inprocess(
        "-p", "no:randomly", "-p", "no:django", *(["--chaos-rivals", "shop.upload"] if written == "flag" else [])
    )
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    place = "in the ini file, chaos_rivals" if written == "ini" else "--chaos-rivals"
    result.stderr.fnmatch_lines([f"ERROR: {place}: option 'rivals' takes functions, which cannot be written in*"])


def test_the_mark_takes_them(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        def welcome(chaos):
            chaos.redis.set("welcome", 1)

        def report():
            pass

        @pytest.mark.idempotent(welcome, args=lambda chaos: (chaos,), then=[report])
        def test_right(chaos):
            assert chaos.redis.get("welcome") == b"1"

        @pytest.mark.idempotent(welcome, args=lambda chaos: (chaos,), then=[1])
        def test_wrong(chaos):
            pass
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:randomly", "-p", "no:django")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*option 'then' takes functions, and 1 is not callable*"])
    result.stdout.fnmatch_lines(["proven*followed by: report*"])
