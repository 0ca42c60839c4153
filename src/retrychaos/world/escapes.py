"""Effects that no resource owns: files written, peers spoken to, processes started, databases opened on the side.

The ledger cannot judge what it does not see, so each of them makes the verdict inconclusive, with the line that did it.
Three looks, because none sees everything: an audit hook (audit.py), patched ``send`` methods for connections that were
made before the check (sockets.py), and size and time of the files behind handles opened earlier (handles.py). What
happens inside a watched call is covered by its declaration.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from retrychaos.world import audit
from retrychaos.world.audit import Effect
from retrychaos.world.calls import Calls
from retrychaos.world.handles import Handles, output_above
from retrychaos.world.provenance import Context, context_of
from retrychaos.world.resource import Stage
from retrychaos.world.sockets import Peer, Sends, addresses, peer_of, peer_of_socket

_MOST = 10_000
"""Effects kept of one delivery; a loop that writes more has long been found out."""


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
        self._handles = Handles()
        self._sends = Sends(self._sending)
        self._thread = 0
        self._elders: frozenset[int] = frozenset()
        self._installed = False

    # -- Source ---------------------------------------------------------------------------------------------------

    def install(self) -> None:
        if self._installed:
            return
        self._installed = True
        self._elders = frozenset(threading._active) - {threading.get_ident()}  # type: ignore[attr-defined]
        if self.calls is not None:
            self.calls.entering.append(self._before_declared)
            self.calls.leaving.append(self._after_declared)
        self._sends.install()
        self._handles.look()  # before the first fork, so that a child need not look for streams again
        output_above()  # nor for processes, which are not above it if its parent has ended
        audit.listen(self)

    def uninstall(self) -> None:
        if not self._installed:
            return
        self._installed = False
        audit.unlisten(self)
        self._sends.uninstall()
        if self.calls is not None:
            self.calls.entering.remove(self._before_declared)
            self.calls.leaving.remove(self._after_declared)
        self.end_delivery()
        self._handles.forget()

    def part(self, blobs: Mapping[str, Any], folder: str) -> None:
        """audit() sees to it."""

    # -- claims ---------------------------------------------------------------------------------------------------

    def claim_path(self, path: str | bytes | os.PathLike[Any]) -> None:
        """A resource owns that file, or everything in that folder. The companions of a SQLite file go with it."""
        real = os.path.realpath(os.fsdecode(path))
        self._claimed_paths.update((real, f"{real}-journal", f"{real}-wal", f"{real}-shm"))

    def claim_address(self, address: Any) -> None:
        """A resource owns what is sent to ``(host, port)`` or to a Unix socket path."""
        peer = peer_of(address)
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
        self._handles.excuse(stream)

    # -- deliveries -----------------------------------------------------------------------------------------------

    def before_delivery(self) -> None:
        self._forget()
        self._thread = threading.get_ident()
        self._handles.begin()

    def after_delivery(self) -> None:
        """Tell the stage what no resource has claimed."""
        self._compare_handles()
        self._handles.end()
        if self._failure is not None:
            self.stage.doubt(f"effects outside the ledger could not be watched for: {self._failure}")
        for effect in self._effects:
            if not self._excused(effect):
                self._tell(effect)
        self._forget()

    def end_delivery(self) -> None:
        """What has not been told by now belongs to a delivery that was given up."""
        self._handles.end()
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
        if effect.event == "sqlite3.connect":  # a declared folder does not own the databases in it
            return bool(effect.paths) and all(
                os.path.realpath(path) in self._claimed_paths or self._is_gone(path) for path in effect.paths
            )
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
        found = any(host in addresses(name) or name in addresses(host) for name in named)
        if found:
            self._claimed_peers.add(peer)
        return found

    def cancel(self, owner: object) -> None:
        """Nothing waits anywhere but here."""

    def leave(self, owner: object) -> None:
        """What one of several deliveries did outside of the ledger is told with what the others did."""

    # -- what was seen --------------------------------------------------------------------------------------------

    def audit(self, event: str, args: tuple[Any, ...], frame: FrameType) -> None:
        """See audit.Listener."""
        if not self.stage.running:
            return
        if event == "sqlite3.connect":
            self._keep_off(event, args)
        try:
            if event == audit.CONNECTED:
                self._connected(args[0])
                return
            found = audit.effect_of(event, args)
            if found is not None:
                self._note(found, frame)
        except Exception as problem:
            # Raised here, it would become a failure of the job.
            self._failure = f"{event}: {problem!r}"

    def _keep_off(self, event: str, args: tuple[Any, ...]) -> None:
        """A database that is no copy would be locked for the parent."""
        found = audit.effect_of(event, args)
        if found is not None and not all(self._is_claimed(path) for path in found.paths):
            self.stage.keep_off(found.text)

    def _note(self, effect: Effect, frame: FrameType | None) -> None:
        thread = threading.get_ident()
        self._connecting.pop(thread, None)
        if len(self._effects) >= _MOST or self._covered(thread):
            return
        context = context_of(frame, effect.event)
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

    def _sending(self, sock: socket.socket, frame: FrameType) -> None:
        if not self.stage.running or not audit.is_listening(self):
            return
        try:
            peer = peer_of_socket(sock)
            if peer is not None and peer not in self._spoken and peer not in self._claimed_peers:
                self._note(audit.spoke("socket.send", peer), frame)
        except Exception as problem:
            self._failure = f"socket.send: {problem!r}"

    # -- handles --------------------------------------------------------------------------------------------------

    def _compare_handles(self) -> None:
        seen = {path for effect in self._effects for path in effect.paths}
        for _, handle in self._handles.changed():
            if handle.path in seen or self._is_claimed(handle.path) or handle.file in self._handles.harmless():
                continue
            self._effects.append(audit.wrote(handle.path))

    def _before_declared(self) -> None:
        if self.stage.running and threading.get_ident() == self._thread:
            self._compare_handles()

    def _after_declared(self) -> None:
        if threading.get_ident() == self._thread:
            self._handles.accept()


def _with_parents(path: str) -> Iterator[str]:
    yield path
    while (parent := os.path.dirname(path)) != path:
        yield parent
        path = parent
