"""A private Redis server for tests: a unix socket in a folder in memory, nothing on disk, gone afterwards."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

NAMES = ("redis-server", "valkey-server")


def free_port() -> int:
    """A port that nobody uses, low enough for the bus of a cluster to be 10,000 above it."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port < 55_000:
            return port


def find_binary() -> str | None:
    places = [shutil.which(name) or shutil.which(name, path="/usr/bin:/usr/local/bin") for name in NAMES]
    return next((place for place in places if place), None)


@contextmanager
def running_server(*options: str) -> Iterator[str]:
    """Start a server and give the path of its socket. Skips the test where no server is installed."""
    binary = find_binary()
    if binary is None:
        pytest.skip(f"no Redis server installed (looked for {' and '.join(NAMES)})")
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = tempfile.mkdtemp(prefix="retrychaos-redis-", dir=memory)  # tmp_path can be too long for a socket
    path = f"{folder}/s"
    arguments = ["--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--dir", folder, *options]
    process = subprocess.Popen([binary, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_up(process, path)
        yield path
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_up(process: subprocess.Popen[bytes], path: str) -> None:
    client = redis.Redis(unix_socket_path=path)
    try:
        while process.poll() is None:
            try:
                client.ping()
            except redis.ConnectionError:
                time.sleep(0.005)
            else:
                return
        raise RuntimeError(f"the Redis server ended at once with status {process.returncode}")
    finally:
        client.close()
