"""What audit events of the interpreter say about effects: files, peers, processes, databases opened on the side.

An audit hook sees files opened for writing, renamed or removed, connections, processes and ``sqlite3.connect``. It does
not see ``mkfifo``, shared memory, ``ATTACH`` and ``VACUUM INTO``, and sockets of libraries in C (libpq).
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, Protocol
from urllib.parse import unquote

from retrychaos.model.step import Site
from retrychaos.model.values import short
from retrychaos.world.handles import path_behind
from retrychaos.world.sockets import Peer, has_peers, peer_of, peer_of_socket

CONNECTED: Final = "sqlite3.connect/handle"
"""The event that brings the connection that ``sqlite3.connect`` has made. No effect of its own."""

_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TMPFILE: Final[int] = getattr(os, "O_TMPFILE", 0)

_WATCH = (
    'declare the function that does it with chaos.watch(owner, "name"), then every call of it counts as an effect; '
    "or move it out of the job"
)
_DATABASE = (
    "reach that database through an engine that the check knows, or declare the function that writes to it with "
    'chaos.watch(owner, "name")'
)
_HANDLE = (
    'declare the function that writes to it with chaos.watch(owner, "name"); if it is a log, write it through logging'
)


@dataclass(eq=False)
class Effect:
    """Something seen that may turn out to belong to a resource by the end of the delivery."""

    event: str
    text: str
    remedy: str
    site: Site | None = None
    paths: tuple[str, ...] = ()
    peer: Peer | None = None
    claimed: bool = False


# -- the hook --------------------------------------------------------------------------------------------------------


class Listener(Protocol):
    def audit(self, event: str, args: tuple[Any, ...], frame: FrameType) -> None:
        """An event that may have an effect, see effect_of(); or CONNECTED. An exception would go to the user's code."""
        ...


_listeners: list[Listener] = []
"""Only the last is told: checks can be nested."""
_hooked = False


def listen(listener: Listener) -> None:
    global _hooked
    _listeners.append(listener)
    if not _hooked:  # once in a process: an audit hook cannot be removed
        _hooked = True
        sys.addaudithook(_hook)


def unlisten(listener: Listener) -> None:
    _listeners.remove(listener)


def is_listening(listener: Listener) -> bool:
    return _listeners[-1:] == [listener]


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _listeners and (event in _EFFECTS or event == CONNECTED):
        for listener in _listeners[-1:]:  # another thread may have emptied the list
            listener.audit(event, args, sys._getframe(1))


# -- events ----------------------------------------------------------------------------------------------------------


def effect_of(event: str, args: tuple[Any, ...]) -> Effect | None:
    """What the event does; None if that is nothing, e.g. because it fails."""
    return _EFFECTS[event](event, args)


def wrote(path: str) -> Effect:
    return Effect("write", f"write to {path!r} through a handle opened before", _HANDLE, paths=(path,))


def _opened(event: str, args: tuple[Any, ...]) -> Effect | None:
    path, mode, flags = args
    if not isinstance(flags, int) or not flags & _WRITING or isinstance(path, int):
        return None
    if _TMPFILE and flags & _TMPFILE == _TMPFILE:
        return None  # has no name, ends with the process
    full = _full(path)
    exists = os.path.lexists(full)
    fails = (flags & os.O_EXCL and exists) if flags & os.O_CREAT else not exists
    # tempfile names a folder when it brings an opener of its own, whose open is an event, too.
    if fails or _is_nothing(full) or os.path.isdir(full):
        return None
    text = f"open({_shown(path)}, {mode!r})" if mode else f"os.open({_shown(path)})"
    return Effect("open", text, _WATCH, paths=(full,))


def _removed(event: str, args: tuple[Any, ...]) -> Effect | None:
    return _changed_path(event, args[0], args[1], exists=True)


def _changed(event: str, args: tuple[Any, ...]) -> Effect | None:
    return _changed_path(event, args[0], args[-1] if event != "os.truncate" else -1, exists=True)


def _made(event: str, args: tuple[Any, ...]) -> Effect | None:
    return _changed_path(event, args[0], args[2], exists=False)


def _changed_path(event: str, path: Any, folder: Any, *, exists: bool) -> Effect | None:
    if isinstance(path, int):
        path = path_behind(path)
        if path is None:
            return None
    full = _full(path, folder)
    if os.path.lexists(full) is not exists or _is_nothing(full):
        return None  # fails, so nothing happens
    return Effect(event, f"{event}({_shown(path)})", _WATCH, paths=(full,))


def _moved(event: str, args: tuple[Any, ...]) -> Effect | None:
    source, target = _full(args[0], args[2]), _full(args[1], args[3])
    if not os.path.lexists(source) or _is_nothing(source) or _is_nothing(target):
        return None
    text = f"{event}({_shown(args[0])}, {_shown(args[1])})"
    return Effect(event, text, _WATCH, paths=(source, target) if event == "os.rename" else (target,))


def _linked(event: str, args: tuple[Any, ...]) -> Effect | None:
    target = _full(args[1], args[2])
    if os.path.lexists(target) or _is_nothing(target):
        return None
    return Effect(event, f"{event}({_shown(args[0])}, {_shown(args[1])})", _WATCH, paths=(target,))


def _dialled(event: str, args: tuple[Any, ...]) -> Effect | None:
    sock, address = args
    if not has_peers(sock):
        return None
    if event == "socket.connect" and sock.type & socket.SOCK_DGRAM == socket.SOCK_DGRAM:
        return None  # sends nothing; often asks which address the machine has
    peer = peer_of_socket(sock) if address is None else peer_of(address)
    return None if peer is None else spoke(event, peer)


def spoke(event: str, peer: Peer) -> Effect:
    kind, host, port = peer
    where = f"{host}:{port}" if kind == "inet" else host
    verb = "connection to" if event == "socket.connect" else "data sent to"
    return Effect(event, f"{verb} {where}", _WATCH, peer=peer)


def _spawned(event: str, args: tuple[Any, ...]) -> Effect | None:
    what = args[1] if event == "subprocess.Popen" else args[0] if args else None
    text = f"{event}()" if what is None else f"{event}({_shown(what)})"
    return Effect("process", text, _WATCH)


def _database(event: str, args: tuple[Any, ...]) -> Effect | None:
    database = os.fsdecode(args[0]) if isinstance(args[0], str | bytes | os.PathLike) else ""
    path, _, options = database.partition("?")
    if database.startswith("file:"):
        if "mode=memory" in options or "mode=ro" in options or "immutable=1" in options:
            return None
        path = unquote(path.removeprefix("file:"))
        path = path if not path.startswith("//") else "/" + path[2:].partition("/")[2]
    else:
        path = database
    if path in ("", ":memory:"):
        return None
    return Effect(event, f"sqlite3.connect({_shown(path)})", _DATABASE, paths=(_full(path),))


_EFFECTS: Final[Mapping[str, Callable[[str, tuple[Any, ...]], Effect | None]]] = {
    "open": _opened,
    "os.remove": _removed,
    "os.rmdir": _removed,
    "os.truncate": _changed,
    "os.chmod": _changed,
    "os.chown": _changed,
    "os.utime": _changed,
    "os.mkdir": _made,
    "os.rename": _moved,
    "os.link": _moved,
    "os.symlink": _linked,
    "socket.connect": _dialled,
    "socket.sendto": _dialled,
    "socket.sendmsg": _dialled,
    "subprocess.Popen": _spawned,
    "os.system": _spawned,
    "os.posix_spawn": _spawned,
    "os.spawn": _spawned,
    "os.exec": _spawned,
    "os.fork": _spawned,
    "os.forkpty": _spawned,
    "os.startfile": _spawned,
    "sqlite3.connect": _database,
}


# -- paths ---------------------------------------------------------------------------------------------------------


def _full(path: Any, folder: Any = -1) -> str:
    name = os.fsdecode(path)
    if os.path.isabs(name):
        return os.path.normpath(name)
    base = path_behind(folder) if isinstance(folder, int) and folder >= 0 else None
    return os.path.normpath(os.path.join(base or os.getcwd(), name))


def _shown(path: Any) -> str:
    return short(os.fsdecode(path) if isinstance(path, bytes | os.PathLike) else path, 100)


def _is_nothing(path: str) -> bool:
    """Devices, kernel files and compiled modules."""
    if path.startswith(("/dev/", "/proc/", "/sys/")):
        return not path.startswith("/dev/shm/")
    return path.lower() == "nul" or path.endswith(".pyc") or "__pycache__" in path
