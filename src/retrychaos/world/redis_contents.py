"""What a Redis server holds, as plain rows: which commands may change which keys, and how each type is read.

Nothing here talks to a server. Reading a key is a small program (a generator) that yields commands and is sent their
replies, so that the programs of many keys share their round trips.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from retrychaos.model.ledger import Cell, Row

Command: TypeAlias = tuple[Any, ...]
Reply: TypeAlias = Any
"""What a server answered; a command that failed has its exception here."""

# -- commands --------------------------------------------------------------------------------------------------------


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


CONTAINERS = _words(
    "ACL CLIENT CLUSTER COMMAND CONFIG DEBUG FUNCTION LATENCY MEMORY MODULE OBJECT PUBSUB SCRIPT SLOWLOG XGROUP XINFO"
)
"""Commands that say nothing without their second word."""

SILENT = _words("HELLO AUTH SELECT PING ECHO QUIT RESET READONLY READWRITE ASKING CLIENT SCRIPT UNWATCH DISCARD MULTI")
"""No steps: they change a connection or a cache of the server, nothing that a later delivery could tell apart."""

READS = _words(
    """
    GET MGET GETRANGE SUBSTR STRLEN LCS GETBIT BITCOUNT BITPOS BITFIELD_RO EXISTS TTL PTTL EXPIRETIME PEXPIRETIME TYPE
    KEYS SCAN RANDOMKEY DBSIZE DUMP OBJECT MEMORY TOUCH SORT_RO PFCOUNT TIME INFO LASTSAVE ROLE COMMAND LOLWUT LATENCY
    SLOWLOG MODULE MONITOR WAIT WAITAOF WATCH DIGEST CONFIG ACL FUNCTION CLUSTER
    HGET HMGET HGETALL HKEYS HVALS HLEN HEXISTS HSTRLEN HSCAN HRANDFIELD HTTL HPTTL HEXPIRETIME HPEXPIRETIME
    LRANGE LINDEX LLEN LPOS SMEMBERS SISMEMBER SMISMEMBER SCARD SRANDMEMBER SSCAN SDIFF SINTER SINTERCARD SUNION
    ZRANGE ZREVRANGE ZRANGEBYSCORE ZREVRANGEBYSCORE ZRANGEBYLEX ZREVRANGEBYLEX ZSCORE ZMSCORE ZRANK ZREVRANK ZCARD
    ZCOUNT ZLEXCOUNT ZSCAN ZRANDMEMBER ZDIFF ZINTER ZINTERCARD ZUNION
    GEODIST GEOHASH GEOPOS GEOSEARCH GEORADIUS_RO GEORADIUSBYMEMBER_RO
    XRANGE XREVRANGE XLEN XREAD XPENDING XINFO
    SUBSCRIBE UNSUBSCRIBE PSUBSCRIBE PUNSUBSCRIBE SSUBSCRIBE SUNSUBSCRIBE PUBSUB PUBLISH SPUBLISH
    EVAL_RO EVALSHA_RO FCALL_RO JSON.GET JSON.MGET JSON.TYPE JSON.STRLEN JSON.ARRLEN JSON.OBJLEN JSON.OBJKEYS
    """
)
"""Leave every key as it is."""

_FIRST_KEY = {
    "string": """SET SETEX PSETEX SETNX SETRANGE GETSET GETEX GETDEL APPEND INCR INCRBY INCRBYFLOAT DECR DECRBY SETBIT
        BITFIELD PFADD EXPIRE PEXPIRE EXPIREAT PEXPIREAT PERSIST RESTORE""",
    "hash": """HSET HMSET HSETNX HDEL HINCRBY HINCRBYFLOAT HGETDEL HGETEX HSETEX HEXPIRE HPEXPIRE HEXPIREAT HPEXPIREAT
        HPERSIST""",
    "list": "LPUSH RPUSH LPUSHX RPUSHX LPOP RPOP LREM LSET LTRIM LINSERT",
    "set": "SADD SREM SPOP",
    "zset": "ZADD ZINCRBY ZREM ZPOPMIN ZPOPMAX ZREMRANGEBYRANK ZREMRANGEBYSCORE ZREMRANGEBYLEX GEOADD",
    "stream": "XADD XDEL XTRIM XACK XCLAIM XAUTOCLAIM XSETID XGROUP",
    "ReJSON-RL": "JSON.SET JSON.DEL JSON.FORGET JSON.NUMINCRBY JSON.STRAPPEND JSON.ARRAPPEND JSON.ARRPOP JSON.MERGE",
}
FIRST_KEY = {name: kind for kind, names in _FIRST_KEY.items() for name in names.split()}
"""Change the key in their first argument only; most often it is of this type."""

ANY_KEY = _words(
    """
    DEL UNLINK RENAME RENAMENX COPY MSETNX RPOPLPUSH LMOVE LMPOP BLPOP BRPOP BRPOPLPUSH BLMOVE BLMPOP SMOVE
    SDIFFSTORE SINTERSTORE SUNIONSTORE ZDIFFSTORE ZINTERSTORE ZUNIONSTORE ZRANGESTORE ZMPOP BZMPOP BZPOPMIN BZPOPMAX
    BITOP PFMERGE SORT GEORADIUS GEORADIUSBYMEMBER GEOSEARCHSTORE XREADGROUP
    """
)
"""Change keys among their arguments; which ones is found out by looking at all."""

UNSEEN = {
    "CONFIG": _words("SET RESETSTAT REWRITE"),
    "ACL": _words("SETUSER DELUSER LOAD SAVE"),
    "FUNCTION": _words("LOAD DELETE FLUSH RESTORE"),
    "MODULE": _words("LOAD LOADEX UNLOAD"),
}
"""Change the server itself, which is neither compared nor restored."""

FIELD_EXPIRY = _words("HEXPIRE HPEXPIRE HEXPIREAT HPEXPIREAT HGETEX HSETEX")


class Call(NamedTuple):
    """A command as the job sent it, with its name made uniform."""

    name: str
    sub: str
    args: Command

    @property
    def text(self) -> str:
        """The same for two runs of a deterministic job, whichever of them had to load the script."""
        name = _SAME_TEXT.get(self.name, self.name)
        return f"{name} {self.sub}" if self.sub else name

    @property
    def detail(self) -> str:
        return " ".join([self.text, *map(_short, self.args[:8]), *(["..."] if len(self.args) > 8 else [])])

    def keys(self) -> Command | None:
        """The arguments that may be keys which this command changes; None: any key of any database."""
        if self.name in READS:
            return ()
        if self.name in FIRST_KEY:
            return self.args[:1]
        if self.name == "MSET":
            return self.args[::2]
        if self.name in ANY_KEY and not (self.name == "COPY" and len(self.args) > 3):
            return self.args
        return None


_SAME_TEXT = {"EVALSHA": "EVAL", "EVALSHA_RO": "EVAL_RO"}
_NAMES: dict[Any, tuple[str, ...]] = {}


def call_of(args: Command) -> Call:
    """Parse what a client hands to a connection: the first argument may hold two words ("XGROUP CREATE")."""
    names = _NAMES.get(args[0])
    if names is None:
        text = args[0].decode("utf-8", "replace") if isinstance(args[0], bytes) else str(args[0])
        names = _NAMES[args[0]] = tuple(text.upper().split()) or ("",)
    name, rest = names[0], args[1:]
    if name not in CONTAINERS:
        return Call(name, "", rest)
    if len(names) > 1:
        return Call(name, names[1], rest)
    return Call(name, str(as_text(rest[0])).upper(), rest[1:]) if rest else Call(name, "", rest)


def calls_in(packed: bytes) -> list[Call] | None:
    """The commands in bytes that are ready for the wire; None if they are no whole commands."""
    calls, position = [], 0
    try:
        while position < len(packed):
            count, position = _header(packed, position, b"*")
            args = []
            for _ in range(count):
                length, position = _header(packed, position, b"$")
                args.append(packed[position : position + length])
                position += length + 2
            calls.append(call_of(tuple(args)))
    except (ValueError, IndexError):
        return None
    return calls


def _header(packed: bytes, position: int, mark: bytes) -> tuple[int, int]:
    end = packed.index(b"\r\n", position)
    if packed[position : position + 1] != mark:
        raise ValueError(position)
    return int(packed[position + 1 : end]), end + 2


def _short(arg: Any) -> str:
    text = arg if isinstance(arg, str) else str(as_text(arg)) if isinstance(arg, bytes) else repr(arg)
    return text if len(text) <= 40 else f"{text[:36]}..."


def as_text(value: bytes | Any) -> Any:
    """Text where the bytes are text, else the bytes."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


# -- keys ------------------------------------------------------------------------------------------------------------

Part: TypeAlias = tuple[Cell, Cell]
"""A field and a value: one row of a key."""


class Seen(NamedTuple):
    """A key as just read: `deadline` is when it ends by the clock of the server, in milliseconds."""

    kind: str
    deadline: int | None
    body: tuple[Part, ...]


@dataclass(frozen=True, eq=False, slots=True)
class KeyState:
    """One state of one key; shared by all versions of the server in which the key is the same.

    `expiry` is when it ends by the virtual clock, in milliseconds; `ttl` the time that it was granted, in seconds.
    """

    kind: str
    body: tuple[Part, ...]
    expiry: int | None
    ttl: float | None
    rows: tuple[Row, ...]
    dumped: list[bytes] = field(default_factory=list)
    """The DUMP, once somebody needed it. Never compared: it depends on the order of insertion."""

    @classmethod
    def of(cls, key: bytes, seen: Seen, expiry: int | None, ttl: float | None) -> KeyState:
        name = as_text(key)
        rows = tuple((name, seen.kind, part, value, ttl) for part, value in seen.body)
        return cls(seen.kind, seen.body, expiry, ttl, rows)

    def holds(self, kind: str, body: tuple[Part, ...]) -> bool:
        return self.kind == kind and self.body == body


Databases: TypeAlias = Mapping[int, Mapping[bytes, KeyState]]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What restores a server. Plain data, survives pickling."""

    dbs: Databases
    published: tuple[Row, ...]


def granted(remaining: int) -> float:
    """The time to live that was asked for, when `remaining` milliseconds of it are left a moment later."""
    # One millisecond too much is the rounding of floating point clocks, not a longer life.
    unit = 1000 if remaining > 5001 else 100
    return max(0, -((1 - remaining) // unit)) * unit / 1000


# -- reading ---------------------------------------------------------------------------------------------------------

Program: TypeAlias = Generator[list[Command], list[Reply], "Seen | None"]

_READ: dict[str, Callable[[bytes], list[Command]]] = {
    "string": lambda key: [("GET", key)],
    "list": lambda key: [("LRANGE", key, 0, -1)],
    "hash": lambda key: [("HGETALL", key)],
    "set": lambda key: [("SMEMBERS", key)],
    "zset": lambda key: [("ZRANGE", key, 0, -1, "WITHSCORES")],
    "stream": lambda key: [("XRANGE", key, "-", "+"), ("XINFO", "STREAM", key), ("XINFO", "GROUPS", key)],
    "ReJSON-RL": lambda key: [("JSON.GET", key)],
}


def read_key(key: bytes, guess: str, deadline: Command, stranger: Callable[[str], None]) -> Program:
    """The program that reads one key: one round trip if `guess` is its type. `deadline` asks when it ends.

    `stranger` is told of a type that can only be compared by its DUMP.
    """
    guess = guess if guess in _READ else "string"
    kind_reply, when, *replies = yield [("TYPE", key), deadline, *_READ[guess](key)]
    kind = str(as_text(kind_reply))
    if kind == "none":
        return None
    if kind not in _READ:
        stranger(kind)
        replies = yield [("DUMP", key)]
        if isinstance(replies[0], Exception):
            replies = [None]  # whoever wants to save it will say so
    elif kind != guess:
        replies = yield _READ[kind](key)
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    if kind == "stream":
        body = yield from _stream_parts(key, *replies)
    else:
        body = parts_of(kind, replies[0])
    return Seen(kind, when if isinstance(when, int) and when >= 0 else None, body)


def parts_of(kind: str, value: Any) -> tuple[Part, ...]:
    """The rows of a value as the server gave it. What has no order of its own is sorted."""
    if kind == "list":
        return tuple((index, as_text(item)) for index, item in enumerate(value))
    if kind == "set":
        return tuple((None, as_text(member)) for member in sorted(value))
    if kind == "hash":
        return tuple((as_text(name), as_text(item)) for name, item in sorted(_pairs(value)))
    if kind == "zset":
        return tuple((as_text(member), _score(score)) for member, score in sorted(_pairs(value)))
    return ((None, as_text(value)),)


def _score(score: Any) -> float | str | bytes:
    """A number, except for places on fakeredis, whose score is a geohash in letters."""
    try:
        return float(score)
    except ValueError:
        text: str | bytes = as_text(score)
        return text


def _pairs(value: Any) -> Iterable[tuple[bytes, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    return zip(value[::2], value[1::2], strict=True)


def _stream_parts(
    key: bytes, entries: list[Any], info: list[Any], groups: list[Any]
) -> Generator[list[Command], list[Reply], tuple[Part, ...]]:
    parts: list[Part] = [(as_text(name), tuple(map(as_text, values or ()))) for name, values in entries]
    last = as_text(dict(_pairs(info)).get(b"last-generated-id"))  # older fakeredis does not tell
    if last is not None and (not parts or parts[-1][0] != last):
        parts.append(("last-generated-id", last))
    facts = [dict(_pairs(group)) for group in groups]
    names = [fact[b"name"] for fact in facts]
    if not names:
        return tuple(parts)
    asked = [("XPENDING", key, name, "-", "+", 1_000_000) for name in names]
    replies = yield [*asked, *(("XINFO", "CONSUMERS", key, name) for name in names)]
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    for fact, pending, consumers in zip(facts, replies[: len(names)], replies[len(names) :], strict=True):
        group = f"group {as_text(fact[b'name'])}"
        parts.append((group, as_text(fact[b"last-delivered-id"])))
        members = sorted(dict(_pairs(consumer))[b"name"] for consumer in consumers)
        parts += [(f"{group} consumer", as_text(member)) for member in members]
        # Not how long it has been idle: that is the clock. How often it was delivered is what a job may act on.
        parts += [(f"{group} pending", (as_text(name), as_text(owner), times)) for name, owner, _idle, times in pending]
    return tuple(parts)


# -- addresses -------------------------------------------------------------------------------------------------------

_LOCAL = frozenset(("localhost", "127.0.0.1", "::1", "0.0.0.0"))


def tcp_address(host: Any, port: Any) -> str:
    """host:port, the same for all names of this machine."""
    return f"{'localhost' if str(host) in _LOCAL else host}:{port}"


def address_of_url(url: str) -> str:
    """The server that a URL names, without user, password and database."""
    match = re.fullmatch(r"(?P<scheme>[a-z+]+)://(?:[^@/]*@)?(?P<rest>[^?]*)(?:\?.*)?", url.strip())
    if match is None:
        return url
    if match["scheme"].endswith("unix"):
        path = match["rest"] if match["rest"].startswith("/") else f"/{match['rest']}"
        return re.sub(r"(?<=[^/])/\d+$", "", path)
    place = match["rest"].split("/")[0]
    host, _, port = place.rpartition(":") if re.search(r":\d+$", place) else (place, "", "6379")
    return tcp_address(host.strip("[]") or "localhost", port)
