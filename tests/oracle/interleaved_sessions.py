"""Every interleaving of a job on PostgreSQL, by real processes that are killed for real. Nothing of the tool is used.

Each delivery is in a process with connections of psycopg. It stops before each step until it is told to go on. The
server itself says who waits: a monitor asks ``pg_blocking_pids``. A statement that waits goes on by itself when it can,
and stays where it is then until it is told to go on.

Whom the server ends in a circle has to be certain: the one that closes it. So the check for deadlocks of a statement
that waits has to be over before another one moves. The server tells the delivery when it is (``log_lock_waits``).
"""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import psycopg
from psycopg import IsolationLevel
from psycopg.pq import TransactionStatus

from tests.oracle.interleaved_processes import serve_with
from tests.oracle.moves import Found, Ledger, Table, enumerate_runs
from tests.oracle.overlapping_jobs import Duplicate, Locked, Program
from tests.oracle.postgres_interleavings import CONTENTS, RECEIVER, TABLES, jam, normal

_STANDS, _WAITS, _DONE, _FAILED, _SENT, _OPENED = b"s", b"w", b"d", b"f", b"x", b"o"
_GO = b"g"
_ENDS = {_STANDS: "", _DONE: "done", _FAILED: "failed"}
_SETTINGS = {
    "deadlock_timeout": "1ms",
    "log_lock_waits": "on",
    "client_min_messages": "log",
    # Else the server would not notice a death while a statement waits, and do the statement for nobody.
    "client_connection_check_interval": "1ms",
}


@dataclass(frozen=True)
class Question:
    """A job on a database of the server in a folder, and how thoroughly to try it.

    runs: more are too many. deliveries: at most, in one run.
    """

    folder: str
    database: str
    program: Program
    duplicates: int
    crashes: int
    runs: int
    deliveries: int

    @property
    def address(self) -> dict[str, str]:
        return {"host": self.folder, "dbname": self.database, "user": "postgres"}


# -- in the process of a delivery -----------------------------------------------------------------------------------


class _Yard:
    """What a program runs on in a process of its own, and others after it: to fork and to connect takes long."""

    def __init__(self, question: Question, line: socket.socket) -> None:
        self._question = question
        self._line = line
        self._spare: list[psycopg.Connection[Any]] = []

    def work(self) -> NoReturn:
        try:
            while self._line.recv(1) == _GO:
                try:
                    self._question.program(self)
                except Exception:
                    self._line.send(_FAILED)
                else:
                    self._line.send(_DONE)
        finally:
            os._exit(0)

    def stand(self) -> None:
        """Here is a boundary."""
        self._line.send(_STANDS)
        if self._line.recv(1) != _GO:
            os._exit(1)  # whoever drives has gone

    @contextmanager
    def connect(self, database: int, style: str) -> Iterator[_Plain]:
        connection = self._spare.pop() if self._spare else self._open()
        connection.autocommit = style == "AUTOCOMMIT"
        level = "READ COMMITTED" if style in ("", "AUTOCOMMIT") else style
        connection.isolation_level = IsolationLevel[level.replace(" ", "_")]
        try:
            yield _Plain(self, connection)
        finally:
            connection.rollback()
            self._spare.append(connection)

    def _open(self) -> psycopg.Connection[Any]:
        options = " ".join(f"-c {name}={value}" for name, value in _SETTINGS.items())
        connection = psycopg.connect(**self._question.address, options=options)
        connection.add_notice_handler(self._on_notice)
        self._line.send(_OPENED + str(connection.info.backend_pid).encode())
        return connection

    def _on_notice(self, notice: Any) -> None:
        """The server says so when it has looked for a deadlock, and there is none."""
        if " still waiting for " in notice.message_primary:
            self._line.send(_WAITS)

    def redis(self, command: str, key: str) -> NoReturn:
        raise NotImplementedError

    def send(self, what: str) -> None:
        self.stand()
        self._line.send(_SENT + what.encode())

    def note(self, *what: Any) -> None:
        """Nobody asks: no states are merged here."""


class _Plain:
    """SQL on a connection of the driver, with the steps that SQLAlchemy makes."""

    def __init__(self, yard: _Yard, connection: psycopg.Connection[Any]) -> None:
        self._yard = yard
        self._connection = connection

    def run(self, statement: str, **values: Any) -> tuple[list[tuple[Any, ...]], int]:
        cursor = self._step(lambda: self._connection.execute(re.sub(r":(\w+)", r"%(\1)s", statement).encode(), values))
        return cursor.fetchall() if cursor.description else [], cursor.rowcount

    def commit(self) -> None:
        if self._connection.info.transaction_status != TransactionStatus.IDLE:
            self._step(self._connection.commit)

    def rollback(self) -> None:
        self._connection.rollback()

    def _step(self, action: Callable[[], Any]) -> Any:
        self._yard.stand()
        try:
            return action()
        except psycopg.IntegrityError as error:
            raise Duplicate from error
        except psycopg.Error as error:
            raise Locked from error


# -- in the process that drives -------------------------------------------------------------------------------------


@dataclass
class _Delivery:
    """One that runs in a process, or a process for one. backends: of all its connections."""

    process: int
    line: socket.socket
    backends: list[int] = field(default_factory=list)
    waits: object = None
    """For what its statement waits in the server; None if it does not."""
    came: str | None = None
    """What its statement came to that has waited, before it was told to go on."""


class _Run:
    """Deliveries in processes, from the start on."""

    def __init__(self, question: Question, monitor: psycopg.Connection[Any], spare: list[_Delivery]) -> None:
        self.table = Table(self, question.duplicates, question.crashes, question.deliveries)
        self._question = question
        self._monitor = monitor
        self._spare = spare
        self._deliveries: dict[int, _Delivery] = {}
        self._inbox: list[str] = []

    def begin(self, ident: int) -> str:
        delivery = self._deliveries[ident] = self._spare.pop() if self._spare else self._fork()
        delivery.line.send(_GO)
        return self._answer(delivery)

    def _fork(self) -> _Delivery:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = os.fork()
        if not process:
            ours.close()
            _Yard(self._question, theirs).work()
        theirs.close()
        return _Delivery(process, ours)

    def step(self, ident: int, fail: bool) -> str:
        assert not fail, "everybody waits in the server"
        delivery = self._deliveries[ident]
        if delivery.waits is not None:
            return "blocked"
        if delivery.came is not None:
            end, delivery.came = delivery.came, None
        else:
            delivery.line.send(_GO)
            end = self._answer(delivery)
        if end in ("done", "failed"):
            self._spare.append(self._deliveries.pop(ident))
        self._settle()
        if end == "blocked" and sum(each.waits is not None for each in self._deliveries.values()) > 1:
            return jam(self._monitor) or end
        return end

    def kill(self, ident: int) -> None:
        if ident in self._deliveries:  # else it has returned
            _end(self._deliveries.pop(ident), self._monitor)
        self._settle()

    def _answer(self, delivery: _Delivery) -> str:
        """What its step comes to."""
        while True:
            message = delivery.line.recv(100)
            kind, rest = message[:1], message[1:].decode()
            if kind == _OPENED:
                delivery.backends.append(int(rest))
            elif kind == _SENT:
                self._inbox.append(rest)
            elif kind == _WAITS:
                delivery.waits = self._wait_of(delivery)
                if delivery.waits is not None:
                    return "blocked"
            else:
                assert message, "a delivery has died"
                delivery.waits = None
                return _ENDS[kind]

    def _wait_of(self, delivery: _Delivery) -> object:
        """For what it waits in the server, and since when."""
        waiting = "SELECT pid, waitstart FROM pg_locks WHERE NOT granted AND pid = ANY(%s)"
        blocked = "SELECT FROM unnest(%s::int[]) pid WHERE pg_blocking_pids(pid) <> '{}'"
        if not self._monitor.execute(blocked, (delivery.backends,)).fetchall():
            return None
        return self._monitor.execute(waiting, (delivery.backends,)).fetchone()

    def _settle(self) -> None:
        """Statements that waited, and have come back since somebody has moved, or wait for something else now."""
        for delivery in self._deliveries.values():
            if delivery.waits is not None and self._wait_of(delivery) != delivery.waits:
                end = self._answer(delivery)
                if end != "blocked":
                    delivery.came = end

    def close(self) -> None:
        """Nobody is left, whatever has happened."""
        while self._deliveries:
            _end(self._deliveries.popitem()[1], self._monitor)

    @property
    def ledger(self) -> Ledger:
        """What is committed; asked for when nobody runs."""
        rows = {name: self._monitor.execute(f"SELECT * FROM {name}".encode()).fetchall() for name in TABLES}
        return normal(rows) | {(RECEIVER, tuple((None, what) for what in self._inbox))}


def _end(delivery: _Delivery, monitor: psycopg.Connection[Any]) -> None:
    """Its process runs no more, and the server has seen that."""
    os.kill(delivery.process, signal.SIGKILL)
    os.waitpid(delivery.process, 0)
    delivery.line.close()
    there = "SELECT FROM pg_stat_activity WHERE pid = ANY(%s)"
    while monitor.execute(there, (delivery.backends,)).fetchall():
        pass


def _find(question: Question) -> Found:
    spare: list[_Delivery] = []
    with closing(psycopg.connect(**question.address, autocommit=True)) as monitor:

        @contextmanager
        def start() -> Iterator[_Run]:
            monitor.execute(CONTENTS.encode())
            with closing(_Run(question, monitor, spare)) as run:
                yield run

        try:
            return enumerate_runs(start, question.runs)
        finally:
            while spare:
                _end(spare.pop(), monitor)


def serve() -> None:
    """Answers questions on stdin on stdout, until stdin ends."""
    serve_with(_find)
