"""The oracle: what crashes really do to a job, found by brute force and without any code of retrychaos.

Every delivery is a forked process on a real SQLite file (and a real Redis server), and every crash is a SIGKILL that
the process sends to itself right before a statement, a commit, a Redis command or a call. All sequences of crashes up
to a number are tried; two that leave the same on disk go on as one.

It lives in a process of its own, which has no threads and has never imported pytest: `Oracle` is the handle to it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import redis
import redis.connection
from sqlalchemy import event

from tests.oracle.jobs import ATTEMPTS, Shop

MOST_DELIVERIES = 6
"""How often a job may fail in a row before it is said never to finish."""
TIMEOUT = 60
"""Seconds after which a delivery that hangs is ended, to fail the test."""

Job: TypeAlias = Callable[[Shop], None]
Ledger: TypeAlias = Mapping[str, Counter[Any]]
"""Table, Redis key or receiver -> what is there, without ids that the database has drawn."""


@dataclass(frozen=True)
class Durable:
    """What outlives a process."""

    database: bytes
    keys: tuple[tuple[bytes, int, bytes], ...]
    """Redis keys with their time to live (0: none) and their DUMP."""
    calls: tuple[str, ...]
    identity: Any = field(compare=False)
    ledger: Ledger = field(compare=False)
    passing: frozenset[str] = field(compare=False)
    """Effects in the ledger that end by themselves."""


@dataclass(frozen=True)
class Question:
    """What comes of a job, whose code both processes can import, if it meets up to so many crashes?

    thorough: kill also where nothing durable has changed since the step before, and go on when harm was done.
    """

    job: Job
    journal: str = "delete"
    volatile: tuple[str, ...] = ()
    crashes: int = 3
    thorough: bool = False


@dataclass(frozen=True)
class Problem:
    """A final ledger that is not the clean run's.

    differences: for each effect what is there too often and what is missing. stuck: the job never finishes.
    """

    crashes: int
    differences: Mapping[str, tuple[Counter[Any], Counter[Any]]]
    stuck: bool = False

    @property
    def effects(self) -> frozenset[str]:
        return frozenset(self.differences)


@dataclass(frozen=True)
class Verdict:
    """What comes of a job.

    clean: how the clean run ended: ``done``, ``raised`` or ``idle`` (it changed nothing). crashes: the fewest that do
    harm, None if none do. depth: up to how many crashes all problems were collected. endless: some state leads to one
    failure after the other, each of which leaves another state.
    """

    clean: str
    crashes: int | None
    problems: tuple[Problem, ...]
    ledger: Ledger
    depth: int
    endless: bool
    states: int
    deliveries: int


@dataclass
class _State:
    """A durable state, the fewest crashes that lead to it, and what a delivery without faults makes of it."""

    durable: Durable
    crashes: int
    failures: int = 0
    waited: bool = False
    visited: bool = False
    end: str = ""
    next: _State | None = None


# -- one delivery ---------------------------------------------------------------------------------------------------


class _Steps:
    """Counts the steps of the process that it lives in, and kills it right before one of them."""

    def __init__(self, shop: Shop, kill_before: int | None) -> None:
        self.count = 0
        self.moments: list[int] = []
        """Steps before which something durable may differ from what it was before the step before."""
        self._kill_before = kill_before
        self._sent = 0
        self._seen: Any = None
        # Opened once and never closed: closing a file would drop the locks that SQLite holds on it.
        self._inbox = os.open(shop.inbox, os.O_RDONLY)
        self._database = os.open(shop.database, os.O_RDONLY)
        self._log = f"{shop.database}-wal"
        self._log_handle: int | None = None

    @property
    def ends_here(self) -> bool:
        return self.count + 1 == self._kill_before

    def take(self) -> None:
        if self.ends_here:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1
        if self._kill_before is None and (seen := self._look()) != self._seen:
            self._seen = seen
            self.moments.append(self.count)

    def _look(self) -> Any:
        if self._log_handle is None and os.path.exists(self._log):
            self._log_handle = os.open(self._log, os.O_RDONLY)
        log = b"" if self._log_handle is None else _contents(self._log_handle)
        return self._sent, os.fstat(self._inbox).st_size, hash(_contents(self._database)), hash(log)

    def follow(self, shop: Shop) -> None:
        """Make a step of whatever this process is going to do."""

        @event.listens_for(shop.engine, "connect")
        def connected(connection: sqlite3.Connection, record: Any) -> None:
            connection.set_trace_callback(lambda _: self.take())  # told before a statement or COMMIT begins

        for name in ("send", "charge"):
            setattr(shop, name, self._before(getattr(shop, name)))
        connection = redis.connection.AbstractConnection
        pack, send = connection.pack_commands, connection.send_packed_command

        def send_packed_command(self_: Any, *args: Any, **kwargs: Any) -> Any:
            self.take()
            self._sent += 1
            return send(self_, *args, **kwargs)

        def pack_commands(self_: Any, commands: Any) -> Any:
            commands = list(commands)
            if commands[0][0] != "MULTI":  # a process can die when a part of a pipeline has been sent
                for number in range(1, len(commands)):
                    if self.ends_here:
                        send(self_, pack(self_, commands[:number]))
                        for _ in range(number):
                            self_.read_response()
                    self.take()
                    self._sent += 1
            return pack(self_, commands)

        connection.send_packed_command = send_packed_command  # type: ignore[method-assign]
        connection.pack_commands = pack_commands  # type: ignore[method-assign]

    def _before(self, function: Callable[..., None]) -> Callable[..., None]:
        def stepping(*args: Any) -> None:
            self.take()
            function(*args)

        return stepping


def _contents(handle: int) -> bytes:
    return os.pread(handle, os.fstat(handle).st_size, 0)


class _Site:
    """Where deliveries happen: puts durable states there, and reads what a process has left."""

    def __init__(self, folder: Path, socket: str | None) -> None:
        self.shop = Shop(folder, redis.Redis(unix_socket_path=socket) if socket else None)
        self.deliveries = 0
        self._socket = socket
        self.shop.furnish("delete")
        with self.shop.engine.connect():  # so that the children find a dialect that knows its database
            pass
        self.shop.close()

    def deliver(self, job: Job, start: Durable, kill_before: int | None = None) -> tuple[str, list[int]]:
        """One delivery in a process of its own: how it ended, and before which steps a kill is worth while."""
        self.put(start)
        self.deliveries += 1
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            self._child(job, kill_before, writer)
        os.close(writer)
        with open(reader, "rb") as answer:
            told = answer.read()
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert killed == (kill_before is not None), f"{job} ended with {status}, to be killed: {kill_before}"
        if killed:
            return "killed", []
        end, moments = pickle.loads(told)
        return end, moments

    def _child(self, job: Job, kill_before: int | None, writer: int) -> NoReturn:
        try:
            signal.alarm(TIMEOUT)
            shop = self.shop
            steps = _Steps(shop, kill_before)
            steps.follow(shop)
            if self._socket:
                shop.redis = redis.Redis(unix_socket_path=self._socket)
            try:
                job(shop)
            except Exception:
                end = "raised"
            else:
                end = "done"
            steps.take()  # after the last step and before the ack
            os.write(writer, pickle.dumps((end, steps.moments)))
            os._exit(0)
        finally:
            os._exit(1)

    def put(self, durable: Durable) -> None:
        shop = self.shop
        for suffix in ("-journal", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{shop.database}{suffix}")
        shop.database.write_bytes(durable.database)
        shop.inbox.write_text("".join(f"{line}\n" for line in durable.calls))
        if shop.redis is not None:
            with shop.redis.pipeline() as pipeline:
                pipeline.flushall()
                for key, expiry, dump in durable.keys:
                    pipeline.restore(key, expiry, dump)
                pipeline.execute()

    def get(self) -> Durable:
        """What is there now. Opening the database rolls back what a dead process has not committed."""
        shop = self.shop
        with closing(sqlite3.connect(shop.database)) as connection:
            tables = {name: connection.execute(f"SELECT * FROM {name}").fetchall() for name in _TABLES}
        calls = tuple(sorted(shop.inbox.read_text().splitlines()))
        keys, contents = self._redis() if shop.redis is not None else ((), {})
        ledger = {**_rows(tables), **_received(calls)}
        ledger |= {f"redis {key}": Counter(parts) for key, (_, parts) in contents.items()}
        passing = frozenset(f"redis {key}" for key, (passes, _) in contents.items() if passes)
        identity = _undrawn(repr((tables, _received(calls), sorted(contents.items()))))
        return Durable(shop.database.read_bytes(), keys, calls, identity, ledger, passing)

    def _redis(self) -> tuple[tuple[tuple[bytes, int, bytes], ...], dict[str, tuple[bool, list[Any]]]]:
        client = self.shop.redis
        names = sorted(client.keys())
        with client.pipeline() as pipeline:
            for name in names:
                pipeline.pttl(name).dump(name).type(name)
            replies = pipeline.execute()
        keys, contents = [], {}
        for name, expiry, dump, kind in zip(names, replies[0::3], replies[1::3], replies[2::3], strict=True):
            keys.append((name, max(expiry, 0), dump))
            contents[name.decode()] = (expiry > 0, _READERS[kind](client, name))
        return tuple(keys), contents


_TABLES = ("orders", "items", "lines", "once")  # which id comes next makes no difference to these jobs
_READERS: dict[bytes, Callable[[Any, bytes], list[Any]]] = {
    b"string": lambda client, name: [client.get(name)],
    b"list": lambda client, name: list(enumerate(client.lrange(name, 0, -1))),
    b"set": lambda client, name: sorted(client.smembers(name)),
    b"hash": lambda client, name: sorted(client.hgetall(name).items()),
}


def _undrawn(text: str) -> str:
    return re.sub("drawn-[0-9a-f]+", "drawn", text)


def _rows(tables: Mapping[str, list[Any]]) -> dict[str, Counter[Any]]:
    """Tables without drawn ids; a line names the item that it refers to."""
    names = {id: _undrawn(name) for id, name in tables["items"]}
    return {
        "orders": Counter(tables["orders"]),
        "items": Counter(names.values()),
        "lines": Counter((names.get(item), product) for _, item, product in tables["lines"]),
        "once": Counter(tables["once"]),
    }


def _received(calls: tuple[str, ...]) -> dict[str, Counter[Any]]:
    """What the receivers made of the calls: one of them takes each key once."""
    kept = [line for line in calls if line.startswith("send ")]
    kept += sorted({line for line in calls if line.startswith("charge ")})
    return {
        name: Counter(_undrawn(line) for line in kept if line.startswith(f"{name} ")) for name in ("send", "charge")
    }


# -- all sequences of crashes ---------------------------------------------------------------------------------------


class _Search:
    """Breadth first by the number of crashes; a delivery that fails costs none."""

    def __init__(self, site: _Site, question: Question) -> None:
        self._site = site
        self._job = question.job
        self._volatile = question.volatile
        self._depth = question.crashes
        self._thorough = question.thorough
        self._endless = False
        self._familiar: set[str] = set()
        """Effects that end by themselves, and that the clean run has as well, if only for a while."""
        self._states: dict[Any, _State] = {}
        self._queue: deque[_State] = deque()
        site.deliveries = 0
        site.shop.furnish(question.journal)
        self._first = self._reach(site.get(), 0)

    def verdict(self) -> Verdict:
        first = self._first
        self._visit(first)
        clean = first.end
        if clean == "done" and len(self._states) == 1:
            clean = "idle"
        problems = tuple(self._problems()) if clean == "done" else ()
        ledger = first.next.durable.ledger if first.next else {}
        return Verdict(
            clean,
            min((problem.crashes for problem in problems), default=None),
            problems,
            ledger,
            self._depth,
            self._endless,
            len(self._states),
            self._site.deliveries,
        )

    def _reach(self, durable: Durable, crashes: int, failures: int = 0, waited: bool = False) -> _State:
        known = self._states.get(durable.identity)
        if known is None or crashes < known.crashes:
            if known is None:
                known = self._states[durable.identity] = _State(durable, crashes, failures, waited)
            known.crashes = crashes
            if crashes and not failures:
                self._queue.append(known)
            else:
                self._queue.appendleft(known)
        return known

    def _visit(self, state: _State) -> None:
        """A delivery without faults, and one for each place where it can be killed."""
        if state.visited:
            return
        if state.failures > MOST_DELIVERIES:
            self._endless = True
            self._stop_at(state)
            return
        state.visited = True
        site, job = self._site, self._job
        state.end, moments = site.deliver(job, state.durable)
        after = site.get()
        if state.end == "raised":
            state.next = self._reach(after, state.crashes, state.failures + 1, state.waited)
        else:
            state.next = _State(after, state.crashes, waited=state.waited)
            if self._differences(state.next):
                self._stop_at(state)
        if state is self._first and state.end == "raised":
            return
        if state.crashes >= self._depth:
            return
        if self._thorough:
            moments = list(range(1, moments[-1] + 1))
        for step in moments:
            site.deliver(job, state.durable, step)
            left = site.get()
            self._reach(left, state.crashes + 1)
            if state is self._first:
                self._familiar |= left.passing

    def _problems(self) -> Iterator[Problem]:
        while True:
            while self._queue:
                self._visit(self._queue.popleft())
            ends = {id(end): end for state in self._states.values() if (end := self._dead_end(state)) is not None}
            hopeful = [end for end in ends.values() if end.durable.passing and not end.waited and end.end != "waited"]
            if not hopeful:
                break
            for end in hopeful:  # a lock is in the way that ends by itself
                end.next = self._reach(self._later(end.durable), end.crashes, waited=True)
                end.end = "waited"
        for state in list(self._states.values()):
            if state.end == "done":
                assert state.next is not None
                differences = self._differences(state.next)
                if differences:
                    yield Problem(state.crashes, differences)
            elif self._dead_end(state) is not None:
                yield Problem(state.crashes, {}, stuck=True)

    def _dead_end(self, state: _State) -> _State | None:
        """Where deliveries without faults from a state fail for ever; None if they come to an end."""
        seen: list[_State] = []
        while state.end in ("raised", "waited"):
            seen.append(state)
            if state.next is None or any(state.next is each for each in seen):
                return state
            state = state.next
        return state if state.end == "" else None

    def _stop_at(self, state: _State) -> None:
        """The job is broken: more crashes than that cannot change it."""
        if not self._thorough:
            self._depth = min(self._depth, state.crashes)

    def _later(self, durable: Durable) -> Durable:
        keys = tuple((name, expiry, dump) for name, expiry, dump in durable.keys if not expiry)
        site = self._site
        site.put(Durable(durable.database, keys, durable.calls, None, {}, frozenset()))
        return site.get()

    def _differences(self, state: _State) -> dict[str, tuple[Counter[Any], Counter[Any]]]:
        """What is there too often and what is missing. A lock may have been left, and may have ended."""
        assert self._first.next is not None
        expected, found = self._compared(self._first.next.durable), self._compared(state.durable)
        differences = {}
        for effect in {*expected, *found}:
            more = found.get(effect, Counter()) - expected.get(effect, Counter())
            less = expected.get(effect, Counter()) - found.get(effect, Counter())
            if more and effect in state.durable.passing & self._familiar:
                more = Counter()
            if less and state.waited and effect in self._first.next.durable.passing:
                less = Counter()
            if more or less:
                differences[effect] = (more, less)
        return differences

    def _compared(self, durable: Durable) -> Ledger:
        """A ledger without what the job declares not to be compared."""
        if ATTEMPTS not in self._volatile:
            return durable.ledger
        return {**durable.ledger, "orders": Counter(row[:3] for row in durable.ledger["orders"].elements())}


# -- the process ----------------------------------------------------------------------------------------------------


def serve() -> None:
    """Answers questions on stdin with verdicts on stdout, until stdin ends."""
    folder, socket = sys.argv[1], sys.argv[2] or None
    site = _Site(Path(folder), socket)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            question = pickle.load(requests)
        except EOFError:
            return
        try:
            answer: Any = _Search(site, question).verdict()
        except Exception as problem:
            answer = problem
        pickle.dump(answer, answers)
        answers.flush()


class Oracle:
    """Handle to the oracle. socket: that of a Redis server which it may wipe, for jobs that need one."""

    def __init__(self, socket: str | None = None) -> None:
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self._folder = tempfile.TemporaryDirectory(prefix="oracle-", dir=memory)
        command = [sys.executable, "-c", "from tests.oracle.brute_force import serve; serve()"]
        self._process = subprocess.Popen(
            [*command, self._folder.name, socket or ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )

    def judge(self, question: Question) -> Verdict:
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump(question, self._process.stdin)
        self._process.stdin.flush()
        answer = pickle.load(self._process.stdout)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Verdict)
        return answer

    def close(self) -> None:
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
        self._folder.cleanup()
