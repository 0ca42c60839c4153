"""What is known of a job that runs several times at once: what it does next depends only on what it has observed.

A delivery's memory is a function of what it has observed, its *log*. What a step does depends on the log, on the
state of the one resource that it touches, on what the delivery itself has open there, and on what others have open
there as far as it can be noticed: not on other resources, nor on where the others stand. So each transition is
learned once by running it, and the graph of all interleavings is searched without running anything.

Everything is named by small numbers. Equal numbers mean equal contents.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from retrychaos.explore.draws import Draws, Renaming
from retrychaos.explore.volatile import moment
from retrychaos.model.ledger import Cell, Relation, Row, Version
from retrychaos.model.plan import FAULTS, SHUTDOWNS
from retrychaos.model.step import Step
from retrychaos.world.resource import BEGUN, MORE, SERIAL, SERIAL_WRITES, WAITS

CLOCK = "clock"
"""The resource of a sleep."""
UNSTARTED = 0
"""The log of a delivery that has not begun."""
_WRITING = (MORE, SERIAL_WRITES, WAITS)
_UNTOLD = (SERIAL, *_WRITING)
"""How others are affected by these depends on more, so each is another."""
JAMMED = "jammed"
"""How a step ends that was not begun, since it would wait in a server for the same as that of another delivery."""
_SOON = 3_600.0
_real_now = time.time
NOTHING_OPEN = 0
"""The context of a delivery that has nothing open on a resource."""


class Seat(NamedTuple):
    """One live delivery. `ident` says what it draws; `open` are its contexts on resources, where it has any."""

    ident: int
    log: int
    open: tuple[tuple[str, int], ...] = ()

    def context(self, resource: str) -> int:
        return next((context for name, context in self.open if name == resource), NOTHING_OPEN)

    def with_context(self, resource: str, context: int) -> Seat:
        others = tuple(each for each in self.open if each[0] != resource)
        return self._replace(open=tuple(sorted((*others, (resource, context)))) if context else others)


class Node(NamedTuple):
    """A state of everything: durable versions, deliveries, time.

    clock: milliseconds since the start, where the job goes by the time; else 0. rung: how often the clock has gone on
    in vain, because nobody could do anything, since something has changed.
    """

    versions: tuple[tuple[str, int], ...]
    """Resources that are not as they were found."""
    clock: int
    seats: tuple[Seat, ...]
    idle: int
    """Deliveries that may begin."""
    acked: bool
    rung: int = 0
    rivals: tuple[int, ...] = ()
    """Other code that may still run, by its number among the jobs around."""
    calm: bool = False
    """An error, a lost reply or a shutdown may still come."""

    @property
    def time(self) -> tuple[int, int]:
        return (self.clock, self.rung)

    def version(self, resource: str) -> int:
        return next((version for name, version in self.versions if name == resource), 0)

    @property
    def quiet(self) -> bool:
        """Nobody is running, so it can be gone back to."""
        return not self.seats


class Move(NamedTuple):
    """A choice: see :class:`~retrychaos.model.plan.Turn`; here a delivery is told by its `ident`.

    Of a rival it is the number.
    """

    kind: str
    ident: int = -1


@functools.cache
def move_of(kind: str, ident: int) -> Move:
    """The same object for the same move: there is one for every edge of the graph."""
    return Move(kind, ident)


class Outcome(NamedTuple):
    """What a step does.

    end: empty, ``blocked``, JAMMED, ``done`` (returned), ``failed`` (raised: a nack).
    """

    log: int
    context: int
    changes: tuple[tuple[str, int], ...]
    stirred: bool
    """Something may have been committed, even if it is as before."""
    clock: int
    end: str
    others: tuple[tuple[int, int], ...] = ()
    """What others have open there: it was that, and is this now."""
    stirs: tuple[str, ...] = ()
    """The same as `stirred`, where it is not about one resource."""
    polled: tuple[str, ...] | None = None
    """It is going round in a loop that waits for a change in these resources."""
    drawn: tuple[int, ...] = ()
    """Numbers that it has drawn from sequences."""
    closed: tuple[str, ...] = ()
    """Other resources on which it has nothing open any more: a rollback is no step."""
    chances: tuple[str, ...] = ()
    """Kinds of faults that could have come."""


class Draw(NamedTuple):
    """In place of an outcome: the step draws from sequences, so it depends on how many numbers of these are known."""

    sequences: tuple[int, ...]


@dataclass
class Log:
    """What a delivery has observed, and so what it does next."""

    before: int
    resource: str
    signature: Hashable
    seen: Hashable
    pending: Step | None = None
    end: str = ""
    error: str = ""
    drew: bool = False
    pause: int = 0
    """Milliseconds for which it is about to sleep."""
    place: int = 0
    """Where in its code it is about to sleep."""
    learned: bool = False
    taint: frozenset[int] = frozenset()
    """Deliveries whose random values it may know."""
    drawn: frozenset[int] = frozenset()
    """Numbers of sequences that it knows."""


class Did(NamedTuple):
    """A step was done inside a transaction. others: logs of others that it may depend on. drawn: see Outcome."""

    log: int
    version: int
    others: tuple[int, ...] = ()
    drawn: tuple[int, ...] = ()


class Waits(NamedTuple):
    """A statement waits in the server for others. place: how many have waited there before it."""

    log: int
    version: int
    place: int
    drawn: tuple[int, ...] = ()


class Back(NamedTuple):
    """The statement that has waited in the server has come back, when this was the version."""

    version: int
    drawn: tuple[int, ...] = ()


class Since(NamedTuple):
    """What others have done since. versions: that they have committed. beside: notes of serializable ones that are
    over, see serial.py."""

    versions: frozenset[int] = frozenset()
    beside: frozenset[tuple[int, int, int]] = frozenset()


class Noted(NamedTuple):
    """Of two serializable transactions: where both stood at a step of one, and what was said of the other."""

    log: int
    other: int
    level: str


class Polled(NamedTuple):
    """What a loop that waits looks at, and which versions it has seen there."""

    resources: tuple[str, ...]
    versions: tuple[tuple[str, int], ...]


Entry: TypeAlias = Did | Waits | Back | Since | Noted | Polled
"""One thing that has become of what a delivery has open."""


@dataclass
class _Context:
    before: int
    entry: Entry | None
    level: str
    shown: str
    known: frozenset[int]
    """Numbers of sequences that a transaction may have read."""
    own: frozenset[int]
    """Those that it has drawn."""
    numbered: bool
    """There are numbers of sequences in it, remembered or not."""

    @property
    def drawn(self) -> frozenset[int]:
        """Numbers that are remembered: what it has drawn only if it may have written rows with them."""
        return self.known | self.own if self.level in _WRITING else self.known


class Surprise(Exception):
    """The same delivery did something else in the same situation."""


@dataclass
class Names:
    """Numbers for versions, logs and contexts.

    timed: versions also differ if something ends in them at another time. start: when the clock of a state is 0.
    """

    timed: bool = False
    start: float = 0.0
    serial: bool = False
    """Serializable transactions were met."""
    draws: Draws = field(default_factory=Draws)
    versions: list[Version | None] = field(default_factory=lambda: [None])
    taints: list[frozenset[int]] = field(default_factory=lambda: [frozenset()])
    ends: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    """When something ends in a version: milliseconds on the clock of the state. If that stands still, since it was seen
    first."""
    drawn: list[frozenset[int]] = field(default_factory=lambda: [frozenset()])
    """Numbers of sequences that are in a version."""
    logs: list[Log] = field(default_factory=lambda: [Log(0, "", None, None)])
    contexts: list[_Context] = field(
        default_factory=lambda: [_Context(0, None, "", "", frozenset(), frozenset(), False)]
    )
    _keys: list[tuple[str, Hashable]] = field(default_factory=lambda: [("", None)])
    """Of each version, its resource and where counters stand."""
    _versions: dict[tuple[str, bytes, Hashable], int] = field(default_factory=dict)
    _by_object: dict[tuple[int, Hashable], tuple[Version, int]] = field(default_factory=dict)
    _hashes: dict[int, tuple[Relation, bytes]] = field(default_factory=dict)
    _logs: dict[Hashable, int] = field(default_factory=dict)
    _log_keys: list[tuple[int, Hashable, Hashable, str, int]] = field(default_factory=lambda: [(0, None, None, "", 0)])
    _begun: dict[int, int] = field(default_factory=dict)
    _contexts: dict[Hashable, int] = field(default_factory=dict)
    _found: set[str] = field(default_factory=set)

    # -- versions ---------------------------------------------------------------------------------------------------

    def found(self, resource: str, version: Version, serials: Hashable) -> None:
        """The version in which a resource was found: it has the number 0."""
        if resource not in self._found:
            self._found.add(resource)
            self._versions[resource, self._hash(version), serials] = 0

    def version(self, resource: str, version: Version, serials: Hashable, taint: frozenset[int], now: float) -> int:
        """The number of a version.

        serials: where counters stand that no rollback brings back, and whose numbers are not renamed. taint:
        deliveries whose random values may be in it. now: the virtual time.
        """
        known = self._by_object.get((id(version), serials))
        if known is not None and known[0] is version:
            number = known[1]
        else:
            since = self.start if self.timed else now
            ends = tuple(round((end - since) * 1000) + 1 for end in version.expiries)
            number = self._number(resource, version, serials, taint, ends)
            self._by_object[id(version), serials] = (version, number)
        if number and not taint >= self.taints[number]:
            self.taints[number] &= taint  # it comes about without these, so nothing of theirs is in it
        return number

    def _number(
        self, resource: str, version: Version, serials: Hashable, taint: frozenset[int], ends: tuple[int, ...]
    ) -> int:
        key = (resource, self._hash(version), serials)
        number = self._versions.get(key)
        if number is None:
            number = self._versions[key] = len(self.versions)
            self.versions.append(version)
            self.taints.append(taint)
            self.ends.append(ends)
            self.drawn.append(self.draws.in_version(version))
            self._keys.append((resource, serials))
        return number

    def renamed_version(self, number: int, renaming: Renaming) -> int:
        """The version with other numbers of sequences."""
        version = self.versions[number]
        if version is None or renaming.keys().isdisjoint(self.drawn[number]):
            return number
        resource, serials = self._keys[number]
        renamed = self.draws.version(version, renaming)
        return self._number(resource, renamed, serials, self.taints[number], self.ends[number])

    def differ(self, version: Version, number: int, found: Version) -> bool:
        """The contents are others than those of the version with that number."""
        known = self.versions[number] or found
        return known is not version and self._hash(known) != self._hash(version)

    def _hash(self, version: Version) -> bytes:
        whole = hashlib.blake2b(repr(version.expiries if self.timed else "").encode(), digest_size=16)
        for name, relation in sorted(version.relations.items()):
            known = self._hashes.get(id(relation))
            if known is None or known[0] is not relation:
                rows = _timeless(relation.rows) if version.real_time else relation.rows
                mark = hashlib.blake2b(repr((name, relation.columns, rows)).encode(), digest_size=16).digest()
                known = self._hashes[id(relation)] = (relation, mark)
            whole.update(known[1])
        return whole.digest()

    # -- logs -------------------------------------------------------------------------------------------------------

    def log(self, before: int, resource: str, signature: Hashable, seen: Hashable, end: str, clock: int) -> int:
        """The log that a step adds to."""
        key = (before, signature, seen, end, clock)
        number = self._logs.get(key)
        if number is None:
            number = self._logs[key] = len(self.logs)
            self.logs.append(Log(before, resource, signature, seen, drawn=self.logs[before].drawn))
            if isinstance(seen, tuple):
                self.logs[-1].drawn |= self.draws.in_text(" ".join(each for each in seen if isinstance(each, str)))
            self._log_keys.append(key)
        return number

    def renamed_log(self, number: int, renaming: Renaming) -> int:
        """The log in which other numbers of sequences were seen."""
        chain = []
        while not renaming.keys().isdisjoint(self.logs[number].drawn):
            chain.append(number)
            number = self.logs[number].before
        for old in reversed(chain):
            log = self.logs[old]
            _, signature, seen, end, clock = self._log_keys[old]
            if isinstance(seen, tuple):
                seen = tuple([self.draws.text(each, renaming) if isinstance(each, str) else each for each in seen])
            number = self.log(number, log.resource, signature, seen, end, clock)
            renamed = self.logs[number]
            if log.learned and not renamed.learned:
                error, drawn = self.draws.text(log.error, renaming), renamed.drawn
                self.logs[number] = replace(log, before=renamed.before, seen=seen, error=error, drawn=drawn)
        return number

    def begun(self, clock: int) -> int:
        """The log of a delivery that stands before its first step, and has begun then: it may have read the clock."""
        if not self.timed:
            return UNSTARTED
        number = self._begun.get(clock)
        if number is None:
            number = self._begun[clock] = len(self.logs)
            self.logs.append(replace(self.logs[UNSTARTED], signature=("begun", clock)))
            self._log_keys.append((UNSTARTED, ("begun", clock), None, "", clock))
        return number

    def is_unstarted(self, log: int) -> bool:
        return self.logs[log].before == UNSTARTED and not self.logs[log].resource

    # -- contexts ---------------------------------------------------------------------------------------------------

    def context(self, before: int, entry: Entry, shown: str) -> int:
        """What a delivery has open after one more operation, of which others see `shown`."""
        if not shown:
            return NOTHING_OPEN
        key = (before, type(entry), entry, shown)
        number = self._contexts.get(key)
        if number is None:
            number = self._contexts[key] = len(self.contexts)
            full = f"{shown}#{number}" if shown in _UNTOLD else shown
            self.serial = self.serial or shown in (SERIAL, SERIAL_WRITES)
            known, own = self.contexts[before].known | self._known_in(entry), self.contexts[before].own
            if isinstance(entry, Did | Waits | Back):
                own = own.union(entry.drawn)
            past = isinstance(entry, Since) and any(self.drawn[version] for version in entry.versions)
            numbered = bool(known or own) or past or self.contexts[before].numbered
            self.contexts.append(_Context(before, entry, shown, full, known, own, numbered))
        return number

    def was_stopped(self, log: int) -> bool:
        """A delivery with this log has been asked to stop."""
        while log:
            match self.logs[log].seen:
                case ("error", str(error), *_) if error.partition(":")[0] in SHUTDOWNS:
                    return True
            log = self.logs[log].before
        return False

    def log_behind(self, context: int) -> int:
        """The log after the last step to which a delivery owes what it has open."""
        while context:
            entry = self.contexts[context].entry
            if isinstance(entry, Did | Waits):
                return entry.log
            context = self.contexts[context].before
        return UNSTARTED

    def _known_in(self, entry: Entry) -> frozenset[int]:
        if not self.draws.counters:
            return frozenset()
        match entry:
            case Did(log, version, others):
                return self.logs[log].drawn.union(self.drawn[version], *(self.logs[other].drawn for other in others))
            case Waits(log, version):
                return self.logs[log].drawn | self.drawn[version]
            case Back(version):
                return self.drawn[version]
            case Since(_, beside):  # numbers in what was committed meanwhile need not be there any more
                noted = [self.contexts[each].drawn for one, two, _ in beside for each in (one, two)]
                return frozenset().union(*noted, *(self.logs[log].drawn for *_, log in beside))
            case Noted(log, other):
                return self.logs[log].drawn | self.logs[other].drawn
            case Polled(_, versions):
                return frozenset().union(*(self.drawn[version] for _, version in versions))

    def renamed_context(self, number: int, renaming: Renaming) -> int:
        """The same with other numbers of sequences."""
        chain = []
        while number and self.contexts[number].numbered:
            chain.append(number)
            number = self.contexts[number].before
        for old in reversed(chain):
            context = self.contexts[old]
            assert context.entry is not None
            number = self.context(number, self._renamed_entry(context.entry, renaming), context.level)
        return number

    def _own(self, drawn: tuple[int, ...], renaming: Renaming) -> tuple[int, ...]:
        renaming = self.draws.forget(drawn, renaming)
        return tuple([renaming[number] for number in drawn])

    def _renamed_entry(self, entry: Entry, renaming: Renaming) -> Entry:
        log, version, context = self.renamed_log, self.renamed_version, self.renamed_context
        match entry:
            case Did(at, based, others, drawn):
                others = tuple(sorted(log(other, renaming) for other in others))
                return Did(log(at, renaming), version(based, renaming), others, self._own(drawn, renaming))
            case Waits(at, based, place, drawn):
                return Waits(log(at, renaming), version(based, renaming), place, self._own(drawn, renaming))
            case Back(based, drawn):
                return Back(version(based, renaming), self._own(drawn, renaming))
            case Since(versions, beside):
                notes = ((context(a, renaming), context(b, renaming), log(at, renaming)) for a, b, at in beside)
                past = (version(each, self.draws.forget(self.drawn[each], renaming)) for each in versions)
                return Since(frozenset(past), frozenset(notes))
            case Noted(at, other, level):
                return Noted(log(at, renaming), log(other, renaming), level)
            case Polled(resources, versions):
                return Polled(resources, tuple((name, version(each, renaming)) for name, each in versions))

    def level(self, context: int) -> str:
        """What holds() said of it."""
        return self.contexts[context].level

    def has_waited(self, context: int) -> bool:
        """Its statement is in the server, or has come back from there."""
        while isinstance(self.contexts[context].entry, Since):
            context = self.contexts[context].before
        return isinstance(self.contexts[context].entry, Waits | Back)

    def waits(self, context: int) -> bool:
        """Its statement waits in the server."""
        return self.contexts[context].shown.startswith(WAITS)

    def has_changed(self, context: int, version: int) -> bool:
        """A statement waits in the server, and the version is another one than when it was sent."""
        entry = self.contexts[context].entry
        return self.waits(context) and not (isinstance(entry, Waits) and entry.version == version)

    def moved(self, context: int, version: int) -> int:
        """The same work open, after somebody else has committed that version."""
        return self._since(context, Since(versions=frozenset({version})))

    def beside(self, context: int, notes: tuple[int, int, int]) -> int:
        """The same work open, after a serializable transaction is over of which these are the notes."""
        return self._since(context, Since(beside=frozenset({notes})))

    def has_moved(self, context: int) -> bool:
        """Somebody has committed since this was opened; or that was so at an earlier step of it."""
        while context:
            entry = self.contexts[context].entry
            if isinstance(entry, Since) and entry.versions:
                return True
            context = self.contexts[context].before
        return False

    def _since(self, context: int, more: Since) -> int:
        """Sets, not sequences: others may go round in circles for ever while this one waits."""
        entry = self.contexts[context].entry
        level = self.level(context)
        if isinstance(entry, Since):
            context = self.contexts[context].before
            more = Since(entry.versions | more.versions, entry.beside | more.beside)
        return self.context(context, more, level)

    def back(self, context: int, version: int, drawn: tuple[int, ...], shown: str) -> int:
        """The same work open, after the statement that waited has come back."""
        return self.context(context, Back(version, drawn), shown)

    def as_if_at_once(self, context: int, version: int) -> tuple[int, tuple[int, ...]]:
        """The context before a statement that has waited, if nothing was committed meanwhile: then it has done what it
        would have done at once. Also what it has drawn since then."""
        back = self.contexts[context]
        if not isinstance(back.entry, Back) or back.entry.version != version:
            return context, ()
        waited = self.contexts[back.before]
        if not isinstance(waited.entry, Waits) or waited.entry.version != version:
            return context, ()
        return waited.before, (*waited.entry.drawn, *back.entry.drawn)

    def errs(self, log: int) -> bool:
        """Its last step has raised an error."""
        seen = self.logs[log].seen
        return isinstance(seen, tuple) and seen[:1] == ("error",)

    def polled(self, context: int) -> Polled:
        """What a loop that waits looks at, and which versions it has seen there."""
        entry = self.contexts[context].entry
        assert isinstance(entry, Polled)
        return entry

    def shown(self, context: int) -> str:
        return self.contexts[context].shown

    def round_before(self, log: int) -> tuple[int, tuple[str, ...]] | None:
        """Where a loop that waits stood one round earlier, if it has observed the same since; and what it looks at.

        A delivery that stands before a sleep at the same place in its code, after the same steps with the same
        results as before the last sleep there, is waiting for others.
        """
        here = self.logs[log]
        steps, slept = self._since_sleep(log)
        if slept is None:
            return None
        standing = self.logs[slept].before
        if self.logs[standing].place != here.place:
            return None
        if [each[1:] for each in steps] != [each[1:] for each in self._since_sleep(standing)[0]]:
            return None
        return standing, tuple(sorted({each[0] for each in steps}))

    def _since_sleep(self, log: int) -> tuple[list[tuple[str, Hashable, Hashable]], int | None]:
        steps: list[tuple[str, Hashable, Hashable]] = []
        while log:
            each = self.logs[log]
            if each.resource == CLOCK:
                return steps, log
            steps.append((each.resource, each.signature, each.seen))
            log = each.before
        return steps, None


def shown_by_others(names: Names, seats: Iterable[Seat], resource: str) -> tuple[str, ...]:
    """What the others have open on a resource, as far as it can be noticed."""
    found = [names.shown(seat.context(resource)) for seat in seats if seat.open]
    return tuple(sorted(each for each in found if each and each != BEGUN))


def _timeless(rows: Iterable[Row]) -> list[tuple[Cell, ...]]:
    """Rows without the times that a server has read off its own clock, which are other ones in every run."""
    now = _real_now()
    return [tuple("<time>" if _is_about(cell, now) else cell for cell in row) for row in rows]


def _is_about(cell: Cell, now: float) -> bool:
    at = moment(cell) if isinstance(cell, str | int | float) and not isinstance(cell, bool) else None
    return at is not None and abs(at - now) < _SOON


def index_of(node: Node, ident: int) -> int:
    return next((at for at, seat in enumerate(node.seats) if seat.ident == ident), -1)


def begins(node: Node, move: Move) -> bool:
    """A delivery starts with that move."""
    return move.kind == "begin" or (move.kind in FAULTS and index_of(node, move.ident) < 0)
