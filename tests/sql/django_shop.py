"""A Django project in one module: settings, a shop of a few models, and jobs on it."""

from __future__ import annotations

import uuid
from typing import Any

import django
from django.conf import settings

if not settings.configured:
    settings.configure(
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        USE_TZ=True,
        SECRET_KEY="x",
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    )
    django.setup()

from django.db import IntegrityError, connection, connections, models, transaction  # which need settings


class Order(models.Model):
    status = models.CharField(max_length=20, default="new")
    n = models.IntegerField(default=0)
    changed = models.DateTimeField(auto_now=True)

    class Meta:
        app_label = "shop"


class Payment(models.Model):
    token = models.UUIDField(default=uuid.uuid4)
    order = models.ForeignKey(Order, on_delete=models.CASCADE)
    made = models.DateTimeField(auto_now_add=True)

    class Meta:
        app_label = "shop"


class Mark(models.Model):
    key = models.CharField(max_length=20, unique=True)

    class Meta:
        app_label = "shop"


MODELS = (Order, Payment, Mark)


def use(**database: Any) -> None:
    """From now on the default database is that one, with tables and one order."""
    forget()
    connections.settings["default"] = connections.configure_settings({"default": database})["default"]
    with connection.schema_editor() as editor:
        for model in MODELS:
            editor.create_model(model)
    Order.objects.create(id=1)


def forget() -> None:
    for each in connections.all(initialized_only=True):
        if each.connection is not None:
            each.connection.close()
            each.connection = None
        del connections[each.alias]


# -- jobs --------------------------------------------------------------------------------------------------------------


def pay(order: int) -> None:
    with transaction.atomic():
        found = Order.objects.select_for_update().get(pk=order)
        if found.status == "new":
            Payment.objects.create(order=found)
            found.status = "paid"
            found.save()


def pay_in_autocommit(order: int) -> None:
    found = Order.objects.get(pk=order)
    if found.status == "new":
        Payment.objects.create(order=found)
        found.status = "paid"
        found.save()


def mark(order: int) -> None:
    Mark.objects.get_or_create(key=f"order-{order}")
    Order.objects.filter(pk=order).update(n=5)


def count(order: int) -> None:
    Order.objects.filter(pk=order).update(n=models.F("n") + 1)


def mark_many(order: int) -> None:
    Mark.objects.bulk_create([Mark(key="a"), Mark(key="b")], ignore_conflicts=True)


def mark_many_one_by_one(order: int) -> None:
    if not Mark.objects.exists():
        for key in ("a", "b"):
            Mark.objects.create(key=key)


def savepoints(order: int) -> None:
    """A unique key inside of a savepoint, and what belongs to it outside."""
    with transaction.atomic():
        try:
            with transaction.atomic():
                Mark.objects.create(key="once")
        except IntegrityError:
            return
        Order.objects.filter(pk=order).update(n=models.F("n") + 1)


def after_commit(order: int) -> None:
    """What is to follow a commit is lost when the process dies in between."""
    with transaction.atomic():
        changed = Order.objects.filter(pk=order, status="new").update(status="paid")
        if changed:
            transaction.on_commit(lambda: Mark.objects.create(key="mailed"))


def raw_cursor(order: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute("UPDATE shop_order SET n = 7 WHERE id = %s", [order])


def look_before(order: int) -> None:
    if not Payment.objects.filter(order_id=order).exists():
        Payment.objects.create(order_id=order)


RIGHT = [pay, mark, mark_many, savepoints, raw_cursor]
WRONG = [
    (pay_in_autocommit, "duplicated", "shop_payment"),
    (count, "changed", "shop_order"),
    (mark_many_one_by_one, "lost", "shop_mark"),
    (after_commit, "lost", "shop_mark"),
]
