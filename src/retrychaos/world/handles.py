"""Files that were open before a delivery: what is written to them shows in their size and time.

This needs ``/proc/self/fd``: elsewhere than on Linux such writes are not seen.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import logging
import os
import stat
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

_DESCRIPTORS = "/proc/self/fd"

File: TypeAlias = tuple[int, int]
"""Device and inode."""


@dataclass(frozen=True)
class Handle:
    """A file open for writing before the delivery."""

    path: str
    file: File
    look: tuple[int, int]
    """Size and time of the last change."""


class Handles:
    """The handles that a delivery finds open, and what became of their files."""

    def __init__(self) -> None:
        self._before: dict[int, Handle] = {}
        self._excused: set[File] = set()
        self._last: dict[int, Handle] = {}
        self._descriptors: list[str] = []
        self._writable: list[int] = []
        self._buffers: dict[tuple[int, File], list[weakref.ref[Any]]] = {}

    def excuse(self, stream: Any) -> None:
        """Writes to that open file are of no interest."""
        self._excused.update(_files_of([stream]))

    def begin(self) -> None:
        """A delivery is about to begin: keep the present look of all handles."""
        self._before = self.look()

    def end(self) -> None:
        self._before = {}

    def changed(self) -> list[tuple[int, Handle]]:
        """Handles whose files were written to since the delivery began, or since accept()."""
        found = []
        for fd, handle in self._before.items():
            self._flush(fd, handle)
            now = _stat(fd)
            if now is None or _file_of(now) != handle.file:
                now = _stat(handle.path)  # closed meanwhile
            if now is not None and _file_of(now) == handle.file and _look_of(now) != handle.look:
                found.append((fd, handle))
        return found

    def accept(self) -> None:
        """What was written until now is known: only later writes count."""
        for fd, handle in self.changed():
            self._before[fd] = _look_at(fd, {}) or handle

    def forget(self) -> None:
        """As if no handle had ever been looked at."""
        self._before, self._last = {}, {}
        self._descriptors, self._writable = [], []
        self._buffers = {}

    def harmless(self) -> set[File]:
        """Files that are excused, standard output and error, ours and those of the processes above us, and logs."""
        return self._excused | output_above() | set(_files_of((1, 2, *_log_streams())))

    def look(self) -> dict[int, Handle]:
        """All handles that are open for writing now, with nothing left in their buffers."""
        if fcntl is None:
            return {}
        try:
            names = os.listdir(_DESCRIPTORS)
        except OSError:
            return {}
        # Looking at each takes long. Files that deliveries open are seen by the hook, so those at the start are enough.
        known = self._writable if names == self._descriptors else map(int, names)
        self._descriptors = names
        looked = ((fd, _look_at(fd, self._last)) for fd in known)
        handles = {fd: handle for fd, handle in looked if handle is not None}
        self._writable = list(handles)
        self._last = self._with_buffers(handles)
        return dict(self._last)

    def _with_buffers(self, handles: dict[int, Handle]) -> dict[int, Handle]:
        """Flush what was written before the delivery, so that it does not look like the job's doing."""
        fresh = {
            fd: handle.file
            for fd, handle in handles.items()
            if (fd, handle.file) not in self._buffers and not _is_sqlite(fd, handle.path)
        }
        if fresh:
            self._buffers.update({(fd, file): [] for fd, file in fresh.items()})
            harmless = self.harmless()  # what goes there is never judged
            for fd, stream in _streams({fd: file for fd, file in fresh.items() if file not in harmless}):
                self._buffers[fd, fresh[fd]].append(weakref.ref(stream))
        for fd, handle in handles.items():
            if self._flush(fd, handle):
                handles[fd] = _look_at(fd, handles) or handle
        return handles

    def _flush(self, fd: int, handle: Handle) -> bool:
        """What a process writes at its end, too. Whether there was anything to ask."""
        streams = self._buffers.get((fd, handle.file), ())
        for reference in streams:
            stream = reference()
            with contextlib.suppress(Exception):
                if stream is not None:
                    stream.flush()
        return bool(streams)


def is_open(path: str) -> bool:
    """This process has a descriptor of that file, or it cannot be known."""
    wanted = _stat(path)
    try:
        names = os.listdir(_DESCRIPTORS)
    except OSError:
        return True
    looks = (_stat(f"{_DESCRIPTORS}/{name}") for name in names)
    return wanted is None or any(look is not None and _file_of(look) == _file_of(wanted) for look in looks)


def path_behind(fd: int) -> str | None:
    """The path of an open file or folder."""
    try:
        return os.readlink(f"{_DESCRIPTORS}/{fd}")
    except OSError:
        return None


def _look_at(fd: int, known: Mapping[int, Handle]) -> Handle | None:
    """A regular file with a name that is open for writing."""
    try:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            return None
        found = os.fstat(fd)
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode) or not found.st_nlink:
        return None
    file = _file_of(found)
    before = known.get(fd)
    path = before.path if before is not None and before.file == file else path_behind(fd)
    return None if path is None else Handle(path, file, _look_of(found))


def _is_sqlite(fd: int, path: str) -> bool:
    if path.endswith(("-journal", "-wal", "-shm")):
        return True
    try:
        return os.pread(fd, 16, 0) == b"SQLite format 3\0"
    except OSError:
        return False


def _streams(wanted: Mapping[int, object]) -> Iterator[tuple[int, Any]]:
    """Python files with a buffer on one of the `wanted` descriptors. Slow: looks at every object there is."""
    if not wanted:
        return
    kinds = {io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom}
    for candidate in gc.get_objects():
        if type(candidate) in kinds:
            with contextlib.suppress(Exception):
                if candidate.fileno() in wanted:
                    yield candidate.fileno(), candidate


def _log_streams() -> Iterator[Any]:
    for reference in list(logging._handlerList):  # type: ignore[attr-defined]
        handler = reference()
        yield getattr(handler, "stream", None)
    loguru = sys.modules.get("loguru")
    with contextlib.suppress(Exception):
        for handler in list(loguru.logger._core.handlers.values()):  # type: ignore[union-attr]
            sink = getattr(handler, "_sink", None)
            yield getattr(sink, "_file", None) or getattr(sink, "_stream", None)


@functools.cache
def output_above() -> frozenset[File]:
    """Where the processes above us write, such as the controller of xdist and what started it: into a log, in CI."""
    found: set[File] = set()
    pid = os.getppid()
    while pid > 1:
        looks = (_stat(f"/proc/{pid}/fd/{number}") for number in (1, 2))
        found.update(_file_of(look) for look in looks if look is not None)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return frozenset(found)


def _files_of(streams: Iterable[Any]) -> Iterator[File]:
    """Of those that are still open."""
    for stream in streams:
        with contextlib.suppress(Exception):
            known = isinstance(stream, os.stat_result)
            yield _file_of(stream if known else os.fstat(stream if isinstance(stream, int) else stream.fileno()))


def _stat(where: int | str) -> os.stat_result | None:
    try:
        return os.stat(where)
    except OSError:
        return None


def _file_of(found: os.stat_result) -> File:
    return found.st_dev, found.st_ino


def _look_of(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns
