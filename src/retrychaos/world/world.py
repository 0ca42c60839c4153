"""All the resources of a check: found, snapshotted, restored and asked for their facts together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from retrychaos.model.errors import SharedError
from retrychaos.model.ledger import Facts, Relation, Row, Version
from retrychaos.model.step import Site, Step
from retrychaos.world.gate import Gate
from retrychaos.world.resource import Blob, Resource, Source

ID_SHIFT = 7_919
"""By how much row ids are moved in a shifted delivery; a prime, to meet few other numbers."""


_FOR_EVER = 3_650 * 86_400.0


class Recorder(Protocol):
    """The running delivery, as the world sees it."""

    @property
    def end(self) -> str: ...
    def boundary(self, step: Step) -> None: ...
    def strike(self, kind: str, make: Callable[[], BaseException]) -> None: ...
    def look(self) -> None: ...
    def refuse(self, problem: Exception) -> NoReturn: ...
    def fail(self, problem: Exception) -> None: ...
    def doubt(self, reason: str) -> None: ...
    def excuse(self, problem: Exception) -> None: ...
    def sleep(self, seconds: float, site: Site | None = None) -> None: ...
    def observed(self, *values: object) -> None: ...
    def enter(self, tells: bool) -> None: ...
    def waits_on(self) -> None: ...
    def arrive(self) -> None: ...
    def blocked(self) -> bool: ...


class Claims(Protocol):
    """Watches for effects that no resource owns; resources claim theirs."""

    def claim_path(self, path: str) -> None: ...
    def claim_address(self, address: Any) -> None: ...
    def claim_connection(self, connection: object) -> None: ...


@dataclass(frozen=True, eq=False)
class Saved:
    """A state of the world that can be gone back to. Plain data, survives pickling."""

    facts: Facts
    blobs: Mapping[str, Blob]
    at: float
    """What the virtual clock showed."""


@dataclass(frozen=True, eq=False)
class Again:
    """How an earlier check found the world, and how it left it."""

    found: Saved
    left: Saved

    def before(self, resource: Resource) -> tuple[Version, Blob] | None:
        """The state in which the earlier check found a resource that is now as it was left then; None otherwise."""
        left = self.left.facts.get(resource.name)
        if left is None or resource.name not in self.found.facts or not _same_rows(left, resource.version):
            return None
        return self.found.facts[resource.name], self.found.blobs[resource.name]


def _same_rows(one: Version, other: Version) -> bool:
    return one.relations.keys() == other.relations.keys() and all(
        _lasting(relation) == _lasting(other.relations[name]) for name, relation in one.relations.items()
    )


def _lasting(relation: Relation) -> tuple[Row, ...]:
    """The rows without times to live, which go on by themselves."""
    at = relation.ttl
    return relation.rows if at is None else tuple((*row[:at], *row[at + 1 :]) for row in relation.rows)


class World:
    """The resources found so far, and the state in which each was found.

    Implements :class:`~retrychaos.world.resource.Stage` for sources and resources.
    """

    def __init__(
        self,
        *,
        now: Callable[[], float],
        options: Mapping[str, Any],
        drew: Callable[[str], bool] = lambda _: False,
        aside: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self.resources: dict[str, Resource] = {}
        self.sources: list[Source] = []
        self.recorder: Recorder | None = None
        self.escapes: Claims | None = None
        self.quiet = False
        self.now = now
        self.began = now()
        self.drew = drew
        self.aside = aside
        self._options = options
        self.found_facts: dict[str, Version] = {}
        """The state in which each resource was found: before the check touched it. Grows as resources are found."""
        self.found_serials: dict[str, Mapping[Hashable, int]] = {}
        """Where the counters of each resource stood then."""
        self._found_blobs: dict[str, Blob] = {}
        self._wanted: dict[str, tuple[Version, Blob]] = {}
        self._touched: dict[str, Resource] = {}
        self.again: Again | None = None
        """The same job was checked before, and begins from the same state if nobody has touched the world since."""
        self.traced = False
        self.gate = Gate()
        self.actor_of_thread: Callable[[], Any] | None = None
        self.concurrent = False
        self.shifted = False
        """Stores draw other row ids than usual, to find the places where ids are kept."""
        self.beside = False
        """Another process delivers at the same time; see part()."""
        self.settling: list[Callable[[Mapping[str, Resource]], None]] = []
        """Called when what was committed has been read: what it means for others."""

    # -- for sources and resources (Stage) --------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self.recorder is not None and not self.quiet

    def step(self, kind: str, resource: Resource, text: str, detail: str) -> None:
        assert self.recorder is not None
        self.gate.steps += 1
        self.recorder.boundary(Step(kind, resource.name, text, detail))

    def strike(self, kind: str, make: Callable[[], BaseException]) -> None:
        if self.recorder is not None and not self.quiet:
            self.recorder.strike(kind, make)

    def look(self) -> None:
        if self.recorder is not None:
            self.recorder.look()

    def touched(self, resource: Resource) -> None:
        self._touched[resource.name] = resource

    def find(self, name: str) -> Resource | None:
        return self.resources.get(name)

    def expects(self, name: str) -> bool:
        return name in self._wanted

    def adopt(self, resource: Resource) -> None:
        if not resource.private:
            self.keep_off(resource.label)
        self.resources[resource.name] = resource
        wanted = self._wanted.pop(resource.name, None)
        if wanted is None and self.again is not None:
            wanted = self.again.before(resource)
            if wanted is not None:
                resource.restore(*wanted)
        elif wanted is not None:
            resource.restore(*wanted)
        if wanted is None:
            wanted = (resource.version, resource.save())
        self.found_facts[resource.name], self._found_blobs[resource.name] = wanted
        self.found_serials[resource.name] = resource.serials()
        self._shift_ids(resource)

    def refuse(self, problem: Exception) -> NoReturn:
        if self.recorder is None:
            raise problem
        self.recorder.refuse(problem)

    def fail(self, problem: Exception) -> None:
        if self.recorder is not None:
            self.recorder.fail(problem)

    def keep_off(self, what: str) -> None:
        if self.beside:
            self.refuse(SharedError(what))

    def doubt(self, reason: str) -> None:
        if self.recorder is not None:
            self.recorder.doubt(reason)

    def excuse(self, problem: Exception) -> None:
        if self.recorder is not None:
            self.recorder.excuse(problem)

    def sleep(self, seconds: float | None, site: Site | None = None) -> None:
        if self.recorder is not None:
            self.gate.steps += 1
            self.recorder.sleep(_FOR_EVER if seconds is None else seconds, site)

    @property
    def failed(self) -> bool:
        return self.recorder is not None and self.recorder.end == "failed"

    @property
    def owner(self) -> object | None:
        return self.recorder if self.concurrent else None

    def observed(self, *values: object) -> None:
        if self.concurrent and self.recorder is not None:
            self.recorder.observed(*values)

    def enter(self, tells: bool) -> None:
        if self.concurrent and self.recorder is not None:
            self.recorder.enter(tells)

    def waits_on(self) -> None:
        """Also called by a delivery that is not the running one."""
        if self.concurrent and self.actor_of_thread is not None:
            self.actor_of_thread().waits_on()

    def blocked(self) -> bool:
        return self.recorder is not None and self.recorder.blocked()

    def claim_path(self, path: str) -> None:
        if self.escapes is not None:
            self.escapes.claim_path(path)

    def claim_address(self, address: object) -> None:
        if self.escapes is not None:
            self.escapes.claim_address(address)

    def claim_connection(self, connection: object) -> None:
        if self.escapes is not None:
            self.escapes.claim_connection(connection)

    def options(self, name: str) -> Any:
        return self._options[name]

    @property
    def private(self) -> bool:
        """A fork has a world of its own, as far as resources are known; or can be given one by part()."""
        return all(resource.private for resource in self.resources.values())

    def part(self, saved: Saved, folder: str) -> None:
        """This process, a fork, is going to deliver from `saved` while its parent delivers. Raises SharedError."""
        self.beside = True
        for source in self.sources:
            source.part(saved.blobs, folder)

    # -- for deliveries and the explorer ----------------------------------------------------------------------------

    def install(self) -> None:
        for source in self.sources:
            source.install()

    def uninstall(self) -> None:
        for source in reversed(self.sources):
            source.uninstall()

    @property
    def dirty(self) -> bool:
        """Something may have been committed since the last look."""
        return bool(self._touched)

    def facts(self) -> Facts:
        """The committed state now; only what was touched is read again."""
        touched, self._touched = self._touched, {}
        for resource in touched.values():
            resource.refresh()
        self._settle()
        return {name: resource.version for name, resource in self.resources.items()}

    def sweep(self) -> Facts:
        """The committed state now, everything read again."""
        self._touched.clear()
        for resource in list(self.resources.values()):
            resource.sweep()
        self._settle()
        return {name: resource.version for name, resource in self.resources.items()}

    def _settle(self) -> None:
        for settle in self.settling:
            settle(self.resources)

    def save(self) -> Saved:
        """The current state, to come back to. Only right while what facts() returned last is still the state."""
        waiting = self._wanted
        facts = {name: resource.version for name, resource in self.resources.items()}
        blobs = {name: resource.save() for name, resource in self.resources.items()}
        return Saved(
            {**{name: version for name, (version, _) in waiting.items()}, **facts},
            {**{name: blob for name, (_, blob) in waiting.items()}, **blobs},
            self.now(),
        )

    def restore(self, saved: Saved | None) -> None:
        """Go back to `saved` (None: as everything was found).

        A resource that `saved` does not know was untouched then. One that is yet to be found here (a forked delivery
        finds its world anew) is restored when it is found.
        """
        self._touched.clear()
        facts = {} if saved is None else saved.facts
        self._wanted = {n: (v, saved.blobs[n]) for n, v in facts.items() if saved and n not in self.resources}
        for name, resource in self.resources.items():
            if saved is not None and name in saved.facts:
                version, blob = saved.facts[name], saved.blobs[name]
            else:
                version, blob = self.found_facts[name], self._found_blobs[name]
            resource.restore(version, blob)
            self._shift_ids(resource)

    def land(self, ahead: float) -> None:
        """The check is over: real time goes on, and the virtual clock was `ahead` of it by so many seconds."""
        for resource in self.resources.values():
            resource.land(ahead)

    def distrust(self) -> None:
        """Another process has worked on the stores: what was read of them before counts for nothing."""
        for resource in self.resources.values():
            resource.distrust()

    def found(self) -> Saved:
        """How every resource was found."""
        return Saved(dict(self.found_facts), dict(self._found_blobs), self.now())

    def end_delivery(self) -> list[str]:
        for source in self.sources:
            source.end_delivery()
        return [line for resource in list(self.resources.values()) for line in resource.end_delivery()]

    def arrive(self) -> None:
        """Also called by a delivery that is not the running one: it has waited in the server meanwhile."""
        if self.concurrent and self.actor_of_thread is not None:
            self.actor_of_thread().arrive()

    def cancel(self, owner: object) -> None:
        """The statement of a delivery that waits in a server ends."""
        for source in self.sources:
            source.cancel(owner)

    def leave(self, owner: object) -> None:
        """One of several deliveries has ended or died: what it had open is gone, the others go on."""
        before, self.recorder = self.recorder, None
        quiet, self.quiet = self.quiet, True
        try:
            for source in self.sources:
                source.leave(owner)
        finally:
            self.recorder, self.quiet = before, quiet

    def shift(self, seconds: float) -> None:
        now = self.now()
        for resource in self.resources.values():
            resource.shift(seconds)
            if any(end <= now for end in resource.version.expiries):
                self.touched(resource)

    def _shift_ids(self, resource: Resource) -> None:
        if self.shifted:
            resource.shift_ids(ID_SHIFT)

    def close(self) -> None:
        for resource in self.resources.values():
            resource.close()
