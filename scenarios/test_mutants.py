"""The good jobs of this gallery, each spoiled by one small edit: every guard, key and commit in them is needed.

All of it against crashes, one delivery at a time; for two at a time see test_correct_locking.py.

A mutant is the source of a good job with one piece of text replaced. What must come of it was worked out by hand.
"""

from __future__ import annotations

import inspect
import linecache
import re
import uuid
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import pytest

from scenarios import (
    test_batches,
    test_counters,
    test_cursors,
    test_deduplication,
    test_documents,
    test_guards,
    test_locks,
    test_mail,
    test_metering,
    test_outbox,
    test_payments,
    test_refunds,
    test_reservations,
    test_rows,
)
from scenarios.conftest import proven, refuted
from scenarios.shop import keyed_mailer, payments, queue


@pytest.fixture(autouse=True)
def outside(chaos):
    chaos.watch(payments, "charge", key="key")
    chaos.watch(queue, "publish", result=None, key="key")
    chaos.watch(keyed_mailer, "send", result=None, key="key")
    chaos.watch(test_cursors.directory, "put", result=None, key="user_id")
    chaos.watch(test_refunds.interpreter, "interpret", result=test_refunds.ProviderError("refused"))


def mutant(job: FunctionType, change: str, old: str, new: str) -> Callable[..., Any]:
    """`job` with the first `old` in it replaced by `new`, named after the change. Lines in both begin unindented."""
    source = inspect.getsource(job)
    first = re.escape(old.partition("\n")[0])
    indent = re.search(rf"^( *).*{first}", source, re.MULTILINE)[1]
    old, new = (text.replace("\n", f"\n{indent}") for text in (old, new))
    assert old in source, f"{old!r} is not in\n{source}"
    source = source.replace(old, new, 1)
    file = f"{inspect.getsourcefile(job)} ({change})"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    code = next(const for const in compile(source, file, "exec").co_consts if isinstance(const, CodeType))
    made = FunctionType(code, job.__globals__ | {"uuid": uuid})
    made.__qualname__ = f"{job.__name__} ({change})"
    return made


def unique(column: str) -> str:
    return f"IntegrityError: (sqlite3.IntegrityError) UNIQUE constraint failed: {column}"


REFUTED = [
    # rows
    (
        (test_rows.create_or_find_receipt, 1),
        ("not to find", '.on_conflict_do_nothing(["order_id"])', ""),
        {"stuck": unique("receipts.order_id")},
    ),
    (
        (test_rows.bill_and_note_key_together, 1),
        ("no guard", "return", "pass"),
        {"stuck": unique("done.key")},
    ),
    (
        (test_rows.bill_and_note_key_together, 1),
        ("no note", "session.add(Done(key=key))\n", ""),
        {"duplicated": "invoices"},
    ),
    (
        (test_rows.bill_and_note_key_together, 1),
        ("narrower key", 'f"bill-{order_id}"', "str(uuid.uuid4())"),
        {"duplicated": "done"},  # and its invoice
    ),
    (
        (test_rows.close_order_and_bill_together, 1),
        ("no guard", "return", "pass"),
        {"duplicated": "invoices"},
    ),
    (
        (test_rows.close_order_and_bill_together, 1),
        ("no status", 'order.status = "closed"\n', ""),
        {"duplicated": "invoices"},
    ),
    # counters
    (
        (test_counters.set_points, 2),
        ("adding", "customer.points = ", "customer.points += "),
        {"changed": "customers"},
    ),
    (
        (test_counters.add_points_once, 2),
        ("no guard", "return", "pass"),
        {"stuck": unique("credited.order_id")},
    ),
    (
        (test_counters.add_points_once, 2),
        ("no note", "session.add(Credited(order_id=order_id))", "pass"),
        {"changed": "customers"},
    ),
    (
        (test_counters.incr_points_and_note_together, 2),
        ("no MULTI", "transaction=True", "transaction=False"),
        {"changed": "redis points:1"},
    ),
    (
        (test_counters.incr_points_and_note_together, 2),
        ("no guard", "return", "pass"),
        {"changed": "redis points:1"},
    ),
    (
        (test_counters.points_by_order, 2),
        ("adding", "hset", "hincrby"),
        {"changed": "redis points by order:1"},
    ),
    # documents
    (
        (test_documents.generate_over_the_old_one, 1),
        ("appending", "redis.set", "redis.append"),
        {"changed": "redis documents:1"},
    ),
    # payments
    (
        (test_payments.charge_with_stored_key, 1),
        ("key not committed", "session.commit()", "session.flush()"),
        {"duplicated": "Payments.charge"},
    ),
    (
        (test_payments.charge_with_stored_key, 1),
        ("key not looked up", "if order.payment_key is None", "if True"),
        {"duplicated": "Payments.charge"},
    ),
    (
        (test_payments.charge_unless_paid_with_stable_key, 1),
        ("no key", ', key=f"order-{order.id}"', ""),
        {"duplicated": "Payments.charge"},
    ),
    # mail
    (
        (test_mail.welcome_with_key_then_mark, "ann"),
        ("no guard", "return", "pass"),
        {"stuck": unique("sendings.name")},
    ),
    (
        (test_mail.welcome_with_key_then_mark, "ann"),
        ("narrower key", "key=name", "key=str(uuid.uuid4())"),
        {"duplicated": "KeyedMailer.send"},
    ),
    # guards
    (
        (test_guards.attach_label_and_notify_each_guarded, 1),
        (
            "mark first",
            "if not order.notified:\n",
            "if not order.notified:\n    order.notified = True\n    session.commit()\n",
        ),
        {"lost": "KeyedMailer.send"},
    ),
    # reservations
    (
        (test_reservations.bill_under_a_lease, 1),
        ("return when busy", "raise Busy(key)", "return"),
        {"lost": "invoices"},  # and the reservation stays
    ),
    (
        (test_reservations.bill_under_a_lease, 1),
        ("no expiry", " and reservation.until > now", ""),
        {"stuck": "Busy: bill-1"},
    ),
    (
        (test_reservations.ingest_with_key_then_mark_seen, "e1"),
        ("no key", ", key=event", ""),
        {"duplicated": "Queue.publish"},
    ),
    (
        (test_reservations.ingest_with_key_then_mark_seen, "e1"),
        (
            "swapped",
            'queue.publish("events", event, key=event)\nredis.set(f"seen:{event}", "", ex=A_MONTH)',
            'redis.set(f"seen:{event}", "", ex=A_MONTH)\nqueue.publish("events", event, key=event)',
        ),
        {"lost": "Queue.publish"},
    ),
    # locks
    (
        (test_locks.flush_or_raise, 7),
        ("no expiry", ", ex=60", ""),
        {"stuck": "Busy: 7"},
    ),
    (
        (test_locks.deliver_under_lock_of_redis_py, 7),
        ("no timeout", ", timeout=60", ""),
        {"stuck": "it waits for ever"},
    ),
    (
        (test_locks.deliver_under_impatient_lock_of_redis_py, 7),
        ("return when busy", 'raise LockError(f"{batch} is being delivered")', "return"),
        {"lost": ("Queue.publish", "redis batch:7")},
    ),
    # outbox
    (
        (test_outbox.relay_with_key_and_hook_apart,),
        ("no key", ', key=f"outbox-{message.id}"', ""),
        {"duplicated": "Queue.publish"},
    ),
    (
        (test_outbox.relay_with_key_and_hook_apart,),
        ("hook may raise", "pass", "raise"),
        {"stuck": ("ArchivedBefore: 1", "ArchivedBefore: 2")},
    ),
    # batches
    (
        (test_batches.enqueue_and_delete_each,),
        ("commit between", "session.execute(delete", "session.commit()\nsession.execute(delete"),
        {"duplicated": "tasks"},
    ),
    (
        (test_batches.enqueue_and_delete_each,),
        ("delete everything", "delete(Missed).where(Missed.id.in_(numbers))", "delete(Missed)"),
        {"lost": "tasks"},
    ),
    (
        (test_batches.dispatch_and_mark_together,),
        ("no guard", ".where(Missed.processed_at.is_(None))", ""),
        {"duplicated": "tasks"},
    ),
    (
        (test_batches.send_digest_with_key, "ann", [1, 3]),
        ("key of the attempt", "{'_'.join(map(str, numbers))}", "{datetime.now()}"),
        {"duplicated": "KeyedMailer.send"},
    ),
    # metering
    (
        (test_metering.meter_and_set_local_units, 12),
        ("adding", "redis.hset", "redis.hincrby"),
        {"changed": "redis units:ann"},
    ),
    (
        (test_metering.meter_and_set_local_units, 12),
        ("known is a failure", "pass", "raise"),
        {"stuck": "KnownAlready: ann:12"},
    ),
    # cursors
    (
        (test_cursors.sync_and_save_each_user,),
        (
            "cursor first",
            "directory.put(",
            "cursor.created, cursor.user_id = user.created, user.id\nsession.commit()\ndirectory.put(",
        ),
        {"lost": "Directory.put"},
    ),
    # refunds
    (
        (test_refunds.fail_and_refund_together, 1),
        ("no guard", "return", "pass"),
        {"changed": "dreamers"},
    ),
    (
        (test_refunds.fail_and_refund_together, 1),
        ("no status", 'dream.status = "failed"\n', ""),
        {"changed": "dreamers"},
    ),
    # deduplication
    (
        (test_deduplication.notify_once_a_text, 7, "failed"),
        ("no guard", "return", "pass"),
        {"stuck": unique("notices.status_id, notices.text")},
    ),
]

PROVEN = [
    # The key does the work: the guard only saves a call.
    ((test_payments.charge_unless_paid_with_stable_key, 1), ("no guard", "return", "pass")),
    ((test_batches.send_digest_with_key, "ann", [1, 3]), ("no guard", "return", "pass")),
    # Everything in the loop can be repeated.
    ((test_metering.meter_and_set_local_units, 12), ("no guard", "return", "pass")),
    ((test_cursors.sync_and_save_each_user,), ("one user again", "position > (", "position >= (")),
    (
        (test_cursors.sync_and_save_each_user,),
        ("one second again", "cursor.user_id = user.created, user.id", "_ = user.created, 0"),
    ),
    # A lock that nobody releases ends by itself. It is slow, and it is right.
    ((test_locks.flush_or_raise, 7), ("no release", 'redis.delete(f"lock:{batch}")', "pass")),
    # With a key on the mail label and mark may be committed together, after it.
    ((test_guards.attach_label_and_notify_each_guarded, 1), ("one commit", "session.commit()", "pass")),
]


def name(case: tuple[Any, ...]) -> str:
    (job, *_), (change, *_), *_ = case
    return f"{job.__name__}: {change}"


@pytest.mark.parametrize("case", REFUTED, ids=name)
def test_every_piece_is_needed(crashing, case):
    (job, *args), edit, effects = case
    refuted(crashing, mutant(job, *edit), *args, **effects)


@pytest.mark.parametrize("case", PROVEN, ids=name)
def test_not_needed_but_for_speed(crashing, case):
    """Not every edit makes a job wrong, and a correct job must never be refuted."""
    (job, *args), edit = case
    proven(crashing, mutant(job, *edit), *args)
