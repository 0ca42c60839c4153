"""Finds the PostgreSQL databases that a job reaches: every statement and commit on a connection is a step.

psycopg 3 and asyncpg are written in Python, so their classes are patched (postgres_psycopg.py, postgres_asyncpg.py).
The classes of psycopg2 cannot be: its connections get another cursor class, SQLAlchemy's proxy of a connection tells of
commits, and what passes both is noticed at the next boundary by the state of the transaction. Connections are followed
when they leave SQLAlchemy's pool, plain ones at their first statement.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

from retrychaos.model.errors import WorldError
from retrychaos.model.options import DEFAULT_BUDGET
from retrychaos.model.plan import CONFLICT, DEADLOCK, ERROR, LOCK_TIMEOUT, LOST_REPLY
from retrychaos.model.values import short
from retrychaos.world import postgres_forks as forks
from retrychaos.world.async_record import AsyncRecord
from retrychaos.world.imports import Imports
from retrychaos.world.postgres import PostgresDatabase
from retrychaos.world.postgres_async import rows_of
from retrychaos.world.postgres_asyncpg import Asyncpg
from retrychaos.world.postgres_cursors import cursor_class, query_text, tags
from retrychaos.world.postgres_drivers import (
    DEADLOCK_DETECTED,
    DRIVERS,
    HURRY,
    LOCK_NOT_AVAILABLE,
    QUERY_CANCELED,
    SERIALIZATION_FAILURE,
    TELLING,
    LineError,
    below,
    clear,
    connection_lost,
    cut_off,
    driver_of,
    finish,
    is_async,
    is_strict,
    refused,
    run,
    standing,
    time_limit,
)
from retrychaos.world.postgres_guard import Guard
from retrychaos.world.postgres_handle import LOCKING, Handle
from retrychaos.world.postgres_psycopg import Psycopg
from retrychaos.world.postgres_servers import Servers
from retrychaos.world.postgres_sessions import Sessions
from retrychaos.world.postgres_wire import FAILED, IDLE, IN_TRANSACTION
from retrychaos.world.resource import Stage
from retrychaos.world.sql_texts import texts

_LIBPQ = ("psycopg", "psycopg2")
_MISSING = object()
_OPEN = (
    "the connection was already inside a transaction when the check began, so what the job commits there is not what a "
    "crash would leave. Commit or close it in the fixture before the check, and let the job open its own."
)
_SOON = 3_600.0
_TAKEN_BACK = re.compile(r"\b(RESET|DISCARD)\s+ALL\b", re.IGNORECASE)
_real_now = time.time


class PostgresSource:
    """Hooks into the drivers while installed."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._servers = Servers(stage)
        self._sessions = Sessions()
        self._followed: dict[int, tuple[PostgresDatabase, Handle]] = {}
        self._resting: dict[int, Any] = {}
        """Connections that were opened here and have not left the pool yet: what runs there is the engine's own."""
        self._patched: list[tuple[Any, str, Any]] = []
        self._imports = Imports({name: functools.partial(self._prepare, name) for name in DRIVERS})
        self._watching = False
        """Of forks."""
        self._drivers: set[str] = set()
        self._factories: list[tuple[Any, Any]] = []
        self._busy: set[int] = set()
        """Threads in which a statement runs that is known already."""
        self._spare: dict[int, list[Any]] = {}
        """By pool: connections that deliveries which have ended leave to later ones; to connect takes long."""
        self._of_pool: dict[int, int] = {}
        self._left: list[tuple[int | None, Any]] = []
        """Connections of deliveries that have ended, with the pool that they are from."""
        self._asyncpg: Asyncpg | None = None
        self._guard: Guard | None = None
        self._faults = False
        """A server may refuse."""
        self._noticing: weakref.WeakSet[Any] = weakref.WeakSet()
        self._in_server: list[tuple[object, weakref.ref[Any]]] = []
        """Cursors of psycopg 3 whose rows stay in the server, each with the delivery that it belongs to."""
        self._ready: set[int] = set()
        """Connections that have the settings of deliveries that overlap already."""
        self._installed: list[tuple[Any, str, Callable[..., Any]]] = []

    # -- Source -------------------------------------------------------------------------------------------------------

    def install(self) -> None:
        self._faults = bool(self._stage.options("faults"))
        forks.watch()
        self._watching = True
        if importlib.util.find_spec("sqlalchemy") is not None:
            self._install_in_engines()
        self._imports.start()

    def _install_in_engines(self) -> None:
        from sqlalchemy import event
        from sqlalchemy.engine import Engine
        from sqlalchemy.engine.default import DefaultDialect
        from sqlalchemy.pool import Pool
        from sqlalchemy.pool.base import _ConnectionFairy

        listeners: list[tuple[Any, str, Callable[..., Any]]] = [
            (Pool, "connect", self._on_connect),
            (Pool, "checkout", self._on_checkout),
            (DefaultDialect, "do_connect", self._on_do_connect),
            (Engine, "begin_twophase", self._on_two_phases),
        ]
        for target, name, listener in listeners:
            event.listen(target, name, listener)
            self._installed.append((target, name, listener))
        if hasattr(DefaultDialect, "_do_ping_w_event"):
            self._patch(DefaultDialect, "_do_ping_w_event", self._ping)
        self._patch(_ConnectionFairy, "cursor", self._fairy_cursor)
        self._patch(_ConnectionFairy, "commit", self._fairy_commit)

    def cancel(self, owner: object) -> None:
        for database, handle in self._followed.values():
            if handle.owner is owner:
                database.cancel(handle)

    def leave(self, owner: object) -> None:
        for whose, kept in self._in_server:
            if whose is owner and (cursor := kept()) is not None:
                cursor._closed = True  # it has died with its process, so psycopg must not warn that it was left open
        self._in_server = [each for each in self._in_server if each[0] is not owner]
        for key, (database, handle) in list(self._followed.items()):
            if handle.owner is owner:
                for raw, good in database.leave(owner):
                    pool = self._of_pool.get(id(raw)) if good else None
                    if pool is not None:
                        _unlock(raw)
                        self._spare.setdefault(pool, []).append(raw)
                    else:
                        self._left.append((pool, raw))
                self._followed.pop(key, None)
        if self._asyncpg is not None:
            self._asyncpg.leave(owner)

    def part(self, blobs: Mapping[str, Any], folder: str) -> None:
        """A server is not private, so nobody asks for this."""

    def end_delivery(self) -> None:
        for pool, raw in self._left:
            # Those that died have been unwound by now, and may have touched it.
            if pool is not None and (standing(raw) == IDLE or clear(raw, TELLING if raw in self._noticing else "")):
                self._spare.setdefault(pool, []).append(raw)
            else:
                with contextlib.suppress(Exception):
                    finish(raw)
        self._left.clear()
        if self._asyncpg is not None:
            self._asyncpg.leave(None, but=self._followed)
        for _, handle in self._followed.values():
            handle.lost = handle.wrote and standing(handle.raw) == IN_TRANSACTION
        self._restore_factories()
        self._followed.clear()
        self._resting.clear()
        self._busy.clear()
        self._ready.clear()
        self._in_server.clear()

    def connecting(self, pool: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        """How a delivery that overlaps with others gets a connection of that pool."""

        def connect(*args: Any) -> Any:
            spare = self._spare.get(id(pool), [])
            while spare:
                raw = spare.pop()
                if standing(raw) != IDLE:  # one that had died has closed it, when it was unwound
                    finish(raw)
                    continue
                if raw in self._noticing:
                    self._ready.add(id(raw))
                return raw
            raw = original(*args)
            self._of_pool[id(raw)] = id(pool)
            return raw

        return connect

    def uninstall(self) -> None:
        if self._guard is not None:
            self._guard.stop()
            self._guard = None
        for raws in self._spare.values():
            for raw in raws:
                with contextlib.suppress(Exception):
                    finish(raw)
        self._spare.clear()
        if self._asyncpg is not None:
            self._asyncpg.close()
        self._imports.stop()
        if self._watching:
            self._watching = False
            forks.unwatch()
        if self._installed:
            from sqlalchemy import event

            while self._installed:
                event.remove(*self._installed.pop())
        while self._patched:
            owner, name, original = self._patched.pop()
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._drivers.clear()
        self._restore_factories()
        self._sessions.close()

    def _patch(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = owner.__dict__.get(name, _MISSING)
        self._patched.append((owner, name, original))
        setattr(owner, name, make(original))

    def _prepare(self, driver: str) -> None:
        if driver in self._drivers:
            return
        self._drivers.add(driver)
        if driver == "psycopg":
            for owner, name, make in Psycopg(self._stage, self).hooks():
                self._patch(owner, name, make)
        elif driver == "asyncpg":
            self._asyncpg = Asyncpg(self._stage, self)
            for owner, name, make in self._asyncpg.hooks():
                self._patch(owner, name, make)
        else:
            import psycopg2

            self._patch(psycopg2, "connect", self._connect)

    def _restore_factories(self) -> None:
        for raw, factory in self._factories:
            with contextlib.suppress(Exception):
                raw.cursor_factory = factory
        self._factories.clear()

    # -- connections --------------------------------------------------------------------------------------------------

    def _on_do_connect(self, dialect: Any, record: Any, arguments: Any, parameters: dict[str, Any]) -> None:
        if self._stage.running and dialect.name == "postgresql" and dialect.driver in _LIBPQ:
            # A crash is a snapshot here, so nothing has to reach the disk. The connection ends with the delivery.
            asked = f"{parameters.get('options') or ''} -c synchronous_commit=off".strip()
            if not arguments or "options" not in str(arguments[0]):
                parameters["options"] = asked

    def _on_connect(self, raw: Any, record: Any) -> None:
        raw = below(raw)
        if self._stage.running and driver_of(raw) in DRIVERS:
            self._prepare(driver_of(raw))
            self._resting[id(raw)] = raw

    def _on_checkout(self, pooled: Any, record: Any, fairy: Any) -> None:
        raw = below(pooled)
        if not self._stage.running or driver_of(raw) not in DRIVERS:
            return
        if forks.is_of_parent(raw):
            from sqlalchemy.exc import DisconnectionError

            cut_off(raw)
            raise DisconnectionError
        self._prepare(driver_of(raw))
        self.follow(raw, record if raw is pooled else AsyncRecord(record))

    def follow(self, raw: Any, record: Any = None) -> tuple[PostgresDatabase, Handle] | None:
        """The database of a connection; None if what happens there is none of our business."""
        found = self._followed.get(id(raw))
        if found is not None:
            return found
        if forks.is_of_parent(raw):
            cut_off(raw)
            self._stage.refuse(
                WorldError(
                    "the job uses a connection that was opened before the check, and that a forked process cannot "
                    "share with its parent. Pass the engine to the job, not an open connection."
                )
            )
        status = standing(raw)
        if status in (IN_TRANSACTION, FAILED):
            self._stage.refuse(WorldError(_OPEN))
        quiet, self._stage.quiet = self._stage.quiet, True
        try:
            database = self._servers.of(raw)
            handle = database.follow(raw, record, self._sessions.renew, driver_of(raw) == "psycopg2")
            if id(raw) in self._resting and not self._stage.concurrent and not is_async(raw):
                self._sessions.met(raw, record)
        except WorldError as problem:
            self._stage.refuse(problem)
        finally:
            self._stage.quiet = quiet
        if self._stage.concurrent:
            handle.tells = self._hurry(raw)
        if handle.unhooked:
            self._factories.append((raw, raw.cursor_factory))
            raw.cursor_factory = self._cursor(raw.cursor_factory)
        self._followed[id(raw)] = (database, handle)
        return database, handle

    def _hurry(self, raw: Any) -> bool:
        """Let the server look early for deliveries that wait for each other. True if it says when it has looked."""
        if id(raw) in self._ready:
            self._ready.discard(id(raw))
            return True
        for settings in (TELLING, HURRY) if hasattr(raw, "add_notice_handler") else (HURRY,):
            with contextlib.suppress(LineError):  # each is for roles that may
                run(raw, settings)
                tells = settings == TELLING
                if tells and raw not in self._noticing:
                    self._noticing.add(raw)
                    raw.add_notice_handler(self._noticed)
                return tells
        return False

    def _tell_again(self, raw: Any, handle: Handle, text: str) -> None:
        """The job has taken back all settings, as some pools do when a connection comes back to them."""
        if handle.tells and _TAKEN_BACK.search(text):
            handle.tells = self._hurry(raw)

    def _noticed(self, notice: Any) -> None:
        if notice.source_function == "ProcSleep":  # proc.c: "still waiting for", after the check for deadlocks
            self._stage.waits_on()

    def _ping(self, original: Any) -> Any:
        def _do_ping_w_event(dialect: Any, pooled: Any) -> Any:
            raw = below(pooled)
            if not self._stage.running or driver_of(raw) not in DRIVERS:
                return original(dialect, pooled)
            if forks.is_of_parent(raw):
                cut_off(raw)
                return False
            quiet, self._stage.quiet = self._stage.quiet, True
            try:
                return original(dialect, pooled)
            finally:
                self._stage.quiet = quiet

        return _do_ping_w_event

    # -- steps --------------------------------------------------------------------------------------------------------

    def followed(self, raw: Any) -> tuple[PostgresDatabase, Handle] | None:
        if not self._stage.running or self._is_busy:
            return None
        if id(raw) in self._resting and id(raw) not in self._followed:
            self._ready.discard(id(raw))  # a listener of the engine may set something else
            return None
        return self.follow(raw)

    @contextlib.contextmanager
    def statement(self, raw: Any, query: Any, values: Any, cursor: Any) -> Iterator[None]:
        """A statement runs inside: before it is a boundary, after it we know whether it has committed."""
        text = self.announce(raw, query, values)
        if text is None:
            yield
            return
        with self.answer(raw, cursor, standing(raw) == IDLE, text):
            yield

    def announce(self, raw: Any, query: Any, values: Any) -> str | None:
        """A statement comes next: here is the boundary before it. Its text; None if it is none of our business."""
        found = self.followed(raw)
        if found is None:
            return None
        database, handle = found
        text, template = texts(query_text(query, raw))
        self._watch_out(database, text)
        database.settle(handle)
        detail = f"{text} {short(values)}" if values and self._stage.traced else text
        self._stage.step("sql", database, template, detail)
        self._stage.strike(ERROR, functools.partial(self._lost, raw))
        return text

    def looks_away(self) -> bool:
        """What runs in this thread now is none of our business, or known already."""
        return not self._stage.running or self._is_busy

    @contextlib.contextmanager
    def answer(self, raw: Any, cursor: Any, was_idle: bool, text: str = "") -> Iterator[None]:
        """The server works inside on the statement that was announced. text: none if only its rest comes."""
        found = self._followed.get(id(raw))
        if found is None or self.looks_away():
            yield
            return
        database, handle = found
        if not was_idle and text[:9].upper().startswith(("COMMIT", "END")):
            database.committing(handle)
        if text and getattr(cursor, "name", None) and not handle.unhooked and self._stage.concurrent:
            self._in_server.append((handle.owner, weakref.ref(cursor)))
        handle.cursor = cursor
        try:
            with self._in_the_server(handle), self._guarded(database, handle):
                if text and self._faults:
                    self._refuse(raw, handle, text)
                yield
            if not text:
                self._stage.observed(cursor.rowcount)
            elif self._stage.concurrent:
                self._observe(cursor)
        finally:
            if handle.cursor is cursor:  # else that was seen when it came back
                database.executed(handle, tags(cursor), was_idle)
            handle.cursor = None
        self._tell_again(raw, handle, text)
        if standing(raw) == IDLE or time_limit(raw):  # else its work goes with the connection, as if it was not done
            self._stage.strike(LOST_REPLY, functools.partial(self._no_answer, raw))

    @contextlib.contextmanager
    def preparing(self, raw: Any) -> Iterator[None]:
        """The server only gets to know a statement inside. That does nothing, but it may have to wait."""
        found = self._followed.get(id(raw))
        if found is None or self.looks_away():
            yield
            return
        database, handle = found
        try:
            with self._in_the_server(handle):
                yield
            self._stage.observed()  # types, which stay as they are
        finally:
            database.settle(handle)
            handle.failed = standing(raw) == FAILED

    @contextlib.contextmanager
    def command(self, raw: Any, text: str, cursor: Any) -> Iterator[None]:
        """A command runs inside that is no step: it begins a transaction, or gives one up."""
        found = self.followed(raw)
        if found is None:
            yield
            return
        database, handle = found
        self._isolate(handle, text.upper())
        yield
        database.executed(handle, tags(cursor), was_idle=False)
        handle.fresh = handle.open
        self._tell_again(raw, handle, text)

    @contextlib.contextmanager
    def _in_the_server(self, handle: Handle) -> Iterator[None]:
        """Inside a delivery waits for an answer, and perhaps for another delivery."""
        thread = threading.get_ident()
        self._busy.add(thread)
        self._stage.enter(handle.tells)
        try:
            yield
        except Exception as error:
            self._back(thread)
            self._observe_error(error)
            raise
        except BaseException:
            self._busy.discard(thread)
            raise
        else:
            self._back(thread)

    def _refuse(self, raw: Any, handle: Handle, text: str, ends: bool = False) -> None:
        """What the server may say to a statement, or to a COMMIT, because of others."""
        said = text.upper()
        self._isolate(handle, said)
        if standing(raw) == FAILED:
            return
        locks = LOCKING.match(text) is not None
        kinds: list[tuple[str, str]] = [(DEADLOCK, DEADLOCK_DETECTED)] if locks else []
        if (locks or ends) and (handle.strict or is_strict(raw)):
            kinds.append((CONFLICT, SERIALIZATION_FAILURE))
        if locks and (handle.hasty or "NOWAIT" in said):
            kinds.append((LOCK_TIMEOUT, LOCK_NOT_AVAILABLE))
        elif locks and time_limit(raw):
            kinds.append((LOCK_TIMEOUT, QUERY_CANCELED))
        for kind, sqlstate in kinds:
            self._stage.strike(kind, functools.partial(self._refused, raw, sqlstate, ends))

    @staticmethod
    def _isolate(handle: Handle, said: str) -> None:
        if "ISOLATION LEVEL" in said:
            handle.strict = "SERIALIZABLE" in said or "REPEATABLE READ" in said
        handle.hasty = handle.hasty or "LOCK_TIMEOUT" in said

    def _refused(self, raw: Any, sqlstate: str, ends: bool) -> Exception:
        with self._aside():
            refusal = refused(raw, sqlstate, ends)
        return TimeoutError() if sqlstate == QUERY_CANCELED else refusal  # its driver has run out of patience

    def _guarded(self, database: PostgresDatabase, handle: Handle) -> contextlib.AbstractContextManager[None]:
        """psycopg2 does not come back by itself; where several deliveries run, whoever drives ends its statement."""
        if not handle.unhooked or self._stage.concurrent:
            return contextlib.nullcontext()
        if self._guard is None:
            self._guard = Guard(self._stage.options("budget") or DEFAULT_BUDGET)
        return self._guard.watch(lambda: database.cancel(handle))

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """What happens inside is no step of the job."""
        thread, quiet = threading.get_ident(), self._stage.quiet
        busy = thread in self._busy
        self._busy.add(thread)
        self._stage.quiet = True
        try:
            yield
        finally:
            self._stage.quiet = quiet
            if not busy:
                self._busy.discard(thread)

    def _no_answer(self, raw: Any) -> Exception:
        return TimeoutError() if time_limit(raw) else self._lost(raw)

    def _lost(self, raw: Any) -> Exception:
        with self._aside():
            return connection_lost(raw)

    @property
    def _is_busy(self) -> bool:
        return threading.get_ident() in self._busy

    def _back(self, thread: int) -> None:
        """The server has answered: with several deliveries, it may be the turn of another one."""
        self._stage.arrive()
        self._busy.discard(thread)

    def _observe(self, cursor: Any) -> None:
        """What the job will read from the cursor; it is read here and the cursor wound back."""
        if cursor is None or not hasattr(cursor, "scroll"):
            return
        if getattr(cursor, "name", None):  # its rows stay in the server: psycopg2 fetches them unseen
            if driver_of(cursor.connection) == "psycopg":
                self._stage.observed()
            return
        rows: Any = None
        if cursor.description is not None:
            if is_async(cursor.connection):
                rows = rows_of(cursor)
            else:
                rows = cursor.fetchall()
                if rows:
                    cursor.scroll(0, "absolute")
        now = datetime.now().timestamp()
        self._stage.observed(_masked(rows, now), cursor.rowcount)

    def streamed(self, rows: Any) -> None:
        """The statement that has just been seen gave these rows, in whatever way."""
        if not self.looks_away():
            self._stage.observed(_masked(rows, datetime.now().timestamp()))

    @contextlib.contextmanager
    def set_up(self) -> Iterator[None]:
        """Somebody opens a connection for the job inside: what runs there is not the job's doing."""
        thread = threading.get_ident()
        self._busy.add(thread)
        try:
            yield
        finally:
            self._busy.discard(thread)

    def committing(self, raw: Any) -> contextlib.AbstractContextManager[None]:
        """psycopg2 commits inside, which nothing else tells us of."""
        return self.commit(raw) if driver_of(raw) == "psycopg2" else contextlib.nullcontext()

    @contextlib.contextmanager
    def commit(self, raw: Any) -> Iterator[None]:
        """A COMMIT by the driver runs inside."""
        found = self.followed(raw)
        if found is None or standing(raw) not in (IN_TRANSACTION, FAILED):
            yield
            return
        database, handle = found
        self._stage.step("commit", database, "COMMIT", "COMMIT")
        self._stage.strike(ERROR, functools.partial(self._lost, raw))
        database.committing(handle)
        handle.commits = True
        self._stage.enter(handle.tells)
        try:
            if self._faults:
                self._refuse(raw, handle, "", ends=True)
            yield  # it waits where a constraint is checked only now
        except Exception as error:
            self._stage.arrive()
            self._observe_error(error)
            raise
        else:
            self._stage.arrive()
            self._stage.observed("committed")
        finally:
            handle.commits = False
        self._stage.strike(LOST_REPLY, functools.partial(self._no_answer, raw))

    def _observe_error(self, error: Exception) -> None:
        self._stage.observed("error", type(error).__name__, str(getattr(error, "sqlstate", None)))

    def _watch_out(self, database: PostgresDatabase, text: str) -> None:
        start = text[:20].upper()
        if start.startswith(("PREPARE TRANSACTION", "COMMIT PREPARED")):
            self.refuse_two_phases(database)
        if ";" in text and " COMMIT" in text.upper().replace(";", " "):
            self._stage.doubt(
                f"several statements with a COMMIT among them were sent at once to {database.label}: boundaries inside "
                "are not seen. Send them one by one."
            )
        schema = database.schema
        database.draws_uuids = database.draws_uuids or schema.mentions("uuid", text)
        if schema.mentions("notify", text):
            database.doubt_notify(text[:80])
        if schema.mentions("outside", text):
            self._stage.doubt(
                f"effect outside the ledger: {text[:80]} on {database.label} reaches outside the database"
            )
        if database.looks_at_clock(text):
            self._stage.excuse(
                WorldError(
                    f"the job never gets further unless time goes by, and it looks at the clock of {database.label} "
                    f"({text[:80]}), which the check cannot move. So it cannot be told whether the job is stuck. "
                    "Compare with a time that the job passes in (datetime.now(timezone.utc)), which the check moves."
                )
            )

    def refuse_two_phases(self, database: PostgresDatabase) -> None:
        self._stage.refuse(
            WorldError(
                f"the job prepares a transaction for two-phase commit on {database.label}. It outlives the process and "
                "keeps its locks, so no state after it could be put back. Use plain transactions under the check."
            )
        )

    def _on_two_phases(self, connection: Any, xid: Any) -> None:
        raw = below(connection.connection.dbapi_connection)
        if self._stage.running and driver_of(raw) in DRIVERS and (found := self.follow(raw)) is not None:
            self.refuse_two_phases(found[0])

    # -- psycopg2 -----------------------------------------------------------------------------------------------------

    def _connect(self, original: Any) -> Any:
        @functools.wraps(original)
        def connect(*args: Any, **kwargs: Any) -> Any:
            raw = original(*args, **kwargs)
            if self._stage.running and hasattr(raw, "cursor_factory"):
                self._factories.append((raw, raw.cursor_factory))
                raw.cursor_factory = self._cursor(raw.cursor_factory)
            return raw

        return connect

    def _fairy_commit(self, original: Any) -> Any:
        def commit(fairy: Any) -> Any:
            raw = fairy.dbapi_connection
            if self._stage.running and driver_of(raw) == "psycopg2":
                with self.commit(raw):
                    return raw.commit()
            return raw.commit()

        return commit

    def _fairy_cursor(self, original: Any) -> Any:
        def cursor(fairy: Any, *args: Any, **kwargs: Any) -> Any:
            raw = fairy.dbapi_connection
            if self._stage.running and kwargs.get("cursor_factory") and driver_of(raw) == "psycopg2":
                kwargs["cursor_factory"] = self._cursor(kwargs["cursor_factory"])
            return original(fairy, *args, **kwargs)

        return cursor

    def _cursor(self, base: Any) -> Any:
        return cursor_class(base, self.statement, lambda: self._stage.running and not self._is_busy)


def _unlock(raw: Any) -> None:
    """A delivery that died in a COMMIT of psycopg 3 has locked the connection, and keeps that lock until it is unwound:
    whoever has the connection next gets another one."""
    if driver_of(raw) == "psycopg" and raw.lock.locked():
        raw.lock = asyncio.Lock() if is_async(raw) else threading.Lock()


def _masked(value: Any, now: float) -> Any:
    """Times that the server has read off its clock just now are other ones in every run."""
    if isinstance(value, datetime):
        at = value.timestamp()
        return "<time>" if min(abs(at - now), abs(at - _real_now())) < _SOON else value
    if isinstance(value, list | tuple):
        return [_masked(each, now) for each in value]
    return value
