from sqlalchemy import Engine
from sqlalchemy.orm import Session

from retrychaos import Chaos
from retrychaos.report.text import full_text
from tests.sql.engines import Invoice, Order


def good(engine, order_id):
    with Session(engine) as s:
        o = s.get(Order, order_id)
        if o.status == "new":
            s.add(Invoice(order_id=o.id, note="x"))
            o.status = "done"
            s.commit()


def bad(engine, order_id):
    with Session(engine) as s:
        o = s.get(Order, order_id)
        if o.status == "new":
            s.add(Invoice(order_id=o.id, note="x"))
            s.commit()
            o.status = "done"
            s.commit()


def test_good(check: Chaos, shop: Engine):
    r = check.explore(good, shop, 1)
    print(full_text(r))
    assert r.verdict == "proven", full_text(r)


def test_bad(check: Chaos, shop: Engine):
    r = check.explore(bad, shop, 1)
    print(full_text(r))
    assert r.verdict == "failed", full_text(r)
    assert [(f.kind, f.effect) for f in r.findings] == [("duplicated", "invoices")]
