"""Declared calls: which calls are seen, what counts as an effect, and that patches leave no trace."""

# mypy: disable-error-code="func-returns-value,comparison-overlap,attr-defined,union-attr,arg-type"

from __future__ import annotations

import datetime
import enum
import functools
import inspect
import os
import pickle
import posixpath
import sys
import threading
import types
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any, ClassVar, NamedTuple, NoReturn
from unittest import mock

import pytest

from retrychaos.model.errors import OptionError
from retrychaos.model.step import Step
from retrychaos.model.values import copied, plain, short
from retrychaos.world.calls import Call, Calls, Watched
from retrychaos.world.world import World


def anything_of(value: Any) -> Any:
    """As any type: results stand in for the declared ones."""
    return value


class Died(BaseException):
    """What a fault looks like to a step."""


class Recorder:
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.doubts: list[str] = []
        self.die_at: int | None = None

    def strike(self, kind: str, make: Callable[[], BaseException]) -> None:
        """No fault was ordered."""

    def boundary(self, step: Step) -> None:
        if len(self.steps) == self.die_at:
            raise Died
        self.steps.append(step)

    def sleep(self, seconds: float) -> None:
        pass

    def refuse(self, problem: Exception) -> NoReturn:
        raise problem

    def doubt(self, reason: str) -> None:
        self.doubts.append(reason)


class Rig:
    """A world with declared calls only, in which deliveries are started by hand."""

    def __init__(self) -> None:
        self.world = World(now=lambda: 0.0, options={})
        self.calls = Calls(self.world)
        self.world.sources.append(self.calls)
        self.recorder = Recorder()
        self.watch = self.calls.watch

    def run(self, job: Any, *args: Any, **kwargs: Any) -> Any:
        """Install, run one delivery, uninstall."""
        self.start()
        try:
            return job(*args, **kwargs)
        finally:
            self.stop()

    def start(self) -> None:
        self.world.install()
        if "calls" not in self.world.resources:
            self.world.adopt(self.calls)
        self.world.recorder = self.recorder

    def stop(self) -> None:
        self.world.recorder = None
        self.world.facts()
        self.world.uninstall()

    def rows(self, watched: Watched) -> list[tuple[Any, ...]]:
        return list(self.calls.version.relations[watched.relation].rows)


@pytest.fixture
def rig() -> Any:
    rig = Rig()
    yield rig
    rig.world.recorder = None
    rig.calls.close()


def charge(amount: int, currency: str = "EUR", *, note: str | None = None) -> str:
    """Charges."""
    return f"charged {amount} {currency}"


def refund(amount: int) -> str:
    return charge(-amount)


def fails(amount: int) -> None:
    raise ValueError(amount)


def numbers(count: int) -> Any:
    yield from range(count)


def anything(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return args, kwargs


async def charge_async(amount: int) -> None: ...


async def charges_one_by_one(amount: int) -> AsyncIterator[int]:
    yield amount


def hidden_async(amount: int) -> Any:
    return charge_async(amount)


HERE = sys.modules[__name__]
handlers = {"charge": charge}
charge_ten = functools.partial(charge, 10)
cached = functools.lru_cache(charge)


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@decorated
def wrapped(amount: int) -> int:
    return amount


class Gateway:
    made = 0

    def __init__(self, name: str = "g") -> None:
        self.name = name

    def send(self, amount: int) -> tuple[str, int]:
        return self.name, amount

    @staticmethod
    def ping(host: str) -> str:
        return host

    @classmethod
    def build(cls, name: str) -> Gateway:
        return cls(name)

    @property
    def balance(self) -> int:
        return 1

    @functools.lru_cache  # noqa: B019
    def rate(self, currency: str) -> int:
        return 2

    send_ten = functools.partialmethod(send, 10)


class Child(Gateway):
    def send(self, amount: int) -> tuple[str, int]:
        return super().send(amount + 1)


class Sibling(Gateway):
    pass


class Handler:
    def __call__(self, amount: int) -> int:
        return amount


handler = Handler()
other_handler = Handler()


# -- which calls are seen -------------------------------------------------------------------------------------------


def test_a_module_function_is_one_step_and_one_effect(rig: Rig) -> None:
    watched = rig.watch(HERE, "charge")
    assert rig.run(charge, 5, note="x") == "charged 5 EUR"
    assert [(s.kind, s.resource, s.text) for s in rig.recorder.steps] == [("call", "calls", "test_calls.charge")]
    assert rig.recorder.steps[0].detail == "test_calls.charge(5, note='x')"
    relation = rig.calls.version.relations["call test_calls.charge"]
    assert relation.external
    assert relation.columns == ("key", "amount", "currency", "note")
    assert relation.rows == ((None, 5, "EUR", "x"),)
    assert watched.seen


def test_every_reference_is_seen(rig: Rig) -> None:
    from_import = charge
    watched = rig.watch(HERE, "charge")

    def job() -> None:
        from_import(1)
        handlers["charge"](2)
        charge_ten()
        charge(amount=4)
        list(map(charge, [5]))

    rig.run(job)
    assert [row[1] for row in rig.rows(watched)] == [1, 2, 10, 4, 5]


def test_a_closure_is_seen_and_keeps_its_cells(rig: Rig) -> None:
    sent = []
    factor, extra = 2, 3

    def send(amount: int, *, times: int = factor) -> int:
        sent.append(amount)
        return amount * factor * times + extra

    owner = types.SimpleNamespace(send=send)
    watched = rig.watch(owner, "send")
    assert rig.run(send, 5) == 23
    assert sent == [5]
    assert rig.rows(watched) == [(None, 5, 2)]


def test_methods_are_seen_through_class_instance_and_bound_before(rig: Rig) -> None:
    one, two = Gateway("one"), Gateway("two")
    before = one.send
    watched = rig.watch(Gateway, "send")

    def job() -> None:
        assert before(1) == ("one", 1)
        assert two.send(amount=2) == ("two", 2)
        assert Gateway.send(one, 3) == ("one", 3)
        assert Gateway.send(self=two, amount=4) == ("two", 4)
        assert Sibling("s").send(5) == ("s", 5)
        assert Child("c").send(6) == ("c", 7)

    rig.run(job)
    assert rig.calls.version.relations["call Gateway.send"].columns == ("key", "amount")
    assert [row[1] for row in rig.rows(watched)] == [1, 2, 3, 4, 5, 7]


def test_a_method_watched_on_an_instance_counts_only_there(rig: Rig) -> None:
    one, two = Gateway("one"), Gateway("two")
    before = one.send
    first = rig.watch(one, "send")
    second = rig.watch(two, "send", result="saved")

    def job() -> None:
        assert before(1) == ("one", 1)
        assert two.send(2) == "saved"
        assert Gateway("three").send(3) == ("three", 3)

    rig.run(job)
    assert (first.label, second.label) == ("Gateway.send", "Gateway.send (2)")
    assert (rig.rows(first), rig.rows(second)) == ([(None, 1)], [(None, 2)])


def test_an_inherited_method_watched_on_a_subclass_counts_only_there(rig: Rig) -> None:
    watched = rig.watch(Sibling, "send")

    def job() -> None:
        Gateway().send(1)
        Sibling().send(2)

    rig.run(job)
    assert rig.rows(watched) == [(None, 2)]


def test_static_and_class_methods(rig: Rig) -> None:
    ping, build = rig.watch(Gateway, "ping"), rig.watch(Gateway, "build")
    before = Gateway.build

    def job() -> None:
        assert Gateway.ping("a") == "a"
        assert Gateway().ping("b") == "b"
        assert before("c").name == "c"
        assert type(Child.build(name="d")) is Child

    rig.run(job)
    assert rig.rows(ping) == [(None, "a"), (None, "b")]
    assert rig.rows(build) == [(None, "c"), (None, "d")]


def test_decorated_functions_are_watched_at_the_outside(rig: Rig) -> None:
    watched = rig.watch(HERE, "wrapped")
    before = wrapped
    assert rig.run(before, 3) == 3
    assert rig.rows(watched) == [(None, 3)]
    assert watched.columns == ("key", "amount")


def test_only_the_one_of_functions_with_the_same_code_is_seen(rig: Rig) -> None:
    first, second = decorated(charge), decorated(charge)
    watched = rig.watch(types.SimpleNamespace(first=first), "first")
    rig.run(lambda: (first(1), second(2)))
    assert [row[1] for row in rig.rows(watched)] == [1]


def test_a_bound_method_and_a_callable_object_in_a_module(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway()
    monkeypatch.setattr(HERE, "send_bound", gateway.send, raising=False)
    bound, called = rig.watch(HERE, "send_bound"), rig.watch(HERE, "handler")
    kept = {"h": handler}

    def job() -> None:
        gateway.send(1)
        Gateway().send(2)
        kept["h"](3)
        other_handler(4)

    rig.run(job)
    assert rig.rows(bound) == [(None, 1)]
    assert rig.rows(called) == [(None, 3)]


def test_mocks_are_seen_even_if_kept_elsewhere(rig: Rig) -> None:
    client = mock.Mock()
    client.send.return_value = 7
    kept, other = client.send, mock.Mock()
    watched = rig.watch(client, "send")

    def job() -> None:
        assert kept(1, to="a") == 7
        client.send(2)
        other(3)
        client.close()

    rig.run(job)
    assert len(rig.rows(watched)) == 2
    assert client.send is kept
    assert kept.call_count == 2
    kept(5)
    assert kept.call_count == 3
    assert len(rig.rows(watched)) == 2


def test_autospecced_mocks(rig: Rig) -> None:
    fake = mock.create_autospec(charge, return_value="ok")
    watched = rig.watch(types.SimpleNamespace(charge=fake), "charge")
    assert rig.run(fake, 3) == "ok"
    fake.assert_called_once_with(3)
    assert rig.rows(watched) == [(None, 3, "EUR", None)]


def test_builtins_are_replaced_wherever_a_module_holds_them(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    user = types.ModuleType("user_module")
    exec("from os import remove", user.__dict__)
    monkeypatch.setitem(sys.modules, "user_module", user)
    original = os.remove
    watched = rig.watch(os, "remove")
    for name in "ab":
        (tmp_path / name).touch()

    def job() -> None:
        user.remove(str(tmp_path / "a"))
        os.remove(tmp_path / "b")
        assert pickle.loads(pickle.dumps(os.remove)) is os.remove
        late = types.ModuleType("late_module")
        exec("from os import remove", late.__dict__)
        monkeypatch.setitem(sys.modules, "late_module", late)

    rig.run(job)
    assert [row[1] for row in rig.rows(watched)] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert os.remove is original
    assert user.remove is original
    assert sys.modules["late_module"].remove is original
    assert sys.modules["posix"].remove is original


def test_objects_without_python_code(rig: Rig) -> None:
    lru, part = rig.watch(HERE, "cached"), rig.watch(HERE, "charge_ten", result="ten")
    originals = cached, charge_ten

    def job() -> None:
        cached(1)
        cached(1)
        assert cached.cache_info().hits == 1
        assert charge_ten() == "ten"

    cached.cache_clear()
    rig.run(job)
    assert [row[1] for row in rig.rows(lru)] == [1, 1]
    assert len(rig.rows(part)) == 1
    assert (cached, charge_ten) == originals
    assert HERE.cached is originals[0]


def test_cached_methods_and_partial_methods(rig: Rig) -> None:
    before = dict(vars(Gateway))
    rate, ten = rig.watch(Gateway, "rate"), rig.watch(Gateway, "send_ten")
    gateway = Gateway()

    def job() -> None:
        assert gateway.rate("EUR") == 2
        assert Gateway.rate(gateway, "USD") == 2
        assert gateway.send_ten() == ("g", 10)

    rig.run(job)
    assert rig.rows(rate) == [(None, "EUR"), (None, "USD")]
    assert len(rig.rows(ten)) == 1
    assert dict(vars(Gateway)) == before


def test_a_cached_method_watched_on_an_instance(rig: Rig) -> None:
    one, two = Gateway(), Gateway()
    watched = rig.watch(one, "rate")
    rig.run(lambda: (one.rate("EUR"), two.rate("USD")))
    assert rig.rows(watched) == [(None, "EUR")]
    assert "rate" not in vars(one)


def test_a_method_of_c_on_a_python_class(rig: Rig) -> None:
    class Box(list):  # type: ignore[type-arg]
        pass

    watched = rig.watch(Box, "append")
    box = Box()
    rig.run(lambda: (box.append(1), list[int]().append(2)))
    assert (box, len(rig.rows(watched))) == ([1], 1)
    assert "append" not in vars(Box)


def test_generators_count_at_the_call(rig: Rig) -> None:
    watched = rig.watch(HERE, "numbers")
    assert list(rig.run(numbers, 3)) == [0, 1, 2]
    assert rig.rows(watched) == [(None, 3)]


def test_nested_watched_calls_are_steps_of_their_own(rig: Rig) -> None:
    outer, inner = rig.watch(HERE, "refund"), rig.watch(HERE, "charge")
    rig.run(refund, 5)
    assert [step.text for step in rig.recorder.steps] == ["test_calls.refund", "test_calls.charge"]
    assert (len(rig.rows(outer)), len(rig.rows(inner))) == (1, 1)


def test_signatures_stay_while_patched(rig: Rig) -> None:
    rig.watch(HERE, "charge")
    rig.watch(Gateway, "send")
    gateway = Gateway()

    def job() -> tuple[inspect.Signature, ...]:
        return inspect.signature(charge), inspect.signature(gateway.send)

    assert rig.run(job) == (inspect.signature(charge), inspect.signature(gateway.send))


def test_the_site_of_a_call_is_its_caller(rig: Rig) -> None:
    from retrychaos.world.sites import user_site

    rig.watch(HERE, "charge")
    found = []
    rig.recorder.boundary = lambda step: found.append(user_site(sys._getframe(1)))  # type: ignore[method-assign]

    def job() -> None:
        charge(1)  # here

    rig.run(job)
    assert found[0].source == "charge(1)  # here"
    assert found[0].function == "job"


# -- what counts as an effect ---------------------------------------------------------------------------------------


def test_a_call_that_raises_is_no_effect(rig: Rig) -> None:
    watched = rig.watch(HERE, "fails")
    with pytest.raises(ValueError, match="3"):
        rig.run(fails, 3)
    assert rig.rows(watched) == []
    assert watched.seen
    assert len(rig.recorder.steps) == 1


@pytest.mark.parametrize("result", [KeyError("declined"), KeyError])
def test_a_result_that_is_an_exception_is_raised(rig: Rig, result: Any) -> None:
    watched = rig.watch(HERE, "charge", result=result)
    with pytest.raises(KeyError):
        rig.run(charge, 3)
    assert rig.rows(watched) == []


def test_results(rig: Rig) -> None:
    value = rig.watch(HERE, "refund", result={"id": [1]})
    function = rig.watch(HERE, "charge", result=lambda amount, currency="USD", **rest: (amount, currency))
    method = rig.watch(Gateway, "send", result=lambda amount: -amount)
    made = rig.watch(HERE, "fails", result=Decimal)

    def job() -> None:
        anything_of(refund(1))["id"].append(2)
        assert refund(1) == {"id": [1]}
        assert charge(4) == (4, "USD")
        assert Gateway().send(5) == -5
        assert fails(6) == Decimal(6)

    rig.run(job)
    assert [len(rig.rows(each)) for each in (value, function, method, made)] == [2, 1, 1, 1]


def test_none_is_a_result(rig: Rig) -> None:
    rig.watch(HERE, "charge", result=None)
    assert rig.run(charge, 1) is None


def test_a_delivery_that_ends_at_the_step_has_no_effect(rig: Rig) -> None:
    ran = []

    def send() -> None:
        ran.append(1)

    watched = rig.watch(types.SimpleNamespace(send=send), "send")
    rig.recorder.die_at = 0
    with pytest.raises(Died):
        rig.run(send)
    assert (ran, rig.rows(watched)) == ([], [])


def test_arguments_are_taken_before_the_call(rig: Rig) -> None:
    def send(items: list[int]) -> None:
        items.clear()

    watched = rig.watch(types.SimpleNamespace(send=send), "send")
    rig.run(lambda: send([1, 2]))
    assert rig.rows(watched) == [(None, (1, 2))]
    assert rig.calls.log[0][1] == Call(([1, 2],), {}, {"items": [1, 2]})


def test_wrong_arguments_are_the_jobs_own_error(rig: Rig) -> None:
    watched, with_result = rig.watch(HERE, "charge"), rig.watch(HERE, "refund", result=1)
    with pytest.raises(TypeError, match="amount"):
        rig.run(charge)
    with pytest.raises(TypeError, match="amount"):
        rig.run(refund)
    assert rig.rows(watched) == rig.rows(with_result) == []


def test_a_signature_that_lies(rig: Rig) -> None:
    def send(*args: Any) -> int:
        return len(args)

    send.__signature__ = inspect.signature(refund)
    watched = rig.watch(types.SimpleNamespace(send=send), "send")
    assert rig.run(lambda: send(1, 2, 3)) == 3
    assert rig.rows(watched) == [(None, ((1, 2, 3), ()))]


def test_outside_of_deliveries_nothing_counts(rig: Rig) -> None:
    watched = rig.watch(HERE, "charge", result="stub")
    rig.world.install()
    assert charge(1) == "charged 1 EUR"
    rig.world.recorder = rig.recorder
    rig.world.quiet = True
    assert charge(2) == "charged 2 EUR"
    rig.world.quiet = False
    assert charge(3) == "stub"
    rig.stop()
    assert charge(4) == "charged 4 EUR"
    assert rig.rows(watched) == [(None, 3, "EUR", None)]


# -- keys -----------------------------------------------------------------------------------------------------------


def pay(amount: int, key: str | None = None) -> int:
    return amount


def test_equal_keys_count_once_and_get_the_first_answer(rig: Rig) -> None:
    answers = iter(range(10))
    watched = rig.watch(HERE, "pay", key="key", result=lambda amount, key=None: next(answers))

    def job() -> list[int]:
        return [pay(5, key="a"), pay(5, key="a"), pay(6, key="a"), pay(5, key="b"), pay(5), pay(5)]

    assert rig.run(job) == [0, 0, 1, 2, 3, 4]
    assert watched.columns == ("key", "amount", "argument key")
    assert rig.rows(watched) == [("a", 5, "a"), ("a", 6, "a"), ("b", 5, "b"), (None, 5, None), (None, 5, None)]


def test_equal_keys_pass_through(rig: Rig) -> None:
    made = []

    def send(amount: int, **options: Any) -> None:
        made.append(amount)

    watched = rig.watch(types.SimpleNamespace(send=send), "send", key="idempotency_key")
    rig.run(lambda: [send(1, idempotency_key="k"), send(1, idempotency_key="k"), send(1)])
    assert made == [1, 1, 1]
    assert [row[0] for row in rig.rows(watched)] == ["k", None]


def test_a_wrong_key_lists_the_parameters(rig: Rig) -> None:
    with pytest.raises(OptionError, match="parameters: amount, currency, note"):
        rig.watch(HERE, "charge", key="idempotency_key")
    assert rig.calls.watched == []


# -- misuse ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        (HERE, "chrage", "did you mean charge"),
        (Gateway, "sned", "did you mean send"),
        (Gateway(), "sned", "did you mean send"),
        (Gateway, "balance", "property"),
        (Gateway(), "balance", "property"),
        (Gateway(), "name", "not callable"),
        (HERE, "Gateway", "is a class"),
        (HERE, "charges_one_by_one", "asynchronous generator: .* Watch the function that it calls"),
        ([], "append", "cannot be replaced"),
        (dict, "get", "cannot be replaced"),
    ],
)
def test_misuse_is_refused_when_watching(rig: Rig, owner: Any, name: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        rig.watch(owner, name)


def test_two_watches_on_one_function(rig: Rig) -> None:
    gateway = Gateway()
    rig.watch(HERE, "charge")
    rig.watch(gateway, "send")
    rig.watch(os, "remove")
    for owner, name in [
        (HERE, "charge"),
        (types.SimpleNamespace(again=charge), "again"),
        (gateway, "send"),
        (Gateway, "send"),
        (os, "remove"),
        (sys.modules["posix"], "unlink" if os.unlink is os.remove else "remove"),
    ]:
        with pytest.raises(OptionError, match="already watched"):
            rig.watch(owner, name)


def test_watching_within_a_check(rig: Rig) -> None:
    rig.start()
    with pytest.raises(OptionError, match="before the check"):
        rig.watch(HERE, "charge")


def test_a_function_that_returns_a_coroutine_is_refused(rig: Rig) -> None:
    rig.watch(HERE, "hidden_async")
    with pytest.raises(OptionError, match="something to be awaited, and does not say so"):
        rig.run(hidden_async, 1)


# -- patches leave no trace -----------------------------------------------------------------------------------------


def test_uninstall_restores_the_identical_code(rig: Rig) -> None:
    functions = [charge, Gateway.send, Gateway.ping, Gateway.build.__func__, wrapped, Handler.__call__]
    before = [(each, each.__code__, dict(each.__dict__)) for each in functions]
    for owner, name in [
        (HERE, "charge"),
        (Gateway, "send"),
        (Gateway, "ping"),
        (Gateway, "build"),
        (HERE, "wrapped"),
        (HERE, "handler"),
        (posixpath, "basename"),
    ]:
        rig.watch(owner, name)
    for _ in range(3):
        rig.calls.install()
        assert charge.__code__ is not before[0][1]
        rig.calls.install()
        rig.calls.uninstall()
        rig.calls.uninstall()
    for function, code, attributes in before:
        assert function.__code__ is code
        assert function.__dict__ == attributes


def test_a_failed_install_leaves_nothing_behind(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    code = charge.__code__
    rig.watch(HERE, "charge")
    rig.watch(os, "remove")
    monkeypatch.setattr("retrychaos.world.interception._places", lambda wanted: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rig.calls.install()
    monkeypatch.undo()
    rig.calls.uninstall()
    assert charge.__code__ is code
    assert type(os.remove) is types.BuiltinFunctionType


def test_a_mock_child_is_as_before(rig: Rig) -> None:
    client = mock.Mock()
    child = client.send
    names = set(vars(client))
    rig.watch(client, "send")
    rig.run(client.send)
    assert client.send is child
    assert set(vars(client)) == names


# -- state ----------------------------------------------------------------------------------------------------------


def test_nothing_new_is_the_same_version(rig: Rig) -> None:
    rig.watch(HERE, "charge")
    rig.watch(HERE, "refund", result=1)
    rig.start()
    empty = rig.calls.refresh()
    assert rig.calls.sweep() is empty
    refund(1)
    one = rig.world.facts()["calls"]
    assert one is not empty
    assert rig.calls.refresh() is one
    assert one.relations["call test_calls.charge"] is empty.relations["call test_calls.charge"]


def test_restore_brings_back_effects_and_answers(rig: Rig) -> None:
    answers = iter(range(10))
    watched = rig.watch(HERE, "pay", key="key", result=lambda amount, key=None: next(answers))
    rig.start()
    empty, nothing = rig.calls.version, rig.calls.save()
    assert pay(5, key="a") == 0
    one, saved = rig.calls.refresh(), rig.calls.save()
    pay(5, key="b")
    rig.calls.restore(one, saved)
    assert rig.calls.refresh() is one
    assert pay(5, key="a") == 0
    assert rig.calls.refresh() is one
    rig.calls.restore(empty, nothing)
    assert pay(5, key="a") == 2
    again = rig.calls.refresh()
    assert again.relations[watched.relation] is one.relations[watched.relation]


def test_save_survives_pickling(rig: Rig) -> None:
    unpicklable: Any = object.__new__(type("Local", (), {}))
    watched = rig.watch(HERE, "pay", key="key", result=lambda amount, key=None: amount if amount else unpicklable)
    rig.start()
    pay(5, key="a")
    pay(0, key="b")
    version, blob = pickle.loads(pickle.dumps((rig.calls.refresh(), rig.calls.save())))
    in_process = rig.calls.save()
    pay(7)
    rig.calls.restore(version, blob)
    assert rig.calls.refresh() is version
    assert (pay(5, key="a"), pay(0, key="b")) == (5, unpicklable)
    assert rig.calls.refresh() is version
    assert version.relations[watched.relation].rows == (("a", 5, "a"), ("b", 0, "b"))
    rig.calls.restore(rig.calls.version, in_process)
    assert pay(0, key="b") is unpicklable


def test_the_log_is_of_one_delivery(rig: Rig) -> None:
    watched = rig.watch(Gateway, "send")
    rig.start()
    empty = rig.world.save()
    Gateway().send(1)
    assert rig.calls.log == [(watched, Call((1,), {}, {"amount": 1}))]
    assert rig.world.end_delivery() == []
    assert rig.calls.log == []
    rig.calls.clean_run_done()
    assert watched.calls == [Call((1,), {}, {"amount": 1})]
    rig.world.restore(empty)
    rig.world.end_delivery()
    assert len(watched.calls) == 1  # stays that of the clean run
    rig.calls.clean_run_done()
    assert watched.calls == []


def test_seen_is_of_one_check(rig: Rig) -> None:
    watched = rig.watch(HERE, "charge")
    rig.run(charge, 1)
    assert watched.seen
    rig.run(lambda: None)
    assert not watched.seen


def test_close_forgets_effects_and_keeps_declarations(rig: Rig) -> None:
    watched = rig.watch(HERE, "charge")
    rig.run(charge, 1)
    rig.calls.close()
    assert rig.rows(watched) == []
    rig.run(charge, 2)
    assert [row[1] for row in rig.rows(watched)] == [2]


def test_inside_tells_what_a_declaration_covers(rig: Rig) -> None:
    depths: list[bool] = []

    def send() -> None:
        depths.append(rig.calls.inside())

    rig.watch(types.SimpleNamespace(send=send), "send")
    entered: list[str] = []
    rig.calls.entering.append(lambda: entered.append("in"))
    rig.calls.leaving.append(lambda: entered.append("out"))
    rig.run(send)
    assert depths == [True]
    assert not rig.calls.inside()
    assert entered == ["in", "out"]


def test_objects_as_arguments(rig: Rig) -> None:
    @dataclass
    class Money:
        amount: Decimal

    watched = rig.watch(HERE, "anything", result=None)
    rig.run(lambda: anything(Money(Decimal("1.50")), to=object()))
    assert rig.rows(watched) == [
        (None, (("test_objects_as_arguments.<locals>.Money", ("amount", "1.50")),), (("to", "object"),))
    ]


# -- values ---------------------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Point(NamedTuple):
    x: int
    y: int


class Size:
    """As attrs has it."""

    __attrs_attrs__ = (types.SimpleNamespace(name="width"),)

    def __init__(self, width: int) -> None:
        self.width = width


class Model:
    """As pydantic has it."""

    model_fields: ClassVar[dict[str, Any]] = {"amount": None}

    def model_dump(self) -> dict[str, Any]:
        return {"amount": Decimal(1)}


class Row:
    """As SQLAlchemy has it: which columns are loaded depends on the last commit."""

    def __init__(self, **loaded: Any) -> None:
        self._sa_instance_state = types.SimpleNamespace(key=(Row, (7,), None))
        self.__dict__.update(loaded)


class Slots:
    __slots__ = ("_hidden", "name", "unset")

    def __init__(self) -> None:
        self.name = "n"
        self._hidden = "h"


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError

    def __hash__(self) -> int:
        raise RuntimeError

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


cycle: list[Any] = []
cycle.append(cycle)


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        (None, None),
        (True, True),
        (1.5, 1.5),
        (float("nan"), "nan"),
        (b"x", b"x"),
        (bytearray(b"x"), b"x"),
        (Decimal("1.50"), "1.50"),
        (datetime.datetime(2024, 1, 2, 3, 4, tzinfo=datetime.UTC), "2024-01-02T03:04:00+00:00"),
        (datetime.date(2024, 1, 2), "2024-01-02"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Colour.RED, "Colour.RED"),
        (Level.LOW, "Level.LOW"),
        (PurePosixPath("/a"), "/a"),
        ([1, (2, [3])], (1, (2, (3,)))),
        ({"b": 1, "a": [2]}, (("a", (2,)), ("b", 1))),
        ({1: "x", "1": "y"}, (("1", "y"), (1, "x"))),
        ({3, 1, 2}, (1, 2, 3)),
        (Point(1, 2), ("Point", ("x", 1), ("y", 2))),
        (Size(3), ("Size", ("width", 3))),
        (Model(), ("Model", ("amount", "1"))),
        (ValueError("no", 1), ("ValueError", "no", 1)),
        (charge, f"{__name__}.charge"),
        (Decimal, "decimal.Decimal"),
        (os, "os"),
        (object(), "object"),
        (Slots(), ("Slots", ("name", "n"))),
        (Gateway("g"), ("Gateway", ("name", "g"))),
        (Row(id=7, total=5), (f"{__name__}.Row", (7,))),
        (Row(), (f"{__name__}.Row", (7,))),
        (cycle, ("...",)),
    ],
)
def test_plain(value: Any, cell: Any) -> None:
    found = plain(value)
    assert (found, type(found)) == (cell, type(cell))
    hash(found)


@pytest.mark.parametrize("make", [Hostile, mock.Mock, mock.MagicMock, object, threading.Lock, lambda: iter([])])
def test_plain_and_short_of_anything(make: Any) -> None:
    value = make()
    for text in (repr(plain(value)), repr(plain([{"x": value}])), short(value), short([value])):
        assert "0x" not in text
        assert str(id(value)) not in text
    assert plain(value) == plain(value)


def test_plain_is_bounded_in_depth() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    assert "..." in repr(plain(deep))
    short(deep)


def test_short() -> None:
    assert short("a" * 100, 10) == "'aaaaaaaa…"
    assert short({"a": [1, (2,)], "b": Colour.RED}) == "{'a': [1, (2,)], 'b': Colour.RED}"
    assert short("two\nlines") == "'two\\nlines'"
    assert short(Point(1, 2)) == "Point(x=1, y=2)"
    assert short(Row(id=7)) == "Row((7,))"
    assert short(object()) == "<object>"
    assert len(short(list(range(10**6)), 60)) == 60


def test_copied() -> None:
    inner = Gateway()
    payload = {"a": [1, {2}], "b": (inner, [3])}
    fresh = copied(payload)
    assert fresh == payload
    fresh["a"][1].add(9)
    fresh["b"][1].append(9)
    assert payload == {"a": [1, {2}], "b": (inner, [3])}
    assert fresh["b"][0] is inner
    again = copied(cycle)
    assert again is not cycle
    assert again[0] is again
