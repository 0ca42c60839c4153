"""One delivery under control: boundaries seen, its end told apart, and afterwards its process gone."""

from __future__ import annotations

import gc
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol

from retrychaos.model.ledger import Facts
from retrychaos.model.plan import Fault
from retrychaos.model.step import Site, Step
from retrychaos.model.values import copied
from retrychaos.runtime.chance import Chance
from retrychaos.runtime.clock import Clock
from retrychaos.runtime.loops import Loops
from retrychaos.runtime.patching import Patches
from retrychaos.runtime.watchdog import Stopped, Watchdog
from retrychaos.world.sites import user_site
from retrychaos.world.world import Saved, World

MAX_STEPS = 100_000
"""Steps of one delivery; more is an endless loop."""
IDLE_SLEEPS = 1_000
"""Sleeps in a row during which nothing changes; then the clock goes to the next thing that can happen."""
HORIZON = 21 * 86_400.0
"""Seconds after which no policy tries any more: Sidekiq's 25 retries take about 21 days."""
LADDER = (60.0, 3_600.0, 86_400.0, HORIZON)
"""Seconds to wait where no expiry is known: a minute, an hour, a day, and that."""
_MOST_UNCOLLECTED = 200_000
"""Objects that may be new since the collector has last run."""
_real_getpid = os.getpid
REDELIVERY_DELAY = 1.0
"""Seconds on the clock from a crash to the next delivery: less than the expiry of any sensible lock."""
FIRST_PID = 3_000_001
"""Process ids of deliveries: above what Linux gives out by default, so that they are recognised in data."""
_ASK_ANYWAY = frozenset({"redis", "fakeredis", "sqlalchemy", "logging", "threading", "random", "psycopg", "retrychaos"})
"""Packages that ask for the process id to notice forks, and do nothing else with it."""


class Play(Protocol):
    """Several deliveries at once; see runtime/turns.py."""

    running: Any


@dataclass(frozen=True)
class Job:
    """A callable and its payload."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> object:
        """Run it with a payload of its own, as if parsed anew from the queue. An async one gives its coroutine."""
        return self.function(*copied(self.args), **copied(dict(self.kwargs)))


@dataclass(frozen=True)
class Order:
    """What to deliver from: which state, at which time, with which chance.

    number: the how-manieth delivery of the message it is; gives it a process id of its own.
    traced: note source lines and values of steps, for a timeline.
    shifted: let the stores draw other ids than usual.
    aside: a folder for copies of files, if another process delivers at the same time: nothing may be touched that
        both of them have.
    """

    start: Saved | None
    at: float
    number: int
    seed: str
    traced: bool = False
    shifted: bool = False
    aside: str = ""
    limit: float = 10.0
    job: int = 0
    """Which job is delivered: 0 is the one that is checked, others stand around it."""
    ends: bool = False
    """The state at its end is saved also if it is done, for what comes after it."""
    fault: Fault | None = None


@dataclass(frozen=True)
class Change:
    """The committed state is another one from this boundary on. `boundary` is the number of steps done before it."""

    boundary: int
    facts: Facts
    clock: float
    saved: Saved | None


@dataclass(frozen=True)
class Outcome:
    """How a delivery went.

    end: ``done``; ``failed`` (the job raised: a nack); ``hung`` (it would wait for ever, or never stop making steps);
    ``stopped`` (time was up).
    """

    end: str
    steps: tuple[Step, ...]
    changes: tuple[Change, ...]
    facts: Facts
    saved: Saved | None
    clock: float
    error: str = ""
    trace: str = ""
    """The whole traceback of the job's exception; only if traced."""
    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    cause: Exception | None = None
    """A problem that ends the check: raised past the job."""
    struck: bool = False
    """The fault that was ordered has come."""
    chances: tuple[Fault, ...] = ()
    """Faults that could have come; only if none was ordered."""
    looked: bool = False
    """It has looked at the clock, so another time may make a difference."""


Keep = Callable[[int, Facts], bool]
"""Asked at every change: is this state worth saving?"""
Shutdowns = Callable[[], Mapping[str, Callable[[], BaseException]]]
"""Asked before every step: what can a worker raise in its job that has to end now, by kind of fault?"""


def keep_all(boundary: int, facts: Facts) -> bool:
    return True


def keep_none(boundary: int, facts: Facts) -> bool:
    return False


class Fenced(BaseException):
    """Raised at every further step of a delivery that the harness has ended."""


class Workshop:
    """Runs deliveries one after the other in this process, in the caller's thread."""

    def __init__(self, world: World, clock: Clock, chance: Chance) -> None:
        self.world = world
        self.clock = clock
        self.chance = chance
        self.before: list[Callable[[], None]] = []
        self.after: list[Callable[[], None]] = []
        """Called around each delivery, while it is still recorded."""
        self.loops = Loops(world, clock)
        self._watchdog = Watchdog(self._time_is_up)
        self._running: _Delivery | None = None
        self._patches = Patches()
        self.play: Play | None = None
        """Several deliveries at once are on."""
        self._real_pid = self._pid = os.getpid()
        self._collects = False

    def start(self) -> None:
        # The collector runs between deliveries only: in the middle of one it would end things that others have left
        # over, and after a fork it makes each process copy all the memory that it looks at.
        self._collects = gc.isenabled()
        gc.disable()
        getpid = (os, "getpid", self._getpid)
        self._patches.set_everywhere(getpid, *self.clock.start(self._sleep, self.chance.tick), *self.chance.start())
        self.loops.start()
        self.world.install()

    def stop(self) -> None:
        """Undo every patch. Safe to call at any point after start() has begun."""
        for undo in (
            self._watchdog.disarm,
            self.world.uninstall,
            self.loops.stop,
            self._patches.undo,
            self.chance.stop,
            self.clock.stop,
        ):
            undo()
        if self._collects:
            gc.enable()

    def run(self, job: Job, order: Order, keep: Keep) -> Outcome:
        """Deliver `job` once as `order` says. Never raises what the job raises, except an interruption."""
        if self._collects and gc.get_count()[0] > _MOST_UNCOLLECTED:
            gc.collect()
        world = self.world
        world.shifted, world.traced = order.shifted, order.traced
        self.clock.set(order.at)
        world.restore(order.start)
        self.chance.seed(order.seed)
        self._pid = self.pid_of(order.number)
        delivery = _Delivery(world, self.clock, order, keep, self.loops.shutdowns)
        self.clock.read = False
        threads = set(threading.enumerate())
        world.recorder = self._running = delivery
        for hook in self.before:
            hook()
        try:
            self._watchdog.arm(order.limit)
            try:
                delivery.call(lambda: self.perform(job))
            finally:
                self._watchdog.disarm()
            delivery.finish(self._watchdog.expired)
            for hook in self.after:
                hook()
            for thread in set(threading.enumerate()) - threads:
                if thread.is_alive() and not thread.name.startswith("retrychaos"):
                    delivery.doubt(
                        f"the job left the thread {thread.name!r} running when it returned: what that does after a "
                        "crash is not seen. Join threads before the job returns."
                    )
        finally:
            delivery.fence = delivery.fence or Fenced()
            world.quiet = True
            try:
                if delivery.remains is not None:
                    # Its frames keep sessions and cursors alive; in a process that died they would be gone.
                    traceback.clear_frames(delivery.remains.__traceback__)
                    delivery.remains = None
                notes = self.end_delivery()
            finally:
                world.quiet = False
                world.recorder = self._running = None
                self._pid = self._real_pid
        return delivery.outcome(notes)

    def end_delivery(self) -> list[str]:
        """Nothing that the process had open survives. What a user should know is returned."""
        notes = self.world.end_delivery()
        self.loops.end_delivery()
        return notes

    def perform(self, job: Job) -> None:
        """Call the job, and run to its end what an async one gives."""
        result = job()
        if inspect.iscoroutine(result):
            self.loops.complete(result)

    def pid_of(self, number: int) -> int:
        """The process id of a delivery."""
        return FIRST_PID + number

    def live_in(self, thread: int, pid: int | None) -> None:
        """The thread that runs deliveries from now on, and the process that it is (None: our own)."""
        self.clock.live_in(thread)
        self.chance.live_in(thread)
        self._pid = self._real_pid if pid is None else pid

    def _getpid(self) -> int:
        if self._running is None and self.play is None:
            return _real_getpid()
        if self.play is not None and self.play.running is not None:
            asking = sys._getframe(1).f_globals.get("__name__", "")
            if asking.partition(".")[0] not in _ASK_ANYWAY:
                self.play.running.asked_pid = True
        return self._pid

    def _time_is_up(self) -> None:
        if self._running is not None:
            self._running.stop()

    def _sleep(self, seconds: float) -> None:
        if self.play is not None and self.play.running is not None:
            self.play.running.sleep(seconds)
            return
        if self._running is None or self.world.quiet:
            return
        self._running.sleep(seconds)


class _Delivery:
    """The running delivery: what steps report to."""

    def __init__(self, world: World, clock: Clock, order: Order, keep: Keep, shutdowns: Shutdowns) -> None:
        self.fence: BaseException | None = None
        self.remains: BaseException | None = None
        """What the job raised."""
        self._world = world
        self._clock = clock
        self._order = order
        self._keep = keep
        self._shutdowns = shutdowns
        self._steps: list[Step] = []
        self._changes: list[Change] = []
        start: Facts = order.start.facts if order.start is not None else {}
        self._facts: Facts = {**start, **{name: resource.version for name, resource in world.resources.items()}}
        self._saved = order.start
        self._end = "done"
        self._error = self._trace = ""
        self._doubts: list[str] = []
        self._cause: Exception | None = None
        self._excuse: Exception | None = None
        """Why it may be our fault if it fails."""
        self._lock = threading.RLock()
        self._home = threading.get_ident()
        self._helpers: set[threading.Thread] = set()
        """Threads of the job's own that have done steps."""
        self._idle = 0
        self._rung = 0
        self._struck = False
        self._chances: list[Fault] = []
        if any(self._facts[name] is not version for name, version in start.items()):
            self._note_change()  # something expired between the crash and this delivery

    # -- Recorder ---------------------------------------------------------------------------------------------------

    @property
    def end(self) -> str:
        """See Outcome."""
        return self._end

    def boundary(self, step: Step) -> None:
        with self._lock:
            if self.fence is not None:
                raise self.fence
            if threading.get_ident() != self._home:
                self._count_helpers(step)
            self.look()
            if len(self._steps) >= MAX_STEPS:
                self._give_up("hung")
            self._shut_down()
            if self._order.traced:
                step = replace(step, site=user_site(sys._getframe(2)))
            self._steps.append(step)

    def _count_helpers(self, step: Step) -> None:
        """Several of them do their steps in whatever order the system gives them time."""
        here = threading.current_thread()
        if any(each is not here and each.is_alive() for each in self._helpers):
            self.doubt(
                f"the job works with several threads of its own ({here.name!r} did {step.detail}): their steps come in "
                "any order, and only the orders that came about were tried. Let it do one thing at a time in the test, "
                "with a pool of one thread (max_workers=1)."
            )
        self._helpers.add(here)

    def strike(self, kind: str, make: Callable[[], BaseException]) -> None:
        with self._lock:
            self._strike(Fault(kind, len(self._steps)), make)

    def _strike(self, chance: Fault, make: Callable[[], BaseException]) -> None:
        """Raise it if it was ordered; else note that it could have come."""
        ordered = self._order.fault
        if ordered is None:
            self._chances.append(chance)
        elif ordered == chance and not self._struck and self.fence is None:
            error = make()
            self._struck = True
            self._steps.append(Step("fault", "", chance.kind, f"{chance.kind}: {describe(error)}"))
            raise error

    def _shut_down(self) -> None:
        """The worker is asked to stop before the step that comes now."""
        for kind, make in self._shutdowns().items():
            self._strike(Fault(kind, len(self._steps) + 1), make)

    def refuse(self, problem: Exception) -> NoReturn:
        self.fail(problem)
        raise self.fence or Fenced()

    def fail(self, problem: Exception) -> None:
        self._cause = self._cause or problem
        self.stop()

    def stop(self) -> None:
        """Nothing more of this delivery counts: it ends at its next step."""
        self._end = "stopped"
        self.fence = Fenced()

    def doubt(self, reason: str) -> None:
        if reason not in self._doubts:
            self._doubts.append(reason)

    def observed(self, *values: object) -> None:
        """What a job gets back matters only where deliveries overlap."""

    def enter(self, tells: bool) -> None:
        """Nobody else is running for whom it could wait."""

    def arrive(self) -> None:
        """See enter()."""

    def waits_on(self) -> None:
        """See enter()."""

    def blocked(self) -> bool:
        """Nobody else is running who could end the wait."""
        return False

    def excuse(self, problem: Exception) -> None:
        self._excuse = self._excuse or problem

    # -- the job ----------------------------------------------------------------------------------------------------

    def call(self, job: Callable[[], object]) -> None:
        try:
            job()
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except (Stopped, Fenced):
            pass
        except BaseException as error:
            outcomes = sys.modules.get("_pytest.outcomes")
            if outcomes is not None and isinstance(error, outcomes.OutcomeException):
                raise  # pytest.skip() and the like
            if self.fence is None:
                self._end = "failed"
                self._error = describe(error)
                if self._order.traced:
                    self._trace = "".join(traceback.format_exception(error))
            self.remains = error

    def finish(self, expired: bool) -> None:
        """The job has returned: here is the last boundary, between the last step and the ack."""
        if expired:
            self._end = "stopped"
        if self._cause is None and not expired:
            self.look()

    def sleep(self, seconds: float, site: Site | None = None) -> None:
        """Virtual sleep. Waiting for something that cannot happen otherwise goes on to the next expiry.

        site: the line of user code that waits, if it is not on the stack.
        """
        before = len(self._changes)
        with self._lock:
            if self.fence is not None:
                raise self.fence
            self.look()
            self._shut_down()
            step = sleep_step(seconds, site)
            if self._order.traced and site is None:
                step = replace(step, site=user_site(sys._getframe(2)))
            self._steps.append(step)
            self._idle = self._idle + 1 if len(self._changes) == before else 0
            if len(self._steps) >= MAX_STEPS:
                self._give_up("hung")
            if self._idle >= IDLE_SLEEPS:
                seconds = max(seconds, self._leap())
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        self._clock.set(self._clock.now() + seconds)
        self._world.shift(seconds)

    def _leap(self) -> float:
        """Seconds to the next thing that can happen; ends the delivery when there is none."""
        now = self._clock.now()
        ends = [end for version in self._facts.values() for end in version.expiries if end > now]
        if ends:
            return min(ends) - now + 0.001
        if self._rung >= len(LADDER):
            self._give_up("hung")
        self._rung += 1
        self._idle -= 20
        return LADDER[self._rung - 1]

    # -- inside -----------------------------------------------------------------------------------------------------

    def look(self) -> None:
        if self._world.dirty and self.fence is None:
            self._compare(self._world.facts())

    def _compare(self, facts: Facts) -> None:
        """A resource that is new here was until now in the state in which it was found."""
        known = {**self._world.found_facts, **self._facts}
        changed = any(known[name] is not version for name, version in facts.items())
        if changed or not facts.keys() <= self._facts.keys():
            self._facts = {**known, **facts}
        if changed:
            self._note_change()

    def _note_change(self) -> None:
        boundary = len(self._steps)
        saved = self._world.save() if self._keep(boundary, self._facts) else None
        self._saved = saved
        self._changes.append(Change(boundary, self._facts, self._clock.now(), saved))

    def _give_up(self, end: str) -> NoReturn:
        self._end = end
        self.fence = Fenced()
        raise self.fence

    def outcome(self, notes: list[str]) -> Outcome:
        if self._end in ("failed", "hung"):
            self._cause = self._cause or self._excuse
        if self._cause is None and self._end != "stopped":
            self._compare(self._world.sweep())
            if self._saved is None and self._changes and (self._end != "done" or self._order.ends):
                self._saved = self._world.save()  # where the next delivery begins, if nobody asked for it before
        return Outcome(
            self._end,
            tuple(self._steps),
            tuple(self._changes),
            self._facts,
            self._saved,
            self._clock.now(),
            self._error,
            self._trace,
            tuple(notes),
            tuple(self._doubts),
            self._cause,
            self._struck,
            tuple(dict.fromkeys(self._chances)),
            self._clock.read or any(step.kind == "redis" and _asks_time(step.text) for step in self._steps),
        )


def _asks_time(command: str) -> bool:
    """A Redis command that may ask the server for the time."""
    return command.partition(" ")[0].upper() in ("TIME", "EVAL", "EVALSHA", "EVAL_RO", "EVALSHA_RO", "FCALL")


def sleep_step(seconds: float, site: Site | None) -> Step:
    return Step("sleep", "clock", "sleep", f"sleep({seconds:g})", site)


def describe(error: BaseException) -> str:
    """An exception in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
