"""A Redis server as a resource. Only what a command may have changed is read again.

A state is restored by its difference to what is there: never FLUSHALL, and no key that is right already is touched.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

import redis

from retrychaos.model.errors import WorldError
from retrychaos.model.ledger import Relation, Row, Version
from retrychaos.world import redis_fake
from retrychaos.world.redis_clients import hang_up
from retrychaos.world.redis_commands import Call, Command, as_text
from retrychaos.world.redis_contents import KeyState, Seen, Snapshot, granted, read_key
from retrychaos.world.redis_line import Line, info
from retrychaos.world.resource import Plain, Stage

_KEY_COLUMNS = ("key", "type", "field", "value", "ttl")
_PUBLISHED = "redis publish"
_LAG = 60
"""Milliseconds between a command and the look at what it has done."""
_STAY = 250
"""Those for which a key stays that ends right now, which is past only when the virtual clock has moved on."""

left: dict[str, frozenset[tuple[Any, ...]]] = {}
"""What the check before this one left on each server. It is no stranger's data if it is all that is there."""


@dataclass(slots=True, eq=False)
class Wire:
    """What is known of a connection of the job: its server, and the state that a server keeps for it."""

    db: int
    session: Any = None
    """Its socket, or what stands for it; another one when it has been connected again."""
    server: RedisServer | None = None
    queued: list[Call] | None = None
    """Since a MULTI that was sent by itself."""
    announced: bool = False
    """What is being sent is known already."""
    owner: object = None
    """The delivery that used it last, where several run."""
    watching: bool = False
    """A WATCH is on."""


class RedisServer(Plain):
    """One server with all its databases. `fake` is the server object of fakeredis, None for a real one."""

    def __init__(self, stage: Stage, name: str, label: str, line: Line, fake: Any = None) -> None:
        self.name = name
        self.label = label
        self.connections: weakref.WeakKeyDictionary[Any, Wire] = weakref.WeakKeyDictionary()
        self._stage = stage
        self._line = line
        self._fake = fake
        self._direct = fake is not None and redis_fake.can_peek(fake)
        self._dbs: dict[int, dict[bytes, KeyState]] = {}
        self._published: tuple[Row, ...] = ()
        self._deadlines: dict[tuple[int, bytes], int] = {}
        """When keys end by the server's own clock, in milliseconds, as last seen or set."""
        self._dirty: dict[tuple[int, bytes], str] = {}
        self._all_dirty = False
        self._scripts: set[Any] = set()
        self._saved: tuple[Version, Snapshot] | None = None
        self.commits = 0
        absolute = not isinstance(line.ask([("PEXPIRETIME", "retrychaos")])[0], Exception)
        self._when, self._slack = ("PEXPIRETIME", 3) if absolute else ("PTTL", 30)
        self.version = Version({})
        self._find_all()

    def move(self, line: Line, fake: Any) -> None:
        """The job has made the server anew: it goes on there from the state that it was in."""
        if fake is self._fake:
            return
        version, snapshot = self.version, self.save()
        self._line.hang_up()
        self._line, self._fake = line, fake
        self._scripts.clear()
        self._read_all()
        self.restore(version, snapshot)

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

    def hurry(self, answered: Callable[[], bool]) -> None:
        """Wake an idle server, which otherwise looks only ten times a second whether a client has waited enough."""
        while self._fake is None and not answered():
            self._line.ask([("PING",)])

    def knows_script(self, sha: Any) -> bool:
        if sha not in self._scripts and self._line.ask([("SCRIPT", "EXISTS", sha)])[0] == [1]:
            self._scripts.add(sha)
        return sha in self._scripts

    def forget_scripts(self) -> None:
        self._scripts.clear()

    # -- Resource ----------------------------------------------------------------------------------------------------

    @property
    def private(self) -> bool:
        return self._fake is not None

    def refresh(self) -> Version:
        if self._all_dirty:
            self.commits += 1
            return self.sweep()
        now = self._now()
        if self.version.expiries and self.version.expiries[0] * 1000 < now:
            self._dirty.update((place, state.kind) for place, state in self._states() if _over(state, now))
        if self._dirty:
            self.commits += 1
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
        lead = self._lead(now) if ends else 0
        for db in sorted({*self._dbs, *target}):
            commands = list(self._changes(db, self._dbs.get(db, {}), target.get(db, {}), lead))
            if not commands:
                continue
            for command, reply in zip(commands, self._line.ask(commands, db), strict=True):
                if isinstance(reply, Exception):
                    raise WorldError(
                        f"{self.label} could not be put back: {command[0]} of {as_text(command[1])!r} in"
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
            hang_up(connection)
        self.connections.clear()
        return lines

    alone = ""

    def holds(self, owner: object) -> str:
        wires = [wire for wire in self.connections.values() if wire.owner is owner]
        return "watch" if any(wire.watching or wire.queued is not None for wire in wires) else ""

    def shift(self, seconds: float) -> None:
        if self._fake is None:
            self._hasten(round(seconds * 1000))

    def land(self, ahead: float) -> None:
        if self._fake is None:
            return  # restore() has put keys on the server's own clock
        for db, states in self._dbs.items():
            ends = [(key, state.expiry) for key, state in states.items() if state.expiry is not None]
            if ends:
                self._line.ask([("PEXPIREAT", key, round(end - ahead * 1000)) for key, end in ends], db)

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
        left[self.name] = self.rows()
        with contextlib.suppress(Exception):
            self.end_delivery()
        with contextlib.suppress(Exception):
            self._line.hang_up()

    # -- reading -----------------------------------------------------------------------------------------------------

    def _find_all(self) -> None:
        """Keys from before the check have been ending since it began, whoever comes to the server first, and when."""
        began = round(self._stage.began * 1000)
        self._read_all(began)
        if self._fake is None and self._now() > began:
            self._hasten(self._now() - began)

    def _read_all(self, now: int | None = None) -> None:
        self._dirty, self._all_dirty = {}, False
        wanted = {}
        for db in self._used_databases():
            have = self._dbs.get(db, {})
            for key in self._line.ask([("KEYS", "*")], db)[0] if not self._direct else list(self._fake.dbs[db]):
                wanted[db, key] = have[key].kind if key in have else "string"
        found = self._read(wanted)
        self._take({**dict.fromkeys(place for place, _ in self._states()), **found}, now)

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
        try:
            return redis_fake.peek(self._fake, db, key, self._stage.now())
        except (AttributeError, TypeError):
            self._direct = False
            return NotImplemented

    def _read_database(self, db: int, keys: dict[bytes, str]) -> dict[tuple[int, bytes], Seen | None]:
        def stranger(key: bytes) -> Callable[[str], None]:
            return lambda kind: self._stage.doubt(
                f"{self.label} holds {as_text(key)!r}, whose type {kind} cannot be read: it is compared by its"
                " DUMP, which may differ where the contents do not."
            )

        programs = [(key, read_key(key, keys[key], (self._when, key), stranger(key))) for key in keys]
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
                f"{self.label}: {as_text(key)!r} in database {db} cannot be read ({error}), so nobody can tell"
                " what a crash leaves there. Give the client of the job a user that may read everything."
            )
        )

    def _take(self, found: dict[tuple[int, bytes], Seen | None], now: int | None = None) -> None:
        """now: the virtual time at which they were like that, in milliseconds."""
        fresh: dict[int, dict[bytes, KeyState]] = {}
        now = self._now() if now is None else now
        lead: int | None = None
        for (db, key), seen in found.items():
            old = self._dbs.get(db, {}).get(key)
            if seen is not None and seen.deadline is not None and lead is None:
                lead = self._lead(now)
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
                ttl = granted(expiry - now)
                whole = now + round(ttl * 1000)
                if self._fake is None and abs(whole - expiry) <= _LAG:
                    expiry = whole  # the virtual clock has stood still since it was granted, that of the server has not
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
        ending = {
            state.expiry / 1000: f"the Redis key {as_text(key)}"
            for states in self._dbs.values()
            for key, state in states.items()
            if state.expiry is not None
        }
        return Version(relations, tuple(sorted(ending)), ending)

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

    def _lead(self, now: int) -> int:
        """How far the virtual clock is ahead of the server's."""
        # Not even the milliseconds between two looks at the clock, where both are one.
        return 0 if self._fake is not None else now - self._clock()

    def _hasten(self, by: int) -> None:
        """The virtual clock has moved on: bring the ends of keys nearer, where the server's clock has not moved."""
        if not self._deadlines:
            return
        now, clock = self._now(), self._clock()
        moved = {place: self._nearer(place, due - by, now, clock) for place, due in self._deadlines.items()}
        for db in sorted({db for db, _ in moved}):
            self._line.ask([("PEXPIREAT", key, due) for (where, key), due in moved.items() if where == db], db)
        self._deadlines = moved

    def _nearer(self, place: tuple[int, bytes], due: int, now: int, clock: int) -> int:
        """When a key ends by the server's clock, which goes on by itself: not while it lives by the virtual one."""
        state = self._dbs.get(place[0], {}).get(place[1])
        if state is None or state.expiry is None:
            return due
        left = state.expiry - now
        return min(due, clock - 1) if left < 0 else clock + (left if left > _LAG else _STAY)

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
                f"{self.label} cannot DUMP {as_text(key)!r} ({self._dbs[db][key].kind}): {error}. Without a"
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
