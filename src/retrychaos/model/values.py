"""Any Python value as plain data for a ledger, as a short text for people, and as a fresh copy for a delivery."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import os
import re
import types
import uuid
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from retrychaos.model.ledger import Cell

_DEPTH = 40
_LONG = 1000
_MANY = 20
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
_BY_STR = (decimal.Decimal, uuid.UUID, fractions.Fraction, complex, range, datetime.timedelta)
_BY_ISOFORMAT = (datetime.date, datetime.time)
_BRACKETS: dict[type, tuple[str, str]] = {dict: ("{", "}"), list: ("[", "]"), tuple: ("(", ")"), set: ("{", "}")}
_OWN_REPR = frozenset({bool, int, float, str, bytes, *_BY_STR, datetime.date, datetime.datetime, datetime.time})
_SIMPLE = (bool, int, float, str, bytes, enum.Enum, os.PathLike, *_BY_STR, *_BY_ISOFORMAT)


def plain(value: object) -> Cell:
    """`value` as hashable data that compares by content.

    Never raises, and never contains an address in memory: two runs of a deterministic job give equal cells.
    """
    return _plain(value, ())


def _plain(value: Any, above: tuple[int, ...]) -> Cell:
    kind = type(value)
    if value is None or kind is int or kind is str:
        return value  # type: ignore[no-any-return]
    try:
        if kind.__module__ == "unittest.mock":
            return _name(kind)  # a MagicMock claims to be a path, with its address in it
        if isinstance(value, _SIMPLE):
            return _simple(value)
        if id(value) in above or len(above) > _DEPTH:
            return "..."
        return _compound(value, (*above, id(value)))
    except Exception:
        # The value's own code raised. Its class is the most that can be said without it.
        return _name(type(value))


def _simple(value: Any) -> Cell:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if value == value else "nan"  # nan differs from itself
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, _BY_ISOFORMAT):
        return value.isoformat()
    if isinstance(value, os.PathLike):
        return plain(os.fspath(value))
    return str(value)


def _compound(value: Any, above: tuple[int, ...]) -> Cell:
    kind = type(value)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return _fields(kind, zip(kind._fields, value, strict=False), above)
    if isinstance(value, list | tuple):
        return tuple(_plain(item, above) for item in value)
    if isinstance(value, Mapping):
        return tuple(_ordered((_plain(key, above), _plain(item, above)) for key, item in value.items()))
    if isinstance(value, AbstractSet):
        return tuple(_ordered(_plain(item, above) for item in value))
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, BaseException):
        return (_name(kind), *(_plain(item, above) for item in value.args))
    if isinstance(value, functools.partial):
        return (_name(value.func), _plain(value.args, above), _plain(value.keywords, above))
    if isinstance(value, re.Pattern):
        return _plain(value.pattern, above)
    if isinstance(value, _NAMED):
        return _name(value)
    return _object(value, above)


def _object(value: Any, above: tuple[int, ...]) -> Cell:
    kind = type(value)
    entity = _entity_key(value)
    if entity is not None:
        return (_name(kind), _plain(entity, above))
    if dataclasses.is_dataclass(kind):
        names = [each.name for each in dataclasses.fields(kind) if each.compare]
        return _fields(kind, ((name, getattr(value, name, None)) for name in names), above)
    if hasattr(kind, "__attrs_attrs__"):
        return _fields(kind, ((each.name, getattr(value, each.name, None)) for each in kind.__attrs_attrs__), above)
    if isinstance(getattr(kind, "model_fields", None), dict) and callable(getattr(kind, "model_dump", None)):
        return _fields(kind, value.model_dump().items(), above)
    if kind.__module__.partition(".")[0] == "numpy" and callable(getattr(kind, "tolist", None)):
        return _plain(value.tolist(), above)
    simple = [(name, item) for name, item in _attributes(value) if item is None or isinstance(item, _SIMPLE)]
    return _fields(kind, sorted(simple), above) if simple else _name(kind)


def _entity_key(value: Any) -> object | None:
    """The primary key of a row object.

    Which of its attributes are loaded depends on when it was last committed, so they would differ between attempts.
    """
    try:
        own = vars(value)
    except TypeError:
        return None
    state = own.get("_sa_instance_state")
    if state is not None:
        key = getattr(state, "key", None)
        return key[1] if isinstance(key, tuple) and len(key) > 1 else ()
    if "_state" in own and hasattr(type(value), "_meta"):
        return (getattr(value, "pk", None),)
    return None


def _attributes(value: Any) -> Iterable[tuple[str, Any]]:
    """Public attributes that are simply there: no property and no lazy loader is run."""
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        for name, item in own.items():
            if isinstance(name, str) and not name.startswith("_"):
                yield name, item
    for kind in type(value).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, types.MemberDescriptorType) and not name.startswith("_"):
                with contextlib.suppress(AttributeError):
                    yield name, member.__get__(value)


def _fields(kind: type, pairs: Iterable[tuple[str, Any]], above: tuple[int, ...]) -> Cell:
    return (kind.__qualname__, *((name, _plain(item, above)) for name, item in pairs))


def _name(value: Any) -> str:
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if not isinstance(name, str):
        value = type(value)
        name = value.__qualname__
    module = getattr(value, "__module__", None)
    return f"{module}.{name}" if isinstance(module, str) and module != "builtins" else name


def _ordered(cells: Iterable[Cell]) -> list[Cell]:
    """In an order that depends on content only; cells of different types have no order of their own."""
    return sorted(cells, key=_rank)


def _rank(cell: Cell) -> tuple[str, str]:
    return (type(cell).__name__, repr(cell))


def short(value: object, limit: int = 60) -> str:
    """`value` for people, on one line of at most `limit` characters and without addresses.

    Never raises, and never runs a ``__repr__`` of the user: one that reads an expired row would itself be a step.
    """
    try:
        text = _text(value, 0)
    except Exception:
        text = f"<{_name(type(value))}>"
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: max(limit - 1, 0)] + "…"


def _text(value: Any, depth: int) -> str:
    kind = type(value)
    if isinstance(value, enum.Enum):
        return f"{kind.__name__}.{value.name}"
    if value is None or kind in _OWN_REPR:
        return repr(value[:_LONG] if kind in (str, bytes) else value)
    if kind in _BRACKETS and depth < 4:
        start, end = _BRACKETS[kind]
        items = list(value.items() if kind is dict else value)[:_MANY]
        if kind is dict:
            parts = [f"{_text(key, depth + 1)}: {_text(item, depth + 1)}" for key, item in items]
        else:
            parts = [_text(item, depth + 1) for item in items]
        if len(value) > _MANY:
            parts.append("…")
        return start + ", ".join(parts) + ("," if kind is tuple and len(value) == 1 else "") + end
    cell = plain(value)
    if isinstance(cell, tuple) and cell and isinstance(cell[0], str):
        return f"{kind.__name__}({', '.join(_field_text(each) for each in cell[1:])})"
    return f"<{cell}>" if isinstance(cell, str) and cell == _name(kind) else repr(cell)


def _field_text(cell: Cell) -> str:
    if isinstance(cell, tuple) and len(cell) == 2 and isinstance(cell[0], str):
        return f"{cell[0]}={cell[1]!r}"
    return repr(cell)


def copied(payload: Any) -> Any:
    """`payload` with fresh builtin containers, so that a delivery cannot change what the next one gets.

    Other objects stay as they are: copying them could open connections or lose identity.
    """
    return _copied(payload, {})


def _copied(value: Any, done: dict[int, Any]) -> Any:
    copy = _COPIERS.get(type(value))
    if copy is None:
        return value
    if id(value) in done:
        return done[id(value)]
    return copy(value, done)


def _copied_dict(value: dict[Any, Any], done: dict[int, Any]) -> dict[Any, Any]:
    fresh: dict[Any, Any] = {}
    done[id(value)] = fresh
    for key, item in value.items():
        fresh[_copied(key, done)] = _copied(item, done)
    return fresh


def _copied_list(value: list[Any], done: dict[int, Any]) -> list[Any]:
    fresh: list[Any] = []
    done[id(value)] = fresh
    fresh.extend(_copied(item, done) for item in value)
    return fresh


def _copied_set(value: set[Any], done: dict[int, Any]) -> set[Any]:
    fresh = done[id(value)] = set(value)
    return fresh


def _copied_tuple(value: tuple[Any, ...], done: dict[int, Any]) -> tuple[Any, ...]:
    fresh = tuple(_copied(item, done) for item in value)
    # A list inside may hold this very tuple; then the copy of the list has already made one.
    return done.setdefault(id(value), fresh)  # type: ignore[no-any-return]


_COPIERS: dict[type, Callable[[Any, dict[int, Any]], Any]] = {
    dict: _copied_dict,
    list: _copied_list,
    set: _copied_set,
    tuple: _copied_tuple,
}
