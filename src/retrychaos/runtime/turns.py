"""Several deliveries at once: each in a real thread of its own, exactly one running at a time.

A thread hands over at every step, before the step is done. Whoever drives decides who goes on. A delivery that dies is
parked at its boundary: its connections are closed from outside, and it is unwound, fenced off, when all is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType
from typing import NoReturn

from retrychaos.model.ledger import Facts
from retrychaos.model.plan import LOST_REPLY, SHUTDOWNS
from retrychaos.model.step import Site, Step
from retrychaos.runtime.chance import Stream
from retrychaos.runtime.delivery import LADDER, MAX_STEPS, Fenced, Job, Workshop, describe, sleep_step
from retrychaos.runtime.loops import suspended
from retrychaos.runtime.watchdog import Stopped
from retrychaos.world.resource import WAITS
from retrychaos.world.sites import user_site
from retrychaos.world.world import Saved

_ASK_AFTER = 0.0005
"""Seconds after which a server is asked whether a statement waits there."""
_DEADLOCK = 0.005
"""Seconds in which the timer for deadlocks has run out, that is set to 1 ms; where the server does not say so."""
_MOST_LATE = 1.0
"""Seconds in which it has, and the server has said so."""
_GRACE = 2.0
"""Seconds for a thread that was told to end."""
_SHORT_GRACE = 0.3
"""And for the first time, when it may wait for another one that is to end."""
_UNENDED = (
    "the thread of delivery {} could not be ended: it is in a call that never returns. Give the client of the job a "
    "timeout."
)
_Lock = threading.Lock
_Thread = threading.Thread
_Event = threading.Event
_get_ident = threading.get_ident
_monotonic = time.monotonic
_sleep = time.sleep


@dataclass(frozen=True)
class Moved:
    """What came of one move of a delivery: it did a step, and stands before the next, or has ended.

    did: the step that was done; None before the first one. seen: what the job got back, as far as it is known (None:
    not known). end: empty while it lives; ``blocked`` (the step waits for another delivery), ``done``, ``failed`` or
    ``stopped``.
    """

    did: Step | None
    seen: tuple[str, ...] | None
    next: Step | None
    end: str
    error: str = ""
    drew: bool = False
    """It has asked for randomness, or for its process id, at any time up to now."""
    chances: tuple[str, ...] = ()
    """Kinds of faults that could have come at the step that was done, or that waits."""


class Hung(Exception):
    """A delivery did not come back: it waits for something that is no step, or cannot be followed."""


class Actor:
    """One delivery in a thread of its own. It is what steps report to while it runs."""

    def __init__(self, play: Play, job: Job, number: int, seed: str, pid: int) -> None:
        self.number = number
        self.pid = pid
        self.fence: BaseException | None = None
        self.dead = False
        self.pending: Step | None = None
        self.pause = 0.0
        """Seconds for which it is about to sleep."""
        self.place = 0
        """Where in its code it sleeps, all callers included."""
        self.end = ""
        self.error = ""
        self.surface = False
        """The step that waits fails now, instead of waiting on."""
        self.fault = ""
        """The kind of fault that is to come at the step that it stands before."""
        self.struck = ""
        """What it has raised."""
        self._chances: dict[str, Callable[[], BaseException]] = {}
        """Faults that can come before this step, or could have come."""
        self.stream = Stream(seed)
        self.asked_pid = False
        self.cause: BaseException | None = None
        self.thread = _Thread(target=self._main, args=(job,), name=f"delivery-{number}", daemon=True)
        self.go = _Lock()
        self.go.acquire()
        self._play = play
        self._seen: list[str] | None = None
        self._blocked = False
        self.inside = False
        """Its statement is in the server."""
        self.away = False
        """Others go on while its statement waits in the server."""
        self.arrived = _Event()
        """Its statement has come back meanwhile, and it stands still."""
        self.looked = _Event()
        """The server has looked whether it waits in a circle."""
        self.tells = False
        """It says so when the server has looked."""
        self.since = 0.0
        """When it was seen to wait in the server."""
        self.settled = False
        """And whoever drives knows of it."""
        self.guard = _Lock()
        self._did: Step | None = None

    # -- in its own thread ------------------------------------------------------------------------------------------

    def _main(self, job: Job) -> None:
        self.go.acquire()
        end, error = "done", ""
        try:
            if self.fence is None:
                self._play.perform(job)
        except (Stopped, Fenced):
            end = "stopped"
        except BaseException as problem:
            end, error = "failed", describe(problem)
            outcomes = sys.modules.get("_pytest.outcomes")
            if isinstance(problem, KeyboardInterrupt | GeneratorExit) or (
                outcomes is not None and isinstance(problem, outcomes.OutcomeException)
            ):
                self.cause = problem
            del problem
        finally:
            self.pending = None
            self.end, self.error = (end, error) if self.fence is None else ("stopped", "")
            with contextlib.suppress(RuntimeError):  # nobody waits any more: it was given up
                self._play.back.release()

    def boundary(self, step: Step) -> None:
        if _get_ident() != self.thread.ident:
            self._stray(step)
            return
        if self.fence is not None:
            raise self.fence
        if self._play.traced and step.site is None:
            step = replace(step, site=user_site(sys._getframe(2)))
        self.pending = step
        self._hand_over()
        self._did, self._seen = step, None
        self._chances.clear()
        for kind, make in self._play.shutdowns().items():
            self.strike(kind, make)

    def strike(self, kind: str, make: Callable[[], BaseException]) -> None:
        self._chances[kind] = make
        if self.fault == kind and self.fence is None and _get_ident() == self.thread.ident:
            self._raise(kind)

    def _raise(self, kind: str) -> NoReturn:
        error = self._chances[kind]()
        self.fault, self.struck = "", f"{kind}: {describe(error)}"
        # All that the job gets to know of its step is this error.
        self._seen = ["fault" if kind == LOST_REPLY else "error", self.struck]
        raise error

    def observed(self, *values: object) -> None:
        """The job gets this back from its step."""
        if self.struck:
            return
        if self._seen is None:
            self._seen = []
        self._seen += [value if isinstance(value, str) else repr(value) for value in values]

    def blocked(self) -> bool:
        """The step cannot be done before another delivery has moved: wait. False if it has to fail."""
        if _get_ident() != self.thread.ident or self.fence is not None:
            return False
        if not self.surface:
            self._blocked = True
            self._hand_over()
            self._blocked = False
            if self.fault in self._chances:
                self._raise(self.fault)
        surface, self.surface = self.surface, False
        return not surface

    def enter(self, tells: bool) -> None:
        self.arrived.clear()
        self.looked.clear()
        self.settled, self.tells, self.inside = False, tells, True

    def waits_on(self) -> None:
        self.looked.set()

    def arrive(self) -> None:
        with self.guard:
            self.inside = False
            away = self.away
        if away:
            self.arrived.set()
            self.go.acquire()
            self.away = False
            if self.fence is not None:
                raise self.fence

    def go_on_without(self) -> bool:
        """Its statement waits in the server: others may move. False if it has just come back."""
        with self.guard:
            self.away = self.inside
            return self.away

    def sleep(self, seconds: float, site: Site | None = None) -> None:
        self.pause = seconds
        self.place = hash((_place_of(sys._getframe(1)), suspended()))
        try:
            self.boundary(sleep_step(seconds, site))
        finally:
            self.pause = 0.0
        self.observed()

    def look(self) -> None:
        """The committed state is read by whoever drives, after every move."""

    def refuse(self, problem: Exception) -> NoReturn:
        self.fail(problem)
        raise self.fence or Fenced()

    def fail(self, problem: Exception) -> None:
        self.cause = self.cause or problem
        self.fence = Fenced()

    def excuse(self, problem: Exception) -> None:
        """A delivery that does not get further says so by itself."""

    def doubt(self, reason: str) -> None:
        if reason not in self._play.doubts:
            self._play.doubts.append(reason)

    def _hand_over(self) -> None:
        self._play.back.release()
        self.go.acquire()
        if self.fence is not None:
            raise self.fence

    def _stray(self, step: Step) -> None:
        other = self._play.of_thread(threading.current_thread())
        if other is not None and other.fence is not None:
            raise other.fence  # it was to end, and has only now come out of what it waited for
        self.doubt(
            f"the job works with threads of its own ({threading.current_thread().name!r} did {step.detail}): steps "
            f"that "
            "overlap within one delivery cannot be put in an order. Two deliveries at once are not covered for it; "
            "duplicates=1 checks crashes only."
        )
        self.fence = Fenced()  # raised at its own next step; a thread of the job's could do nothing with it

    # -- for whoever drives -----------------------------------------------------------------------------------------

    def moved(self) -> Moved:
        seen = None if self._seen is None else tuple(self._seen)
        end = "blocked" if self._blocked or self.away else self.end
        drew, chances = self.asked_pid or self.stream.drew, tuple(sorted(self._chances))
        return Moved(self._did, seen, self.pending, end, self.error, drew, chances)


class Visitor(Actor):
    """Other code than a delivery, which runs whole: it does not hand over at its steps."""

    def __init__(self, play: Play, job: Job, number: int, seed: str, pid: int) -> None:
        super().__init__(play, job, number, seed, pid)
        self.thread.name = f"visitor-{number}"
        self.steps: list[Step] = []
        self.refused = False
        """It would have to wait for a delivery that stands still, so it cannot run here."""

    def boundary(self, step: Step) -> None:
        if _get_ident() != self.thread.ident:
            self._stray(step)
            return
        if self.fence is not None:
            raise self.fence
        if len(self.steps) >= MAX_STEPS:
            self.doubt(f"other code did not come to an end within {MAX_STEPS} steps")
            self.fence = Fenced()
            raise self.fence
        if self._play.traced and step.site is None:
            step = replace(step, site=user_site(sys._getframe(2)))
        self.pending = step
        self.steps.append(step)

    def blocked(self) -> bool:
        if _get_ident() != self.thread.ident or self.fence is not None:
            return False
        self.refused = True
        self.fence = Fenced()
        raise self.fence

    def sleep(self, seconds: float, site: Site | None = None) -> None:
        self.boundary(sleep_step(seconds, site))
        self._play.advance(seconds)


class Play:
    """Deliveries of one message on one world, from one state on. Use it as a context manager."""

    def __init__(
        self,
        workshop: Workshop,
        job: Job,
        start: Saved | None,
        base: float,
        limit: float,
        *,
        clock: int = 0,
        traced: bool = False,
    ) -> None:
        self.clock = clock
        """Milliseconds since `base`: whole ones, so that a state is the same on whatever way it is come to."""
        self.back = _Lock()
        self.back.acquire()
        self.doubts: list[str] = []
        self.notes: list[str] = []
        self.actors: list[Actor] = []
        self.returned: dict[Actor, bool] = {}
        """Deliveries whose statement waited in a server, and came back by the last move; has it committed by that?"""
        self.ended: list[str] = []
        """What the last jump went past, for people."""
        self._visitors: list[Visitor] = []
        self.traced = traced
        self.running: Actor | None = None
        self._workshop = workshop
        self.shutdowns = workshop.loops.shutdowns
        self._world = workshop.world
        self._job = job
        self._start = start
        self._base = base
        self._limit = limit
        self._on: Actor | None = None
        self._processors: set[int] = set()
        """Where this thread may run when the play is over."""

    def __enter__(self) -> Play:
        workshop, world = self._workshop, self._world
        world.shifted, world.traced = False, self.traced
        workshop.clock.set(self._base + self.clock / 1000)
        world.restore(self._start)
        workshop.play = self
        self._processors = _stay_here()
        world.concurrent = True
        world.actor_of_thread = self._actor_of_thread
        for hook in workshop.before:
            hook()
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing is left of any delivery, whatever has happened."""
        world, workshop = self._world, self._workshop
        try:
            left = [actor for actor in (*self.actors, *self._visitors) if actor.thread.is_alive()]
            for actor in left:
                self._call_back(actor)
            for actor in left:
                if not actor.dead:
                    world.leave(actor)
                actor.dead = True
            left.reverse()  # the last first: it may have a connection that one before it has had, too
            for actor in left:
                self._unwind(actor, _SHORT_GRACE)
            for actor in left:  # it may have waited for what another one had in memory
                if actor.thread.is_alive():
                    self._unwind(actor, _GRACE)
            self.doubts += [_UNENDED.format(actor.number) for actor in left if actor.thread.is_alive()]
            world.recorder = None
            if exc[0] is None:
                world.recorder = self.actors[-1] if self.actors else None
                for hook in workshop.after:
                    hook()
        finally:
            world.recorder = None
            world.concurrent = False
            world.actor_of_thread = None
            workshop.play = None
            self.running = None
            world.quiet = True
            try:
                self.notes += workshop.end_delivery()
            finally:
                world.quiet = False
                self._enter(None)
                if self._processors:
                    os.sched_setaffinity(0, self._processors)

    # -- moves ------------------------------------------------------------------------------------------------------

    def begin(self, ident: int) -> Actor:
        """A delivery that stands before its first step. `ident` says what it will draw, and its process id."""
        workshop = self._workshop
        actor = Actor(self, self._job, len(self.actors) + 1, f"delivery {ident}", workshop.pid_of(ident + 1))
        self.actors.append(actor)
        actor.thread.start()
        self._hand_to(actor)
        workshop.chance.note(actor.stream)
        return actor

    def run(self, actor: Actor, surface: bool = False, circle: bool = True, fault: str = "") -> Moved:
        """Let it do the step that it stands before, up to the next.

        surface: a step that waits fails instead. circle: deliveries may come to wait for each other by it. fault: what
        goes wrong at this step; `struck` of the actor says what came of it.
        """
        if actor.away and not actor.settled:
            self.returned = {}
            return actor.moved()  # its statement still waits in the server
        actor.surface, actor.fault, actor.struck = surface, fault, ""
        if actor.pause and fault not in SHUTDOWNS:
            self.advance(actor.pause)
        if circle:
            self._let_timers_run_out()
        self._hand_to(actor)
        actor.fault = ""
        self._workshop.chance.note(actor.stream)
        moved = actor.moved()
        if actor.end:
            self._world.facts()  # what it has committed is read before its connections are gone
            self._world.leave(actor)
        self._settle()
        self._world.facts()  # what it has committed is read before anybody else moves, who may lock it
        return moved

    def visit(self, job: Job, number: int, pid: int) -> Visitor:
        """Other code runs whole, while all deliveries stand still. See its `end`; if it was refused, or has raised,
        the world is in the middle of something, and this play is over."""
        visitor = Visitor(self, job, number, f"visitor {number}", self._workshop.pid_of(pid))
        self._visitors.append(visitor)
        visitor.thread.start()
        self._let_timers_run_out()
        try:
            self._hand_to(visitor)
        except Hung:
            if not visitor.refused:
                raise
        visitor.refused = visitor.refused or visitor.away
        self._workshop.chance.note(visitor.stream)
        if visitor.away:
            self.kill(visitor)
        else:
            self._world.facts()
            self._world.leave(visitor)
        return visitor

    def kill(self, actor: Actor) -> None:
        """Its process dies where it stands: nothing of it runs any more, what it had open is gone."""
        self._world.facts()  # what it has committed is read before its connections are gone
        actor.dead = True
        if not self._call_back(actor):
            self._hang(actor)
        self._world.leave(actor)
        self._settle()

    def _call_back(self, actor: Actor) -> bool:
        """A statement that waits in a server ends, or nothing could be done on its connection. False if it does not."""
        if actor.away and not actor.arrived.is_set():
            self._world.cancel(actor)
            return actor.arrived.wait(_GRACE)
        return True

    def advance(self, seconds: float) -> None:
        """The clock moves on, and with it what ends by itself."""
        self._world.facts()
        clock = self._workshop.clock
        before = clock.now()
        self.clock += max(1, round(seconds * 1000)) if seconds else 0
        clock.set(self._base + self.clock / 1000)
        self._world.shift(clock.now() - before)

    def until_expiry(self) -> float | None:
        """Seconds until the next thing in the world ends by itself."""
        now = self._workshop.clock.now()
        versions = [resource.version for resource in self._world.resources.values()]
        return min((end - now for version in versions for end in version.expiries if end > now), default=None)

    def jump(self, rung: int) -> bool:
        """The clock goes on to the next thing that ends; False if there is none.

        rung: how often it has gone on in vain before; each time it goes on for longer.
        """
        self._world.facts()
        left = self.until_expiry()
        if left is not None:
            now = self._workshop.clock.now()
            ending = [resource.version.ending for resource in self._world.resources.values()]
            self.advance(left + 0.001)
            past = self._workshop.clock.now()
            self.ended = sorted({name for ends in ending for end, name in ends.items() if now < end <= past and name})
            return True
        self.advance(LADDER[min(rung, len(LADDER) - 1)])
        return False

    def facts(self) -> Facts:
        """The committed state now."""
        return self._world.facts()

    # -- inside -----------------------------------------------------------------------------------------------------

    def perform(self, job: Job) -> None:
        """Called in the thread of a delivery."""
        self._workshop.perform(job)

    def _actor_of_thread(self) -> Actor:
        actor = self.of_thread(threading.current_thread())
        assert actor is not None
        return actor

    def of_thread(self, thread: threading.Thread) -> Actor | None:
        """Whose thread that is. Not by its number, which a later thread may have again."""
        return next((actor for actor in (*self.actors, *self._visitors) if actor.thread is thread), None)

    def _hand_to(self, actor: Actor) -> None:
        """Give it the baton, and wait until it comes back. Raises Hung, or what made the world refuse."""
        if self._on is not actor:
            self._enter(actor)
        self._world.recorder = self.running = actor
        actor.go.release()
        try:
            self._await(actor)
        finally:
            self._world.recorder = None
        if actor.end:
            actor.thread.join(_GRACE)
        if actor.cause is not None:
            raise actor.cause
        if actor.fence is not None or actor.end == "stopped":
            raise Hung(self.doubts[-1] if self.doubts else f"delivery {actor.number} was ended")

    def _let_timers_run_out(self) -> None:
        """In a circle the server ends a statement itself: that of the one whose timer runs out while the circle is
        closed. So the timer of a statement that waits has to run out before another one may close a circle."""
        for actor in self.actors:
            if not actor.away or actor.dead or actor.arrived.is_set():
                continue
            if actor.tells:
                actor.looked.wait(_MOST_LATE)
            elif (left := actor.since + _DEADLOCK - _monotonic()) > 0:
                _sleep(left)

    def _await(self, actor: Actor) -> None:
        """Until it stands at its next boundary, or waits in a server for somebody else."""
        end = _monotonic() + self._limit
        pause = _ASK_AFTER
        while not self.back.acquire(timeout=pause):
            if self._waits_inside(actor) and actor.go_on_without():
                actor.since = _monotonic()
                return
            if _monotonic() > end:
                self._hang(actor)
            pause = min(2 * pause, 0.01)

    def _waits_inside(self, actor: Actor) -> bool:
        """Its statement is in the server and waits. It does not come back while that is asked: it may ask, too."""
        with actor.guard:
            return actor.inside and self._waits(actor) == WAITS

    def _waits(self, actor: Actor) -> str:
        resource = self._world.resources.get(actor.pending.resource) if actor.pending else None
        return resource.waits(actor) if resource is not None else ""

    def _settle(self) -> None:
        """Nothing happens any more by itself: statements that waited for what was just done have come back."""
        self.returned = {}
        for actor in self.actors:
            if not actor.away or actor.dead or actor.settled:
                continue
            end = _monotonic() + self._limit
            while not self._waits(actor) and not actor.arrived.wait(0.002):
                if _monotonic() > end:
                    self._hang(actor)
            if actor.arrived.is_set():
                actor.settled = True
                resource = self._world.resources.get(actor.pending.resource) if actor.pending else None
                self.returned[actor] = resource is not None and resource.came_back(actor)

    def _hang(self, actor: Actor) -> NoReturn:
        where = f" after {actor.pending.detail}" if actor.pending else ""
        actor.fence = Fenced()
        self._world.cancel(actor)  # a statement that runs ends, or nothing could be closed
        end = _monotonic() + _GRACE
        while not self.back.acquire(timeout=0.2) and actor.thread.is_alive() and _monotonic() < end:
            _raise_in(actor.thread)
        raise Hung(
            f"delivery {actor.number} did not come back within {self._limit:.0f} s{where}: it waits for something "
            "that the check does not see, such as a lock in memory that the other delivery holds. Separate workers "
            "do not share memory; keep such locks out of the job, or use duplicates=1."
        )

    def _enter(self, actor: Actor | None) -> None:
        """The process that the code lives in is that of the delivery that runs."""
        workshop = self._workshop
        if self._on is not None:
            workshop.chance.leave(self._on.stream)
        self._on = actor
        if actor is None:
            workshop.live_in(threading.get_ident(), None)
            return
        workshop.chance.enter(actor.stream)
        workshop.live_in(actor.thread.ident or 0, actor.pid)

    def _unwind(self, actor: Actor, grace: float) -> None:
        """Let a parked thread end, within so many seconds: every step that its clean-up makes is fenced off."""
        actor.fence = actor.fence or Fenced()
        self._enter(actor)
        self._world.recorder = actor
        end = _monotonic() + grace
        with contextlib.suppress(RuntimeError):
            actor.go.release()
        while actor.thread.is_alive() and _monotonic() < end:
            actor.thread.join(0.2)
            if actor.thread.is_alive():
                _raise_in(actor.thread)
        self.back.acquire(blocking=False)


def _stay_here() -> set[int]:
    """Keep this thread, and those that it starts, on the processor where it runs. Gives those where it was allowed.

    Only one of them runs at a time, and to wake one on another processor takes four times as long. Empty if it cannot
    be done, or there is only one.
    """
    if not hasattr(os, "sched_setaffinity"):
        return set()
    try:
        allowed = os.sched_getaffinity(0)
        here = ctypes.CDLL(None).sched_getcpu()
        if len(allowed) < 2 or here not in allowed:
            return set()
        os.sched_setaffinity(0, {here})
    except (OSError, AttributeError):
        return set()
    return allowed


def _place_of(frame: FrameType | None) -> int:
    """Tells places in running code apart; a loop comes to the same place again."""
    places: list[tuple[int, int]] = []
    while frame is not None and frame.f_code is not Actor._main.__code__:
        places.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(places))


def _raise_in(thread: threading.Thread) -> None:
    ident = ctypes.c_ulong(thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Stopped))
