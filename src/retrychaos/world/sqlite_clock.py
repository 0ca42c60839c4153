"""SQLite's time and random functions on Python's clock and randomness, which a check controls."""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Callable
from typing import Any

_FORMS = {"current_timestamp": "%Y-%m-%d %H:%M:%S", "current_date": "%Y-%m-%d", "current_time": "%H:%M:%S"}
_builtins: sqlite3.Connection | None = None


def follow_clock(connection: sqlite3.Connection) -> None:
    """Let SQLite's time functions read Python's clock, and its random functions draw from Python.

    The built-in functions cannot be brought back, so these stay on a connection that outlives the check; they then
    give the real time.
    """
    try:
        for name, form in _FORMS.items():
            connection.create_function(name, 0, _current(form), deterministic=True)
        connection.create_function("random", 0, lambda: random.getrandbits(64) - 2**63)
        connection.create_function("randomblob", 1, lambda size: os.urandom(max(1, int(size))))
        for name in ("date", "time", "datetime", "julianday", "strftime", "unixepoch"):
            connection.create_function(name, -1, _moment(name), deterministic=True)
    except sqlite3.OperationalError:
        pass  # a half-read result is open on a connection that an earlier check has already prepared


def _current(form: str) -> Callable[[], str]:
    return lambda: time.strftime(form, time.gmtime(time.time()))


def _moment(name: str) -> Callable[..., Any]:
    at = 1 if name == "strftime" else 0

    def moment(*args: Any) -> Any:
        now = f"{2440587.5 + time.time() / 86400.0:.9f}"  # a Julian day, as SQLite's own 'now' is
        if len(args) <= at:
            args = (*args, now)
        elif isinstance(args[at], str) and args[at].lower() == "now":
            args = (*args[:at], now, *args[at + 1 :])
        marks = ", ".join("?" * len(args))
        return _builtin().execute(f"SELECT {name}({marks})", args).fetchone()[0]

    return moment


def _builtin() -> sqlite3.Connection:
    global _builtins
    if _builtins is None:
        _builtins = sqlite3.connect(":memory:", check_same_thread=False)
    return _builtins
