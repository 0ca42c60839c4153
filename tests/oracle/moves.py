"""The rules of deliveries that overlap: which moves are possible, and every sequence of them.

Knows nothing of the tool's search.

A move is beginning a delivery (up to and with its first step), one step, an ack after the job has returned, a kill, or
letting a step that waits fail where everybody waits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

Ledger: TypeAlias = frozenset[tuple[str, tuple[Any, ...]]]
"""Relation -> rows, as committed."""


class Move(NamedTuple):
    """kind: begin, run, fail, kill, or a kind of fault (a delivery that is not there begins with it)."""

    kind: str
    ident: int


@dataclass(frozen=True)
class Found:
    """What a search has found. left: ledgers when the message is acknowledged and nobody runs. idle: ledgers whenever
    nobody runs. whole: nothing was cut off."""

    left: frozenset[Ledger]
    idle: frozenset[Ledger]
    whole: bool = True
    states: int = 0
    runs: int = 0


class TooMany(Exception):
    """The job is too big for this search."""


class Stage(Protocol):
    """Where deliveries run. What moves come to: "" it lives, "blocked", "done" (returned) or "failed" (raised).

    "jammed": chance says who of several that wait comes next, so nobody goes any further into this; "unsure": chance
    may say, and others may go on.
    """

    def begin(self, ident: int) -> str:
        """It stands before its first step."""
        ...

    def step(self, ident: int, fail: bool) -> str: ...
    def strike(self, ident: int, kind: str) -> str:
        """As step(), with a fault; "missed" if that cannot come there."""
        ...

    def kill(self, ident: int) -> None: ...


class Table:
    """Who is there, and may do what. most: deliveries in all; what would take more is cut off."""

    def __init__(
        self, stage: Stage, duplicates: int, crashes: int | None, most: int, faults: tuple[str, ...] = ()
    ) -> None:
        self.faults = faults
        """Kinds of which one may come."""
        self.missed = False
        self.idle = duplicates
        self.acked = False
        self.kills = 0
        self.cut = False
        self.jammed = False
        self.live: dict[int, int] = {}
        """Delivery -> steps that it has done; -1 when it has returned."""
        self.blocked: set[int] = set()
        """Deliveries that wait, and nobody has moved since."""
        self._stage = stage
        self._crashes = crashes
        self._most = most

    def moves(self) -> list[Move]:
        """Every move that is possible now, in a fixed order."""
        out: list[Move] = []
        if self.jammed or self.missed:
            return out
        begin = bool(self.idle) and not self.acked
        if begin and self._most > 0:
            out.append(Move("begin", next(ident for ident in range(9) if ident not in self.live)))
        self.cut = self.cut or (begin and not out)
        out += [Move("run", ident) for ident in sorted(self.live) if ident not in self.blocked]
        if not out and not begin:
            out += [Move("fail", ident) for ident in sorted(self.live)]
        if self._crashes is None or self.kills < self._crashes:
            out += [Move("kill", ident) for ident in sorted(self.live) if self.live[ident]]
        standing = [ident for ident in sorted(self.live) if self.live[ident] >= 0]
        standing += [move.ident for move in out if move.kind == "begin"]
        out += [Move(kind, ident) for ident in standing for kind in self.faults]
        return out

    def go(self, move: Move) -> None:
        ident = move.ident
        if move.kind == "kill":
            self.kills += 1
            self._stage.kill(ident)
            self._gone(ident)
            return
        fault = move.kind if move.kind in self.faults else ""
        if move.kind == "begin" or (fault and ident not in self.live):
            self.idle -= 1
            self._most -= 1
            self.live[ident] = 0
            if end := self._stage.begin(ident):  # it has done no step
                self.live[ident] = -1
                if end == "failed":
                    self._gone(ident)
                    return
        if self.live[ident] < 0:
            del self.live[ident]
            self.acked, self.idle = True, 0
            self.blocked.clear()
            return
        if fault:
            self.faults = ()
            end = self._stage.strike(ident, fault)
            self.missed = end == "missed"
        else:
            end = self._stage.step(ident, move.kind == "fail")
        if self.missed:
            return
        if end in ("blocked", "jammed", "unsure"):
            self.blocked.add(ident)
            self.jammed = self.jammed or end != "blocked"
            self.cut = self.cut or end == "unsure"
            return
        self.live[ident] += 1
        self.blocked.clear()
        if end == "failed":
            self._gone(ident)
        elif end == "done":
            self.live[ident] = -1

    def _gone(self, ident: int) -> None:
        del self.live[ident]
        self.idle += not self.acked
        self.blocked.clear()


class Enumerable(Protocol):
    """One real run from the start on."""

    table: Table

    @property
    def ledger(self) -> Ledger: ...


def enumerate_runs(start: Callable[[], AbstractContextManager[Enumerable]], most_runs: int) -> Found:
    """Every sequence of moves, depth-first, each in a run of its own. Raises TooMany."""
    left: set[Ledger] = set()
    idle: set[Ledger] = set()
    whole = True
    choices: list[tuple[list[Move], int]] = []
    runs = 0
    while True:
        runs += 1
        if runs > most_runs:
            raise TooMany
        with start() as run:
            idle.add(run.ledger)
            depth = 0
            while moves := run.table.moves():
                if depth == len(choices):
                    choices.append((moves, 0))
                assert choices[depth][0] == moves, f"{choices} led to {moves}"
                run.table.go(moves[choices[depth][1]])
                depth += 1
                if not run.table.live:
                    idle.add(run.ledger)
            if run.table.acked and not run.table.live:
                left.add(run.ledger)
            whole = whole and not run.table.cut
        while choices and choices[-1][1] + 1 == len(choices[-1][0]):
            choices.pop()
        if not choices:
            return Found(frozenset(left), frozenset(idle), whole, 0, runs)
        choices[-1] = (choices[-1][0], choices[-1][1] + 1)
