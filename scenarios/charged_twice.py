"""The job of the README, which charges a customer twice. Not collected by itself: ask for this file to see it fail."""

from sqlalchemy import text


class Payments:
    def charge(self, order_id, cents):
        raise NotImplementedError("the real provider is not for tests")


def charge_order(engine, order_id):
    with engine.begin() as db:
        order = db.execute(text("SELECT cents, paid FROM orders WHERE id = :id"), {"id": order_id}).one()
        if not order.paid:
            Payments().charge(order_id, order.cents)
            db.execute(text("UPDATE orders SET paid = 1 WHERE id = :id"), {"id": order_id})


def test_charge_order(chaos):
    with chaos.sql.begin() as db:
        db.execute(text("CREATE TABLE orders (id INTEGER PRIMARY KEY, cents INTEGER, paid BOOLEAN)"))
        db.execute(text("INSERT INTO orders VALUES (1, 4200, 0)"))
    chaos.watch(Payments, "charge", result={"status": "ok"})
    chaos.check(charge_order, chaos.sql, 1)
