"""The options of a check: the same names in a call, on the marker, in ini files and on the command line."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from retrychaos.model.errors import OptionError
from retrychaos.model.leases import Lease, parse

MOST_DUPLICATES = 4
"""Live deliveries at most: with more of them no space of interleavings closes."""
DEFAULT_BUDGET = 30.0
"""Seconds for a check, if nobody has said anything else."""
DEFAULT_OVERLAP = 1.5
"""Seconds of these for deliveries that overlap: their number of states can grow exponentially with the steps."""


PROFILES = DEFAULT, THOROUGH = "default", "thorough"


class Other(NamedTuple):
    """Other code than the job: something callable, and its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        """What it is called in reports."""
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        return str(getattr(function, "__name__", None) or type(function).__name__)


@dataclass(frozen=True)
class Options:
    """What a check covers and what it may spend.

    crashes: ``"any"`` number of crashes, or at most that many; 0 turns them off.
    budget: seconds; when they are spent the verdict is ``inconclusive`` and says how far it got. None: 30 s for
    crashes, and 1.5 s for deliveries that overlap.
    duplicates: deliveries of the message that are alive at the same time, at most; 1 turns that off.
    tolerate: effects that may happen more often than once (``"mail"``, ``"payments.charge"``, a table); a pattern
    with ``*`` works.
    volatile: cells that may differ (``"jobs.attempts"``, ``"redis:stats:*"``, a whole table).
    isolation: ``"sample"`` runs some deliveries again in a forked process, to find memory that survives in the module;
    ``"process"`` runs every delivery so.
    scratch: addresses of real servers whose data the check may rewind (``"redis://localhost:6379"``,
    ``"postgresql://localhost/test_db"``).
    late: deliver also after each expiry that a state holds (times to live in Redis, keys of an HTTP provider, leases),
    and at the end of the retry horizon. ``"slow"``: workers may also be so slow that such things end while they work.
    leases: columns that say when a claim ends (``"jobs.locked_until"``), or when it was made and how long it lasts
    (``"jobs.started_at+5m"``).
    faults: errors, lost replies and shutdowns at every step of the first delivery.
    profile: ``"thorough"`` tries faults in every delivery, not only the first; and deliveries that overlap get the
    whole budget.
    rivals: other code that may run once, whole, at any boundary; at most 3.
    siblings: other messages in the queue, at most 3; each runs once: before, between or after the deliveries of the
    job.
    order: report it (``reordered``) if the order of the messages makes a difference.
    then: other jobs that run when the message has settled, once each and in order, retried like any job.
    """

    crashes: int | str = "any"
    duplicates: int = 2
    faults: bool = True
    late: bool | str = True
    leases: tuple[Lease, ...] = ()
    budget: float | None = None
    tolerate: tuple[str, ...] = ()
    volatile: tuple[str, ...] = ()
    isolation: str = "sample"
    scratch: tuple[str, ...] = ()
    rivals: tuple[Other, ...] = ()
    siblings: tuple[Other, ...] = ()
    order: bool = False
    then: tuple[Other, ...] = ()
    profile: str = "default"

    @property
    def thorough(self) -> bool:
        return self.profile == THOROUGH

    @property
    def seconds(self) -> float:
        """The whole budget."""
        return DEFAULT_BUDGET if self.budget is None else self.budget

    def with_changes(self, changes: Mapping[str, Any]) -> Options:
        """A copy with other values. Raises OptionError for an unknown name or a value of the wrong type."""
        return replace(self, **{name: _checked(name, value) for name, value in changes.items()})

    def check_together(self) -> None:
        """Raises OptionError if values do not fit each other: known only when all have been given."""
        if self.order and not self.siblings:
            raise OptionError(
                "order=True compares the orders of several messages, and there is only one. Name the others: "
                f"siblings={_SHAPE.format('')[1:]}."
            )
        if len(self.rivals) + len(self.siblings) > MOST_OTHERS:
            raise OptionError(
                f"rivals and siblings together are {MOST_OTHERS} at most, since all their orders are run; these are "
                f"{len(self.rivals)} and {len(self.siblings)}."
            )


NAMES = tuple(field.name for field in fields(Options))
PLANNED = ("children", "delivery", "cron", "shards")
"""Options of later versions."""
MOST_OTHERS = 3
"""Rivals and siblings at most: all their orders are run."""
IN_CODE_ONLY = ("rivals", "siblings", "then")
"""Options that cannot be written in ini files and on the command line: they hold functions."""


def from_text(name: str, text: str) -> Any:
    """The value of an option written in an ini file or on the command line."""
    if name in IN_CODE_ONLY:
        raise OptionError(
            f"option {name!r} takes functions, which cannot be written in an ini file or on the command line. Give it "
            f"in the test: chaos({name}=...) or @pytest.mark.idempotent(..., {name}=...)."
        )
    if name in ("tolerate", "volatile", "leases", "scratch"):
        return tuple(part.strip() for line in text.splitlines() for part in line.split(",") if part.strip())
    if name in ("faults", "late", "order") and not (name == "late" and text.strip().lower() == "slow"):
        words = dict.fromkeys(("true", "yes", "1", "on"), True) | dict.fromkeys(("false", "no", "0", "off"), False)
        if text.strip().lower() not in words:
            values = "true, false or slow" if name == "late" else "true or false"
            raise OptionError(f"option {name!r} is {values}, not {text!r}.")
        return words[text.strip().lower()]
    if name in ("isolation", "profile", "late"):
        return text.strip().lower()
    try:
        return text.strip() if name == "crashes" and text.strip() == "any" else _number(text)
    except (ValueError, OverflowError):
        raise OptionError(f"option {name!r} does not take {text!r}: {_EXPECTED[name]}.") from None


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value == int(value) else value


def _checked(name: str, value: Any) -> Any:
    if name in PLANNED:
        raise OptionError(f"option {name!r} is not in this version yet. Options now: {', '.join(NAMES)}.")
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise OptionError(f"there is no option {name!r}.{hint} Options: {', '.join(NAMES)}.")
    if name in IN_CODE_ONLY:
        return _others(name, value)
    try:
        return _CHECKS[name](value)
    except (TypeError, ValueError, AttributeError):
        raise OptionError(f"option {name!r} does not take {value!r}: {_EXPECTED[name]}.") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _crashes(value: Any) -> int | str:
    if value == "any" or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value  # type: ignore[no-any-return]
    raise ValueError


def _duplicates(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_DUPLICATES:
        return value
    raise ValueError


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise TypeError


def _late(value: Any) -> bool | str:
    return "slow" if value == "slow" else _switch(value)


def _budget(value: Any) -> float | None:
    if value is None:
        return None
    if _is_number(value) and 0 < value < math.inf:
        return float(value)
    raise ValueError


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise TypeError  # a single text is most likely a forgotten pair of brackets
    texts = tuple(value)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError
    return texts


def _leases(value: Any) -> tuple[Lease, ...]:
    if isinstance(value, str):
        raise TypeError
    return tuple(each if isinstance(each, Lease) else parse(each.strip()) for each in value)


def _others(name: str, value: Any) -> tuple[Other, ...]:
    """Functions, or pairs of a function and its arguments. Says which element is wrong, and why."""
    if not isinstance(value, list | tuple):
        raise OptionError(f"option {name!r} does not take {value!r}: it takes a list, such as {_SHAPE.format(name)}.")
    if len(value) == 2 and isinstance(value, tuple) and callable(value[0]) and isinstance(value[1], tuple | list):
        raise OptionError(f"option {name!r} takes a list of pairs, and this is one pair: write {name}=[{value!r}].")
    if name != "then" and len(value) > MOST_OTHERS:
        raise OptionError(
            f"option {name!r} takes {MOST_OTHERS} at most, since all their orders are run; these are {len(value)}."
        )
    return tuple(_other(name, each) for each in value)


def _other(name: str, each: Any) -> Other:
    function, args = each, ()
    if isinstance(each, tuple | list):
        if len(each) != 2 or not isinstance(each[1], tuple | list):
            raise OptionError(
                f"option {name!r} does not take the element {each!r}: it takes functions, and pairs of a function and "
                f"a tuple of its arguments, such as {_SHAPE.format(name)}."
            )
        function, args = each[0], tuple(each[1])
    if not callable(function):
        raise OptionError(
            f"option {name!r} takes functions, and {function!r} is not callable. Write the function and its arguments "
            f"apart, such as {_SHAPE.format(name)}."
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise OptionError(f"option {name!r}: {function!r} is a generator function: calling it runs nothing.")
    return Other(function, args)


def _isolation(value: Any) -> str:
    if value in ("sample", "process"):
        return str(value)
    raise ValueError


def _profile(value: Any) -> str:
    if value in PROFILES:
        return str(value)
    raise ValueError


_SHAPE = "{}=[clean_up, (report, (7,))]"
_CHECKS: dict[str, Callable[[Any], Any]] = {
    "crashes": _crashes,
    "duplicates": _duplicates,
    "faults": _switch,
    "late": _late,
    "order": _switch,
    "budget": _budget,
    "tolerate": _texts,
    "volatile": _texts,
    "leases": _leases,
    "isolation": _isolation,
    "profile": _profile,
    "scratch": _texts,
}
_EXPECTED = {
    "crashes": '"any" or a number of crashes from 0',
    "duplicates": f"a number of deliveries from 1 to {MOST_DUPLICATES}",
    "faults": "True or False",
    "late": 'True, False, or "slow"',
    "order": "True or False",
    "budget": "a number of seconds above 0",
    "tolerate": 'a list of effects, such as ["mail"]',
    "leases": 'a list of columns, such as ["jobs.locked_until"], or ["jobs.started_at+5m"] if they say when a claim '
    "was made",
    "volatile": 'a list of cells, such as ["jobs.attempts"]',
    "isolation": '"sample" or "process"',
    "profile": '"default" or "thorough"',
    "scratch": 'a list of server addresses, such as ["redis://localhost:6379"]',
}
