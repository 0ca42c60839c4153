"""Redis as a resource of the world: steps, contents, restoring, on fakeredis and on a real server."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import fakeredis
import pytest
import redis
import time_machine
from redis_server import free_port, running_server

from retrychaos.model.errors import WorldError
from retrychaos.model.ledger import Facts, Relation, Version
from retrychaos.model.step import Step
from retrychaos.world.redis import RedisSource
from retrychaos.world.redis_line import Line
from retrychaos.world.redis_server import RedisServer
from retrychaos.world.redis_servers import address_of_url
from retrychaos.world.world import World


class Refused(BaseException):
    """As the real recorder: past every handler of the job."""


@dataclass
class Recorder:
    """Remembers the steps of a delivery, and the facts before each as the closure would."""

    world: World
    look: bool = True
    steps: list[Step] = field(default_factory=list)
    facts: list[Facts] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    problem: Exception | None = None

    def strike(self, kind: str, make: Callable[[], BaseException]) -> None:
        """No fault was ordered."""

    def boundary(self, step: Step) -> None:
        self.steps.append(step)
        if self.look:
            self.facts.append(self.world.facts())

    def refuse(self, problem: Exception) -> NoReturn:
        self.problem = problem
        raise Refused

    def doubt(self, reason: str) -> None:
        self.doubts.append(reason)

    @property
    def texts(self) -> list[str]:
        return [step.text for step in self.steps]


class Backend:
    """A server under test, and clients to it. Closed after the test, however that ends."""

    opened: ClassVar[list[Backend]] = []

    def __init__(self, kind: str, path: str | None) -> None:
        self.kind = kind
        self.path = path
        self.fake = fakeredis.FakeServer() if path is None else None
        self.ahead = 0.0
        self.clients: list[redis.Redis] = []
        self.opened.append(self)

    def client(self, **options: Any) -> redis.Redis:
        if self.fake is not None:
            client: redis.Redis = fakeredis.FakeRedis(server=self.fake, **options)
        else:
            client = redis.Redis(unix_socket_path=self.path, **options)
        self.clients.append(client)
        return client

    @property
    def began(self) -> float:
        """All servers are found at once here."""
        return self.now()

    def now(self) -> float:
        return time.time() + (0 if self.kind == "fake" else self.ahead)

    def close(self) -> None:
        for client in self.clients:
            client.close()


class Scene:
    """A world with one source, and deliveries in it. Closed after the test, however that ends."""

    opened: ClassVar[list[Scene]] = []

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.world = World(now=backend.now, options={"scratch": (), "faults": False})
        self.source = RedisSource(self.world)
        self.world.sources.append(self.source)
        self.world.traced = True
        self.opened.append(self)
        self.left: list[str] = []
        self.world.install()

    def deliver(self, job: Callable[[], Any], look: bool = True) -> Recorder:
        recorder = self.world.recorder = Recorder(self.world, look)
        try:
            job()
            recorder.facts.append(self.world.facts())
        finally:
            self.world.recorder = None
            self.left = self.world.end_delivery()
        return recorder

    def close(self) -> None:
        self.world.recorder = None
        self.world.uninstall()
        self.world.close()

    @property
    def server(self) -> RedisServer:
        (server,) = self.world.resources.values()
        assert isinstance(server, RedisServer)
        return server

    def rows(self, relation: str = "redis 0") -> list[tuple[Any, ...]]:
        found = self.server.version.relations.get(relation)
        return [] if found is None else list(found.rows)

    def advance(self, seconds: float, traveller: Any = None) -> None:
        if self.backend.kind == "real":
            self.backend.ahead += seconds
        else:
            traveller.shift(seconds)
        self.world.shift(seconds)


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield
    for party in (*Scene.opened, *Backend.opened):
        party.close()
    Scene.opened.clear()
    Backend.opened.clear()


@pytest.fixture(scope="module")
def socket_path() -> Iterator[str]:
    with running_server() as path:
        yield path


@pytest.fixture(params=["fake", "real"])
def backend(request: pytest.FixtureRequest) -> Backend:
    path = request.getfixturevalue("socket_path") if request.param == "real" else None
    backend = Backend(request.param, path)
    backend.client().flushall()
    return backend


@pytest.fixture
def real(socket_path: str) -> Backend:
    backend = Backend("real", socket_path)
    backend.client().flushall()
    return backend


@pytest.fixture
def scene(backend: Backend) -> Scene:
    return Scene(backend)


@pytest.fixture
def client(backend: Backend) -> redis.Redis:
    return backend.client()


# -- contents --------------------------------------------------------------------------------------------------------


def fill(client: redis.Redis) -> None:
    client.set("text", "grüße")
    client.set("bytes", b"\xff\x00")
    client.set("number", 7)
    client.hset("hash", mapping={"b": "2", "a": "1"})
    client.rpush("list", "x", "y", "x")
    client.sadd("set", "n", "m")
    client.zadd("zset", {"late": 2.5, "early": -1})
    client.xadd("stream", {"field": "value"}, id="5-1")
    client.xgroup_create("stream", "workers", "0")
    client.xreadgroup("workers", "anna", {"stream": ">"})
    client.pfadd("loglog", "a", "b")
    client.geoadd("geo", (13.36, 38.11, "Palermo"))
    client.setbit("bits", 3, 1)


EXPECTED = [
    ("bytes", "string", None, b"\xff\x00", None),
    ("hash", "hash", "a", "1", None),
    ("hash", "hash", "b", "2", None),
    ("list", "list", 0, "x", None),
    ("list", "list", 1, "y", None),
    ("list", "list", 2, "x", None),
    ("number", "string", None, "7", None),
    ("set", "set", None, "m", None),
    ("set", "set", None, "n", None),
    ("stream", "stream", "5-1", ("field", "value"), None),
    ("stream", "stream", "group workers", "5-1", None),
    ("stream", "stream", "group workers consumer", "anna", None),
    ("stream", "stream", "group workers pending", ("5-1", "anna", 1), None),
    ("text", "string", None, "grüße", None),
    ("zset", "zset", "early", -1.0, None),
    ("zset", "zset", "late", 2.5, None),
]


def test_every_type_becomes_rows(scene: Scene, client: redis.Redis) -> None:
    recorder = scene.deliver(lambda: fill(client))
    plain = [row for row in scene.rows() if row[0] not in ("loglog", "geo", "bits")]
    assert plain == EXPECTED
    assert {row[1] for row in scene.rows() if row[0] == "geo"} == {"zset"}
    assert recorder.doubts == []


def test_what_a_fixture_put_there_is_kept_and_put_back(backend: Backend, client: redis.Redis) -> None:
    if backend.kind == "real":
        pytest.skip("a real server that is not empty is refused, see below")
    fill(client)
    scene = Scene(backend)
    scene.deliver(lambda: (client.get("number"), client.delete("list"), client.set("number", 8)))
    assert ("list", "list", 0, "x", None) not in scene.rows()
    scene.world.restore(None)
    assert client.get("number") == b"7"
    assert client.lrange("list", 0, -1) == [b"x", b"y", b"x"]


def test_every_type_comes_back_with_its_time_to_live(scene: Scene, client: redis.Redis) -> None:
    def job() -> None:
        fill(client)
        for key in client.scan_iter():
            client.expire(key, 100)

    scene.deliver(job)
    assert {row[4] for row in scene.rows()} == {100.0}
    saved, rows = pickle.loads(pickle.dumps(scene.world.save())), scene.rows()
    scene.world.restore(None)
    assert client.keys() == []
    scene.world.restore(saved)
    assert scene.world.facts() == saved.facts
    assert scene.world.sweep() == saved.facts, "reading all of it again finds the very same"
    assert scene.rows() == rows
    assert all(99_000 < client.pttl(key) <= 100_000 for key in client.scan_iter())
    assert client.xpending("stream", "workers")["pending"] == 1


def test_several_databases_are_one_resource(scene: Scene, backend: Backend) -> None:
    zero, three = backend.client(), backend.client(db=3)
    scene.deliver(lambda: (zero.set("k", "zero"), three.set("k", "three")))
    assert scene.rows("redis 0") == [("k", "string", None, "zero", None)]
    assert scene.rows("redis 3") == [("k", "string", None, "three", None)]
    saved = scene.world.save()
    scene.world.restore(None)
    assert scene.server.version.relations.keys() == {"redis 0"}
    assert zero.get("k") is None and three.get("k") is None
    scene.world.restore(saved)
    assert (zero.get("k"), three.get("k")) == (b"zero", b"three")


def test_select_moves_the_following_commands_to_another_database(scene: Scene, backend: Backend) -> None:
    client = backend.client(single_connection_client=True)
    recorder = scene.deliver(lambda: (client.set("a", 1), client.select(2), client.set("b", 1)))
    assert recorder.texts == ["SET", "SET"]
    assert [row[0] for row in scene.rows("redis 2")] == ["b"]
    # Another process has another connection, which begins in database 0.
    scene.deliver(lambda: client.set("c", 1))
    assert [row[0] for row in scene.rows("redis 0")] == ["a", "c"]


def test_json_looking_text_and_keys_that_are_no_text_are_left_alone(scene: Scene, client: redis.Redis) -> None:
    scene.deliver(lambda: (client.set(b"\xfe", 1), client.set("j", '{"id": 1}')))
    assert scene.rows() == [("j", "string", None, '{"id": 1}', None), (b"\xfe", "string", None, "1", None)]


try:
    from fakeredis.model._base_type import BaseModel
except ImportError:  # another layout of fakeredis; plant() skips
    BaseModel = object  # type: ignore[assignment,misc]


class Sketch(BaseModel):
    """A value of a type that we know nothing about, as modules of Redis bring them."""

    def __init__(self, content: object) -> None:
        self.content = content

    @classmethod
    def model_type(cls) -> bytes:
        return b"CMSk-TYPE"


def plant(backend: Backend, name: bytes, content: object) -> None:
    """Put such a value into fakeredis, which has none of them without further packages."""
    database = pytest.importorskip("fakeredis._core._database", reason="another layout of fakeredis")
    assert backend.fake is not None
    backend.fake.dbs[0][name] = database.Item(Sketch(content))


def test_an_unknown_type_is_a_doubt_and_compared_by_its_dump() -> None:
    backend = Backend("fake", None)
    plant(backend, b"sketch", "one")
    scene = Scene(backend)
    client = backend.client()
    recorder = scene.deliver(lambda: client.get("other"))
    assert "sketch" in recorder.doubts[0] and "CMSk-TYPE" in recorder.doubts[0]
    saved, rows = scene.world.save(), scene.rows()
    scene.deliver(lambda: client.delete("sketch"))
    scene.world.restore(saved)
    scene.world.sweep()
    assert scene.rows() == rows


# -- what is read, and what stays the same object --------------------------------------------------------------------


def test_nothing_changed_means_the_same_objects(scene: Scene, backend: Backend) -> None:
    client, other = backend.client(), backend.client(db=1)

    def job() -> None:
        client.set("a", 1)
        other.set("b", 1)
        client.get("a")
        client.set("a", 1)
        client.set("a", 2)

    recorder = scene.deliver(job)
    versions = [next(iter(facts.values())) for facts in recorder.facts]
    assert versions[2] is versions[3] is versions[4], "a read, and a write of what was there"
    assert versions[4] is not versions[5]
    assert versions[4].relations["redis 1"] is versions[5].relations["redis 1"]
    assert scene.server.sweep() is versions[5]


def count_asked(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Every command that the harness itself sends from now on."""
    asked: list[tuple[Any, ...]] = []
    original = Line.ask

    def ask(self: Line, commands: Any, db: int | None = None) -> Any:
        asked.extend(commands)
        return original(self, commands, db)

    monkeypatch.setattr(Line, "ask", ask)
    return asked


def test_only_what_was_touched_is_read_again(
    scene: Scene, client: redis.Redis, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.deliver(lambda: [client.set(f"k{n}", n) for n in range(5)])
    scene.server._direct = False  # fakeredis is looked into otherwise, which sends nothing
    asked = count_asked(scene, monkeypatch)
    scene.deliver(lambda: (client.mget("k1", "k2"), client.type("k1")))
    assert asked == []
    scene.deliver(lambda: client.incr("k3"))
    assert {command[1] for command in asked} == {b"k3"}


@pytest.mark.parametrize(
    "change",
    [
        lambda client: client.rename("a", "b"),
        lambda client: client.copy("a", "b", destination_db=1),
        lambda client: client.move("a", 1),
        lambda client: client.swapdb(0, 1),
        lambda client: client.flushdb(),
        lambda client: client.flushall(),
        lambda client: client.delete("a", "l"),
        lambda client: client.mset({"a": "2", "z": "3"}),
        lambda client: client.rpoplpush("l", "m"),
        lambda client: client.sort("l", store="sorted", alpha=True),
        lambda client: client.eval("redis.call('SET', 'hidden', ARGV[1])", 0, "x"),
        lambda client: client.execute_command("bitop", "or", "d", "a"),
        lambda client: client.lpop("l"),
        lambda client: client.persist("e"),
        lambda client: client.getdel("a"),
    ],
)
def test_no_change_is_missed(scene: Scene, client: redis.Redis, change: Callable[[redis.Redis], Any]) -> None:
    def job() -> None:
        client.set("a", "1")
        client.set("e", "1", ex=50)
        client.rpush("l", "p", "q")
        change(client)

    recorder = scene.deliver(job)
    before, after = (next(iter(facts.values())) for facts in (recorder.facts[-2], recorder.facts[-1]))
    assert after is not before
    assert scene.server.sweep() is after, "and a sweep finds nothing more"


# -- steps -----------------------------------------------------------------------------------------------------------


def test_reads_and_writes_are_steps_and_handshakes_are_not(scene: Scene, backend: Backend) -> None:
    client = backend.client(client_name="me", db=2, health_check_interval=1)
    recorder = scene.deliver(lambda: (client.ping(), client.set("k", "v" * 100, ex=9), client.get("k")))
    assert [step.signature for step in recorder.steps] == [
        ("redis", scene.server.name, "SET"),
        ("redis", scene.server.name, "GET"),
    ]
    assert recorder.steps[0].detail == f"SET k {'v' * 36}... EX 9"


def test_values_are_told_only_if_somebody_wants_a_timeline(scene: Scene, client: redis.Redis) -> None:
    scene.world.traced = False
    recorder = scene.deliver(lambda: client.set("k", "v"))
    assert recorder.steps[0].detail == "SET"


def test_a_transaction_is_one_step_and_a_plain_pipeline_is_many(scene: Scene, client: redis.Redis) -> None:
    def job() -> list[Any]:
        results = []
        for transaction in (True, False):
            pipe = client.pipeline(transaction=transaction)
            results.append(pipe.incr("n").set("k", 1).lpush("k", 2).hgetall("h").execute(raise_on_error=False))
        return results

    results: list[Any] = []
    recorder = scene.deliver(lambda: results.extend(job()))
    assert recorder.texts == ["MULTI INCRBY SET LPUSH HGETALL EXEC", "INCRBY", "SET", "LPUSH", "HGETALL"]
    for number, result in enumerate(results, 1):
        assert result[:2] == [number, True]
        assert isinstance(result[2], redis.ResponseError)
        assert result[3] == {}, "response callbacks were applied"
    between = [facts[scene.server.name].relations["redis 0"].rows for facts in recorder.facts]
    assert len(set(between[2:4])) == 2 or between[2] != between[1], "a crash may fall between two commands"


@pytest.mark.parametrize("transaction", [True, False])
def test_a_pipeline_raises_as_it_would_without_us(scene: Scene, client: redis.Redis, transaction: bool) -> None:
    def attempt() -> str:
        with pytest.raises(redis.ResponseError) as caught:
            client.pipeline(transaction=transaction).set("k", 1).lpush("k", 2).set("after", 3).execute()
        return str(caught.value)

    messages = [attempt()]
    client.flushall()
    scene.deliver(lambda: messages.append(attempt()))
    assert messages[0] == messages[1]
    assert "Command # 2 (LPUSH k 2)" in messages[0]
    assert ("after", "string", None, "3", None) in scene.rows()


def test_watch_and_its_immediate_commands(scene: Scene, backend: Backend, client: redis.Redis) -> None:
    def increment(pipe: redis.client.Pipeline) -> None:
        value = int(pipe.get("n") or 0)
        if value == 0:
            backend.client().set("n", 10)  # a rival
        pipe.multi()
        pipe.set("n", value + 1)

    recorder = scene.deliver(lambda: client.transaction(increment, "n"))
    once = ["WATCH", "GET", "MULTI SET EXEC"]
    assert recorder.texts == ["WATCH", "GET", "SET", "MULTI SET EXEC", *once]
    assert scene.rows() == [("n", "string", None, "11", None)]


def test_raw_connections_are_seen(scene: Scene, client: redis.Redis) -> None:
    def job() -> None:
        connection = client.connection_pool.get_connection()
        connection.send_command("SET", "raw", "1")
        assert connection.read_response() == b"OK"
        connection.send_packed_command(connection.pack_commands([("INCR", "raw"), ("SET", "x" * 9000, "y" * 9000)]))
        assert [connection.read_response(), connection.read_response()] == [2, b"OK"]
        client.connection_pool.release(connection)

    recorder = scene.deliver(job)
    assert recorder.texts == ["SET", "INCR SET"]
    assert ("raw", "string", None, "2", None) in scene.rows()
    assert len(scene.rows()) == 2


def test_multi_sent_by_hand_is_one_step(scene: Scene, backend: Backend) -> None:
    client = backend.client(single_connection_client=True)

    def job() -> None:
        for command in [("MULTI",), ("SET", "a", 1), ("PUBLISH", "c", "m"), ("EXEC",)]:
            client.execute_command(*command)

    recorder = scene.deliver(job)
    assert recorder.texts == ["MULTI SET PUBLISH EXEC"]
    assert [row[0] for row in scene.rows()] == ["a"]
    assert scene.rows("redis publish") == [("PUBLISH", "c", "m")]


def test_multi_sent_by_hand_in_packed_bytes_is_one_step(scene: Scene, client: redis.Redis) -> None:
    def job() -> None:
        connection = client.connection_pool.get_connection()
        for command in [("MULTI",), ("SET", "a", 1), ("SET", "b", 1), ("EXEC",)]:
            connection.send_packed_command(connection.pack_command(*command))
            connection.read_response()
        client.connection_pool.release(connection)
        client.get("a")

    recorder = scene.deliver(job)
    assert recorder.texts == ["MULTI SET SET EXEC", "GET"]
    assert len(recorder.facts[1][scene.server.name].relations["redis 0"].rows) == 2


def test_a_multi_left_open_is_reported_and_does_not_survive(scene: Scene, backend: Backend) -> None:
    client = backend.client(single_connection_client=True)
    scene.deliver(lambda: (client.execute_command("MULTI"), client.execute_command("SET", "a", 1)))
    assert scene.left == [f"{scene.server.label}: a MULTI was never followed by EXEC, so its commands did nothing."]
    assert client.set("b", 1) is True, "not QUEUED"
    scene.deliver(lambda: client.get("a"))
    assert scene.left == []


def test_scripts_have_the_same_steps_whether_loaded_or_not(scene: Scene, backend: Backend) -> None:
    backend.client().script_flush()
    script = backend.client().register_script("return redis.call('INCR', KEYS[1])")

    def job() -> None:
        script(keys=["n"])
        pipe = script.registered_client.pipeline()
        script(keys=["n"], client=pipe)
        pipe.execute()

    first, second = scene.deliver(job), scene.deliver(job)
    assert first.texts == second.texts == ["EVAL", "MULTI EVAL EXEC"]
    assert scene.rows() == [("n", "string", None, "4", None)]


def test_a_lock_works(scene: Scene, client: redis.Redis) -> None:
    seen: list[Any] = []

    def job() -> None:
        with client.lock("lock", timeout=7) as lock:
            seen.extend(scene.world.facts()[scene.server.name].relations["redis 0"].rows)
            lock.extend(3)
            client.incr("n")

    recorder = scene.deliver(job)
    assert recorder.texts == ["SET", "EVAL", "INCRBY", "EVAL"]
    assert seen[0][0] == "lock" and seen[0][4] == 7.0
    assert scene.rows() == [("n", "string", None, "1", None)]


def test_published_messages_are_effects_that_are_restored(scene: Scene, client: redis.Redis) -> None:
    def job() -> None:
        client.publish("news", "one")
        client.pipeline().publish("news", b"\xff").set("a", 1).execute()
        client.pipeline(transaction=False).publish("news", 3).execute()

    def watched() -> None:
        with client.pipeline() as pipe:
            pipe.watch("a")
            client.set("a", 2)
            pipe.multi()
            pipe.publish("news", "never")
            with pytest.raises(redis.WatchError):
                pipe.execute()

    scene.deliver(job)
    expected = [("PUBLISH", "news", "one"), ("PUBLISH", "news", b"\xff"), ("PUBLISH", "news", "3")]
    assert scene.rows("redis publish") == expected
    assert scene.server.version.relations["redis publish"].external
    saved = scene.world.save()
    scene.deliver(watched)
    assert scene.rows("redis publish") == expected, "a transaction that was aborted publishes nothing"
    scene.world.restore(None)
    assert scene.rows("redis publish") == []
    scene.world.restore(saved)
    assert scene.rows("redis publish") == expected
    assert scene.world.sweep() == saved.facts


def test_a_script_that_publishes_is_a_doubt(scene: Scene, client: redis.Redis) -> None:
    script = client.register_script("redis.call('PUBLISH', 'c', 'm')")
    client.script_flush()
    recorder = scene.deliver(script)
    assert "PUBLISH" in recorder.doubts[0]
    assert scene.deliver(lambda: client.eval("return 1", 0)).doubts == []


def test_changing_the_server_itself_is_a_doubt(scene: Scene, client: redis.Redis) -> None:
    recorder = scene.deliver(lambda: client.config_set("maxmemory-samples", "5"))
    assert "CONFIG SET" in recorder.doubts[0]


# -- waiting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wait", "seconds"),
    [
        (lambda client: client.blpop("q", timeout=3600), 3600.0),
        (lambda client: client.brpoplpush("q", "r", timeout=3600), 3600.0),
        (lambda client: client.blmove("q", "r", 3600), 3600.0),
        (lambda client: client.bzpopmin("q", timeout=3600), 3600.0),
        (lambda client: client.blmpop(3600, 1, "q", direction="LEFT"), 3600.0),
        (lambda client: client.xread({"q": "0"}, block=3_600_000), 3600.0),
        (lambda client: client.blpop("q", timeout=0), None),
    ],
)
def test_waiting_takes_no_time(
    scene: Scene, client: redis.Redis, wait: Callable[[redis.Redis], Any], seconds: float | None
) -> None:
    slept: list[float | None] = []
    scene.world.sleep = slept.append  # type: ignore[method-assign,attr-defined,unused-ignore]
    replies: list[Any] = []
    recorder = scene.deliver(lambda: replies.append(wait(client)))
    assert slept == [seconds]
    assert not replies[0]
    assert len(recorder.steps) == 1
    assert scene.deliver(lambda: client.get("other")).steps, "the connection goes on working"
    assert slept == [seconds]


def test_what_is_there_is_taken_without_waiting(scene: Scene, client: redis.Redis) -> None:
    slept: list[float | None] = []
    scene.world.sleep = slept.append  # type: ignore[method-assign,attr-defined,unused-ignore]

    def job() -> None:
        client.rpush("q", "x")
        client.xadd("s", {"a": "1"}, id="1-1")
        client.xgroup_create("s", "g", "0")
        assert client.blpop("q", timeout=0) == [b"q", b"x"] or client.lpop("q") is None
        assert client.xreadgroup("g", "me", {"s": ">"}, block=5000)

    scene.deliver(job)
    assert slept == []
    assert "q" not in {row[0] for row in scene.rows()}


# -- clocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "granted"), [(30_000, 30.0), (7_300, 8.0), (1_500, 1.5), (150, 0.2)])
def test_the_time_to_live_is_the_granted_one(scene: Scene, client: redis.Redis, asked: int, granted: float) -> None:
    if scene.backend.kind == "real" and asked < 5000:
        pytest.skip("too short for a clock that does not stand still")
    scene.deliver(lambda: client.set("k", 1, px=asked))
    assert scene.rows()[0][4] == granted


def test_a_later_delivery_does_not_see_another_time_to_live(scene: Scene, client: redis.Redis) -> None:
    with time_machine.travel(1_800_000_000.25, tick=False) as traveller:
        scene.deliver(lambda: client.set("k", 1, ex=60))
        first = scene.server.version
        scene.advance(20, traveller)
        assert scene.world.facts()[scene.server.name] is first
        scene.deliver(lambda: client.get("k"))
        assert scene.server.sweep() is first
        scene.deliver(lambda: client.set("k", 1, ex=60))
        again = scene.server.version
        assert again.relations["redis 0"] is first.relations["redis 0"]
        assert again.expiries[0] == pytest.approx(first.expiries[0] + 20, abs=5)


def test_keys_end_when_the_virtual_clock_says_so(scene: Scene, client: redis.Redis) -> None:
    with time_machine.travel(1_800_000_000.25, tick=False) as traveller:
        scene.deliver(lambda: (client.set("short", 1, ex=60), client.set("long", 1, ex=600), client.set("ever", 1)))
        saved = scene.world.save()
        assert len(scene.server.version.expiries) == 2
        assert scene.server.version.expiries[0] == pytest.approx(scene.backend.now() + 60, abs=5)
        scene.advance(61, traveller)
        scene.world.facts()
        assert [row[0] for row in scene.rows()] == ["ever", "long"]
        assert client.exists("short") == 0
        assert 530_000 < client.pttl("long") < 540_000
        scene.world.restore(saved)
        assert [row[0] for row in scene.rows()] == ["ever", "long"], "it has been over for a second"
        assert client.exists("short") == 0


def test_going_back_in_time_gives_back_the_remaining_life(scene: Scene, client: redis.Redis) -> None:
    with time_machine.travel(1_800_000_000.25, tick=False) as traveller:
        scene.deliver(lambda: client.set("k", 1, ex=600))
        saved = scene.world.save()
        scene.advance(500, traveller)
        assert 99_000 < client.pttl("k") <= 100_000
        if scene.backend.kind == "real":
            scene.backend.ahead = 0
        else:
            traveller.move_to(1_800_000_000.25)
        scene.world.restore(saved)
        assert 599_000 < client.pttl("k") <= 600_000
        assert scene.world.sweep() == saved.facts


# -- restoring -------------------------------------------------------------------------------------------------------


def test_restore_leaves_alone_what_is_right(scene: Scene, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.deliver(lambda: [client.set(f"k{n}", n, ex=1000) for n in range(20)])
    saved = scene.world.save()
    scene.deliver(lambda: (client.set("k3", "other", ex=1000), client.delete("k4"), client.set("new", 1)))
    asked = count_asked(scene, monkeypatch)
    scene.world.restore(saved)
    changed = {key for command in asked if command[0] in ("RESTORE", "DEL", "PEXPIREAT") for key in command[1:2]}
    assert changed == {b"k3", b"k4", b"new"}
    assert "FLUSHALL" not in {command[0] for command in asked}
    assert scene.server.version is saved.facts[scene.server.name]
    assert sorted(client.keys()) == sorted(f"k{n}".encode() for n in range(20))


def test_restore_knows_what_was_written_after_the_last_look(scene: Scene, client: redis.Redis) -> None:
    scene.deliver(lambda: client.set("a", 1))
    saved = scene.world.save()
    scene.world.recorder = Recorder(scene.world, look=False)
    client.set("a", 2)
    client.eval("redis.call('SET', 'b', 1)", 0)
    scene.world.recorder = None
    scene.world.restore(saved)
    assert client.get("a") == b"1"
    assert client.get("b") is None


def test_what_another_process_wrote_is_undone_after_distrust(scene: Scene, client: redis.Redis) -> None:
    scene.deliver(lambda: (client.set("a", 1), client.set("t", 1, ex=500)))
    saved = scene.world.save()
    client.set("a", 2)
    client.set("stray", 1)
    client.persist("t")
    scene.world.distrust()
    scene.world.restore(saved)
    assert client.get("a") == b"1"
    assert client.exists("stray") == 0
    assert client.ttl("t") > 490


def test_each_key_is_dumped_once(scene: Scene, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.deliver(lambda: [client.set(f"k{n}", n) for n in range(5)])
    scene.world.save()
    asked = count_asked(scene, monkeypatch)
    scene.world.save()
    assert asked == []
    scene.deliver(lambda: client.set("k2", "other"))
    scene.world.save()
    assert [command for command in asked if command[0] == "DUMP"] == [("DUMP", b"k2")]


def test_what_cannot_be_dumped_is_refused() -> None:
    backend = Backend("fake", None)
    scene = Scene(backend)
    client = backend.client()
    recorder = scene.world.recorder = Recorder(scene.world)
    plant(backend, b"series", threading.Lock())
    with pytest.raises(Refused):
        client.get("series")
    assert "'series' (CMSk-TYPE)" in str(recorder.problem)
    assert "cannot DUMP" in str(recorder.problem)


def test_a_state_of_another_process_can_be_wanted(backend: Backend) -> None:
    first = Scene(backend)
    client = backend.client()
    first.deliver(lambda: client.rpush("l", 1, 2))
    saved = pickle.loads(pickle.dumps(first.world.save()))
    first.world.restore(None)
    first.close()
    second = Scene(backend)
    second.world.restore(saved)
    second.deliver(lambda: client.rpush("l", 3))
    assert [row[3] for row in second.rows()] == ["1", "2", "3"]
    second.world.restore(None)
    assert client.lrange("l", 0, -1) == [b"1", b"2"], "the wanted state counts as the one that was found"


KEYS = ["k1", "k2", "k3", "k4"]
CHANGES: list[Callable[[redis.Redis, random.Random, str], Any]] = [
    lambda client, chance, key: client.set(key, chance.randrange(3)),
    lambda client, chance, key: client.set(key, 1, ex=chance.choice([100, 200])),
    lambda client, _chance, key: client.set(key, 2, keepttl=True),
    lambda client, _chance, key: client.incr(key),
    lambda client, chance, key: client.hset(key, "f", chance.randrange(3)),
    lambda client, chance, key: client.rpush(key, chance.randrange(3)),
    lambda client, _chance, key: client.lpop(key),
    lambda client, chance, key: client.sadd(key, chance.randrange(3)),
    lambda client, _chance, key: client.spop(key),
    lambda client, chance, key: client.zadd(key, {"m": chance.randrange(3)}),
    lambda client, _chance, key: client.xadd(key, {"a": "1"}),
    lambda client, _chance, key: client.xgroup_create(key, "g", "0", mkstream=True),
    lambda client, _chance, key: client.xreadgroup("g", "c", {key: ">"}, count=1),
    lambda client, chance, key: client.delete(key, chance.choice(KEYS)),
    lambda client, chance, key: client.rename(key, chance.choice(KEYS)),
    lambda client, chance, key: client.copy(key, chance.choice(KEYS), replace=True),
    lambda client, chance, key: client.expire(key, chance.choice([100, 300])),
    lambda client, _chance, key: client.persist(key),
    lambda client, chance, _key: client.publish("c", chance.randrange(9)),
    lambda client, _chance, _key: client.eval("return redis.call('APPEND', 'k1', 'x')", 0),
    lambda client, _chance, _key: client.swapdb(0, 1),
    lambda client, _chance, _key: client.flushdb(),
]


@pytest.mark.parametrize("seed", range(15))
def test_any_changes_are_seen_at_once_and_can_be_gone_back_to(scene: Scene, backend: Backend, seed: int) -> None:
    chance = random.Random(seed)
    clients = [backend.client(), backend.client(db=1)]
    states = []

    def job() -> None:
        for _ in range(12):
            # The last two: fakeredis does not check the type of a key everywhere
            with contextlib.suppress(redis.ResponseError, AttributeError, TypeError):
                chance.choice(CHANGES)(chance.choice(clients), chance, chance.choice(KEYS))

    for _ in range(8):
        recorder = scene.deliver(job)
        seen = recorder.facts[-1]
        assert scene.world.sweep() == seen, "nothing was missed"
        states.append(scene.world.save())
        if chance.random() < 0.7:
            back = chance.choice(states)
            scene.world.restore(back)
            assert scene.world.sweep() == back.facts, "all is as it was"


# -- servers ---------------------------------------------------------------------------------------------------------


def test_two_clients_of_one_server_are_one_resource(scene: Scene, backend: Backend) -> None:
    one, two = backend.client(), backend.client(decode_responses=True, db=1)
    scene.deliver(lambda: (one.set("a", 1), two.get("a")))
    assert len(scene.world.resources) == 1


def test_two_fake_servers_are_two_resources() -> None:
    scene = Scene(Backend("fake", None))
    one, two = fakeredis.FakeRedis(), fakeredis.FakeRedis()
    named = fakeredis.FakeRedis(host="queue", port=1)
    scene.deliver(lambda: (one.set("a", 1), two.set("a", 2), named.set("a", 3)))
    assert [server.label for server in scene.world.resources.values()] == [
        "fakeredis",
        "fakeredis 2",
        "fakeredis 3",
    ]
    assert "redis:fake:queue:1:redis:v7" in scene.world.resources
    for client in (one, two, named):
        client.close()


def test_one_real_server_by_two_addresses_is_one_resource() -> None:
    port = free_port()
    with running_server("--port", str(port), "--bind", "127.0.0.1") as path:
        clients = [redis.Redis(port=port), redis.Redis("127.0.0.1", port), redis.Redis(unix_socket_path=path)]
        scene = Scene(Backend("real", path))
        try:
            scene.deliver(lambda: [client.incr("n") for client in clients])
            assert list(scene.world.resources) == [f"redis:localhost:{port}"]
            assert scene.server.label == f"redis localhost:{port}"
            assert scene.rows() == [("n", "string", None, "3", None)]
        finally:
            scene.close()
            for client in clients:
                client.close()


def test_a_server_with_data_is_refused_and_not_changed(real: Backend) -> None:
    client, other = real.client(), real.client(db=5)
    other.set("precious", "data", ex=1000)
    scene = Scene(real)
    with pytest.raises(Refused):
        scene.deliver(lambda: client.set("a", 1))
    assert scene.world.resources == {}
    assert client.dbsize() == 0
    assert other.keys() == [b"precious"] and other.get("precious") == b"data" and other.ttl("precious") > 990


def test_the_refusal_says_what_to_write(real: Backend) -> None:
    client = real.client()
    client.set("precious", "data")
    scene = Scene(real)
    recorder = scene.world.recorder = Recorder(scene.world)
    with pytest.raises(Refused):
        client.get("precious")
    message = str(recorder.problem)
    assert isinstance(recorder.problem, WorldError)
    assert f'scratch=["unix://{real.path}"]' in message
    assert "db0 has 1 keys" in message and "nothing was changed" in message
    scene.world.recorder = None


def problem_of(path: str, **options: Any) -> Exception | None:
    """Why a job that uses the server at `path` is refused."""
    scene = Scene(Backend("real", path))
    recorder = scene.world.recorder = Recorder(scene.world)
    client = redis.Redis(unix_socket_path=path, **options)
    try:
        client.get("a")
    except Refused:
        return recorder.problem
    finally:
        scene.close()
        client.close()
    return None


def test_a_cluster_is_refused() -> None:
    with running_server("--cluster-enabled", "yes", "--port", str(free_port()), "--bind", "127.0.0.1") as path:
        assert "cluster, which is not supported" in str(problem_of(path))


def test_credentials_are_used_and_a_server_that_tells_nothing_is_refused() -> None:
    with running_server() as path:
        admin = redis.Redis(unix_socket_path=path)
        admin.acl_setuser("full", enabled=True, passwords=["+one"], categories=["+@all"], keys=["*"])
        admin.acl_setuser("poor", enabled=True, passwords=["+two"], commands=["+get", "+client"], keys=["*"])
        admin.acl_setuser("default", enabled=False)
        assert problem_of(path, username="full", password="one") is None
        problem = problem_of(path, username="poor", password="two")
        assert isinstance(problem, WorldError) and "INFO" in str(problem)
        admin.close()


@pytest.mark.parametrize("suffix", ["", "/0", "?db=3"])
def test_a_declared_scratch_server_may_hold_something(real: Backend, suffix: str) -> None:
    client = real.client()
    client.set("kept", "1")
    scene = Scene(real)
    scene.world._options = {"scratch": (f"unix://{real.path}{suffix}",)}
    scene.deliver(lambda: (client.set("kept", "2"), client.set("a", 1)))
    scene.world.restore(None)
    assert client.keys() == [b"kept"] and client.get("kept") == b"1"


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://localhost:6379", "localhost:6379"),
        ("redis://127.0.0.1:6380/4", "localhost:6380"),
        ("rediss://user:secret@cache.test", "cache.test:6379"),
        ("redis://[::1]:7000/0", "localhost:7000"),
        ("unix:///run/redis.sock", "/run/redis.sock"),
        ("unix:///run/redis.sock/2", "/run/redis.sock"),
        ("unix://user@/run/redis.sock?db=2", "/run/redis.sock"),
    ],
)
def test_addresses_of_urls(url: str, address: str) -> None:
    assert address_of_url(url) == address


# -- manners ---------------------------------------------------------------------------------------------------------


def patched_places() -> dict[str, Any]:
    owners = (redis.connection.AbstractConnection, redis.client.Pipeline)
    return {
        f"{owner.__module__}.{owner.__name__}.{name}": value for owner in owners for name, value in vars(owner).items()
    }


def test_uninstall_restores_the_very_attributes(backend: Backend) -> None:
    before = patched_places()
    scene = Scene(backend)
    scene.world.install()  # twice does no harm
    assert patched_places() != before
    scene.world.uninstall()
    scene.world.uninstall()
    after = patched_places()
    assert after.keys() == before.keys()
    assert all(after[name] is value for name, value in before.items())


def test_outside_a_delivery_nothing_is_a_step(scene: Scene, client: redis.Redis) -> None:
    client.set("a", 1)
    client.pipeline().set("b", 1).execute()
    assert scene.world.resources == {}


def test_connections_end_with_the_delivery(scene: Scene, backend: Backend) -> None:
    client, watching = backend.client(), backend.client()
    pipe = watching.pipeline()
    pubsub = client.pubsub()
    scene.deliver(lambda: (pipe.watch("w"), pubsub.subscribe("c"), client.set("a", 1)))
    assert not any(connection._sock for connection in client.connection_pool._available_connections)
    assert pipe.connection is not None and pipe.connection._sock is None
    assert client.pubsub_numsub("c") == [(b"c", 0)]
    assert client.get("a") == b"1"
    pubsub.close()
    pipe.reset()


def test_another_pid_for_each_delivery_leaks_nothing(
    scene: Scene, backend: Backend, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    client = backend.client()
    pid = os.getpid()
    for number in range(3):
        monkeypatch.setattr(os, "getpid", lambda number=number: pid + number + 1)
        scene.deliver(lambda: (client.incr("n"), client.pipeline().incr("n").execute()))
        monkeypatch.undo()
    assert scene.rows() == [("n", "string", None, "6", None)]
    scene.world.close()
    client.close()
    gc.collect()
    assert [str(warning.message) for warning in recwarn if warning.category is ResourceWarning] == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_share_the_connection(real: Backend) -> None:
    scene = Scene(real)
    client = real.client()
    scene.deliver(lambda: client.set("a", 1))
    child = os.fork()
    if child == 0:
        try:
            scene.deliver(lambda: client.incr("a"))
            os._exit(0 if scene.rows()[0][3] == "2" else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    scene.server.sweep()
    assert scene.rows()[0][3] == "2"


def test_close_never_raises_when_the_server_is_gone() -> None:
    with running_server() as path:
        backend = Backend("real", path)
        scene = Scene(backend)
        scene.deliver(lambda: backend.client().set("a", 1))
    scene.close()
    backend.close()


def test_a_server_that_closed_idle_connections_is_asked_again(real: Backend) -> None:
    scene = Scene(real)
    client = real.client()
    scene.deliver(lambda: client.set("a", 1))
    client.client_kill_filter(_type="normal", skipme=True)
    scene.deliver(lambda: client.set("a", 2))
    assert scene.rows()[0][3] == "2"


def test_a_damaged_look_into_fakeredis_falls_back_to_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(value: Any) -> Any:
        raise AttributeError("another version of fakeredis")

    monkeypatch.setattr("retrychaos.world.redis_fake._typed", broken)
    backend = Backend("fake", None)
    scene = Scene(backend)
    client = backend.client()
    scene.deliver(lambda: fill(client))
    assert [row for row in scene.rows() if row[0] not in ("loglog", "geo", "bits")] == EXPECTED


def test_fakeredis_is_not_imported_by_us() -> None:
    import subprocess

    code = "import sys, retrychaos.world.redis; sys.exit('fakeredis' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ}, check=False).returncode == 0


def test_relations_say_what_they_are(scene: Scene, client: redis.Redis) -> None:
    scene.deliver(lambda: client.set("a", 1))
    relation: Relation = scene.server.version.relations["redis 0"]
    assert relation.columns == ("key", "type", "field", "value", "ttl")
    assert relation.ttl == 4 and not relation.external
    assert isinstance(scene.server.version, Version)
