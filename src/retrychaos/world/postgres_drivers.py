"""What is asked of a connection to PostgreSQL, whatever its driver, past its idea of transactions.

Connections of psycopg 3 and psycopg2 stand for themselves, those of asyncpg are transports (postgres_prompt.py).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import socket
from collections.abc import Mapping
from typing import Any

from retrychaos.world.coroutines import at_once
from retrychaos.world.postgres_prompt import Prompt, PromptLoop, prompt
from retrychaos.world.postgres_wire import ALL_GONE, FAILED, IDLE, IN_TRANSACTION, UNKNOWN, Refused, Text, until_ready

DRIVERS = ("psycopg", "psycopg2", "asyncpg")

DEADLOCK_DETECTED, SERIALIZATION_FAILURE, LOCK_NOT_AVAILABLE, QUERY_CANCELED = "40P01", "40001", "55P03", "57014"
_REFUSALS = {
    DEADLOCK_DETECTED: "deadlock detected",
    SERIALIZATION_FAILURE: "could not serialize access due to concurrent update",
    LOCK_NOT_AVAILABLE: "canceling statement due to lock timeout",
    QUERY_CANCELED: "canceling statement due to user request",
}
HURRY = "SET deadlock_timeout = '1ms'"
"""Let the server look early for deliveries that wait for each other."""
TELLING = f"{HURRY}; SET log_lock_waits = on; SET client_min_messages = log"
"""And say when it has looked."""
LOCKED = "55P03"
PATIENCE = 10.0
"""Seconds in which not a byte comes from a server before it is given up."""
_GOOD = (1, 2)
"""PGRES_COMMAND_OK and PGRES_TUPLES_OK."""


class LineError(Exception):
    """The server refused what the harness asked. locked: somebody else is in the way. silent: it has not answered."""

    def __init__(self, message: str, state: str | None = None, *, silent: bool = False) -> None:
        super().__init__(message.strip().split("\n")[0].removeprefix("ERROR:").strip())
        self.locked = state == LOCKED
        self.silent = silent


def driver_of(raw: Any) -> str:
    """One of DRIVERS, or another word if it is a connection that cannot be followed."""
    if isinstance(raw, Prompt):
        return "asyncpg"
    for kind in type(raw).__mro__:
        package = kind.__module__.partition(".")[0]
        if package == "psycopg" and kind.__name__ in ("Connection", "AsyncConnection"):
            return "psycopg"
        if package == "psycopg2" and kind.__name__ == "connection":
            return "psycopg2"
    package = type(raw).__module__.partition(".")[0]
    return f"{package}, opened before the check" if package in DRIVERS else package


def is_async(raw: Any) -> bool:
    """Its methods are coroutines."""
    return isinstance(raw, Prompt) or any(kind.__name__ == "AsyncConnection" for kind in type(raw).__mro__)


def below(pooled: Any) -> Any:
    """The driver's own connection, below what SQLAlchemy has around one that is async."""
    raw = getattr(pooled, "driver_connection", pooled)
    return getattr(getattr(raw, "_protocol", None), "prompt", raw)


def standing(raw: Any) -> int:
    """Is a transaction open on a connection? Known without asking the server."""
    if getattr(raw, "closed", False):
        return UNKNOWN
    return int(raw.info.transaction_status)


def backend(raw: Any) -> int:
    return int(raw.info.backend_pid)


def holds_nothing(raw: Any) -> bool:
    """The transaction open on a connection has written nothing, says the server. False for other drivers."""
    raw = below(raw)
    if driver_of(raw) not in DRIVERS:
        return False
    if standing(raw) in (IDLE, FAILED):
        return True
    try:
        return run(raw, "SELECT pg_current_xact_id_if_assigned()")[0][0] is None
    except LineError:
        return False


def cut_off(raw: Any) -> None:
    """Take the socket from a connection that belongs to another process, so that closing it says nothing there."""
    with contextlib.suppress(Exception):
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, raw.fileno(), inheritable=False)
        os.close(nowhere)


def run(raw: Any, sql: str, patience: float | None = None) -> list[Text]:
    """Run statements on a connection, past its driver's idea of transactions; the rows of the last one."""
    patience = patience or PATIENCE
    if isinstance(raw, Prompt):
        try:
            return raw.ask(sql, patience)
        except Refused as refusal:
            raise LineError(str(refusal), refusal.state) from refusal
        except TimeoutError as silence:
            raise _silent(patience) from silence
    pgconn = raw if hasattr(raw, "exec_") else getattr(raw, "pgconn", None)
    if pgconn is None:
        return _run_psycopg2(raw, sql, patience)
    result = _answer(pgconn, sql.encode("utf-8", "surrogateescape"), patience)
    if result.status not in _GOOD:
        state = result.error_field(ord("C"))
        message = result.error_message or pgconn.error_message or b"no answer"
        raise LineError(message.decode("utf-8", "replace"), state.decode() if state else None)
    value, columns = result.get_value, range(result.nfields)
    return [tuple([_decoded(value(row, column)) for column in columns]) for row in range(result.ntuples)]


def _answer(pgconn: Any, sql: bytes, patience: float) -> Any:
    """The last result of statements. Unlike PQexec, this ends when the server is silent, and can be interrupted."""
    from psycopg import OperationalError

    try:
        pgconn.nonblocking = 1
        pgconn.send_query(sql)
        while pgconn.flush():
            _await(pgconn.socket, True, patience)
            pgconn.consume_input()
        last = None
        while True:
            while pgconn.is_busy():
                _await(pgconn.socket, False, patience)
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is None:
                return last
            last = result
    except OperationalError as error:
        raise LineError(str(error)) from error


def _await(descriptor: int, writable: bool, patience: float) -> None:
    if not until_ready(descriptor, writable, patience):
        raise _silent(patience)


def _silent(patience: float) -> LineError:
    return LineError(f"the server has not answered for {patience:g} s", silent=True)


def _decoded(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "surrogateescape")


def _run_psycopg2(raw: Any, sql: str, patience: float) -> list[Text]:
    import psycopg2
    from psycopg2 import extensions

    cursor = extensions.cursor(raw)
    try:
        as_text = extensions.new_type(tuple(extensions.string_types), "RETRYCHAOS_TEXT", lambda value, _: value)
        extensions.register_type(as_text, cursor)
        cursor.execute(sql)
        if raw.async_:
            _await_psycopg2(raw, patience)
        return list(cursor.fetchall()) if cursor.description else []
    except psycopg2.Error as error:
        raise LineError(str(error), error.pgcode) from error
    finally:
        cursor.close()


def _await_psycopg2(raw: Any, patience: float) -> None:
    from psycopg2 import extensions

    while (state := raw.poll()) != extensions.POLL_OK:
        _await(raw.fileno(), state == extensions.POLL_WRITE, patience)


def connection_lost(raw: Any) -> Exception:
    """What a driver raises when the server has gone away; the connection is of no use after that."""
    if isinstance(raw, Prompt):
        from asyncpg import ConnectionDoesNotExistError

        raw.close()
        gone: Exception = ConnectionDoesNotExistError("connection was closed in the middle of operation")
        return gone
    clear(raw)  # the server would notice only later that the connection is gone, and others would see its locks
    with contextlib.suppress(Exception):
        finish(raw)
    package = importlib.import_module(driver_of(raw))
    error: Exception = package.OperationalError("server closed the connection unexpectedly")
    return error


def refused(raw: Any, sqlstate: str, ends: bool) -> Exception:
    """What a driver raises when the server refuses a statement: the server does it, so that the transaction is what it
    is after that. ends: as at a COMMIT, the transaction is over."""
    words = f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{sqlstate}', MESSAGE = '{_REFUSALS[sqlstate]}'; END $$"
    if ends and hasattr(raw, "pgconn"):  # not by the driver, which holds its own lock while it commits
        from psycopg.errors import error_from_result

        refusal: Exception = error_from_result(_answer(raw.pgconn, words.encode(), PATIENCE))
        run(raw, "ROLLBACK")
        return refusal
    try:
        if isinstance(raw, Prompt):
            raw.say(words)
        if is_async(raw):
            at_once(raw.execute(words))
        with contextlib.closing(raw.cursor()) as cursor:
            cursor.execute(words)
    except Exception as error:
        if ends:
            raw.say("ROLLBACK") if isinstance(raw, Prompt) else raw.rollback()
        return error
    raise AssertionError(f"the server has not refused {words!r}")


def time_limit(raw: Any) -> float | None:
    """Seconds after which the driver itself gives up the statement that runs, if it does. The connection is as good
    as before then."""
    return raw.limit if isinstance(raw, Prompt) else None


def is_strict(raw: Any) -> bool:
    """Its transactions are to be REPEATABLE READ or SERIALIZABLE."""
    level = getattr(raw, "isolation_level", None)
    if level is None:
        return False
    if driver_of(raw) == "psycopg":
        return str(level.name) in ("REPEATABLE_READ", "SERIALIZABLE")
    return level in (2, 3)  # of psycopg2.extensions


def cancel(raw: Any) -> None:
    """End the statement that runs on a connection, from another thread."""
    with contextlib.suppress(Exception):
        raw.cancel()


def shut(raw: Any) -> None:
    """Whoever waits for an answer on a connection, in whatever thread, gets an error; it is of no use any more."""
    with contextlib.suppress(Exception), socket.socket(fileno=os.dup(raw.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)


def clear(raw: Any, then: str = "") -> bool:
    """Whatever a process had open on a connection is gone. False if the connection is of no use any more.

    then: settings for the next delivery; only psycopg 3 makes them.
    """
    if isinstance(raw, Prompt):
        raw.end()  # it belongs to the loop of a delivery
        return False
    try:
        if hasattr(raw, "pgconn"):
            if standing(raw) not in (IDLE, IN_TRANSACTION, FAILED):
                return False
            run(
                raw, f"{ALL_GONE}; {then}" if then else ALL_GONE
            )  # not by the driver, whose lock may be held by the thread that stands still
            prepared = raw._prepared  # what psycopg believes that the server knows
            prepared._names.clear()
            prepared._counts.clear()
        else:
            raw.rollback()
            before, raw.autocommit = raw.autocommit, True  # else psycopg2 would begin a transaction
            run(raw, "DISCARD ALL")
            raw.autocommit = before
    except Exception:
        return False
    return True


def roll_back(raw: Any) -> None:
    if is_async(raw):
        run(raw, "ROLLBACK")
    else:
        raw.rollback()


def finish(raw: Any) -> None:
    """Close a connection of any kind."""
    if isinstance(raw, Prompt):
        raw.end()
        return
    if is_async(raw):
        raw = raw.pgconn
    (raw.finish if hasattr(raw, "exec_") else raw.close)()


def dialler(like: Any) -> Any:
    """What opens another connection to where `like` goes, in the same role."""
    if isinstance(like, Prompt):
        return functools.partial(_dial_asyncpg, like.how)
    password = like.info.password
    if driver_of(like) == "psycopg":
        from psycopg import pq
        from psycopg.conninfo import make_conninfo

        parameters = dict(like.info.get_parameters())
        if password:
            parameters["password"] = password
        address = make_conninfo(**parameters).encode()

        def dial(patience: float) -> Any:
            pgconn = pq.PGconn.connect_start(address)
            try:
                while (state := pgconn.connect_poll()) in (pq.PollingStatus.READING, pq.PollingStatus.WRITING):
                    _await(pgconn.socket, state == pq.PollingStatus.WRITING, patience)
                if pgconn.status != pq.ConnStatus.OK:
                    raise LineError(pgconn.error_message.decode("utf-8", "replace"))
            except BaseException:
                pgconn.finish()
                raise
            return pgconn

        return dial
    parameters = {name: value for name, value in like.info.dsn_parameters.items() if value}
    if password:
        parameters["password"] = password

    def dial_psycopg2(patience: float) -> Any:
        import psycopg2

        try:
            raw = psycopg2.connect(**parameters, async_=True)  # each statement is committed by itself
        except psycopg2.Error as error:
            raise LineError(str(error)) from error
        try:
            _await_psycopg2(raw, patience)
        except psycopg2.Error as error:
            raise LineError(str(error)) from error
        except BaseException:
            raw.close()
            raise
        return raw

    return dial_psycopg2


def _dial_asyncpg(how: Mapping[str, Any], patience: float) -> Prompt:
    from asyncpg import connect_utils

    loop = PromptLoop(None, how, patience)
    try:
        connection = at_once(prompt(connect_utils._connect_addr(**how, loop=loop), loop))
    except Exception as error:
        raise LineError(str(error), silent=isinstance(error, TimeoutError)) from error
    raw: Prompt = below(connection)
    raw.connection = connection
    return raw
