"""Declared calls: functions and methods whose every call counts as an effect at a receiver.

``chaos.watch(owner, "name")`` makes a :class:`Watched`; :class:`Calls` patches all of them around a check and is the
resource that holds what arrived. How a call is caught decides which calls are seen:

- A function written in Python gets another ``__code__`` for the time of the check. The function object stays the same,
  so names imported earlier, bound methods, partials and dicts of handlers are all reached.
- Anything else (builtins, C methods, ``lru_cache`` and ``partial`` objects) is replaced on its owner and in every
  module that holds the same object. References kept elsewhere are not seen.

A delivery is judged by what arrived, so a call counts only if it returned. A subclass that overrides a watched method
without calling it is another function, and is not seen.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import pickle
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from retrychaos.model.errors import OptionError
from retrychaos.model.ledger import Cell, Relation, Row, Version
from retrychaos.model.values import copied, plain, short
from retrychaos.world.resource import Blob, Stage

MISSING: Final = object()
"""No result was declared: the call goes through."""


@dataclass(frozen=True)
class Call:
    """One call that arrived, as the receiver saw it."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    arguments: Mapping[str, Any]
    """By parameter name, defaults included, ``self`` left out."""
    key: Cell = None
    """On which the receiver deduplicates; None counts every time."""


class Watched:
    """A declared call. ``calls`` lists what arrived in the clean run."""

    def __init__(self, label: str, target: _Target, result: object, key: str | None) -> None:
        self.label = label
        self.relation = f"call {label}"
        self.target = target
        self.result = result
        self.key = key
        self.calls: list[Call] = []
        self.seen = False
        """It was called at least once in this check, whether or not the call returned."""
        names = None if target.signature is None else tuple(target.signature.parameters)
        self.columns = ("key", *(("arguments",) if names is None else map(_column, names)))

    def __repr__(self) -> str:
        return f"<watched {self.label}>"

    def understand(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call with its arguments by name. Raises TypeError if they do not fit the signature."""
        arguments: dict[str, Any] = {}
        if self.target.signature is not None:
            bound = self.target.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
        key = None if self.key is None else plain(self._key_value(arguments, kwargs))
        return Call(copied(args), copied(kwargs), copied(arguments), key)

    def _key_value(self, arguments: dict[str, Any], kwargs: dict[str, Any]) -> object:
        assert self.key is not None
        return arguments[self.key] if self.key in arguments else kwargs.get(self.key)

    def row(self, call: Call) -> Row:
        """The effect as a row of the ledger."""
        if self.target.signature is None or (not call.arguments and len(self.columns) > 1):
            rest: list[Cell] = [plain((call.args, dict(call.kwargs)))]
            rest += [None] * (len(self.columns) - 1 - len(rest))
            return (call.key, *rest)
        return (call.key, *(plain(value) for value in call.arguments.values()))

    def text(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The call for people."""
        parts = [short(value, 40) for value in args] + [f"{name}={short(value, 40)}" for name, value in kwargs.items()]
        inside = ", ".join(parts)
        return f"{self.label}({inside if len(inside) <= 160 else inside[:159] + '…'})"


def _column(name: str) -> str:
    return "argument key" if name == "key" else name


# -- what a receiver has -------------------------------------------------------------------------------------------


class Answer:
    """What a receiver answered to a key, to be answered again. One that cannot be pickled stays in its process."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            return (_answer, (pickle.dumps(self.value),))
        except Exception:
            return (_answer, (None,))


def _answer(pickled: bytes | None) -> Answer:
    try:
        return Answer(MISSING if pickled is None else pickle.loads(pickled))
    except Exception:
        return Answer(MISSING)


@dataclass(frozen=True)
class Received:
    """The effects at one receiver, in the order of their arrival."""

    rows: tuple[Row, ...] = ()
    answers: Mapping[Row, Answer] = field(default_factory=dict)

    def with_effect(self, row: Row, answer: Answer | None) -> Received:
        """A keyed effect is the same as the one that has already arrived with equal arguments."""
        if row[0] is not None and row in self.rows:
            return self
        answers = self.answers if answer is None else {**self.answers, row: answer}
        return Received((*self.rows, row), answers)

    def answer(self, row: Row) -> Answer | None:
        found = self.answers.get(row)
        return None if found is None or found.value is MISSING else found


_NOTHING = Received()


class Calls:
    """All declared calls: source and resource in one. ``stage`` may be set later, before a check."""

    name = "calls"
    label = "declared calls"

    def __init__(self, stage: Stage | None = None) -> None:
        self.stage = stage
        self.watched: list[Watched] = []
        self.log: list[tuple[Watched, Call]] = []
        """What arrived in the running delivery; empty again at its end."""
        self.last: list[tuple[Watched, Call]] = []
        """What arrived in the delivery that has ended last, until the next one begins."""
        """What arrived in the delivery that ended last."""
        self.version = Version({})
        self.entering: list[Callable[[], None]] = []
        """Called when a thread enters a watched call, nested ones apart: what happens inside is covered by it."""
        self.leaving: list[Callable[[], None]] = []
        self._received: dict[str, Received] = {}
        self._relations: dict[tuple[str, tuple[Row, ...]], Relation] = {}
        self._stale = False
        self._patches: list[_Patch] = []
        self._installed = False
        self._depths: dict[int, int] = {}

    # -- for users ------------------------------------------------------------------------------------------------

    def watch(self, owner: object, name: str, *, result: object = MISSING, key: str | None = None) -> Watched:
        """Declare ``owner.name`` as an effect; see ``chaos.watch``."""
        if self._installed:
            raise OptionError(
                f"watch(…, {name!r}) came while a check was running: declare calls before the check, "
                "so that every delivery finds the same world."
            )
        target = _locate(owner, name)
        label = self._label(owner, name)
        _check_key(target, key, label)
        for other in self.watched:
            if other.target.overlaps(target):
                raise OptionError(
                    f"{label} is already watched as {other.label}: both watch the same function, and each call would "
                    "count twice. Declare it once."
                )
        target.try_out(label)
        watched = Watched(label, target, result, key)
        self.watched.append(watched)
        self.clear()
        return watched

    def _label(self, owner: object, name: str) -> str:
        """Stable over the processes of a check: two receivers of one name are told apart by their order."""
        base = f"{_owner_name(owner)}.{name}"
        taken = {watched.label for watched in self.watched}
        label, number = base, 1
        while label in taken:
            number += 1
            label = f"{base} ({number})"
        return label

    # -- Source ---------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """A check begins: nothing has been called yet. What has been received is left alone."""
        if self._installed:
            return
        self._installed = True
        for watched in self.watched:
            watched.seen = False
        try:
            for patch in _patches(self.watched, self):
                self._patches.append(patch)
                patch.apply()
        except BaseException:
            self.uninstall()
            raise

    def uninstall(self) -> None:
        self._installed = False
        while self._patches:
            self._patches.pop().undo()

    # -- Resource -------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Nothing has arrived anywhere."""
        self._received = {}
        self._relations = {}
        self.log = []
        self._stale = False
        self.version = Version({each.relation: self._relation(each, ()) for each in self.watched})

    def clean_run_done(self) -> None:
        """The clean run has ended: what arrived in it is what the user may look at."""
        for watched in self.watched:
            watched.calls = [call for each, call in self.last if each is watched]

    def refresh(self) -> Version:
        if self._stale:
            self._stale = False
            relations = {each.relation: self._relation(each, self._at(each).rows) for each in self.watched}
            if any(relations[name] is not self.version.relations.get(name) for name in relations):
                self.version = Version(relations)
        return self.version

    def sweep(self) -> Version:
        return self.refresh()

    def save(self) -> Blob:
        return dict(self._received)

    def restore(self, version: Version, blob: Blob) -> None:
        self._received = dict(blob)
        self.last, self.log = [], []
        self._stale = False
        self.version = version

    def end_delivery(self) -> Any:
        """Called twice for one delivery: as a source, and as a resource with no notes to give."""
        if self.log:
            self.last, self.log = self.log, []
        self._depths.clear()
        return ()

    def shift(self, seconds: float) -> None:
        """Receivers have no clock."""

    def shift_ids(self, by: int) -> None:
        """Receivers draw no ids of their own."""

    def distrust(self) -> None:
        """What has arrived is known from the calls themselves; nothing can have changed unseen."""

    def close(self) -> None:
        self.uninstall()
        self.clear()

    def _at(self, watched: Watched) -> Received:
        return self._received.get(watched.relation, _NOTHING)

    def _relation(self, watched: Watched, rows: tuple[Row, ...]) -> Relation:
        """The same object for the same rows, over all states of the check."""
        current = self.version.relations.get(watched.relation)
        if current is not None and current.rows == rows and current.columns == watched.columns:
            return current
        key = (watched.relation, rows)
        known = self._relations.get(key)
        if known is None:
            known = self._relations[key] = Relation(watched.relation, watched.columns, rows, external=True)
        return known

    # -- calls ----------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self.stage is not None and self.stage.running

    def inside(self, thread: int | None = None) -> bool:
        """That thread (None: any) is inside a watched call: what it does there is covered by the declaration."""
        return bool(self._depths) if thread is None else thread in self._depths

    def arrive(
        self,
        watched: Watched,
        through: Callable[..., Any],
        first: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A watched call in a running delivery. `first` is the instance or class, which the receiver does not see."""
        __tracebackhide__ = True
        assert self.stage is not None
        try:
            call = watched.understand(args, kwargs)
        except TypeError:
            # Does not fit the signature. The original says so best; if the signature lies, it accepts the call.
            if watched.result is not MISSING:
                raise
            call = Call(copied(args), copied(kwargs), {})
        row = watched.row(call)
        watched.seen = True
        self.stage.step("call", self, watched.label, watched.text(args, kwargs))
        with self._covering():
            if watched.result is MISSING:
                value = through(*first, *args, **kwargs)
            else:
                value = self._answer(watched, row, args, kwargs)
        if inspect.iscoroutine(value) or inspect.isawaitable(value):
            _dismiss(value)
            self.stage.refuse(_no_async(watched.label))
        self._record(watched, call, row, value)
        return value

    def _answer(self, watched: Watched, row: Row, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        known = None if row[0] is None else self._at(watched).answer(row)
        if known is not None:
            return copied(known.value)
        result = watched.result
        if isinstance(result, BaseException):
            raise result.with_traceback(None)
        if isinstance(result, type) and issubclass(result, BaseException):
            raise result
        return result(*args, **kwargs) if callable(result) else copied(result)

    def _record(self, watched: Watched, call: Call, row: Row, value: Any) -> None:
        assert self.stage is not None
        self.log.append((watched, call))
        keep = row[0] is not None and watched.result is not MISSING
        before = self._at(watched)
        after = before.with_effect(row, Answer(copied(value)) if keep else None)
        if after is not before:
            self._received[watched.relation] = after
            self._stale = True
        self.stage.touched(self)

    @contextmanager
    def _covering(self) -> Iterator[None]:
        thread = threading.get_ident()
        depth = self._depths.get(thread, 0)
        if not depth:
            for hook in self.entering:
                hook()
        self._depths[thread] = depth + 1
        try:
            yield
        finally:
            if depth:
                self._depths[thread] = depth
            else:
                self._depths.pop(thread, None)
                for hook in self.leaving:
                    hook()


def _dismiss(awaitable: Any) -> None:
    """Never awaited, and nobody shall be warned about that."""
    close = getattr(awaitable, "close", None)
    if callable(close):
        close()


def _no_async(label: str) -> OptionError:
    return OptionError(f"{label} is async: async jobs are not covered yet, so its calls cannot be watched.")


# -- what is watched -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Only:
    """Which calls of a function count, by their first argument (``self`` or ``cls``)."""

    of: Any
    whole_class: bool = False
    """`of` is a class: its instances, subclasses and their instances count. Otherwise only `of` itself."""

    def admits(self, first: object) -> bool:
        if not self.whole_class:
            return first is self.of
        return issubclass(first if isinstance(first, type) else type(first), self.of)

    def overlaps(self, other: _Only) -> bool:
        if self.whole_class and other.whole_class:
            return issubclass(self.of, other.of) or issubclass(other.of, self.of)
        if self.whole_class:
            return self.admits(other.of)
        return other.admits(self.of)


@dataclass(frozen=True, eq=False)
class _Target:
    """Where a watched callable is, and how to catch its calls."""

    signature: inspect.Signature | None
    """Without ``self`` or ``cls``."""
    receives: bool
    """Its first argument is the instance or class."""

    def overlaps(self, other: _Target) -> bool:
        raise NotImplementedError

    def try_out(self, label: str) -> None:
        """Raise OptionError if it cannot be patched."""


@dataclass(frozen=True, eq=False)
class _Function(_Target):
    """Code of its own: caught through ``__code__``."""

    function: types.FunctionType
    only: _Only | None
    first: str | None = None
    """The name of ``self``."""

    def overlaps(self, other: _Target) -> bool:
        if not isinstance(other, _Function) or self.function is not other.function:
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
class _Attribute(_Target):
    """No code of its own: caught by replacing the attribute."""

    owner: Any
    name: str
    original: Any
    """As it lies in the namespace, descriptors not yet bound."""

    def overlaps(self, other: _Target) -> bool:
        if not isinstance(other, _Attribute):
            return False
        return self.original is other.original or (self.owner is other.owner and self.name == other.name)

    def try_out(self, label: str) -> None:
        try:
            _Slot(self.owner, self.name).put(self.original).undo()
        except (AttributeError, TypeError) as problem:
            raise OptionError(
                f"{label} cannot be replaced on its owner ({problem}), so its calls cannot be seen. "
                "Wrap the call in a function of your own, call that in the job, and watch it."
            ) from None


def _locate(owner: object, name: str) -> _Target:
    label = f"{_owner_name(owner)}.{name}"
    found, place = _lookup(owner, name, label)
    if isinstance(found, property | functools.cached_property):
        raise OptionError(f"{label} is a property, not a callable: watch the function that it calls.")
    if isinstance(found, type):
        raise OptionError(f"{label} is a class: watch one of its methods, e.g. watch({found.__name__}, '__init__').")
    inner = found.__func__ if isinstance(found, staticmethod | classmethod) else found
    _refuse_async(inner, label)
    if isinstance(inner, types.FunctionType):
        return _function(owner, name, found, inner, place)
    if isinstance(inner, types.MethodType) and isinstance(inner.__func__, types.FunctionType):
        return _Function(_signature(inner), True, inner.__func__, _Only(inner.__self__))
    dunder = inspect.getattr_static(type(inner), "__call__", None)
    binds = place != "plain" and hasattr(type(found), "__get__")
    if isinstance(dunder, types.FunctionType) and not binds:
        # An object that is called: all references to it lead to the __call__ of its class.
        _refuse_async(dunder, label)
        return _Function(_signature(inner), True, dunder, _Only(inner))
    if not callable(found) and not (binds and callable(getattr(owner, name))):
        raise OptionError(f"{label} is not callable: {short(found)}.")
    receives = binds and place == "class" and not isinstance(found, staticmethod | classmethod)
    signature = _signature(getattr(owner, name))
    return _Attribute(_without_first(signature) if receives else signature, receives, owner, name, found)


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
    return f"; {_owner_name(owner)} has {', '.join(public)}" if public else "."


def _function(owner: object, name: str, found: object, function: types.FunctionType, place: str) -> _Function:
    if place == "plain" or isinstance(found, staticmethod):
        return _Function(_signature(function), False, function, None)
    if place == "class":
        assert isinstance(owner, type)
        only = None if name in vars(owner) else _Only(owner, whole_class=True)
    else:
        only = _Only(type(owner) if isinstance(found, classmethod) else owner)
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return _Function(_without_first(_signature(function)), True, function, only, names[0] if names else None)


def _signature(function: Any) -> inspect.Signature | None:
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


def _refuse_async(function: Any, label: str) -> None:
    inner = inspect.unwrap(function) if isinstance(function, types.FunctionType) else function
    mock = sys.modules.get("unittest.mock")
    is_mock = mock is not None and isinstance(function, mock.AsyncMock)
    for each in (function, inner):
        if is_mock or inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each):
            raise _no_async(label)


def _check_key(target: _Target, key: str | None, label: str) -> None:
    if key is None:
        return
    if target.signature is None:
        raise OptionError(f"{label} has no signature to be read, so key={key!r} cannot be found among its arguments.")
    parameters = target.signature.parameters
    if key in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    names = ", ".join(parameters) or "none"
    raise OptionError(f"key={key!r} is not a parameter of {label}; its parameters: {names}.")


def _owner_name(owner: object) -> str:
    if isinstance(owner, types.ModuleType):
        return owner.__name__.rpartition(".")[2]
    return owner.__name__ if isinstance(owner, type) else type(owner).__name__


# -- patches -------------------------------------------------------------------------------------------------------


def _patches(watched: Sequence[Watched], calls: Calls) -> list[_Patch]:
    """One patch a function: methods watched on two instances of a class share it."""
    by_function: dict[int, list[Watched]] = {}
    patches: list[_Patch] = []
    for each in watched:
        target = each.target
        if isinstance(target, _Attribute):
            patches.append(_Replacement(each, target, calls))
        elif isinstance(target, _Function):
            group = by_function.setdefault(id(target.function), [])
            if not group:
                patches.append(_Swap(target.function, group, calls))
            group.append(each)
    return patches


class _Patch:
    def apply(self) -> None:
        raise NotImplementedError

    def undo(self) -> None:
        raise NotImplementedError


class _Swap(_Patch):
    """Gives a function other code for a while, and runs the original code on a function of its own."""

    def __init__(self, function: types.FunctionType, watched: list[Watched], calls: Calls) -> None:
        self.function = function
        self.watched = watched
        self.calls = calls
        self.code = function.__code__
        self.signed = False

    def apply(self) -> None:
        function = self.function
        signature = _signature(function)
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
        calls, watched = self.calls, self.watched

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if calls.running:
                for each in watched:
                    target = each.target
                    assert isinstance(target, _Function)
                    if target.admits(args, kwargs):
                        first, rest = target.split(args, kwargs)
                        return calls.arrive(each, original, first, rest, kwargs)
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
def _template(free: int) -> types.CodeType:
    """Code that calls a constant, with as many free variables as the closure that it will be put on has cells."""
    names = [f"cell{number}" for number in range(free)]
    mention = f"        if 0: ({', '.join(names)},)\n" if names else ""
    source = (
        f"def outer({', '.join(names)}):\n"
        "    def trampoline(*args, **kwargs):\n"
        f"{mention}"
        "        __tracebackhide__ = True\n"
        f"        dispatch = {_DISPATCH!r}\n"
        "        return dispatch(*args, **kwargs)\n"
        "    return trampoline\n"
    )
    namespace: dict[str, Any] = {}
    # Under our own file name: the site of a call is then its caller, not the watched function.
    exec(compile(source, __file__, "exec"), namespace)  # noqa: S102  # our own text: the number of free variables varies
    trampoline = namespace["outer"](*names)
    code: types.CodeType = trampoline.__code__
    return code


def _trampoline(original: types.CodeType, dispatch: Callable[..., Any]) -> types.CodeType:
    template = _template(len(original.co_freevars))
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


class _Replacement(_Patch):
    """Puts a stand-in in the place of an object, on its owner and in all modules."""

    def __init__(self, watched: Watched, target: _Attribute, calls: Calls) -> None:
        self.watched = watched
        self.target = target
        self.calls = calls
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
        if not self.calls.running or not self.applied:
            return through(*args, **kwargs)
        at = 1 if receives else 0
        return self.calls.arrive(self.watched, through, args[:at], args[at:], kwargs)


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
