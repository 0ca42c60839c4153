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

_SERVED, _NOTHING_MORE = b"s", b"n"
"""What a process tells when it ends, if it has not died."""
_DIED = pickle.dumps((False, "a forked delivery died"))
_HEADER = struct.Struct("!Q")
_monotonic = time.monotonic
_getpid = os.getpid


class ForkError(Exception):
    """A forked delivery died, never answered, or gave something that cannot be sent between processes."""


class Zygote:
    """A process forked now; each request runs in a fresh copy of it, one at a time."""

    def __init__(self, serve: Callable[[Any], Any]) -> None:
        self._ended = False
        self._lost = ""
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

    def send(self, request: Any) -> None:
        """A fresh process begins to work on `request`. Receive each answer before you send the next request.

        Raises ForkError if one before did not answer.
        """
        if self._lost:
            raise ForkError(self._lost)
        _write(self._request, pickle.dumps(request))

    def receive(self, timeout: float) -> Any:
        """The answer to the request that was sent. Raises ForkError, also for what serve() raised."""
        answer = _read(self._reply, _monotonic() + timeout)
        if answer is None:
            self._lost = f"a forked delivery gave no answer within {timeout:.0f} s"  # it may still come
            raise ForkError(self._lost)
        good, value = pickle.loads(answer)
        if not good:
            raise ForkError(value)
        return value

    def end(self) -> None:
        """Nothing more will be asked: it and its successor die while we do other things. Never raises."""
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
        """It is gone, and its successor killed. Never raises."""
        self.end()
        # Only now: until then its number, which is that of its group, goes to nobody else.
        os.waitpid(self._pid, 0)


def _fork() -> int:
    with warnings.catch_warnings():
        # Other threads do not live on in the child, which runs nothing but the job: as after any worker's fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _serve_all(requests: int, replies: int, serve: Callable[[Any], Any]) -> None:
    """The first request is served here, all others in children of a successor, forked before and therefore fresh.

    Most checks ask once. Then this process has ended before the check does, and nobody waits for that (it takes long);
    nor for the successor, which is no child of the one that asks.
    """
    select.select([requests], [], [])
    news, tell = os.pipe()
    if _fork():
        os.write(tell, _SERVED if _serve_one(requests, replies, serve) else _NOTHING_MORE)
        return
    os.close(tell)
    told = os.read(news, 1)
    os.close(news)
    if told == _NOTHING_MORE:
        return
    if told != _SERVED:
        _write(replies, _DIED)
    select.select([requests], [], [])
    while True:
        child = _fork()  # before it is asked for, so that nobody waits for it
        if child == 0:
            code = b"\0"
            try:
                code = _SERVED if _serve_one(requests, replies, serve) else _NOTHING_MORE
            finally:
                os._exit(code[0])
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == _NOTHING_MORE[0]:
            return
        if status != _SERVED[0]:
            _write(replies, _DIED)


def _serve_one(requests: int, replies: int, serve: Callable[[Any], Any]) -> bool:
    """False if nothing more is asked."""
    data = _read(requests, None)
    if data is not None:
        _write(replies, _answer(serve, data))
    return data is not None


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
