"""What a folder holds: one state a path, read from disk and put back, and as rows of a ledger.

All that is done here goes past the hooks: it is the harness that looks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from retrychaos.model.ledger import Row

FILE, FOLDER, LINK = "file", "folder", "link"
COLUMNS: Final = ("path", "what", "content")
MOST_BYTES = 50_000_000
"""The largest file of which a copy is kept for every state."""
MOST_PATHS = 20_000
_SMALL = 65_536
"""Bytes up to which a file is always read again, and shown as text."""
_MOST_LINES = 1_000
_SQLITE = b"SQLite format 3\0"
_COMPANIONS = ("-journal", "-wal", "-shm")

_open, _read, _close, _write, _fstat = os.open, os.read, os.close, os.write, os.fstat
_lstat, _scandir, _readlink, _unlink, _rmdir = os.lstat, os.scandir, os.readlink, os.unlink, os.rmdir
_mkdir, _symlink, _chmod, _utime = os.mkdir, os.symlink, os.chmod, os.utime
_mask = os.umask(0o022)
os.umask(_mask)


class TooMuch(Exception):
    """A file or folder is larger than what can be kept for every state."""


@dataclass(frozen=True)
class PathState:
    """What is at one path. `data` is the content of a file or the target of a link; `mtime` in nanoseconds."""

    kind: str
    mode: int
    data: bytes
    mtime: int

    def same(self, other: PathState | None) -> bool:
        """Times of modification apart."""
        return other is not None and (self.kind, self.mode, self.data) == (other.kind, other.mode, other.data)

    @cached_property
    def cells(self) -> tuple[tuple[str, str | int], ...]:
        """The rows that show it, without the path."""
        if self.kind != FILE:
            return ((self.kind, os.fsdecode(self.data)),)
        found = tuple(_content(self.data))
        usual = 0o666 & ~_mask
        return found if self.mode == usual else (*found, ("mode", f"{self.mode:o}"))


States = Mapping[str, PathState]
"""Path relative to the folder -> what is there."""
Look = tuple[int, int, int, int]
"""Inode, size, and times of the last change, by which a large file is known again without reading it."""


def _content(data: bytes) -> Iterator[tuple[str, str | int]]:
    """Line by line where that reads well: a line that was appended twice is then one row too many.

    The digest is that of the whole, since the order of lines is content, too.
    """
    text = _text(data)
    lines = [] if text is None else text.splitlines(keepends=True)
    if text is not None and len(lines) <= 1:
        yield ("text", text)
        return
    if text is not None and len(lines) <= _MOST_LINES:
        yield from (("line", line) for line in lines)
    else:
        yield ("size", len(data))
    yield ("digest", hashlib.blake2b(data, digest_size=16).hexdigest())


def _text(data: bytes) -> str | None:
    if len(data) > _SMALL:
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def rows(prefix: str, states: States) -> Iterator[Row]:
    for path, state in states.items():
        for what, content in state.cells:
            yield (prefix + path, what, content)


# -- reading ---------------------------------------------------------------------------------------------------------


class Disk:
    """One folder on the disk."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._looks: dict[str, tuple[Look, PathState]] = {}
        self._databases: set[str] = set()

    def full(self, path: str) -> str:
        return os.path.join(self.root, path)

    def read_all(
        self, skip: frozenset[str] | set[str] = frozenset(), *, all_sizes: bool = False
    ) -> dict[str, PathState]:
        """Everything below the folder, in a steady order. Raises TooMuch.

        all_sizes: what is too large is there, but its content is not told.
        """
        found: dict[str, PathState] = {}
        folders = [""]
        while folders:
            folder = folders.pop()
            with contextlib.suppress(OSError), _scandir(self.full(folder) if folder else self.root) as entries:
                names = sorted(entry.name for entry in entries)
            for name in names:
                path = os.path.join(folder, name)
                if path in skip:
                    continue
                try:
                    state = self.read(path)
                except TooMuch:
                    if not all_sizes:
                        raise
                    state = PathState(FILE, -1, b"", 0)
                if state is None:
                    continue
                found[path] = state
                if len(found) > MOST_PATHS:
                    raise TooMuch(f"more than {MOST_PATHS} files and folders")
                if state.kind == FOLDER:
                    folders.append(path)
        return dict(sorted(found.items()))

    def read(self, path: str) -> PathState | None:
        """What is at that path; None for nothing, and for what is no file, folder or link. Raises TooMuch."""
        full = self.full(path)
        try:
            look = _lstat(full)
        except OSError:
            return None
        mode, mtime = stat.S_IMODE(look.st_mode), look.st_mtime_ns
        if stat.S_ISDIR(look.st_mode):
            return PathState(FOLDER, mode, b"", mtime)
        if stat.S_ISLNK(look.st_mode):
            return PathState(LINK, 0, os.fsencode(_readlink(full)), mtime)
        if not stat.S_ISREG(look.st_mode) or self._is_database(path):
            return None
        mark = (look.st_ino, look.st_size, mtime, look.st_ctime_ns)
        known = self._looks.get(path)
        if known is not None and known[0] == mark and look.st_size > _SMALL:
            return known[1]
        if look.st_size > MOST_BYTES:
            raise TooMuch(f"{full} is larger than {MOST_BYTES // 1_000_000} MB")
        data = _contents(full)
        if data is None:
            return None
        if data.startswith(_SQLITE):
            self._databases.add(path)
            return None
        if known is not None and known[1].data == data:
            data = known[1].data  # one copy for all states
        state = PathState(FILE, mode, data, mtime)
        if known is not None and known[1] == state:
            state = known[1]
        self._looks[path] = (mark, state)
        return state

    def _is_database(self, path: str) -> bool:
        """A SQLite database belongs to the SQL resource."""
        base = next((path.removesuffix(end) for end in _COMPANIONS if path.endswith(end)), None)
        return base is not None and (base in self._databases or (_contents(self.full(base), 16) or b"") == _SQLITE)

    # -- writing -----------------------------------------------------------------------------------------------------

    def put_back(self, there: States, wanted: States) -> None:
        """Make `wanted` of what is `there`, touching only what differs. Raises OSError."""
        for path in sorted(there, reverse=True):
            target = wanted.get(path)
            if target is None or target.kind != there[path].kind:
                (_rmdir if there[path].kind == FOLDER else _unlink)(self.full(path))
        for path, state in sorted(wanted.items()):
            old = there.get(path)
            if old is None or old.kind != state.kind or not state.same(old):
                self._put(path, state, old if old is not None and old.kind == state.kind else None)
        for path, state in sorted(wanted.items(), reverse=True):  # what is put into a folder changes its time
            look = _lstat(self.full(path)) if state.kind != LINK else None
            if look is not None and look.st_mtime_ns != state.mtime:
                _utime(self.full(path), ns=(state.mtime, state.mtime))

    def _put(self, path: str, state: PathState, old: PathState | None) -> None:
        full = self.full(path)
        if state.kind == FOLDER:
            if old is None:
                _mkdir(full)
            _chmod(full, state.mode)
            return
        if old is not None and (state.kind == LINK or old.data != state.data):
            _unlink(full)  # another name of the same file keeps its content
            old = None
        if state.kind == LINK:
            _symlink(os.fsdecode(state.data), full)
            return
        if old is None:
            fd = _open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                view = memoryview(state.data)
                while view:
                    view = view[_write(fd, view) :]
            finally:
                _close(fd)
        _chmod(full, state.mode)


def stamp(where: str | int, instant: float) -> None:
    """A change that was just made happened at that time."""
    moment = round(instant * 1_000_000_000)
    with contextlib.suppress(OSError):
        _utime(where, ns=(moment, moment))


def _contents(full: str, most: int | None = None) -> bytes | None:
    try:
        fd = _open(full, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return None
    try:
        size = _fstat(fd).st_size if most is None else most
        pieces = []
        while piece := _read(fd, max(1, min(size, 1 << 24))):
            pieces.append(piece)
            if most is not None:
                break
        return b"".join(pieces)
    except OSError:
        return None
    finally:
        _close(fd)
