"""Declared calls: functions and methods whose every call counts as an effect at a receiver.

``chaos.watch(owner, "name")`` makes a :class:`Watched`; :class:`Calls` has all of them caught during a check and is the
resource that holds what arrived. A delivery is judged by what arrived, so a call counts only if it returned.
"""

from __future__ import annotations

import errno
import functools
import inspect
import pickle
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from retrychaos.model.errors import OptionError
from retrychaos.model.ledger import Cell, Relation, Row, Version
from retrychaos.model.plan import ERROR, LOST_REPLY
from retrychaos.model.values import copied, plain, short
from retrychaos.world.coroutines import driven
from retrychaos.world.interception import Patch, patches, try_out
from retrychaos.world.resource import Blob, Plain, Stage
from retrychaos.world.silence import silence
from retrychaos.world.targets import Target, check_key, locate, owner_name

MISSING: Final = object()
"""No result was declared: the call goes through."""


@dataclass(frozen=True)
class Call:
    """One call that arrived, as the receiver saw it."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    arguments: Mapping[str, Any]
    """By parameter name, defaults included, ``self`` left out."""
    key: Cell = None
    """On which the receiver deduplicates; None counts every time."""


class Watched:
    """A declared call. ``calls`` lists what arrived in the clean run."""

    def __init__(self, label: str, target: Target, result: object, key: str | None) -> None:
        self.label = label
        self.relation = f"call {label}"
        self.target = target
        self.result = result
        self.key = key
        self.calls: list[Call] = []
        self.seen = False
        """It was called at least once in this check, whether or not the call returned."""
        names = None if target.signature is None else tuple(target.signature.parameters)
        self.columns = ("key", *(("arguments",) if names is None else map(_column, names)))

    def __repr__(self) -> str:
        return f"<watched {self.label}>"

    def understand(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call with its arguments by name. Raises TypeError if they do not fit the signature."""
        arguments: dict[str, Any] = {}
        if self.target.signature is not None:
            bound = self.target.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
        key = None if self.key is None else plain(self._key_value(arguments, kwargs))
        if key == "":
            key = None  # no receiver deduplicates on nothing
        return Call(copied(args), copied(kwargs), copied(arguments), key)

    def _key_value(self, arguments: dict[str, Any], kwargs: dict[str, Any]) -> object:
        assert self.key is not None
        return arguments[self.key] if self.key in arguments else kwargs.get(self.key)

    def row(self, call: Call) -> Row:
        """The effect as a row of the ledger."""
        if self.target.signature is None or (not call.arguments and len(self.columns) > 1):
            rest: list[Cell] = [plain((call.args, dict(call.kwargs)))]
            rest += [None] * (len(self.columns) - 1 - len(rest))
            return (call.key, *rest)
        return (call.key, *(plain(value) for value in call.arguments.values()))

    def text(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The call for people."""
        parts = [short(value, 40) for value in args] + [f"{name}={short(value, 40)}" for name, value in kwargs.items()]
        inside = ", ".join(parts)
        return f"{self.label}({inside if len(inside) <= 160 else inside[:159] + '…'})"


def _column(name: str) -> str:
    return "argument key" if name == "key" else name


# -- what a receiver has -------------------------------------------------------------------------------------------


class Answer:
    """What a receiver answered to a key, to be answered again. One that cannot be pickled stays in its process."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            return (_answer, (pickle.dumps(self.value),))
        except Exception:
            return (_answer, (None,))


def _answer(pickled: bytes | None) -> Answer:
    try:
        return Answer(MISSING if pickled is None else pickle.loads(pickled))
    except Exception:
        return Answer(MISSING)


@dataclass(frozen=True)
class Received:
    """The effects at one receiver, in the order of their arrival."""

    rows: tuple[Row, ...] = ()
    answers: Mapping[Row, Answer] = field(default_factory=dict)

    def with_effect(self, row: Row, answer: Answer | None) -> Received:
        """A keyed effect is the same as the one that has already arrived with equal arguments."""
        if row[0] is not None and row in self.rows:
            return self
        answers = self.answers if answer is None else {**self.answers, row: answer}
        return Received((*self.rows, row), answers)

    def answer(self, row: Row) -> Answer | None:
        found = self.answers.get(row)
        return None if found is None or found.value is MISSING else found


_NOTHING = Received()


class Calls(Plain):
    """All declared calls: source and resource in one. ``stage`` may be set later, before a check."""

    name = "calls"
    label = "declared calls"

    def __init__(self, stage: Stage | None = None) -> None:
        self.stage = stage
        self.watched: list[Watched] = []
        self.log: list[tuple[Watched, Call]] = []
        """What arrived in the running delivery; empty again at its end."""
        self.last: list[tuple[Watched, Call]] = []
        """What arrived in the delivery that has ended last, until the next one begins."""
        self.version = Version({})
        self.commits = 0
        self.entering: list[Callable[[], None]] = []
        """Called when a thread enters a watched call, nested ones apart: what happens inside is covered by it."""
        self.leaving: list[Callable[[], None]] = []
        self._received: dict[str, Received] = {}
        self._relations: dict[tuple[str, tuple[Row, ...]], Relation] = {}
        self._stale = False
        self._patches: list[Patch] = []
        self._installed = False
        self._depths: dict[int, int] = {}

    # -- for users ------------------------------------------------------------------------------------------------

    def watch(self, owner: object, name: str, *, result: object = MISSING, key: str | None = None) -> Watched:
        """Declare ``owner.name`` as an effect; see ``chaos.watch``."""
        if self._installed:
            raise OptionError(
                f"watch(…, {name!r}) came while a check was running: declare calls before the check, "
                "so that every delivery finds the same world."
            )
        target = locate(owner, name)
        label = self._label(owner, name)
        check_key(target, key, label)
        for other in self.watched:
            if other.target.overlaps(target):
                raise OptionError(
                    f"{label} is already watched as {other.label}: both watch the same function, and each call would "
                    "count twice. Declare it once."
                )
        try_out(target, label)
        watched = Watched(label, target, result, key)
        self.watched.append(watched)
        self.clear()
        return watched

    def _label(self, owner: object, name: str) -> str:
        """Stable over the processes of a check: two receivers of one name are told apart by their order."""
        base = f"{owner_name(owner)}.{name}"
        taken = {watched.label for watched in self.watched}
        label, number = base, 1
        while label in taken:
            number += 1
            label = f"{base} ({number})"
        return label

    # -- Source ---------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """A check begins: nothing has been called yet. What has been received is left alone."""
        if self._installed:
            return
        self._installed = True
        for watched in self.watched:
            watched.seen = False
        try:
            wanted = [(each.target, functools.partial(self.arrive, each)) for each in self.watched]
            for patch in patches(wanted, lambda: self.running):
                self._patches.append(patch)
                patch.apply()
        except BaseException:
            self.uninstall()
            raise

    def uninstall(self) -> None:
        self._installed = False
        while self._patches:
            self._patches.pop().undo()

    def part(self, blobs: Mapping[str, Blob], folder: str) -> None:
        """What has arrived is in the memory of the process."""

    # -- Resource -------------------------------------------------------------------------------------------------

    @property
    def private(self) -> bool:
        return all(watched.result is not MISSING for watched in self.watched)  # else calls go through, who knows where

    def clear(self) -> None:
        """Nothing has arrived anywhere."""
        self._received = {}
        self._relations = {}
        self.log = []
        self._stale = False
        self.version = Version({each.relation: self._relation(each, ()) for each in self.watched})

    def clean_run_done(self) -> None:
        """The clean run has ended: what arrived in it is what the user may look at."""
        for watched in self.watched:
            watched.calls = [call for each, call in self.last if each is watched]

    def refresh(self) -> Version:
        if self._stale:
            self._stale = False
            relations = {each.relation: self._relation(each, self._at(each).rows) for each in self.watched}
            if any(relations[name] is not self.version.relations.get(name) for name in relations):
                self.version = Version(relations)
        return self.version

    def sweep(self) -> Version:
        return self.refresh()

    def save(self) -> Blob:
        return dict(self._received)

    def restore(self, version: Version, blob: Blob) -> None:
        self._received = dict(blob)
        self.last, self.log = [], []
        self._stale = False
        self.version = version

    def end_delivery(self) -> Any:
        """Called twice for one delivery: as a source, and as a resource with no notes to give."""
        if self.log:
            self.last, self.log = self.log, []
        self._depths.clear()
        return ()

    def cancel(self, owner: object) -> None:
        """Nothing waits anywhere but here."""

    def leave(self, owner: object) -> None:
        """Receivers keep nothing open."""

    alone = ""

    def holds(self, owner: object) -> str:
        return ""

    def shift(self, seconds: float) -> None:
        """Receivers have no clock."""

    def land(self, ahead: float) -> None:
        """What has arrived stays."""

    def shift_ids(self, by: int) -> None:
        """Receivers draw no ids of their own."""

    def distrust(self) -> None:
        """What has arrived is known from the calls themselves; nothing can have changed unseen."""

    def close(self) -> None:
        self.uninstall()
        self.clear()

    def _at(self, watched: Watched) -> Received:
        return self._received.get(watched.relation, _NOTHING)

    def _relation(self, watched: Watched, rows: tuple[Row, ...]) -> Relation:
        """The same object for the same rows, over all states of the check."""
        current = self.version.relations.get(watched.relation)
        if current is not None and current.rows == rows and current.columns == watched.columns:
            return current
        key = (watched.relation, rows)
        known = self._relations.get(key)
        if known is None:
            known = self._relations[key] = Relation(watched.relation, watched.columns, rows, external=True)
        return known

    # -- calls ----------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self.stage is not None and self.stage.running

    def inside(self, thread: int | None = None) -> bool:
        """That thread (None: any) is inside a watched call: what it does there is covered by the declaration."""
        return bool(self._depths) if thread is None else thread in self._depths

    def arrive(
        self,
        watched: Watched,
        through: Callable[..., Any],
        first: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A watched call in a running delivery. `first` is the instance or class, which the receiver does not see."""
        __tracebackhide__ = True

        def performed(row: Row) -> Any:
            __tracebackhide__ = True
            if watched.result is MISSING:
                return through(*first, *args, **kwargs)
            return self._answer(watched, row, args, kwargs)

        if watched.target.asynchronous:
            return self._arrive_when_awaited(watched, performed, args, kwargs)
        call, row = self._announce(watched, args, kwargs)
        with self._covering():
            value = performed(row)
        if inspect.isawaitable(value):
            _dismiss(value)
            self._stage.refuse(
                OptionError(
                    f"{watched.label} gives something to be awaited, and does not say so: it is no 'async def', so it "
                    "cannot be told when its effect happens. Watch the function that it calls."
                )
            )
        self._record(watched, call, row, value)
        self._stage.strike(LOST_REPLY, _no_reply)
        if watched.result is not MISSING:
            self._stage.observed(value)
        return value

    async def _arrive_when_awaited(
        self, watched: Watched, performed: Callable[[Row], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        __tracebackhide__ = True
        async with self._stage.gate.passing(real=False):
            call, row = self._announce(watched, args, kwargs)
            with self._covering():
                value = performed(row)
            if inspect.isawaitable(value):
                value = await self._covered(value)
            self._record(watched, call, row, value)
        await silence(None, lambda: self._stage.strike(LOST_REPLY, _no_reply))
        if watched.result is not MISSING:
            self._stage.observed(value)
        return value

    @property
    def _stage(self) -> Stage:
        assert self.stage is not None
        return self.stage

    def _announce(self, watched: Watched, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Row]:
        __tracebackhide__ = True
        try:
            call = watched.understand(args, kwargs)
        except TypeError:
            # Does not fit the signature. The original says so best; if the signature lies, it accepts the call.
            if watched.result is not MISSING:
                raise
            call = Call(copied(args), copied(kwargs), {})
        row = watched.row(call)
        watched.seen = True
        self._stage.step("call", self, watched.label, watched.text(args, kwargs))
        self._stage.strike(ERROR, lambda: ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"))
        return call, row

    def _answer(self, watched: Watched, row: Row, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        known = None if row[0] is None else self._at(watched).answer(row)
        if known is not None:
            return copied(known.value)
        result = watched.result
        if isinstance(result, BaseException):
            raise result.with_traceback(None)
        if isinstance(result, type) and issubclass(result, BaseException):
            raise result
        return result(*args, **kwargs) if callable(result) else copied(result)

    def _record(self, watched: Watched, call: Call, row: Row, value: Any) -> None:
        self.log.append((watched, call))
        keep = row[0] is not None and watched.result is not MISSING
        before = self._at(watched)
        after = before.with_effect(row, Answer(copied(value)) if keep else None)
        if after is not before:
            self._received[watched.relation] = after
            self._stale = True
        self._stage.touched(self)

    @contextmanager
    def _covering(self) -> Iterator[None]:
        thread = threading.get_ident()
        depth = self._depths.get(thread, 0)
        if not depth:
            for hook in self.entering:
                hook()
        self._depths[thread] = depth + 1
        try:
            yield
        finally:
            if depth:
                self._depths[thread] = depth
            else:
                self._depths.pop(thread, None)
                for hook in self.leaving:
                    hook()

    async def _covered(self, awaitable: Awaitable[Any]) -> Any:
        """Await something. What other tasks do meanwhile is not covered by its declaration."""

        def go_on(part: Callable[[], Any]) -> Any:
            with self._covering():
                return part()

        return await driven(_awaited(awaitable), go_on)


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _no_reply() -> Exception:
    return TimeoutError("timed out")


def _dismiss(awaitable: Any) -> None:
    """Never awaited, and nobody shall be warned about that."""
    close = getattr(awaitable, "close", None)
    if callable(close):
        close()
