"""Effects outside the ledger: which are seen, which are none, and what a claim excuses."""

# mypy: disable-error-code="func-returns-value,no-untyped-call,arg-type"

from __future__ import annotations

import contextlib
import gc
import io
import logging
import logging.handlers
import multiprocessing
import os
import shutil
import socket
import sqlite3
import ssl
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest

from retrychaos.model.step import Step
from retrychaos.world.calls import Calls
from retrychaos.world.escapes import Escapes
from retrychaos.world.sites import origin, shown, user_site
from retrychaos.world.sockets import peer_of
from retrychaos.world.world import World

linux = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc/self/fd")
HERE = sys.modules[__name__]


class Recorder:
    def __init__(self) -> None:
        self.doubts: list[str] = []

    def strike(self, kind: str, make: Callable[[], BaseException]) -> None:
        """No fault was ordered."""

    def boundary(self, step: Step) -> None:
        pass

    def sleep(self, seconds: float) -> None:
        pass

    def refuse(self, problem: Exception) -> NoReturn:
        raise problem

    def doubt(self, reason: str) -> None:
        self.doubts.append(reason)


class Rig:
    def __init__(self) -> None:
        self.world = World(now=lambda: 0.0, options={})
        self.calls = Calls(self.world)
        self.escapes = Escapes(self.world, self.calls)
        self.world.sources += [self.calls, self.escapes]
        self.recorder = Recorder()

    def run(self, job: Callable[..., Any], *args: Any) -> list[str]:
        """One delivery; what was doubted in it."""
        self.recorder.doubts = []
        self.escapes.before_delivery()
        self.world.recorder = self.recorder
        try:
            job(*args)
            self.escapes.after_delivery()
        finally:
            self.world.recorder = None
        return self.recorder.doubts


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    rig.world.install()
    yield rig
    rig.world.uninstall()


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def connect(server: socket.socket) -> socket.socket:
    return socket.create_connection(server.getsockname()[:2])


# -- what is seen ---------------------------------------------------------------------------------------------------


def test_the_message_names_effect_line_and_remedy(rig: Rig, tmp_path: Path) -> None:
    def job() -> None:
        open(tmp_path / "x", "w").close()

    (doubt,) = rig.run(job)
    line = job.__code__.co_firstlineno + 1
    where = shown(__file__)
    assert doubt.startswith(f"effect outside the ledger: open('{tmp_path}/x', 'w') at {where}:{line} in job — ")
    assert "chaos.watch(" in doubt


def _write(path: Path) -> None:
    path.write_text("x")


def _append(path: Path) -> None:
    with path.open("a"):
        pass


def _os_open(path: Path) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))


FILE_JOBS: dict[str, Callable[[Path], Any]] = {
    "open": lambda folder: _write(folder / "new"),
    "open ": lambda folder: _append(folder / "old"),
    "os.open": lambda folder: _os_open(folder / "new"),
    "os.open ": lambda folder: (folder / "new").touch(),
    "os.utime": lambda folder: (folder / "old").touch(),
    "os.remove": lambda folder: (folder / "old").unlink(),
    "os.rename": lambda folder: (folder / "old").rename(folder / "new"),
    "os.rename ": lambda folder: os.replace(folder / "old", folder / "new"),
    "os.truncate": lambda folder: os.truncate(folder / "old", 0),
    "os.mkdir": lambda folder: (folder / "new").mkdir(),
    "os.rmdir": lambda folder: (folder / "empty").rmdir(),
    "os.chmod": lambda folder: (folder / "old").chmod(0o600),
    "os.link": lambda folder: os.link(folder / "old", folder / "new"),
    "os.symlink": lambda folder: os.symlink(folder / "old", folder / "new"),
    "os.rmdir ": lambda folder: shutil.rmtree(folder / "empty"),
    "open   ": lambda folder: shutil.copyfile(folder / "old", folder / "new"),
    "open    ": lambda folder: shutil.make_archive(str(folder / "a"), "zip", folder),
}


@pytest.mark.parametrize("event", FILE_JOBS)
def test_changes_of_files_are_seen(rig: Rig, tmp_path: Path, event: str) -> None:
    (tmp_path / "old").write_text("old")
    (tmp_path / "empty").mkdir()
    doubts = rig.run(FILE_JOBS[event], tmp_path)
    assert doubts
    # pathlib opens by either function, as the version of Python has it.
    assert f"effect outside the ledger: {event.strip()}(" in doubts[0].replace("er: open(", f"er: {event.strip()}(")
    assert "test_escapes.py" in doubts[0]


PROCESS_JOBS: dict[str, Callable[[], Any]] = {
    "subprocess.Popen": lambda: subprocess.run(["true"], check=True),
    "os.system": lambda: os.system("true"),
    "os.posix_spawn": lambda: os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0),
    "os.fork": lambda: os.waitpid(os.fork() or os._exit(0), 0),
}


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX")
@pytest.mark.parametrize("event", PROCESS_JOBS)
def test_processes_are_seen_once(rig: Rig, event: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fork with threads
        (doubt,) = rig.run(PROCESS_JOBS[event])
    assert f"effect outside the ledger: {event}(" in doubt


def test_multiprocessing_is_seen(rig: Rig) -> None:
    def job() -> None:
        process = multiprocessing.get_context("fork").Process(target=int)
        process.start()
        process.join()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (doubt,) = rig.run(job)
    assert "os.fork() at" in doubt


def test_connections_are_seen(rig: Rig, server: socket.socket) -> None:
    def job() -> None:
        with connect(server) as sock:
            sock.sendall(b"x")

    (doubt,) = rig.run(job)
    assert f"connection to localhost:{server.getsockname()[1]}" in doubt
    assert "in connect" in doubt


def test_datagrams_are_seen(rig: Rig) -> None:
    def job(send: str) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            if send == "sendto":
                sock.sendto(b"x", ("127.0.0.1", 9))
            elif send == "sendmsg":
                sock.sendmsg([b"x"], [], 0, ("127.0.0.1", 9))
            else:
                sock.connect(("127.0.0.1", 9))
                sock.send(b"x")

    for send in ("sendto", "sendmsg", "send"):
        (doubt,) = rig.run(job, send)
        assert "data sent to localhost:9" in doubt


@pytest.mark.parametrize("send", ["send", "sendall", "sendmsg", "sendfile", "makefile"])
def test_data_on_an_earlier_connection_is_seen(rig: Rig, server: socket.socket, tmp_path: Path, send: str) -> None:
    (tmp_path / "x").write_bytes(b"data")
    with connect(server) as sock, open(tmp_path / "x", "rb") as file:

        def job() -> None:
            if send == "sendfile":
                sock.sendfile(file)
            elif send == "sendmsg":
                sock.sendmsg([b"data"])
            elif send == "makefile":
                with sock.makefile("wb") as stream:
                    stream.write(b"data")
            else:
                getattr(sock, send)(b"data")

        (doubt,) = rig.run(job)
        assert f"data sent to localhost:{server.getsockname()[1]} at" in doubt
        with server.accept()[0] as peer:
            assert peer.recv(10) == b"data"


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX")
def test_unix_sockets(rig: Rig, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as sock:
        server.bind(path)
        server.listen()
        assert f"connection to {path}" in rig.run(sock.connect, path)[0]
        rig.escapes.claim_address(path)
        assert rig.run(sock.send, b"x") == []


def test_sqlite_on_the_side_is_seen(rig: Rig, tmp_path: Path) -> None:
    def job() -> None:
        sqlite3.connect(tmp_path / "side.db").close()

    (doubt,) = rig.run(job)
    assert f"sqlite3.connect('{tmp_path}/side.db')" in doubt


@linux
def test_a_write_on_an_earlier_handle_is_seen(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "earlier"
    with open(path, "a") as buffered, open(tmp_path / "raw", "ab", buffering=0) as raw:
        buffered.write("before the delivery")
        (doubt,) = rig.run(buffered.write, "still in the buffer")
        assert f"write to '{path}' through a handle opened before" in doubt
        (doubt,) = rig.run(raw.write, b"x")
        assert "raw" in doubt
    assert path.read_text() == "before the deliverystill in the buffer"


@linux
def test_an_earlier_handle_that_is_closed_is_seen(rig: Rig, tmp_path: Path) -> None:
    stream = open(tmp_path / "x", "w")  # noqa: SIM115

    def job() -> None:
        stream.write("x")
        stream.close()

    assert "through a handle opened before" in rig.run(job)[0]


@linux
def test_an_unused_handle_is_no_effect(rig: Rig, tmp_path: Path) -> None:
    with open(tmp_path / "x", "w") as stream:
        stream.write("before")
        assert rig.run(lambda: None) == []


def test_relative_paths(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rig.escapes.claim_path(tmp_path / "mine")
    assert rig.run(lambda: Path("mine").write_text("x")) == []
    assert len(rig.run(lambda: Path("other").write_text("x"))) == 1


def test_every_event_and_line_once(rig: Rig, tmp_path: Path) -> None:
    def job() -> None:
        for name in "abc":
            (tmp_path / name).write_text("x")
        (tmp_path / "d").write_text("x")

    assert len(rig.run(job)) == 2
    assert rig.run(job) == []


def test_threads_of_the_job_are_seen(rig: Rig, tmp_path: Path) -> None:
    def job() -> None:
        thread = threading.Thread(target=(tmp_path / "x").write_text, args=("x",))
        thread.start()
        thread.join()

    assert len(rig.run(job)) == 1


def test_a_job_that_is_a_function_of_the_standard_library(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    assert "open(" in rig.run(shutil.copyfile, tmp_path / "a", tmp_path / "b")[0]


def test_methods_around_which_another_call_is_watched(rig: Rig, tmp_path: Path) -> None:
    rig.world.uninstall()
    declared, other = tmp_path / "declared", tmp_path / "other"
    rig.calls.watch(declared, "write_text")
    rig.world.install()
    rig.world.adopt(rig.calls)
    assert rig.run(declared.write_text, "x") == []
    assert len(rig.run(other.write_text, "x")) == 1


# -- what is none ---------------------------------------------------------------------------------------------------


def _try(function: Callable[..., Any], *args: Any) -> None:
    with contextlib.suppress(OSError):
        function(*args)


def _temporary() -> None:
    with tempfile.TemporaryFile() as one, tempfile.NamedTemporaryFile() as two:
        one.write(b"x")
        two.write(b"x")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sub").mkdir()
        (Path(folder) / "sub" / "file").write_text("x")
        os.rename(Path(folder) / "sub" / "file", Path(folder) / "file")
    name = tempfile.mkstemp()[1]
    os.remove(name)


def _probe() -> None:
    before, tempfile.tempdir = tempfile.tempdir, None
    try:
        tempfile.gettempdir()
    finally:
        tempfile.tempdir = before


def _pair() -> None:
    one, two = socket.socketpair()
    one.sendall(b"x")
    one.close()
    two.close()


def _own_address() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("127.0.0.1", 9))


HARMLESS: dict[str, Callable[[Path], Any]] = {
    "read": lambda folder: (folder / "old").read_text(),
    "null": lambda folder: Path(os.devnull).write_text("x"),
    "print": lambda folder: (print("x", flush=True), sys.stderr.write("x"), os.write(1, b"x")),
    "warn": lambda folder: warnings.warn_explicit("x", UserWarning, __file__, 1),
    "log": lambda folder: logging.getLogger("job").error("x"),
    "temporary": lambda folder: _temporary(),
    "probe": lambda folder: _probe(),
    "pair": lambda folder: _pair(),
    "own address": lambda folder: _own_address(),
    "name": lambda folder: socket.getaddrinfo("localhost", 80),
    "memory": lambda folder: (sqlite3.connect(":memory:").close(), sqlite3.connect("").close()),
    "shared memory": lambda folder: sqlite3.connect("file:m?mode=memory&cache=shared", uri=True).close(),
    "read only": lambda folder: sqlite3.connect(f"file:{folder}/db?mode=ro", uri=True).close(),
    "exists": lambda folder: folder.mkdir(exist_ok=True),
    "remove nothing": lambda folder: (folder / "nothing").unlink(missing_ok=True),
    "failed": lambda folder: (
        _try(os.rename, folder / "nothing", folder / "x"),
        _try(open, folder / "nothing", "r+"),
        _try(open, folder / "old", "x"),
        _try(os.symlink, folder / "db", folder / "old"),
    ),
    "buffer": lambda folder: io.StringIO().write("x"),
    "descriptor": lambda folder: os.fdopen(os.dup(2), "w").close(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_no_effect(rig: Rig, tmp_path: Path, name: str) -> None:
    (tmp_path / "old").write_text("old")
    sqlite3.connect(tmp_path / "db").close()
    assert rig.run(HARMLESS[name], tmp_path) == []


def test_a_temporary_file_that_stays_is_an_effect(rig: Rig, tmp_path: Path) -> None:
    assert len(rig.run(lambda: os.close(tempfile.mkstemp(dir=tmp_path)[0]))) == 1


def test_a_temporary_file_that_is_moved_is_an_effect(rig: Rig, tmp_path: Path) -> None:
    def job() -> None:
        with tempfile.NamedTemporaryFile(dir=tmp_path, delete=False) as file:
            file.write(b"x")
        os.replace(file.name, tmp_path / "final")

    (doubt,) = rig.run(job)
    assert "os.rename(" in doubt


def test_a_lock_file_is_an_effect_although_it_is_gone(rig: Rig, tmp_path: Path) -> None:
    def job() -> None:
        os.close(os.open(tmp_path / "lock", os.O_CREAT | os.O_EXCL))
        os.remove(tmp_path / "lock")

    assert len(rig.run(job)) == 2


def test_imports_that_write_bytecode(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "imported_by_job.py").write_text("x = 1")

    def job() -> None:
        import imported_by_job  # type: ignore[import-not-found]  # noqa: F401

    assert rig.run(job) == []
    assert list((tmp_path / "__pycache__").glob("imported_by_job*"))


def test_a_module_that_writes_when_imported(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "writes_on_import.py").write_text(f"open({str(tmp_path / 'x')!r}, 'w').close()")

    def job() -> None:
        import writes_on_import  # type: ignore[import-not-found]  # noqa: F401

    (doubt,) = rig.run(job)
    assert "writes_on_import.py:1" in doubt


class OwnHandler(logging.Handler):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        with self.path.open("a") as file:
            file.write(record.getMessage())


@pytest.mark.parametrize("kind", ["file", "delayed", "rotating", "stream", "own", "socket"])
def test_logging_is_no_effect(rig: Rig, tmp_path: Path, server: socket.socket, kind: str) -> None:
    logger = logging.getLogger(f"job.{kind}")
    handler: logging.Handler = {
        "file": lambda: logging.FileHandler(tmp_path / "log"),
        "delayed": lambda: logging.FileHandler(tmp_path / "log", delay=True),
        "rotating": lambda: logging.handlers.RotatingFileHandler(tmp_path / "log", maxBytes=1, backupCount=2),
        "stream": lambda: logging.StreamHandler(open(tmp_path / "log", "w")),  # noqa: SIM115
        "own": lambda: OwnHandler(tmp_path / "log"),
        "socket": lambda: logging.handlers.SocketHandler(*server.getsockname()),
    }[kind]()
    logger.addHandler(handler)
    try:
        assert rig.run(lambda: [logger.error("x") for _ in range(3)]) == []
    finally:
        logger.removeHandler(handler)
        handler.close()
        stream = getattr(handler, "stream", None)
        if stream is not None:
            stream.close()


def test_outside_of_deliveries_and_in_quiet(rig: Rig, tmp_path: Path, server: socket.socket) -> None:
    def job() -> None:
        rig.world.quiet = True
        (tmp_path / "x").write_text("x")
        with connect(server) as sock:
            sock.sendall(b"x")
        rig.world.quiet = False

    (tmp_path / "y").write_text("y")
    assert rig.run(job) == []
    (tmp_path / "z").write_text("z")
    assert rig.run(lambda: None) == []


def test_threads_older_than_the_check_are_servers_unless_they_run_code_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        rig = Rig()
        rig.world.install()
        try:
            assert rig.run(lambda: pool.submit(path.write_text, "x").result()) == []
            assert len(rig.run(lambda: pool.submit(lambda: path.write_text("x")).result())) == 1
        finally:
            rig.world.uninstall()


def test_harness_threads(rig: Rig, tmp_path: Path) -> None:
    def job() -> None:
        thread = threading.Thread(target=lambda: (tmp_path / "x").write_text("x"), name="retrychaos timer")
        thread.start()
        thread.join()

    assert rig.run(job) == []


def test_inside_a_watched_call(rig: Rig, tmp_path: Path, server: socket.socket) -> None:
    earlier = open(tmp_path / "earlier", "a")  # noqa: SIM115

    def send() -> None:
        (tmp_path / "x").write_text("x")
        earlier.write("declared")
        with connect(server) as sock:
            sock.sendall(b"x")
        thread = threading.Thread(target=(tmp_path / "y").write_text, args=("y",))
        thread.start()
        thread.join()

    rig.world.uninstall()
    rig.calls.watch(types.SimpleNamespace(send=send), "send")
    rig.world.install()
    rig.world.adopt(rig.calls)
    with earlier:
        assert rig.run(lambda: (send(), send())) == []
        assert len(rig.run(lambda: (send(), earlier.write("not declared")))) == 1
        assert rig.run(send) == []
        assert rig.run(lambda: (earlier.write("declared nowhere"), send())) == []  # told before
    assert (tmp_path / "earlier").read_text().count("declared") == 7


# -- claims ---------------------------------------------------------------------------------------------------------


def test_claimed_paths(rig: Rig, tmp_path: Path) -> None:
    database = tmp_path / "shop.db"
    link = tmp_path / "link.db"
    link.symlink_to(database)

    def job() -> None:
        connection = sqlite3.connect(link)
        connection.execute("CREATE TABLE IF NOT EXISTS t (x)")
        connection.close()
        rig.escapes.claim_path(database)

    assert rig.run(job) == []
    rig.escapes.claim_path(tmp_path / "folder")
    (tmp_path / "folder").mkdir()
    assert rig.run(lambda: (tmp_path / "folder" / "x").write_text("x")) == []


@linux
def test_an_open_claimed_database_may_change(rig: Rig, tmp_path: Path) -> None:
    rig.escapes.claim_path(tmp_path / "shop.db")
    connection = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE t (x)")
    assert rig.run(connection.execute, "INSERT INTO t VALUES (1)") == []
    connection.close()


@linux
def test_an_open_database_that_nobody_owns_may_not(rig: Rig, tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    connection.execute("CREATE TABLE t (x)")
    assert "shop.db" in rig.run(connection.execute, "INSERT INTO t VALUES (1)")[0]
    connection.close()


def test_claimed_connections(rig: Rig, tmp_path: Path) -> None:
    def job() -> None:
        for name in "abc":
            connection = sqlite3.connect(tmp_path / name)
            if name != "b":
                rig.escapes.claim_connection(connection)
            connection.close()
            del connection

    (doubt,) = rig.run(job)
    assert str(tmp_path / "b") in doubt


def test_a_connection_is_not_kept_alive(rig: Rig, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "x", timeout=0) as connection:
        connection.execute("CREATE TABLE t (x)")

    def job() -> None:
        sqlite3.connect(tmp_path / "x").execute("BEGIN IMMEDIATE")
        gc.collect()  # a connection is a cycle
        connection.execute("INSERT INTO t VALUES (1)")
        connection.commit()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        assert len(rig.run(job)) >= 1
    connection.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_claimed_addresses(rig: Rig, server: socket.socket, host: str) -> None:
    port = server.getsockname()[1]

    def job() -> None:
        with connect(server) as sock:
            rig.escapes.claim_address((host, port))
            sock.sendall(b"x")

    assert rig.run(job) == []
    rig.escapes.claim_address((host, port + 1))
    assert rig.run(job) == []


def test_claimed_names_are_looked_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: [(2, 1, 6, "", ("10.0.0.7", 0))] * (host == "redis"))
    rig.escapes.claim_address(("redis", 6379))
    assert rig.escapes._is_claimed_peer(("inet", "10.0.0.7", 6379))
    assert not rig.escapes._is_claimed_peer(("inet", "10.0.0.7", 6380))
    assert not rig.escapes._is_claimed_peer(("inet", "10.0.0.8", 6379))


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        (("::ffff:10.0.0.1", 80, 0, 0), ("inet", "10.0.0.1", 80)),
        (("127.0.1.1", 80), ("inet", "localhost", 80)),
        (("Example.org", 80), ("inet", "example.org", 80)),
        ("", None),
        (b"/run/x", ("unix", "/run/x", 0)),
        (None, None),
    ],
)
def test_peers(address: Any, peer: Any) -> None:
    assert peer_of(address) == peer


@linux
def test_claimed_streams(rig: Rig, tmp_path: Path) -> None:
    with open(tmp_path / "terminal", "w") as stream:
        rig.escapes.claim_stream(stream)
        rig.escapes.claim_stream(io.StringIO())
        assert rig.run(lambda: (stream.write("x"), stream.flush())) == []


# -- patches --------------------------------------------------------------------------------------------------------


def test_uninstall_leaves_sockets_as_they_were() -> None:
    before = dict(vars(socket.socket)), dict(vars(ssl.SSLSocket))
    one, two = Rig(), Rig()
    one.world.install()
    two.world.install()
    assert vars(socket.socket) != before[0]
    two.world.uninstall()
    two.world.uninstall()
    one.world.uninstall()
    assert (dict(vars(socket.socket)), dict(vars(ssl.SSLSocket))) == before
    assert (one.calls.entering, one.calls.leaving) == ([], [])


def test_after_uninstall_nothing_is_seen(tmp_path: Path) -> None:
    rig = Rig()
    rig.world.install()
    rig.world.uninstall()
    assert rig.run(lambda: (tmp_path / "x").write_text("x")) == []


def test_a_failure_of_the_hook_is_told_and_not_raised(rig: Rig, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("retrychaos.world.escapes.context_of", lambda frame, event: 1 / 0)
    (doubt,) = rig.run(lambda: (tmp_path / "x").write_text("x"))
    assert "could not be watched for: open: ZeroDivisionError" in doubt


# -- sites ----------------------------------------------------------------------------------------------------------


def test_origins() -> None:
    assert origin(__file__) == "user"
    assert origin(shutil.__file__) == "stdlib"
    assert origin("<frozen importlib._bootstrap>") == "stdlib"
    assert origin("<string>") == "stdlib"
    assert origin("<stdin>") == "user"
    assert origin(pytest.__file__) == "library"
    assert origin(sys.modules["retrychaos.world.calls"].__file__ or "") == "ours"
    assert origin(str(Path(sys.modules["retrychaos.world.calls"].__file__ or "").parents[1] / "plugin.py")) == "harness"


def test_user_site_is_the_innermost_line_of_the_user() -> None:
    found = []

    class Key:
        def __lt__(self, other: object) -> bool:
            found.append(user_site(sys._getframe()))
            return False

    sorted([Key(), Key()])
    assert found[0] is not None
    assert found[0].function == "__lt__"
    assert found[0].source == "found.append(user_site(sys._getframe()))"
    sites = [user_site(sys._getframe()) for _ in range(2)]
    assert sites[0] is sites[1]
    assert user_site(None) is None
