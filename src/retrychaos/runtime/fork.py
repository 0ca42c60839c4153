"""Deliveries in processes forked before the first one, where what a job remembers in memory is gone."""

from __future__ import annotations

import os
import pickle
import select
import signal
import struct
import time
import warnings
from collections.abc import Callable
from typing import Any

_NOTHING_MORE = 3
_HEADER = struct.Struct("!Q")
_monotonic = time.monotonic
_getpid = os.getpid


class ForkError(Exception):
    """A forked delivery died, never answered, or gave something that cannot be sent between processes."""


class Zygote:
    """A process forked once; each request runs in a fresh child of it, one at a time."""

    def __init__(self, serve: Callable[[Any], Any]) -> None:
        self._ended = False
        request_read, self._request = os.pipe()
        self._reply, reply_write = os.pipe()
        self._pid = _fork()
        if self._pid == 0:
            try:
                os.setpgid(0, 0)  # Ctrl-C is the parent's to handle
                os.close(self._request)
                os.close(self._reply)
                _serve_all(request_read, reply_write, serve)
            finally:
                os._exit(0)
        os.close(request_read)
        os.close(reply_write)

    def ask(self, request: Any, timeout: float) -> Any:
        """The answer of a fresh child to `request`. Raises ForkError, or what serve() raised."""
        _write(self._request, pickle.dumps(request))
        answer = _read(self._reply, _monotonic() + timeout)
        if answer is None:
            raise ForkError(f"a forked delivery gave no answer within {timeout:.0f} s")
        good, value = pickle.loads(answer)
        if not good:
            raise ForkError(value)
        return value

    def end(self) -> None:
        """Nothing more will be asked: it and every child of it die while we do other things. Never raises."""
        if self._ended:
            return
        self._ended = True
        for descriptor in (self._request, self._reply):
            os.close(descriptor)
        try:
            os.killpg(self._pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            try:
                os.kill(self._pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def close(self) -> None:
        """It and every child of it are gone. Never raises."""
        self.end()
        os.waitpid(self._pid, 0)


def _fork() -> int:
    with warnings.catch_warnings():
        # Other threads do not live on in the child, which runs nothing but the job: as after any worker's fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _serve_all(requests: int, replies: int, serve: Callable[[Any], Any]) -> None:
    """Each child is forked before it is asked, so that nobody waits for the fork."""
    while True:
        child = _fork()
        if child == 0:
            code = 1
            try:
                data = _read(requests, None)
                if data is not None:
                    _write(replies, _answer(serve, data))
                code = 0 if data is not None else _NOTHING_MORE
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _NOTHING_MORE:
            return
        if status:
            _write(replies, pickle.dumps((False, f"a forked delivery died (status {status})")))


def _answer(serve: Callable[[Any], Any], data: bytes) -> bytes:
    try:
        return pickle.dumps((True, serve(pickle.loads(data))))
    except Exception as error:
        return pickle.dumps((False, f"{type(error).__name__}: {error}"))


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(_HEADER.pack(len(data)) + data)
    while view:
        view = view[os.write(descriptor, view) :]


def _read(descriptor: int, deadline: float | None) -> bytes | None:
    """One message; None at the end of the stream or when time is up."""
    header = _read_exactly(descriptor, _HEADER.size, deadline)
    if header is None:
        return None
    return _read_exactly(descriptor, _HEADER.unpack(header)[0], deadline)


def _read_exactly(descriptor: int, size: int, deadline: float | None) -> bytes | None:
    chunks: list[bytes] = []
    while size:
        if deadline is not None and not select.select([descriptor], [], [], max(0.0, deadline - _monotonic()))[0]:
            return None
        chunk = os.read(descriptor, min(size, 1 << 20))
        if not chunk:
            return None
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)
