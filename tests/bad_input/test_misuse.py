"""Options, payloads and tokens that are wrong: the error names the right ones, and nothing has been touched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import retrychaos
from retrychaos import ChaosError, OptionError, PlanError
from retrychaos.model.options import NAMES, PLANNED, Options, from_text
from retrychaos.model.plan import Leg, Plan, parse


@pytest.fixture
def chaos() -> Iterator[retrychaos.Chaos]:
    with retrychaos.Chaos(duplicates=1) as made:
        yield made


# -- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["budgit", "crash", "Crashes", "", "retries"])
def test_an_unknown_option_lists_the_right_ones(name: str, chaos: retrychaos.Chaos) -> None:
    for make in (lambda: chaos(**{name: 1}), lambda: retrychaos.Chaos(**{name: 1})):
        with pytest.raises(OptionError) as caught:
            make()
        assert f"there is no option {name!r}" in str(caught.value)
        assert ", ".join(NAMES) in str(caught.value)


def test_a_slip_of_the_pen_is_guessed() -> None:
    with pytest.raises(OptionError, match=r"Did you mean 'tolerate'\?"):
        retrychaos.Chaos(tolerates=["mail"])


@pytest.mark.parametrize("name", PLANNED)
def test_an_option_of_a_later_version_says_so(name: str) -> None:
    with pytest.raises(OptionError, match=f"option '{name}' is not in this version yet. Options now: crashes"):
        retrychaos.Chaos(**{name: 1})


WRONG: list[tuple[str, Any, str]] = [
    ("crashes", -1, '"any" or a number of crashes from 0'),
    ("crashes", "some", '"any" or a number of crashes from 0'),
    ("crashes", 1.5, '"any" or a number of crashes from 0'),
    ("crashes", True, '"any" or a number of crashes from 0'),
    ("crashes", None, '"any" or a number of crashes from 0'),
    ("budget", 0, "a number of seconds above 0"),
    ("budget", "10", "a number of seconds above 0"),
    ("budget", float("nan"), "a number of seconds above 0"),
    ("budget", float("inf"), "a number of seconds above 0"),
    ("budget", True, "a number of seconds above 0"),
    ("tolerate", "mail", 'a list of effects, such as ["mail"]'),
    ("tolerate", [1], 'a list of effects, such as ["mail"]'),
    ("tolerate", 5, 'a list of effects, such as ["mail"]'),
    ("volatile", "jobs.attempts", 'a list of cells, such as ["jobs.attempts"]'),
    ("isolation", "thread", '"sample" or "process"'),
    ("isolation", ["process"], '"sample" or "process"'),
    ("scratch", "redis://localhost", "a list of server addresses"),
    ("duplicates", 0, "a number of deliveries from 1 to 4"),
    ("duplicates", 5, "a number of deliveries from 1 to 4"),
    ("duplicates", True, "a number of deliveries from 1 to 4"),
    ("faults", 0, "True or False"),
    ("late", "no", 'True, False, or "slow"'),
    ("leases", "jobs.until", "a list of columns"),
    ("leases", ["jobs.until+soon"], 'or ["jobs.started_at+5m"]'),
]


@pytest.mark.parametrize(("name", "value", "expected"), WRONG)
def test_a_wrong_value_says_what_is_right(name: str, value: Any, expected: str, chaos: retrychaos.Chaos) -> None:
    with pytest.raises(OptionError) as caught:
        chaos(**{name: value})
    assert f"option {name!r} does not take {value!r}: " in str(caught.value) and expected in str(caught.value)
    assert chaos.options == Options(duplicates=1)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("crashes", "any", "any"),
        ("crashes", " 3 ", 3),
        ("budget", "2.5", 2.5),
        ("budget", "7", 7),
        ("tolerate", "a, b\nc,,", ("a", "b", "c")),
        ("volatile", "", ()),
        ("faults", "Off", False),
        ("late", "yes", True),
        ("late", " Slow\n", "slow"),
        ("leases", "jobs.until, jobs.began + 5m", ("jobs.until", "jobs.began + 5m")),
        ("isolation", " process\n", "process"),
    ],
)
def test_values_as_text(name: str, text: str, value: Any) -> None:
    assert from_text(name, text) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [("crashes", "1.5"), ("crashes", "inf"), ("crashes", "nan"), ("budget", "inf"), ("budget", "soon"), ("late", "2")],
)
def test_texts_that_are_no_value(name: str, text: str) -> None:
    with pytest.raises(OptionError):
        Options().with_changes({name: from_text(name, text)})


# -- jobs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", [42, None, "charge", [len]])
def test_something_that_cannot_be_called(job: Any, chaos: retrychaos.Chaos, untouched: Any) -> None:
    for ask in (chaos.check, chaos.explore, lambda job: chaos.run(job, plan="rc1")):
        with untouched():
            with pytest.raises(ChaosError, match=r"the job must be something callable, and .* is not"):
                ask(job)
    assert chaos.reports == []


def test_a_check_within_a_check(shop: Any, chaos: retrychaos.Chaos, untouched: Any) -> None:
    def job() -> None:
        shop.pay(1)
        chaos.check(shop.pay, 2)

    with untouched(shop.engine):
        with pytest.raises(ChaosError, match="a job under check must not check another"):
            chaos.check(job)
    assert chaos.check(shop.pay, 1).verdict == "proven"


# -- tokens ---------------------------------------------------------------------------------------------------------


def token_of(shop: Any, chaos: retrychaos.Chaos) -> str:
    return chaos.explore(shop.pay_twice, 1).findings[0].token


def test_tokens_that_do_not_fit(shop: Any, chaos: retrychaos.Chaos, untouched: Any) -> None:
    token = token_of(shop, chaos)
    with shop.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE orders SET status = 'new' WHERE id = 1")
    wrong = {
        "garbage": "is not a token of retrychaos; tokens begin with 'rc1'",
        "": "is not a token of retrychaos",
        token[:-1]: "is damaged: its checksum does not fit. Copy the whole token",
        token[:-6]: "is damaged",
        token.replace("rc1", "rc2"): r"was written by another version \(rc2, this one writes rc1\)",
        token.replace(".c", ".c9"): "is damaged",
        Plan("another.job", (Leg(),)).token: r"belongs to another job than .*conftest\.Shop\.pay_twice",
    }
    for each, message in wrong.items():
        with untouched(shop.engine):
            with pytest.raises(PlanError, match=message):
                chaos.run(shop.pay_twice, 1, plan=each)


def test_a_token_that_no_longer_fits_the_job(shop: Any, chaos: retrychaos.Chaos, untouched: Any) -> None:
    def job(order: int) -> None:
        (shop.pay_twice if long else shop.pay)(order)

    def shorter(order: int) -> None:
        shop.pay(order)

    long = True
    token = chaos.explore(job, 1).findings[0].token
    long = False
    with shop.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE orders SET status = 'new' WHERE id = 1")
    with untouched(shop.engine):
        with pytest.raises(
            PlanError, match=r"the token no longer fits: delivery 1 should die after step 3, but its steps"
        ):
            chaos.run(job, 1, plan=token)
    name = f"{__name__}.test_a_token_that_no_longer_fits_the_job.<locals>.shorter"
    with untouched(shop.engine):
        with pytest.raises(PlanError, match="it has only 4 steps now"):
            chaos.run(shorter, 1, plan=Plan(name, (Leg(9, "abc"), Leg())).token)


@pytest.mark.parametrize(
    "legs",
    [
        (Leg(),),
        (Leg(3, "abc"), Leg()),
        (Leg(0), Leg(12, "00f", 60), Leg(wait=86_400)),
        (Leg(None, wait=5), Leg(1, "1fe")),
    ],
)
def test_tokens_round_trip(legs: tuple[Leg, ...]) -> None:
    plan = Plan("shop.charge", legs)
    again = parse(plan.token, "shop.charge")
    assert again.token == plan.token
    assert [(leg.crash_after, leg.wait) for leg in again.legs] == [(leg.crash_after, leg.wait) for leg in legs]
    assert parse(f"  {plan.token}\n", "shop.charge") == again
    assert " " not in plan.token and len(plan.token) < 60
