"""Which callable ``chaos.watch(owner, "name")`` means: found on its owner, or refused with what to watch instead.

Also which of its calls are meant, since a method watched on one instance is shared with all others. A subclass that
overrides a watched method without calling it has another function, whose calls are not.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import types
from dataclasses import dataclass, field, replace
from typing import Any

from retrychaos.model.errors import OptionError
from retrychaos.model.values import short


@dataclass(frozen=True, eq=False)
class Only:
    """Which calls of a function count, by their first argument (``self`` or ``cls``)."""

    of: Any
    whole_class: bool = False
    """`of` is a class: its instances, subclasses and their instances count. Otherwise only `of` itself."""

    def admits(self, first: object) -> bool:
        if not self.whole_class:
            return first is self.of
        return issubclass(first if isinstance(first, type) else type(first), self.of)

    def overlaps(self, other: Only) -> bool:
        if self.whole_class and other.whole_class:
            return issubclass(self.of, other.of) or issubclass(other.of, self.of)
        if self.whole_class:
            return self.admits(other.of)
        return other.admits(self.of)


@dataclass(frozen=True, eq=False)
class Target:
    """Where a watched callable is, and how to catch its calls."""

    signature: inspect.Signature | None
    """Without ``self`` or ``cls``."""
    receives: bool
    """Its first argument is the instance or class."""
    asynchronous: bool = field(default=False, kw_only=True)
    """It gives an awaitable: the call is made when that is awaited."""

    def overlaps(self, other: Target) -> bool:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Function(Target):
    """Code of its own: caught through ``__code__``."""

    function: types.FunctionType
    only: Only | None
    first: str | None = None
    """The name of ``self``."""

    def overlaps(self, other: Target) -> bool:
        if not isinstance(other, Function) or self.function is not other.function:
            return False
        return self.only is None or other.only is None or self.only.overlaps(other.only)

    def admits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.only is None:
            return True
        if args:
            return self.only.admits(args[0])
        return self.first in kwargs and self.only.admits(kwargs[self.first])

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The instance or class, and the arguments that the receiver sees."""
        if not self.receives:
            return (), args
        if args or self.first not in kwargs:
            return args[:1], args[1:]
        return (kwargs.pop(self.first),), args


@dataclass(frozen=True, eq=False)
class Attribute(Target):
    """No code of its own: caught by replacing the attribute."""

    owner: Any
    name: str
    original: Any
    """As it lies in the namespace, descriptors not yet bound."""

    def overlaps(self, other: Target) -> bool:
        if not isinstance(other, Attribute):
            return False
        return self.original is other.original or (self.owner is other.owner and self.name == other.name)


def locate(owner: object, name: str) -> Target:
    """What is to be caught. Raises OptionError."""
    found = _locate(owner, name)
    function = found.function if isinstance(found, Function) else found.original  # type: ignore[attr-defined]
    return replace(found, asynchronous=_is_async(function) or _is_async(getattr(owner, name)))


def _locate(owner: object, name: str) -> Target:
    label = f"{owner_name(owner)}.{name}"
    found, place = _lookup(owner, name, label)
    if isinstance(found, property | functools.cached_property):
        raise OptionError(f"{label} is a property, not a callable: watch the function that it calls.")
    if isinstance(found, type):
        raise OptionError(f"{label} is a class: watch one of its methods, e.g. watch({found.__name__}, '__init__').")
    inner = found.__func__ if isinstance(found, staticmethod | classmethod) else found
    _refuse_stream(inner, label)
    if isinstance(inner, types.FunctionType):
        return _target_of(owner, name, found, inner, place)
    if isinstance(inner, types.MethodType) and isinstance(inner.__func__, types.FunctionType):
        return Function(signature_of(inner), True, inner.__func__, Only(inner.__self__))
    dunder = inspect.getattr_static(type(inner), "__call__", None)
    binds = place != "plain" and hasattr(type(found), "__get__")
    if isinstance(dunder, types.FunctionType) and not binds:
        # An object that is called: all references to it lead to the __call__ of its class.
        _refuse_stream(dunder, label)
        return Function(signature_of(inner), True, dunder, Only(inner))
    if not callable(found) and not (binds and callable(getattr(owner, name))):
        raise OptionError(f"{label} is not callable: {short(found)}.")
    receives = binds and place == "class" and not isinstance(found, staticmethod | classmethod)
    signature = signature_of(getattr(owner, name))
    return Attribute(_without_first(signature) if receives else signature, receives, owner, name, found)


def _lookup(owner: object, name: str, label: str) -> tuple[Any, str]:
    """What the attribute is, and whether it lies in a class, in the class of an instance, or plainly on the owner."""
    if isinstance(owner, type) and any(name in vars(kind) for kind in owner.__mro__):
        return inspect.getattr_static(owner, name), "class"
    if name in getattr(owner, "__dict__", {}):
        return vars(owner)[name], "plain"
    try:
        return inspect.getattr_static(owner, name), "type"
    except AttributeError:
        pass
    try:
        return getattr(owner, name), "plain"  # modules and mocks that make attributes when asked
    except AttributeError:
        raise OptionError(f"{label} does not exist{_near(owner, name)}") from None


def _near(owner: object, name: str) -> str:
    names = [each for each in dir(owner) if not each.startswith("__")]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    public = [each for each in names if not each.startswith("_")][:8]
    return f"; {owner_name(owner)} has {', '.join(public)}" if public else "."


def _target_of(owner: object, name: str, found: object, function: types.FunctionType, place: str) -> Function:
    if place == "plain" or isinstance(found, staticmethod):
        return Function(signature_of(function), False, function, None)
    if place == "class":
        assert isinstance(owner, type)
        only = None if name in vars(owner) else Only(owner, whole_class=True)
    else:
        only = Only(type(owner) if isinstance(found, classmethod) else owner)
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return Function(_without_first(signature_of(function)), True, function, only, names[0] if names else None)


def signature_of(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (ValueError, TypeError):
        return None


def _without_first(signature: inspect.Signature | None) -> inspect.Signature | None:
    """Without ``self``, unless it hides in ``*args``."""
    if signature is None:
        return None
    parameters = list(signature.parameters.values())
    if parameters and parameters[0].kind in (parameters[0].POSITIONAL_ONLY, parameters[0].POSITIONAL_OR_KEYWORD):
        parameters = parameters[1:]
    return signature.replace(parameters=parameters)


def _is_async(function: Any) -> bool:
    mock = sys.modules.get("unittest.mock")
    inner = inspect.unwrap(function) if isinstance(function, types.FunctionType) else function
    is_mock = mock is not None and isinstance(function, mock.AsyncMock)
    return is_mock or any(map(inspect.iscoroutinefunction, (function, inner)))


def _refuse_stream(function: Any, label: str) -> None:
    if any(map(inspect.isasyncgenfunction, (function, inspect.unwrap(function) if callable(function) else function))):
        raise OptionError(
            f"{label} is an asynchronous generator: there is no one moment at which its effect happens, so its calls "
            "cannot be watched. Watch the function that it calls for each effect."
        )


def check_key(target: Target, key: str | None, label: str) -> None:
    if key is None:
        return
    if target.signature is None:
        raise OptionError(f"{label} has no signature to be read, so key={key!r} cannot be found among its arguments.")
    parameters = target.signature.parameters
    if key in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    names = ", ".join(parameters) or "none"
    raise OptionError(f"key={key!r} is not a parameter of {label}; its parameters: {names}.")


def owner_name(owner: object) -> str:
    if isinstance(owner, types.ModuleType):
        return owner.__name__.rpartition(".")[2]
    return owner.__name__ if isinstance(owner, type) else type(owner).__name__
