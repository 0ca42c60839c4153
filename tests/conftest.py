"""Fixtures of the tests: a small shop to check jobs in, and a witness that a check leaves nothing behind."""

from __future__ import annotations

import builtins
import gc
import http.client
import io
import logging
import os
import random
import secrets
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any, TypeAlias

import aiohttp
import aiohttp.connector
import fakeredis
import httpcore
import httpx
import pytest
import redis
import redis.client
import redis.connection
import redis.lock
import requests
import requests.adapters
import responses
import urllib3.connection
import urllib3.connectionpool
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.orm import Session
from sqlalchemy.pool import Pool

import retrychaos.chaos  # noqa: F401  # in-process pytester forgets modules that it was the first to import

# -- the witness ----------------------------------------------------------------------------------------------------

_MODULES: tuple[Any, ...] = (
    time,
    os,
    random,
    uuid,
    secrets,
    socket,
    sqlite3,
    subprocess,
    threading,
    signal,
    tempfile,
    io,
    builtins,
    logging,
    redis,
    redis.client,
    redis.connection,
    redis.lock,
)
_CLASSES: tuple[type, ...] = (
    redis.Redis,
    redis.client.Pipeline,
    redis.client.PubSub,
    redis.connection.AbstractConnection,
    redis.connection.Connection,
    redis.connection.UnixDomainSocketConnection,
    redis.connection.ConnectionPool,
    redis.lock.Lock,
    fakeredis.FakeRedis,
    fakeredis.FakeConnection,
    fakeredis.FakeServer,
    socket.socket,
    socket.socket.__mro__[1],
    logging.Handler,
    logging.StreamHandler,
    logging.FileHandler,
    subprocess.Popen,
    random.Random,
    random.SystemRandom,
    Engine,
    Pool,
    Session,
    DefaultDialect,
    http.client.HTTPConnection,
    urllib.request.AbstractHTTPHandler,
    urllib3.connection.HTTPConnection,
    urllib3.connectionpool.HTTPConnectionPool,
    urllib3.connectionpool.HTTPSConnectionPool,
    requests.Session,
    requests.adapters.HTTPAdapter,
    httpx.Client,
    httpx.AsyncClient,
    httpx.HTTPTransport,
    httpx.AsyncHTTPTransport,
    httpcore.SyncBackend,
    aiohttp.ClientSession,
    aiohttp.connector.BaseConnector,
    responses.Response,
    responses.CallbackResponse,
)
_DISPATCHERS: tuple[type, ...] = (Engine, Pool, DefaultDialect, Session)
_SIGNALS = (signal.SIGALRM, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1)
# Made on first use by the standard library itself, and the like.
_COMES_AND_GOES = frozenset({"__warningregistry__", "tempdir", "_name_sequence", "_", "__builtins__", "_sha512"})

Names: TypeAlias = dict[str, Any]


class Witness:
    """What must be the same before and after; each property is one such thing, in a form that compares."""

    def __init__(self, databases: tuple[Engine, ...], functions: tuple[Callable[..., Any], ...], folder: Path) -> None:
        gc.collect()
        self._functions = functions
        self.rows = {str(engine.url): contents(engine) for engine in databases}
        self.attributes = {_name(owner): _attributes(owner) for owner in (*_MODULES, *_CLASSES)}
        self.code = [(function, function.__code__) for function in functions if isinstance(function, FunctionType)]
        self.listeners = _listeners()
        self.borrowed = _borrowed()
        self.signals = {number: signal.getsignal(number) for number in _SIGNALS}
        self.timer = signal.getitimer(signal.ITIMER_REAL)
        self.traces = (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile())
        self.hooks = (sys.excepthook, sys.unraisablehook, threading.excepthook)
        self.chance = random.getstate()
        self.finders = list(sys.meta_path)
        self.environment = dict(os.environ)
        self.folder = os.getcwd()
        self.collector = (gc.isenabled(), gc.get_threshold(), len(gc.callbacks))
        self.threads = {thread.ident for thread in threading.enumerate()}
        self.processes = _children()
        self.descriptors = _descriptors()
        self.files = {path.relative_to(folder) for path in folder.rglob("*")}

    def gained(self, later: Witness) -> dict[str, Any]:
        """Things that may become fewer in a check (its pools are disposed of), but never more."""
        return {
            "threads": later.threads - self.threads,
            "processes": later.processes - self.processes,
            "descriptors": later.descriptors - self.descriptors,
            "files": later.files - self.files,
        }


@pytest.fixture
def untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``with untouched(engine, ..., functions=[...]):`` what runs in there leaves everything as it was.

    Everything: rows of these databases, patches, listeners, signal handlers, randomness, threads, child processes,
    open files, files in the folder for temporary files and in that of the test.
    """
    own = tmp_path / "temporary"
    own.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    monkeypatch.setenv("TMPDIR", str(own))
    uses = 0

    @contextmanager
    def watching(*databases: Engine, functions: tuple[Callable[..., Any], ...] = ()) -> Iterator[None]:
        nonlocal uses
        uses += 1
        before = Witness(databases, functions, tmp_path)
        clock = (time.time(), time.monotonic())
        yield
        after = Witness(databases, functions, tmp_path)
        for name in vars(before).keys() - {"threads", "processes", "descriptors", "files", "_functions"}:
            assert getattr(after, name) == getattr(before, name), f"{name} differ after the check"
        gained = {name: more for name, more in before.gained(after).items() if more}
        assert gained == {}
        assert time.time() >= clock[0] and time.monotonic() >= clock[1]
        assert os.getpid() == int(os.readlink("/proc/self"))

    yield watching
    assert uses, "the fixture untouched was asked for and not used"


def contents(engine: Engine) -> list[str]:
    """Everything in a SQLite database: schema, rows, counters, header; that of a file read past the engine."""
    if engine.url.database is None or ":memory:" in engine.url.database:
        with engine.connect() as connection:
            raw = connection.connection.dbapi_connection
            assert isinstance(raw, sqlite3.Connection)
            return _dump(raw)
    path = str(engine.url.database).removeprefix("file:")
    with closing(sqlite3.connect(path)) as raw:
        return _dump(raw)


def _dump(raw: sqlite3.Connection) -> list[str]:
    found = list(raw.iterdump())
    tables = {row[0] for row in raw.execute("SELECT name FROM sqlite_master")}
    if "sqlite_sequence" in tables:
        found += map(repr, raw.execute("SELECT * FROM sqlite_sequence ORDER BY name"))
    for pragma in ("journal_mode", "user_version", "application_id", "page_size", "auto_vacuum", "encoding"):
        found.append(f"{pragma}={raw.execute(f'PRAGMA {pragma}').fetchone()[0]}")
    return found


def _name(owner: Any) -> str:
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else str(owner.__name__)


def _attributes(owner: Any) -> Names:
    """By identity: equal is not enough for a function that was put back."""
    return {
        name: id(value)
        for name, value in vars(owner).items()
        if name not in _COMES_AND_GOES and (callable(value) or isinstance(value, property | classmethod | staticmethod))
    }


def _listeners() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for owner in _DISPATCHERS:
        dispatch: Any = owner.dispatch  # type: ignore[attr-defined]
        for name in dispatch._event_names:
            for cls, functions in getattr(dispatch, name)._clslevel.items():
                if functions:
                    found[f"{cls.__qualname__}.{name}"] = list(functions)
    return found


def _borrowed() -> dict[str, Any]:
    """Objects of ours that modules of others hold: there must be none after a check."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(("retrychaos", "test_", "conftest", "tests")):
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if isinstance(value, FunctionType) and str(value.__module__).startswith("retrychaos."):
                found[f"{name}.{attribute}"] = value
    return found


def _children() -> set[int]:
    mine = os.getpid()
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except OSError:  # it ended while we looked
                continue
            if int(stat.rpartition(")")[2].split()[1]) == mine:
                found.add(int(entry))
    return found


def _descriptors() -> Counter[str]:
    found: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:  # the listing's own
            continue
        found[target] += 1
    return found


# -- the shop -------------------------------------------------------------------------------------------------------


class Shop:
    """Orders, payments and a journal in a SQLite file, with one order to charge."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE orders (id INTEGER PRIMARY KEY, status TEXT NOT NULL)"))
            connection.execute(
                text("CREATE TABLE payments (id INTEGER PRIMARY KEY AUTOINCREMENT, order_id INTEGER, amount INTEGER)")
            )
            connection.execute(text("INSERT INTO orders VALUES (1, 'new'), (2, 'paid')"))
            connection.execute(text("INSERT INTO payments (order_id, amount) VALUES (2, 70)"))

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(sql))]

    def contents(self) -> list[str]:
        return contents(self.engine)

    @property
    def payments(self) -> int:
        return int(self.rows("SELECT count(*) FROM payments WHERE order_id = 1")[0][0])

    @property
    def status(self) -> str:
        return str(self.rows("SELECT status FROM orders WHERE id = 1")[0][0])

    def pay(self, order: int) -> None:
        """Right: one transaction, guarded by the order's status."""
        with self.engine.begin() as connection:
            if connection.execute(text("SELECT status FROM orders WHERE id = :id"), {"id": order}).scalar() != "new":
                return
            connection.execute(text("INSERT INTO payments (order_id, amount) VALUES (:id, 50)"), {"id": order})
            connection.execute(text("UPDATE orders SET status = 'paid' WHERE id = :id"), {"id": order})

    def pay_twice(self, order: int) -> None:
        """Wrong: pays in one transaction and notes it in another."""
        with self.engine.begin() as connection:
            if connection.execute(text("SELECT status FROM orders WHERE id = :id"), {"id": order}).scalar() != "new":
                return
            connection.execute(text("INSERT INTO payments (order_id, amount) VALUES (:id, 50)"), {"id": order})
        with self.engine.begin() as connection:
            connection.execute(text("UPDATE orders SET status = 'paid' WHERE id = :id"), {"id": order})


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    yield Shop(engine)
    engine.dispose()
