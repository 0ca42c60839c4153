"""One check from start to end: clean runs, closure, hidden memory, replay of what was found, and the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from retrychaos.explore.baseline import Baseline, establish, first_run, make_judge
from retrychaos.explore.canon import Canon
from retrychaos.explore.closure import (
    MAX_DELIVERIES,
    Closure,
    OutOfBudget,
    Relearned,
    Scope,
    State,
    Suspect,
    redelivery,
)
from retrychaos.explore.company import Around, Cast, Company, Orders, whole_run
from retrychaos.explore.draws import uuids_in
from retrychaos.explore.duplicates import Limit, Overlapped, deviation_of, overlap
from retrychaos.explore.interleaving import OutOfTime
from retrychaos.explore.interleaving import Scope as Overlap
from retrychaos.explore.judge import Deviation, Judge, effect_of
from retrychaos.explore.replay import Performance, perform
from retrychaos.explore.runner import Forked, Here, Runner
from retrychaos.explore.schedule import perform_turns
from retrychaos.model.durations import in_words
from retrychaos.model.errors import PlanError
from retrychaos.model.leases import check as check_leases
from retrychaos.model.leases import idle as idle_leases
from retrychaos.model.ledger import Facts
from retrychaos.model.options import DEFAULT_OVERLAP, Options
from retrychaos.model.plan import ERROR, Plan, parse
from retrychaos.model.report import FAILED, INCONCLUSIVE, PROVEN, Delivery, Finding, Ledger, Report, Run
from retrychaos.runtime.delivery import HORIZON, Job, Outcome, Workshop, keep_none
from retrychaos.world.world import Saved

_MOST_FINDINGS = 8
_ALSO_SHOWN = 4
_REMEMBERS = (
    "the job remembers things in the memory of its process (a module global, a cache), which a crash wipes: every "
    "delivery ran in a process of its own"
)
_SHARED_MEMORY = (
    "the job remembers things in the memory of its process (a module global, a cache), which deliveries that "
    "overlap here "
    "would share, and separate workers do not. Keep such things out of memory, or use duplicates=1."
)
_BESIDE = "Rivals and siblings run while a delivery is alive, so with them duplicates=1 is not enough."
_FOR_FAULTS = 0.5
"""Share of the time that crashes have left, after which no further error, lost reply or shutdown is tried."""
_perf_counter = time.perf_counter


@dataclass
class Checked:
    """A report, and the state in which the clean run left the world."""

    report: Report
    clean: Saved | None


class Check:
    """Explores one job in a workshop that has been started.

    `clean_run_done` is called once, after the clean run whose effects the user may look at.
    """

    def __init__(
        self,
        name: str,
        job: Job,
        options: Options,
        workshop: Workshop,
        clean_run_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._job = job
        self._options = options
        self._workshop = workshop
        self._clean_run_done = clean_run_done
        self._started = _perf_counter()
        self._forked: Forked | None = None
        self._orders: Orders | None = None
        self._learned_at: set[int] = set()
        self._faults = 0
        """How many faults other than crashes were tried, one delivery at a time."""
        self._passed_over = 0
        """How many were not."""
        self._enough_faults: float | None = None
        """When no further one is begun."""
        self._telling: frozenset[tuple[str, Hashable]] | None = None
        """Which of them have to be tried where deliveries overlap, with their steps; None: all."""
        self._start = workshop.clock.base
        self._cast = Cast.of(options)
        self._jobs = [Job(other.function, other.args) for other in self._cast.others]
        self.canon = Canon(workshop.clock, workshop.chance, workshop.world.found_facts)

    # -- the two questions ------------------------------------------------------------------------------------------

    def explore(self) -> Checked:
        """Is the job idempotent?"""
        runner: Runner = Here(self._workshop, self._job, self._jobs)
        first = first_run(runner, self._start, self._limit(), not self._cast.siblings)
        self._clean_run_done()
        states = [self._found(), *(change.facts for change in first.changes), first.facts]
        check_leases(self._options.leases, states)
        clean = first.saved
        if not first.changes and not self._cast.siblings:
            return Checked(self._unseen(first), clean)
        if self._options.isolation == "process":
            return Checked(self._close(self._fork(), None, "every delivery ran in a process of its own"), clean)
        if first.changes and first.end == "done":
            self._sample_ahead(first)
        report = self._close(runner, first)
        return Checked(report, clean)

    def run(self, token: str) -> tuple[Run, Saved | None]:
        """What comes of one plan?"""
        plan = parse(token, self._name)
        runner: Runner = Here(self._workshop, self._job, self._jobs)
        first = first_run(runner, self._start, self._limit(), not self._cast.siblings)
        self._clean_run_done()
        if plan.turns:
            return self._run_turns(plan, runner, first), first.saved
        runner = self._fork()  # a plan may rest on memory that only a fresh process has lost
        found = self._found()
        again = first_run(runner, self._start, self._limit(), not self._cast.siblings)
        _, company = self._establish(runner, again, found)
        done = perform(plan, runner, self._start, self._limit())
        deviation, after = self._deviation(done, company)
        plan = replace(plan, steps=sum(len(delivery.steps) for delivery in done.timeline))
        differences = deviation.differences if deviation else ()
        kind, effect = (deviation.kind, deviation.effect) if deviation else ("", "")
        return Run(plan, (*done.timeline, *after), differences, kind, effect), first.saved

    def _run_turns(self, plan: Plan, runner: Runner, first: Outcome) -> Run:
        _, company = self._establish(runner, first, self._found())
        if plan.turns[0].kind == "order":
            if self._orders is None:
                raise PlanError("the token no longer fits: it is an order of messages, and no siblings are given now.")
            found, served = self._orders.replay(plan, self._make_judge)
            plan = replace(plan, steps=sum(len(delivery.steps) for delivery in served.timeline))
            if found is None:
                return Run(plan, served.timeline, ())
            return Run(plan, served.timeline, found.differences, found.kind, found.effect)
        others = self._cast.others
        done = perform_turns(plan, self._workshop, self._job, self._start, self._limit(), others)
        deviation, timeline = deviation_of(done, company)
        plan = replace(plan, steps=sum(len(delivery.steps) for delivery in done.timeline))
        if deviation is None:
            return Run(plan, timeline, (), moments=done.moments)
        return Run(plan, timeline, deviation.differences, deviation.kind, deviation.effect, done.moments)

    # -- exploring --------------------------------------------------------------------------------------------------

    def _close(self, runner: Runner, first: Outcome | None, note: str = "") -> Report:
        if first is None:
            first = first_run(runner, self._start, self._limit(), not self._cast.siblings)
        found = self._found()
        baseline, company = self._establish(runner, first, found)
        if baseline.unstable:
            doubts = [*first.doubts, *baseline.second.doubts]
            if isinstance(runner, Here) and not doubts:
                return self._close(self._fork(), None, _REMEMBERS)  # the first run may have left memory to the second
            return self._inconclusive([*doubts, baseline.unstable][0], _ledger(baseline), len(first.steps))
        if self._orders is not None and self._options.order:
            findings = self._orders.reordered(self._make_judge)
            if findings:
                return self._depends_on_order(findings, baseline, company)
        if not _has_effect(first):
            return self._with_duplicates(self._uncovered(baseline, company), baseline, company, note == _REMEMBERS)
        spent = False
        while True:
            closure = self._closure(runner, baseline, company)
            try:
                closure.explore()
                if self._options.faults and not closure.suspects:
                    closure.explore_faults()
            except OutOfBudget:
                spent = True
            except Relearned:
                judge = make_judge(self.canon, baseline.whole, found, self._options)
                baseline = replace(baseline, judge=judge)
                company = Company(company.around, judge, self._cast, self._judges())
                continue
            break
        try:
            if isinstance(runner, Here) and not spent and self._remembers(closure):
                return self._close(self._fork(), None, _REMEMBERS)
        except OutOfBudget:
            spent = True
        if isinstance(runner, Here):
            self._fork().end()
        self._faults, self._passed_over = closure.faults, closure.passed_over
        if not self._cast.visits and not self._options.thorough:
            steps = baseline.run.steps
            self._telling = frozenset((fault.kind, steps[fault.step - 1].signature) for fault in closure.telling)
        report = self._report(runner, baseline, closure, company, spent, note)
        if report.verdict != PROVEN or (self._options.duplicates == 1 and not self._cast.visits):
            return report
        return self._with_duplicates(report, baseline, company, note == _REMEMBERS, closure.bounded)

    def _depends_on_order(self, findings: list[Finding], baseline: Baseline, company: Company) -> Report:
        report = self._inconclusive("", _ledger(baseline), len(baseline.run.steps))
        said = f"none: whole runs in another order leave another ledger{self._company_said()}"
        return replace(report, verdict=FAILED, guarantee=said, findings=tuple(findings), runs=company.around.runs)

    def _uncovered(self, baseline: Baseline, company: Company) -> Report:
        """A job that has something to do only after others: there is nothing to say of it alone."""
        report = self._inconclusive("", _ledger(baseline), len(baseline.run.steps))
        warnings = tuple(company.around.notes)
        return replace(report, verdict=PROVEN, guarantee="", states=0, runs=company.around.runs, warnings=warnings)

    def _with_duplicates(
        self, report: Report, baseline: Baseline, company: Company, remembers: bool, bounded: bool = False
    ) -> Report:
        """The job is right under crashes, one delivery at a time. Is it, where they overlap?"""
        if remembers:
            return self._doubtful(report, Overlapped(reason=_SHARED_MEMORY))
        most = self._options.crashes
        crashes = None if most == "any" else int(most)
        scope = Overlap(
            self._options.duplicates,
            crashes,
            self._options.late == "slow",
            faults=self._options.faults,
            anywhere=self._options.thorough,
            telling=self._telling,
            leased=bool(self._options.leases),
        )
        steps, limit = len(baseline.run.steps), self._overlap_limit()
        company.around.limit, company.around.spent = limit, OutOfTime
        spaces = not baseline.knows_ids

        def fixed() -> frozenset[int]:
            return uuids_in(baseline.run.facts) & uuids_in(baseline.second.facts)

        done = overlap(self._name, self._workshop, self._job, company, self._start, scope, steps, limit, spaces, fixed)
        report = replace(
            report,
            states=report.states + done.states,
            runs=report.runs + done.runs,
            seconds=_perf_counter() - self._started,
            warnings=(*report.warnings, *(note for note in done.notes if note not in report.warnings)),
        )
        if done.findings:
            plan = min((finding.plan for finding in done.findings), key=_mishaps)
            alone = self._options.duplicates == 1
            when = "when other code comes in between" if alone else "when deliveries overlap"
            return replace(
                report,
                verdict=FAILED,
                findings=done.findings,
                guarantee=f"none: a fault shows {when}, with {_count(plan.crashes)}{_besides(plan)}"
                f"{self._tail(baseline.judge)}",
            )
        if done.reason or done.spent:
            if done.reason and self._cast.visits:
                done = replace(done, reason=f"{done.reason} {_BESIDE}")
            return self._doubtful(report, done)
        said = "any number of crashes" if most == "any" else f"up to {_count(int(most))}"
        tail = self._tail(baseline.judge, done)
        bound = f", at most {MAX_DELIVERIES} deliveries" if bounded or done.bounded else ""
        late = self._when()
        how = f"one delivery at a time, redelivered {late}"
        if self._options.duplicates > 1:
            up_to = f"up to {self._options.duplicates} deliveries that overlap in every order of their steps"
            jam = ", of which one at a time waits for the end of a transaction" if done.jammed else ""
            how = f"redelivered {late}, and {up_to}{jam}"
        return replace(
            report,
            guarantee=(
                f"{said}{bound} at any of {len(baseline.run.steps) + 1} boundaries, {how}: the ledger is that of a "
                f"clean run ({_states(report.states)}, closed){tail}"
            ),
        )

    def _doubtful(self, report: Report, done: Overlapped) -> Report:
        covered = f"Proven so far, one delivery at a time: {report.guarantee}"
        reason = done.reason
        if done.spent:
            reason = (
                f"the budget ran out after {_states(done.states)} of deliveries that overlap (every order with less "
                f"than {_count(done.switches, 'switch')} between them) and {done.sampled} random schedules; no fault "
                "was found so far. Raise the option budget to go on."
            )
        return replace(
            report,
            verdict=INCONCLUSIVE,
            guarantee=f"none: {reason}",
            stop_reason=reason,
            budget_spent=done.spent and not done.reason,
            notes=(*report.notes, *([covered] if report.guarantee else [])),
        )

    def _overlap_limit(self) -> Limit:
        """The time for deliveries that overlap."""
        budget = self._options.budget
        if budget is None and not self._cast.visits and not self._options.thorough:
            return Limit(DEFAULT_OVERLAP)
        return Limit(max(0.0, self._started + self._options.seconds - _perf_counter()))

    def _establish(self, runner: Runner, first: Outcome, found: Facts) -> tuple[Baseline, Company]:
        """The baseline, and who judges by it."""
        around = Around(
            runner, self._cast.others, self.canon.fingerprint, self._start, self._limit_or_stop, OutOfBudget
        )

        def follow(outcome: Outcome, shifted: bool) -> Outcome:
            return whole_run(around, outcome, self._cast, shifted, self._limit())

        limit = self._limit()
        if not _has_effect(first) and self._cast.siblings:
            orders = self._orders = Orders(self._name, around, self._cast, self._limit)
            unstable = orders.learn(self.canon, self._options)
            some = next(order for order in orders.messages() if not orders.serve(order).stuck)
            served, second = orders.serve(some), orders.serve(some, shifted=True)
            judge = self._make_judge(served.outcome)
            baseline = Baseline(served.own, served.outcome, second.outcome, judge, unstable)
            return baseline, Company(around, judge, self._cast, self._judges())
        baseline = establish(runner, self.canon, first, found, self._options, self._start, limit, follow)
        if self._cast.visits and not baseline.unstable:
            self._orders = Orders(self._name, around, self._cast, self._limit)
            unstable = self._orders.learn(self.canon, self._options)
            baseline = replace(baseline, judge=self._make_judge(baseline.whole), unstable=unstable)
        return baseline, Company(around, baseline.judge, self._cast, self._judges())

    def _make_judge(self, outcome: Outcome) -> Judge:
        return make_judge(self.canon, outcome, self._found(), self._options)

    def _judges(self) -> dict[frozenset[int], list[Judge]]:
        """The judges of serial orders, if anybody else is there."""
        return {} if self._orders is None else self._orders.judges(self._make_judge)

    def _closure(self, runner: Runner, baseline: Baseline, company: Company) -> Closure:
        crashes = self._options.crashes
        most = None if crashes == "any" else int(crashes)
        scope = Scope(most, bool(self._options.late), self._options.thorough)
        limit = self._limit_or_stop
        return Closure(
            self._name,
            runner,
            self.canon,
            baseline,
            self._found(),
            self._start,
            scope,
            limit,
            company,
            self._learned_at,
            self._has_time_for_faults,
        )

    def _found(self) -> Facts:
        return self._workshop.world.found_facts

    def _sample_ahead(self, first: Outcome) -> None:
        """Where forks can have a world of their own, the first sample of _remembers() runs beside the closure."""
        last = first.changes[-1]
        if self._workshop.world.private and not first.doubts:
            self._fork().begin(redelivery(last.saved, last.clock, 2, self._limit()))

    def _remembers(self, closure: Closure) -> bool:
        """Run a sample again where nothing can be remembered: does the job do the same there?"""
        samples: list[tuple[State, Saved | None]] = []
        if closure.final is not None and closure.final.parent is not None and closure.final.kept is not None:
            samples.append((closure.final, closure.final.kept))
        if closure.last is not None and closure.last[0] is not closure.final:
            samples.append(closure.last)
        if not samples:
            return False
        forked = self._fork()
        for state, saved in samples:
            order = replace(closure.order(state, state.wait), start=saved, ends=False)
            beside = forked.begun(order)
            if beside is not None and beside.end != "stopped" and closure.digest(beside) == state.digest:
                continue
            outcome = forked.run(order, keep_none)  # differences count only if it was alone
            if outcome.end == "stopped":
                if not outcome.doubts:
                    raise OutOfBudget  # a sample that did not end has shown nothing
                closure.doubts += outcome.doubts
            elif closure.digest(outcome) != state.digest:
                return True
        return False

    # -- the verdict ------------------------------------------------------------------------------------------------

    def _report(
        self, runner: Runner, baseline: Baseline, closure: Closure, company: Company, spent: bool, note: str
    ) -> Report:
        findings, unconfirmed = self._findings(runner, closure, company)
        closure.doubts += [doubt for doubt in company.around.doubts if doubt not in closure.doubts]
        closure.notes += [each for each in company.around.notes if each not in closure.notes]
        reason = ""
        if findings:
            verdict = FAILED
        elif closure.doubts or unconfirmed:
            verdict, reason = INCONCLUSIVE, (closure.doubts + unconfirmed)[0]
            spent = False
        elif spent:
            verdict = INCONCLUSIVE
            states = len(closure.states)
            done = f"{states - closure.waiting} of at least {states} states"
            if closure.calm_closed:
                done = f"all crashes and {closure.faults} errors, lost replies and shutdowns ({done})"
            reason = (
                f"the budget of {self._options.seconds:g} s ran out after {done}; no fault was found so far. Raise the "
                "option budget to go on."
            )
        else:
            verdict = PROVEN
        warnings = list(closure.notes)
        if closure.passed_over:
            warnings.append(
                f"{closure.passed_over} of {closure.passed_over + closure.faults} errors, lost replies and shutdowns "
                "were not tried, for lack of time. Raise the option budget, or say faults=False if they do not matter"
            )
        unneeded = [each for each in self._options.tolerate if each not in baseline.judge.tolerated]
        if verdict == PROVEN and unneeded:
            warnings.append(f"tolerate={unneeded} was not needed: no effect of that name happened more than once")
        found = ((change.clock, change.facts) for change in baseline.whole.changes)
        if idle := idle_leases(self._options.leases, ((self._start, self._found()), *found)):
            warnings.append(
                f"leases={idle}: in the clean run no time stands there that was still to come, so nothing was waited "
                f"for. If it is when a claim was made, say how long it lasts, such as '{idle[0]}+5m'"
            )
        return Report(
            job=self._name,
            verdict=verdict,
            guarantee=self._guarantee(verdict, baseline, closure, reason),
            findings=tuple(findings),
            baseline=_ledger(baseline),
            states=len(closure.states) - closure.waiting,
            runs=closure.runs + company.around.runs,
            boundaries=closure.boundaries,
            stop_reason=reason,
            budget_spent=spent and verdict == INCONCLUSIVE,
            seconds=_perf_counter() - self._started,
            steps=len(baseline.run.steps),
            notes=(
                *([note] if note else []),
                *_left_behind(baseline.judge),
                *closure.doubts[1 if verdict == INCONCLUSIVE else 0 :],
            ),
            warnings=tuple(warnings),
        )

    def _guarantee(self, verdict: str, baseline: Baseline, closure: Closure, reason: str) -> str:
        most = self._options.crashes
        crashes = "any number of crashes" if most == "any" else f"up to {most} crash{'' if most == 1 else 'es'}"
        late = self._when()
        bound = f", at most {MAX_DELIVERIES} deliveries" if closure.bounded else ""
        tail = self._tail(baseline.judge)
        boundaries = len(baseline.run.steps) + 1
        if verdict == PROVEN:
            return (
                f"{crashes}{bound} at any of {boundaries} boundaries, one delivery at a time, redelivered {late}: "
                f"the ledger is that of a clean run ({_states(len(closure.states))}, closed){tail}"
            )
        if verdict == INCONCLUSIVE:
            return f"none: {reason}"
        plan = min((suspect.plan for suspect in closure.suspects), key=_mishaps)
        return f"none: a fault shows with {_count(plan.crashes)}{_besides(plan)}{tail}"

    def _when(self) -> str:
        """When a message comes back."""
        if not self._options.late:
            return "at once"
        slow = f", and workers as slow {self._options.duplicates} times" if self._options.late == "slow" else ""
        real = any(version.real_time for version in self._found().values())
        but = " (the clock of PostgreSQL does not move)" if real else ""
        return f"at once, after each expiry, and after {in_words(HORIZON)}{slow}{but}"

    def _tail(self, judge: Judge, overlapped: Overlapped | None = None) -> str:
        """The end of a guarantee: what else was tried and declared."""
        needed = ", ".join(sorted(judge.tolerated))
        tolerated = f"; tolerated: {needed} more than once" if needed else ""
        ignored = f"; not compared: {', '.join(self._options.volatile)}" if self._options.volatile else ""
        tried = ""
        if self._faults or self._passed_over:
            where = "every delivery" if self._options.thorough else "the first delivery"
            share = f" of {self._faults + self._passed_over}, for lack of time" if self._passed_over else ""
            tried = f"; errors, lost replies and shutdowns ({self._faults}{share}) at the steps of {where}"
            if overlapped is not None and overlapped.cut:
                tried += ", but for lack of time not with all that others can do after that"
            elif overlapped is not None and self._options.duplicates > 1:
                tried += ", one of them where they overlap" if self._options.thorough else ", and others after that"
        return f"{tried}{tolerated}{ignored}{self._company_said()}"

    def _company_said(self) -> str:
        """The other jobs, as the guarantee has them."""
        siblings = "with siblings" + (" in every order" if self._options.order else "")
        said = (
            ("with rivals", self._options.rivals),
            (siblings, self._options.siblings),
            ("followed by", self._options.then),
        )
        return "".join(f"; {word}: {', '.join(each.name for each in others)}" for word, others in said if others)

    def _findings(self, runner: Runner, closure: Closure, company: Company) -> tuple[list[Finding], list[str]]:
        """The smallest plan of each cause, replayed; and why some could not be confirmed."""
        groups: dict[tuple[str, str], list[Suspect]] = {}
        for suspect in closure.suspects:
            groups.setdefault((suspect.kind, suspect.effect), []).append(suspect)
        findings: list[Finding] = []
        unconfirmed: list[str] = []
        for (kind, effect), suspects in list(groups.items())[:_MOST_FINDINGS]:
            suspect = min(suspects, key=lambda each: each.size)
            try:
                done = perform(suspect.plan, runner, self._start, self._limit())
            except PlanError as problem:
                unconfirmed.append(f"a fault was found that does not repeat: the job is not deterministic. {problem}")
                continue
            deviation, after = self._deviation(done, company)
            if deviation is None or deviation.kind != kind:
                unconfirmed.append(
                    f"a fault was found that does not repeat ({kind} {effect}, plan {suspect.plan.token}), so the job "
                    "is not deterministic. Look for random choices and the time of day."
                )
                continue
            also = sorted({each.state.place for each in suspects if each is not suspect} - {suspect.state.place, ""})
            plan = replace(suspect.plan, steps=sum(len(delivery.steps) for delivery in done.timeline))
            findings.append(
                Finding(
                    kind,
                    effect,
                    plan,
                    (*done.timeline, *after),
                    deviation.differences,
                    tuple(also[:_ALSO_SHOWN]),
                    max(0, len(also) - _ALSO_SHOWN),
                    deviation.reason,
                    late=suspect.late,
                )
            )
        return findings, unconfirmed

    def _deviation(self, done: Performance, company: Company) -> tuple[Deviation | None, tuple[Delivery, ...]]:
        """How the ledger differs, and the deliveries of other jobs after those of the plan."""
        if done.end == "done":
            found, ran = company.follow(done.facts, done.elapsed, done.saved, len(done.timeline) + 1)
            return found, ran.timeline
        found = company.compare(done.facts, done.elapsed)
        differences = found.differences if found else ()
        reason = "no later delivery gets further"
        return Deviation("stuck", done.error or "it waits for ever", differences, reason), ()

    def _unseen(self, first: Outcome) -> Report:
        """Nothing changed in the ledger, but the job has done something outside of it."""
        return self._inconclusive(first.doubts[0], Ledger(), len(first.steps))

    def _inconclusive(self, reason: str, ledger: Ledger, steps: int) -> Report:
        return Report(
            job=self._name,
            verdict=INCONCLUSIVE,
            guarantee=f"none: {reason}",
            findings=(),
            baseline=ledger,
            states=1,
            runs=2,
            boundaries=steps + 1,
            stop_reason=reason,
            seconds=_perf_counter() - self._started,
            steps=steps,
        )

    # -- time and processes -----------------------------------------------------------------------------------------

    def _limit(self) -> float:
        """Seconds for one delivery: what is left of the budget, and a little more for one that has begun."""
        left = self._options.seconds - (_perf_counter() - self._started)
        return max(left, 1.0)

    def _has_time_for_faults(self) -> bool:
        """A long job has very many. What is not asked for must not use up the time for what follows from others."""
        now, end = _perf_counter(), self._started + self._options.seconds
        if self._enough_faults is None:
            self._enough_faults = now + _FOR_FAULTS * (end - now)
        return self._options.thorough or now < self._enough_faults

    def _limit_or_stop(self) -> float:
        if _perf_counter() - self._started > self._options.seconds:
            raise OutOfBudget
        return self._limit()

    def _fork(self) -> Forked:
        assert self._forked is not None
        return self._forked

    def begin(self) -> None:
        """The process that others are forked from begins before the job has run for the first time."""
        self._forked = Forked(self._workshop, self._job, self._jobs)

    def close(self) -> None:
        """No process is left."""
        if self._forked is not None:
            self._forked.close()
            self._forked = None


def _ledger(baseline: Baseline) -> Ledger:
    rows: dict[str, dict[str, int]] = {}
    judge = baseline.judge
    for resource, version in baseline.whole.facts.items():
        found = judge.canon.neutral.get(resource)
        for name, relation in version.relations.items():
            before = found.relations.get(name) if found is not None else None
            if before is relation or (name == "schema" and before is not None and before.rows == relation.rows):
                continue  # the job has left it alone
            for row in relation.rows:
                view = judge.canon.view((resource, name), relation, row)
                counted = rows.setdefault(effect_of(relation, view), {})
                text = judge.describe(relation, row, view)
                counted[text] = counted.get(text, 0) + 1
    return Ledger(rows)


def _has_effect(first: Outcome) -> bool:
    return first.end == "done" and bool(first.changes or first.doubts)


def _left_behind(judge: Judge) -> list[str]:
    if not judge.faded:
        return []
    return [f"a crash leaves {', '.join(sorted(judge.faded))} behind until it expires; that was not counted as a fault"]


def _mishaps(plan: Plan) -> int:
    return plan.crashes + len(plan.faults)


def _besides(plan: Plan) -> str:
    """What else goes wrong in a plan than crashes."""
    return "".join(f" and {'an' if fault == ERROR else 'a'} {fault}" for fault in plan.faults)


def _count(number: int, thing: str = "crash") -> str:
    return f"{number} {thing}{'' if number == 1 else 'es'}"


def _states(count: int) -> str:
    return "1 state" if count == 1 else f"{count} states"
