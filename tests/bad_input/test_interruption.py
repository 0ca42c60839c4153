"""Ctrl-C, and exceptions that a test runner uses to stop: they come through, and everything is put back."""

from __future__ import annotations

import os
import random
import secrets
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import fakeredis
import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.pool import StaticPool

import retrychaos


@pytest.fixture
def chaos() -> Iterator[retrychaos.Chaos]:
    with retrychaos.Chaos(duplicates=1) as made:
        yield made


class Payments:
    """Something to watch."""

    def send(self, amount: int) -> str:
        return f"sent {amount}"


def notify(address: str) -> str:
    return f"mail to {address}"


class Interrupter:
    """Raises in the n-th delivery, at a place of the job that the test chooses."""

    def __init__(self, delivery: int, error: BaseException) -> None:
        self.left = delivery
        self.error = error

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


@pytest.mark.parametrize("delivery", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("isolation", ["sample", "process"])
def test_ctrl_c_between_two_steps(
    delivery: int, isolation: str, shop: Any, chaos: retrychaos.Chaos, untouched: Any
) -> None:
    """In whichever delivery; with all kinds of resources in use."""
    client = fakeredis.FakeRedis(server=fakeredis.FakeServer())
    client.set("visits", 1)
    interrupt = Interrupter(delivery, KeyboardInterrupt())
    watched = chaos.watch(Payments, "send", result="sent")
    chaos.watch(sys.modules[__name__], "notify")

    def job(order: int) -> None:
        client.incr("visits")
        Payments().send(50)
        notify("someone")
        uuid.uuid4()
        time.sleep(3)
        connection = shop.engine.connect()
        connection.execute(text("UPDATE orders SET status = 'paid' WHERE id = :id"), {"id": order})
        interrupt()
        connection.commit()
        connection.close()

    if isolation == "process" and delivery > 1:
        interrupt.left = 1  # later deliveries run in processes of their own, which have a Ctrl-C of their own
    functions = (notify, Payments.send)
    with untouched(shop.engine, functions=functions):
        with pytest.raises(KeyboardInterrupt):
            chaos(isolation=isolation).check(job, 1)
    assert client.get("visits") == b"1" and client.dbsize() == 1
    assert watched.calls is not None
    assert chaos.reports == []
    client.close()


@pytest.mark.parametrize("delivery", [1, 2, 3])
@pytest.mark.parametrize("name", ["before_cursor_execute", "after_cursor_execute", "commit", "begin"])
def test_ctrl_c_in_the_middle_of_a_step(
    delivery: int, name: str, shop: Any, chaos: retrychaos.Chaos, untouched: Any
) -> None:
    interrupt = Interrupter(delivery, KeyboardInterrupt())
    event.listen(shop.engine, name, lambda *_: interrupt())
    with untouched(shop.engine):
        with pytest.raises(KeyboardInterrupt):
            chaos.check(shop.pay, 1)
    interrupt.left = 0
    assert (shop.payments, shop.status) == (0, "new")


@pytest.mark.parametrize("delivery", [1, 2, 3])
def test_ctrl_c_on_a_database_in_memory(delivery: int, chaos: retrychaos.Chaos, untouched: Any) -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE jobs (id INTEGER PRIMARY KEY, status TEXT)"))
        connection.execute(text("INSERT INTO jobs VALUES (1, 'new')"))
    interrupt = Interrupter(delivery, KeyboardInterrupt())

    def job() -> None:
        with engine.begin() as connection:
            connection.execute(text("UPDATE jobs SET status = 'open'"))
        with engine.begin() as connection:
            connection.execute(text("UPDATE jobs SET status = 'done'"))
            interrupt()

    with untouched(engine):
        with pytest.raises(KeyboardInterrupt):
            chaos.check(job)
    engine.dispose()


@pytest.mark.parametrize("error", [pytest.skip.Exception("not today"), pytest.fail.Exception("stop"), GeneratorExit()])
def test_outcomes_of_pytest_come_through(
    error: BaseException, shop: Any, chaos: retrychaos.Chaos, untouched: Any
) -> None:
    interrupt = Interrupter(2, error)

    def job(order: int) -> None:
        shop.pay(order)
        interrupt()

    with untouched(shop.engine):
        with pytest.raises(type(error)):
            chaos.check(job, 1)


def test_a_check_can_follow_an_interrupted_one(shop: Any, chaos: retrychaos.Chaos) -> None:
    interrupt = Interrupter(2, KeyboardInterrupt())

    def job(order: int) -> None:
        shop.pay(order)
        interrupt()

    with pytest.raises(KeyboardInterrupt):
        chaos.check(job, 1)
    assert chaos.check(job, 1).verdict == "proven"
    assert (shop.payments, shop.status) == (1, "paid")


def test_a_real_signal_in_this_process(shop: Any, chaos: retrychaos.Chaos, untouched: Any) -> None:
    """Python raises KeyboardInterrupt wherever the main thread is."""
    interrupt = Interrupter(3, KeyboardInterrupt())

    def job(order: int) -> None:
        shop.pay(order)
        try:
            interrupt()
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with untouched(shop.engine):
            with pytest.raises(KeyboardInterrupt):
                chaos.check(job, 1)
    finally:
        signal.signal(signal.SIGINT, before)


PROGRAM = """
    import os, signal
    import pytest
    from sqlalchemy import create_engine, text

    engine = create_engine("sqlite:///shop.db", connect_args={"timeout": 0})
    deliveries = []

    def job():
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO payments VALUES (50)"))
        deliveries.append(1)
        if len(deliveries) == 3:
            os.kill(int(os.readlink("/proc/self")), signal.SIGINT)
            while True:
                pass

    def test_one(chaos):
        chaos.check(job)

    def test_two():
        pass
"""


@pytest.mark.parametrize("options", [[], ["-p", "no:cacheprovider"], ["-W", "error"], ["-p", "no:randomly"]])
def test_sigint_to_pytest(options: list[str], pytester: pytest.Pytester) -> None:
    """The process that gets it ends as pytest ends, and leaves the database as it was."""
    pytester.makepyfile(PROGRAM)
    path = pytester.path / "shop.db"
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("CREATE TABLE payments (amount INTEGER)")
        raw.commit()
    before = path.read_bytes()
    result = pytester.runpytest_subprocess("-p", "no:randomly", *options)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*KeyboardInterrupt*"])
    with closing(sqlite3.connect(path)) as raw:
        assert raw.execute("SELECT count(*) FROM payments").fetchone() == (0,)
    assert len(path.read_bytes()) == len(before)
    assert sorted(entry.name for entry in pytester.path.iterdir() if entry.name.startswith("shop")) == ["shop.db"]
    assert _processes_in(pytester.path) == []


def test_sigint_to_the_whole_group_while_forked_deliveries_run(pytester: pytest.Pytester) -> None:
    """As a terminal sends it: every process of the group gets it."""
    pytester.makepyfile(
        """
        import os, signal
        from sqlalchemy import create_engine, text

        engine = create_engine("sqlite:///shop.db")
        parent = int(os.readlink("/proc/self"))

        def job():
            with engine.begin() as connection:
                connection.execute(text("INSERT INTO payments VALUES (50)"))
            if int(os.readlink("/proc/self")) != parent:  # a forked delivery
                os.killpg(os.getpgid(parent), signal.SIGINT)
                while True:
                    pass

        def test_one(chaos):
            chaos(isolation="process").check(job)
        """
    )
    path = pytester.path / "shop.db"
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("CREATE TABLE payments (amount INTEGER)")
        raw.commit()
    program = [sys.executable, "-m", "pytest", "-p", "no:randomly", "-p", "no:cacheprovider"]
    process = subprocess.run(program, cwd=pytester.path, capture_output=True, text=True, start_new_session=True)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, process.stdout
    assert "KeyboardInterrupt" in process.stdout
    with closing(sqlite3.connect(path)) as raw:
        assert raw.execute("SELECT count(*) FROM payments").fetchone() == (0,)
    assert _processes_in(pytester.path) == []


def _processes_in(folder: Path) -> list[str]:
    """Processes whose working folder is that one."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                if os.readlink(f"/proc/{entry}/cwd") == str(folder):
                    found.append(Path(f"/proc/{entry}/cmdline").read_text().replace("\0", " "))
            except OSError:  # it ended while we looked, or is somebody else's
                continue
    return found


def test_a_library_that_is_imported_late_gets_no_patch_for_ever(
    shop: Any, chaos: retrychaos.Chaos, untouched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``from time import sleep`` in a module that the job is the first to import."""
    (tmp_path / "late_library.py").write_text(
        "from os import getpid, urandom\nfrom random import randbytes\nfrom secrets import token_hex\n"
        "from socket import create_connection\nfrom time import monotonic, sleep, time\nfrom uuid import uuid4\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "late_library", raising=False)

    def job(order: int) -> None:
        import late_library  # type: ignore[import-not-found]

        late_library.sleep(2)
        shop.pay(order)

    with untouched():
        chaos.explore(job, 1)
    library = sys.modules.pop("late_library")
    real = {
        "sleep": time.sleep,
        "monotonic": time.monotonic,
        "time": time.time,
        "getpid": os.getpid,
        "urandom": os.urandom,
        "uuid4": uuid.uuid4,
        "token_hex": secrets.token_hex,
        "randbytes": random.randbytes,
        "create_connection": socket.create_connection,
    }
    assert {name: getattr(library, name) for name in real} == real


def test_the_witness_sees_what_is_left(tmp_path: Path, shop: Any, untouched: Any) -> None:
    """Each kind of leftover, one at a time."""

    def leave_row() -> Callable[[], None]:
        with shop.engine.begin() as connection:
            connection.execute(text("INSERT INTO orders VALUES (77, 'x')"))
        return lambda: None

    def leave_patch() -> Callable[[], None]:
        real = time.sleep
        time.sleep = lambda _: None
        return lambda: setattr(time, "sleep", real)

    def leave_method() -> Callable[[], None]:
        fakeredis.FakeRedis.get = lambda *_: None
        return lambda: delattr(fakeredis.FakeRedis, "get")

    def leave_code() -> Callable[[], None]:
        real = notify.__code__
        notify.__code__ = (lambda _: "").__code__
        return lambda: setattr(notify, "__code__", real)

    def leave_listener() -> Callable[[], None]:
        from sqlalchemy import Engine

        def listener(connection: Any) -> None:
            pass

        event.listen(Engine, "commit", listener)
        return lambda: event.remove(Engine, "commit", listener)

    def leave_file() -> Callable[[], None]:
        handle, name = tempfile.mkstemp()
        os.close(handle)
        return lambda: os.unlink(name)

    def leave_descriptor() -> Callable[[], None]:
        ends = os.pipe()
        return lambda: [os.close(end) for end in ends] and None

    def leave_child() -> Callable[[], None]:
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        return lambda: (child.communicate(), None)[1]

    def leave_handler() -> Callable[[], None]:
        real = signal.signal(signal.SIGALRM, signal.SIG_IGN)
        return lambda: (signal.signal(signal.SIGALRM, real), None)[1]

    def leave_seed() -> Callable[[], None]:
        random.seed(1)
        return lambda: None

    for leave in (
        leave_row,
        leave_patch,
        leave_method,
        leave_code,
        leave_listener,
        leave_file,
        leave_descriptor,
        leave_child,
        leave_handler,
        leave_seed,
    ):
        undo = lambda: None  # noqa: E731
        try:
            with pytest.raises(AssertionError), untouched(shop.engine, functions=(notify,)):
                undo = leave()
        finally:
            undo()
