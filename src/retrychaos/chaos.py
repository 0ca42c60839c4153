"""The face of the library: ``Chaos`` checks jobs, in pytest through the fixture ``chaos``, elsewhere by itself."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import secrets
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from retrychaos.declared import Files
from retrychaos.explore.check import Check
from retrychaos.model.errors import ChaosError, ChaosWarning, IdempotencyError, LateError
from retrychaos.model.options import Options
from retrychaos.model.plan import Leg, Plan
from retrychaos.model.report import INCONCLUSIVE, Report, Run
from retrychaos.report.text import full_text
from retrychaos.runtime.chance import Chance
from retrychaos.runtime.clock import Clock
from retrychaos.runtime.delivery import Job, Workshop
from retrychaos.world.calls import MISSING, Calls, Watched
from retrychaos.world.escapes import Escapes
from retrychaos.world.http import Http
from retrychaos.world.mail import Mails
from retrychaos.world.mailbox import Mailbox
from retrychaos.world.resource import Source
from retrychaos.world.sqlite_elders import Elders
from retrychaos.world.sqlite_hooks import SqliteSource
from retrychaos.world.world import Again, Saved, World

if TYPE_CHECKING:
    import redis
    from sqlalchemy import Engine

    from retrychaos.world.postgres_hooks import PostgresSource

_Answer = TypeVar("_Answer")
_running = False
_checks: Counter[str] = Counter()
"""How often each job was checked in this process."""


class Chaos:
    """Checks jobs under a simulated at-least-once runtime.

    Options are those of :class:`~retrychaos.model.options.Options`; an unknown one raises OptionError. ``chaos(...)``
    gives the same object with other options. As a context manager it removes its embedded world at the end.
    """

    def __init__(self, **options: Any) -> None:
        self.options = Options().with_changes(options)
        self.replay: str | None = None
        """A token: check() and explore() then perform only that plan."""
        self.belongs: Callable[[str], bool] | None = None
        """Does the token belong to the job of that name? A job of another name is delivered once, without faults."""
        self.reports: list[Report] = []
        """Every report so far, of this object and of those made from it with other options."""
        self.streams: list[Any] = []
        """Open files (or what fstat says of them) that are not the job's: what is written there is no effect."""
        self._calls = Calls()
        self._http = Http()
        self._embedded = _Embedded()
        self._mailbox = Mailbox()
        self._files = Files(self._embedded.folder / "files")
        self._earlier: list[_Earlier] = []
        self._elders = Elders()

    def __call__(self, **options: Any) -> Chaos:
        """The same world and the same watched calls, with other options."""
        other = Chaos.__new__(Chaos)
        other.__dict__.update(self.__dict__)
        other.options = self.options.with_changes(options)
        return other

    def __enter__(self) -> Chaos:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the embedded world."""
        self._embedded.close()

    # -- checking ---------------------------------------------------------------------------------------------------

    def check(self, job: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
        """Judge `job` called with these arguments, and raise IdempotencyError unless it is proven.

        Afterwards the world is as one clean run left it, so that a test can go on and assert. Checking the same job
        again begins from the state before, unless the world has been changed in between. Passes with a warning if
        only the budget ran out. Raises ChaosError if there is nothing to check: the job fails or does nothing in the
        clean run, or its world cannot be restored.
        """
        __tracebackhide__ = True
        return self._check(job_name(job), job, args, kwargs)

    def explore(self, job: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
        """As check(), without raising for the verdict."""
        return self._explore(job_name(job), job, args, kwargs)

    def run(self, job: Callable[..., Any], /, *args: Any, plan: str, **kwargs: Any) -> Run:
        """Perform one plan, given by its token. Raises PlanError if the token does not fit."""
        return self._run(job_name(job), job, args, kwargs, plan)

    def watch(self, owner: object, name: str, *, result: Any = MISSING, key: str | None = None) -> Watched:
        """Declare a function or method as an effect.

        result: what a call returns instead of going through: a value, a function of the same arguments, or an
        exception to raise. key: name of the argument on which the receiver deduplicates; calls with an equal key count
        once. The returned object lists in ``calls`` what arrived in the clean run.
        """
        return self._calls.watch(owner, name, result=result, key=key)

    # -- the embedded world -----------------------------------------------------------------------------------------

    @property
    def http(self) -> Http:
        """Providers that answer HTTP requests inside the process: ``chaos.http.provider("https://api.pay.test")``."""
        return self._http

    @property
    def sql(self) -> Engine:
        """A SQLAlchemy engine on a SQLite file of this test."""
        return self._embedded.sql

    @property
    def redis(self) -> redis.Redis:
        """A redis-py client on a fakeredis server of this test."""
        return self._embedded.redis

    @property
    def files(self) -> Files:
        """A temporary folder of this test, whose files belong to the ledger; ``files(path)`` declares another one."""
        return self._files

    @property
    def mail(self) -> Mailbox:
        """The mails of the clean run, after a check. Jobs reach it instead of any SMTP server."""
        return self._mailbox

    # -- inside -----------------------------------------------------------------------------------------------------

    def _check(self, name: str, job: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Report:
        __tracebackhide__ = True
        report = self._explore(name, job, args, kwargs)
        if not report.ok:
            raise IdempotencyError(full_text(report), report)
        if report.verdict == INCONCLUSIVE and self.replay is None:
            warnings.warn(f"{name}: {report.stop_reason}", ChaosWarning, stacklevel=3)
        for warning in report.warnings:
            warnings.warn(f"{name}: {warning}", ChaosWarning, stacklevel=3)
        return report

    def _explore(self, name: str, job: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Report:
        if self.replay is not None:
            if self.belongs is not None and not self.belongs(name):
                plain = Plan(name, (Leg(),))
                return _report_of(name, self._run(name, job, args, kwargs, plain.token))
            replayed = _report_of(name, self._run(name, job, args, kwargs, self.replay))
            self.reports.append(replayed)
            return replayed

        def question(check: Check) -> tuple[Report, Saved | None]:
            done = check.explore()
            return done.report, done.clean

        report = self._ask(name, job, args, kwargs, question)
        silent = [watched.label for watched in self._calls.watched if not watched.seen]
        if silent:
            note = (
                f"watched and never called: {', '.join(silent)}. If the job does call it, watch the function that it "
                "really calls."
            )
            report = replace(report, notes=(*report.notes, note))
        notes = (*report.notes, *self._http.notes())
        report = replace(report, notes=notes, warnings=(*report.warnings, *self._http.warnings()))
        self.reports.append(report)
        return report

    def _run(
        self, name: str, job: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], plan: str
    ) -> Run:
        return self._ask(name, job, args, kwargs, lambda check: check.run(plan))

    def _ask(
        self,
        name: str,
        job: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        question: Callable[[Check], tuple[_Answer, Saved | None]],
    ) -> _Answer:
        """Set up a world, put a question to the job in it, and leave everything as the clean run did, or as it was."""
        _refuse_misuse(job)
        self.options.check_together()
        if _running:
            raise ChaosError("a check is running already in this process: a job under check must not check another.")
        while True:
            try:
                return self._put(name, job, args, kwargs, question)
            except LateError as late:
                if not self._elders.came(late):
                    self._files.declare()

    def _put(
        self,
        name: str,
        job: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        question: Callable[[Check], tuple[_Answer, Saved | None]],
    ) -> _Answer:
        global _running
        _checks[name] += 1
        clock, chance = Clock(), Chance(f"{name} {_checks[name]}")
        world = World(now=clock.now, drew=chance.drew, aside=chance.aside, options=vars(self.options))
        workshop = Workshop(world, clock, chance)
        mails = self._furnish(world, workshop)

        def clean_run_done() -> None:
            self._calls.clean_run_done()
            self._http.clean_run_done()
            mails.clean_run_done()

        this = Job(job, args, kwargs)
        world.again = next((earlier.again for earlier in self._earlier if _same(earlier.job, this)), None)
        self._embedded.let_go()
        check: Check | None = None
        _running = True
        try:
            workshop.start()
            world.adopt(self._calls)
            self._http.adopt()
            check = Check(name, this, self.options, workshop, clean_run_done)
            try:
                check.begin()
                answer, clean = question(check)
            except BaseException:
                self._leave(world, clock, None)
                raise
            self._leave(world, clock, clean)
            if clean is not None:
                self._earlier[:] = [_Earlier(this, Again(world.found(), clean))]
            return answer
        finally:
            _running = False
            workshop.stop()
            world.close()
            self._files.check_over()
            self._http.over()
            if check is not None:
                check.close()

    def _leave(self, world: World, clock: Clock, state: Saved | None) -> None:
        """Put the world into a state (None: as it was found) in which real time can go on."""
        world.shifted = False
        clock.set(clock.base if state is None else state.at)
        world.restore(state)
        world.land(clock.ahead())

    def _furnish(self, world: World, workshop: Workshop) -> Mails:
        """Every source whose library is installed; a job may import it as late as it likes."""
        escapes = Escapes(world, self._calls)
        for stream in self.streams:
            escapes.claim_stream(stream)
        mails = Mails(world, self._mailbox, self._calls)
        sqlite = SqliteSource(world, self._elders)
        servers: PostgresSource | None = None
        sources: list[Source] = [self._calls, self._http, mails]
        if any(map(_is_installed, ("sqlalchemy", "psycopg", "psycopg2"))):
            from retrychaos.world.postgres_hooks import PostgresSource

            servers = PostgresSource(world)
            sources.append(servers)
        if _is_installed("sqlalchemy"):
            from retrychaos.world.sql import SqlSource

            sources.append(SqlSource(world, sqlite, servers))
        if _is_installed("django"):
            from retrychaos.world.django_orm import DjangoSource

            sources.append(DjangoSource(world, sqlite, servers))
        sources.append(sqlite)  # after those that end what they have open by themselves
        if _is_installed("redis"):
            from retrychaos.world.redis import RedisSource

            sources.append(RedisSource(world))
        world.escapes = escapes
        world.sources = [*sources, escapes]
        self._files.furnish(world, workshop)
        workshop.before += [escapes.before_delivery, sqlite.before_delivery]
        workshop.after.append(escapes.after_delivery)
        self._calls.stage = world
        self._calls.clear()
        self._http.begin(world, self._calls)
        return mails


@dataclass(frozen=True)
class _Earlier:
    """The check before: its job, and its world before and after."""

    job: Job
    again: Again


def _same(one: Job, other: Job) -> bool:
    try:
        return one.function == other.function and bool((one.args, one.kwargs) == (other.args, other.kwargs))
    except Exception:  # a payload that cannot be compared
        return False


class _Embedded:
    """Databases of one test, made when asked for."""

    def __init__(self) -> None:
        # Named before any check, so that a job that asks for the database first finds the same in every process.
        self.folder = Path(tempfile.gettempdir(), f"retrychaos-{os.getpid()}-{secrets.token_hex(8)}")
        self._closers: list[Callable[[], None]] = []

    @functools.cached_property
    def sql(self) -> Engine:
        from sqlalchemy import create_engine

        self.folder.mkdir(mode=0o700, exist_ok=True)
        engine = create_engine(f"sqlite:///{self.folder / 'chaos.db'}")
        self._closers.append(engine.dispose)
        return engine

    @functools.cached_property
    def redis(self) -> redis.Redis:
        import fakeredis

        client = fakeredis.FakeRedis(server=fakeredis.FakeServer())
        self._closers.append(client.close)
        return client

    def let_go(self) -> None:
        """No connection is kept that nobody uses: a fork would inherit it, and could not have a database of its own."""
        if "sql" in vars(self):
            self.sql.dispose()

    def close(self) -> None:
        while self._closers:
            self._closers.pop()()
        shutil.rmtree(self.folder, ignore_errors=True)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def job_name(job: Any) -> str:
    """What a job is called in reports and tokens."""
    if isinstance(job, functools.partial):
        return job_name(job.func)
    module = getattr(job, "__module__", None) or type(job).__module__
    name = getattr(job, "__qualname__", None) or type(job).__qualname__
    return f"{module}.{name}"


def _refuse_misuse(job: Any) -> None:
    if not callable(job):
        raise ChaosError(
            f"the job must be something callable, and {job!r} is not. Pass the function and its arguments apart: "
            "chaos.check(charge, order_id), not chaos.check(charge(order_id))."
        )
    if inspect.isgeneratorfunction(job) or inspect.isasyncgenfunction(job):
        raise ChaosError(f"{job_name(job)} is a generator function: calling it runs nothing. Pass what consumes it.")


def _report_of(name: str, run: Run) -> Report:
    """A replay as a report, so that it is shown like a finding."""
    from retrychaos.model.report import FAILED, Finding, Ledger

    only = "only the plan of a token was performed, and it shows no fault; run without --chaos-replay for a verdict"
    findings = (
        () if run.ok else (Finding(run.kind, run.effect, run.plan, run.timeline, run.differences, moments=run.moments),)
    )
    deliveries = len(run.timeline)
    return Report(
        job=name,
        verdict=INCONCLUSIVE if run.ok else FAILED,
        guarantee=f"none: {only}" if run.ok else "none",
        stop_reason=only if run.ok else "",
        budget_spent=run.ok,
        findings=findings,
        baseline=Ledger(),
        states=deliveries,
        runs=deliveries,
        boundaries=run.plan.steps,
        notes=("replay of one plan",),
    )
