"""Effects that no resource owns: files written, peers spoken to, processes started, databases opened on the side.

The ledger cannot judge what it does not see, so each of them makes the verdict inconclusive, with the line that did it.
Three looks, because none sees everything:

- An audit hook sees files opened for writing, renamed or removed, connections, processes and ``sqlite3.connect``.
- Patched ``send`` methods see data on connections that were made before the check.
- Size and time of the files behind open handles, before and after a delivery, show writes on handles opened earlier.
  This needs ``/proc/self/fd``: elsewhere than on Linux such writes are not seen.

Not seen by any: ``mkfifo``, shared memory, ``ATTACH`` and ``VACUUM INTO``, and sockets of libraries in C (libpq).
What happens inside a watched call is covered by its declaration.
"""

from __future__ import annotations

import contextlib
import gc
import io
import ipaddress
import logging
import os
import socket
import stat
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import unquote

from retrychaos.model.step import Site
from retrychaos.model.values import short
from retrychaos.world import calls as calls_module
from retrychaos.world.calls import Calls
from retrychaos.world.resource import Stage
from retrychaos.world.sites import origin, site_of

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

Peer: TypeAlias = tuple[str, str, int]
"""``("inet", host, port)`` or ``("unix", path, 0)``."""

_DESCRIPTORS = "/proc/self/fd"
_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TMPFILE: Final[int] = getattr(os, "O_TMPFILE", 0)
_FAMILIES = {socket.AF_INET, socket.AF_INET6}
_UNIX = getattr(socket, "AF_UNIX", None)
_MOST = 10_000
"""Effects kept of one delivery; a loop that writes more has long been found out."""

_TOOLS = frozenset(
    {"_pytest", "pytest", "pytest_cov", "pytest_timeout", "xdist", "execnet", "hypothesis", "coverage", "loguru"}
    | {"debugpy", "pydevd", "_pydevd_bundle", "_pydev_bundle", "_pydevd_frame_eval"}
)
"""Packages whose writes are about the test run or are logs."""
_IMPORTING = frozenset({"importlib._bootstrap_external", "_frozen_importlib_external"})
_PROBES = frozenset({"platform", "uuid", "ctypes.util"})
"""Modules that ask other programs about the machine."""

_SEE_THROUGH = frozenset({__file__, calls_module.__file__})
"""Our wrappers around functions of others: what happens beneath is not our doing."""

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


class Context(NamedTuple):
    """Where in the code an effect came from."""

    site: Site | None
    by_user: bool
    """There is a line of user code; `site` may else be one of an installed package."""
    temporary: bool
    """Made by ``tempfile``."""


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


@dataclass(frozen=True)
class _Handle:
    """A file open for writing before the delivery."""

    path: str
    file: tuple[int, int]
    look: tuple[int, int]
    """Size and time of the last change."""


class Escapes:
    """Watches for effects outside the ledger between install() and uninstall(); see the module.

    ``before_delivery()`` and ``after_delivery()`` are called by the thread that delivers, the latter while the stage
    still takes doubts.
    """

    def __init__(self, stage: Stage, calls: Calls | None = None) -> None:
        self.stage = stage
        self.calls = calls
        self._effects: list[Effect] = []
        self._told: set[tuple[str, str]] = set()
        self._failure: str | None = None
        self._temporary: set[str] = set()
        self._connecting: dict[int, Effect] = {}
        self._connections: dict[int, Effect] = {}
        self._spoken: set[Peer] = set()
        self._claimed_paths: set[str] = set()
        self._claimed_peers: set[Peer] = set()
        self._claimed_files: set[tuple[int, int]] = set()
        self._handles: dict[int, _Handle] = {}
        self._last: dict[int, _Handle] = {}
        self._descriptors: list[str] = []
        self._writable: list[int] = []
        self._buffers: dict[tuple[int, tuple[int, int]], list[weakref.ref[Any]]] = {}
        self._thread = 0
        self._elders: frozenset[int] = frozenset()
        self._outer: Escapes | None = None
        self._patched: list[tuple[type, str, object]] = []
        self._installed = False

    # -- Source ---------------------------------------------------------------------------------------------------

    def install(self) -> None:
        global _active
        if self._installed:
            return
        self._installed = True
        _hook_up()
        self._elders = frozenset(threading._active) - {threading.get_ident()}  # type: ignore[attr-defined]
        if self.calls is not None:
            self.calls.entering.append(self._before_declared)
            self.calls.leaving.append(self._after_declared)
        self._patch_sockets()
        self._look_at_handles()  # before the first fork, so that a child need not look for streams again
        self._outer, _active = _active, self

    def uninstall(self) -> None:
        global _active
        if not self._installed:
            return
        self._installed = False
        if _active is self:
            _active = self._outer
        self._outer = None
        while self._patched:
            owner, name, before = self._patched.pop()
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        if self.calls is not None:
            self.calls.entering.remove(self._before_declared)
            self.calls.leaving.remove(self._after_declared)
        self.end_delivery()
        self._last = {}
        self._descriptors, self._writable = [], []
        self._buffers = {}

    # -- claims ---------------------------------------------------------------------------------------------------

    def claim_path(self, path: str | bytes | os.PathLike[Any]) -> None:
        """A resource owns that file, or everything in that folder. The companions of a SQLite file go with it."""
        real = os.path.realpath(os.fsdecode(path))
        self._claimed_paths.update((real, f"{real}-journal", f"{real}-wal", f"{real}-shm"))

    def claim_address(self, address: Any) -> None:
        """A resource owns what is sent to ``(host, port)`` or to a Unix socket path."""
        peer = _peer_of(address)
        if peer is not None:
            self._claimed_peers.add(peer)

    def claim_connection(self, connection: object) -> None:
        """A resource owns what is done on that ``sqlite3`` connection."""
        # The last connection with that id is the one that is alive.
        effect = self._connections.get(id(connection))
        if effect is not None:
            effect.claimed = True

    def claim_stream(self, stream: Any) -> None:
        """Writes to that open file are no effects of the job, e.g. the terminal that pytest reports on."""
        with contextlib.suppress(Exception):
            found = os.fstat(stream if isinstance(stream, int) else stream.fileno())
            self._claimed_files.add((found.st_dev, found.st_ino))

    # -- deliveries -----------------------------------------------------------------------------------------------

    def before_delivery(self) -> None:
        self._forget()
        self._thread = threading.get_ident()
        self._handles = self._look_at_handles()

    def after_delivery(self) -> None:
        """Tell the stage what no resource has claimed."""
        self._compare_handles()
        self._handles = {}
        if self._failure is not None:
            self.stage.doubt(f"effects outside the ledger could not be watched for: {self._failure}")
        for effect in self._effects:
            if not self._excused(effect):
                self._tell(effect)
        self._forget()

    def end_delivery(self) -> None:
        """What has not been told by now belongs to a delivery that was given up."""
        self._handles = {}
        self._forget()

    def _forget(self) -> None:
        self._effects = []
        self._failure = None
        self._temporary = set()
        self._connecting = {}
        self._connections = {}
        self._spoken = set()

    def _tell(self, effect: Effect) -> None:
        key = (effect.event, str(effect.site) if effect.site else effect.text)
        if key in self._told:
            return
        self._told.add(key)
        where = f" at {effect.site} in {effect.site.function}" if effect.site else ""
        self.stage.doubt(
            f"effect outside the ledger: {effect.text}{where} — no resource of the check owns it, so a crash or a "
            f"duplicate may lose or repeat it unseen; {effect.remedy}."
        )

    def _excused(self, effect: Effect) -> bool:
        if effect.claimed:
            return True
        if effect.peer is not None:
            return self._is_claimed_peer(effect.peer)
        return bool(effect.paths) and all(self._is_claimed(path) or self._is_gone(path) for path in effect.paths)

    def _is_claimed(self, path: str) -> bool:
        if not self._claimed_paths:
            return False
        real = os.path.realpath(path)
        return any(each in self._claimed_paths for each in _with_parents(real))

    def _is_gone(self, path: str) -> bool:
        """A temporary file or folder that was made and removed by one delivery."""
        if not self._temporary or os.path.lexists(path):
            return False
        return any(each in self._temporary for each in _with_parents(path))

    def _is_claimed_peer(self, peer: Peer) -> bool:
        if peer in self._claimed_peers:
            return True
        kind, host, port = peer
        named = {each[1] for each in self._claimed_peers if each[0] == kind == "inet" and each[2] == port}
        found = any(host in _addresses(name) or name in _addresses(host) for name in named)
        if found:
            self._claimed_peers.add(peer)
        return found

    # -- what was seen --------------------------------------------------------------------------------------------

    def audit(self, event: str, args: tuple[Any, ...], frame: FrameType) -> None:
        """An audit event of a kind in _EVENTS."""
        if not self.stage.running:
            return
        try:
            if event == "sqlite3.connect/handle":
                self._connected(args[0])
                return
            found = _EVENTS[event](event, args)
            if found is not None:
                self._note(found, frame)
        except Exception as problem:
            # Raised here, it would become a failure of the job.
            self._failure = f"{event}: {problem!r}"

    def _note(self, effect: Effect, frame: FrameType | None) -> None:
        thread = threading.get_ident()
        self._connecting.pop(thread, None)
        if len(self._effects) >= _MOST or self._covered(thread):
            return
        context = _context(frame, effect.event)
        if context is None or self._is_of_others(thread, context):
            return
        if context.temporary and effect.event in ("open", "os.mkdir"):
            self._temporary.update(effect.paths)
        effect.site = context.site
        self._effects.append(effect)
        if effect.peer is not None:
            self._spoken.add(effect.peer)
        if effect.event == "sqlite3.connect":
            self._connecting[thread] = effect

    def _connected(self, connection: object) -> None:
        # Only its id: on 3.11 it is not initialised yet, and holding it would keep its locks beyond its life.
        effect = self._connecting.pop(threading.get_ident(), None)
        if effect is None:
            self._connections.pop(id(connection), None)
        else:
            self._connections[id(connection)] = effect

    def _covered(self, thread: int) -> bool:
        """Inside a watched call. Threads that the job started are taken to work for the call that is on."""
        if self.calls is None:
            return False
        return self.calls.inside(thread) or (thread != self._thread and self.calls.inside())

    def _is_of_others(self, thread: int, context: Context) -> bool:
        """Threads older than the check are servers and tools, unless they run code of the user."""
        if thread == self._thread:
            return False
        if thread in self._elders and not context.by_user:
            return True
        return threading.current_thread().name.startswith("retrychaos")

    # -- sends ----------------------------------------------------------------------------------------------------

    def _patch_sockets(self) -> None:
        ssl = sys.modules.get("ssl")
        for owner in (socket.socket, *((ssl.SSLSocket,) if ssl is not None else ())):
            for name in ("send", "sendall", "sendfile"):
                self._patched.append((owner, name, vars(owner).get(name)))
                setattr(owner, name, self._sender(getattr(owner, name)))

    def _sender(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def send(sock: socket.socket, *args: Any, **kwargs: Any) -> Any:
            if self.stage.running and _active is self:
                self._sending(sock, sys._getframe(1))
            return original(sock, *args, **kwargs)

        send.__name__ = send.__qualname__ = original.__name__
        return send

    def _sending(self, sock: socket.socket, frame: FrameType) -> None:
        try:
            peer = _peer_of_socket(sock)
            if peer is not None and peer not in self._spoken and peer not in self._claimed_peers:
                self._note(_spoke("socket.send", peer), frame)
        except Exception as problem:
            self._failure = f"socket.send: {problem!r}"

    # -- handles --------------------------------------------------------------------------------------------------

    def _look_at_handles(self) -> dict[int, _Handle]:
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

    def _with_buffers(self, handles: dict[int, _Handle]) -> dict[int, _Handle]:
        """Flush what was written before the delivery, so that it does not look like the job's doing."""
        fresh = {
            fd: handle.file
            for fd, handle in handles.items()
            if (fd, handle.file) not in self._buffers and not _is_sqlite(fd, handle.path)
        }
        if fresh:
            self._buffers.update({(fd, file): [] for fd, file in fresh.items()})
            harmless = self._harmless_files()  # what goes there is never judged
            for fd, stream in _streams({fd: file for fd, file in fresh.items() if file not in harmless}):
                self._buffers[fd, fresh[fd]].append(weakref.ref(stream))
        for fd, handle in handles.items():
            if self._flush(fd, handle):
                again = _look_at(fd, handles)
                handles[fd] = again or handle
        return handles

    def _flush(self, fd: int, handle: _Handle) -> bool:
        """What a process writes at its end, too. Whether there was anything to ask."""
        streams = self._buffers.get((fd, handle.file), ())
        for reference in streams:
            stream = reference()
            with contextlib.suppress(Exception):
                if stream is not None:
                    stream.flush()
        return bool(streams)

    def _changed_handles(self) -> Iterator[tuple[int, _Handle]]:
        for fd, handle in self._handles.items():
            self._flush(fd, handle)
            try:
                now = os.fstat(fd)
                if (now.st_dev, now.st_ino) != handle.file:
                    now = os.stat(handle.path)  # closed meanwhile
            except OSError:
                try:
                    now = os.stat(handle.path)
                except OSError:
                    continue
            if (now.st_dev, now.st_ino) == handle.file and (now.st_size, now.st_mtime_ns) != handle.look:
                yield fd, handle

    def _compare_handles(self) -> None:
        seen = {path for effect in self._effects for path in effect.paths}
        for _, handle in self._changed_handles():
            if handle.path in seen or self._is_claimed(handle.path) or handle.file in self._harmless_files():
                continue
            text = f"write to {handle.path!r} through a handle opened before"
            self._effects.append(Effect("write", text, _HANDLE, paths=(handle.path,)))

    def _harmless_files(self) -> set[tuple[int, int]]:
        """Standard output and error, and where logs go."""
        files = set(self._claimed_files)
        for stream in (1, 2, *_log_streams()):
            with contextlib.suppress(Exception):
                found = os.fstat(stream if isinstance(stream, int) else stream.fileno())
                files.add((found.st_dev, found.st_ino))
        return files

    def _before_declared(self) -> None:
        if self._handles and self.stage.running and threading.get_ident() == self._thread:
            self._compare_handles()

    def _after_declared(self) -> None:
        if self._handles and threading.get_ident() == self._thread:
            for fd, handle in list(self._changed_handles()):
                self._handles[fd] = _look_at(fd, {}) or handle


# -- the audit hook ------------------------------------------------------------------------------------------------

_active: Escapes | None = None
_hooked = False


def _hook_up() -> None:
    """Once in a process: an audit hook cannot be removed."""
    global _hooked
    if not _hooked:
        _hooked = True
        sys.addaudithook(_hook)


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _active is not None and event in _EVENTS:
        _active.audit(event, args, sys._getframe(1))


def _context(frame: FrameType | None, event: str) -> Context | None:
    """Where an effect came from; None if it is about the interpreter, the test run or a log."""
    temporary = False
    library: FrameType | None = None
    first = True
    while frame is not None:
        kind = origin(frame.f_code.co_filename)
        module = frame.f_globals.get("__name__", "")
        if kind == "stdlib":
            if (first and module in _IMPORTING) or module.partition(".")[0] == "logging":
                return None
            if library is None and _is_probe(module, frame, event):
                return None
            temporary = temporary or (library is None and module == "tempfile")
        elif kind == "user":
            return None if _within_logging(frame) else Context(site_of(frame), True, temporary)
        elif kind == "library":
            if module.partition(".")[0] in _TOOLS:
                return None
            library = library or frame
        elif kind == "harness" and (library is not None or frame.f_code.co_qualname == "Job.__call__"):
            break
        elif library is None and frame.f_code.co_filename not in _SEE_THROUGH:
            return None  # we did it ourselves
        first = False
        frame = frame.f_back
    return Context(site_of(library) if library else None, False, temporary)


def _is_probe(module: str, frame: FrameType, event: str) -> bool:
    if module == "tempfile":
        return frame.f_code.co_name == "_get_default_tempdir"
    return event == "process" and module in _PROBES


def _within_logging(frame: FrameType | None) -> bool:
    """A handler of the user's own, called by logging."""
    while frame is not None:
        kind = origin(frame.f_code.co_filename)
        if kind == "harness":
            return False
        if kind == "stdlib" and frame.f_globals.get("__name__") == "logging":
            return True
        frame = frame.f_back
    return False


# -- events --------------------------------------------------------------------------------------------------------


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
        path = _behind(path)
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
    if event == "socket.connect" and sock.type & socket.SOCK_DGRAM == socket.SOCK_DGRAM:
        return None  # sends nothing; often asks which address the machine has
    if address is None:
        peer = _peer_of_socket(sock)
    elif sock.family in _FAMILIES or sock.family == _UNIX:
        peer = _peer_of(address)
    else:
        peer = None
    return None if peer is None else _spoke(event, peer)


def _spoke(event: str, peer: Peer) -> Effect:
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


def _nothing(event: str, args: tuple[Any, ...]) -> Effect | None:
    return None


_EVENTS: Final[Mapping[str, Callable[[str, tuple[Any, ...]], Effect | None]]] = {
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
    "sqlite3.connect/handle": _nothing,
}


# -- paths ---------------------------------------------------------------------------------------------------------


def _full(path: Any, folder: Any = -1) -> str:
    name = os.fsdecode(path)
    if os.path.isabs(name):
        return os.path.normpath(name)
    base = _behind(folder) if isinstance(folder, int) and folder >= 0 else None
    return os.path.normpath(os.path.join(base or os.getcwd(), name))


def _behind(fd: int) -> str | None:
    """The path of an open file or folder."""
    try:
        return os.readlink(f"{_DESCRIPTORS}/{fd}")
    except OSError:
        return None


def _shown(path: Any) -> str:
    return short(os.fsdecode(path) if isinstance(path, bytes | os.PathLike) else path, 100)


def _is_nothing(path: str) -> bool:
    """Devices, kernel files and compiled modules."""
    if path.startswith(("/dev/", "/proc/", "/sys/")):
        return not path.startswith("/dev/shm/")
    return path.lower() == "nul" or path.endswith(".pyc") or "__pycache__" in path


def _with_parents(path: str) -> Iterator[str]:
    yield path
    while (parent := os.path.dirname(path)) != path:
        yield parent
        path = parent


# -- peers ---------------------------------------------------------------------------------------------------------


def _peer_of_socket(sock: socket.socket) -> Peer | None:
    if sock.family not in _FAMILIES and sock.family != _UNIX:
        return None
    try:
        return _peer_of(sock.getpeername())
    except OSError:
        return None


def _peer_of(address: Any) -> Peer | None:
    """None for the nameless end of a socket pair: it leads to this process or to a child of it."""
    if isinstance(address, str | bytes | os.PathLike):
        path = os.fsdecode(address)
        return ("unix", path, 0) if path else None
    if isinstance(address, tuple) and len(address) >= 2:
        return ("inet", _host(str(address[0])), int(address[1]))
    return None


def _host(host: str) -> str:
    if host.lower() in ("localhost", "", "0.0.0.0", "::"):
        return "localhost"
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host.lower()
    mapped = getattr(address, "ipv4_mapped", None)
    address = mapped or address
    return "localhost" if address.is_loopback else str(address)


def _addresses(host: str) -> set[str]:
    """The addresses behind a name; none for an address."""
    try:
        ipaddress.ip_address(host)
        return set()
    except ValueError:
        pass
    try:
        return {_host(str(found[4][0])) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return set()


# -- handles -------------------------------------------------------------------------------------------------------


def _look_at(fd: int, known: Mapping[int, _Handle]) -> _Handle | None:
    """A regular file with a name that is open for writing."""
    try:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            return None
        found = os.fstat(fd)
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode) or not found.st_nlink:
        return None
    file = (found.st_dev, found.st_ino)
    before = known.get(fd)
    path = before.path if before is not None and before.file == file else _behind(fd)
    return None if path is None else _Handle(path, file, (found.st_size, found.st_mtime_ns))


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
