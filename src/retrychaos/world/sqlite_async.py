"""aiosqlite: what it would do in a thread of its own is done in that of the delivery, so that steps have an order.

Each of its connections hands functions to its thread through a queue. In a delivery, the queue does them at once. Where
that thread would wait for a lock the loop goes on: it is tried again when another task has ended a transaction, until
the time of the connection is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import sqlite3
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy.pool import StaticPool

from retrychaos.model.errors import WorldError
from retrychaos.world.gate import settle
from retrychaos.world.imports import Imports
from retrychaos.world.resource import Stage
from retrychaos.world.sqlite_turns import hasten, is_end, takes_a_lock, waits_for

PENDING = (
    "a session or connection had uncommitted changes when the check began, on the same connection that the job uses. "
    "No other process would see them. Remedy: commit in the fixture before the check."
)

_SERVED = (
    "the job uses a connection of aiosqlite that was opened before the check: a thread of the test serves it, which no "
    "delivery can take along. Remedy: open it in the job, or pass an engine."
)


class AsyncSqlite:
    """Hooks into aiosqlite while installed."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._patched: list[tuple[Any, str, Any]] = []
        self._waiting: weakref.WeakKeyDictionary[Any, list[asyncio.Future[None]]] = weakref.WeakKeyDictionary()
        """By loop: tasks that want a lock."""
        self._found: dict[int, _Found] = {}
        self._twins: dict[int, StaticPool] = {}
        """What stands in for a pool that was found."""
        self._imports = Imports({"aiosqlite.core": self._hook})

    def install(self) -> None:
        self._look_around()
        self._imports.start()

    def uninstall(self) -> None:
        self._imports.stop()
        for key, twin in self._twins.items():
            mine, found = _below(twin), self._found[key]
            if mine is not None:
                with contextlib.suppress(sqlite3.ProgrammingError):  # it was closed meanwhile
                    mine._connection.backup(found.connection)  # as the check has left it
                forget(twin.connection.dbapi_connection)
        self._twins.clear()
        self._found.clear()
        while self._patched:
            setattr(*self._patched.pop())

    def _hook(self) -> None:
        import aiosqlite.core

        for name, make in (("__init__", self._init), ("_execute", self._execute)):
            original = vars(aiosqlite.core.Connection)[name]
            self._patched.append((aiosqlite.core.Connection, name, original))
            setattr(aiosqlite.core.Connection, name, functools.wraps(original)(make(original)))

    def _init(self, original: Callable[..., None]) -> Callable[..., None]:
        def __init__(connection: Any, *args: Any, **kwargs: Any) -> None:
            original(connection, *args, **kwargs)
            if not (self._stage.running or self._stage.quiet):
                return
            connection._tx = _AtOnce()
            if hasattr(connection, "_thread"):
                connection._thread = _NoThread()
            else:  # before 0.22 it was a thread itself
                connection.start = connection._thread = _NoThread().start

        return __init__

    def _execute(self, original: Callable[..., Any]) -> Callable[..., Any]:
        async def _execute(connection: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            queue = connection._tx
            if not self._stage.running:
                return await original(connection, function, *args, **kwargs)
            if not isinstance(queue, _AtOnce):
                self._stage.refuse(WorldError(_SERVED))
            statement = _statement(function, args)
            loop = asyncio.get_running_loop()
            end = loop.time() + queue.patience
            while True:
                try:
                    result = await original(connection, function, *args, **kwargs)
                except sqlite3.OperationalError as error:
                    if not queue.would_wait(error, statement) or loop.time() >= end:
                        raise
                else:
                    if queue.settle(connection._connection, statement):
                        self._wake(loop)
                    return result
                await self._wait(loop, end)

        return _execute

    async def _wait(self, loop: asyncio.AbstractEventLoop, end: float) -> None:
        """For the end of a transaction of another task, or of the time that there is."""
        ended = loop.create_future()
        self._waiting.setdefault(loop, []).append(ended)
        timer = loop.call_at(end, settle, ended)
        try:
            await ended
        finally:
            timer.cancel()

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        for ended in self._waiting.pop(loop, ()):
            settle(ended)

    def _look_around(self) -> None:
        """Databases in memory that are served by threads. Now, since a fork has no threads any more."""
        if "aiosqlite" not in sys.modules:
            return
        for pool in gc.get_referrers(StaticPool, *StaticPool.__subclasses__()):
            if isinstance(pool, StaticPool) and "connection" in vars(pool) and (its := _below(pool)) is not None:
                _call_there(its, functools.partial(self._read, pool, its._connection))

    def _read(self, pool: StaticPool, connection: sqlite3.Connection) -> None:
        empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
        content = b"" if empty else connection.serialize()
        self._found[id(pool)] = _Found(pool, connection, content, connection.in_transaction)

    def pool_for(self, pool: StaticPool) -> StaticPool:
        """The pool to connect to in the place of one of a database in memory.

        Its only connection is served by a thread from before the check. What stands in for it has the same content, and
        is served here. Raises WorldError if work was left uncommitted there.
        """
        found = self._found.get(id(pool))
        if found is None:
            return pool
        if found.is_pending:
            raise WorldError(PENDING)
        if id(pool) not in self._twins:
            twin = pool.recreate()
            mine: Any = _below(twin)
            with contextlib.closing(sqlite3.connect(":memory:")) as copy:
                if found.content:
                    copy.deserialize(found.content)
                copy.backup(mine._connection)
            self._twins[id(pool)] = twin
        return self._twins[id(pool)]

    def identity(self, raw: sqlite3.Connection) -> int:
        """Of a database in memory, the same in every process of a check."""
        for key, twin in self._twins.items():
            if getattr(_below(twin), "_connection", None) is raw:
                return id(self._found[key].connection)
        return id(raw)


@dataclass(frozen=True)
class _Found:
    """A database in memory from before the check."""

    pool: StaticPool
    connection: sqlite3.Connection
    content: bytes
    is_pending: bool
    """A transaction is open."""


def _below(pool: Any) -> Any:
    """The connection of aiosqlite in a pool of one, if it has been made."""
    adapted = pool.connection.dbapi_connection
    if isinstance(adapted, sqlite3.Connection) or sqlite_of(adapted) is None:
        return None
    return adapted._connection


def _call_there(connection: Any, function: Callable[[], object]) -> None:
    """Call it in the thread that serves a connection. Raises what it raises."""
    done = threading.Event()
    problems: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except BaseException as problem:
            problems.append(problem)
        done.set()

    connection._tx.put_nowait((None, call))
    done.wait()
    if problems:
        raise problems[0]


class _AtOnce:
    """In the place of the queue of a connection."""

    patience = 0.0
    """Seconds for which it would wait for a lock."""
    _locked = False
    """Its transaction has one already."""

    def would_wait(self, error: sqlite3.OperationalError, statement: str) -> bool:
        """SQLite would, in the thread of the connection. Not if it holds a lock: two such waits would never end."""
        return waits_for(error) and (not self._locked or is_end(statement))

    def settle(self, raw: sqlite3.Connection | None, statement: str) -> bool:
        """A statement has succeeded. Has a lock been given up by it?"""
        before = self._locked
        in_transaction = False
        with contextlib.suppress(sqlite3.ProgrammingError):  # it has just been closed
            in_transaction = isinstance(raw, sqlite3.Connection) and raw.in_transaction
        self._locked = in_transaction and (self._locked or takes_a_lock(statement))
        return before and not self._locked

    def put_nowait(self, order: tuple[Any, Callable[[], Any]]) -> None:
        future, function = order
        try:
            result = function()
            if isinstance(result, sqlite3.Connection):
                self.patience = hasten(result)
        except Exception as problem:
            if future is not None:
                future.set_exception(problem)
        else:
            if future is not None:
                future.set_result(result)


class _NoThread:
    """In the place of its thread."""

    daemon = True

    def start(self) -> None:
        """There is nothing to start."""


def _statement(function: Any, args: tuple[Any, ...]) -> str:
    """What a function of a connection or cursor runs, as far as locks go."""
    if args and isinstance(args[0], str):
        return args[0]
    return "COMMIT" if getattr(function, "__name__", "") == "commit" else ""


def sqlite_of(connection: Any) -> sqlite3.Connection | None:
    """The SQLite connection below one of a pool; None if that is to another database, or closed."""
    if isinstance(connection, sqlite3.Connection):
        return connection
    below = getattr(getattr(connection, "_connection", None), "_connection", None)
    return below if isinstance(below, sqlite3.Connection) else None


def take_over(fairy: Any) -> None:
    """The harness has taken the SQLite connection below for itself."""
    fairy.dbapi_connection._connection._connection = None
    fairy.dbapi_connection = None  # it has left its pool, and would be closed when it is collected


def forget(adapted: Any) -> None:
    """Close what is below, and let its owners know that nothing is left to close."""
    below = sqlite_of(adapted)
    if below is None or isinstance(adapted, sqlite3.Connection):
        return
    adapted._connection._connection = None
    adapted._connection._running = False
    with contextlib.suppress(sqlite3.Error):
        below.close()
