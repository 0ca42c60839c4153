"""What the engine promises: exhaustion, the fewest crashes, repeatability, and not to be fooled."""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import os
import random
import secrets
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, text

from retrychaos import BaselineError, Chaos, PlanError
from retrychaos.explore.closure import MAX_DELIVERIES
from retrychaos.explore.volatile import alike

Job = Callable[[Engine], None]


@pytest.fixture
def db(chaos: Chaos) -> Engine:
    with chaos.sql.begin() as connection:
        connection.execute(text("CREATE TABLE items (id INTEGER PRIMARY KEY, k TEXT, v TEXT)"))
        connection.execute(text("CREATE TABLE marks (k TEXT PRIMARY KEY, n INTEGER)"))
        connection.execute(text("CREATE TABLE notes (id INTEGER PRIMARY KEY AUTOINCREMENT, body TEXT)"))
    return chaos.sql


def run(db: Engine, sql: str, **values: Any) -> Any:
    with db.begin() as connection:
        result = connection.execute(text(sql), values)
        return result.fetchall() if result.returns_rows else None


# -- exhaustion -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("effects", [1, 5, 20])
def test_a_job_of_n_guarded_effects_has_n_plus_one_states(chaos: Chaos, db: Engine, effects: int) -> None:
    def job(db: Engine) -> None:
        for number in range(effects):
            run(db, "INSERT OR IGNORE INTO marks VALUES (:k, 1)", k=str(number))

    report = chaos.explore(job, db)
    assert (report.verdict, report.states, report.runs) == ("proven", effects + 1, effects + 2)
    assert report.boundaries == report.states * (2 * effects + 1)
    assert "any number of crashes" in report.guarantee and "closed" in report.guarantee


@pytest.mark.parametrize("depth", [1, 2, 4, 7])
def test_a_fault_that_takes_n_crashes_is_found_with_n_crashes(chaos: Chaos, db: Engine, depth: int) -> None:
    def job(db: Engine) -> None:
        run(db, "INSERT INTO marks VALUES ('tries', 1) ON CONFLICT (k) DO UPDATE SET n = n + 1")
        if run(db, "SELECT n FROM marks WHERE k = 'tries'")[0][0] > depth:
            run(db, "INSERT INTO items (k) VALUES ('too often')")

    report = chaos(volatile=["marks.n"]).explore(job, db)
    assert [(found.kind, found.plan.crashes) for found in report.findings] == [("duplicated", depth)]


def test_fewer_crashes_can_be_asked_for(chaos: Chaos, db: Engine) -> None:
    def job(db: Engine) -> None:
        run(db, "INSERT INTO marks VALUES ('tries', 1) ON CONFLICT (k) DO UPDATE SET n = n + 1")
        if run(db, "SELECT n FROM marks WHERE k = 'tries'")[0][0] > 2:
            run(db, "INSERT INTO items (k) VALUES ('too often')")

    some = chaos(volatile=["marks.n"])
    assert some(crashes=0).explore(job, db).verdict == "proven"
    assert some(crashes=1).explore(job, db).verdict == "proven"
    assert "up to 1 crash " in some(crashes=1).explore(job, db).guarantee
    assert some(crashes=2).explore(job, db).verdict == "failed"


def test_endless_growth_is_bounded_and_the_bound_is_printed(chaos: Chaos, db: Engine) -> None:
    def job(db: Engine) -> None:
        run(db, "INSERT INTO marks VALUES ('tries', 1) ON CONFLICT (k) DO UPDATE SET n = n + 1")
        run(db, "INSERT OR IGNORE INTO items (id, k) VALUES (1, 'done')")

    report = chaos(volatile=["marks.n"]).explore(job, db)
    assert report.verdict == "proven"
    assert f"at most {MAX_DELIVERIES} deliveries" in report.guarantee


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the watch costs a second, so that a budget is spent after so many runs on any machine."""
    ticks = itertools.count()
    monkeypatch.setattr("retrychaos.explore.check._perf_counter", lambda: float(next(ticks)))


@pytest.mark.usefixtures("slow_clock")
def test_a_spent_budget_is_inconclusive_and_passes_with_a_warning(chaos: Chaos, db: Engine) -> None:
    def job(db: Engine) -> None:
        for number in range(20):
            run(db, "INSERT OR IGNORE INTO marks VALUES (:k, 1)", k=str(number))

    report = chaos(budget=20).explore(job, db)
    assert (report.verdict, report.budget_spent, report.ok) == ("inconclusive", True, True)
    assert "budget of 20 s ran out" in report.stop_reason
    assert 1 < report.states < 21
    with pytest.warns(UserWarning, match="budget of 20 s"):
        chaos(budget=20).check(job, db)


@pytest.mark.usefixtures("slow_clock")
def test_a_found_fault_is_not_downgraded_by_a_spent_budget(chaos: Chaos, db: Engine) -> None:
    def job(db: Engine) -> None:
        run(db, "INSERT INTO items (k) VALUES ('x')")
        for number in range(20):
            run(db, "INSERT OR IGNORE INTO marks VALUES (:k, 1)", k=str(number))

    assert chaos(budget=20).explore(job, db).verdict == "failed"


# -- the same again -------------------------------------------------------------------------------------------------


def test_two_checks_give_the_same(chaos: Chaos, db: Engine) -> None:
    def job(db: Engine) -> None:
        token = uuid.uuid4().hex
        run(db, "INSERT INTO items (k, v) VALUES (:k, :v)", k=token, v=str(datetime.datetime.now()))
        run(db, "INSERT INTO notes (body) VALUES (:b)", b=json.dumps({"token": token, "n": random.random()}))

    reports = [chaos.explore(job, db) for _ in range(3)]
    assert len({(r.verdict, r.states, r.runs, r.boundaries) for r in reports}) == 1
    assert len({tuple((f.kind, f.effect, f.token) for f in r.findings) for r in reports}) == 1
    assert reports[0].findings


def test_every_token_replays_and_only_with_its_job(chaos: Chaos, db: Engine) -> None:
    def job(db: Engine) -> None:
        run(db, "INSERT INTO items (k) VALUES ('x')")

    def other(db: Engine) -> None:
        run(db, "INSERT OR IGNORE INTO marks VALUES ('x', 1)")

    [found] = chaos.explore(job, db).findings
    again = chaos.run(job, db, plan=found.token)
    assert (again.kind, again.effect, again.ok) == ("duplicated", "items", False)
    assert [delivery.end for delivery in again.timeline] == ["crashed", "completed"]
    with pytest.raises(PlanError, match="another job"):
        chaos.run(other, db, plan=found.token)


def test_a_plan_that_no_longer_fits_is_an_error(chaos: Chaos, db: Engine) -> None:
    steps = ["INSERT INTO items (k) VALUES ('x')"]

    def job(db: Engine) -> None:
        for step in steps:
            run(db, step)

    [found] = chaos.explore(job, db).findings
    steps.insert(0, "INSERT OR IGNORE INTO marks VALUES ('x', 1)")
    with pytest.raises(PlanError, match="no longer fits"):
        chaos.run(job, db, plan=found.token)


# -- volatile values ------------------------------------------------------------------------------------------------


def overwrites(value: Callable[[], Any]) -> Job:
    """A right job that writes a fresh value on every attempt."""

    def job(db: Engine) -> None:
        run(db, "INSERT OR REPLACE INTO items (id, k, v) VALUES (1, 'x', :v)", v=value())
        run(db, "INSERT OR REPLACE INTO marks VALUES ('done', 1)")

    return job


VALUES: dict[str, Callable[[], Any]] = {
    "uuid4": lambda: str(uuid.uuid4()),
    "uuid4 hex": lambda: uuid.uuid4().hex,
    "uuid1": lambda: str(uuid.uuid1()),
    "part of a uuid": lambda: uuid.uuid4().hex[:12],
    "token_hex": lambda: secrets.token_hex(8),
    "token_urlsafe": lambda: secrets.token_urlsafe(16),
    "in a text": lambda: f"lock:{uuid.uuid4()}:1",
    "in json": lambda: json.dumps({"id": str(uuid.uuid4()), "at": time.time(), "n": 1}),
    "random": random.random,
    "randint": lambda: random.randint(0, 10**9),
    "now": lambda: str(datetime.datetime.now()),
    "utc": lambda: datetime.datetime.now(datetime.UTC).isoformat(),
    "in an hour": lambda: str(datetime.datetime.now() + datetime.timedelta(hours=1)),
    "epoch": time.time,
    "seconds": lambda: int(time.time()),
    "milliseconds": lambda: int(time.time() * 1000),
    "pid": os.getpid,
    "host and pid": lambda: f"web-1:{os.getpid()}",
    "hash of a token": lambda: f"{hash(uuid.uuid4().hex):x}",
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_fresh_values_are_no_fault(chaos: Chaos, db: Engine, value: Callable[[], Any]) -> None:
    report = chaos.explore(overwrites(value), db)
    assert report.verdict == "proven", (report.stop_reason, report.findings)
    assert report.states == 3


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_fresh_values_hide_no_duplicate(chaos: Chaos, db: Engine, value: Callable[[], Any]) -> None:
    def job(db: Engine) -> None:
        run(db, "INSERT INTO items (k, v) VALUES ('x', :v)", v=value())
        run(db, "INSERT OR REPLACE INTO marks VALUES ('done', 1)")

    report = chaos.explore(job, db)
    assert [(found.kind, found.effect) for found in report.findings] == [("duplicated", "items")]


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_key_that_is_new_on_each_attempt_is_a_fault(chaos: Chaos, db: Engine, value: Callable[[], Any]) -> None:
    """Values are never pinned across attempts: not even the clock."""

    class Provider:
        def charge(self, key: str, cents: int) -> None: ...

    chaos.watch(Provider, "charge", result="ok", key="key")

    def job(db: Engine) -> None:
        Provider().charge(str(value()), 100)
        run(db, "INSERT OR REPLACE INTO marks VALUES ('done', 1)")

    report = chaos.explore(job, db)
    assert [(found.kind, found.effect) for found in report.findings] == [("duplicated", "Provider.charge")]


def test_a_counter_beside_a_token_in_one_column_is_not_masked(chaos: Chaos, db: Engine) -> None:
    def job(db: Engine) -> None:
        run(db, "INSERT OR REPLACE INTO items VALUES (1, 'token', :v)", v=uuid.uuid4().hex)
        run(db, "INSERT INTO items VALUES (2, 'count', 1) ON CONFLICT (id) DO UPDATE SET v = v + 1")

    report = chaos.explore(job, db)
    assert [(found.kind, found.effect) for found in report.findings] == [("changed", "items")]


def test_a_counter_beside_a_token_in_one_json_is_not_masked(chaos: Chaos, db: Engine) -> None:
    def job(db: Engine) -> None:
        old = run(db, "SELECT v FROM items WHERE id = 1")
        count = json.loads(old[0][0])["n"] + 1 if old else 1
        body = json.dumps({"token": random.random(), "n": count})
        run(db, "INSERT OR REPLACE INTO items VALUES (1, 'x', :v)", v=body)

    assert [found.kind for found in chaos.explore(job, db).findings] == ["changed"]


def test_a_token_must_be_the_same_wherever_it_is_used(chaos: Chaos, db: Engine) -> None:
    """Two rows of one token in the clean run, two tokens after a crash: the rows are alike, their link is broken."""

    def job(db: Engine) -> None:
        token = uuid.uuid4().hex
        run(db, "INSERT OR IGNORE INTO items VALUES (1, 'left', :v)", v=token)
        run(db, "INSERT OR REPLACE INTO items VALUES (2, 'right', :v)", v=token)

    [found] = chaos.explore(job, db).findings
    assert (found.kind, found.effect) == ("changed", "links between rows")


def test_row_ids_may_differ_if_references_follow(chaos: Chaos, db: Engine) -> None:
    def job(db: Engine) -> None:
        with db.begin() as connection:
            new = connection.execute(text("INSERT INTO notes (body) VALUES ('fresh')")).lastrowid
        body = json.dumps({"note": new})
        run(db, "INSERT OR REPLACE INTO items VALUES (1, 'note', :v)", v=body)
        run(db, "DELETE FROM notes WHERE id != :id", id=new)

    report = chaos.explore(job, db)
    assert report.verdict == "proven", (report.stop_reason, report.findings)


def test_an_id_that_the_job_gives_is_content(chaos: Chaos, db: Engine) -> None:
    def job(db: Engine) -> None:
        highest = run(db, "SELECT coalesce(max(id), 0) FROM items")[0][0]
        run(db, "INSERT INTO items (id, k) VALUES (:id, 'x')", id=highest + 1)
        run(db, "DELETE FROM items WHERE id = :id", id=highest)

    report = chaos.explore(job, db)
    assert [(found.kind, found.effect) for found in report.findings] == [("changed", "items")]


# -- memory ---------------------------------------------------------------------------------------------------------

done: set[str] = set()
tries: dict[str, int] = {}


def remembers(db: Engine) -> None:
    if "x" in done:
        return
    run(db, "INSERT INTO items (k) VALUES ('x')")
    done.add("x")


@functools.lru_cache
def cached(key: str) -> bool:
    return key in tries


def remembers_in_a_cache(db: Engine) -> None:
    if not cached("x"):
        run(db, "INSERT INTO items (k) VALUES ('x')")
        tries["x"] = 1
        cached.cache_clear()


def remembers_before_it_works(db: Engine) -> None:
    if "y" in done:
        return
    done.add("y")
    run(db, "INSERT INTO items (k) VALUES ('y')")


settings: dict[str, str] = {}


def caches_settings(db: Engine) -> None:
    """Right, and its trace differs between the first delivery of a process and later ones."""
    if not settings:
        settings["mode"] = run(db, "SELECT count(*) FROM marks")[0][0]
    run(db, "INSERT OR REPLACE INTO items VALUES (1, 'x', 'y')")


@pytest.mark.parametrize("isolation", ["sample", "process"])
@pytest.mark.parametrize("job", [remembers, remembers_in_a_cache, remembers_before_it_works], ids=lambda j: j.__name__)
def test_memory_in_the_module_is_no_guard(chaos: Chaos, db: Engine, job: Job, isolation: str) -> None:
    done.clear(), tries.clear(), cached.cache_clear()
    report = chaos(isolation=isolation).explore(job, db)
    assert [(found.kind, found.effect) for found in report.findings] == [("duplicated", "items")]
    assert any("process" in note for note in report.notes)


@pytest.mark.parametrize("isolation", ["sample", "process"])
def test_a_cache_that_does_no_harm_is_no_fault(chaos: Chaos, db: Engine, isolation: str) -> None:
    settings.clear()
    assert chaos(isolation=isolation).explore(caches_settings, db).verdict == "proven"


def test_a_payload_that_the_job_changes_is_fresh_in_every_delivery(chaos: Chaos, db: Engine) -> None:
    def job(db: Engine, items: list[str]) -> None:
        while items:
            run(db, "INSERT OR IGNORE INTO marks VALUES (:k, 1)", k=items.pop())

    payload = ["a", "b"]
    assert chaos.explore(job, db, payload).verdict == "proven"
    assert payload == ["a", "b"]


def test_each_delivery_has_a_pid_of_its_own(chaos: Chaos, db: Engine) -> None:
    """A lock that is judged by its owner's pid: the redelivery is another owner."""

    def job(db: Engine) -> None:
        run(db, "INSERT OR IGNORE INTO marks VALUES ('lock', :pid)", pid=os.getpid())
        if run(db, "SELECT n FROM marks WHERE k = 'lock'")[0][0] != os.getpid():
            return
        run(db, "INSERT INTO items (k) VALUES ('work')")
        run(db, "DELETE FROM marks WHERE k = 'lock'")

    pid = os.getpid()
    report = chaos.explore(job, db)
    assert report.findings[0].kind == "lost"
    assert os.getpid() == pid


# -- clean-up code --------------------------------------------------------------------------------------------------


def test_no_clean_up_code_runs_in_a_crash(chaos: Chaos, db: Engine) -> None:
    """Raising to simulate a crash would release this lock, and prove a job that stays locked for ever."""

    def job(db: Engine) -> None:
        if not run(db, "INSERT OR IGNORE INTO marks VALUES ('lock', 1) RETURNING 1"):
            raise RuntimeError("locked")
        try:
            run(db, "INSERT OR IGNORE INTO items (id, k) VALUES (1, 'work')")
        except BaseException:
            run(db, "INSERT INTO items (k) VALUES ('handled')")
            raise
        finally:
            run(db, "DELETE FROM marks WHERE k = 'lock'")

    report = chaos.explore(job, db)
    assert [(found.kind, found.effect) for found in report.findings] == [("stuck", "RuntimeError: locked")]


def test_after_a_check_the_world_is_as_the_clean_run_left_it(chaos: Chaos, db: Engine) -> None:
    def job(db: Engine) -> None:
        run(db, "INSERT INTO items (k) VALUES ('x')")

    assert chaos.explore(job, db).verdict == "failed"
    assert run(db, "SELECT k FROM items") == [("x",)]
    with pytest.raises(AssertionError):
        chaos.check(job, db)
    assert run(db, "SELECT k FROM items") == [("x",)]


def test_a_job_that_fails_leaves_the_world_as_it_was(chaos: Chaos, db: Engine) -> None:
    def job(db: Engine) -> None:
        run(db, "INSERT INTO items (k) VALUES ('x')")
        raise ValueError("no")

    with pytest.raises(BaselineError, match="ValueError: no"):
        chaos.check(job, db)
    assert run(db, "SELECT k FROM items") == []


def test_a_value_that_decides_and_is_volatile_is_not_proven(chaos: Chaos, db: Engine) -> None:
    """Equal after renaming, unequal to the job: then it must not be called proven."""

    def job(db: Engine) -> None:
        old = run(db, "SELECT v FROM items WHERE id = 1")
        if old and int(old[0][0], 16) % 2:
            run(db, "INSERT OR IGNORE INTO marks VALUES ('odd', 1)")
            run(db, "DELETE FROM marks WHERE k = 'odd'")
        run(db, "INSERT OR REPLACE INTO items VALUES (1, 'x', :v)", v=uuid.uuid4().hex)
        run(db, "INSERT OR REPLACE INTO marks VALUES ('done', 1)")

    report = chaos.explore(job, db)
    assert report.verdict != "failed"


def test_a_cell_that_is_yet_to_be_filled_is_not_the_same_as_one_with_a_token(chaos: Chaos, db: Engine) -> None:
    """The token's cell is volatile; the empty cell before it is not, or the two states were one."""
    run(db, "INSERT INTO items (id, k, v) VALUES (1, 'x', NULL)")

    class Registry:
        def register(self, key: str) -> str: ...  # type: ignore[empty-body]

    answers = itertools.count(1)
    chaos.watch(Registry, "register", result=lambda *args, **kwargs: f"id_{next(answers)}", key="key")

    def right(db: Engine) -> None:
        if run(db, "SELECT v FROM items WHERE id = 1")[0][0] is None:
            run(db, "UPDATE items SET v = :v WHERE id = 1", v=Registry().register("x"))

    report = chaos.explore(right, db)
    assert (report.verdict, report.states) == ("proven", 3), report.stop_reason


def test_a_word_in_place_of_a_token_is_a_fault(chaos: Chaos, db: Engine) -> None:
    """A clean run leaves a random value, a redelivery gives up and says so in the same cell."""
    run(db, "INSERT INTO items (id, k, v) VALUES (1, 'new', NULL)")

    def wrong(db: Engine) -> None:
        state = run(db, "SELECT k FROM items WHERE id = 1")[0][0]
        if state == "new":
            run(db, "UPDATE items SET k = 'begun' WHERE id = 1")
            run(db, "UPDATE items SET k = 'done', v = :v WHERE id = 1", v=f"{random.getrandbits(64):x}")
        elif state == "begun":
            run(db, "UPDATE items SET k = 'done', v = 'failed' WHERE id = 1")

    report = chaos.explore(wrong, db)
    assert [(found.kind, found.effect) for found in report.findings] == [("changed", "items")]


@pytest.mark.parametrize(
    ("leaf", "one", "two", "same"),
    [
        ("ch_7", "ch_1", "ch_2", True),
        ("xx_7", "ch_1", "ch_2", False),
        ("", "a1b2c3d4", "99ff00aa", False),
        ("failed", "a1b2c3d4", "99ff00aa", False),
        ("FAILED99", "a1b2c3d4", "99ff00aa", False),
        ("deadbee5", "a1b2c3d4", "99ff00aa", True),
        (None, "a1b2c3d4", "99ff00aa", False),
        (0, 0.25, 0.75, True),
        (0.0, 0.25, 0.75, False),
        (0.5, 0.25, 0.75, True),
        (-1, 482911, 991822, False),
        (100, 48291, 99182, True),
        (True, 1, 5, False),
        (b"12", b"ab", b"cd", True),
        (b"", b"ab", b"cd", False),
    ],
)
def test_what_may_be_another_draw(leaf: Any, one: Any, two: Any, same: bool) -> None:
    assert alike(leaf, one, two) is same


def test_a_token_replays_what_only_a_fresh_process_shows(chaos: Chaos, db: Engine) -> None:
    done.clear()
    [found] = chaos.explore(remembers, db).findings
    done.clear()
    again = chaos.run(remembers, db, plan=found.token)
    assert (again.kind, again.effect) == (found.kind, found.effect)


def test_a_job_that_knows_the_ids_of_its_rows_is_judged_too(chaos: Chaos, db: Engine) -> None:
    def job(db: Engine) -> None:
        if not run(db, "SELECT 1 FROM items"):
            run(db, "INSERT INTO items (k) VALUES ('first')")
        if run(db, "SELECT k FROM items WHERE id = 1"):
            run(db, "INSERT OR REPLACE INTO marks VALUES ('seen', 1)")

    assert chaos.explore(job, db).verdict == "proven"


def test_a_job_that_decides_by_chance_is_told_so(chaos: Chaos, db: Engine) -> None:
    def job(db: Engine) -> None:
        order = [str(number) for number in range(50)]
        random.shuffle(order)
        for key in order:
            run(db, "INSERT OR IGNORE INTO marks VALUES (:k, 1)", k=key)

    report = chaos.explore(job, db)
    assert report.verdict == "inconclusive" and not report.ok
    assert "decides by random values" in report.stop_reason
