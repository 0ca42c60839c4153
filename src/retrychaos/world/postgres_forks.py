"""Which connections belong to the parent of a forked process: they must not be used there, nor closed."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Any

_watching = 0
_inherited: frozenset[tuple[int, int]] = frozenset()
"""Sockets that were open when this process was forked from one that was checking."""


def watch() -> None:
    global _watching
    _watching += 1


def unwatch() -> None:
    global _watching
    _watching -= 1


def is_of_parent(raw: Any) -> bool:
    """The connection was opened before this process was forked."""
    if not _inherited:
        return False
    try:
        about = os.fstat(raw.fileno())
    except Exception:  # closed
        return False
    return (about.st_dev, about.st_ino) in _inherited


def _forked() -> None:
    global _inherited
    if not _watching:
        return
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            about = os.fstat(int(name))
            if stat.S_ISSOCK(about.st_mode):
                found.add((about.st_dev, about.st_ino))
    _inherited = frozenset(found)


os.register_at_fork(after_in_child=_forked)
