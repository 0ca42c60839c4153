"""Folders as a resource: what a crash leaves is what has reached the kernel, and that is all that is compared.

Files that ``tempfile`` has named are memory of the delivery that made them, as long as nobody else can know of them:
what is left of them after a crash is no fault. They count from the moment on that the job has ended, or that their name
stands in other committed data.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from retrychaos.model.errors import WorldError
from retrychaos.model.ledger import Relation, Row, Version
from retrychaos.world.files_contents import COLUMNS, FOLDER, LINK, Disk, PathState, States, TooMuch, rows, stamp
from retrychaos.world.resource import Blob, Plain, Resource, Stage

NAME = "files"


class Folders(Plain):
    """All declared folders. `roots` are real paths; the first is shown without its name."""

    name = NAME
    label = "the declared files"
    private = False  # a delivery in a fork works on the same disk
    alone = ""

    def __init__(self, stage: Stage, roots: Iterable[str], holds: Callable[[object], str]) -> None:
        self._stage = stage
        self._holds = holds
        self._disks: dict[str, Disk] = {}
        self._states: dict[str, dict[str, PathState]] = {}
        self._dirty: set[str] = set()
        self._all_dirty = False
        self._relations: dict[tuple[Row, ...], Relation] = {}
        self._searched: dict[int, tuple[Version, set[str]]] = {}
        self._notes: list[str] = []
        self.logs: set[str] = set()
        """Files that ``logging`` writes to: of no interest."""
        self.temporary: dict[str, tuple[str, object]] = {}
        """Path of a file or folder that is the private matter of a delivery -> the random part of its name, and whose
        it is."""
        self.links = False
        """There are, or were, symbolic links in there."""
        self.version = Version({})
        self.commits = 0
        for root in roots:
            self._disks[root] = Disk(root)
        self._read_all()
        self.version = self._built()

    # -- what the source tells ---------------------------------------------------------------------------------------

    def mark(self, paths: Iterable[str], everything: bool = False) -> None:
        """These paths may be others now, by a step that was just done; or a whole tree."""
        self._dirty.update(paths)
        self._all_dirty = self._all_dirty or everything
        self._stage.touched(self)

    def rebound(self) -> None:
        """A name stands for another file now, also if that looks the same: who has the old one open writes there."""
        self.commits += 1
        self._stage.touched(self)

    def note(self, text: str) -> None:
        self._notes.append(text)

    def publish(self, owner: object) -> None:
        """A delivery has come to its end: what it has left under a temporary name is a result."""
        for path, (_, maker) in list(self.temporary.items()):
            if maker is owner:
                del self.temporary[path]
                self.mark([path], everything=True)

    def forget(self, owner: object) -> None:
        """A delivery has died, or failed: what it had for itself is nobody's any more."""
        mine = [path for path, (_, maker) in self.temporary.items() if maker is owner]
        if not mine:
            return
        for root, disk in self._disks.items():
            there = disk.read_all(self._skipped(root), all_sizes=True)
            gone = {path for path in there if self._is_private(disk.full(path), mine)}
            disk.put_back(there, {path: state for path, state in there.items() if path not in gone})
            self._states[root] = {path: state for path, state in self._states[root].items() if path not in gone}
        for path in mine:
            del self.temporary[path]

    def reveal(self, resources: Mapping[str, Resource]) -> None:
        """A temporary file whose name was committed elsewhere is no private matter any more."""
        for path, (token, _) in list(self.temporary.items()):
            if any(self._mentions(each, token) for each in resources.values() if each is not self):
                del self.temporary[path]
                self.mark([path], everything=True)
        if self._dirty or self._all_dirty:
            self.refresh()

    def _mentions(self, resource: Resource, token: str) -> bool:
        version = resource.version
        known = self._searched.get(id(version))
        if known is None or known[0] is not version:
            # What went outside is nothing that anybody looks up.
            kept = [relation for relation in version.relations.values() if not relation.external]
            words = {str(cell) for relation in kept for row in relation.rows for cell in row if cell}
            known = self._searched[id(version)] = (version, words)
        return any(token in word for word in known[1])

    def strangers(self) -> Iterator[str]:
        """Paths that are others than the steps have left them."""
        self.refresh()
        for root, disk in self._disks.items():
            try:
                now = disk.read_all(self._skipped(root))
            except TooMuch:
                yield root
                continue
            before = self._states[root]
            for path in sorted({*now, *before}):
                mine, theirs = before.get(path), now.get(path)
                if mine is None or not mine.same(theirs):
                    yield disk.full(path)
            self._states[root] = now

    # -- Resource ----------------------------------------------------------------------------------------------------

    def refresh(self) -> Version:
        if not self._dirty and not self._all_dirty:
            return self.version
        dirty, self._dirty = self._dirty, set()
        if self._all_dirty:
            self._all_dirty = False
            changed = self._read_all()
        else:
            changed = False
            for full in dirty:
                changed = self._look_at(full) or changed
        self._reveal_inside()
        if changed:
            self.version = self._built()
        return self.version

    def sweep(self) -> Version:
        self._all_dirty = True
        return self.refresh()

    def save(self) -> Blob:
        return {root: dict(self._public(root)) for root in self._disks}

    def restore(self, version: Version, blob: Blob) -> None:
        self.temporary.clear()
        self._dirty.clear()
        self._all_dirty = False
        for root, disk in self._disks.items():
            wanted: States = blob.get(root, {})
            try:
                disk.put_back(disk.read_all(self._skipped(root), all_sizes=True), wanted)
            except TooMuch as problem:
                self._give_up(problem)
            except OSError as problem:
                raise WorldError(
                    f"{root} could not be put back into the state before a delivery ({problem}), and without that a "
                    "crash cannot be simulated there. Give the check a folder in which it may write and delete."
                ) from problem
            self._states[root] = dict(wanted)
        self.version = version

    def end_delivery(self) -> Sequence[str]:
        notes, self._notes = self._notes, []
        return notes

    def shift(self, seconds: float) -> None:
        """Files do not end by themselves; their times are those of the virtual clock already."""

    def land(self, ahead: float) -> None:
        """What was written at a virtual time has that age in real time, too."""
        begun = self._stage.now() - ahead
        for root, states in self._states.items():
            for path, state in states.items():
                if state.kind != FOLDER and state.mtime / 1e9 > begun:
                    stamp(self._disks[root].full(path), state.mtime / 1e9 - ahead)

    def shift_ids(self, by: int) -> None:
        """Files draw no ids."""

    def holds(self, owner: object) -> str:
        return self._holds(owner)

    def distrust(self) -> None:
        """Restoring looks at the disk anyway."""

    def close(self) -> None:
        self._relations.clear()
        self._searched.clear()

    # -- inside ------------------------------------------------------------------------------------------------------

    def place(self, full: str) -> tuple[str, str] | None:
        """The folder that a path lies in, and the path relative to it."""
        for root in self._disks:
            if full.startswith(root + os.sep):
                return root, full[len(root) + 1 :]
        return None

    def content_of(self, full: str) -> str:
        """Stands for what is under a path, and below it."""
        self.refresh()
        below = [
            (path, state.mode, state.data)
            for root, states in self._states.items()
            for path, state in states.items()
            if self._is_private(self._disks[root].full(path), [full])
        ]
        return hashlib.blake2b(repr(below).encode(), digest_size=8).hexdigest()

    def _look_at(self, full: str) -> bool:
        """Read one path again; True if it makes another version."""
        place = self.place(full)
        if place is None or full in self.logs:
            return False
        root, path = place
        try:
            state = self._disks[root].read(path)
        except TooMuch as problem:
            self._give_up(problem)
            return False
        states = self._states[root]
        old = states.get(path)
        self.links = self.links or (state is not None and state.kind == LINK)
        if (old is None) is not (state is None):
            self.commits += 1
        if state is None:
            states.pop(path, None)
            changed = old is not None
        else:
            states[path] = state
            if old is None:
                self._states[root] = dict(sorted(states.items()))
            changed = not state.same(old)
        return changed and not self._is_private(full)

    def _read_all(self) -> bool:
        changed = False
        for root, disk in self._disks.items():
            try:
                now = disk.read_all(self._skipped(root))
            except TooMuch as problem:
                self._give_up(problem)
                continue
            self._states[root] = now
            self.links = self.links or any(state.kind == LINK for state in now.values())
            changed = True
        return changed

    def _reveal_inside(self) -> None:
        for path, (token, _) in list(self.temporary.items()):
            word = token.encode()
            if any(word in state.data for root in self._disks for _, state in self._public(root)):
                del self.temporary[path]

    def _skipped(self, root: str) -> set[str]:
        return {log[len(root) + 1 :] for log in self.logs if log.startswith(root + os.sep)}

    def _is_private(self, full: str, among: Iterable[str] | None = None) -> bool:
        return any(
            full == each or full.startswith(each + os.sep) for each in (self.temporary if among is None else among)
        )

    def _public(self, root: str) -> Iterator[tuple[str, PathState]]:
        disk, states = self._disks[root], self._states[root]
        if not self.temporary:
            return iter(states.items())
        return ((path, state) for path, state in states.items() if not self._is_private(disk.full(path)))

    def _built(self) -> Version:
        found: list[Row] = []
        for number, root in enumerate(self._disks):
            found += rows(f"{root}{os.sep}" if number else "", dict(self._public(root)))
        key = tuple(found)
        current = self.version.relations.get(NAME)
        if current is not None and current.rows == key:
            return self.version
        known = self._relations.get(key)
        if known is None:
            known = self._relations[key] = Relation(NAME, COLUMNS, key)
        return Version({NAME: known})

    def _give_up(self, problem: TooMuch) -> None:
        refusal = WorldError(
            f"{problem}: a check keeps a copy of the folder for every state that a crash can leave, and this would be "
            "too much. Let the job write less under test, or declare a smaller folder."
        )
        if not self._stage.running:
            raise refusal
        self._stage.fail(refusal)
