"""Jobs on Django's ORM, on every database that its tests may have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from retrychaos import Chaos
from retrychaos.model.errors import WorldError

pytest.importorskip("django")

from django.db import connection, connections, transaction

from tests.postgres_server import Postgres
from tests.sql import django_shop as shop

Job = Callable[[int], None]
SHARED = "file:memorydb_default?mode=memory&cache=shared"
SQLITE = "django.db.backends.sqlite3"


@pytest.fixture(params=["file", "shared", "memory"])
def sqlite(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """As with TEST NAME, as Django's test runner does it, and as without any test runner."""
    names = {"file": tmp_path / "django.db", "shared": SHARED, "memory": ":memory:"}
    shop.use(ENGINE=SQLITE, NAME=names[request.param])
    yield request.param
    shop.forget()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[None]:
    shop.use(ENGINE=SQLITE, NAME=tmp_path / "django.db")
    yield
    shop.forget()


@pytest.fixture
def postgres_shop(postgres_server: Postgres, postgres: str, chaos: Chaos) -> Iterator[Chaos]:
    shop.use(ENGINE="django.db.backends.postgresql", NAME=postgres, HOST=postgres_server.folder, USER="postgres")
    yield chaos(scratch=[f"postgresql:///?host={postgres_server.folder}"])
    shop.forget()


@pytest.mark.parametrize("job", shop.RIGHT, ids=lambda job: job.__name__)
def test_right(chaos: Chaos, sqlite: str, job: Job) -> None:
    before = connection.connection
    report = chaos.explore(job, 1)
    assert report.verdict == "proven", (report.findings, report.stop_reason)
    assert connection.connection is before  # the test goes on with the connection that it had
    assert shop.Order.objects.get().n in (0, 1, 5, 7)


@pytest.mark.parametrize(("job", "kind", "effect"), shop.WRONG, ids=lambda value: getattr(value, "__name__", value))
def test_wrong(chaos: Chaos, sqlite: str, job: Job, kind: str, effect: str) -> None:
    report = chaos.explore(job, 1)
    assert report.verdict == "failed", (report.guarantee, report.stop_reason)
    found = report.findings[0]
    assert (found.kind, found.plan.crashes) == (kind, 1) and found.effect.startswith(effect)
    assert chaos.run(job, 1, plan=found.token).kind == kind


def test_two_at_once_in_a_file(chaos: Chaos, file: None) -> None:
    both = chaos(duplicates=2)
    report = both.explore(shop.savepoints, 1)
    assert report.verdict == "proven", (report.findings, report.stop_reason)
    report = both.explore(shop.look_before, 1)
    assert [(found.kind, found.effect) for found in report.findings] == [("duplicated", "shop_payment")]
    assert report.findings[0].plan.crashes == 0


def test_two_at_once_in_memory_is_not_told(chaos: Chaos) -> None:
    shop.use(ENGINE=SQLITE, NAME=SHARED)
    report = chaos(duplicates=2).explore(shop.pay, 1)
    shop.forget()
    assert report.verdict == "inconclusive"
    assert 'TEST: {"NAME"' in report.stop_reason and "duplicates=1" in report.stop_reason


@pytest.mark.parametrize("name", [SHARED, ":memory:"])
def test_a_test_inside_a_transaction_is_refused(chaos: Chaos, name: str) -> None:
    shop.use(ENGINE=SQLITE, NAME=name)
    with transaction.atomic():
        shop.Mark.objects.create(key="not committed")
        with pytest.raises(WorldError, match="transactional_db"):
            chaos.explore(shop.pay, 1)
        assert connection.in_atomic_block
        assert shop.Mark.objects.count() == 1
    assert shop.Mark.objects.count() == 1 and shop.Order.objects.get().status == "new"
    shop.forget()


def test_a_job_that_needs_no_database_of_django_is_none_of_its_business(chaos: Chaos) -> None:
    shop.use(ENGINE=SQLITE, NAME=SHARED)
    with transaction.atomic():
        chaos.watch(Post, "send", result="ok", key="letter")
        assert chaos.explore(Post().send, "dear").verdict == "proven"
    shop.forget()


class Post:
    def send(self, letter: str) -> None: ...


def test_a_connection_taken_before_the_check_is_refused(chaos: Chaos) -> None:
    shop.use(ENGINE=SQLITE, NAME=SHARED)
    taken = connections["default"]

    def job() -> None:
        with taken.cursor() as cursor:
            cursor.execute("UPDATE shop_order SET n = 7")

    with pytest.raises(WorldError, match=r"use django\.db\.connection"):
        chaos.explore(job)
    assert shop.Order.objects.get().n == 0
    shop.forget()


def test_every_delivery_has_a_connection_of_its_own(chaos: Chaos, file: None) -> None:
    """And what a delivery has left on it is gone."""
    seen: list[Any] = []

    def job() -> None:
        seen.append(connection.connection)
        shop.mark(1)
        connection.set_autocommit(False)
        shop.Order.objects.filter(pk=1).update(n=99)  # never committed

    report = chaos.explore(job)
    assert report.verdict == "proven", report.stop_reason
    assert set(seen) == {None}
    assert shop.Order.objects.get().n == 5


@pytest.mark.parametrize("job", shop.RIGHT, ids=lambda job: job.__name__)
def test_right_on_postgres(postgres_shop: Chaos, job: Job) -> None:
    report = postgres_shop.explore(job, 1)
    assert report.verdict == "proven", (report.findings, report.stop_reason)


@pytest.mark.parametrize(("job", "kind", "effect"), shop.WRONG, ids=lambda value: getattr(value, "__name__", value))
def test_wrong_on_postgres(postgres_shop: Chaos, job: Job, kind: str, effect: str) -> None:
    report = postgres_shop.explore(job, 1)
    assert report.verdict == "failed", (report.guarantee, report.stop_reason)
    assert report.findings[0].kind == kind and report.findings[0].effect.startswith(effect)


def test_two_at_once_on_postgres(postgres_shop: Chaos) -> None:
    both = postgres_shop(duplicates=2, budget=30)
    report = both.explore(shop.pay, 1)
    assert report.verdict == "proven", (report.findings, report.stop_reason)
    shop.Payment.objects.all().delete()
    report = both.explore(shop.look_before, 1)
    assert [found.kind for found in report.findings] == ["duplicated"]


# -- pytest-django, and Django's own test cases ------------------------------------------------------------------------

PROJECT = {
    "settings.py": """
SECRET_KEY = "x"
USE_TZ = True
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "shop"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3", "TEST": {"NAME": NAME}}}
""",
    "shop/__init__.py": "",
    "shop/models.py": """
from django.contrib.auth.models import User
from django.db import models
from django.db.models.signals import post_save
from django.dispatch import receiver

class Parcel(models.Model):
    owner = models.OneToOneField(User, on_delete=models.CASCADE)
    at = models.DateTimeField(auto_now=True)

class Note(models.Model):
    parcel = models.ForeignKey(Parcel, on_delete=models.CASCADE)

@receiver(post_save, sender=Parcel)
def note(sender, instance, created, **kwargs):
    if created:
        Note.objects.create(parcel=instance)
""",
    "shop/jobs.py": """
from django.contrib.auth.models import Permission, User
from django.db import transaction
from shop.models import Parcel

def send(name):
    with transaction.atomic():
        user = User.objects.select_for_update().get(username=name)
        Parcel.objects.get_or_create(owner=user)
        user.user_permissions.add(Permission.objects.get(codename="add_parcel"))

def send_in_vain(name):  # the parcel, and the note that the signal makes, are two transactions
    Parcel.objects.get_or_create(owner=User.objects.get(username=name))
""",
    "test_shop.py": """
import pytest
import retrychaos
from django.contrib.auth.models import User
from django.test import TestCase, TransactionTestCase
from shop.jobs import send, send_in_vain
from shop.models import Note

def test_send(transactional_db, chaos):
    User.objects.create(username="ann")
    chaos.check(send, "ann")
    assert Note.objects.count() == 1

@pytest.mark.django_db(transaction=True)
def test_send_in_vain(chaos):
    User.objects.create(username="ann")
    # get_or_create() is in a transaction of its own, and the signal inside of it.
    assert chaos.explore(send_in_vain, "ann").verdict == "proven"
    assert chaos.explore(User.objects.create, username="bob").findings[0].kind == "stuck"

def test_refused(db, chaos):
    User.objects.create(username="ann")
    with pytest.raises(retrychaos.ChaosError, match="transactional_db"):
        chaos.check(send, "ann")
    assert User.objects.count() == 1

class WithTransactions(TransactionTestCase):
    def test_send(self):
        User.objects.create(username="ann")
        with retrychaos.Chaos(duplicates=DUPLICATES) as chaos:
            chaos.check(send, "ann")

class Inside(TestCase):
    def test_refused(self):
        User.objects.create(username="ann")
        with retrychaos.Chaos() as chaos, self.assertRaises(retrychaos.ChaosError):
            chaos.check(send, "ann")
""",
}


@pytest.mark.parametrize(("name", "duplicates"), [("None", 1), ("'test.sqlite3'", 2)])
def test_a_project_under_pytest_django(pytester: pytest.Pytester, name: str, duplicates: int) -> None:
    pytest.importorskip("pytest_django")
    for path, code in PROJECT.items():
        target = pytester.path / path
        target.parent.mkdir(exist_ok=True)
        target.write_text(code.replace("NAME}}}", f"{name}}}}}}}").replace("DUPLICATES", str(duplicates)))
    pytester.makeini(f"[pytest]\nDJANGO_SETTINGS_MODULE = settings\npythonpath = .\nchaos_duplicates = {duplicates}")
    result = pytester.runpytest_subprocess("-W", "error", "-p", "no:randomly", "--chaos-budget=60")
    result.assert_outcomes(passed=5)
