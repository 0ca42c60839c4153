"""Random jobs: does the tool say what brute force with real processes and real kills says?

RETRYCHAOS_ORACLE_SEEDS=N tries the seeds up to N instead of the usual ones.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fakeredis
import pytest
import redis

from retrychaos import Chaos, Report
from retrychaos.model.errors import BaselineError
from retrychaos.model.report import Difference, Finding
from tests.oracle import known_jobs
from tests.oracle.brute_force import MOST_DELIVERIES, Job, Oracle, Question, Verdict
from tests.oracle.jobs import Shop, random_program

SEEDS = range(int(os.environ.get("RETRYCHAOS_ORACLE_SEEDS", "40")))
BATCH = 10
CRASHES = 3
BATCHES = [SEEDS[start : start + BATCH] for start in range(0, len(SEEDS), BATCH)]


def explore_and_compare(question: Question, verdict: Verdict, shop: Shop) -> None:
    """Every statement of the tool about a job holds in the oracle's world, and the other way round."""
    job = partial(question.job, shop)
    crashes = verdict.crashes if verdict.endless else question.crashes  # the tool follows 25 failures from each state
    chaos = Chaos(
        faults=False,
        late=False,
        duplicates=1,
        crashes=crashes or question.crashes,
        volatile=question.volatile,
        budget=600,
        scratch=shop.scratch,
    )
    chaos.watch(shop, "send", result=None)
    chaos.watch(shop, "charge", result=None, key="key")

    def explore(**options: Any) -> Report:
        shop.furnish(question.journal)
        return chaos(**options).explore(job)

    if verdict.clean != "done":
        with pytest.raises(BaselineError, match="no effect" if verdict.clean == "idle" else "failed"):
            explore()
        return
    report = explore()
    assert report.verdict == ("proven" if verdict.crashes is None else "failed"), _told(report)
    assert not any("memory of its process" in note for note in report.notes), _told(report)
    shown = report.baseline.rows
    assert _totals(shown, shown) == _totals(verdict.ledger, shown), _told(report)
    if verdict.crashes is None:
        return
    assert min(finding.plan.crashes for finding in report.findings) == verdict.crashes, _told(report)
    for finding in report.findings:
        assert finding.plan.crashes > verdict.depth or _is_real(finding, verdict), f"{finding.token}\n{_told(report)}"
        shop.furnish(question.journal)
        run = chaos.run(job, plan=finding.token)
        assert (run.kind, run.effect, run.differences) == (finding.kind, finding.effect, finding.differences)
    enough, fewer = explore(crashes=verdict.crashes), explore(crashes=verdict.crashes - 1)
    assert (enough.verdict, fewer.verdict) == ("failed", "proven"), f"{_told(enough)}\n{_told(fewer)}"


def _is_real(finding: Finding, verdict: Verdict) -> bool:
    """A final ledger of the oracle differs from the clean run's in the same places, by as much."""
    if len(finding.timeline) > MOST_DELIVERIES:
        return True  # the oracle has less patience
    if finding.reason == "the same rows, but ids or tokens link other ones":
        return any(not problem.stuck for problem in verdict.problems)
    if finding.kind == "stuck":
        return any(problem.stuck for problem in verdict.problems)
    shown = _deviation(finding.differences)
    return any(
        shown == {effect: (more.total(), less.total()) for effect, (more, less) in problem.differences.items()}
        for problem in verdict.problems
        if not problem.stuck
    )


def _deviation(differences: Iterable[Difference]) -> dict[str, tuple[int, int]]:
    """Effect -> how many rows are too many, and how many are missing."""
    more, less = Counter[str](), Counter[str]()
    for line in differences:
        more[_plain(line.effect)] += max(0, line.found - line.expected)
        less[_plain(line.effect)] += max(0, line.expected - line.found)
    return {effect: (more[effect], less[effect]) for effect in {*more, *less}}


def _totals(ledger: Any, touched: Iterable[str]) -> dict[str, int]:
    """Effect -> number of rows, of effects that the job has touched."""
    wanted = {_plain(effect) for effect in touched} - {"schema"}
    return {_plain(effect): Counter(rows).total() for effect, rows in ledger.items() if _plain(effect) in wanted}


def _plain(effect: str) -> str:
    """Calls go by the name of the function alone."""
    return effect if effect.startswith("redis ") else effect.rpartition(".")[2]


def _told(report: Report) -> str:
    lines = [f"retrychaos says: {report.verdict}, {report.stop_reason or report.guarantee}", *report.notes]
    for finding in report.findings:
        lines.append(f"  {finding.kind} {finding.effect} by {finding.plan.crashes} crashes, {finding.token}")
        lines += [f"    {line}" for line in finding.differences]
    return "\n".join(lines)


def compare(questions: Iterable[tuple[str, Question]], oracle: Oracle, folder: Path, client: Any = None) -> None:
    """All of them, and then one failure that names each disagreement."""
    failures = list(disagreements(questions, oracle, folder, client))
    if failures:
        pytest.fail(f"{len(failures)} disagreements\n\n" + "\n\n".join(failures), pytrace=False)


def disagreements(
    questions: Iterable[tuple[str, Question]], oracle: Oracle, folder: Path, client: Any = None
) -> Iterator[str]:
    with closing(Shop(folder, client)) as shop:
        for name, question in questions:
            verdict = oracle.judge(question)
            try:
                explore_and_compare(question, verdict, shop)
            except Exception as problem:
                yield f"{name}: {question.job!r}\n{_shown(verdict)}\n{type(problem).__name__}: {problem}"


def _shown(verdict: Verdict) -> str:
    lines = [f"oracle says: clean run {verdict.clean}, harm by {verdict.crashes} crashes, {verdict.states} states"]
    lines += [f"  {problem}" for problem in verdict.problems[:5]]
    return "\n".join(lines)


def seeded(seeds: Iterable[int], with_redis: bool) -> Iterator[tuple[str, Question]]:
    for seed in seeds:
        program = random_program(seed, with_redis)
        yield f"seed {seed}", Question(program, program.journal, program.volatile, CRASHES)


@pytest.mark.long
@pytest.mark.parametrize("seeds", BATCHES, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_jobs_on_sqlite(seeds: range, oracle: Oracle, tmp_path: Path) -> None:
    compare(seeded(seeds, False), oracle, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seeds", BATCHES[::2], ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_jobs_on_sqlite_and_fakeredis(seeds: range, redis_oracle: Oracle, tmp_path: Path) -> None:
    """The oracle kills clients of a real server, the tool works on fakeredis."""
    with fakeredis.FakeRedis() as client:
        compare(seeded(seeds, True), redis_oracle, tmp_path, client)


@pytest.mark.long
@pytest.mark.parametrize("seeds", BATCHES[1::2], ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_jobs_on_sqlite_and_redis(seeds: range, redis_socket: str, redis_oracle: Oracle, tmp_path: Path) -> None:
    with redis.Redis(unix_socket_path=redis_socket) as client:
        compare(seeded(seeds, True), redis_oracle, tmp_path, client)


KNOWN: list[Job] = [
    known_jobs.raw_commit_after_a_read,
    known_jobs.crash_failure_crash,
    known_jobs.failure_leads_back,
    known_jobs.beyond_repair_and_not_stuck,
]
KNOWN_WITH_REDIS: list[Job] = [known_jobs.redis_only_after_a_crash, known_jobs.locked_until_the_lock_ends]


@pytest.mark.parametrize("job", KNOWN, ids=lambda job: job.__name__)
def test_known_jobs(job: Job, oracle: Oracle, tmp_path: Path) -> None:
    compare([(job.__name__, Question(job))], oracle, tmp_path)


@pytest.mark.parametrize("job", KNOWN_WITH_REDIS, ids=lambda job: job.__name__)
def test_known_jobs_with_redis(job: Job, redis_oracle: Oracle, tmp_path: Path) -> None:
    with fakeredis.FakeRedis() as client:
        compare([(job.__name__, Question(job))], redis_oracle, tmp_path, client)


def test_kills_that_the_oracle_spares_change_nothing(oracle: Oracle) -> None:
    """It kills only where something on disk has changed since the step before, and stops when harm was done."""
    for name, question in seeded(range(8), False):
        quick, thorough = oracle.judge(question), oracle.judge(replace(question, crashes=1, thorough=True))
        assert quick.crashes == thorough.crashes or (thorough.crashes is None and quick.crashes != 1), name
        wanted = [problem for problem in quick.problems if problem.crashes <= 1]
        assert all(problem in thorough.problems for problem in wanted), name
        assert all(problem in wanted for problem in thorough.problems), name
