"""A library as a subject: the idempotency utility of AWS Lambda Powertools, with its records in Redis.

Nothing of it is replaced: records are written through a client of redis-py, and its clock is the one of the check. What
it promises, and what not, is judged by the same sentences as the jobs of this gallery. README.md has it in short.
"""

from __future__ import annotations

import json
import time
import warnings
from typing import Any

import pytest
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from retrychaos import Report
from scenarios.conftest import fresh_world, proven, refuted
from scenarios.shop import Session, payments, redis

pytest.importorskip(
    "aws_lambda_powertools.utilities.idempotency.persistence.cache",
    reason="the subject of these tests is AWS Lambda Powertools with Redis (extra: dev)",
)

from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent, idempotent_function
from aws_lambda_powertools.utilities.idempotency.exceptions import IdempotencyValidationError
from aws_lambda_powertools.utilities.idempotency.persistence.cache import CachePersistenceLayer

TIMEOUT = 30
"""Seconds after which Lambda kills a function."""
VISIBILITY = 60
"""Seconds after which the queue takes a message for lost: always more than the timeout of the function."""

EVENT = {"order_id": 1, "cents": 4200}


class Base(DeclarativeBase):
    pass


class Receipt(Base):
    __tablename__ = "receipts"
    order_id: Mapped[int] = mapped_column(primary_key=True)
    charge: Mapped[str]


class Context:
    """What Lambda tells a function about itself; the utility wants to know how long it may still run."""

    def __init__(self) -> None:
        self._deadline = time.time() + TIMEOUT

    def get_remaining_time_in_millis(self) -> int:
        return max(0, round((self._deadline - time.time()) * 1000))


def records() -> CachePersistenceLayer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its name is to change in the next major version
        return CachePersistenceLayer(client=redis)


def by_order(**options: Any) -> dict[str, Any]:
    """How a function is made idempotent: by the number of the order."""
    return {"persistence_store": records(), "config": IdempotencyConfig(event_key_jmespath="order_id", **options)}


FUNCTIONS = (
    "charge",
    "charge_with_key",
    "charge_and_write",
    "charge_with_key_and_write",
    "charge_validated",
    "charge_cached",
    "charge_cached_with_key",
    "charge_order_with_key",
)
HASH = "c4ca4238a0b923820dcc509a6f75849b"  # of the number of the order


def arrange() -> None:
    """For each function a record of somebody who was killed before it had done anything.

    So whoever comes has to clean up behind somebody, also in the clean run; that leaves a lock of ten seconds behind.
    """
    left = {"status": "INPROGRESS", "expiration": int(time.time()) + 30 * 24 * 3600, "in_progress_expiration": 1}
    for function in FUNCTIONS:
        redis.set(f"test-func.{__name__}.{function}#{HASH}", json.dumps(left))


@pytest.fixture(autouse=True)
def outside(chaos):
    chaos.watch(payments, "charge", result="ch_1", key="key")


@pytest.fixture
def unlucky(chaos):
    """No crash: an error, a lost reply or a shutdown in the first delivery, and then it is delivered again."""
    return chaos(duplicates=1, crashes=0, faults=True)


# -- a function that charges a card, with and without a key -----------------------------------------------------------


@idempotent(**by_order())
def charge(event: dict[str, Any], context: Context) -> dict[str, str]:
    return {"charge": payments.charge(event["order_id"], event["cents"])}


@idempotent(**by_order())
def charge_with_key(event: dict[str, Any], context: Context) -> dict[str, str]:
    return {"charge": payments.charge(event["order_id"], event["cents"], key=f"order-{event['order_id']}")}


@idempotent(**by_order())
def charge_what_is_new(event: dict[str, Any], context: Context) -> dict[str, str]:
    return {"charge": payments.charge(event["order_id"], event["cents"])}


def deliver_what_is_new() -> None:
    charge_what_is_new(EVENT, Context())


def deliver() -> None:
    charge(EVENT, Context())


def deliver_with_key() -> None:
    charge_with_key(EVENT, Context())


def deliver_after_the_timeout() -> None:
    time.sleep(VISIBILITY)
    charge(EVENT, Context())


def deliver_with_key_after_the_timeout() -> None:
    time.sleep(VISIBILITY)
    charge_with_key(EVENT, Context())


def places(report: Report) -> str:
    """Where else a process may die with the same result."""
    (finding,) = report.findings
    return " ".join(finding.also_at)


def test_two_at_once(racing):
    """Holds: one of them gets the record, the other one is refused, comes again, and gets the stored answer.

    So it is where both find the record of a dead one: there is a lock for those who clean up.
    """
    proven(racing, deliver_what_is_new)
    proven(racing, deliver)


def test_killed_after_the_effect(crashing, racing):
    """Does not hold, and is documented so: when the function must have timed out, its record counts no more.

    Whether it had charged the card by then is not in the record. With a key at the provider it does not matter.
    """
    refuted(crashing, deliver_after_the_timeout, duplicated="Payments.charge")
    proven(crashing, deliver_with_key_after_the_timeout)
    proven(racing, deliver_with_key)


def test_refused_while_it_is_in_progress(crashing):
    """Holds: a copy that comes within the timeout is refused. Here nothing but the end of the record lets it in."""
    report = refuted(crashing(late=False), deliver, duplicated="Payments.charge")
    *refused, again = report.findings[0].timeline[1:]
    assert {delivery.end for delivery in refused} == {"failed"}
    assert again.after > 3600


def test_delivered_again_after_the_record_has_expired(crashing):
    """Does not hold, and is documented so: after an hour, if nothing else is said, a record is no record any more.

    Then it takes no crash between charge and record: it is enough that the acknowledgement was lost. (That is the
    place with the data in its record.)
    """
    soon = crashing(late=False)
    assert "data" not in places(refuted(soon, deliver_after_the_timeout, duplicated="Payments.charge"))
    assert "data" in places(refuted(crashing, deliver_after_the_timeout, duplicated="Payments.charge"))
    proven(crashing, deliver_with_key_after_the_timeout)


# -- an exception after the effect ------------------------------------------------------------------------------------


def write_receipt(order_id: int, charge: str) -> None:
    with Session.begin() as session:
        session.merge(Receipt(order_id=order_id, charge=charge))


@idempotent(**by_order())
def charge_and_write(event: dict[str, Any], context: Context) -> None:
    write_receipt(event["order_id"], payments.charge(event["order_id"], event["cents"]))


@idempotent(**by_order())
def charge_with_key_and_write(event: dict[str, Any], context: Context) -> None:
    key = f"order-{event['order_id']}"
    write_receipt(event["order_id"], payments.charge(event["order_id"], event["cents"], key=key))


def deliver_and_write() -> None:
    charge_and_write(EVENT, Context())


def deliver_with_key_and_write() -> None:
    charge_with_key_and_write(EVENT, Context())


def test_an_exception_after_the_effect(unlucky):
    """Does not hold, and is documented so: an exception deletes the record, and the function runs again, all of it."""
    refuted(unlucky, deliver_and_write, crashes=0, duplicated="Payments.charge")
    proven(unlucky, deliver_with_key_and_write)


# -- the payload is validated -----------------------------------------------------------------------------------------


@idempotent(**by_order(payload_validation_jmespath="cents"))
def charge_validated(event: dict[str, Any], context: Context) -> dict[str, str]:
    return {"charge": payments.charge(event["order_id"], event["cents"])}


def deliver_validated() -> None:
    time.sleep(VISIBILITY)
    charge_validated(EVENT, Context())


def test_another_amount_under_the_same_key():
    """Holds: who comes with another amount is refused."""
    redis.flushall()
    charge_validated(EVENT, Context())
    with pytest.raises(IdempotencyValidationError):
        charge_validated({**EVENT, "cents": 1}, Context())


def test_the_same_amount_under_the_same_key(crashing):
    """A fault of 3.37.0, on Redis only: the record of what is done has lost the hash of its payload.

    So each copy is refused, the right one too, until the record expires; and then the card is charged again. That
    takes no late delivery, as above, only one that is retried for an hour. (The TypeScript edition had the same, and
    has it no more: aws-powertools/powertools-lambda-typescript, issue 5705.)
    """
    redis.flushall()
    charge_validated(EVENT, Context())
    if "validation" in json.loads(redis.get(redis.keys()[0])):
        pytest.skip("this version keeps the hash of the payload")
    with pytest.raises(IdempotencyValidationError):
        charge_validated(EVENT, Context())

    # Without validation the only place to die is behind the charge. Here it is also behind the record.
    assert places(refuted(crashing, deliver_validated, duplicated="Payments.charge")) != places(
        refuted(crashing, deliver_after_the_timeout, duplicated="Payments.charge")
    )


# -- records in memory ------------------------------------------------------------------------------------------------


@idempotent(**by_order(use_local_cache=True))
def charge_cached(event: dict[str, Any], context: Context) -> dict[str, str]:
    return {"charge": payments.charge(event["order_id"], event["cents"])}


@idempotent(**by_order(use_local_cache=True))
def charge_cached_with_key(event: dict[str, Any], context: Context) -> dict[str, str]:
    return {"charge": payments.charge(event["order_id"], event["cents"], key=f"order-{event['order_id']}")}


def deliver_cached() -> None:
    time.sleep(VISIBILITY)
    charge_cached(EVENT, Context())


def deliver_cached_with_key() -> None:
    time.sleep(VISIBILITY)
    charge_cached_with_key(EVENT, Context())


def test_a_cache_changes_nothing(crashing):
    """Holds: the cache is a shortcut. The check finds it, and gives every delivery a process of its own."""
    proven(crashing, deliver_cached_with_key)

    fresh_world(deliver_cached)
    (finding,) = crashing.explore(deliver_cached).findings
    assert (finding.kind, finding.effect) == ("duplicated", "Payments.charge")


# -- without a context ------------------------------------------------------------------------------------------------


@idempotent_function(data_keyword_argument="order", **by_order())
def charge_order(order: dict[str, Any]) -> dict[str, str]:
    return {"charge": payments.charge(order["order_id"], order["cents"])}


@idempotent_function(data_keyword_argument="order", **by_order())
def charge_order_with_key(order: dict[str, Any]) -> dict[str, str]:
    return {"charge": payments.charge(order["order_id"], order["cents"], key=f"order-{order['order_id']}")}


def deliver_order() -> None:
    charge_order(order=EVENT)


def deliver_order_with_key() -> None:
    time.sleep(VISIBILITY)
    charge_order_with_key(order=EVENT)


@pytest.mark.filterwarnings("ignore:Couldn't determine the remaining time left")
def test_without_a_context(racing, crashing):
    """Holds, and takes its time, as documented: who does not say when it times out is in progress for an hour.

    (Up to 3.34.0 such a record counted for nothing on Redis, and two at once both charged the card:
    aws-powertools/powertools-lambda-python, issue 8386. The first line finds that.)
    """
    proven(racing, deliver_order)
    proven(crashing, deliver_order_with_key)
