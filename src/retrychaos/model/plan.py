"""Plans: what is done to a message, from the first delivery on; each has a short token that replays it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import NamedTuple

from retrychaos.model.errors import PlanError
from retrychaos.model.step import Step

VERSION = "rc1"
_TURN = re.compile(r"(\d+)([bkrfjvoxlsadzt])(\d+)")
_TURNS = re.compile(
    rf"t([0-9a-f]{{3}})_({_TURN.pattern.replace('(', '(?:')}(?:-{_TURN.pattern.replace('(', '(?:')})*)\Z"
)
_LEG = re.compile(r"(?:w(\d+)_)?(?:([xlsadzt])(\d+)_)?(?:c(\d+)([0-9a-f]{3})|e)\Z")

ERROR, LOST_REPLY = "error", "lost reply"
SHUTDOWN, CANCELLATION = "shutdown", "cancellation"
SHUTDOWNS = (SHUTDOWN, CANCELLATION)
"""What a worker does to a job that has to end."""
DEADLOCK, CONFLICT, LOCK_TIMEOUT = "deadlock", "serialization failure", "lock timeout"
_LETTERS = {
    ERROR: "x",
    LOST_REPLY: "l",
    SHUTDOWN: "s",
    CANCELLATION: "a",
    DEADLOCK: "d",
    CONFLICT: "z",
    LOCK_TIMEOUT: "t",
}
_KINDS = {"k": "kill", "f": "fail"} | {letter: kind for kind, letter in _LETTERS.items()}
FAULTS = tuple(_LETTERS)
"""All kinds of faults."""
ACTS = ("begin", "run", "fail", *FAULTS)
"""Turns in which a delivery does something."""


class Fault(NamedTuple):
    """What goes wrong in a delivery without its death.

    kind: ERROR (the step is not done, and raises what the client raises when nobody answers), LOST_REPLY (it is done,
    and the client's timeout is raised), SHUTDOWN (the worker is asked to stop before the step), CANCELLATION (it
    cancels an async job before the step), DEADLOCK, CONFLICT and LOCK_TIMEOUT (the database refuses the step, and what
    was open there is rolled back). In all of them code that
    cleans up runs. step: at which step, counted from 1.
    """

    kind: str
    step: int


class Turn(NamedTuple):
    """One choice among deliveries that overlap.

    kind: ``begin`` (a delivery starts and does its first step), ``run`` (it does its next step), ``kill`` (its process
    dies), ``fail`` (the step that waits for others fails), a kind of fault (which comes at its next step),
    ``jump`` (the clock goes on to the next thing that ends),
    ``rival`` (other code runs, whole), ``order`` (a message is the next to be served, and nobody else is running).
    delivery: which one, counted from 1 in the order in which they began.
    ident: of a rival or a message, which one. Of a delivery that begins (with a fault, if that comes at its first
    step), what it draws at random; no two deliveries that can know of each other have the same. For ``jump``: how often
    the clock has gone on in vain before.
    """

    kind: str
    delivery: int = 0
    ident: int = 0


@dataclass(frozen=True)
class Leg:
    """One delivery of a plan.

    crash_after: the process dies after that many steps; None: the delivery runs to its end.
    mark: fingerprint of the steps before the crash, to notice that the job has changed.
    wait: seconds by which the clock moves before the delivery, on top of the usual delay.
    fault: what goes wrong before that.
    """

    crash_after: int | None = None
    mark: str = ""
    wait: int = 0
    fault: Fault | None = None


@dataclass(frozen=True)
class Plan:
    """Deliveries of one message. ``crashes``, ``switches`` and ``steps`` are counts; ``token`` replays it.

    legs: deliveries one after the other. turns: deliveries that overlap, instead. mark: fingerprint of what these do.
    """

    job: str
    legs: tuple[Leg, ...] = ()
    steps: int = 0
    turns: tuple[Turn, ...] = ()
    mark: str = ""

    @property
    def crashes(self) -> int:
        killed = sum(turn.kind == "kill" for turn in self.turns)
        return killed + sum(leg.crash_after is not None for leg in self.legs)

    @property
    def faults(self) -> tuple[str, ...]:
        """Kinds of what else goes wrong."""
        turns = tuple(turn.kind for turn in self.turns if turn.kind in FAULTS)
        return turns + tuple(leg.fault.kind for leg in self.legs if leg.fault is not None)

    @property
    def switches(self) -> int:
        """Changes from one live delivery to another."""
        moves = [turn.delivery for turn in self.turns if turn.kind in ACTS]
        return sum(one != other for one, other in pairwise(moves))

    @property
    def token(self) -> str:
        parts = [_write_turns(self.turns, self.mark)] if self.turns else map(_write, self.legs)
        body = f"{VERSION}.{job_mark(self.job)}." + ".".join(parts)
        return f"{body}.{_digest(body, 2)}"


def job_mark(job: str) -> str:
    """Tells jobs apart in tokens."""
    return _digest(job, 4)


def steps_mark(steps: Sequence[Step]) -> str:
    """Tells deliveries apart in tokens, up to a crash: three hexadecimal digits. Where a database lies is no matter."""
    return _digest(repr([(step.kind, step.text) for step in steps]), 2)[:3]


def parse(token: str, job: str) -> Plan:
    """The plan behind a token. Raises PlanError if it is damaged, of another version, or of another job."""
    legs, turns, mark = read(token)
    if not belongs(token, job):
        raise PlanError(f"{token!r} belongs to another job than {job}. Run it with the job of the report it came from.")
    return Plan(job, legs, turns=turns, mark=mark)


def belongs(token: str, job: str) -> bool:
    """The token was made for that job."""
    return token.strip().split(".")[1:2] == [job_mark(job)]


def read(token: str) -> tuple[tuple[Leg, ...], tuple[Turn, ...], str]:
    """The deliveries of a token, of whatever job, as in Plan. Raises PlanError if it is damaged or of another
    version."""
    if not isinstance(token, str):
        raise PlanError(f"a plan is given by its token, a text that begins with {VERSION!r}, not by {token!r}.")
    parts = token.strip().split(".")
    if not re.fullmatch(r"rc\d+", parts[0]):
        raise PlanError(f"{token!r} is not a token of retrychaos; tokens begin with {VERSION!r}. Copy the whole token.")
    if parts[0] != VERSION:
        raise PlanError(
            f"{token!r} was written by another version ({parts[0]}, this one writes {VERSION}). Run the check again to "
            "get a token of this version."
        )
    body, _, digest = token.strip().rpartition(".")
    turns = _TURNS.match(parts[2]) if len(parts) == 4 else None
    legs = [_LEG.match(part) for part in parts[2:-1]]
    if len(parts) < 4 or _digest(body, 2) != digest or not (turns or all(legs)):
        raise PlanError(f"{token!r} is damaged: its checksum does not fit. Copy the whole token from the report.")
    if turns:
        return (), tuple(_read_turns(turns[2])), turns[1]
    return tuple(_read(leg) for leg in legs if leg), (), ""


def _write(leg: Leg) -> str:
    wait = f"w{leg.wait}_" if leg.wait else ""
    if leg.fault is not None:
        wait += f"{_LETTERS[leg.fault.kind]}{leg.fault.step}_"
    return wait + ("e" if leg.crash_after is None else f"c{leg.crash_after}{leg.mark or '000'}")


def _read(match: re.Match[str]) -> Leg:
    wait, letter, step, crash, mark = match.groups()
    fault = Fault(_KINDS[letter], int(step)) if letter else None
    return Leg(None if crash is None else int(crash), mark or "", int(wait or 0), fault)


def _write_turns(turns: Sequence[Turn], mark: str) -> str:
    """``t``, the mark, and for each turn the delivery, a letter, and how often, or which."""
    out: list[str] = []
    runs = 0
    for turn, following in zip_longest(turns, turns[1:]):
        if turn.kind == "run":
            runs += 1
            if following is None or following.kind != "run" or following.delivery != turn.delivery:
                out.append(f"{turn.delivery}r{runs}")
                runs = 0
        elif turn.kind == "begin":
            out.append(f"{turn.delivery}b{turn.ident}")
        elif turn.kind == "jump":
            out.append(f"0j{turn.ident}")
        elif turn.kind == "rival":
            out.append(f"0v{turn.ident}")
        elif turn.kind == "order":
            out.append(f"0o{turn.ident}")
        else:
            out.append(f"{turn.delivery}{_LETTERS.get(turn.kind, turn.kind[0])}{turn.ident}")
    return f"t{mark}_" + "-".join(out)


def _read_turns(text: str) -> Iterator[Turn]:
    for delivery, letter, number in _TURN.findall(text):
        if letter == "j":
            yield Turn("jump", ident=int(number))
        elif letter == "v":
            yield Turn("rival", ident=int(number))
        elif letter == "o":
            yield Turn("order", ident=int(number))
        elif letter == "b":
            yield Turn("begin", int(delivery), int(number))
        elif letter == "r":
            yield from [Turn("run", int(delivery))] * int(number)
        else:
            yield Turn(_KINDS[letter], int(delivery), int(number))


def _digest(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()
