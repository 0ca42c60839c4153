"""Plans: what is done to a message, from the first delivery on; each has a short token that replays it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from retrychaos.model.errors import PlanError
from retrychaos.model.step import Step

VERSION = "rc1"
_LEG = re.compile(r"(?:w(\d+)_)?(?:c(\d+)([0-9a-f]{3})|e)\Z")


@dataclass(frozen=True)
class Leg:
    """One delivery of a plan.

    crash_after: the process dies after that many steps; None: the delivery runs to its end.
    last_step: fingerprint of the step before the crash, to notice that the job has changed.
    wait: seconds by which the clock moves before the delivery, on top of the usual delay.
    """

    crash_after: int | None = None
    last_step: str = ""
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


def step_mark(step: Step) -> str:
    """Tells steps apart in tokens: three hexadecimal digits. Where a database lies does not matter."""
    return _digest(f"{step.kind} {step.text}", 2)[:3]


def parse(token: str, job: str) -> Plan:
    """The plan behind a token. Raises PlanError if it is damaged, of another version, or of another job."""
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
    if parts[1] != job_mark(job):
        raise PlanError(f"{token!r} belongs to another job than {job}. Run it with the job of the report it came from.")
    return Plan(job, tuple(_read(leg) for leg in legs if leg))


def _write(leg: Leg) -> str:
    wait = f"w{leg.wait}_" if leg.wait else ""
    return wait + ("e" if leg.crash_after is None else f"c{leg.crash_after}{leg.last_step or '000'}")


def _read(match: re.Match[str]) -> Leg:
    wait, crash, mark = match.groups()
    return Leg(None if crash is None else int(crash), mark or "", int(wait or 0))


def _digest(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()
