"""Locks on files, ``fcntl.flock`` and ``fcntl.lockf``: who has to wait stands aside until another delivery has moved.

The kernel says who has to wait. A lock of ``lockf`` belongs to a process there, and all deliveries are in one; so it is
asked for as one that belongs to the open file (``F_OFD_SETLK``), which dies with its delivery, too.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

from retrychaos.world.files import EXCLUSIVE, SHARED

if TYPE_CHECKING:
    from retrychaos.world.files import FilesSource, Opened

_WOULD_BLOCK = frozenset({errno.EAGAIN, errno.EACCES})


def lock_hooks(source: FilesSource) -> list[tuple[Any, str, Any]]:
    if fcntl is None:
        return []
    return [(fcntl, "flock", _flock(source, fcntl.flock)), (fcntl, "lockf", _lockf(source, fcntl.lockf))]


def _flock(source: FilesSource, original: Any) -> Any:
    def flock(fd: Any, operation: int, /) -> Any:
        number = _number(fd)
        opened = source.opened.get(number) if source.watching else None
        if source.watching and source.gone:
            return None
        if opened is None:
            return original(fd, operation)
        return _lock(source, opened, "flock", operation, lambda how: original(number, how))

    return flock


def _lockf(source: FilesSource, original: Any) -> Any:
    def lockf(fd: Any, cmd: int, len: int = 0, start: int = 0, whence: int = 0, /) -> Any:
        number = _number(fd)
        opened = source.opened.get(number) if source.watching else None
        if source.watching and source.gone:
            return None
        if opened is None or not hasattr(fcntl, "F_OFD_SETLK"):
            return original(fd, cmd, len, start, whence)

        def ask(how: int) -> None:
            kind = fcntl.F_UNLCK if how & fcntl.LOCK_UN else fcntl.F_RDLCK if how & fcntl.LOCK_SH else fcntl.F_WRLCK
            fcntl.fcntl(number, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, whence, start, len, 0))

        return _lock(source, opened, f"lockf {start} {len} {whence}", cmd, ask)

    return lockf


def _number(fd: Any) -> int:
    return fd if isinstance(fd, int) else fd.fileno()


def _lock(source: FilesSource, opened: Opened, name: str, how: int, ask: Callable[[int], None]) -> None:
    if how & fcntl.LOCK_UN:
        opened.locks.pop(name, None)
        ask(how)
        return
    kind = SHARED if how & fcntl.LOCK_SH else EXCLUSIVE
    if kind == EXCLUSIVE:
        source.exclusive.add(opened.path)
    source.act(f"lock ({kind})", (opened.path,), lambda: _wait(source, how, ask), lambda _: None)
    opened.locks[name] = kind


def _wait(source: FilesSource, how: int, ask: Callable[[int], None]) -> None:
    """Ask without waiting, as often as another delivery has moved."""
    stage = source.stage
    while True:
        try:
            ask(how | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in _WOULD_BLOCK or how & fcntl.LOCK_NB:
                raise
        if stage.owner is None:
            stage.sleep(None)  # who has it is no delivery, and will not give it back
        elif not stage.blocked():
            stage.doubt(
                "deliveries wait for locks on files that they hold themselves, and would wait for ever: nothing in the "
                "kernel ends such a circle. Take the locks in the same order everywhere."
            )
            raise OSError(errno.EDEADLK, os.strerror(errno.EDEADLK))
