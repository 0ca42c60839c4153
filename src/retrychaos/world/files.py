"""Files: everything that a job does below a declared folder is a step, down to each write that reaches the kernel.

This module knows which files deliveries have open and whose they are; files_hooks.py has the functions that stand in
the place of those of ``os``, files_stream.py what ``open`` returns, files_locks.py locks on files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import string
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from retrychaos.model.plan import ERROR
from retrychaos.model.values import short
from retrychaos.world.files_contents import stamp
from retrychaos.world.files_folder import NAME, Folders
from retrychaos.world.handles import path_behind
from retrychaos.world.resource import Blob, Stage

if TYPE_CHECKING:
    from retrychaos.world.files_hooks import Hooks
    from retrychaos.world.files_stream import Stream

T = TypeVar("T")
_real_close = os.close
_KIND = re.compile(r"\.[A-Za-z][A-Za-z0-9]{0,7}$")
_PATHS = frozenset({"posixpath", "genericpath", "ntpath", "os"})


SHARED, EXCLUSIVE = "shared", "exclusive"


@dataclass(eq=False)
class Opened:
    """A descriptor that a delivery has open below a declared folder."""

    path: str
    owner: object
    stream: weakref.ref[Stream] | None = None
    locks: dict[str, str] = field(default_factory=dict)


def refused(path: str) -> OSError:
    """What a job gets where nothing could be written."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def unanswered(path: str) -> OSError:
    """What a job gets where it was written, and the answer is an error nevertheless."""
    return OSError(errno.EIO, os.strerror(errno.EIO), path)


class FilesSource:
    """Sees what deliveries do below the declared folders.

    ``after_delivery()`` is called while the stage still takes doubts.
    """

    def __init__(self, stage: Stage, roots: Iterable[str]) -> None:
        self.stage = stage
        self.roots: list[str] = []
        self._as_given: list[tuple[str, str]] = []
        self.opened: dict[int, Opened] = {}
        self.drawn: list[str] = []
        """Random parts of names that ``tempfile`` has made up in this check."""
        self.exclusive: set[str] = set()
        """Files on which a job has ever asked for an exclusive lock. Elsewhere nobody notices a shared one."""
        self.listed: set[str] = set()
        """Folders in which a job has ever looked what there is: there it meets the temporary files of others."""
        self._rebound: set[str] = set()
        """Paths that are ever removed, or come to stand for another file: what is open there may lose its name."""
        self._gone: weakref.WeakSet[Any] = weakref.WeakSet()
        self._folders: Folders | None = None
        self._hooks: Hooks | None = None
        self._ours: set[int] = set()
        for root in roots:
            self._add(root)

    def _add(self, root: str) -> None:
        given, real = os.path.abspath(root), os.path.realpath(root)
        if real in self.roots:
            return
        self.roots.append(real)
        self._as_given += [(each, real) for each in dict.fromkeys((given, real))]
        self.stage.claim_path(real)

    # -- Source ------------------------------------------------------------------------------------------------------

    def install(self) -> None:
        from retrychaos.world.files_hooks import Hooks

        if self._hooks is None:
            self._hooks = Hooks(self)
            self._hooks.install()

    def uninstall(self) -> None:
        if self._hooks is not None:
            self._hooks.uninstall()
            self._hooks = None
        self._close_all(lambda _: True)

    def part(self, blobs: Mapping[str, Blob], folder: str) -> None:
        """Files are not private: Folders says so."""

    def after_delivery(self) -> None:
        """The job has ended: what is open is lost, and what nobody has seen is told."""
        folders = self._folders
        if folders is None:
            return
        if self.stage.owner is None:
            for opened in list(self.opened.values()):
                self._warn_if_lost(opened)
            if self.stage.failed:
                folders.forget(None)
            else:
                folders.publish(None)
        strange = list(folders.strangers())
        if strange:
            more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
            self.stage.doubt(
                f"{strange[0]}{more} changed in a way that was not seen: by another process, a library in C, through "
                "mmap, or through a file that was open before the check. Where a crash would have left it is unknown. "
                "Write it with Python's own functions, from the job itself."
            )

    def end_delivery(self) -> None:
        self._close_all(lambda _: True)
        self.drawn.clear()

    def cancel(self, owner: object) -> None:
        """Nothing waits in a server."""

    def leave(self, owner: object) -> None:
        self._gone.add(owner)
        self._close_all(lambda opened: opened.owner is owner)
        if self._folders is not None:
            if getattr(owner, "end", "") == "done":
                self._folders.publish(owner)
            else:
                self._folders.forget(owner)

    def reveal(self, resources: Mapping[str, Any]) -> None:
        """See Folders.reveal()."""
        if self._folders is not None and self._folders.temporary:
            self._folders.reveal(resources)

    # -- for hooks ---------------------------------------------------------------------------------------------------

    @property
    def watching(self) -> bool:
        """What is done now is done by a delivery."""
        return self.stage.running and threading.get_ident() not in self._ours

    @property
    def gone(self) -> bool:
        """The delivery that does something now has died; its thread is only unwound."""
        owner = self.stage.owner
        return owner is not None and owner in self._gone

    @property
    def folders(self) -> Folders:
        """The resource, known to the stage."""
        if self._folders is None:
            with self.aside():
                self._folders = Folders(self.stage, self.roots, self._shown)
                self._folders.logs.update(self._hooks.logs if self._hooks is not None else ())
        if self.stage.find(NAME) is not self._folders:
            with self.aside():
                self.stage.adopt(self._folders)
        return self._folders

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What this thread does here is our own business, or part of a step that was announced."""
        thread = threading.get_ident()
        if thread in self._ours:
            yield
            return
        self._ours.add(thread)
        try:
            yield
        finally:
            self._ours.discard(thread)

    def place(self, path: Any, folder: int | None = None, *, follow: bool = False) -> str | None:
        """The real path of something below a declared folder; None for anything else.

        folder: a descriptor that a relative path starts from. follow: of a link, where it leads.
        """
        if isinstance(path, int):
            opened = self.opened.get(path)
            return None if opened is None else opened.path
        try:
            name = os.fsdecode(path)
        except TypeError:
            return None
        if not os.path.isabs(name):
            with self.aside():
                base = os.getcwd() if folder is None else path_behind(folder)
            if base is None:
                return None
            name = os.path.join(base, name)
        full = os.path.normpath(name)
        root = next((each for each in self._as_given if full == each[0] or full.startswith(each[0] + os.sep)), None)
        if root is None:
            return None
        if self._folders is not None and not self._folders.links:
            return root[1] + full[len(root[0]) :]
        with self.aside():
            if follow and os.path.islink(full):
                full = os.path.realpath(full)
            elif full not in self.roots:
                full = os.path.join(os.path.realpath(os.path.dirname(full)), os.path.basename(full))
                full = next((real for given, real in self._as_given if full == given), full)
        return full if any(full == root or full.startswith(root + os.sep) for root in self.roots) else None

    def is_log(self, full: str) -> bool:
        return self._hooks is not None and full in self._hooks.logs

    def act(
        self,
        verb: str,
        paths: tuple[str, ...],
        do: Callable[[], T],
        see: Callable[[T], object],
        *,
        changes: bool = False,
        tree: Callable[[], bool] | None = None,
        detail: str = "",
    ) -> T:
        """A step: the boundary, what is done, and what the job is told.

        changes: the paths may be others afterwards. tree: does that go for all that lies below them?
        """
        folders = self.folders
        names = " -> ".join(self._shown_path(path) for path in paths)
        kinds = " -> ".join(map(_kind, paths))  # names may be drawn at random
        self.stage.step("file", folders, f"{verb} {kinds}", f"{verb} {names}{detail}")
        if changes:
            self.stage.strike(ERROR, lambda: refused(paths[0]))
        whole = changes and tree is not None and tree()
        try:
            with self.aside():
                done = do()
        except OSError as error:
            self.stage.observed("error", type(error).__name__, error.errno)
            raise
        finally:
            if changes:
                folders.mark(paths, whole)
        if changes:
            now = self.stage.now()
            for path in paths:
                stamp(path, now)
        self.stage.observed(see(done))
        return done

    def _shown_path(self, path: str) -> str:
        first = self.roots[0]
        return os.path.relpath(path, first) if path.startswith(first + os.sep) else path

    def opening(self, fd: int, path: str) -> None:
        """A descriptor was opened by the running delivery."""
        self.opened[fd] = Opened(path, self.stage.owner)

    def made(self, path: str) -> None:
        """A file or folder was created."""
        name = os.path.basename(path)
        token = next((token for token in self.drawn if token in name), None)
        if token is not None:
            self.folders.temporary[path] = (token, self.stage.owner)

    def moved(self, path: str) -> None:
        """There is nothing under that name any more, or something else."""
        self._rebound.add(path)
        self.folders.rebound()
        for known in list(self.folders.temporary):
            if known == path or known.startswith(path + os.sep):
                del self.folders.temporary[known]

    def draw(self) -> str:
        """The random part of a name, for ``tempfile``: recognised later, unlike its own."""
        token = ""
        while not token.strip(string.digits):  # one that is not taken for a number
            token = os.urandom(6).hex()
        self.drawn.append(token)
        return f"_{token}"

    # -- inside ------------------------------------------------------------------------------------------------------

    def _shown(self, owner: object) -> str:
        """What others can notice of a delivery: its locks; and that it has a file open which may lose its name."""
        mine = [opened for opened in self.opened.values() if opened.owner is owner]
        locks = sorted(
            f"{opened.path}: {lock}"
            for opened in mine
            for lock in opened.locks.values()
            if lock == EXCLUSIVE or opened.path in self.exclusive
        )
        temporary = self._folders.temporary if self._folders is not None else {}
        met = [
            path for path, (_, maker) in temporary.items() if maker is owner and os.path.dirname(path) in self.listed
        ]
        shown = [*locks, *(f"{path}: {self.folders.content_of(path)}" for path in sorted(met))]
        return "; ".join(shown) or ("open" if any(opened.path in self._rebound for opened in mine) else "")

    def _close_all(self, which: Callable[[Opened], bool]) -> None:
        for fd, opened in list(self.opened.items()):
            if not which(opened):
                continue
            stream = opened.stream() if opened.stream is not None else None
            if stream is not None:
                stream.die()
            else:
                with contextlib.suppress(OSError):
                    _real_close(fd)
            self.opened.pop(fd, None)

    def _warn_if_lost(self, opened: Opened) -> None:
        stream = opened.stream() if opened.stream is not None else None
        lost = stream.unwritten() if stream is not None else 0
        if lost:
            self.folders.note(
                f"{self._shown_path(opened.path)} was still open when the job returned, and {lost} bytes in its buffer "
                "were lost. Close it, or use a with statement."
            )


def by_harness(depth: int) -> bool:
    """The caller of a function that looks at paths is the harness itself."""
    frame = sys._getframe(depth + 1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _PATHS:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).startswith("retrychaos.")


def _kind(path: str) -> str:
    found = _KIND.search(path)
    return f"*{found[0]}" if found else "*"


def briefly(data: Any) -> str:
    return short(bytes(data[:80]), 60)
