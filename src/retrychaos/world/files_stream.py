"""What ``open`` returns below a declared folder: Python's own layers over a raw file that reports what it does.

What is in the buffers of the layers above is memory of the process, and lost in a crash. Each raw write is a step.
"""

from __future__ import annotations

import hashlib
import io
import os
import weakref
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from retrychaos.world.files import FilesSource, Opened

_fstat = os.fstat
_MODES: Final = {"r", "w", "x", "a", "b", "t", "+"}


def digest(data: Any) -> object:
    """What was read, for the memory of the delivery."""
    if data is None or len(data) <= 200:
        return None if data is None else bytes(data)
    return len(data), hashlib.blake2b(data, digest_size=16).hexdigest()


class Stream(io.FileIO):
    """A raw file whose reads and writes are steps while a delivery runs."""

    def __init__(self, source: FilesSource, path: str, file: Any, mode: str, closefd: bool, opener: Any) -> None:
        self.source = source
        self.path = path
        self.top: weakref.ref[Any] | None = None
        """The layer that the job has."""
        self._dying = False
        self._lost = 0
        super().__init__(file, mode, closefd, opener)
        opened = self._opened
        if opened is not None:
            opened.stream = weakref.ref(self)
            self.path = opened.path  # an opener may open something else than it was asked for

    def take(self) -> None:
        """It was opened by a step of its own."""
        self.source.opening(self.fileno(), self.path)
        self.source.opened[self.fileno()].stream = weakref.ref(self)

    @property
    def _opened(self) -> Opened | None:
        return self.source.opened.get(self.fileno())

    @property
    def _reports(self) -> bool:
        return self.source.watching and self._opened is not None

    # -- what the layers above call ----------------------------------------------------------------------------------

    def write(self, data: Any, /) -> int:
        if self._dying:
            self._lost += len(data)
            return len(data)
        if not self._reports:
            return super().write(data)
        from retrychaos.world.files import briefly

        return self.source.act(
            "write",
            (self.path,),
            lambda: super(Stream, self).write(data),
            lambda written: written,
            changes=True,
            detail=f" {briefly(data)} ({len(data)} bytes)" if self.source.stage.traced else "",
        )

    def truncate(self, size: int | None = None, /) -> int:
        if not self._reports:
            return super().truncate(size)
        return self.source.act(
            "truncate", (self.path,), lambda: super(Stream, self).truncate(size), lambda to: to, changes=True
        )

    def readinto(self, buffer: Any, /) -> int:
        if not self._reports:
            return super().readinto(buffer)
        return self.source.act(
            "read",
            (self.path,),
            lambda: super(Stream, self).readinto(buffer),
            lambda size: digest(bytes(memoryview(buffer).cast("B")[: size or 0])),
        )

    def readall(self) -> bytes:
        if not self._reports:
            return bytes(super().readall())
        data: bytes = self.source.act("read", (self.path,), lambda: super(Stream, self).readall(), digest)
        return data

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            return self.readall()
        if not self._reports:
            return bytes(super().read(size))
        data: bytes = self.source.act("read", (self.path,), lambda: super(Stream, self).read(size), digest)
        return data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        if whence != os.SEEK_END or not self._reports:
            return super().seek(offset, whence)
        return self.source.act("size of", (self.path,), lambda: super(Stream, self).seek(offset, whence), lambda at: at)

    def close(self) -> None:
        if not self.closed:
            opened = self._opened
            if opened is not None and opened.stream is not None and opened.stream() is self and self.closefd:
                del self.source.opened[self.fileno()]
        super().close()

    # -- for the source ----------------------------------------------------------------------------------------------

    def unwritten(self) -> int:
        """The process is gone: how many bytes are in the layers above, and go nowhere?"""
        self._dying, self._lost = True, 0
        top = self.top() if self.top is not None else None
        if top is not None and top is not self and not top.closed and self.writable():
            try:
                top.flush()
            except (OSError, ValueError):
                pass
        return self._lost

    def die(self) -> None:
        """It is closed from outside; nothing of it reaches the disk any more."""
        self._dying = True
        try:
            self.close()
        except OSError:
            pass


def open_stream(
    source: FilesSource,
    path: str,
    file: Any,
    mode: str,
    buffering: int,
    encoding: str | None,
    errors: str | None,
    newline: str | None,
    closefd: bool,
    opener: Any,
) -> Any:
    """As io.open(), with a raw file that reports. Call it only if is_valid()."""
    binary = "b" in mode
    raw_mode = next(each for each in "rwxa" if each in mode) + ("+" if "+" in mode else "")
    file = file if isinstance(file, int) else os.fspath(file)  # as errors and repr() show it
    raw = _opened(source, path, file, raw_mode, closefd, opener)
    result: Any = raw
    try:
        if buffering == 0:
            raw.top = weakref.ref(raw)
            return raw
        size = raw._blksize if buffering in (-1, 1) else buffering  # type: ignore[attr-defined]
        if "+" in mode:
            result = io.BufferedRandom(raw, size)
        else:
            result = io.BufferedReader(raw, size) if "r" in mode else io.BufferedWriter(raw, size)
        if not binary:
            text = io.TextIOWrapper(result, encoding, errors, newline, buffering == 1)
            text.mode = mode  # type: ignore[misc]
            result = text
        raw.top = weakref.ref(result)
        return result
    except BaseException:
        result.close()
        raise


def _opened(source: FilesSource, path: str, file: Any, mode: str, closefd: bool, opener: Any) -> Stream:
    if isinstance(file, int) or opener is not None:
        return Stream(source, path, file, mode, closefd, opener)  # opened by os.open, which was the step

    def do() -> Stream:
        return Stream(source, path, file, mode, closefd, None)

    existed = os.path.lexists(path) if not mode.startswith("r") else True
    raw = source.act(
        f"open ({mode})", (path,), do, lambda raw: _fstat(raw.fileno()).st_size, changes=not mode.startswith("r")
    )
    raw.take()
    if not existed:
        source.made(path)
    return raw


def is_valid(file: Any, mode: Any, buffering: Any, encoding: Any, errors: Any, newline: Any, closefd: Any) -> bool:
    """Whether io.open() takes these arguments. If not, it says best why."""
    if not isinstance(mode, str) or not isinstance(buffering, int) or set(mode) - _MODES or len(set(mode)) < len(mode):
        return False
    binary = "b" in mode
    if sum(each in mode for each in "rwxa") != 1 or (binary and "t" in mode):
        return False
    if binary and (encoding is not None or errors is not None or newline is not None or buffering == 1):
        return False
    if newline not in (None, "", "\n", "\r", "\r\n") or buffering < -1 or (buffering == 0 and not binary):
        return False
    return bool(closefd) or isinstance(file, int)
