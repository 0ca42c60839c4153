"""A private PostgreSQL server for tests: a unix socket in a folder in memory, gone when the process that made it is."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PLACES = "/usr/lib/postgresql/*/bin:/usr/local/pgsql/bin:/usr/pgsql-*/bin:/usr/local/bin"
SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "deadlock_timeout": "1ms",
    "max_connections": "200",
    "max_prepared_transactions": "5",
    "shared_buffers": "32MB",
    "max_wal_size": "256MB",
    "autovacuum": "off",
    "TimeZone": "UTC",
}
# The server ends, and its folder goes, when this process closes the pipe: also when it is killed.
_KEEPER = """
"$0" -D "$1/data" >"$1/log" 2>&1 </dev/null &
cat >/dev/null
kill -QUIT $!
wait $!
rm -rf "$1"
"""
_databases = itertools.count(1)


def find_binaries() -> str | None:
    """The folder of ``initdb`` and ``postgres``; the newest where there are several."""
    found = shutil.which("postgres")
    folders = [os.path.dirname(found)] if found else []
    for pattern in PLACES.split(":"):
        folders += sorted(glob.glob(pattern), key=lambda path: [int(n) for n in path.split("/") if n.isdigit()])[::-1]
    return next((folder for folder in folders if all(map(_is_there(folder), ("initdb", "postgres")))), None)


def _is_there(folder: str) -> Any:
    return lambda name: os.access(os.path.join(folder, name), os.X_OK)


def _account() -> dict[str, Any]:
    """The server refuses to run as root: an unprivileged account then owns it."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    pytest.skip("no PostgreSQL server installed that could run (no unprivileged account)")


class Postgres:
    """A running server. Databases are made one for each test, and are empty."""

    def __init__(self, folder: str, port: int = 5432) -> None:
        self.folder = folder
        self.port = port

    def url(self, database: str, driver: str = "psycopg") -> str:
        return f"postgresql+{driver}://postgres@/{database}?host={self.folder}"

    def run(self, sql: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        import psycopg

        with psycopg.connect(
            host=self.folder, port=self.port, user="postgres", dbname=database, autocommit=True
        ) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

    def connected(self, database: str) -> list[tuple[Any, ...]]:
        """Who is connected, once those have left that are about to: the server takes note of it in its own time."""
        found: list[tuple[Any, ...]] = []
        for _ in range(500):
            found = self.run(f"SELECT pid, query FROM pg_stat_activity WHERE datname = '{database}' ORDER BY pid")
            if not found:
                break
            time.sleep(0.02)
        return found

    @contextmanager
    def database(self) -> Iterator[str]:
        """The name of a fresh, empty database."""
        name = f"test_{os.getpid()}_{next(_databases)}"
        self.run(f"CREATE DATABASE {name} TEMPLATE template0 STRATEGY file_copy")
        try:
            yield name
        finally:
            self.run(f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def running_server(port: int | None = None) -> Iterator[Postgres]:
    """Start a server. Skips the test where none is installed. port: also listen there, with TLS for who wants it."""
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL server installed (looked for initdb and postgres)")
    account = _account()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="retrychaos-pg-", dir=memory)  # tmp_path can be too long for a socket
    keeper = None
    try:
        if account:
            os.chown(folder, account["user"], account["group"])
        os.chmod(folder, 0o755)
        options = ["-A", "trust", "-U", "postgres", "--no-locale", "-E", "UTF8", "--no-sync"]
        made = subprocess.run(
            [f"{binaries}/initdb", "-D", f"{folder}/data", *options], capture_output=True, text=True, cwd="/", **account
        )
        if made.returncode:
            raise RuntimeError(f"initdb failed: {made.stderr}")
        with Path(folder, "data", "postgresql.auto.conf").open("a") as settings:
            more = (
                {}
                if port is None
                else {"listen_addresses": "127.0.0.1", "port": str(port), **_certificate(folder, account)}
            )
            for name, value in {**SETTINGS, "unix_socket_directories": folder, **more}.items():
                settings.write(f"{name} = '{value}'\n")
        command = ["/bin/sh", "-c", _KEEPER, f"{binaries}/postgres", folder]
        keeper = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # a signal for all processes of the terminal must not end it before its work
            **account,
        )
        server = Postgres(folder, port or 5432)
        _wait_until_up(server, keeper)
        yield server
    finally:
        if keeper is not None and keeper.stdin is not None:
            keeper.stdin.close()
            keeper.wait(20)
        shutil.rmtree(folder, ignore_errors=True)


def _certificate(folder: str, account: dict[str, Any]) -> dict[str, str]:
    """Settings for TLS, with a certificate that was made for this server."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl installed to make a certificate with")
    key, certificate = f"{folder}/data/server.key", f"{folder}/data/server.crt"
    make = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run([*make, "-keyout", key, "-out", certificate], check=True, capture_output=True, **account)
    os.chmod(key, 0o600)
    return {"ssl": "on", "ssl_key_file": key, "ssl_cert_file": certificate}


def _wait_until_up(server: Postgres, keeper: subprocess.Popen[bytes]) -> None:
    import psycopg

    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            server.run("SELECT 1")
        except psycopg.OperationalError:
            time.sleep(0.01)
        else:
            return
    raise RuntimeError(f"the PostgreSQL server did not start: {Path(server.folder, 'log').read_text()}")
