"""Look, then act: right as long as deliveries come one after the other. Two at the same time both look first."""

from __future__ import annotations

import pytest
from sqlalchemy import delete, select, update
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scenarios.conftest import proven, refuted
from scenarios.shop import Session, payments, queue, save


class Base(DeclarativeBase):
    pass


class Item(Base):
    __tablename__ = "items"
    id: Mapped[int] = mapped_column(primary_key=True)
    stock: Mapped[int]


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item_id: Mapped[int]
    status: Mapped[str] = mapped_column(default="pending")


class Checkout(Base):
    """A basket on its way to the till; gone when there is an order."""

    __tablename__ = "checkouts"
    id: Mapped[int] = mapped_column(primary_key=True)
    cents: Mapped[int]


class Sale(Base):
    __tablename__ = "sales"
    id: Mapped[int] = mapped_column(primary_key=True)
    checkout_id: Mapped[int]
    cents: Mapped[int]


class Wallet(Base):
    __tablename__ = "wallets"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int] = mapped_column(default=0)


class TopUp(Base):
    __tablename__ = "top_ups"
    id: Mapped[int] = mapped_column(primary_key=True)
    wallet_id: Mapped[int]
    cents: Mapped[int]
    settled: Mapped[bool] = mapped_column(default=False)


class Repository(Base):
    __tablename__ = "repositories"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    stars: Mapped[int]


class UniqueRepository(Base):
    __tablename__ = "unique_repositories"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    stars: Mapped[int]


class Inbox(Base):
    """Messages that have been handled."""

    __tablename__ = "inbox"
    message_id: Mapped[str] = mapped_column(primary_key=True)


class Fee(Base):
    __tablename__ = "fees"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    units: Mapped[int]


class RequestedFee(Base):
    """A fee for one request of the customer, who may well want the same again another day."""

    __tablename__ = "requested_fees"
    request: Mapped[str] = mapped_column(primary_key=True)
    customer: Mapped[str]
    units: Mapped[int]


def arrange() -> None:
    save(
        Item(id=1, stock=10),
        Order(id=1, item_id=1),
        Checkout(id=1, cents=4200),
        Wallet(id=1),
        TopUp(id=1, wallet_id=1, cents=500),
    )


class Partner:
    """Ships. It deduplicates on the key, if there is one."""

    def ship(self, order: str, key: str | None = None) -> None: ...


partner = Partner()


@pytest.fixture(autouse=True)
def outside(chaos):
    chaos.watch(payments, "charge", key="key")
    chaos.watch(partner, "ship", result=None, key="key")
    chaos.watch(queue, "publish", result=None, key="key")


# -- BUG-21: two that complete an order -------------------------------------------------------------------------------


def complete_if_pending(order_id: int) -> None:
    with Session() as session:
        order = session.get_one(Order, order_id)
        if order.status != "pending":
            return
        order.status = "processing"
        session.execute(update(Item).where(Item.id == order.item_id).values(stock=Item.stock - 1))
        session.commit()


def complete_the_pending(order_id: int) -> None:
    pending = update(Order).where(Order.id == order_id, Order.status == "pending")
    with Session() as session:
        item_id = session.scalar(pending.values(status="processing").returning(Order.item_id))
        if item_id is None:
            return
        session.execute(update(Item).where(Item.id == item_id).values(stock=Item.stock - 1))
        session.commit()


def test_two_that_complete_an_order(crashing, racing, both):
    """BUG-21 (woocommerce-payments). "Stock went down by two and the customer got two mails. For one payment."

    The redirect of the customer and the webhook of the provider arrive together. Status and stock are one transaction,
    which no crash can tear, but both have read `pending` before either begins to write. Let the database look and
    write in one statement: the condition belongs into the UPDATE.
    """
    proven(crashing, complete_if_pending, 1)
    refuted(racing, complete_if_pending, 1, changed="items")
    proven(both, complete_the_pending, 1)


# -- BUG-23: two that check out ---------------------------------------------------------------------------------------


def check_out(checkout_id: int) -> None:
    with Session() as session:
        cents = session.scalar(select(Checkout.cents).where(Checkout.id == checkout_id))
        if cents is None:
            return  # it is an order already
        payments.charge(checkout_id, cents, key=f"checkout-{checkout_id}")
        session.add(Sale(checkout_id=checkout_id, cents=cents))
        session.execute(delete(Checkout).where(Checkout.id == checkout_id))
        session.commit()


def check_out_by_deleting(checkout_id: int) -> None:
    with Session() as session:
        cents = session.scalar(delete(Checkout).where(Checkout.id == checkout_id).returning(Checkout.cents))
        if cents is None:
            return
        payments.charge(checkout_id, cents, key=f"checkout-{checkout_id}")
        session.add(Sale(checkout_id=checkout_id, cents=cents))
        session.commit()


def test_two_that_check_out(crashing, racing, both):
    """BUG-23 (saleor). "The customer's browser said that the checkout does not exist. It did, a moment before."

    Whoever comes later works on with a row that the other one has deleted. Thanks to the key the money is captured
    once, and there are two orders for it. A row can be deleted by one only: delete first, in the same transaction, and
    take what it says from there.
    """
    proven(crashing, check_out, 1)
    refuted(racing, check_out, 1, duplicated="sales")
    proven(both, check_out_by_deleting, 1)


# -- BUG-24: two that credit a wallet ---------------------------------------------------------------------------------


def credit_unless_settled(top_up_id: int) -> None:
    with Session() as session:
        top_up = session.get_one(TopUp, top_up_id)
        if top_up.settled:
            return
        wallet = session.get_one(Wallet, top_up.wallet_id)
        wallet.balance = Wallet.balance + top_up.cents
        top_up.settled = True
        session.commit()


def settle_then_credit(top_up_id: int) -> None:
    with Session() as session:
        top_up = session.get_one(TopUp, top_up_id)
        unsettled = update(TopUp).where(TopUp.id == top_up_id, TopUp.settled.is_(False))
        if not session.execute(unsettled.values(settled=True)).rowcount:
            return
        wallet = session.get_one(Wallet, top_up.wallet_id)
        wallet.balance = Wallet.balance + top_up.cents
        session.commit()


def test_two_that_credit_a_wallet(crashing, racing, both):
    """BUG-24 (lago). "One payment, and the prepaid balance went up twice. The webhooks were milliseconds apart."

    `balance = balance + 500` in SQL is safe from lost updates, and just for that reason it adds twice when two have
    decided to add. Reading the row first does no harm, as long as the decision is made by the UPDATE.
    """
    proven(crashing, credit_unless_settled, 1)
    refuted(racing, credit_unless_settled, 1, changed="wallets")
    proven(both, settle_then_credit, 1)


# -- BUG-25: two that get or create -----------------------------------------------------------------------------------


def sync_repository(name: str, stars: int) -> None:
    with Session() as session:
        repository = session.scalars(select(Repository).where(Repository.name == name)).one_or_none()
        if repository is None:
            repository = Repository(name=name)
            session.add(repository)
        repository.stars = stars
        session.commit()


def upsert_repository(name: str, stars: int) -> None:
    with Session() as session:
        row = insert(UniqueRepository).values(name=name, stars=stars)
        session.execute(row.on_conflict_do_update(["name"], set_={"stars": stars}))
        session.commit()


def test_two_that_get_or_create(crashing, racing, both):
    """BUG-25 (readthedocs). "Since that night every sync fails: MultipleResultsFound."

    Get-or-create needs an index to be unique. Without it a race of a few milliseconds makes two rows, and from then on
    the harmless half of the job (get) fails for ever. What that does to the next sync is in test_follow_ups.py.
    """
    proven(crashing, sync_repository, "docs", 7)
    refuted(racing, sync_repository, "docs", 7, duplicated="repositories")
    proven(both, upsert_repository, "docs", 7)


# -- BUG-28: an inbox -------------------------------------------------------------------------------------------------


def ship_then_note(message_id: str, order: str) -> None:
    with Session.begin() as session:
        if session.get(Inbox, message_id):
            return
        partner.ship(order)
        session.add(Inbox(message_id=message_id))


def note_then_ship(message_id: str, order: str) -> None:
    with Session.begin() as session:
        note = insert(Inbox).values(message_id=message_id).on_conflict_do_nothing()
        if not session.execute(note).rowcount:
            return
    partner.ship(order)


def ship_with_key_then_note(message_id: str, order: str) -> None:
    with Session.begin() as session:
        if session.get(Inbox, message_id):
            return
        partner.ship(order, key=message_id)
        session.add(Inbox(message_id=message_id))


def test_an_inbox(crashing, racing, both):
    """BUG-28 (NServiceBus). "Deduplication was switched on. Two replicas got the two copies at the same moment."

    The note is written last, so both find none, and both ship. The primary key stops the second *note*: its
    transaction is rolled back, its parcel is not. Noting first lets one through, and loses the parcel if that one
    dies. The partner's deduplication is the one that counts; ours spares it the call.
    """
    refuted(crashing, ship_then_note, "m1", "A-17", duplicated="Partner.ship")
    refuted(racing, ship_then_note, "m1", "A-17", duplicated="Partner.ship")

    proven(racing, note_then_ship, "m1", "A-17")
    refuted(crashing, note_then_ship, "m1", "A-17", lost="Partner.ship")

    proven(both, ship_with_key_then_note, "m1", "A-17")


# -- BUG-58: billed in advance, twice ---------------------------------------------------------------------------------


def bill_unless_billed(request: str, customer: str, units: int) -> None:
    with Session() as session:
        if session.scalar(select(Fee).where(Fee.customer == customer, Fee.units == units)):
            return
        fee = Fee(customer=customer, units=units)
        session.add(fee)
        session.flush()
        payments.charge(fee.id, 100 * units, key=f"fee-{fee.id}")
        session.commit()


def bill_the_request(request: str, customer: str, units: int) -> None:
    with Session() as session:
        fee = insert(RequestedFee).values(request=request, customer=customer, units=units)
        if not session.execute(fee.on_conflict_do_nothing()).rowcount:
            return
        payments.charge(1, 100 * units, key=f"request-{request}")
        session.commit()


def test_billed_in_advance(crashing, racing, both):
    """BUG-58 (lago). "She pressed the button twice, fifty milliseconds apart, and was billed twice."

    The job is unique by time stamp, so there are two of them; the guard against double billing reads before either has
    committed; and the key of the charge is made from the row, of which there are two. The fee must be unique by what
    the customer asked for, and its row must be there before the charge. (Two messages instead of two deliveries of
    one: test_siblings.py.)
    """
    refuted(racing, bill_unless_billed, "r1", "ann", 5, duplicated="Payments.charge")
    proven(both, bill_the_request, "r1", "ann", 5)
