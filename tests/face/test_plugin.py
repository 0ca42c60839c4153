"""The plugin as pytest runs it: fixture, marker, options, replay, reports, and the switches of others."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any
from xml.etree import ElementTree

import pytest

SHOP = """
    import os
    from sqlalchemy import create_engine, text

    engine = create_engine(f"sqlite:///shop-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.db")

    PAY = "INSERT INTO payments VALUES (NULL, :id, :amount)"

    def reset():
        with engine.begin() as connection:
            connection.execute(text("DROP TABLE IF EXISTS orders"))
            connection.execute(text("DROP TABLE IF EXISTS payments"))
            connection.execute(text("CREATE TABLE orders (id INTEGER PRIMARY KEY, status TEXT)"))
            connection.execute(text("CREATE TABLE payments (id INTEGER PRIMARY KEY, order_id INTEGER, amount INTEGER)"))
            connection.execute(text("INSERT INTO orders VALUES (1, 'new'), (2, 'new')"))

    def rows(sql):
        with engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(sql))]

    def good(order, amount=50):
        with engine.begin() as connection:
            status = connection.execute(text("SELECT status FROM orders WHERE id = :id"), {"id": order}).scalar()
            if status == "new":
                connection.execute(text(PAY), {"id": order, "amount": amount})
                connection.execute(text("UPDATE orders SET status = 'paid' WHERE id = :id"), {"id": order})

    def bad(order, amount=50):
        if rows(f"SELECT status FROM orders WHERE id = {order}") == [("new",)]:
            with engine.begin() as connection:
                connection.execute(text(PAY), {"id": order, "amount": amount})
            with engine.begin() as connection:
                connection.execute(text("UPDATE orders SET status = 'paid' WHERE id = :id"), {"id": order})
"""
CONFTEST = """
    import pytest
    import shop

    @pytest.fixture(autouse=True)
    def order():
        shop.reset()
        yield 1
        shop.engine.dispose()
"""


@pytest.fixture
def tester(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project with a shop: job `good` is right, job `bad` pays twice after a crash."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:django")  # in this process Django may have been set up, for good
    pytester.makepyfile(shop=SHOP)
    pytester.makeconftest(CONFTEST)
    return pytester


def text_of(result: pytest.RunResult) -> str:
    return "\n".join(result.outlines)


def token_in(result: pytest.RunResult) -> str:
    found = re.search(r"--chaos-replay (rc\S+)", text_of(result))
    assert found is not None, text_of(result)
    return found[1]


# -- fixture --------------------------------------------------------------------------------------------------------


def test_the_fixture_passes_a_good_job_and_refutes_a_bad_one(tester: pytest.Pytester) -> None:
    tester.makepyfile(
        """
        import shop

        def test_good(chaos, order):
            report = chaos.check(shop.good, order, amount=70)
            assert report.verdict == "proven"
            assert shop.rows("SELECT order_id, amount FROM payments") == [(1, 70)]

        def test_bad(chaos, order):
            chaos.check(shop.bad, order)
        """
    )
    result = tester.runpytest("-p", "no:randomly")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*test_bad*",
            "*.py:9: shop.bad is not idempotent",
            "DUPLICATED payments: *",
            "  delivery 1",
            "    shop.py:*connection.execute*",
            "*sql *INSERT INTO payments*",
            "*commit  COMMIT",
            "*the process dies here*",
            "  delivery 2, 1 s later",
            "*returns: the message is acknowledged",
            "  ledger * clean run  this run",
            "  + payments *order_id=1 amount=50*",
            "  replay: pytest --chaos-replay rc1.*",
            "*states, * runs, * boundaries in * s; the clean run has * steps",
            "*= retrychaos =*",
            "failed       shop.bad: duplicated payments * states, * runs, * boundaries, * s*",
            "proven       shop.good: any number of crashes at any of * boundaries*",
            "FAILED *test_bad*shop.bad is not idempotent*",
        ]
    )
    assert "chaos.py" not in text_of(result), "the harness' own frames are not shown"


def test_explore_does_not_raise_and_leaves_the_world_of_the_clean_run(tester: pytest.Pytester) -> None:
    tester.makepyfile(
        """
        import shop

        def test_explore(chaos, order):
            report = chaos.explore(shop.bad, order)
            assert report.verdict == "failed" and not report.ok
            assert shop.rows("SELECT order_id, amount FROM payments") == [(1, 50)]
            assert shop.rows("SELECT status FROM orders WHERE id = 1") == [("paid",)]
            finding, = report.findings
            assert finding.kind == "duplicated" and finding.effect == "payments"
            assert (finding.plan.crashes, finding.plan.switches) == (1, 0)
            assert finding.token == finding.plan.token
            run = chaos.run(shop.bad, 2, plan=finding.token)
            assert run.kind == "duplicated" and [each.end for each in run.timeline] == ["crashed", "completed"]
        """
    )
    tester.runpytest().assert_outcomes(passed=1)


def test_options_of_a_call_leave_the_fixture_as_it_was(tester: pytest.Pytester) -> None:
    tester.makepyfile(
        """
        import shop

        def test_options(chaos, order):
            assert chaos(crashes=0, faults=False).check(shop.bad, order).guarantee.startswith("up to 0 crashes")
            assert chaos.options.crashes == "any"
        """
    )
    tester.runpytest().assert_outcomes(passed=1)


def test_the_embedded_world_is_fresh_in_each_test_and_removed_after(tester: pytest.Pytester) -> None:
    tester.makepyfile(
        """
        from pathlib import Path
        import pytest
        from sqlalchemy import inspect, text

        @pytest.mark.parametrize("number", [1, 2])
        def test_world(chaos, number):
            assert chaos.sql is chaos.sql and chaos.redis is chaos.redis
            assert chaos(crashes=1).sql is chaos.sql
            assert inspect(chaos.sql).get_table_names() == [] and chaos.redis.dbsize() == 0
            with chaos.sql.begin() as connection:
                connection.execute(text("CREATE TABLE jobs (id INTEGER PRIMARY KEY)"))

            def job(number):
                chaos.redis.set("last", number)
                with chaos.sql.begin() as connection:
                    connection.execute(text("INSERT OR IGNORE INTO jobs VALUES (:id)"), {"id": number})

            assert chaos.check(job, number).verdict == "proven"
            assert chaos.redis.get("last") == str(number).encode()
            Path(f"place{number}").write_text(chaos.sql.url.database)
        """
    )
    tester.runpytest().assert_outcomes(passed=2)
    places = {Path(tester.path, f"place{number}").read_text() for number in (1, 2)}
    assert len(places) == 2
    assert not any(Path(place).parent.exists() for place in places)


def test_the_embedded_world_of_a_failing_test_is_removed_too(tester: pytest.Pytester) -> None:
    tester.makepyfile(
        """
        from pathlib import Path

        def test_world(chaos):
            Path("place").write_text(chaos.sql.url.database)
            chaos.redis.set("a", 1)
            with chaos.sql.connect():
                assert False
        """
    )
    tester.runpytest().assert_outcomes(failed=1)
    assert not Path(Path(tester.path, "place").read_text()).parent.exists()


def test_a_check_in_a_fixture_is_reported_too(tester: pytest.Pytester) -> None:
    tester.makepyfile(
        """
        import pytest, shop

        @pytest.fixture
        def charged(chaos, order):
            chaos.check(shop.bad, order)

        @pytest.fixture
        def charged_well(chaos, order):
            chaos.check(shop.good, order)

        def test_bad(charged):
            pass

        def test_good(charged_well):
            pass
        """
    )
    result = tester.runpytest()
    result.assert_outcomes(passed=1, errors=1)
    text = text_of(result)
    assert "shop.bad is not idempotent" in text
    assert len(re.findall(r"^failed +shop\.bad:", text, re.M)) == 1
    assert len(re.findall(r"^proven +shop\.good:", text, re.M)) == 1


def test_a_budget_that_ran_out_passes_with_a_warning(tester: pytest.Pytester) -> None:
    tester.makepyfile(
        """
        import shop

        def test_slow(chaos, order):
            def slow():
                shop.good(order)
                if shop.rows("SELECT count(*) FROM orders WHERE status = 'paid'") == [(1,)]:
                    shop.good(2)
                else:
                    while True:
                        pass

            chaos(budget=0.01).check(slow)
        """
    )
    result = tester.runpytest("-W", "default")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(
        ["*ChaosWarning: *slow: the budget of 0.01 s ran out after * of at least *", "inconclusive *slow: none: *"]
    )


# -- marker ---------------------------------------------------------------------------------------------------------


def test_bare_marks(tester: pytest.Pytester) -> None:
    tester.makepyfile(
        """
        import pytest, shop

        @pytest.mark.idempotent
        def test_good(order):
            shop.good(order)

        @pytest.mark.idempotent
        def test_bad(order):
            shop.bad(order)

        @pytest.mark.idempotent()
        @pytest.mark.parametrize("which", [1, 2])
        def test_both(order, which):
            shop.good(which)

        @pytest.mark.idempotent
        class TestClass:
            def test_method(self, order):
                shop.good(order)

            def test_bad_method(self, order):
                shop.bad(order)
        """
    )
    result = tester.runpytest("-p", "no:randomly")
    result.assert_outcomes(passed=4, failed=2)
    result.stdout.fnmatch_lines(
        [
            "failed       *.py.TestClass.test_bad_method: *",
            "proven       *.py.TestClass.test_method: *",
            "failed       *.py.test_bad: *",
            "proven       *.py.test_both[[]1]: *",
            "proven       *.py.test_both[[]2]: *",
            "proven       *.py.test_good: *",
        ]
    )


def test_the_body_under_a_bare_mark_is_run_by_the_check_only(tester: pytest.Pytester) -> None:
    tester.makepyfile(
        """
        import pytest, shop

        runs = []

        @pytest.mark.idempotent(crashes=0, faults=False)
        def test_body(order):
            runs.append(1)
            shop.good(order)

        def test_after():
            assert len(runs) == 2  # the clean runs: the plain call did not come on top
        """
    )
    tester.runpytest("-p", "no:randomly").assert_outcomes(passed=2)


def test_marks_that_name_a_job(tester: pytest.Pytester) -> None:
    tester.makepyfile(
        """
        import pytest, shop

        def paid():
            return shop.rows("SELECT order_id, amount FROM payments")

        @pytest.mark.idempotent(shop.good, args=(1,))
        def test_tuple():
            assert paid() == [(1, 50)]

        @pytest.mark.idempotent(shop.good, args=[1], kwargs={"amount": 70})
        def test_kwargs():
            assert paid() == [(1, 70)]

        @pytest.mark.idempotent(job=shop.good, args=(2,))
        def test_keyword():
            assert paid() == [(2, 50)]

        @pytest.mark.idempotent(shop.good, args=lambda order: (order,), kwargs=lambda price: {"amount": price})
        def test_functions_of_fixtures(order, price):
            assert paid() == [(1, 99)]

        @pytest.mark.idempotent(shop.good, args=lambda order: (order,))
        def test_autouse_fixtures_count():
            assert paid() == [(1, 50)]

        @pytest.mark.idempotent(shop.good, args=(1,))
        def test_with_the_fixture(chaos):
            assert [report.verdict for report in chaos.reports] == ["proven"]

        @pytest.mark.idempotent(shop.bad, args=(1,))
        def test_bad():
            raise RuntimeError("the body of a refuted check is not run")

        @pytest.mark.idempotent(shop.good, args=(1,))
        def test_body_fails():
            assert paid() == []

        @pytest.fixture
        def price():
            return 99
        """
    )
    result = tester.runpytest("-p", "no:randomly")
    result.assert_outcomes(passed=6, failed=2)
    assert "the body of a refuted check" not in text_of(result).split("retrychaos =")[0].split("test_bad")[-1]
    assert "RuntimeError" not in text_of(result)
    result.stdout.fnmatch_lines(["*.py:*: shop.bad is not idempotent", "*assert *(1, 50)* == []*"])


MISUSE = {
    "not_callable": ("@pytest.mark.idempotent(42)", "takes a job to call, and 42 is not callable. Write @pytest"),
    "called": ("@pytest.mark.idempotent(shop.reset())", "takes a job to call, and None is not callable"),
    "two_jobs": ("@pytest.mark.idempotent(shop.good, 1)", "takes one job; pass its arguments as args=(...)"),
    "job_twice": ("@pytest.mark.idempotent(shop.good, job=shop.bad)", "takes one job"),
    "args": ("@pytest.mark.idempotent(shop.good, args=1)", "args must be a tuple, not 1. Write args=(1,)."),
    "args_text": ("@pytest.mark.idempotent(shop.good, args='ab')", "args must be a tuple, not 'ab'"),
    "kwargs": ("@pytest.mark.idempotent(shop.good, kwargs=[1])", "kwargs must be a dict, not [1]"),
    "bare_args": ("@pytest.mark.idempotent(args=(1,))", "args and kwargs are for a job that the mark names"),
    "fixture": (
        "@pytest.mark.idempotent(shop.good, args=lambda customer: (1,))",
        "wants the fixtures ['customer'], which the test does not use. Add them to the test's parameters",
    ),
    "option": ("@pytest.mark.idempotent(shop.good, args=(1,), crash=1)", "no option 'crash'. Did you mean 'crashes'?"),
    "option_lists": ("@pytest.mark.idempotent(bogus=1)", "Options: crashes, duplicates, faults, late, leases, budget,"),
    "argument": ("@pytest.mark.idempotent(shop.good, arg=(1,))", "The mark also takes args=(...) and kwargs={...}"),
    "value": ("@pytest.mark.idempotent(shop.good, args=(1,), budget='much')", "a number of seconds above 0"),
    "twice": (
        "@pytest.mark.idempotent(shop.good, args=(1,))\n@pytest.mark.idempotent(shop.bad, args=(2,))",
        "several marks idempotent, of which only one would be checked",
    ),
}


def test_misuse_of_the_mark_is_a_clear_error(tester: pytest.Pytester) -> None:
    """Of that test only: the run goes on."""
    tests = [f"{mark}\ndef test_{case}():\n    pass\n" for case, (mark, _) in MISUSE.items()]
    tester.makepyfile("\n".join(["import pytest, shop\n", *tests, "def test_other():\n    pass\n"]))
    result = tester.runpytest("-p", "no:randomly")
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] == 1 and outcomes.get("errors", 0) + outcomes.get("failed", 0) == len(MISUSE)
    for case, (_, message) in MISUSE.items():
        line = next(
            line for line in result.outlines if re.match(rf"test_misuse.*\.py:\d+: test_mis.*::test_{case}: ", line)
        )
        assert message in line
    assert "plugin.py" not in text_of(result), "the harness' own frames are not shown"


def test_marks_where_they_would_not_be_checked(tester: pytest.Pytester) -> None:
    tester.makepyfile(
        """
        import unittest
        import pytest, shop
        from hypothesis import given, strategies

        @pytest.mark.idempotent
        async def test_async():
            shop.bad(1)

        class TestUnit(unittest.TestCase):
            @pytest.mark.idempotent
            def test_unittest(self):
                shop.bad(1)

            @pytest.mark.idempotent(shop.bad, args=(1,))
            def test_unittest_job(self):
                pass

        @pytest.mark.idempotent
        @given(number=strategies.integers())
        def test_given(number):
            shop.bad(1)
        """
    )
    result = tester.runpytest("-p", "no:randomly")
    result.assert_outcomes(errors=4)
    text = text_of(result)
    assert "the test is async, and what calls it is a plugin" in text
    assert text.count("this is none (TestCaseFunction), so it would not be checked. In a unittest.TestCase write") >= 2
    assert "would make Hypothesis' whole search the job" in text


def test_a_plain_class_of_unittest_style_setup_works(tester: pytest.Pytester) -> None:
    tester.makepyfile(
        """
        import pytest, shop

        class TestShop:
            def setup_method(self):
                self.order = 2

            @pytest.mark.idempotent
            def test_body(self):
                shop.good(self.order)

            def test_check(self, chaos):
                chaos.check(self.job, amount=60)

            def job(self, amount):
                shop.good(self.order, amount)
        """
    )
    tester.runpytest().assert_outcomes(passed=2)


def test_hypothesis_gives_the_inputs(tester: pytest.Pytester) -> None:
    tester.makepyfile(
        """
        import shop
        from hypothesis import HealthCheck, Phase, given, settings, strategies

        relaxed = settings(
            max_examples=5, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
            suppress_health_check=[HealthCheck.function_scoped_fixture],
        )

        @relaxed
        @given(amount=strategies.integers(1, 99))
        def test_good(chaos, amount):
            shop.reset()
            chaos.check(shop.good, 1, amount)

        @relaxed
        @given(amount=strategies.integers(1, 99))
        def test_bad(chaos, amount):
            shop.reset()
            chaos.check(shop.bad, 1, amount)
        """
    )
    result = tester.runpytest("-p", "no:randomly")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*shop.bad is not idempotent", "*: test_bad(*", "*amount=*,*", "proven *shop.good: *, and 4 more checks"]
    )
    assert len(re.findall(r"^proven +shop\.good:", text_of(result), re.M)) == 1


# -- options --------------------------------------------------------------------------------------------------------


SHOWS = """
    import pytest, shop

    def test_plain(chaos):
        print("plain", chaos.options.crashes)

    @pytest.mark.idempotent(shop.good, args=(1,), crashes=2)
    def test_marked(chaos):
        print("marked", chaos.options.crashes)

    def test_called(chaos):
        print("called", chaos(crashes=3).options.crashes)
"""


@pytest.mark.parametrize(
    ("ini", "flags", "expected"),
    [
        ("", [], {"plain": "any", "marked": "2", "called": "3"}),
        ("chaos_crashes = 1", [], {"plain": "1", "marked": "2", "called": "3"}),
        ("", ["--chaos-crashes", "4"], {"plain": "4", "marked": "4", "called": "3"}),
        ("chaos_crashes = 1", ["--chaos-crashes=any"], {"plain": "any", "marked": "any", "called": "3"}),
        ("chaos_crashes = 0", [], {"plain": "0", "marked": "2", "called": "3"}),
    ],
)
def test_flags_go_before_marks_before_ini(
    ini: str, flags: list[str], expected: dict[str, str], tester: pytest.Pytester
) -> None:
    tester.makeini(f"[pytest]\nchaos_duplicates = 1\n{ini}\n")
    tester.makepyfile(SHOWS)
    result = tester.runpytest("-s", "-p", "no:randomly", *flags)
    result.assert_outcomes(passed=3)
    assert dict(re.findall(r"(plain|marked|called) (\w+)", text_of(result))) == expected


def test_every_option_in_every_place(tester: pytest.Pytester) -> None:
    tester.makeini(
        """
        [pytest]
        chaos_budget = 2.5
        chaos_isolation = process
        chaos_duplicates = 1
        chaos_faults = false
        chaos_late = no
        chaos_order = no
        chaos_leases = jobs.locked_until, jobs.started_at + 5m
        chaos_tolerate =
            mail
            push, sms
        chaos_volatile = jobs.attempts, jobs.seen
        chaos_scratch = redis://localhost:6399
        chaos_profile = thorough
        """
    )
    tester.makepyfile(
        """
        import json

        def test_options(chaos):
            print("options", json.dumps(vars(chaos.options)))
        """
    )

    def options(*flags: str) -> Any:
        result = tester.runpytest("-s", *flags)
        result.assert_outcomes(passed=1)
        found = re.search(r"options (\{.*\})", text_of(result))
        assert found is not None
        return json.loads(found[1])

    assert options() == {
        "crashes": "any",
        "duplicates": 1,
        "faults": False,
        "late": False,
        "leases": [["jobs.locked_until", 0.0], ["jobs.started_at", 300.0]],
        "budget": 2.5,
        "tolerate": ["mail", "push", "sms"],
        "volatile": ["jobs.attempts", "jobs.seen"],
        "isolation": "process",
        "scratch": ["redis://localhost:6399"],
        "profile": "thorough",
        "rivals": [],
        "siblings": [],
        "order": False,
        "then": [],
    }
    flags = "--chaos-budget=7 --chaos-isolation=sample --chaos-tolerate=fax --chaos-volatile= --chaos-crashes=9"
    given = options(*flags.split())
    assert (given["budget"], given["isolation"], given["tolerate"], given["volatile"]) == (7, "sample", ["fax"], [])
    assert given["crashes"] == 9


WRONG = {
    "crashes": ("some", '"any" or a number of crashes from 0'),
    "budget": ("-1", "a number of seconds above 0"),
    "isolation": ("thread", '"sample" or "process"'),
    "duplicates": ("0", "a number of deliveries from 1 to 4"),
    "faults": ("perhaps", "is true or false, not 'perhaps'"),
    "late": ("2", "is true, false or slow, not '2'"),
    "leases": ("jobs", 'a list of columns, such as ["jobs.locked_until"]'),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("where", ["flag", "ini"])
def test_wrong_values_end_the_run_before_the_first_test(name: str, where: str, tester: pytest.Pytester) -> None:
    value, message = WRONG[name]
    tester.makepyfile("def test_nothing():\n    pass")
    if where == "ini":
        tester.makeini(f"[pytest]\nchaos_{name} = {value}\n")
    result = tester.runpytest(*([f"--chaos-{name}={value}"] if where == "flag" else []))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    place = f"--chaos-{name}" if where == "flag" else f"chaos_{name}"
    result.stderr.fnmatch_lines([f"ERROR: *{place}: option '{name}' *"])
    assert message in "\n".join(result.errlines)


def test_an_unknown_option_of_a_call_lists_the_right_ones(tester: pytest.Pytester) -> None:
    tester.makepyfile("def test_it(chaos):\n    chaos(budgit=1)")
    result = tester.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*.py:2: there is no option 'budgit'. Did you mean 'budget'? Options: crashes, *."])


def test_help_and_markers(pytester: pytest.Pytester) -> None:
    told = text_of(pytester.runpytest("--help"))
    group = told.split("crash testing of background jobs")[1]
    for name in ("crashes", "budget", "tolerate", "volatile", "isolation", "scratch", "replay"):
        assert f"--chaos-{name}=" in group
        assert name == "replay" or f"chaos_{name}" in told
    result = pytester.runpytest("--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.idempotent(job=None, ?, args=(), kwargs=None, ??options): check that *"])


# -- replay ---------------------------------------------------------------------------------------------------------

CHECKS = """
    import pytest, shop
    from retrychaos import IdempotencyError

    def test_bad(chaos, order):
        chaos.check(shop.bad, order)

    def test_good(chaos, order):
        chaos.check(shop.good, order)

    def test_explores(chaos, order):
        assert chaos.explore(shop.good, order).verdict == "proven"

    def test_raises(chaos, order):
        def job():
            shop.bad(order)
        with pytest.raises(IdempotencyError):
            chaos.check(job)

    @pytest.mark.idempotent
    def test_bare(order):
        shop.good(order)

    @pytest.mark.idempotent(shop.good, args=(1,))
    def test_named():
        pass

    def test_plain():
        pass
"""


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_a_token_replays_its_job_only(workers: list[str], tester: pytest.Pytester) -> None:
    tester.makepyfile(CHECKS)
    token = token_in(tester.runpytest("-p", "no:randomly"))
    result = tester.runpytest_subprocess("-p", "no:randomly", "-rs", "--chaos-replay", token, *workers)
    assert result.parseoutcomes() == {"failed": 1, "skipped": 5, "passed": 1}
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "*: shop.bad is not idempotent",
            "DUPLICATED payments: *",
            "*the process dies here*",
            f"  replay: pytest --chaos-replay {token}",
            "note: replay of one plan",
            "failed       shop.bad: duplicated payments *",
            "SKIPPED *--chaos-replay: the token belongs to another job than shop.good",
        ]
    )


def test_a_token_of_a_job_that_has_changed_since(tester: pytest.Pytester) -> None:
    tester.makepyfile("import shop\n\ndef test_bad(chaos, order):\n    chaos.check(shop.bad, order)\n")
    token = token_in(tester.runpytest())
    path = tester.path / "shop.py"
    path.write_text(
        path.read_text().replace("def bad(order, amount=50):", "def bad(*args):\n    good(*args)\n\ndef old(order):")
    )
    result = tester.runpytest_subprocess("--chaos-replay", token)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*.py:4: the token no longer fits: delivery 1 should die after step 3, but *"])
    assert "The job or its data has changed; run the check again." in text_of(result)


def test_a_token_of_the_second_job_of_a_test(tester: pytest.Pytester) -> None:
    tester.makepyfile(
        """
        import shop

        def test_both(chaos, order):
            assert chaos.check(shop.good, order).ok
            assert shop.rows("SELECT order_id FROM payments") == [(1,)]
            chaos.check(shop.bad, 2)

        def test_other(chaos):
            chaos.check(shop.good, 1)
            raise RuntimeError("it tells nothing about the token")
        """
    )
    token = token_in(tester.runpytest("-p", "no:randomly"))
    result = tester.runpytest("-p", "no:randomly", "--chaos-replay", token)
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(["*.py:6: shop.bad is not idempotent", f"  replay: pytest --chaos-replay {token}"])


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_a_token_that_no_test_belongs_to_is_no_success(workers: list[str], tester: pytest.Pytester) -> None:
    tester.makepyfile(CHECKS)
    token = token_in(tester.runpytest("-p", "no:randomly"))
    result = tester.runpytest_subprocess("--chaos-replay", token, "-k", "good or plain", *workers)
    assert result.parseoutcomes()["skipped"] == 1
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines([f"--chaos-replay {token}: no test of this run checks the job of that token.*"])


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("garbage", "'garbage' is not a token of retrychaos; tokens begin with 'rc1'"),
        ("", "is not a token of retrychaos"),
        ("rc9.00000000.c1abc.e.0000", "written by another version (rc9, this one writes rc1)"),
        ("rc1.00000000.c1abc.e.0000", "is damaged: its checksum does not fit"),
        ("rc1", "is damaged"),
    ],
)
def test_a_token_that_is_none(token: str, message: str, tester: pytest.Pytester) -> None:
    tester.makepyfile(CHECKS)
    result = tester.runpytest("--chaos-replay", token)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in "\n".join(result.errlines)


def test_a_token_survives_a_copy_with_spaces_around(tester: pytest.Pytester) -> None:
    tester.makepyfile(CHECKS)
    token = token_in(tester.runpytest("-p", "no:randomly"))
    tester.runpytest("--chaos-replay", f" {token} ", "-k", "test_bad").assert_outcomes(failed=1, deselected=6)


# -- the switches of pytest and of other plugins -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "switches",
    [
        ["-n", "2"],
        ["-n", "2", "--dist", "loadfile"],
        ["-p", "no:cacheprovider"],
        ["-W", "error"],
        ["-p", "randomly", "-p", "no:xdist"],
        ["-p", "no:randomly"],
        ["-p", "no:terminal"],
        ["--capture=no"],
        ["--capture=fd", "--log-level=DEBUG", "--log-cli-level=DEBUG"],
        ["--import-mode=importlib"],
        ["--assert=plain"],
        ["--tb=no"],
        ["-q", "--no-header"],
        ["-v"],
    ],
    ids=" ".join,
)
def test_under(switches: list[str], tester: pytest.Pytester) -> None:
    (tester.path / "conftest.py").write_text("import sys\nsys.path.insert(0, '.')\n" + dedent(CONFTEST))
    tester.makepyfile(CHECKS)
    result = tester.runpytest_subprocess(*switches)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    if "no:terminal" in switches:
        return
    if "-q" not in switches:
        result.assert_outcomes(passed=6, failed=1)
    result.stdout.fnmatch_lines(["*= retrychaos =*", "failed       shop.bad: duplicated payments *"])
    assert len(re.findall(r"^(proven|failed) ", text_of(result), re.M)) == 6
    if "--tb=no" not in switches:
        result.stdout.fnmatch_lines(["*shop.bad is not idempotent", "*dies here*", "*: pytest --chaos-replay rc1*"])


def test_exit_at_the_first_failure(tester: pytest.Pytester) -> None:
    tester.makepyfile(CHECKS)
    result = tester.runpytest_subprocess("-x", "-p", "no:randomly")
    result.assert_outcomes(failed=1)
    assert len(re.findall(r"^(proven|failed) ", text_of(result), re.M)) == 1


def test_collection_never_runs_a_job(tester: pytest.Pytester) -> None:
    tester.makepyfile(
        """
        import pathlib
        import pytest

        def job(*args):
            pathlib.Path("ran").touch()

        @pytest.mark.idempotent
        def test_bare():
            job()

        @pytest.mark.idempotent(job, args=job)
        def test_named():
            job()

        def test_fixture(chaos):
            chaos.check(job)
        """
    )
    result = tester.runpytest("--collect-only", "-q")
    assert result.ret == pytest.ExitCode.OK
    assert {line.split("::")[1] for line in result.outlines if "::" in line} == {
        "test_bare",
        "test_named",
        "test_fixture",
    }
    assert not (tester.path / "ran").exists()
    assert not re.search(r"\.py:\d", text_of(result))


def test_a_run_without_checks_says_nothing_and_imports_nothing_heavy(pytester: pytest.Pytester) -> None:
    pytester.makeini("")
    pytester.makepyfile(
        """
        import sys

        def test_plain():
            mine = [name for name in sys.modules if name.startswith("retrychaos")]
            assert sorted(mine) == ["retrychaos", "retrychaos.plugin"]
            assert not {"sqlalchemy", "redis", "fakeredis"} & sys.modules.keys()
        """
    )
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1)
    assert "retrychaos" not in text_of(result).split("collected")[1]


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_junit_files_hold_the_summary(workers: list[str], tester: pytest.Pytester) -> None:
    tester.makepyfile("import shop\n\ndef test_bad(chaos, order):\n    chaos.check(shop.bad, order)\n")
    tester.runpytest_subprocess("--junitxml=out.xml", *workers)
    tree = ElementTree.parse(tester.path / "out.xml")
    values = [each.attrib["value"] for each in tree.iter("property") if each.attrib["name"] == "retrychaos"]
    assert len(values) == 1 and values[0].startswith("failed       shop.bad: duplicated payments [")
    failure = next(tree.iter("failure"))
    assert "shop.bad is not idempotent" in failure.attrib["message"]
    assert failure.text is not None and "--chaos-replay rc1." in failure.text


def test_errors_of_a_check_are_shown_without_the_harness(tester: pytest.Pytester) -> None:
    tester.makepyfile(
        """
        import pytest, shop

        def test_fails(chaos):
            def job():
                raise ValueError("no such customer")
            chaos.check(job)

        def test_nothing(chaos):
            chaos.check(len, "abc")

        def test_not_callable(chaos):
            chaos.check(42)

        @pytest.mark.idempotent
        def test_bare():
            assert shop.rows("SELECT 1") == [(2,)]
        """
    )
    result = tester.runpytest("-p", "no:randomly")
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(
        [
            "*.py:6: the job failed in the clean run, without any fault: ValueError: no such customer.*",
            "Traceback (most recent call last):",
            '*raise ValueError("no such customer")',
            "*.py:9: the job had no effect in the clean run (no step was seen)*",
            "*.py:12: the job must be something callable, and 42 is not.*",
            "*the job failed in the clean run, without any fault: AssertionError: *",
            "FAILED *::test_fails - *the job failed in the clean run*",
        ]
    )
    assert "_ask" not in text_of(result) and "first_run" not in text_of(result)


def test_xfail_and_skip_work_as_ever(tester: pytest.Pytester) -> None:
    tester.makepyfile(
        """
        import pytest, shop

        @pytest.mark.xfail(strict=True)
        def test_known(chaos, order):
            chaos.check(shop.bad, order)

        @pytest.mark.idempotent
        def test_skips():
            pytest.skip("not here")

        @pytest.mark.skip
        @pytest.mark.idempotent(shop.bad, args=(1,))
        def test_skipped():
            pass
        """
    )
    tester.runpytest("-p", "no:randomly").assert_outcomes(xfailed=1, skipped=2)


def test_output_of_a_job_is_captured_and_is_no_effect(tester: pytest.Pytester) -> None:
    tester.makepyfile(
        """
        import logging, sys
        import shop

        def test_talks(chaos, order):
            def job():
                print("working")
                print("oh", file=sys.stderr)
                logging.getLogger("job").warning("careful")
                shop.good(order)

            assert chaos.check(job).verdict == "proven"
        """
    )
    for capture in ("fd", "sys", "no", "tee-sys"):
        tester.runpytest_subprocess(f"--capture={capture}").assert_outcomes(passed=1)


def test_two_runs_say_the_same(tester: pytest.Pytester) -> None:
    tester.makepyfile(CHECKS)

    def said(result: pytest.RunResult) -> list[str]:
        lines = [line for line in result.outlines if line.startswith(("proven", "failed", "  replay", "  +", "DUPL"))]
        return [re.sub(r"[\d.]+ s\]", "", line) for line in lines]

    first = said(tester.runpytest_subprocess("-p", "no:randomly"))
    second = said(tester.runpytest_subprocess("-p", "no:randomly"))
    assert first == second and len(first) > 5


@pytest.mark.skipif(sys.platform != "linux", reason="compares with the clock of the machine")
def test_reports_of_pytest_have_real_times(tester: pytest.Pytester) -> None:
    """Virtual time ends with the check."""
    tester.makepyfile(
        """
        import time, shop

        def test_time(chaos, order):
            before = time.time(), time.monotonic(), time.perf_counter()
            def job():
                time.sleep(7_000)
                shop.good(order)
            chaos.check(job)
            after = time.time(), time.monotonic(), time.perf_counter()
            assert all(0 < late - early < 1_000 for early, late in zip(before, after))
        """
    )
    tester.runpytest().assert_outcomes(passed=1)


def test_output_that_goes_to_a_file_is_no_effect_of_the_job(tester: pytest.Pytester) -> None:
    """As in CI: the controller of xdist writes its dots into the log while the workers check."""
    tester.makepyfile(
        """
        import os
        import shop

        def logs():
            for name in os.listdir("/proc/self/fd"):
                if os.path.realpath(f"/proc/self/fd/{name}").endswith("log.txt"):
                    yield int(name)

        def test_good(chaos, order):
            log = next(logs())  # kept by pytest while it captures

            def job(order):
                shop.good(order)
                os.write(log, b".")  # what the controller may do at this very moment
            chaos.check(job, order)
        """
    )
    for more in ((), ("-n", "1")):
        with open("log.txt", "wb") as log:
            arguments = [sys.executable, "-m", "pytest", "-p", "no:randomly", *more]
            status = subprocess.run(arguments, stdout=log, stderr=log, check=False).returncode
        assert status == 0, Path("log.txt").read_text()
