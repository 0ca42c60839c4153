"""Random small jobs whose deliveries overlap: programs of a few operations that observe, decide and write.

A program is plain data whose repr can be pasted into a test. What it runs on is a *place*: the tool's world
(SQLAlchemy, redis-py, a watched call) or plain connections in real processes. Places note what they answer in a trace:
what a delivery knows, independent of what the tool believes that it knows.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

Operation: TypeAlias = tuple[Any, ...]

SCHEMA = """
    CREATE TABLE counters (id INTEGER PRIMARY KEY, n INTEGER NOT NULL);
    CREATE TABLE notes (id INTEGER PRIMARY KEY, what TEXT NOT NULL);
    CREATE TABLE once (key TEXT PRIMARY KEY);
    INSERT INTO counters VALUES (1, 0), (2, 0);
    INSERT INTO once VALUES ('taken');
"""


def furnish(path: Path, journal: str) -> None:
    """The database as before the first delivery."""
    for each in path.parent.glob(f"{path.name}*"):
        each.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA page_size = 512")
        connection.execute(f"PRAGMA journal_mode = {journal}")
        connection.executescript(SCHEMA)


MOST_TRIES = 2
"""How often a block is tried that goes on ``again`` after an error."""


class Refused(Exception):
    """The database has refused a statement. Jobs catch this whatever the driver calls it."""


class Duplicate(Refused):
    """A unique constraint."""


class Locked(Refused):
    """Another transaction is in the way."""


class Nack(Exception):
    """The job raises by itself."""


class Unfit(Exception):
    """A job that is no use."""


class Sql(Protocol):
    """One connection of a job, in transactions that begin by themselves with the first statement."""

    def run(self, statement: str, **values: Any) -> tuple[list[tuple[Any, ...]], int]:
        """Rows, and how many rows were changed."""
        ...

    def commit(self) -> None: ...
    def rollback(self) -> None: ...


class Place(Protocol):
    """What a job runs on."""

    def connect(self, database: int, style: str) -> AbstractContextManager[Sql]:
        """A connection to one of the databases. At the end of the block what is not committed is rolled back."""
        ...

    def redis(self, command: str, key: str) -> Any: ...
    def send(self, what: str) -> None: ...
    def note(self, *what: Any) -> None:
        """The running delivery has got to know this."""
        ...


STYLES = ("", "BEGIN", "BEGIN IMMEDIATE", "AUTOCOMMIT")
"""How a transaction begins: as the driver does it (before the first write), by a statement, or never."""
RAW_STYLES = ("RAW", "RAW BEGIN", "RAW BEGIN IMMEDIATE")
"""The same past SQLAlchemy, on a connection from its pool; with a statement that begins, another one commits."""


@dataclass(frozen=True)
class Block:
    """Operations on one connection.

    after_error: what follows when the database refuses something: "" the job fails, "skip" it goes on behind the block,
    "stop" it returns, "again" the block is tried once more; always after a rollback. end: "commit" or "rollback".
    """

    operations: tuple[Operation, ...]
    style: str = ""
    database: int = 0
    after_error: str = ""
    end: str = "commit"


class _Leave(Exception):
    """Go on behind the operations of this block."""


class _Stop(Exception):
    """The job returns."""


@dataclass(frozen=True)
class Program:
    """A job: blocks, and operations outside of any database."""

    parts: tuple[Block | Operation, ...]

    def __call__(self, place: Place) -> None:
        run = _Running(place)
        place.note("begins")
        try:
            for part in self.parts:
                if isinstance(part, Block):
                    run.block(part)
                else:
                    run.operation(part, None)
        except _Stop:
            pass
        except _Leave:
            pass

    @property
    def names(self) -> set[str]:
        """Of all operations."""
        return {name for part in self.parts for name in _names(part)}

    @property
    def blocks(self) -> Iterator[Block]:
        for part in self.parts:
            if isinstance(part, Block):
                yield part
                yield from (each[1] for each in part.operations if each[0] == "inner")


def _names(part: Block | Operation) -> Iterator[str]:
    if isinstance(part, Block):
        for operation in part.operations:
            yield from _names(operation)
        return
    yield part[0]
    if part[0] == "inner":
        yield from _names(part[1])
    if part[0] == "savepoint":
        for operation in part[1:]:
            yield from _names(operation)


class _Running:
    """One delivery of a program. `got` is the last answer, as a number."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.got = 0

    def block(self, block: Block) -> None:
        for number in range(MOST_TRIES):
            with self.place.connect(block.database, block.style) as sql:
                try:
                    try:
                        for operation in block.operations:
                            self.operation(operation, sql)
                    except _Leave:
                        pass
                    (sql.commit if block.end == "commit" else sql.rollback)()
                    return
                except Refused:
                    sql.rollback()
                    if block.after_error == "" or (block.after_error == "again" and number == MOST_TRIES - 1):
                        raise
            if block.after_error == "stop":
                raise _Stop
            if block.after_error == "skip":
                return

    def operation(self, operation: Operation, sql: Sql | None) -> None:
        name, *arguments = operation
        if name in _REDIS:
            self.got = int(self.place.redis(name, *arguments) or 0)
        elif name == "send":
            self.place.send(*arguments)
            self.place.note("sent", *arguments)
        elif name == "inner":
            self.block(*arguments)
        elif name == "savepoint":
            assert sql is not None
            self._savepoint(sql, arguments)
        elif name in _CONTROL:
            _CONTROL[name](self.got == arguments[0])
        else:
            assert sql is not None
            answer = _SQL[name](sql, self.got, *arguments)
            self.got = self.got if answer is None else answer

    def _savepoint(self, sql: Sql, operations: list[Operation]) -> None:
        """A refused statement takes back what was done since the savepoint, and the job goes on."""
        sql.run("SAVEPOINT here")
        try:
            for operation in operations:
                self.operation(operation, sql)
        except Duplicate:
            sql.run("ROLLBACK TO SAVEPOINT here")
        sql.run("RELEASE SAVEPOINT here")


def _stop(met: bool) -> None:
    if met:
        raise _Stop


def _leave(met: bool) -> None:
    if met:
        raise _Leave


def _fail(met: bool) -> None:
    if met:
        raise Nack


def _value(sql: Sql, got: int, counter: int) -> int:
    return int(sql.run("SELECT n FROM counters WHERE id = :id", id=counter)[0][0][0])


def _count(sql: Sql, got: int) -> int:
    return int(sql.run("SELECT count(*) FROM notes")[0][0][0])


def _exists(sql: Sql, got: int, key: str) -> int:
    return len(sql.run("SELECT 1 FROM once WHERE key = :key", key=key)[0])


def _insert(sql: Sql, got: int, what: str) -> None:
    sql.run("INSERT INTO notes (what) VALUES (:what)", what=what)


def _insert_got(sql: Sql, got: int) -> None:
    sql.run("INSERT INTO notes (what) VALUES (:what)", what=f"got {got}")


def _claim(sql: Sql, got: int, key: str) -> None:
    sql.run("INSERT INTO once (key) VALUES (:key)", key=key)


def _try_claim(sql: Sql, got: int, key: str) -> int:
    """1: it is ours. A refusal is caught, and the transaction goes on."""
    try:
        sql.run("INSERT INTO once (key) VALUES (:key)", key=key)
    except Duplicate:
        return 0
    return 1


def _claim_quietly(sql: Sql, got: int, key: str) -> int:
    return sql.run("INSERT INTO once (key) VALUES (:key) ON CONFLICT DO NOTHING", key=key)[1]


def _unclaim(sql: Sql, got: int, key: str) -> int:
    return sql.run("DELETE FROM once WHERE key = :key", key=key)[1]


def _bump(sql: Sql, got: int, counter: int) -> None:
    sql.run("UPDATE counters SET n = n + 1 WHERE id = :id", id=counter)


def _store(sql: Sql, got: int, counter: int) -> None:
    sql.run("UPDATE counters SET n = :n WHERE id = :id", n=got + 1, id=counter)


def _swap(sql: Sql, got: int, counter: int) -> int:
    return sql.run("UPDATE counters SET n = :n WHERE id = :id AND n = :was", n=got + 1, id=counter, was=got)[1]


def _lock(sql: Sql, got: int, counter: int, how: str) -> int:
    """The value of a counter, with a lock on it; -1 if it was skipped."""
    rows = sql.run(f"SELECT n FROM counters WHERE id = :id FOR {how}", id=counter)[0]
    return int(rows[0][0]) if rows else -1


def _pick(sql: Sql, got: int) -> int:
    """As from a queue: the first one that nobody else has locked is marked. 0 if there is none."""
    look = "SELECT id FROM counters WHERE n = 0 ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED"
    rows = sql.run(look)[0]
    if not rows:
        return 0
    sql.run("UPDATE counters SET n = 1 WHERE id = :id", id=rows[0][0])
    return 1


def _advise(sql: Sql, got: int, key: int) -> None:
    sql.run("SELECT pg_advisory_xact_lock(:key)", key=key)


def _try_advise(sql: Sql, got: int, key: int) -> int:
    return int(sql.run("SELECT pg_try_advisory_xact_lock(:key)", key=key)[0][0][0])


def _upsert(sql: Sql, got: int, counter: int) -> None:
    conflict = "ON CONFLICT (id) DO UPDATE SET n = counters.n + 1"
    sql.run(f"INSERT INTO counters (id, n) VALUES (:id, 1) {conflict}", id=counter)


def _refer(sql: Sql, got: int, counter: int) -> None:
    """A foreign key: locks what it refers to, but not against each kind of change."""
    sql.run("INSERT INTO refs (counter) VALUES (:id)", id=counter)


def _linked(sql: Sql, got: int, what: str) -> None:
    """Another row holds the number that the database has drawn."""
    note = sql.run("INSERT INTO notes (what) VALUES (:what) RETURNING id", what=what)[0][0][0]
    sql.run("INSERT INTO links (note) VALUES (:note)", note=note)


def _lock_table(sql: Sql, got: int, table: str, mode: str) -> None:
    sql.run(f"LOCK TABLE {table} IN {mode} MODE")


def _commit(sql: Sql, got: int) -> None:
    sql.commit()


def _rollback(sql: Sql, got: int) -> None:
    sql.rollback()


_SQL: dict[str, Callable[..., int | None]] = {
    "value": _value,
    "count": _count,
    "exists": _exists,
    "insert": _insert,
    "insert_got": _insert_got,
    "claim": _claim,
    "try_claim": _try_claim,
    "claim_quietly": _claim_quietly,
    "unclaim": _unclaim,
    "bump": _bump,
    "store": _store,
    "swap": _swap,
    "lock": _lock,
    "pick": _pick,
    "advise": _advise,
    "try_advise": _try_advise,
    "upsert": _upsert,
    "refer": _refer,
    "linked": _linked,
    "lock_table": _lock_table,
    "commit": _commit,
    "rollback": _rollback,
}
_CONTROL: dict[str, Callable[[bool], None]] = {"stop_if": _stop, "leave_if": _leave, "fail_if": _fail}
_REDIS = ("get", "set_once", "increment", "remove", "guarded_increment")


def smaller(program: Program) -> Iterator[Program]:
    """Simpler programs, to find the simplest that still shows something."""
    for number, part in enumerate(program.parts):
        for other in _smaller_parts(part):
            yield Program((*program.parts[:number], *other, *program.parts[number + 1 :]))


def _smaller_parts(part: Block | Operation) -> Iterator[tuple[Block | Operation, ...]]:
    yield ()
    if not isinstance(part, Block):
        return
    for number, operation in enumerate(part.operations):
        rest = (part.operations[:number], part.operations[number + 1 :])
        yield (replace(part, operations=rest[0] + rest[1]),)
        inner: list[tuple[Operation, ...]] = []
        if operation[0] == "inner":
            inner = [(("inner", *each),) for each in _smaller_parts(operation[1]) if each]
        if operation[0] == "savepoint":
            inner = [operation[1:]]
        yield from ((replace(part, operations=rest[0] + each + rest[1]),) for each in inner)
    for change in ({"style": ""}, {"database": 0}, {"after_error": ""}, {"end": "commit"}):
        changed = replace(part, **change)
        if changed != part:
            yield (changed,)


# -- random programs ------------------------------------------------------------------------------------------------


NAMES = (
    *("value", "value", "count", "exists", "exists"),
    *("insert", "insert_got", "claim", "try_claim", "claim_quietly", "unclaim", "bump", "bump", "store", "swap"),
    *("commit", "rollback", "savepoint"),
)
POSTGRES_NAMES = (
    *("value", "value", "count", "exists", "exists", "lock", "lock", "lock", "pick"),
    *("insert", "insert_got", "linked", "refer", "claim", "claim", "try_claim", "claim_quietly", "unclaim"),
    *("bump", "bump", "store", "store", "swap", "upsert", "upsert"),
    *("advise", "advise", "try_advise", "lock_table"),
    *("commit", "rollback", "savepoint", "savepoint"),
)
"""As often as it is there, an operation is chosen."""
LOCKS = ("UPDATE", "UPDATE", "SHARE", "SHARE", "NO KEY UPDATE", "KEY SHARE", "UPDATE NOWAIT", "UPDATE SKIP LOCKED")
TABLE_LOCKS = (("once", "EXCLUSIVE"), ("notes", "SHARE"), ("counters", "ACCESS EXCLUSIVE"), ("once", "ROW EXCLUSIVE"))


@dataclass(frozen=True)
class Kind:
    """What random programs are made of. steps: operations that touch something, at least and at most."""

    steps: tuple[int, int] = (2, 4)
    styles: tuple[str, ...] = STYLES
    redis: float = 0.0
    """How likely an operation is one on Redis."""
    sends: float = 0.1
    second: float = 0.0
    """How likely a block is on the second database."""
    inner: float = 0.05
    names: tuple[str, ...] = NAMES
    """Operations on a database."""


def random_program(chance: random.Random, kind: Kind) -> Program:
    """Some make sense, most do not."""
    left = chance.randint(*kind.steps)
    parts: list[Block | Operation] = []
    while left > 0:
        if chance.random() < kind.redis:
            parts += _outside(chance)
            left -= 1
        elif chance.random() < kind.sends:
            parts.append(("send", chance.choice("xy")))
            left -= 1
        else:
            size = chance.choice((1, 2, 2, 3, 3, left))
            size = min(size, left)
            parts.append(_block(chance, kind, size, chance.random() < kind.inner))
            left -= size
    return Program(tuple(parts))


def _outside(chance: random.Random) -> list[Operation]:
    name = chance.choice(_REDIS)
    operations: list[Operation] = [(name, chance.choice("ab"))]
    if name in ("get", "set_once", "guarded_increment") or chance.random() < 0.3:
        operations += _decision(chance, inside=False)
    return operations


def _block(chance: random.Random, kind: Kind, size: int, inner: bool) -> Block:
    operations: list[Operation] = []
    for number in range(size):
        if chance.random() < kind.redis / 2:
            operations += _outside(chance)
        elif chance.random() < kind.sends / 2:
            operations.append(("send", chance.choice("xy")))
        elif inner and number:
            operations.append(("inner", _block(chance, kind, 1, False)))
        else:
            operations += _inside(chance, kind.names)
    return Block(
        tuple(operations),
        chance.choice(kind.styles),
        int(chance.random() < kind.second),
        chance.choice(("", "", "skip", "stop", "again")),
        "rollback" if chance.random() < 0.07 else "commit",
    )


def _inside(chance: random.Random, names: tuple[str, ...]) -> list[Operation]:
    name = chance.choice(names)
    if name == "savepoint":
        return [("savepoint", *_simple(chance, chance.choice(("claim", "insert", "bump"))))]
    return _simple(chance, name)


def _simple(chance: random.Random, name: str) -> list[Operation]:
    if name == "insert":
        return [(name, chance.choice("xy"))]
    if name in ("claim", "try_claim", "claim_quietly", "unclaim", "exists"):
        operations: list[Operation] = [(name, chance.choice(("k", "k", "taken")))]
        return operations + (_decision(chance) if name not in ("claim", "unclaim") else [])
    if name in ("upsert", "refer", "advise", "try_advise", "linked", "pick", "lock", "lock_table"):
        return _on_postgres(chance, name)
    if name in ("bump", "store", "value"):
        return [(name, chance.choice((1, 1, 2))), *(_decision(chance) if name == "value" else [])]
    if name == "swap":
        counter = chance.choice((1, 2))
        read: list[Operation] = [("value", counter)] if chance.random() < 0.5 else []
        return [*read, (name, counter), *_decision(chance)]
    return [(name,), *(_decision(chance) if name == "count" else [])]


def _on_postgres(chance: random.Random, name: str) -> list[Operation]:
    if name == "lock":
        return [(name, chance.choice((1, 1, 2)), chance.choice(LOCKS)), *_decision(chance)]
    if name == "lock_table":
        return [(name, *chance.choice(TABLE_LOCKS))]
    if name == "linked":
        return [(name, chance.choice("xy"))]
    number = {"upsert": (1, 3), "refer": (1, 1, 2), "advise": (1, 1, 2), "try_advise": (1, 1, 2)}.get(name)
    operation: Operation = (name,) if number is None else (name, chance.choice(number))
    return [operation, *(_decision(chance) if name in ("pick", "try_advise") else [])]


def contended_program(chance: random.Random, kind: Kind) -> Program:
    """One that looks or locks, and then writes the same thing; perhaps something else beside it.

    steps of the kind: blocks.
    """
    first = (
        *(("value", 1), ("count",), ("exists", "k"), ("pick",), ("bump", 1), ("refer", 1), ("claim_quietly", "k")),
        *(("advise", 1), ("try_advise", 1), ("lock_table", *chance.choice(TABLE_LOCKS))),
        *(("lock", 1, how) for how in LOCKS),
    )
    then = (
        *(("bump", 1), ("store", 1), ("pick",), ("upsert", 1), ("insert_got",), ("linked", "x"), ("advise", 1)),
        *(("claim", "k"), ("claim_quietly", "k"), ("unclaim", "taken"), ("lock", 1, chance.choice(LOCKS))),
        ("savepoint", ("claim", "k")),
    )

    def block(*operations: Operation) -> Block:
        after_error = chance.choice(("", "skip", "stop", "again"))
        return Block(
            (*operations, *_decision(chance)[: chance.random() < 0.3]), chance.choice(kind.styles), 0, after_error
        )

    blocks = [block(chance.choice(first), chance.choice(then))]
    blocks += [block(chance.choice(then)) for _ in range(chance.randint(*kind.steps) - 1)]
    chance.shuffle(blocks)
    return Program(tuple(blocks))


def _decision(chance: random.Random, inside: bool = True) -> list[Operation]:
    """What was observed decides what follows."""
    if chance.random() < 0.35:
        return []
    names = ("stop_if", "leave_if", "leave_if", "fail_if") if inside else ("stop_if", "stop_if", "fail_if")
    return [(chance.choice(names), chance.choice((0, 0, 1, 1, 2)))]
