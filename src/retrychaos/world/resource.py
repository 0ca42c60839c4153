"""The protocol that every resource obeys, and what the world offers to resources."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeAlias

from retrychaos.model.ledger import Version
from retrychaos.world.gate import Gate

Blob: TypeAlias = Any
"""What a resource needs to restore a version: plain data that survives pickling."""

BEGUN = "begun"
"""What Resource.holds() says of a transaction that has begun, and has neither read nor locked anything yet."""
WAITS = "waits"
"""What it says of a delivery whose statement waits in the server for another one."""
CIRCLE = "circle"
"""Deliveries wait for each other: see Resource.waits()."""
SERIAL = "serial"
"""What it says of a serializable transaction that has not written. It depends on what others read and write."""
SERIAL_WRITES = "serial writes"
"""The same of one that may have written."""
MORE = "more"
"""What it says of a transaction of which others can notice more than can be told, such as locks on rows."""
MOST_DRAWN = 100_000
"""Numbers of a counter that are told from others."""


@dataclass(frozen=True)
class SerialCounter:
    """A counter of a store, such as a sequence, that gives numbers which can be taken for nothing else.

    resource, key: which one, as in Resource.serials(). first: the number that it gives first. step: what is added.
    """

    resource: str
    key: Hashable
    first: int
    step: int

    def number(self, rank: int) -> int:
        """The number that it gives after `rank` others."""
        return self.first + rank * self.step

    def gave(self, number: int) -> bool:
        return self.first <= number < self.first + MOST_DRAWN * self.step


_FIRST_UUID = 0xFFFFFFFF_FFFF_4FFF_BFFF_000000000000


@dataclass(frozen=True)
class RandomIds:
    """A store that draws random UUIDs (version 4) by itself, as a counter of numbers without an order."""

    resource: str
    key: Hashable = "uuid"
    step: int = 1

    def number(self, rank: int) -> int:
        """What stands for the one that is drawn after `rank` others."""
        return _FIRST_UUID + rank

    def gave(self, number: int) -> bool:
        """It is a UUID of version 4 (RFC 9562, section 5.4). Whether somebody else has drawn it, others know."""
        return number.bit_length() <= 128 and number >> 76 & 0xF == 4 and number >> 62 & 0b11 == 0b10


class Resource(Protocol):
    """Something outside the process that a job touches.

    ``name`` identifies it over the processes of one check (parent and forks), ``label`` is for people.
    ``version`` is the committed state as last read. ``commits`` counts how often something may have been committed,
    also where the state came out the same.
    """

    name: str
    label: str
    version: Version
    commits: int

    @property
    def private(self) -> bool:
        """A fork has one of its own: it is in the memory of the process, or its source can part()."""
        ...

    def refresh(self) -> Version:
        """Read what may have been committed since; return the same object if nothing was.

        Work of open transactions is never part of a version.
        """
        ...

    def sweep(self) -> Version:
        """As refresh, but read everything: the last look of a delivery, when nothing may be missed."""
        ...

    def save(self) -> Blob:
        """What restores the current version. Called only while it is current; may be cached by version."""
        ...

    def restore(self, version: Version, blob: Blob) -> None:
        """Make `version` the committed state again. Raises WorldError if that cannot be done."""
        ...

    def end_delivery(self) -> Sequence[str]:
        """The process is gone: nothing it kept (transactions, cursors, connections) survives.

        Returns what a user should know, e.g. that work was left uncommitted.
        """
        ...

    def shift(self, seconds: float) -> None:
        """The virtual clock has moved by `seconds`; stores with a clock of their own follow."""
        ...

    def land(self, ahead: float) -> None:
        """The check is over, its clock was `ahead` seconds ahead of real time: what lives for a time lives as long."""
        ...

    alone: str
    """Why it cannot be used by several deliveries at once in this process, and what to do; empty if it can."""

    def waits(self, owner: object) -> str:
        """Does the server say that the statement which a delivery has sent waits for another one?

        WAITS, or CIRCLE if that one waits for it in turn, so that the server will end the statement soon; else empty.
        """
        ...

    def came_back(self, owner: object) -> bool:
        """The statement of a delivery has waited in the server, and is done; its thread stands still.

        True if it has been committed by that: refresh() has to see it.
        """
        ...

    def races(self, owner: object) -> bool:
        """A statement of another delivery waits in the server for the very same thing, and which of both gets it, the
        server does not decide in the same way each time."""
        ...

    def serials(self) -> Mapping[Hashable, int]:
        """Counters of the store that a rollback does not bring back, and the number that each will give next."""
        ...

    def space_serials(self, place: int) -> Sequence[SerialCounter | RandomIds]:
        """Move such counters to where nothing else has numbers, as far as there is room.

        place: how many others have been moved before, to where these must not come.
        """
        ...

    def holds(self, owner: object) -> str:
        """What a delivery has open here (a transaction, a lock), as far as others can notice; empty if nothing."""
        ...

    def shift_ids(self, by: int) -> None:
        """Let the store draw other row ids than usual from now on, where it has a counter for them."""
        ...

    def distrust(self) -> None:
        """Another process has written: the next restore must not rely on what was read before."""
        ...

    def close(self) -> None:
        """Give up everything held open and undo what was set on the user's objects. Never raises."""
        ...


class Plain:
    """What most resources say: nothing waits in a server, and no counter of theirs outlives a rollback."""

    def waits(self, owner: object) -> str:
        return ""

    def came_back(self, owner: object) -> bool:
        return False

    def races(self, owner: object) -> bool:
        return False

    def serials(self) -> Mapping[Hashable, int]:
        return {}

    def space_serials(self, place: int) -> Sequence[SerialCounter | RandomIds]:
        return ()


class Source(Protocol):
    """Finds resources of one kind when a job touches them: patches clients while installed."""

    def install(self) -> None: ...

    def part(self, blobs: Mapping[str, Blob], folder: str) -> None:
        """From now on, this process delivers at the same time as its parent, from the state that `blobs` restore.

        Resources that are not in its memory have to be copies; `folder`, yet to be made, is for them. Raises
        SharedError if that cannot be.
        """
        ...

    def end_delivery(self) -> None:
        """The process is gone: forget what belonged to it. Called before the resources' end_delivery."""
        ...

    def leave(self, owner: object) -> None:
        """One of several deliveries has ended or died, perhaps in the middle of a step: close what it had open.

        Called in another thread than its own, which stands still.
        """
        ...

    def cancel(self, owner: object) -> None:
        """The statement which a delivery has sent, and which waits in the server, ends."""
        ...

    def uninstall(self) -> None:
        """Undo every patch, whatever state the source is in."""
        ...


class Stage(Protocol):
    """What the world offers to sources and resources. One delivery at most is running on it."""

    @property
    def running(self) -> bool:
        """A delivery is running: operations are steps. Otherwise they are none of our business."""
        ...

    traced: bool
    """A timeline is wanted: steps are told with their values."""
    quiet: bool
    """The harness itself is at work on a store: hooks must look away."""
    gate: Gate
    """Through which steps pass whose answers tasks of an event loop wait for."""
    concurrent: bool
    """Several deliveries are running, each in a thread of its own, one at a time."""

    @property
    def failed(self) -> bool:
        """The delivery has ended by an exception."""
        ...

    @property
    def owner(self) -> object | None:
        """The delivery whose code is running, where there are several; else None."""
        ...

    def enter(self, tells: bool) -> None:
        """The running delivery sends a statement that may wait in the server for as long as another one wants.

        tells: waits_on() is called once the server has looked whether deliveries wait for each other.
        """
        ...

    def waits_on(self) -> None:
        """The server has looked, and the statement that was sent in this thread waits on."""
        ...

    def arrive(self) -> None:
        """The answer has come. Returns when it is the turn of that delivery again."""
        ...

    def observed(self, *values: object) -> None:
        """The job gets this back from its step, and nothing else; may be called several times."""
        ...

    def blocked(self) -> bool:
        """The step of the running delivery has to wait for another delivery. Returns when one has moved: True to try
        again, False to let the step fail."""
        ...

    def step(self, kind: str, resource: Resource, text: str, detail: str) -> None:
        """A step is about to run: here is a boundary. May raise a BaseException that ends the delivery."""
        ...

    def strike(self, kind: str, make: Callable[[], BaseException]) -> None:
        """Raise what `make` gives, if the delivery that runs has such a fault at the step that was announced last.

        kind: ERROR, before anything is done; `make` gives what the client raises if nobody can be reached. LOST_REPLY,
        after it was done; then it is what the client raises if the answer does not come.
        """
        ...

    def look(self) -> None:
        """Note now what has been committed, at the boundary before the next step."""
        ...

    def touched(self, resource: Resource) -> None:
        """The resource may have committed something: its refresh() is called at the next boundary."""
        ...

    def find(self, name: str) -> Resource | None:
        """The adopted resource with that name."""
        ...

    def expects(self, name: str) -> bool:
        """This delivery goes on from a state of another process, which has found that resource already."""
        ...

    def drew(self, uuid: str) -> bool:
        """A delivery of this check has drawn that random UUID (32 hexadecimal digits)."""
        ...

    def aside(self, seed: str) -> AbstractContextManager[None]:
        """Somebody outside is at work in this process: what he draws at random follows from `seed`, and is his."""
        ...

    def adopt(self, resource: Resource) -> None:
        """Take a resource that a job is about to touch for the first time. Call it before its first step.

        Its present version is part of the state before the check; or, in a forked delivery, the version that the
        parent asked for is restored first.
        """
        ...

    def refuse(self, problem: Exception) -> NoReturn:
        """End the delivery because the world cannot be judged; `problem` is raised to the user, past the job."""
        ...

    def fail(self, problem: Exception) -> None:
        """As refuse, from where an exception would be swallowed: the delivery ends at its next step."""
        ...

    def keep_off(self, what: str) -> None:
        """Something is about to be touched that other processes have, too: not while one of them delivers as well."""
        ...

    def doubt(self, reason: str) -> None:
        """Something happened that the ledger does not see: the verdict becomes inconclusive with this reason."""
        ...

    def excuse(self, problem: Exception) -> None:
        """If the delivery does not come to its end, that may be our fault: then `problem` is raised to the user."""
        ...

    def sleep(self, seconds: float | None) -> None:
        """A command waits that long on the virtual clock (None: for ever); nobody else could end the wait earlier."""
        ...

    def claim_path(self, path: str) -> None:
        """That file, with the companions that a database gives it, is a resource's own."""
        ...

    def claim_address(self, address: object) -> None:
        """What is sent to that address is a resource's own: ``(host, port)`` or the path of a socket."""
        ...

    def claim_connection(self, connection: object) -> None:
        """What is done on that ``sqlite3`` connection is a resource's own, or dies with the process."""
        ...

    began: float
    """The virtual time at which the check began."""

    def now(self) -> float:
        """The virtual time, seconds since the epoch."""
        ...

    def options(self, name: str) -> Any:
        """The value of an option of the check."""
        ...
