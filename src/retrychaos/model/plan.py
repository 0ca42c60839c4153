"""Plans: what is done to a message, from the first delivery on; each has a short token that replays it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from retrychaos.model.errors import PlanError
from retrychaos.model.step import Step

VERSION = "rc1"
_LEG = re.compile(r"(?:w(\d+)_)?(?:c(\d+)([0-9a-f]{3})|e)\Z")


@dataclass(frozen=True)
class Leg:
    """One delivery of a plan.

    crash_after: the process dies after that many steps; None: the delivery runs to its end.
    mark: fingerprint of the steps before the crash, to notice that the job has changed.
    wait: seconds by which the clock moves before the delivery, on top of the usual delay.
    """

    crash_after: int | None = None
    mark: str = ""
    wait: int = 0


@dataclass(frozen=True)
class Plan:
    """Deliveries of one message. ``crashes``, ``switches`` and ``steps`` are counts; ``token`` replays it."""

    job: str
    legs: tuple[Leg, ...]
    steps: int = 0

    @property
    def crashes(self) -> int:
        return sum(leg.crash_after is not None for leg in self.legs)

    @property
    def switches(self) -> int:
        """Changes from one live delivery to another: none, deliveries follow each other."""
        return 0

    @property
    def token(self) -> str:
        body = f"{VERSION}.{job_mark(self.job)}." + ".".join(map(_write, self.legs))
        return f"{body}.{_digest(body, 2)}"


def job_mark(job: str) -> str:
    """Tells jobs apart in tokens."""
    return _digest(job, 4)


def steps_mark(steps: Sequence[Step]) -> str:
    """Tells deliveries apart in tokens, up to a crash: three hexadecimal digits. Where a database lies is no matter."""
    return _digest(repr([(step.kind, step.text) for step in steps]), 2)[:3]


def parse(token: str, job: str) -> Plan:
    """The plan behind a token. Raises PlanError if it is damaged, of another version, or of another job."""
    legs = read(token)
    if not belongs(token, job):
        raise PlanError(f"{token!r} belongs to another job than {job}. Run it with the job of the report it came from.")
    return Plan(job, legs)


def belongs(token: str, job: str) -> bool:
    """The token was made for that job."""
    return token.strip().split(".")[1:2] == [job_mark(job)]


def read(token: str) -> tuple[Leg, ...]:
    """The deliveries of a token, of whatever job. Raises PlanError if it is damaged or of another version."""
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
    legs = [_LEG.match(part) for part in parts[2:-1]]
    if len(parts) < 4 or _digest(body, 2) != digest or not all(legs):
        raise PlanError(f"{token!r} is damaged: its checksum does not fit. Copy the whole token from the report.")
    return tuple(_read(leg) for leg in legs if leg)


def _write(leg: Leg) -> str:
    wait = f"w{leg.wait}_" if leg.wait else ""
    return wait + ("e" if leg.crash_after is None else f"c{leg.crash_after}{leg.mark or '000'}")


def _read(match: re.Match[str]) -> Leg:
    wait, crash, mark = match.groups()
    return Leg(None if crash is None else int(crash), mark or "", int(wait or 0))


def _digest(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()
