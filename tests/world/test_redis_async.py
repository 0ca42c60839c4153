"""redis.asyncio: jobs on fakeredis and on a real server, good ones proven and their mutants failed."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakeredis
import httpx
import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis_server import free_port, running_server

from retrychaos import Chaos
from retrychaos.model.errors import ChaosError
from retrychaos.report.text import full_text

Client = redis.asyncio.Redis


class Backend:
    """A server, and clients to it of both kinds. What the test makes it closes itself, as `made` tells."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.fake = fakeredis.FakeServer() if path is None else None

    def client(self, **options: Any) -> Client:
        if self.fake is not None:
            retry = options.pop("retry", None)  # which it would drop
            client: Client = fakeredis.FakeAsyncRedis(server=self.fake, **options)
            if retry is not None:
                client.connection_pool.connection_kwargs["retry"] = retry
            return client
        return redis.asyncio.Redis(unix_socket_path=self.path, **options)

    def sync(self, **options: Any) -> redis.Redis:
        if self.fake is not None:
            return fakeredis.FakeRedis(server=self.fake, **options)
        return redis.Redis(unix_socket_path=self.path, **options)

    def read(self, *command: Any) -> Any:
        client = self.sync(decode_responses=True)
        try:
            return client.execute_command(*command)
        finally:
            client.close()


@pytest.fixture(scope="module")
def path() -> Iterator[str]:
    with running_server() as path:
        yield path


@pytest.fixture(params=["fake", "real"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    backend = Backend(request.getfixturevalue("path") if request.param == "real" else None)
    yield backend
    backend.read("FLUSHALL")


@pytest.fixture
def check(chaos: Chaos) -> Chaos:
    return chaos(faults=False, duplicates=1)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No socket is left open, and nothing is collected that complains."""
    gc.collect()
    before = sockets()
    yield
    gc.collect()
    assert sockets() <= before


def sockets() -> set[str]:
    links = (f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd"))
    return {os.readlink(link) for link in links if os.path.exists(link) and "socket:" in os.readlink(link)}


def verdict(chaos: Chaos, job: Callable[..., Any], *args: Any) -> str:
    report = chaos.explore(job, *args)
    told = f"{report.verdict} {' '.join(finding.effect for finding in report.findings)}".strip()
    return told if report.verdict != "inconclusive" else full_text(report)


# -- jobs --------------------------------------------------------------------------------------------------------------


async def set_it(client: Client) -> None:
    await client.set("a", "b")
    assert await client.get("a") == b"b"


async def incr(client: Client) -> None:
    await client.incr("n")


async def marker_after(client: Client) -> None:
    if not await client.exists("done"):
        await client.incr("n")
        await client.set("done", 1)


async def marker_before(client: Client) -> None:
    if await client.set("done", 1, nx=True):
        await client.set("work", 1)


async def marker_with(client: Client) -> None:
    if not await client.exists("done"):
        async with client.pipeline(transaction=True) as pipe:
            await pipe.incr("n").set("done", 1).execute()


async def torn(client: Client) -> None:
    if not await client.exists("done"):
        async with client.pipeline(transaction=False) as pipe:
            await pipe.incr("n").set("done", 1).execute()


async def script(client: Client) -> None:
    once = client.register_script(
        "if redis.call('SETNX', KEYS[1], 1) == 1 then redis.call('INCR', KEYS[2]) end return redis.call('GET', KEYS[2])"
    )
    assert await once(keys=["done", "n"]) == b"1"


async def script_alone(client: Client) -> None:
    await client.register_script("return redis.call('INCR', KEYS[1])")(keys=["n"])


async def together(client: Client) -> None:
    await asyncio.gather(*(client.set(f"k{number}", number) for number in range(3)))
    assert await asyncio.gather(*(client.get(f"k{number}") for number in range(3))) == [b"0", b"1", b"2"]


async def together_and_count(client: Client) -> None:
    await asyncio.gather(client.set("a", 1), client.incr("n"), client.set("b", 1))


async def as_context(client: Client) -> None:
    async with client:
        await client.set("a", "b")


async def as_context_and_count(client: Client) -> None:
    async with client:
        await client.incr("n")


def in_a_loop_of_its_own(client: Client) -> None:
    asyncio.run(set_it(client))


def in_a_loop_of_its_own_and_count(client: Client) -> None:
    asyncio.run(incr(client))


async def optimistic(client: Client) -> None:
    async with client.pipeline() as pipe:
        while True:
            try:
                await pipe.watch("n", "done")
                if await pipe.exists("done"):
                    return
                n = int(await pipe.get("n") or 0)
                pipe.multi()
                await pipe.set("n", n + 1).set("done", 1).execute()
                return
            except redis.WatchError:
                continue


async def unwatched(client: Client) -> None:
    if await client.exists("done"):
        return
    n = int(await client.get("n") or 0)
    async with client.pipeline() as pipe:
        await pipe.set("n", n + 1).incr("times").set("done", 1).execute()


async def locked(client: Client) -> None:
    async with client.lock("lock", timeout=10):
        if not await client.exists("done"):
            async with client.pipeline() as pipe:
                await pipe.incr("n").set("done", 1).execute()


async def lock_for_ever(client: Client) -> None:
    """Who dies with it leaves it to nobody."""
    if await client.set("lock", "1", nx=True):
        await client.set("work", 1)
        await client.delete("lock")


async def lock_by_hand(client: Client, expiry: int | None, guarded: bool = True) -> None:
    mine = os.urandom(8).hex()
    while guarded and not await client.set("lock", mine, nx=True, ex=expiry):
        await asyncio.sleep(1)
    if not await client.exists("work"):
        await client.incr("n")
        await client.set("work", 1)
    if await client.get("lock") == mine.encode():
        await client.delete("lock")


GOOD = [set_it, marker_with, script, together, as_context, in_a_loop_of_its_own, optimistic, locked]
BAD: list[tuple[Callable[..., Any], str]] = [
    (incr, "failed redis n"),
    (marker_after, "failed redis n"),
    (marker_before, "failed redis work"),
    (torn, "failed redis n"),
    (script_alone, "failed redis n"),
    (together_and_count, "failed redis n"),
    (as_context_and_count, "failed redis n"),
    (in_a_loop_of_its_own_and_count, "failed redis n"),
    (lock_for_ever, "failed redis work redis lock"),
]


@pytest.mark.parametrize("job", GOOD)
def test_right_under_crashes(check: Chaos, backend: Backend, job: Callable[..., Any]) -> None:
    assert verdict(check, job, backend.client()) == "proven"


@pytest.mark.parametrize(("job", "expected"), BAD)
def test_wrong_under_crashes(check: Chaos, backend: Backend, job: Callable[..., Any], expected: str) -> None:
    assert verdict(check, job, backend.client()) == expected


# -- the same as the synchronous client --------------------------------------------------------------------------------


def many_commands(client: redis.Redis) -> None:
    client.set("a", 1)
    client.get("a")
    client.hset("h", mapping={"x": 1})
    with client.pipeline(transaction=True) as pipe:
        pipe.set("b", 1).expire("b", 60).execute()
    with client.pipeline(transaction=False) as pipe:
        pipe.set("c", 1).get("c").set("d", 1).execute()
    with client.pipeline() as pipe:
        pipe.watch("a")
        pipe.get("a")
        pipe.multi()
        pipe.set("e", 1).execute()
    client.register_script("return redis.call('SET', KEYS[1], 1)")(keys=["f"])
    with client.lock("lock", timeout=5):
        client.sadd("s", 1)
    client.publish("news", "x")
    connection = client.connection_pool.get_connection()
    for command in (["MULTI"], ["SET", "g", 1], ["EXEC"], ["SELECT", 2], ["SET", "h", 1]):
        connection.send_command(*command)
        connection.read_response()
    connection.send_packed_command(connection.pack_command("SET", "i", 1))
    connection.read_response()
    client.connection_pool.release(connection)
    client.incr("n")


async def many_commands_async(client: Client) -> None:
    await client.set("a", 1)
    await client.get("a")
    await client.hset("h", mapping={"x": 1})
    async with client.pipeline(transaction=True) as pipe:
        await pipe.set("b", 1).expire("b", 60).execute()
    async with client.pipeline(transaction=False) as pipe:
        await pipe.set("c", 1).get("c").set("d", 1).execute()
    async with client.pipeline() as pipe:
        await pipe.watch("a")
        await pipe.get("a")
        pipe.multi()
        await pipe.set("e", 1).execute()
    await client.register_script("return redis.call('SET', KEYS[1], 1)")(keys=["f"])
    async with client.lock("lock", timeout=5):
        await client.sadd("s", 1)
    await client.publish("news", "x")
    connection = await client.connection_pool.get_connection()
    for command in (["MULTI"], ["SET", "g", 1], ["EXEC"], ["SELECT", 2], ["SET", "h", 1]):
        await connection.send_command(*command)
        await connection.read_response()
    await connection.send_packed_command(connection.pack_command("SET", "i", 1))
    await connection.read_response()
    await client.connection_pool.release(connection)
    await client.incr("n")


def test_the_same_steps_effects_and_findings(check: Chaos, backend: Backend) -> None:
    seen = []
    for job, client in ((many_commands, backend.sync()), (many_commands_async, backend.client())):
        report = check.explore(job, client)  # type: ignore[arg-type]
        (*_, finding) = report.findings
        steps = [[(step.kind, step.text) for step in delivery.steps] for delivery in finding.timeline]
        seen.append((report.verdict, report.states, [each.effect for each in report.findings], steps))
        backend.read("FLUSHALL")
    assert seen[0] == seen[1]
    assert seen[0][0] == "failed"


@pytest.mark.parametrize(
    ("command", "doubt"),
    [
        (("HEXPIRE", "h", 60, "FIELDS", 1, "x"), "lets fields of a hash expire"),
        (("CONFIG", "SET", "maxmemory-policy", "noeviction"), "changes fakeredis itself"),
        (("EVAL", "return redis.call('PUBLISH', 'a', 'b')", 0), "calls PUBLISH"),
    ],
)
def test_the_same_doubts(check: Chaos, command: tuple[Any, ...], doubt: str) -> None:
    async def job(client: Client) -> None:
        await client.hset("h", mapping={"x": 1})
        try:
            await client.execute_command(*command)
        except redis.ResponseError:
            pass

    report = check.explore(job, Backend(None).client())
    assert report.verdict == "inconclusive" and doubt in report.stop_reason, full_text(report)


def test_keys_end_by_the_virtual_clock(check: Chaos) -> None:
    async def job(client: Client, life: int) -> None:
        await client.set("short", 1, ex=life)
        await asyncio.sleep(60)
        assert await client.ttl("short") == (life - 60 if life > 60 else -2)
        await client.set("done", 1)

    for life in (50, 90):
        assert verdict(check, job, Backend(None).client(), life) == "proven"


def test_what_a_job_does_too_late(check: Chaos) -> None:
    """A marker that ends before the message may come again."""

    async def job(client: Client, life: int | None) -> None:
        if not await client.exists("done"):
            async with client.pipeline(transaction=True) as pipe:
                await pipe.incr("n").set("done", 1, ex=life).execute()

    assert verdict(check(late=True), job, Backend(None).client(), None) == "proven"
    assert verdict(check(late=True), job, Backend(None).client(), 86_400) == "failed redis n"


# -- deliveries that overlap -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (set_it, "proven"),
        (optimistic, "proven"),
        (marker_with, "failed redis n"),  # between EXISTS and EXEC comes the other one
        (unwatched, "failed redis n redis times"),
        (script, "proven"),
        (in_a_loop_of_its_own, "proven"),
        (together, "proven"),
    ],
)
def test_deliveries_that_overlap(check: Chaos, backend: Backend, job: Callable[..., Any], expected: str) -> None:
    assert verdict(check(duplicates=2, crashes=0), job, backend.client()) == expected


@pytest.mark.parametrize(("guarded", "expected"), [(True, "proven"), (False, "failed redis n")])
def test_a_lock_by_hand(check: Chaos, backend: Backend, guarded: bool, expected: str) -> None:
    assert verdict(check(duplicates=2, crashes=0), lock_by_hand, backend.client(), None, guarded) == expected


def test_a_lock_that_ends_while_its_owner_is_merely_slow(check: Chaos, backend: Backend) -> None:
    assert verdict(check(duplicates=2, late=False), lock_by_hand, backend.client(), 5) == "failed redis n"


def test_a_lock_that_ends_just_when_it_is_tried_again(check: Chaos, backend: Backend) -> None:
    """A server's clock goes on while that of the check stands still: who is early must not be so by chance."""
    for _ in range(3):
        assert verdict(check(duplicates=2, crashes=0), lock_by_hand, backend.client(), 5) == "proven"
        backend.read("FLUSHALL")


def test_a_lock_of_the_library(check: Chaos, backend: Backend) -> None:
    async def job(client: Client) -> None:
        async with client.lock("lock", sleep=1, blocking=True):
            await client.set("n", int(await client.get("n") or 0) or 1)

    assert verdict(check(duplicates=2, crashes=0), job, backend.client()) == "proven"


# -- faults ------------------------------------------------------------------------------------------------------------


async def count_once(client: Client) -> None:
    if not await client.exists("n"):
        await client.incr("n")


async def count_once_in_a_transaction(client: Client) -> None:
    if not await client.exists("n"):
        async with client.pipeline(transaction=True) as pipe:
            await pipe.incr("n").execute()


async def take(client: Client) -> None:
    """Whoever gets the flag does the work: here the client may get it, and never know."""
    if await client.set("flag", "1", nx=True):
        await client.set("work", "done")


@pytest.mark.parametrize("job", [count_once, count_once_in_a_transaction])
def test_the_client_does_it_twice(check: Chaos, backend: Backend, job: Callable[..., Any]) -> None:
    """redis.asyncio tries again by itself when there is no answer."""
    client = backend.client(retry=Retry(NoBackoff(), 1))
    report = check(faults=True).explore(job, client)
    (finding,) = report.findings
    assert (finding.kind, finding.effect, finding.plan.crashes) == ("changed", "redis n", 0), full_text(report)
    assert "lost reply: TimeoutError: Timeout reading from " in full_text(report)
    assert [delivery.end for delivery in finding.timeline] == ["completed"]


@pytest.mark.parametrize("job", [set_it, count_once, count_once_in_a_transaction, marker_with, together, optimistic])
def test_a_client_that_does_not_try_again(check: Chaos, backend: Backend, job: Callable[..., Any]) -> None:
    report = check(faults=True).explore(job, backend.client(retry=Retry(NoBackoff(), 0)))
    assert report.verdict == "proven", full_text(report)
    assert "errors, lost replies and shutdowns" in report.guarantee


def test_an_answer_to_set_nx_that_is_lost(check: Chaos, backend: Backend) -> None:
    client = backend.client(retry=Retry(NoBackoff(), 1))
    (finding,) = check(faults=True, crashes=0).explore(take, client).findings
    assert (finding.kind, finding.effect) == ("lost", "redis work")


def test_what_the_client_raises_if_nobody_is_there(check: Chaos, backend: Backend) -> None:
    async def job(client: Client) -> None:
        try:
            await client.set("a", 1)
        except redis.ConnectionError as error:
            await client.set("error", str(error))

    report = check(faults=True).explore(job, backend.client(retry=Retry(NoBackoff(), 0)))
    assert report.findings[0].plan.crashes == 0
    assert "error: ConnectionError: Error 111 connecting to " in full_text(report)


# -- clients and pools -------------------------------------------------------------------------------------------------


def use(client: Client) -> None:
    """As a fixture does, in a loop that is gone when the check begins. The connection is left in the pool."""
    asyncio.run(client.ping())


@pytest.mark.parametrize("single", [False, True])
def test_a_client_that_was_used_before(check: Chaos, backend: Backend, single: bool) -> None:
    client = backend.client(single_connection_client=single)

    async def fixture() -> None:
        await client.ping()
        connection = client.connection or client.connection_pool._available_connections[0]
        assert verdict(check, set_it, client) == "proven"
        assert verdict(check, incr, client) == "failed redis n"
        await client.delete("a")
        assert connection is (client.connection or client.connection_pool._available_connections[0])
        assert await client.get("a") is None
        await client.aclose()

    asyncio.run(fixture())


@pytest.mark.parametrize(("job", "expected"), [(together, "proven"), (incr, "failed redis n")])
@pytest.mark.parametrize("kind", [redis.asyncio.ConnectionPool, redis.asyncio.BlockingConnectionPool])
@pytest.mark.parametrize("duplicates", [1, 2])
def test_a_pool_that_was_made_before(
    check: Chaos, backend: Backend, kind: Any, job: Callable[..., Any], expected: str, duplicates: int
) -> None:
    if backend.fake is not None:
        pool = kind(connection_class=fakeredis.FakeAsyncRedisConnection, server=backend.fake, max_connections=2)
    else:
        pool = kind(connection_class=redis.asyncio.UnixDomainSocketConnection, path=backend.path, max_connections=2)
    client = redis.asyncio.Redis(connection_pool=pool)
    if kind is redis.asyncio.ConnectionPool and job is together:
        pool.max_connections = 3
    assert verdict(check(duplicates=duplicates), job, client) == expected
    assert pool._available_connections == [] and len(pool._in_use_connections) == 0


@pytest.mark.parametrize(("key", "expected"), [("set", "proven"), ("incr", "failed redis n")])
@pytest.mark.parametrize("close", [True, False])
def test_a_client_that_is_made_by_the_job(check: Chaos, backend: Backend, key: str, expected: str, close: bool) -> None:
    async def job() -> None:
        client = backend.client()
        await (client.set("n", 1) if key == "set" else client.incr("n"))
        if close:
            await client.aclose()

    assert verdict(check(duplicates=2, crashes=1), job) == expected


made: list[Client] = []


def test_a_client_that_the_job_keeps_in_a_global(check: Chaos, backend: Backend) -> None:
    async def job() -> None:
        if not made:
            made.append(backend.client())
        await set_it(made[0])

    made.clear()
    assert verdict(check, job) == "proven"

    async def afterwards() -> None:
        assert await made[0].get("a") == b"b"
        await made[0].aclose()

    asyncio.run(afterwards())


def test_both_kinds_of_clients_in_one_job(check: Chaos, backend: Backend) -> None:
    async def job(key: str) -> None:
        client = backend.client()
        sync = backend.sync()
        sync.set("a", 1)
        assert await client.get("a") == b"1"
        await client.set("b", 2)
        assert sync.get("b") == b"2"
        if key == "incr":
            sync.incr("n")
        await client.aclose()
        sync.close()

    assert verdict(check, job, "set") == "proven"
    assert verdict(check, job, "incr") == "failed redis n"


def test_tcp_with_a_password_by_url(check: Chaos) -> None:
    port = free_port()
    with running_server("--port", str(port), "--bind", "127.0.0.1") as path:
        with redis.Redis(unix_socket_path=path) as admin:
            admin.config_set("requirepass", "secret")
            for url in (f"redis://:secret@127.0.0.1:{port}/3", f"redis://default:secret@localhost:{port}/3?protocol=3"):
                client = redis.asyncio.Redis.from_url(url)
                assert verdict(check, set_it, client) == "proven"
                assert verdict(check, incr, client) == "failed redis n"
                admin.flushall()


def test_tls(check: Chaos, tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl installed to make a certificate with")
    key, certificate, port = tmp_path / "key.pem", tmp_path / "certificate.pem", free_port()
    make = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(make, check=True, capture_output=True)
    options = ["--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    with running_server(*options, "--tls-ca-cert-file", str(certificate), "--tls-auth-clients", "no"):
        client = redis.asyncio.Redis.from_url(f"rediss://localhost:{port}", ssl_ca_certs=str(certificate))
        assert verdict(check, set_it, client) == "proven"
        assert verdict(check, incr, client) == "failed redis n"


@pytest.mark.parametrize(
    ("key", "expected"), [("order-1", "proven"), (None, "failed POST https://api.pay.test/charges")]
)
def test_beside_other_resources(chaos: Chaos, backend: Backend, key: str | None, expected: str) -> None:
    """Redis, HTTP and a file in the tasks of one job."""
    pay = chaos.http.provider("https://api.pay.test", key_header="Idempotency-Key")
    pay.post("/charges", json={"id": "ch_1"}, status=201)
    folder = chaos.files.path

    async def charge(client: Client) -> None:
        headers = {} if key is None else {"Idempotency-Key": key}
        async with httpx.AsyncClient(verify=False) as http:
            await http.post("https://api.pay.test/charges", json={}, headers=headers)
        await client.set("charged", 1)

    async def job(client: Client) -> None:
        note = asyncio.to_thread((folder / "note").write_text, "x")
        await asyncio.gather(charge(client), client.sadd("s", "x"), note)

    assert verdict(chaos(faults=False, duplicates=1), job, backend.client()) == expected
    assert (folder / "note").read_text() == "x"


# -- waiting -----------------------------------------------------------------------------------------------------------


async def pop_and_count(client: Client) -> None:
    """Takes what is there, and waits for nothing more."""
    while await client.blpop("queue", timeout=5):
        await client.incr("n")


async def move_and_count(client: Client) -> None:
    """As a reliable queue: what is taken stays on a list until it is done."""
    while item := await client.lindex("taken", 0) or await client.blmove("queue", "taken", 5):
        async with client.pipeline() as pipe:
            await pipe.set(b"seen:" + item, 1).lrem("taken", 1, item).execute()


@pytest.mark.parametrize(("job", "expected"), [(move_and_count, "proven"), (pop_and_count, "failed redis n")])
def test_blocking_pops_under_crashes(check: Chaos, backend: Backend, job: Callable[..., Any], expected: str) -> None:
    backend.read("RPUSH", "queue", "a", "b")
    assert verdict(chaos_of(check, backend), job, backend.client()) == expected


def chaos_of(check: Chaos, backend: Backend, **options: Any) -> Chaos:
    """The server may hold something."""
    return check(scratch=[] if backend.path is None else [f"unix://{backend.path}"], **options)


def test_waiting_takes_no_time_and_a_step(check: Chaos, backend: Backend) -> None:
    async def job(client: Client) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await client.blpop("nothing", timeout=600) is None
        assert await client.xread({"stream": "$"}, block=60_000) in (None, [], {})
        assert loop.time() - began == 660
        await client.incr("n")

    report = check.explore(job, backend.client())
    (finding,) = report.findings
    steps = [(step.kind, step.text.split()[0]) for step in finding.timeline[0].steps]
    assert steps == [
        ("redis", "BLPOP"),
        ("sleep", "sleep"),
        ("redis", "XREAD"),
        ("sleep", "sleep"),
        ("redis", "INCRBY"),
    ]


def test_waiting_in_a_pipeline(check: Chaos, backend: Backend) -> None:
    async def job(client: Client) -> None:
        began = asyncio.get_running_loop().time()
        async with client.pipeline(transaction=False) as pipe:
            assert await pipe.blpop("queue", timeout=600).set("a", 1).blpop("queue", 60).execute() == [None, True, None]
        assert asyncio.get_running_loop().time() - began == 660

    assert verdict(check, job, backend.client()) == "proven"


@pytest.mark.parametrize("kept", [True, False])
def test_a_task_waits_for_another_of_the_same_job(check: Chaos, backend: Backend, kept: bool) -> None:
    async def take(client: Client) -> None:
        assert (await client.blpop("queue", timeout=60))[1] == b"work"
        await (client.set("n", 1) if kept else client.incr("n"))

    async def give(client: Client) -> None:
        await asyncio.sleep(30)
        await client.rpush("queue", "work")

    async def job(client: Client) -> None:
        began = asyncio.get_running_loop().time()
        await asyncio.gather(take(client), give(client))
        assert asyncio.get_running_loop().time() - began == 30

    assert verdict(check, job, backend.client()) == ("proven" if kept else "failed redis n")


@pytest.mark.parametrize("limit", [0, 60])
def test_a_time_limit_ends_the_wait(check: Chaos, backend: Backend, limit: int) -> None:
    async def job(client: Client) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.blpop("queue", timeout=limit), 5)
        assert loop.time() - began == 5
        await client.delete("other")
        await client.rpush("other", "a")
        assert list(await client.blpop("other", timeout=limit)) == [b"other", b"a"]
        await client.set("done", 1)

    assert verdict(check, job, backend.client()) == "proven"


async def hand_over(client: Client, guarded: bool) -> None:
    """The token goes from one delivery to the next; without it they get in each other's way."""
    if guarded:
        await client.blpop("token", timeout=0)
    if not await client.exists("n"):
        await client.incr("n")
    if guarded:
        await client.rpush("token", "t")


@pytest.mark.parametrize(("guarded", "expected"), [(True, "proven"), (False, "failed redis n")])
def test_a_delivery_waits_for_another(check: Chaos, backend: Backend, guarded: bool, expected: str) -> None:
    backend.read("RPUSH", "token", "t")
    overlapping = chaos_of(check, backend, duplicates=2, crashes=0)
    assert verdict(overlapping, hand_over, backend.client(), guarded) == expected


def test_a_delivery_waits_for_another_beside_other_tasks(check: Chaos, backend: Backend) -> None:
    async def job(client: Client) -> None:
        await asyncio.gather(hand_over(client, True), client.set("beside", 1), asyncio.sleep(1))

    backend.read("RPUSH", "token", "t")
    assert verdict(chaos_of(check, backend, duplicates=2, crashes=0), job, backend.client()) == "proven"


def test_messages_that_nobody_sends(check: Chaos, backend: Backend) -> None:
    async def job(client: Client) -> None:
        async with client.pubsub() as pubsub:
            await pubsub.subscribe("news")
            assert (await pubsub.get_message(timeout=5))["type"] == "subscribe"
            began = asyncio.get_running_loop().time()
            assert await pubsub.get_message(timeout=5) is None
            assert asyncio.get_running_loop().time() - began == 5
        await client.incr("n")

    assert verdict(check, job, backend.client()) == "failed redis n"


def test_messages_of_another_task(check: Chaos, backend: Backend) -> None:
    async def listen(client: Client) -> None:
        async with client.pubsub(ignore_subscribe_messages=True) as pubsub:
            await pubsub.subscribe("news")
            async for message in pubsub.listen():
                await client.set("heard", message["data"])
                return

    async def tell(client: Client) -> None:
        await asyncio.sleep(1)
        await client.publish("news", "good")

    async def job(client: Client) -> None:
        await asyncio.gather(listen(client), tell(client))

    assert verdict(check, job, backend.client()) == "failed redis publish"


# -- manners -----------------------------------------------------------------------------------------------------------


def places() -> dict[str, Any]:
    owners = (
        redis.asyncio.client.Redis,
        redis.asyncio.client.Pipeline,
        redis.asyncio.connection.AbstractConnection,
        redis.asyncio.connection.Connection,
        redis.asyncio.connection.UnixDomainSocketConnection,
        redis.asyncio.connection.ConnectionPool,
        redis.asyncio.connection.BlockingConnectionPool,
        asyncio,
    )
    return {f"{owner.__name__}.{name}": value for owner in owners for name, value in vars(owner).items()}


@pytest.mark.parametrize("error", [KeyboardInterrupt, AssertionError])
@pytest.mark.parametrize("duplicates", [1, 2])
def test_an_interruption_leaves_everything_as_it_was(
    check: Chaos, backend: Backend, error: type[BaseException], duplicates: int
) -> None:
    backend.read("SET", "before", "1")
    before, runs = places(), 0

    async def job(client: Client) -> None:
        nonlocal runs
        runs += 1
        await asyncio.gather(client.incr("n"), client.blpop("queue", timeout=3))
        if runs == 4:
            raise error("now")
        await client.set("m", 1)

    def explore() -> None:
        chaos_of(check, backend, duplicates=duplicates).explore(job, backend.client())

    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            explore()
        assert backend.read("KEYS", "*") == ["before"]
    else:
        explore()
    assert places() == before


def test_a_server_with_data_is_refused_and_not_changed(check: Chaos, path: str) -> None:
    backend = Backend(path)
    backend.read("SET", "precious", "1")
    try:
        with pytest.raises(ChaosError, match="is not empty"):
            check.explore(set_it, backend.client())
        assert backend.read("KEYS", "*") == ["precious"]
    finally:
        backend.read("FLUSHALL")


def test_a_server_that_is_empty_needs_no_declaration(check: Chaos, path: str) -> None:
    """Nor in the forked process, which begins where another delivery has crashed."""
    assert verdict(check, set_it, Backend(path).client()) == "proven"
    Backend(path).read("FLUSHALL")
    assert verdict(check, lambda client: client.set("a", 1) and None, Backend(path).sync()) == "proven"
    Backend(path).read("FLUSHALL")


def test_a_connection_of_another_loop_is_refused(check: Chaos, path: str) -> None:
    async def test() -> None:
        client = Backend(path).client()
        connection = await client.connection_pool.get_connection()

        async def job() -> None:
            await connection.send_command("SET", "a", 1)
            await connection.read_response()

        with pytest.raises(ChaosError, match="opened before the check"):
            check.explore(job)
        await connection.disconnect()

    asyncio.run(test())


def test_a_cluster_client_is_refused(check: Chaos) -> None:
    port = free_port()
    with running_server("--port", str(port), "--cluster-enabled", "yes"):

        async def job() -> None:
            async with redis.asyncio.RedisCluster(port=port) as client:
                await client.set("a", 1)

        with pytest.raises(ChaosError, match="cluster"):
            check.explore(job)


def test_a_connection_that_is_not_of_redis_is_let_through(check: Chaos, backend: Backend) -> None:
    """The functions of asyncio that open one are hooked, too."""

    async def job(client: Client) -> None:
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", 1)
        with pytest.raises(OSError):
            await asyncio.open_unix_connection("/nowhere")
        await client.set("a", 1)

    report = check.explore(job, backend.client())
    assert report.findings == ()
