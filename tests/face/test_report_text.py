"""Reports as text, from values made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from retrychaos.model.plan import Leg, Plan
from retrychaos.model.report import Delivery, Difference, Finding, Ledger, Report
from retrychaos.model.step import Site, Step
from retrychaos.report.text import full_text, summary_line, summary_lines

SITE = Site("shop.py", 12, "charge", "session.add(Payment(order_id=order.id))")
INSERT = Step("sql", "sqlite:/x", "INSERT INTO payments VALUES (?)", "INSERT INTO payments VALUES (?) (1,)", SITE)
COMMIT = Step("commit", "sqlite:/x", "COMMIT", "COMMIT")
PLAN = Plan("shop.charge", (Leg(2, "abc"), Leg()), 5)
FINDING = Finding(
    kind="duplicated",
    effect="payments",
    plan=PLAN,
    timeline=(
        Delivery(1, 0.0, (INSERT, COMMIT), "crashed"),
        Delivery(2, 1.0, (INSERT, COMMIT, COMMIT), "completed"),
    ),
    differences=(Difference("payments", "order_id=1 amount=50", 1, 2),),
)
REPORT = Report(
    job="shop.charge",
    verdict="failed",
    guarantee="none: any number of crashes at any of 4 boundaries were tried",
    findings=(FINDING,),
    baseline=Ledger({"payments": {"order_id=1": 1}}),
    states=3,
    runs=4,
    boundaries=14,
    seconds=0.1234,
    steps=3,
)


def lines_of(report: Report) -> list[str]:
    return full_text(report).splitlines()


def test_a_finding_is_told_in_a_fixed_order() -> None:
    text = full_text(REPORT)
    parts = [
        "shop.charge is not idempotent",
        "DUPLICATED payments: an effect happened more often than in the clean run",
        "  delivery 1\n",
        "    shop.py:12  session.add(Payment(order_id=order.id))\n",
        "        1  sql     INSERT INTO payments VALUES (?) (1,)\n",
        "        2  commit  COMMIT\n",
        "✗  the process dies here (SIGKILL: no except, no finally runs)",
        "  delivery 2, 1 s later\n",
        "✓  returns: the message is acknowledged",
        "clean run  this run",
        "  + payments  order_id=1 amount=50",
        f"  replay: pytest --chaos-replay {PLAN.token}",
        "3 states, 4 runs, 14 boundaries in 0.12 s; the clean run has 3 steps",
    ]
    places = [text.find(part) for part in parts]
    assert -1 not in places, parts[places.index(-1)]
    assert places == sorted(places)
    assert not any(line != line.rstrip() for line in lines_of(REPORT))


def test_the_ledger_shows_what_is_missing_and_the_counts_stand_in_columns() -> None:
    differences = (
        Difference("payments", "id=1", 1, 3),
        Difference("orders", "status='paid'", 1, 0),
        Difference("payments", "id=" + "9" * 200, 0, 1),
    )
    table = list(lines_of(replace(REPORT, findings=(replace(FINDING, differences=differences),))))
    head = next(line for line in table if "clean run  this run" in line)
    rows = [line for line in table if line.startswith(("  + ", "  - "))]
    assert [row.split()[0] for row in rows] == ["+", "-", "+"]
    assert [row.split()[-2:] for row in rows] == [["1", "3"], ["1", "0"], ["0", "1"]]
    assert {len(row) for row in rows} == {len(head)}
    assert "…" in rows[2]


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("duplicated", "happened more often than in the clean run"),
        ("lost", "is missing, and no later delivery makes up for it"),
        ("changed", "a value differs from that of the clean run"),
        ("stuck", "no later delivery finishes the job"),
    ],
)
def test_each_kind_has_its_words(kind: str, cause: str) -> None:
    finding = replace(FINDING, kind=kind)
    assert any(
        line.startswith(f"{kind.upper()} payments: ") and cause in line
        for line in lines_of(replace(REPORT, findings=(finding,)))
    )


def test_a_reason_goes_before_the_general_words() -> None:
    text = full_text(replace(REPORT, findings=(replace(FINDING, reason="ids link other rows"),)))
    assert "DUPLICATED payments: ids link other rows" in text and "more often" not in text


@pytest.mark.parametrize(
    ("end", "error", "line"),
    [
        ("failed", "Locked: busy", "!  raises, so it is retried: Locked: busy"),
        ("hung", "", "∞  never ends"),
        ("completed", "", "✓  returns: the message is acknowledged"),
    ],
)
def test_each_end_of_a_delivery_has_its_words(end: str, error: str, line: str) -> None:
    timeline = (Delivery(1, 0.0, (INSERT,), end, error),)
    lines = lines_of(replace(REPORT, findings=(replace(FINDING, timeline=timeline),)))
    assert any(each.endswith(line) for each in lines)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1, "1 s"), (59.5, "59.5 s"), (61, "1.02 min"), (3_600, "1 h"), (90_000, "1.04 d"), (21 * 86_400, "21 d")],
)
def test_waits_are_told_in_a_fitting_unit(seconds: float, text: str) -> None:
    timeline = (Delivery(2, seconds, (), "completed"),)
    assert f"  delivery 2, {text} later" in lines_of(replace(REPORT, findings=(replace(FINDING, timeline=timeline),)))


def test_other_places_with_the_same_consequence_are_listed_and_counted() -> None:
    finding = replace(FINDING, also_at=("after step 4: COMMIT (shop.py:20)", "before the first step"), more_places=17)
    lines = lines_of(replace(REPORT, findings=(finding,)))
    start = lines.index("  the same happens when it dies")
    assert lines[start + 1 : start + 4] == [
        "    after step 4: COMMIT (shop.py:20)",
        "    before the first step",
        "    and at 17 other places",
    ]
    assert not any("the same happens" in line for line in lines_of(REPORT))


@pytest.mark.parametrize("count", range(1, 14))
def test_long_deliveries_are_shortened_in_the_middle_and_keep_their_numbers(count: int) -> None:
    steps = tuple(replace(COMMIT, detail=f"COMMIT {number}") for number in range(1, count + 1))
    lines = lines_of(replace(REPORT, findings=(replace(FINDING, timeline=(Delivery(1, 0.0, steps, "crashed"),)),)))
    shown = [int(line.split()[0]) for line in lines if "COMMIT" in line]
    assert all(
        f"COMMIT {number}" in line for number, line in zip(shown, [x for x in lines if "COMMIT" in x], strict=True)
    )
    hidden = [line for line in lines if "more steps" in line]
    if len(shown) == count:
        assert hidden == []
    else:
        assert shown == [1, 2, 3, 4, *range(count - 3, count + 1)]
        assert hidden == [f"         ... {count - 8} more steps"]
    assert shown[-1] == count and len(shown) + (count - 8 if hidden else 0) == count


def test_no_line_is_endless() -> None:
    site = replace(SITE, source="x" * 500)
    step = replace(INSERT, detail="y" * 500, site=site)
    finding = replace(FINDING, timeline=(Delivery(1, 0.0, (step,), "crashed"),), also_at=("z" * 500,))
    assert max(len(line) for line in lines_of(replace(REPORT, findings=(finding,)))) <= 160


def test_several_findings_each_have_their_replay_line() -> None:
    other = replace(FINDING, kind="lost", effect="mail", plan=Plan("shop.charge", (Leg(1, "fff"), Leg())))
    text = full_text(replace(REPORT, findings=(FINDING, other)))
    assert text.count("replay: pytest --chaos-replay ") == 2
    assert PLAN.token in text and other.token in text and PLAN.token != other.token
    assert summary_line(replace(REPORT, findings=(FINDING, other))).startswith(
        "failed       shop.charge: duplicated payments, lost mail ["
    )


def test_an_inconclusive_report_gives_its_reason() -> None:
    report = replace(REPORT, verdict="inconclusive", findings=(), stop_reason="the budget ran out", notes=("a", "b"))
    lines = lines_of(replace(report, warnings=("c",)))
    assert lines[0] == "shop.charge is neither proven nor refuted (inconclusive)"
    assert "reason: the budget ran out" in lines
    assert [line for line in lines if line.startswith(("note", "warning"))] == ["note: a", "note: b", "warning: c"]


def test_a_proven_report_gives_its_guarantee_and_no_reason() -> None:
    report = replace(REPORT, verdict="proven", findings=(), guarantee="any number of crashes")
    assert lines_of(report)[0] == "shop.charge is proven: any number of crashes"
    assert "reason" not in full_text(report) and "replay" not in full_text(report)


def test_the_summary_is_one_line_with_verdict_guarantee_counts_and_time() -> None:
    report = replace(REPORT, verdict="proven", findings=(), guarantee="any number of crashes")
    assert summary_line(report) == (
        "proven       shop.charge: any number of crashes [3 states, 4 runs, 14 boundaries, 0.12 s]"
    )


def test_many_checks_of_one_job_make_one_line_a_verdict() -> None:
    proven = replace(REPORT, verdict="proven", findings=(), guarantee="all")
    reports = [proven, replace(proven, states=9), REPORT, proven, replace(proven, job="shop.refund"), REPORT]
    assert summary_lines(reports) == [
        "proven       shop.charge: all [9 states, 4 runs, 14 boundaries, 0.12 s], and 2 more checks",
        "failed       shop.charge: duplicated payments [3 states, 4 runs, 14 boundaries, 0.12 s], and 1 more check",
        "proven       shop.refund: all [3 states, 4 runs, 14 boundaries, 0.12 s]",
    ]
    assert summary_lines([]) == []
