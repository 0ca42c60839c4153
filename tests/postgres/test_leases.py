"""Leases in columns of PostgreSQL: times that the job passes in can be gone past, the server's own clock cannot."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, text

from retrychaos import Chaos
from retrychaos.report.text import full_text


class Payments:
    def charge(self, order: int) -> None: ...


class Busy(Exception):
    """Somebody else has it."""


def charge_under_lease(engine: Engine) -> None:
    now = datetime.now(UTC)
    with engine.begin() as db:
        if db.execute(text("SELECT done FROM tasks")).scalar():
            return
        claim = text("UPDATE tasks SET until = :until WHERE NOT done AND (until IS NULL OR until < :now)")
        if not db.execute(claim, {"until": now + timedelta(minutes=10), "now": now}).rowcount:
            raise Busy
    Payments().charge(1)
    with engine.begin() as db:
        db.execute(text("UPDATE tasks SET done = true, until = NULL"))


@pytest.mark.parametrize("column", ["timestamptz", "timestamp"])
@pytest.mark.parametrize("keyed", [True, False])
def test_a_lease_by_the_clock_of_the_job(check: Chaos, engine: Engine, column: str, keyed: bool) -> None:
    with engine.begin() as db:
        db.execute(text(f"CREATE TABLE tasks (id int PRIMARY KEY, done bool, until {column})"))
        db.execute(text("INSERT INTO tasks VALUES (1, false, NULL)"))
    check.watch(Payments, "charge", result=None, key="order" if keyed else None)
    late = check(leases=["tasks.until"], late=True)
    report = late.explore(charge_under_lease, engine)
    if keyed:
        assert report.verdict == "proven", full_text(report)
        assert "the clock of PostgreSQL does not move" in report.guarantee
        return
    (finding,) = report.findings
    assert (finding.kind, finding.late) == ("duplicated", "delivery 2 came 10 min late, past tasks.until")
    assert late.run(charge_under_lease, engine, plan=finding.token).kind == "duplicated"
    slow = check(leases=["tasks.until"], late="slow", duplicates=2, crashes=0, budget=60)
    (finding,) = slow.explore(charge_under_lease, engine).findings
    assert finding.kind == "duplicated" and finding.plan.crashes == 0
