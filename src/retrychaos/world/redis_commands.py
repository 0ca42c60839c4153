"""Redis commands as a job sends them: which may change which keys, which say nothing, which wait.

Nothing here talks to a server.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

Command: TypeAlias = tuple[Any, ...]
Reply: TypeAlias = Any
"""What a server answered; a command that failed has its exception here."""


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

LISTENING = _words("SUBSCRIBE PSUBSCRIBE SSUBSCRIBE MONITOR")
"""After these the server speaks unasked."""

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


# -- commands that wait ------------------------------------------------------------------------------------------------

_TIMEOUT_LAST = frozenset(("BLPOP", "BRPOP", "BRPOPLPUSH", "BLMOVE", "BZPOPMIN", "BZPOPMAX", "WAIT", "WAITAOF"))
_TIMEOUT_FIRST = frozenset(("BLMPOP", "BZMPOP"))
_BLOCK_OPTION = frozenset(("XREAD", "XREADGROUP"))
_BLOCKING = _TIMEOUT_LAST | _TIMEOUT_FIRST | _BLOCK_OPTION


def blocking_time(call: Call) -> float | None:
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
        word = str(as_text(arg)).upper()
        if word == "STREAMS":
            return None
        if word == "BLOCK":
            return position
    return None


def impatient(call: Call) -> Command:
    """The same command, but it comes back at once."""
    if call.name in _BLOCK_OPTION:
        at = _block_option(call.args)
        assert at is not None
        return (call.name, *call.args[:at], *call.args[at + 2 :])
    soon: Any = 1 if call.name.startswith("WAIT") else 0.001  # zero would be for ever
    return (call.name, *call.args[:-1], soon) if call.name in _TIMEOUT_LAST else (call.name, soon, *call.args[1:])
