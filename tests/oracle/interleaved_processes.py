"""Every interleaving of a job on SQLite, by real processes that are killed for real. Nothing of the tool is used.

Each delivery is a forked process with connections of ``sqlite3``. It stops before each step until it is told to go on.
SQLite itself says when a delivery has to wait: it calls the busy handler, which asks whether to try again.
"""

from __future__ import annotations

import _sqlite3
import ctypes
import os
import pickle
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.oracle.moves import Found, Ledger, Move, Table, TooMany, enumerate_runs
from tests.oracle.overlapping_jobs import Duplicate, Locked, Program, furnish

_HANDLER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_STANDS, _WAITS, _DONE, _FAILED = b"s", b"w", b"d", b"f"
_GO, _GIVE_UP = b"g", b"n"
_ENDS = {_STANDS: "", _WAITS: "blocked", _DONE: "done", _FAILED: "failed"}


@dataclass(frozen=True)
class Question:
    """A job, and how thoroughly to try it.

    journal: of both databases. runs: more are too many. deliveries: at most, in one run.
    """

    program: Program
    journal: str
    duplicates: int
    crashes: int
    runs: int
    deliveries: int
    script: tuple[int, ...] = ()
    """Only one run is made: first these deliveries move, one step each; then whoever can, to the end."""


# -- in the process of a delivery -----------------------------------------------------------------------------------


class _Yard:
    """What a program runs on in a process of its own."""

    def __init__(self, folder: Path, line: socket.socket) -> None:
        self._folder = folder
        self._line = line
        self._handlers: list[Any] = []

    def stand(self) -> None:
        """Here is a boundary."""
        self._ask(_STANDS)

    def _ask(self, what: bytes) -> bytes:
        self._line.sendall(what)
        answer = self._line.recv(1)
        if not answer:
            os._exit(1)  # whoever drives has gone
        return answer

    @contextmanager
    def connect(self, database: int, style: str) -> Iterator[_Plain]:
        path = self._folder / _NAMES[database]
        style = style.removeprefix("RAW").strip()
        with closing(sqlite3.connect(path, isolation_level=None if style else "DEFERRED")) as connection:
            self._wait_when_told(connection, path)
            yield _Plain(self, connection, style)
            connection.rollback()

    def _wait_when_told(self, connection: sqlite3.Connection, path: Path) -> None:
        """Replace what ``timeout`` has set up: the wait is the same, and ends when it is told to."""
        library = ctypes.CDLL(_sqlite3.__file__)
        pointer = ctypes.c_void_p.from_address(id(connection) + object.__basicsize__)
        library.sqlite3_db_filename.restype = ctypes.c_char_p
        assert library.sqlite3_db_filename(pointer, b"main") == os.fsencode(path), "no SQLite connection is found there"
        handler = _HANDLER(lambda _, count: self._ask(_WAITS) == _GO)
        self._handlers.append(handler)
        library.sqlite3_busy_handler(pointer, handler, None)

    def redis(self, command: str, key: str) -> NoReturn:
        raise NotImplementedError

    def send(self, what: str) -> None:
        self.stand()
        with open(self._folder / _INBOX, "a") as inbox:
            inbox.write(f"{what}\n")

    def note(self, *what: Any) -> None:
        """Nobody asks: no states are merged here."""


class _Plain:
    """SQL on a connection of the driver, with the steps that SQLAlchemy makes."""

    def __init__(self, yard: _Yard, connection: sqlite3.Connection, style: str) -> None:
        self._yard = yard
        self._connection = connection
        self._style = style
        self._begun = False

    def run(self, statement: str, **values: Any) -> tuple[list[tuple[Any, ...]], int]:
        if not self._begun and self._style.startswith("BEGIN"):
            self._begun = True
            self._step(lambda: self._connection.execute(self._style))
        self._begun = True
        cursor = self._step(lambda: self._connection.execute(statement, values))
        return cursor.fetchall(), cursor.rowcount

    def commit(self) -> None:
        if self._begun:
            self._begun = False
            self._step(self._connection.commit)

    def rollback(self) -> None:
        self._begun = False
        self._connection.rollback()

    def _step(self, action: Callable[[], Any]) -> Any:
        self._yard.stand()
        try:
            return action()
        except sqlite3.IntegrityError as error:
            raise Duplicate from error
        except sqlite3.OperationalError as error:
            raise Locked from error


def _deliver(program: Program, folder: Path, line: socket.socket) -> NoReturn:
    try:
        program(_Yard(folder, line))
        line.sendall(_DONE)
    except Exception:
        line.sendall(_FAILED)
    finally:
        os._exit(0)


# -- in the process that drives -------------------------------------------------------------------------------------

_NAMES = ("first.db", "second.db")
_INBOX = "inbox"


class _Run:
    """Deliveries in processes, from the start on."""

    def __init__(self, question: Question, folder: Path) -> None:
        self.table = Table(self, question.duplicates, question.crashes, question.deliveries)
        self._question = question
        self._folder = folder
        self._lines: dict[int, tuple[int, socket.socket]] = {}

    def begin(self, ident: int) -> str:
        self._end(ident)
        ours, theirs = socket.socketpair()
        process = os.fork()
        if not process:
            ours.close()
            _deliver(self._question.program, self._folder, theirs)
        theirs.close()
        self._lines[ident] = (process, ours)
        return self._answer(ident)

    def step(self, ident: int, fail: bool) -> str:
        self._lines[ident][1].sendall(_GIVE_UP if fail else _GO)
        return self._answer(ident)

    def kill(self, ident: int) -> None:
        os.kill(self._lines[ident][0], signal.SIGKILL)
        self._end(ident)

    def _answer(self, ident: int) -> str:
        return _ENDS[self._lines[ident][1].recv(1)]

    def _end(self, ident: int) -> None:
        if ident in self._lines:
            process, line = self._lines.pop(ident)
            line.close()
            os.waitpid(process, 0)

    def close(self) -> None:
        """Nobody is left, whatever has happened."""
        for ident, (process, _) in list(self._lines.items()):
            os.kill(process, signal.SIGKILL)
            self._end(ident)

    @property
    def ledger(self) -> Ledger:
        """What is committed; asked for when nobody runs."""
        found: set[tuple[str, tuple[Any, ...]]] = set()
        for name in _NAMES:
            with closing(sqlite3.connect(self._folder / name)) as connection:
                for table in ("counters", "notes", "once"):
                    found.add((f"{name} {table}", tuple(connection.execute(f"SELECT * FROM {table}"))))
        inbox = (self._folder / _INBOX).read_text().splitlines()
        return frozenset(found | {("calls call Shop.send", tuple((None, line) for line in inbox))})


def _find(question: Question) -> Found:
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="interleaved-", dir=memory) as name:
        folder, blank = Path(name), Path(name, "blank.db")
        furnish(blank, question.journal)

        @contextmanager
        def start() -> Iterator[_Run]:
            for each in _NAMES:
                for old in folder.glob(f"{each}*"):
                    old.unlink()
                shutil.copyfile(blank, folder / each)
            (folder / _INBOX).write_text("")
            with closing(_Run(question, folder)) as run:
                yield run

        if not question.script:
            return enumerate_runs(start, question.runs)
        with start() as run:
            table = run.table
            for ident in question.script:
                table.go(Move("run" if ident in table.live else "begin", ident))
            while moves := table.moves():
                table.go(moves[0])
            return Found(frozenset({run.ledger}), frozenset(), False, 0, 1)


def serve() -> None:
    """Answers questions on stdin on stdout, until stdin ends."""
    serve_with(_find)


def serve_with(find: Callable[[Any], Found]) -> None:
    """This process has one thread, so that it may fork."""
    while True:
        try:
            question = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Any = find(question)
        except Exception as problem:
            answer = problem
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


class Processes:
    """Handle to the process that drives."""

    def __init__(self, module: str = "interleaved_processes") -> None:
        command = [sys.executable, "-c", f"from tests.oracle.{module} import serve; serve()"]
        folder = Path(__file__).parents[2]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder)

    def find(self, question: Any) -> Found:
        """Raises TooMany. question: as its module has it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump(question, self._process.stdin)
        self._process.stdin.flush()
        answer = pickle.load(self._process.stdout)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Found)
        return answer

    def close(self) -> None:
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()


__all__ = ["Processes", "Question", "TooMany"]
