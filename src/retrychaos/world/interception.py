"""Catching the calls of a target, to hand them over together with the original: their taker decides what they do.

How a call is caught decides which calls are seen:

- A function written in Python gets another ``__code__`` for a while. The function object stays the same, so names
  imported earlier, bound methods, partials and dicts of handlers are all reached.
- Anything else (builtins, C methods, ``lru_cache`` and ``partial`` objects) is replaced on its owner and in every
  module that holds the same object. References kept elsewhere are not seen.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Protocol, TypeAlias

from retrychaos.model.errors import OptionError
from retrychaos.world.targets import Attribute, Function, Target, signature_of

Taker: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...], tuple[Any, ...], dict[str, Any]], Any]
"""Makes the call in place of its caller. Gets the original, the instance or class (or nothing) that goes first, and the
arguments."""

Running: TypeAlias = Callable[[], bool]
"""Calls are taken now. Otherwise they go to the original as if nothing were patched."""


def try_out(target: Target, label: str) -> None:
    """Raise OptionError if its calls cannot be caught."""
    if not isinstance(target, Attribute):
        return
    try:
        _Slot(target.owner, target.name).put(target.original).undo()
    except (AttributeError, TypeError) as problem:
        raise OptionError(
            f"{label} cannot be replaced on its owner ({problem}), so its calls cannot be seen. "
            "Wrap the call in a function of your own, call that in the job, and watch it."
        ) from None


def patches(wanted: Iterable[tuple[Target, Taker]], running: Running) -> list[Patch]:
    """One patch a function: methods watched on two instances of a class share it."""
    swaps: dict[int, _Swap] = {}
    made: list[Patch] = []
    for target, take in wanted:
        if isinstance(target, Attribute):
            made.append(_Replacement(target, take, running))
        elif isinstance(target, Function):
            swap = swaps.get(id(target.function))
            if swap is None:
                swap = swaps[id(target.function)] = _Swap(target.function, running)
                made.append(swap)
            swap.wanted.append((target, take))
    return made


class Patch(Protocol):
    """Something that is replaced for a while. It may be undone however far apply() got, and twice."""

    def apply(self) -> None: ...

    def undo(self) -> None: ...


class _Swap:
    """Gives a function other code for a while, and runs the original code on a function of its own."""

    def __init__(self, function: types.FunctionType, running: Running) -> None:
        self.function = function
        self.running = running
        self.wanted: list[tuple[Function, Taker]] = []
        self.code = function.__code__
        self.signed = False

    def apply(self) -> None:
        function = self.function
        signature = signature_of(function)
        _set_code(function, _trampoline(self.code, self._dispatcher(_twin(function))))
        if signature is not None and "__signature__" not in function.__dict__:
            # Frameworks look at it to decide what to pass; the trampoline takes anything.
            function.__dict__["__signature__"] = signature
            self.signed = True

    def undo(self) -> None:
        _set_code(self.function, self.code)
        if self.signed:
            self.function.__dict__.pop("__signature__", None)
            self.signed = False

    def _dispatcher(self, original: types.FunctionType) -> Callable[..., Any]:
        running, wanted = self.running, self.wanted

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if running():
                for target, take in wanted:
                    if target.admits(args, kwargs):
                        first, rest = target.split(args, kwargs)
                        return take(original, first, rest, kwargs)
            return original(*args, **kwargs)

        return dispatch


def _set_code(function: types.FunctionType, code: types.CodeType) -> None:
    if not inspect.isgeneratorfunction(function) and not code.co_flags & inspect.CO_GENERATOR:
        function.__code__ = code
        return
    with warnings.catch_warnings():
        # 3.13 warns if a generator becomes a plain function. It has to: a generator would not count at the call.
        warnings.simplefilter("ignore", DeprecationWarning)
        function.__code__ = code


def _twin(function: types.FunctionType) -> types.FunctionType:
    """A function with the same code, globals, defaults and closure."""
    twin = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__qualname__ = function.__qualname__
    twin.__module__ = function.__module__
    twin.__dict__.update(function.__dict__)
    return twin


_DISPATCH = "retrychaos: the dispatcher goes here"


@functools.cache
def _template(free: int, asynchronous: bool) -> types.CodeType:
    """Code that calls a constant, with as many free variables as the closure that it will be put on has cells."""
    define, give = ("async def", "return await") if asynchronous else ("def", "return")
    names = [f"cell{number}" for number in range(free)]
    mention = f"        if 0: ({', '.join(names)},)\n" if names else ""
    source = (
        f"def outer({', '.join(names)}):\n"
        f"    {define} trampoline(*args, **kwargs):\n"
        f"{mention}"
        "        __tracebackhide__ = True\n"
        f"        dispatch = {_DISPATCH!r}\n"
        f"        {give} dispatch(*args, **kwargs)\n"
        "    return trampoline\n"
    )
    namespace: dict[str, Any] = {}
    # Under our own file name: the site of a call is then its caller, not the watched function.
    exec(compile(source, __file__, "exec"), namespace)  # noqa: S102  # our own text: the number of free variables varies
    trampoline = namespace["outer"](*names)
    code: types.CodeType = trampoline.__code__
    return code


def _trampoline(original: types.CodeType, dispatch: Callable[..., Any]) -> types.CodeType:
    template = _template(len(original.co_freevars), bool(original.co_flags & inspect.CO_COROUTINE))
    consts = tuple(dispatch if const == _DISPATCH else const for const in template.co_consts)
    return template.replace(co_consts=consts, co_name=original.co_name, co_qualname=original.co_qualname)


class _Slot:
    """One attribute of an owner that is replaced and put back exactly as it was."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self.name = name
        own = getattr(owner, "__dict__", {})
        self.held = name in own
        self.before = own.get(name)

    def put(self, value: object) -> _Slot:
        setattr(self.owner, self.name, value)
        return self

    def undo(self) -> None:
        if self.held:
            setattr(self.owner, self.name, self.before)
        elif isinstance(self.owner, type):
            delattr(self.owner, self.name)
        elif hasattr(self.owner, "__dict__"):
            # Not delattr: a mock remembers that an attribute was deleted.
            vars(self.owner).pop(self.name, None)


class _Replacement:
    """Puts a stand-in in the place of an object, on its owner and in all modules."""

    def __init__(self, target: Attribute, take: Taker, running: Running) -> None:
        self.target = target
        self.take = take
        self.running = running
        self.slot = _Slot(target.owner, target.name)
        self.stand_in = StandIn(target.original, self._dispatch, target.receives, target.signature)
        self.places: list[tuple[dict[str, Any], str]] = []
        self.applied = False

    def apply(self) -> None:
        target = self.target
        self.applied = True
        if not self.slot.held and not isinstance(target.owner, type):
            # From the class of an instance: bound here, so that other instances are left alone.
            self.stand_in = StandIn(getattr(target.owner, target.name), self._dispatch, False, target.signature)
        self.slot.put(self.stand_in)
        self.places = list(_places(target.original))
        for namespace, name in self.places:
            namespace[name] = self.stand_in

    def undo(self) -> None:
        if not self.applied:
            return
        self.applied = False
        self.slot.undo()
        # A module that was imported meanwhile has got the stand-in; look for it rather than trust the list.
        for namespace, name in [*self.places, *_places(self.stand_in)]:
            if namespace.get(name) is self.stand_in:
                namespace[name] = self.target.original

    def _dispatch(
        self, through: Callable[..., Any], receives: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        __tracebackhide__ = True
        if not self.applied or not self.running():
            return through(*args, **kwargs)
        at = 1 if receives else 0
        return self.take(through, args[:at], args[at:], kwargs)


_module_namespace: Final[Any] = vars(types.ModuleType)["__dict__"].__get__
"""Reads a module's namespace without waking modules that load themselves when touched."""


def _places(wanted: object) -> Iterator[tuple[dict[str, Any], str]]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and not name.startswith("retrychaos."):
            namespace = _module_namespace(module)
            for key, value in list(namespace.items()):
                if value is wanted:
                    yield namespace, key


class StandIn:
    """Stands where a callable without Python code was; binds, and has the attributes of what it stands for."""

    def __init__(
        self,
        original: Any,
        dispatch: Callable[[Callable[..., Any], bool, tuple[Any, ...], dict[str, Any]], Any],
        receives: bool,
        signature: inspect.Signature | None,
    ) -> None:
        self._original = original
        self._dispatch = dispatch
        self._receives = receives
        if signature is not None and not receives:
            self.__signature__ = signature
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            if isinstance(getattr(original, name, None), str):
                self.__dict__[name] = getattr(original, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return self._dispatch(self._original, self._receives, args, kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> StandIn:
        bind = getattr(type(self._original), "__get__", None)
        if bind is None:
            return self
        bound = bind(self._original, instance, owner)
        return StandIn(bound, self._dispatch, self._receives and instance is None, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __reduce__(self) -> Any:
        # By name, as functions are: the stand-in is found there while it stands, the original afterwards.
        return self._original.__qualname__ if "__qualname__" in self.__dict__ else self._original.__reduce_ex__(2)
