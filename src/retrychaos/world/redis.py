"""Redis, through redis-py's synchronous clients: on fakeredis and on real servers that hold nothing of value.

Every command that a client sends passes `AbstractConnection`, so that is where the steps are seen. Only what a command
may have changed is read again, and a state is restored by its difference to what is there: never FLUSHALL, and no key
that is right already is touched.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, NoReturn

import redis.asyncio.connection
import redis.client
import redis.connection
from redis.backoff import NoBackoff
from redis.retry import Retry

from retrychaos.model.errors import WorldError
from retrychaos.model.ledger import Relation, Row, Version
from retrychaos.world import redis_contents as contents
from retrychaos.world.redis_contents import Call, Command, KeyState, Reply, Seen, Snapshot
from retrychaos.world.resource import Stage

_KEY_COLUMNS = ("key", "type", "field", "value", "ttl")
_PUBLISHED = "redis publish"
_CHUNK = 1000


class Line:
    """The harness's own connection to a server: raw bytes, no callbacks, and hooks look away while it is used."""

    _all: ClassVar[weakref.WeakSet[Line]] = weakref.WeakSet()

    def __init__(self, connection: Any, stage: Stage) -> None:
        self._stage = stage
        self._connection = _own_connection(connection)
        self._selected: int | None = None
        Line._all.add(self)

    def ask(self, commands: Sequence[Command], db: int | None = None) -> list[Reply]:
        """All replies in one round trip; the exception in place of the reply of a command that failed."""
        quiet, self._stage.quiet = self._stage.quiet, True
        try:
            try:
                return self._ask(commands, db)
            except redis.ConnectionError:
                self.hang_up()  # the server may have closed it for being idle
                return self._ask(commands, db)
        except redis.RedisError as error:  # must not look like a failure of the job
            self.hang_up()
            self._stage.refuse(
                WorldError(
                    f"A Redis server that the job uses does not answer the check, which is lost without it: {error}"
                )
            )
        except Exception as error:  # fakeredis runs in this process, and raises what went wrong in it
            self.hang_up()
            if len(commands) == 1:
                return [error]
            return [reply for command in commands for reply in self.ask([command], db)]
        finally:
            self._stage.quiet = quiet

    def _ask(self, commands: Sequence[Command], db: int | None) -> list[Reply]:
        connection = self._connection
        if connection._sock is None:
            connection.connect()
            self._selected = 0
        if db is not None and db != self._selected:
            self._talk([("SELECT", db)])
            self._selected = db
        return [
            reply for start in range(0, len(commands), _CHUNK) for reply in self._talk(commands[start : start + _CHUNK])
        ]

    def _talk(self, commands: Sequence[Command]) -> list[Reply]:
        connection = self._connection
        connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        replies: list[Reply] = []
        for _ in commands:
            try:
                replies.append(connection.read_response())
            except redis.ResponseError as error:
                replies.append(error)
        return replies

    def hang_up(self) -> None:
        self._connection.disconnect()

    def drop(self) -> None:
        """In a forked child: give up the socket without a word, the parent goes on using it."""
        sock, self._connection._sock = self._connection._sock, None
        if sock is not None:
            sock.close()


def _drop_lines() -> None:
    for line in list(Line._all):
        with contextlib.suppress(Exception):
            line.drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_lines)


def _own_connection(connection: Any) -> Any:
    """A connection to where `connection` goes, with its credentials and TLS settings, but nothing of its manners.

    A copy, because a connection does not keep the arguments that it was made with.
    """
    own = copy.copy(connection)
    own._sock = None
    own.pid = os.getpid()
    own.db = 0
    own.protocol = 2
    own.encoder = type(connection.encoder)("utf-8", "strict", False)
    own.set_parser(redis.connection.DefaultParser)
    own._command_packer = own._construct_command_packer(None)
    own._connect_callbacks = []
    own.client_name = own.driver_info = own.redis_connect_func = None
    own.health_check_interval = 0
    own.retry = Retry(NoBackoff(), 0)
    own.lib_name = own.lib_version = None  # before redis-py 7
    if hasattr(own, "_client_info"):  # fakeredis: what the server believes about its client
        own._client_info = type(own._client_info)(**{**own._client_info, "resp": 2})
    return own


_left: dict[str, frozenset[tuple[Any, ...]]] = {}
"""What the check before this one left on each server. It is no stranger's data if it is all that is there."""


class RedisServer:
    """One server with all its databases. `fake` is the server object of fakeredis, None for a real one."""

    def __init__(self, stage: Stage, name: str, label: str, line: Line, fake: Any = None) -> None:
        self.name = name
        self.label = label
        self.connections: weakref.WeakKeyDictionary[Any, Wire] = weakref.WeakKeyDictionary()
        self._stage = stage
        self._line = line
        self._fake = fake
        self._direct = fake is not None and hasattr(fake, "dbs")
        self._dbs: dict[int, dict[bytes, KeyState]] = {}
        self._published: tuple[Row, ...] = ()
        self._deadlines: dict[tuple[int, bytes], int] = {}
        """When keys end by the server's own clock, in milliseconds, as last seen or set."""
        self._dirty: dict[tuple[int, bytes], str] = {}
        self._all_dirty = False
        self._scripts: set[Any] = set()
        self._saved: tuple[Version, Snapshot] | None = None
        absolute = not isinstance(line.ask([("PEXPIRETIME", "retrychaos")])[0], Exception)
        self._when, self._slack = ("PEXPIRETIME", 3) if absolute else ("PTTL", 30)
        self.version = Version({})
        self._read_all()

    # -- what the source tells ---------------------------------------------------------------------------------------

    def mark(self, db: int, keys: Iterable[bytes] | None, guess: str) -> None:
        """These keys may change now; None: any."""
        if keys is None:
            self._all_dirty = True
        else:
            self._dirty.update(dict.fromkeys(((db, key) for key in keys), guess))

    def publish(self, row: Row) -> None:
        self._published = (*self._published, row)
        self._stage.touched(self)

    def hurry(self, connection: Any) -> None:
        """Wake an idle server, which otherwise looks only ten times a second whether a client has waited enough."""
        while self._fake is None and not connection.can_read(timeout=0.002):
            self._line.ask([("PING",)])

    def knows_script(self, sha: Any) -> bool:
        if sha not in self._scripts and self._line.ask([("SCRIPT", "EXISTS", sha)])[0] == [1]:
            self._scripts.add(sha)
        return sha in self._scripts

    def forget_scripts(self) -> None:
        self._scripts.clear()

    # -- Resource ----------------------------------------------------------------------------------------------------

    def refresh(self) -> Version:
        if self._all_dirty:
            return self.sweep()
        now = self._now()
        if self.version.expiries and self.version.expiries[0] * 1000 < now:
            self._dirty.update((place, state.kind) for place, state in self._states() if _over(state, now))
        if self._dirty:
            wanted, self._dirty = self._dirty, {}
            self._take(self._read(wanted))
        else:
            self._settle({})
        return self.version

    def sweep(self) -> Version:
        self._read_all()
        return self.version

    def save(self) -> Snapshot:
        if self._saved is None or self._saved[0] is not self.version:
            self._dump_missing()
            self._saved = (self.version, Snapshot(self._dbs, self._published))
        return self._saved[1]

    def restore(self, version: Version, blob: Snapshot) -> None:
        self.refresh()
        now = self._now()
        target = {
            db: alive
            for db, states in blob.dbs.items()
            if (alive := {key: state for key, state in states.items() if not _over(state, now) and state.dumped})
        }
        ends = any(state.expiry is not None for states in target.values() for state in states.values())
        lead = now - self._clock() if ends else 0
        for db in sorted({*self._dbs, *target}):
            commands = list(self._changes(db, self._dbs.get(db, {}), target.get(db, {}), lead))
            if not commands:
                continue
            for command, reply in zip(commands, self._line.ask(commands, db), strict=True):
                if isinstance(reply, Exception):
                    raise WorldError(
                        f"{self.label} could not be put back: {command[0]} of {contents.as_text(command[1])!r} in"
                        f" database {db} failed ({reply}). Without that a crash cannot be simulated there."
                    )
        self._deadlines = {place: due for place, due in self._deadlines.items() if place[1] in target.get(place[0], {})}
        whole = sum(map(len, target.values())) == sum(map(len, blob.dbs.values()))
        self._dbs, self._published = target, blob.published
        self.version = version
        if not whole:
            self.version = self._build(blob.dbs)

    def end_delivery(self) -> Sequence[str]:
        lines = []
        for connection, wire in list(self.connections.items()):
            if wire.queued:
                lines.append(f"{self.label}: a MULTI was never followed by EXEC, so its commands did nothing.")
            _hang_up(connection)
        self.connections.clear()
        return lines

    def shift(self, seconds: float) -> None:
        if self._fake is None:
            self._hasten(round(seconds * 1000))

    def shift_ids(self, by: int) -> None:
        """Redis draws no ids."""

    def distrust(self) -> None:
        self._all_dirty = True
        self._scripts.clear()

    def rows(self) -> frozenset[tuple[Any, ...]]:
        """All that it holds, times to live apart."""
        relations = [relation for relation in self.version.relations.values() if relation.ttl is not None]
        return frozenset((relation.name, *row[:4]) for relation in relations for row in relation.rows)

    def close(self) -> None:
        _left[self.name] = self.rows()
        with contextlib.suppress(Exception):
            self.end_delivery()
        with contextlib.suppress(Exception):
            self._line.hang_up()

    # -- reading -----------------------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        self._dirty, self._all_dirty = {}, False
        wanted = {}
        for db in self._used_databases():
            have = self._dbs.get(db, {})
            for key in self._line.ask([("KEYS", "*")], db)[0] if not self._direct else list(self._fake.dbs[db]):
                wanted[db, key] = have[key].kind if key in have else "string"
        found = self._read(wanted)
        self._take({**dict.fromkeys(place for place, _ in self._states()), **found})

    def _used_databases(self) -> list[int]:
        if self._fake is not None:
            return sorted(self._fake.dbs)
        return [int(name[2:]) for name in info(self._line, "keyspace") if name.startswith("db")]

    def _read(self, wanted: dict[tuple[int, bytes], str]) -> dict[tuple[int, bytes], Seen | None]:
        found: dict[tuple[int, bytes], Seen | None] = {}
        slow: dict[tuple[int, bytes], str] = {}
        for place, guess in wanted.items():
            seen = self._peek(*place) if self._direct else NotImplemented
            if seen is NotImplemented:
                slow[place] = guess
            else:
                found[place] = seen
        for db in sorted({db for db, _ in slow}):
            found.update(self._read_database(db, {key: guess for (place, key), guess in slow.items() if place == db}))
        return found

    def _peek(self, db: int, key: bytes) -> Any:
        """Look into fakeredis itself, some twenty times faster than asking. NotImplemented: ask."""
        try:
            with self._fake.lock:
                database = self._fake.dbs[db]
                database.time = self._stage.now()
                item = database.get(key)
                if item is None:
                    return None
                kind, value = _fake_value(item.value)
                deadline = None if item.expireat is None else round(item.expireat * 1000)
            return Seen(kind, deadline, contents.parts_of(kind, value)) if kind else NotImplemented
        except (AttributeError, TypeError):  # another fakeredis than the ones we know
            self._direct = False
            return NotImplemented

    def _read_database(self, db: int, keys: dict[bytes, str]) -> dict[tuple[int, bytes], Seen | None]:
        def stranger(key: bytes) -> Callable[[str], None]:
            return lambda kind: self._stage.doubt(
                f"{self.label} holds {contents.as_text(key)!r}, whose type {kind} cannot be read: it is compared by its"
                " DUMP, which may differ where the contents do not."
            )

        programs = [(key, contents.read_key(key, keys[key], (self._when, key), stranger(key))) for key in keys]
        found: dict[tuple[int, bytes], Seen | None] = {}
        asked = [(key, program, next(program)) for key, program in programs]
        while asked:
            replies = iter(self._line.ask([command for *_, commands in asked for command in commands], db))
            going = []
            for key, program, commands in asked:
                try:
                    going.append((key, program, program.send([next(replies) for _ in commands])))
                except StopIteration as end:
                    found[db, key] = end.value
                except redis.RedisError as error:
                    self._unreadable(db, key, error)
            asked = going
        if self._when == "PTTL":
            clock = self._clock()
            for place, seen in found.items():
                if seen is not None and seen.deadline is not None:
                    found[place] = seen._replace(deadline=seen.deadline + clock)
        return found

    def _unreadable(self, db: int, key: bytes, error: Exception) -> NoReturn:
        self._stage.refuse(
            WorldError(
                f"{self.label}: {contents.as_text(key)!r} in database {db} cannot be read ({error}), so nobody can tell"
                " what a crash leaves there. Give the client of the job a user that may read everything."
            )
        )

    def _take(self, found: dict[tuple[int, bytes], Seen | None]) -> None:
        fresh: dict[int, dict[bytes, KeyState]] = {}
        now = self._now()
        lead: int | None = None  # how far the virtual clock is ahead of the server's
        for (db, key), seen in found.items():
            old = self._dbs.get(db, {}).get(key)
            if seen is not None and seen.deadline is not None and lead is None:
                lead = now - self._clock()
            state = self._state(db, key, old, seen, now, lead or 0)
            if state is old:
                continue
            if db not in fresh:
                fresh[db] = dict(self._dbs.get(db, {}))
            if state is None:
                del fresh[db][key]
            else:
                fresh[db][key] = state
        for db, states in fresh.items():
            if states.keys() - self._dbs.get(db, {}).keys():
                fresh[db] = dict(sorted(states.items()))
        self._settle(fresh)

    def _state(
        self, db: int, key: bytes, old: KeyState | None, seen: Seen | None, now: int, lead: int
    ) -> KeyState | None:
        known = self._deadlines.pop((db, key), None)
        if seen is None:
            return None
        if seen.deadline is None:
            expiry = ttl = None
        else:
            self._deadlines[db, key] = seen.deadline
            if old is not None and known is not None and abs(known - seen.deadline) <= self._slack:
                expiry, ttl = old.expiry, old.ttl
            else:
                expiry = seen.deadline + lead
                ttl = contents.granted(expiry - now)
        if old is not None and old.holds(seen.kind, seen.body) and old.expiry == expiry:
            return old
        return KeyState.of(key, seen, expiry, ttl)

    def _states(self) -> Iterator[tuple[tuple[int, bytes], KeyState]]:
        return (((db, key), state) for db, states in self._dbs.items() for key, state in states.items())

    def _settle(self, fresh: dict[int, dict[bytes, KeyState]]) -> None:
        """Make a new version if databases or what was published differ from the last."""
        shown = self.version.relations.get(_PUBLISHED)
        if fresh:
            self._dbs = {db: states for db, states in {**self._dbs, **fresh}.items() if states}
        if fresh or not self.version.relations or len(self._published) != (len(shown.rows) if shown else 0):
            self.version = self._build(fresh)

    def _build(self, fresh: Iterable[int]) -> Version:
        relations = {}
        for db in sorted({0, *self._dbs}):
            name = f"redis {db}"
            old = self.version.relations.get(name)
            if db in fresh or old is None:
                rows = tuple(chain.from_iterable(state.rows for state in self._dbs.get(db, {}).values()))
                old = self._relation(name, _KEY_COLUMNS, rows, ttl=4)
            relations[name] = old
        if self._published:
            columns = ("command", "channel", "message")
            relations[_PUBLISHED] = self._relation(_PUBLISHED, columns, self._published, external=True)
        expiries = {state.expiry for states in self._dbs.values() for state in states.values()} - {None}
        return Version(relations, tuple(sorted(expiry / 1000 for expiry in expiries if expiry is not None)))

    def _relation(self, name: str, columns: tuple[str, ...], rows: tuple[Row, ...], **more: Any) -> Relation:
        old = self.version.relations.get(name)
        return old if old is not None and old.rows == rows else Relation(name, columns, rows, **more)

    # -- clocks ------------------------------------------------------------------------------------------------------

    def _now(self) -> int:
        return round(self._stage.now() * 1000)

    def _clock(self) -> int:
        """What time the server thinks it is, in milliseconds. fakeredis shares the virtual clock."""
        if self._fake is not None:
            return self._now()
        seconds, micros = self._line.ask([("TIME",)])[0]
        return int(seconds) * 1000 + int(micros) // 1000

    def _hasten(self, by: int) -> None:
        """The virtual clock has moved on: bring the ends of keys nearer, where the server's clock has not moved."""
        moved = {place: due - by for place, due in self._deadlines.items()}
        for db in sorted({db for db, _ in moved}):
            self._line.ask([("PEXPIREAT", key, due) for (where, key), due in moved.items() if where == db], db)
        self._deadlines = moved

    # -- saving and restoring ----------------------------------------------------------------------------------------

    def _dump_missing(self) -> None:
        for db, states in self._dbs.items():
            missing = [(key, state) for key, state in states.items() if not state.dumped]
            if not missing:
                continue
            replies = self._line.ask([("DUMP", key) for key, _ in missing], db)
            for (key, state), reply in zip(missing, replies, strict=True):
                if isinstance(reply, Exception):
                    self._undumpable(db, key, reply)
                if reply is not None:  # None: it has just expired
                    state.dumped.append(reply)

    def _undumpable(self, db: int, key: bytes, error: Exception) -> NoReturn:
        self._stage.refuse(
            WorldError(
                f"{self.label} cannot DUMP {contents.as_text(key)!r} ({self._dbs[db][key].kind}): {error}. Without a"
                " copy the state before a crash cannot be put back. Use a real Redis server for this type, or keep it"
                " out of the job under test."
            )
        )

    def _changes(
        self, db: int, have: dict[bytes, KeyState], want: dict[bytes, KeyState], lead: int
    ) -> Iterator[Command]:
        gone = [key for key in have if key not in want]
        if gone:
            yield ("DEL", *gone)
        for key, state in want.items():
            old = have.get(key)
            same = old is state or (old is not None and old.holds(state.kind, state.body))
            if not same:
                self._deadlines.pop((db, key), None)
                yield ("RESTORE", key, 0, state.dumped[0], "REPLACE")
            if state.expiry is not None:
                due, known = state.expiry - lead, self._deadlines.get((db, key))
                # A real clock runs on between restores; a few milliseconds are not worth a command for each key.
                if known is None or abs(due - known) > (0 if self._fake is not None else 50):
                    self._deadlines[db, key] = due
                    yield ("PEXPIREAT", key, due)
            elif same and old is not None and old.expiry is not None:
                self._deadlines.pop((db, key), None)
                yield ("PERSIST", key)


def _over(state: KeyState, now: int) -> bool:
    return state.expiry is not None and state.expiry < now


def _fake_value(value: Any) -> tuple[str, Any]:
    """The type and the contents of a value of fakeredis, as its server would answer; "" if we do not know the type."""
    if isinstance(value, bytes):
        return "string", value
    if isinstance(value, list):
        return "list", value
    kind = contents.as_text(value.model_type())
    if kind == "hash":
        return kind, value.getall()
    if kind == "set":
        return kind, list(value)
    if kind == "zset":
        return kind, dict(value.items())
    return "", None


def _hang_up(connection: Any) -> None:
    """End a connection of the job, and all that the server or the client kept for it."""
    connection.__dict__.pop("read_response", None)
    for party in (*_cache_proxies(connection), connection):
        with contextlib.suppress(Exception):
            party.disconnect()


def _cache_proxies(connection: Any) -> list[Any]:
    """What caches replies on the client's side for this connection: memory of the process that is gone."""
    callbacks = [reference() for reference in getattr(connection, "_connect_callbacks", ())]
    parties = [getattr(callback, "__self__", None) for callback in callbacks]
    return [party for party in parties if hasattr(party, "_cache") and hasattr(party, "disconnect")]


def info(line: Line, section: str) -> dict[str, str]:
    reply = line.ask([("INFO", section)])[0]
    if isinstance(reply, Exception):
        raise WorldError(
            f"A Redis server does not answer INFO {section}: {reply}. Without it nobody can tell whether it is safe to"
            " rewind that server, so the check does not touch it."
        )
    lines = str(contents.as_text(reply)).splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


@dataclass(slots=True, eq=False)
class Wire:
    """What is known of a connection of the job: its server, and the state that a server keeps for it."""

    db: int
    sock: Any = None
    server: RedisServer | None = None
    queued: list[Call] | None = None
    """Since a MULTI that was sent by itself."""
    announced: bool = False
    """What is being sent is known already."""


class RedisSource:
    """Sees every command of redis-py's synchronous clients, and finds the servers that they go to."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._wires: weakref.WeakKeyDictionary[Any, Wire] = weakref.WeakKeyDictionary()
        self._servers: dict[Any, RedisServer] = {}
        self._publishing: set[Any] = set()
        """SHA of scripts that call PUBLISH."""
        self._patched: list[tuple[type, str, Any]] = []

    def install(self) -> None:
        if self._patched:
            return
        connection, pipeline = redis.connection.AbstractConnection, redis.client.Pipeline
        self._patch(connection, "send_command", self._send_command)
        self._patch(connection, "send_packed_command", self._send_packed_command)
        self._patch(pipeline, "_execute_transaction", self._execute_transaction)
        self._patch(pipeline, "_execute_pipeline", self._execute_pipeline)
        self._patch(redis.asyncio.connection.AbstractConnection, "send_packed_command", self._refuse_async)

    def end_delivery(self) -> None:
        """Connections that never got further than their greeting belong to no server; they go as well."""
        for connection, wire in list(self._wires.items()):
            if wire.server is None:
                _hang_up(connection)
        self._wires.clear()

    def uninstall(self) -> None:
        while self._patched:
            owner, name, original = self._patched.pop()
            setattr(owner, name, original)

    def _patch(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        original = owner.__dict__[name]
        self._patched.append((owner, name, original))
        setattr(owner, name, make(original))

    # -- the hooks ---------------------------------------------------------------------------------------------------

    def _send_command(self, original: Any) -> Any:
        def send_command(connection: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._stage.running or (wire := self._wire(connection)).announced:
                return original(connection, *args, **kwargs)
            call = contents.call_of(args)
            if self._is_no_step(connection, wire, call):
                sent = _send(wire, original, connection, *args, **kwargs)
                self._note(connection, wire, call)
                return sent
            if call.name == "EXEC":
                return self._exec(connection, wire, original, args, kwargs)
            wait = _blocking_time(call)
            self._step(connection, wire, [call], call.text)
            sent = _send(wire, original, connection, *(args if wait is None else _impatient(call)), **kwargs)
            self._published(connection, wire, [call])
            if wait is not None:
                seconds, server = wait or None, self._server(connection, wire)
                _on_reply(
                    connection,
                    lambda reply: None if reply else self._waited(call, seconds),
                    lambda: server.hurry(connection),
                )
            return sent

        return send_command

    def _send_packed_command(self, original: Any) -> Any:
        def send_packed_command(connection: Any, command: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._stage.running or (wire := self._wire(connection)).announced:
                return original(connection, command, *args, **kwargs)
            pieces = [command] if isinstance(command, (str, bytes)) else list(command)
            packed = b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces)
            calls = contents.calls_in(packed)
            if calls is None:
                calls = [Call("(unreadable)", "", (packed,))]
            if wire.queued is not None:  # a MULTI went before, alone
                if all(call.name != "EXEC" for call in calls):
                    self._server(connection, wire)
                    calls, queued = [], calls
                    wire.queued += queued
                else:
                    calls = [Call("MULTI", "", ()), *wire.queued, *calls]
            steps = [call for call in calls if call.name not in contents.SILENT and call.name != "EXEC"]
            if steps:
                self._step(connection, wire, steps, " ".join(call.text for call in calls))
            sent = _send(wire, original, connection, pieces, *args, **kwargs)
            self._published(connection, wire, steps)
            for call in calls:
                self._note(connection, wire, call)
            return sent

        return send_packed_command

    def _execute_transaction(self, original: Any) -> Any:
        def _execute_transaction(pipeline: Any, connection: Any, commands: Any, raise_on_error: bool) -> Any:
            if not self._stage.running or (wire := self._wire(connection)).announced:
                return original(pipeline, connection, commands, raise_on_error)
            calls = [contents.call_of(args) for args, _ in commands]
            self._step(connection, wire, calls, _transaction_text(calls))
            responses = _send(wire, original, pipeline, connection, commands, False)
            done = [call for call, reply in zip(calls, responses, strict=True) if not isinstance(reply, Exception)]
            self._published(connection, wire, done)
            if raise_on_error:
                pipeline.raise_first_error(commands, responses)
            return responses

        return _execute_transaction

    def _execute_pipeline(self, original: Any) -> Any:
        def _execute_pipeline(pipeline: Any, connection: Any, commands: Any, raise_on_error: bool) -> Any:
            if not self._stage.running or (wire := self._wire(connection)).announced:
                return original(pipeline, connection, commands, raise_on_error)
            responses = []
            for command in commands:  # a process can die between any two of them
                call = contents.call_of(command[0])
                silent = self._is_no_step(connection, wire, call)
                if not silent:
                    self._step(connection, wire, [call], call.text)
                reply = _send(wire, original, pipeline, connection, [command], False)[0]
                responses.append(reply)
                if silent:
                    self._note(connection, wire, call)
                elif not isinstance(reply, Exception):
                    self._published(connection, wire, [call])
            if raise_on_error:
                pipeline.raise_first_error(commands, responses)
            return responses

        return _execute_pipeline

    def _refuse_async(self, original: Any) -> Any:
        async def send_packed_command(connection: Any, *args: Any, **kwargs: Any) -> Any:
            if self._stage.running:
                self._stage.refuse(
                    WorldError(
                        "The job used redis.asyncio, which is not supported: its commands cannot be made steps, so a"
                        " verdict would not cover them. Use redis-py's synchronous client in the job under test."
                    )
                )
            return await original(connection, *args, **kwargs)

        return send_packed_command

    # -- what a command means ----------------------------------------------------------------------------------------

    def _is_no_step(self, connection: Any, wire: Wire, call: Call) -> bool:
        if call.name in contents.SILENT:
            return True
        if wire.queued is not None and call.name != "EXEC":
            self._server(connection, wire)  # whose end_delivery tells if no EXEC follows
            return True
        if call.name != "EVALSHA" or not call.args:
            return False
        # One that is not loaded is only answered with NOSCRIPT, and tried again once it is. Later runs find it loaded,
        # and must not show a step less.
        server = self._server(connection, wire)
        if server.knows_script(call.args[0]):
            return False
        server.mark(wire.db, None, "string")  # in case another connection knows better than ours
        self._stage.touched(server)
        return True

    def _note(self, connection: Any, wire: Wire, call: Call) -> None:
        """Follow the state that a server keeps for a connection."""
        wire.sock = connection._sock
        if call.name == "SELECT":
            with contextlib.suppress(ValueError):
                wire.db = int(call.args[0])
        elif call.name == "RESET":
            wire.db, wire.queued = 0, None
        elif call.name == "MULTI":
            wire.queued = []
        elif call.name in ("DISCARD", "EXEC"):
            wire.queued = None
        elif call.name == "SCRIPT":
            self._note_script(connection, wire, call)
        elif wire.queued is not None:
            wire.queued.append(call)

    def _note_script(self, connection: Any, wire: Wire, call: Call) -> None:
        if call.sub == "FLUSH":
            self._server(connection, wire).forget_scripts()
        elif call.sub == "LOAD" and call.args and _publishes(call.args[0]):
            source = connection.encoder.encode(call.args[0])
            self._publishing.add(hashlib.sha1(source, usedforsecurity=False).hexdigest())

    def _exec(self, connection: Any, wire: Wire, original: Any, args: Command, kwargs: dict[str, Any]) -> Any:
        """An EXEC that was sent by itself."""
        calls, wire.queued = wire.queued or [], None
        self._step(connection, wire, calls, _transaction_text(calls))
        sent = _send(wire, original, connection, *args, **kwargs)
        _on_reply(connection, lambda reply: self._published(connection, wire, calls) if reply is not None else None)
        return sent

    def _step(self, connection: Any, wire: Wire, calls: Sequence[Call], text: str) -> None:
        """Here is a boundary; after it, note what the commands are about to change."""
        server = self._server(connection, wire)
        # Values are for people, and cost more than the rest of the step.
        detail = "; ".join(call.detail for call in calls) if self._stage.traced else text
        self._stage.step("redis", server, text, detail)
        for call in calls:
            if call.name in _SUSPICIOUS:
                self._suspect(server, call)
            keys = call.keys()
            if keys == ():
                continue
            if keys is not None:
                encode = connection.encoder.encode
                with contextlib.suppress(redis.DataError):  # the command will fail for the same reason
                    server.mark(
                        wire.db, [bytes(encode(key)) for key in keys], contents.FIRST_KEY.get(call.name, "string")
                    )
            else:
                server.mark(wire.db, None, "string")
            self._stage.touched(server)

    def _suspect(self, server: RedisServer, call: Call) -> None:
        if call.name in contents.FIELD_EXPIRY:
            self._stage.doubt(
                f"{call.text} lets fields of a hash expire: {server.label} is compared without these expiries."
            )
        elif call.sub in contents.UNSEEN.get(call.name, ()):
            self._stage.doubt(f"{call.text} changes {server.label} itself, which is neither compared nor put back.")
        elif call.args and (call.args[0] in self._publishing or _publishes(call.args[0])):
            self._stage.doubt(f"a Lua script on {server.label} calls PUBLISH: what it publishes is not in the ledger.")

    def _published(self, connection: Any, wire: Wire, calls: Sequence[Call]) -> None:
        for call in calls:
            if call.name in ("PUBLISH", "SPUBLISH") and len(call.args) == 2:
                channel, message = (contents.as_text(bytes(connection.encoder.encode(arg))) for arg in call.args)
                self._server(connection, wire).publish((call.name, channel, message))

    def _waited(self, call: Call, seconds: float | None) -> None:
        """Nothing came. Nobody else is running, so the whole time would have passed."""
        sleep = getattr(self._stage, "sleep", None)
        if sleep is not None:
            sleep(seconds)
        elif seconds is None:
            self._stage.refuse(
                WorldError(
                    f"{call.detail} waits for ever: there is nothing to take, and nobody else runs who could bring it."
                    " Put something there before the check, or give the command a timeout."
                )
            )

    # -- finding servers ---------------------------------------------------------------------------------------------

    def _wire(self, connection: Any) -> Wire:
        wire = self._wires.get(connection)
        sock = connection._sock
        if wire is None:
            wire = self._wires[connection] = Wire(connection.db or 0, sock)
        elif wire.sock is not sock:  # it has been connected again: the server knows nothing of what was before
            wire.db, wire.sock, wire.queued = connection.db or 0, sock, None
        return wire

    def _server(self, connection: Any, wire: Wire) -> RedisServer:
        if wire.server is None:
            try:
                wire.server = self._find(connection)
            except WorldError as problem:  # must not look like a failure of the job
                self._stage.refuse(problem)
        wire.server.connections[connection] = wire
        return wire.server

    def _find(self, connection: Any) -> RedisServer:
        fake = getattr(connection, "_server", None)
        place: Any = id(fake) if fake is not None else _address(connection)
        server = self._servers.get(place)
        if server is None:
            line = Line(connection, self._stage)
            server = self._fake_server(line, fake) if fake is not None else self._real_server(line, connection)
            self._servers[place] = server
        return server

    def _fake_server(self, line: Line, fake: Any) -> RedisServer:
        if not hasattr(fake, "script_cache"):
            raise WorldError(
                "This fakeredis is too old: each of its connections has scripts of its own, so a Redis lock would not"
                " work as it does on a server. Install a newer one (2.41 is known to do)."
            )
        others = sum(server.label.startswith("fakeredis") for server in self._servers.values())
        label = f"fakeredis {others + 1}" if others else "fakeredis"
        return self._adopt(f"redis:fake:{_fake_name(fake)}", label, line, fake)

    def _real_server(self, line: Line, connection: Any) -> RedisServer:
        address = _address(connection)
        about = info(line, "server")
        mode = "sentinel" if "Sentinel" in type(connection).__name__ else about.get("redis_mode", "standalone")
        if mode != "standalone":
            line.hang_up()
            self._stage.refuse(
                WorldError(
                    f"redis {address} is used through {mode}, which is not supported: the check must see and rewind all"
                    " that a job touches, on one server. Point the client at a single scratch server in tests."
                )
            )
        run = about.get("run_id")
        if run in self._servers:  # the same server by another address
            line.hang_up()
            return self._servers[run]
        name = f"redis:{address}"
        if not self._is_ours(name, line):
            self._refuse_data(line, address)
        server = self._adopt(name, f"redis {address}", line, None)
        if run:
            self._servers[run] = server
        return server

    def _is_ours(self, name: str, line: Line) -> bool:
        """Nothing is there but what the check before this one left."""
        return name in _left and RedisServer(self._stage, name, name, line).rows() <= _left[name]

    def _refuse_data(self, line: Line, address: str) -> None:
        scratch = {contents.address_of_url(url) for url in self._stage.options("scratch")}
        held = {} if address in scratch else info(line, "keyspace")
        if not held:
            return
        line.hang_up()
        url = f"unix://{address}" if address.startswith("/") else f"redis://{address}"
        where = "; ".join(f"{db} has {facts.split(',')[0].removeprefix('keys=')} keys" for db, facts in held.items())
        self._stage.refuse(
            WorldError(
                f"The Redis server at {address} is not empty ({where}). A check rewinds the whole server again and"
                " again, all databases of it, so it never touches one that may hold somebody's data; nothing was"
                f' changed. If this server is there for tests, say so: scratch=["{url}"].'
                " What it holds now is then kept, and put back after every run."
            )
        )

    def _adopt(self, name: str, label: str, line: Line, fake: Any) -> RedisServer:
        known = self._stage.find(name)
        if isinstance(known, RedisServer):
            line.hang_up()
            return known
        server = RedisServer(self._stage, name, label, line, fake)
        self._stage.adopt(server)
        return server


_SUSPICIOUS = contents.FIELD_EXPIRY | contents.UNSEEN.keys() | {"EVAL", "EVALSHA"}
_TIMEOUT_LAST = frozenset(("BLPOP", "BRPOP", "BRPOPLPUSH", "BLMOVE", "BZPOPMIN", "BZPOPMAX", "WAIT", "WAITAOF"))
_TIMEOUT_FIRST = frozenset(("BLMPOP", "BZMPOP"))
_BLOCK_OPTION = frozenset(("XREAD", "XREADGROUP"))
_BLOCKING = _TIMEOUT_LAST | _TIMEOUT_FIRST | _BLOCK_OPTION


def _send(wire: Wire, original: Any, *args: Any, **kwargs: Any) -> Any:
    wire.announced = True
    try:
        return original(*args, **kwargs)
    finally:
        wire.announced = False


def _transaction_text(calls: Sequence[Call]) -> str:
    return " ".join(["MULTI", *(call.text for call in calls), "EXEC"])


def _on_reply(connection: Any, then: Callable[[Any], None], first: Callable[[], None] | None = None) -> None:
    """Call `first` before and `then` with the next reply that is read. On the instance: other commands pay nothing."""
    read_response = connection.read_response

    def once(*args: Any, **kwargs: Any) -> Any:
        connection.__dict__.pop("read_response", None)
        if first is not None:
            first()
        reply = read_response(*args, **kwargs)
        then(reply)
        return reply

    connection.read_response = once


def _publishes(script: Any) -> bool:
    return b"publish" in script.lower() if isinstance(script, bytes) else "publish" in str(script).lower()


def _blocking_time(call: Call) -> float | None:
    """How long, in seconds, the command waits if there is nothing; 0 for ever; None: it does not wait."""
    if call.name not in _BLOCKING:
        return None
    try:
        if call.name in _BLOCK_OPTION:
            at = _block_option(call.args)
            return None if at is None else float(call.args[at + 1]) / 1000
        last = call.name in _TIMEOUT_LAST
        return float(call.args[-1 if last else 0]) / (1000 if call.name.startswith("WAIT") else 1)
    except (ValueError, IndexError, TypeError):
        return None  # the server will say what is wrong


def _block_option(args: Command) -> int | None:
    for position, arg in enumerate(args):
        word = str(contents.as_text(arg)).upper()
        if word == "STREAMS":
            return None
        if word == "BLOCK":
            return position
    return None


def _impatient(call: Call) -> Command:
    """The same command, but it comes back at once."""
    if call.name in _BLOCK_OPTION:
        at = _block_option(call.args)
        assert at is not None
        return (call.name, *call.args[:at], *call.args[at + 2 :])
    soon: Any = 1 if call.name.startswith("WAIT") else 0.001  # zero would be for ever
    return (call.name, *call.args[:-1], soon) if call.name in _TIMEOUT_LAST else (call.name, soon, *call.args[1:])


def _address(connection: Any) -> str:
    path = getattr(connection, "path", None)
    return os.path.realpath(path) if path else contents.tcp_address(connection.host, connection.port)


def _fake_name(fake: Any) -> str:
    """The name of a server of fakeredis, the same in all processes of a check and, if its user named it, in others."""
    shared: dict[str, Any] = getattr(type(fake), "_servers_map", {})
    for name, server in shared.items():
        if server is fake and not re.match("[0-9a-f]{32}:", name):
            return name
    return f"{id(fake):x}"
