"""Things made elsewhere over HTTP: customers, clusters, invoices. Made first, noted later, so made again."""

from __future__ import annotations

import httpx
import pytest
import requests
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from retrychaos import Request, Response
from scenarios.conftest import proven, refuted
from scenarios.shop import Session, save

API = "https://api.saas.test"


class Base(DeclarativeBase):
    pass


class Org(Base):
    __tablename__ = "orgs"
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]
    customer: Mapped[str | None]
    synced: Mapped[bool] = mapped_column(default=False)


class Run(Base):
    __tablename__ = "runs"
    id: Mapped[int] = mapped_column(primary_key=True)
    cluster: Mapped[str | None]
    host: Mapped[str | None]


class Certificate(Base):
    __tablename__ = "certificates"
    code: Mapped[str] = mapped_column(primary_key=True)
    announced: Mapped[bool] = mapped_column(default=False)


def arrange() -> None:
    save(Org(id=1, email="a@acme.test"), Run(id=1), Certificate(code="C-17"))


@pytest.fixture(autouse=True)
def api(chaos):
    """Makes what it is asked for, each time, unless a key says that it was asked for that before."""
    api = chaos.http.provider(API, key_header="Idempotency-Key")
    for name in ("customers", "clusters", "invoices"):
        api.post(f"/{name}", make(api, name))
        api.get(f"/{name}", look(api, name))
    api.get("/clusters/{id}", lambda request: {"host": f"{request.params['id']}.internal"})
    api.post("/crm/sync", json={})
    api.put("/crm/{id}", json={})
    return api


def make(api, name):
    def answer(request: Request) -> Response:
        known = api.state.setdefault(name, {})
        number = f"{name}-{len(known) + 1}"
        known[number] = request.json["for"]
        return Response(201, {"id": number})

    return answer


def look(api, name):
    return lambda request: [each for each, who in api.state.get(name, {}).items() if str(who) == request.query["for"]]


# -- BUG-04: five customers for one organisation ----------------------------------------------------------------------


def create_customer(org_id: int) -> None:
    with Session.begin() as session:
        org = session.get_one(Org, org_id)
        org.customer = httpx.post(f"{API}/customers", json={"for": org.email}).json()["id"]
    requests.post(f"{API}/crm/sync", json={"org": org_id}).raise_for_status()


def create_customer_once(org_id: int) -> None:
    with Session.begin() as session:
        org = session.get_one(Org, org_id)
        if org.customer is None:
            headers = {"Idempotency-Key": f"customer-of-{org.id}"}
            org.customer = httpx.post(f"{API}/customers", json={"for": org.email}, headers=headers).json()["id"]
    httpx.put(f"{API}/crm/{org_id}", json={"customer": org_id}).raise_for_status()


def find_or_create_customer(org_id: int) -> None:
    with Session.begin() as session:
        org = session.get_one(Org, org_id)
        if org.customer is None:
            found = httpx.get(f"{API}/customers", params={"for": org.email}).json()
            made = found or [httpx.post(f"{API}/customers", json={"for": org.email}).json()["id"]]
            org.customer = made[0]


def test_customers_made_at_a_provider(chaos, crashing, racing, both):
    """BUG-04. One organisation had five customers at the payment provider, minutes apart: one for each redelivery.

    Looking first helps against crashes. Two at a time both find nothing; a key helps against both.
    """
    refuted(chaos, create_customer, 1, duplicated=(f"POST {API}/customers", f"POST {API}/crm/sync"))
    proven(crashing, find_or_create_customer, 1)
    refuted(racing, find_or_create_customer, 1, duplicated=f"POST {API}/customers")
    proven(both, create_customer_once, 1)


# -- BUG-13: two clusters ---------------------------------------------------------------------------------------------


def start_cluster(run_id: int) -> None:
    cluster = requests.post(f"{API}/clusters", json={"for": run_id}).json()["id"]
    host = requests.get(f"{API}/clusters/{cluster}").json()["host"]
    with Session.begin() as session:
        run = session.get_one(Run, run_id)
        run.cluster, run.host = cluster, host


def start_cluster_in_two_parts(run_id: int) -> None:
    with Session.begin() as session:
        run = session.get_one(Run, run_id)
        if run.cluster is None:
            headers = {"Idempotency-Key": f"run-{run.id}"}
            run.cluster = requests.post(f"{API}/clusters", json={"for": run.id}, headers=headers).json()["id"]
    with Session.begin() as session:
        run = session.get_one(Run, run_id)
        run.host = requests.get(f"{API}/clusters/{run.cluster}").json()["host"]


def test_a_cluster_for_each_attempt(chaos, both):
    """BUG-13. The second request was throttled, so all was done again: the first one started another cluster."""
    refuted(chaos, start_cluster, 1, duplicated=f"POST {API}/clusters")
    proven(both, start_cluster_in_two_parts, 1)


# -- BUG-14: an invoice without a link --------------------------------------------------------------------------------


def push_invoice(org_id: int) -> None:
    made = httpx.post(f"{API}/invoices", json={"for": org_id})
    if made.status_code == 201:
        with Session.begin() as session:
            session.get_one(Org, org_id).customer = made.json()["id"]


def push_invoice_to_its_own_address(org_id: int) -> None:
    httpx.put(f"{API}/crm/{org_id}", json={"for": org_id}).raise_for_status()
    with Session.begin() as session:
        session.get_one(Org, org_id).customer = f"invoice-{org_id}"


def test_an_invoice_that_nobody_knows_of(chaos, both):
    """BUG-14. The invoice is in the other system, and here is no link to it: the next attempt makes another one.

    Something that has an address of its own, chosen by us, can be put there as often as it takes.
    """
    refuted(chaos, push_invoice, 1, duplicated=f"POST {API}/invoices")
    proven(both, push_invoice_to_its_own_address, 1)


# -- S24: a webhook ---------------------------------------------------------------------------------------------------


def announce(code: str, receiver: str) -> None:
    with Session.begin() as session:
        certificate = session.get_one(Certificate, code)
        if certificate.announced:
            return
        reply = requests.post(f"{receiver}/webhook", json={"certificate": code}, headers={"X-Event-Id": code})
        reply.raise_for_status()
        certificate.announced = True


def test_a_webhook_and_its_receiver(chaos, both):
    """S24. "We record it as sent after the receiver has said yes." So it is sent again if we die before we record it.

    Whether that is wrong is up to the receiver: one that knows the code of the certificate already does nothing.
    """
    chaos.http.provider("https://knows.test", key_header="X-Event-Id").post("/webhook", status=204)
    chaos.http.provider("https://forgets.test").post("/webhook", status=204)
    proven(both, announce, "C-17", "https://knows.test")
    refuted(chaos, announce, "C-17", "https://forgets.test", duplicated="POST https://forgets.test/webhook")


# -- BUG-17: accepted, and then its input deleted ---------------------------------------------------------------------


def submit(org_id: int) -> None:
    """Stage the input, hand the work over, and clean up if that was refused."""
    requests.put(f"{API}/stage/{org_id}", json={"input": org_id}).raise_for_status()
    reply = requests.post("https://work.test/work", json={"stage": org_id})
    if reply.status_code != 202:
        requests.delete(f"{API}/stage/{org_id}").raise_for_status()
    with Session.begin() as session:
        session.get_one(Org, org_id).customer = "accepted" if reply.status_code == 202 else "refused"


def submit_and_leave_it_there(org_id: int) -> None:
    requests.put(f"{API}/stage/{org_id}", json={"input": org_id}).raise_for_status()
    reply = requests.post("https://work.test/work", json={"stage": org_id})
    if reply.status_code not in (202, 409):
        reply.raise_for_status()
    with Session.begin() as session:
        session.get_one(Org, org_id).customer = "accepted"


def test_work_that_was_accepted_before(chaos, both, api):
    """BUG-17. The work had been accepted by an attempt that died. The next one was told "known already", took that for
    a failure, and deleted the input of what was running.

    (In the original the answer is lost instead. The mistake is the same: what is not known to be done has not failed.)
    """
    api.put("/stage/{id}", json={})
    api.delete("/stage/{id}", status=204)
    work = chaos.http.provider("https://work.test")

    def take(request: Request) -> Response:
        taken = work.state.setdefault("taken", [])
        if request.json["stage"] in taken:
            return Response(409, {"error": "known already"})
        taken.append(request.json["stage"])
        return Response(202, {})

    work.post("/work", take)
    refuted(chaos, submit, 1, duplicated=f"DELETE {API}/stage/{{id}}")
    proven(both, submit_and_leave_it_there, 1)
