"""What a provider promises: keys as Stripe and the IETF draft have them, routes, state, and clear words for misuse."""

from __future__ import annotations

import datetime
import threading
import uuid
from typing import Any

import pytest
import requests
from sqlalchemy import Engine, text

from retrychaos import Chaos, OptionError, Request, Response, WorldError
from retrychaos.report.text import full_text
from retrychaos.world.http_provider import Provider
from retrychaos.world.http_routes import seconds
from tests.http.conftest import PAY, findings, fresh, is_paid, set_paid

CHARGE = f"POST {PAY}/charges"


def post(path: str, body: Any, key: str | None = None) -> requests.Response:
    return requests.post(f"{PAY}{path}", json=body, headers={} if key is None else {"Idempotency-Key": key})


# -- keys ------------------------------------------------------------------------------------------------------------


def test_a_known_key_is_answered_from_memory(chaos: Chaos, orders: Engine) -> None:
    pay = chaos.http.provider(PAY, key_header="Idempotency-Key", replay_header="Idempotent-Replayed")
    pay.post("/draw", lambda request: Response(201, {"id": str(uuid.uuid4())}))

    def job() -> None:
        one, two = post("/draw", {"a": 1}, "k"), post("/draw", {"a": 1}, "k")
        assert one.json() == two.json() and two.status_code == 201
        assert two.headers["Idempotent-Replayed"] == "true"
        assert post("/draw", {"a": 1}, "other").json() != one.json()
        set_paid(orders, 1, "x")

    report = chaos.explore(job)
    assert report.verdict == "proven", full_text(report)
    assert [call.key for call in pay.calls] == ["k", "other"] and len(pay.requests) == 3


def test_errors_are_kept_too(chaos: Chaos, pay: Provider, orders: Engine) -> None:
    """BUG-54: a payout that failed for want of money is answered with that failure for a day."""

    def pay_out(request: Request) -> Response:
        pay.state["asked"] = pay.state.get("asked", 0) + 1
        return Response(402 if pay.state["asked"] == 1 else 201, {"n": pay.state["asked"]})

    pay.post("/payouts", pay_out)

    def job() -> None:
        assert post("/payouts", {"a": 1}, "k").status_code == 402
        assert post("/payouts", {"a": 1}, "k").status_code == 402
        set_paid(orders, 1, "x")

    chaos.explore(job)
    assert len(pay.requests) == 2 and pay.calls == [] and pay.state == {"asked": 1}


def test_too_many_requests_is_not_kept(chaos: Chaos, pay: Provider, orders: Engine) -> None:
    def take(request: Request) -> Response:
        pay.state["asked"] = pay.state.get("asked", 0) + 1
        return Response(429 if pay.state["asked"] == 1 else 201, {})

    pay.post("/take", take)

    def job() -> None:
        if not is_paid(orders, 1):
            while post("/take", {"a": 1}, "k").status_code == 429:
                pass
            set_paid(orders, 1, "x")

    chaos.explore(job)
    assert len(pay.calls) == 1 and len(pay.requests) == 2


def charge_with_a_fee_for_retries(engine: Engine) -> None:
    if is_paid(engine, 1):
        return
    with engine.begin() as db:
        cents = db.execute(text("UPDATE orders SET cents = cents + 10 WHERE id = 1 RETURNING cents")).scalar()
    post("/charges", {"cents": cents}, "order-1").raise_for_status()
    set_paid(engine, 1, "x")


def test_a_known_key_with_another_payload(chaos: Chaos, pay: Provider, orders: Engine) -> None:
    """It is refused for a day, and then it is done again."""
    report = chaos.explore(charge_with_a_fee_for_retries, orders)
    assert ("duplicated", CHARGE) in findings(report), full_text(report)
    assert "422" in full_text(report)


def test_a_known_key_with_another_payload_for_ever(chaos: Chaos, orders: Engine) -> None:
    pay = chaos.http.provider(PAY, key_header="Idempotency-Key")
    pay.post("/charges", json={})
    report = chaos.explore(charge_with_a_fee_for_retries, orders)
    assert {kind for kind, _ in findings(report)} == {"changed", "stuck"}, full_text(report)
    assert any(kind == "stuck" and "422" in effect for kind, effect in findings(report))


def test_the_status_of_a_conflict(chaos: Chaos, orders: Engine) -> None:
    pay = chaos.http.provider(PAY, key_header="X-Key", on_conflict=409)
    pay.post("/charges", json={})

    def job() -> None:
        for amount, status in ((1, 200), (2, 409), (1, 200)):
            reply = requests.post(f"{PAY}/charges", json={"a": amount}, headers={"x-key": "k"})
            assert reply.status_code == status
        set_paid(orders, 1, "x")

    assert chaos.explore(job).verdict == "proven"
    assert len(pay.calls) == 1


def test_parameters_are_the_same_however_they_are_written(chaos: Chaos, pay: Provider, orders: Engine) -> None:
    def job() -> None:
        for body in ('{"a": 1, "b": 2}', '{"b":2,"a":1}'):
            headers = {"Idempotency-Key": "k", "Content-Type": "application/json"}
            assert requests.post(f"{PAY}/charges", data=body, headers=headers).status_code == 201
        set_paid(orders, 1, "x")

    assert chaos.explore(job).verdict == "proven"
    assert len(pay.calls) == 1


def charge_by_key(engine: Engine) -> None:
    """Keyed and guarded."""
    if not is_paid(engine, 1):
        post("/charges", {"order": 1}, "order-1").raise_for_status()
        set_paid(engine, 1, "x")


def test_keys_are_forgotten(chaos: Chaos, pay: Provider, orders: Engine) -> None:
    """S8: proven without time jumps; a day later the provider charges again."""
    assert chaos.explore(charge_by_key, orders).verdict == "proven"
    late = chaos(late=True).explore(charge_by_key, orders)
    assert findings(late) == [("duplicated", CHARGE)], full_text(late)
    token = late.findings[0].token
    again = chaos.run(charge_by_key, orders, plan=token)
    assert (again.kind, again.effect) == ("duplicated", CHARGE)
    both = chaos(late=True, duplicates=2, budget=60).explore(charge_by_key, orders)
    assert findings(both) == [("duplicated", CHARGE)]


def test_keys_that_are_never_forgotten(chaos: Chaos, orders: Engine) -> None:
    pay = chaos.http.provider(PAY, key_header="Idempotency-Key")
    pay.post("/charges", json={})
    report = chaos(late=True).explore(charge_by_key, orders)
    assert report.verdict == "proven", full_text(report)


def test_without_a_key_header_a_key_counts_for_nothing(chaos: Chaos, orders: Engine) -> None:
    pay = chaos.http.provider(PAY)
    pay.post("/charges", json={})
    assert findings(chaos.explore(charge_by_key, orders)) == [("duplicated", CHARGE)]
    assert pay.calls[0].key is None


def test_a_key_that_is_never_sent_is_told(chaos: Chaos, orders: Engine) -> None:
    pay = chaos.http.provider(PAY, key_header="X-Idempotency-Key")
    pay.post("/charges", json={})
    report = chaos.explore(charge_by_key, orders)
    assert report.verdict == "failed"
    assert any("'X-Idempotency-Key' was declared, and none of" in note for note in report.warnings), report.warnings


def charge_with_drawn_key(engine: Engine) -> None:
    if not is_paid(engine, 1):
        post("/charges", {"order": 1}, str(uuid.uuid4())).raise_for_status()
        set_paid(engine, 1, "x")


def charge_with_stored_key(engine: Engine) -> None:
    with engine.begin() as db:
        drawn = {"ref": str(uuid.uuid4())}
        db.execute(text("UPDATE orders SET ref = :ref WHERE id = 1 AND ref IS NULL"), drawn)
        key, paid = db.execute(text("SELECT ref, paid FROM orders WHERE id = 1")).one()
    if not paid:
        post("/charges", {"order": 1}, key).raise_for_status()
        with engine.begin() as db:
            db.execute(text("UPDATE orders SET paid = 1 WHERE id = 1"))


@pytest.mark.parametrize("duplicates", [1, 2])
def test_where_a_key_comes_from(chaos: Chaos, pay: Provider, orders: Engine, duplicates: int) -> None:
    chaos = chaos(duplicates=duplicates, budget=60)
    assert findings(chaos.explore(charge_with_drawn_key, orders)) == [("duplicated", CHARGE)]
    fresh(orders)
    good = chaos.explore(charge_with_stored_key, orders)
    assert good.verdict == "proven", full_text(good)


def test_key_of_a_request_with_volatile_parts(chaos: Chaos, pay: Provider, orders: Engine) -> None:
    """BUG-53: the key is a hash of the whole request, and the request carries the time and a number of the attempt."""
    import hashlib
    import json

    def job(stable: bool) -> None:
        if is_paid(orders, 1):
            return
        now = datetime.datetime.now(datetime.UTC).isoformat()
        body = {"order": 1, "sdk": {"created": now, "attempt": str(uuid.uuid4())}}
        key = hashlib.sha256(json.dumps({"order": 1} if stable else body).encode()).hexdigest()
        post("/charges", {"order": 1} if stable else body, key).raise_for_status()
        set_paid(orders, 1, "x")

    assert findings(chaos.explore(job, False)) == [("duplicated", CHARGE)]
    fresh(orders)
    assert chaos.explore(job, True).verdict == "proven"


@pytest.mark.parametrize("duplicates", [1, 2])
def test_ids_that_a_provider_draws(chaos: Chaos, pay: Provider, orders: Engine, duplicates: int) -> None:
    def create(request: Request) -> Response:
        number = str(uuid.uuid4())
        pay.state.setdefault("charges", {})[number] = {"at": datetime.datetime.now().isoformat()}
        return Response(201, {"id": number, "secret": uuid.uuid4().hex})

    pay.post("/charges", create)

    def job(key: str) -> None:
        if not is_paid(orders, 1):
            headers = {"Idempotency-Key": key} if key else {}
            set_paid(orders, 1, requests.post(f"{PAY}/charges", json={}, headers=headers).json()["id"])

    chaos = chaos(duplicates=duplicates, budget=60)
    good = chaos.explore(job, "order-1")
    assert good.verdict == "proven", full_text(good)
    fresh(orders)
    pay.state.clear()
    bad = chaos.explore(job, "")
    assert ("duplicated", CHARGE) in findings(bad) and bad.verdict == "failed", full_text(bad)


# -- what counts -----------------------------------------------------------------------------------------------------


def test_put_and_delete_count_once(chaos: Chaos, pay: Provider, orders: Engine) -> None:
    pay.put("/orders/{id}", json={})
    pay.delete("/orders/{id}/draft", status=204)
    pay.patch("/orders/{id}", json={})

    def job(patch: bool) -> None:
        requests.put(f"{PAY}/orders/1", json={"paid": True}).raise_for_status()
        requests.delete(f"{PAY}/orders/1/draft").raise_for_status()
        if patch:
            requests.patch(f"{PAY}/orders/1", json={"visits": "+1"}).raise_for_status()

    assert chaos.explore(job, False).verdict == "proven"
    assert findings(chaos.explore(job, True)) == [("duplicated", f"PATCH {PAY}/orders/{{id}}")]


def test_a_put_with_the_time_in_it_counts_once_and_one_of_a_new_address_does_not(
    chaos: Chaos, pay: Provider, orders: Engine
) -> None:
    pay.put("/orders/{id}", json={})

    def stamped() -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat()
        requests.put(f"{PAY}/orders/1", json={"paid_at": now}).raise_for_status()

    def drawn() -> None:
        requests.put(f"{PAY}/orders/{uuid.uuid4()}", json={"paid": 1}).raise_for_status()

    def twice(value: int) -> None:
        requests.put(f"{PAY}/orders/1", json={"status": "open"}).raise_for_status()
        requests.put(f"{PAY}/orders/1", json={"status": "done"}).raise_for_status()

    assert chaos.explore(stamped).verdict == "proven"
    assert findings(chaos.explore(drawn)) == [("duplicated", f"PUT {PAY}/orders/{{id}}")]
    assert chaos.explore(twice, 1).verdict == "proven"


def test_volatile_parts_of_a_body_are_found_one_by_one(chaos: Chaos, pay: Provider, orders: Engine) -> None:
    """The amount is compared although the trace id beside it is new each time."""
    pay.post("/charges", json={})

    def job(counts: bool) -> None:
        with orders.begin() as db:
            if db.execute(text("SELECT paid FROM orders WHERE id = 1")).scalar():
                return
            if counts:
                cents = db.execute(text("UPDATE orders SET cents = cents + 1 WHERE id = 1 RETURNING cents")).scalar()
        if counts:
            with orders.begin() as db:
                db.execute(text("UPDATE orders SET cents = cents + 1 WHERE id = 1"))
        body = {"trace": str(uuid.uuid4()), "cents": cents if counts else 4200}
        requests.post(f"{PAY}/charges", data=body, headers={"Idempotency-Key": "k"})
        set_paid(orders, 1, "x")

    report = chaos.explore(job, True)
    assert ("changed", "orders") in findings(report) or findings(report)[0][0] == "changed", full_text(report)


def test_tolerance_by_the_name_of_the_effect(chaos: Chaos, pay: Provider, orders: Engine) -> None:
    def job() -> None:
        if not is_paid(orders, 1):
            post("/charges", {"order": 1}).raise_for_status()
            set_paid(orders, 1, "x")

    report = chaos(tolerate=[CHARGE]).explore(job)
    assert report.verdict == "proven" and CHARGE in report.guarantee
    assert chaos(tolerate=[f"POST {PAY}/*"]).explore(job).verdict == "proven"
    assert chaos(tolerate=["POST https://other.test/*"]).explore(job).verdict == "failed"


def test_volatile_by_the_name_of_the_effect(chaos: Chaos, pay: Provider, orders: Engine) -> None:
    pay.put("/order", json={})

    def job() -> None:
        with orders.begin() as db:
            tries = db.execute(text("UPDATE orders SET cents = cents + 1 WHERE id = 1 RETURNING cents")).scalar()
        requests.put(f"{PAY}/order", json={"try": tries}).raise_for_status()

    report = chaos(volatile=["orders.cents"]).explore(job)
    assert findings(report)[0][1] == f"PUT {PAY}/order", full_text(report)
    fresh(orders)
    report = chaos(volatile=["orders.cents", f"PUT {PAY}/order.body"], crashes=2).explore(job)
    assert report.verdict == "proven", full_text(report)


def test_a_lookup_before_a_create(chaos: Chaos, pay: Provider, orders: Engine) -> None:
    """BUG-04's repair: who is there already is found by what he was created with."""

    def create(request: Request) -> Response:
        customers = pay.state.setdefault("customers", {})
        number = f"cus_{len(customers) + 1}"
        customers[number] = request.json["org"]
        return Response(201, {"id": number})

    def look(request: Request) -> list[str]:
        return [each for each, org in pay.state.get("customers", {}).items() if org == request.query["org"]]

    pay.post("/customers", create)
    pay.get("/customers", look)

    def job(looks: bool) -> None:
        if is_paid(orders, 1):
            return
        found = requests.get(f"{PAY}/customers?org=acme").json() if looks else []
        ref = found[0] if found else post("/customers", {"org": "acme"}).json()["id"]
        set_paid(orders, 1, ref)

    assert chaos.explore(job, True).verdict == "proven"
    assert pay.state == {"customers": {"cus_1": "acme"}}
    pay.state.clear()
    fresh(orders)
    assert chaos.explore(job, False).findings[0].kind == "duplicated"
    pay.state.clear()
    fresh(orders)
    racing = chaos(duplicates=2, crashes=0, budget=60).explore(job, True)
    assert racing.findings[0].kind == "duplicated", full_text(racing)


# -- state -----------------------------------------------------------------------------------------------------------


def test_state_is_put_back_and_left_as_the_clean_run_left_it(chaos: Chaos, pay: Provider, orders: Engine) -> None:
    pay.state["balance"] = 10_000
    state = pay.state

    def spend(request: Request) -> Response:
        if state["balance"] < request.json["cents"]:
            return Response(402, {"error": "empty"})
        state["balance"] -= request.json["cents"]
        return Response(201, {"left": state["balance"]})

    pay.post("/spend", spend)

    def job() -> None:
        if not is_paid(orders, 1):
            post("/spend", {"cents": 4200}, "k").raise_for_status()
            set_paid(orders, 1, "x")

    for _ in range(2):  # the second begins where the first began
        assert chaos.explore(job).verdict == "proven"
        assert state == {"balance": 5800} and pay.state is state
    state["balance"] = 4300
    assert chaos(duplicates=2, budget=60).explore(job).verdict == "proven"
    assert state == {"balance": 100}


def test_a_fork_sees_the_state(chaos: Chaos, pay: Provider, orders: Engine) -> None:
    memory: list[int] = []
    pay.post("/count", lambda request: pay.state.setdefault("seen", []).append(request.json["order"]) or {"ok": 1})

    def job(remembers: bool) -> None:
        if is_paid(orders, 1) or (remembers and memory):
            return
        post("/count", {"order": 1}, "order-1")
        memory.append(1)
        set_paid(orders, 1, "x")

    assert chaos.explore(job, False).verdict == "proven"
    assert pay.state == {"seen": [1]}
    memory.clear()
    assert chaos(isolation="process").explore(job, False).verdict == "proven"
    memory.clear()
    fresh(orders)
    hidden = chaos.explore(job, True)
    assert hidden.verdict == "proven" and "process" in full_text(hidden)


def test_three_deliveries_at_once(chaos: Chaos, pay: Provider, orders: Engine) -> None:
    report = chaos(duplicates=3, budget=60).explore(charge_by_key, orders)
    assert report.verdict == "proven", full_text(report)


def test_outside_pytest(tmp_path: Any) -> None:
    with Chaos(duplicates=1) as chaos:
        with chaos.sql.begin() as db:
            db.execute(text("CREATE TABLE orders (id INTEGER PRIMARY KEY, paid BOOLEAN, ref TEXT)"))
            db.execute(text("INSERT INTO orders VALUES (1, 0, NULL)"))
        pay = chaos.http.provider(PAY, key_header="Idempotency-Key")
        pay.post("/charges", json={})
        chaos.check(charge_by_key, chaos.sql)
        assert len(pay.calls) == 1


# -- misuse ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["api.pay.test", "", "ftp://x.test", "https://", None, "https://x.test?a=1", "http://x:y"]
)
def test_addresses_that_are_none(chaos: Chaos, url: Any) -> None:
    with pytest.raises(OptionError, match="provider"):
        chaos.http.provider(url)


def test_the_scheme_is_missing(chaos: Chaos) -> None:
    with pytest.raises(OptionError, match=r'Did you mean "https://api\.pay\.test/v1"'):
        chaos.http.provider("api.pay.test/v1")


def test_two_providers_on_one_address(chaos: Chaos, orders: Engine) -> None:
    chaos.http.provider("https://API.pay.test:443/").post("/charges", json={"who": "outer"})
    with pytest.raises(OptionError, match="has a provider already"):
        chaos.http.provider(PAY)
    chaos.http.provider(f"{PAY}/v1").post("/charges", json={"who": "inner"})

    def job() -> None:
        assert post("/v1/charges", {}).json() == {"who": "inner"}
        assert post("/charges", {}).json() == {"who": "outer"}
        assert post("/v10/charges", {}).status_code == 404

    assert chaos.explore(job).verdict == "failed"


@pytest.mark.parametrize(
    ("ttl", "expected"),
    [("24h", 86_400), ("30m", 1800), ("7d", 604_800), ("90s", 90), (5, 5), (datetime.timedelta(hours=1), 3600)],
)
def test_times(ttl: Any, expected: float) -> None:
    assert seconds(ttl) == expected


@pytest.mark.parametrize("more", [
    {"key_header": "K", "key_ttl": "soon"}, {"key_header": "K", "key_ttl": -1}, {"key_ttl": "24h"},
    {"key_header": ""}, {"key_header": "K", "on_conflict": 99}, {"on_conflict": "409"},
])  # fmt: skip
def test_options_that_cannot_be(chaos: Chaos, more: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        chaos.http.provider(PAY, **more)


@pytest.mark.parametrize("declare", [
    lambda pay: pay.post("charges", json={}),
    lambda pay: pay.post("/charges?x=1", json={}),
    lambda pay: pay.post("/charges", json={}, status=99),
    lambda pay: pay.post("/charges", json=object()),
    lambda pay: pay.post("/charges", json={1, 2}),
    lambda pay: pay.post("/charges", {"a": 1}, json={}),
    lambda pay: pay.post("/charges", json={}, body=b"x"),
    lambda pay: pay.post("/charges", body=7),
    lambda pay: pay.post("/{a}/{a}", json={}),
    lambda pay: pay.route("PO ST", "/x", json={}),
])  # fmt: skip
def test_routes_that_can_never_be_answered(chaos: Chaos, pay: Provider, declare: Any) -> None:
    with pytest.raises(OptionError, match=r"route|method"):
        declare(pay)


def boom(request: Request) -> Any:
    raise KeyError("nothing there")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda request: object(), "cannot be sent"),
        (lambda request: Response(999), "999"),
        (lambda request: Response(200, {}, body=b"x"), "only one"),
        (lambda request: ({"a": 1}, 201), "tuple"),
        (boom, "KeyError"),
    ],
)
def test_answers_that_cannot_be_sent(chaos: Chaos, pay: Provider, answer: Any, said: str) -> None:
    pay.post("/garbage", answer)
    with pytest.raises(WorldError, match=said) as raised:
        chaos.explore(post, "/garbage", {})
    assert "POST /garbage" in str(raised.value)
    assert pay.state == {}


def test_state_that_cannot_be_put_back(chaos: Chaos, pay: Provider) -> None:
    pay.post("/lock", lambda request: pay.state.update(lock=threading.Lock()) or {})
    with pytest.raises(WorldError, match="cannot be pickled"):
        chaos.explore(post, "/lock", {})


def test_a_route_that_sends_requests_itself(chaos: Chaos, pay: Provider) -> None:
    pay.post("/hook", lambda request: requests.post(f"{PAY}/charges", json={}).json())
    with pytest.raises(WorldError, match="code of a route sent a request"):
        chaos.explore(post, "/hook", {})


def test_names_of_hosts(chaos: Chaos, orders: Engine) -> None:
    chaos.http.provider("https://bücher.test").put("/x", json={})
    chaos.http.provider("http://[::1]:9").put("/x", json={})

    def job() -> None:
        requests.put("https://bücher.test/x", json={}).raise_for_status()
        requests.put("https://BÜCHER.test:443/x", json={}).raise_for_status()
        requests.put("http://[::1]:9/x", json={}).raise_for_status()
        set_paid(orders, 1, "x")

    assert chaos.explore(job).verdict == "proven"


def test_the_marker(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        import requests

        @pytest.fixture
        def pay(chaos):
            pay = chaos.http.provider("https://api.pay.test", key_header="Idempotency-Key")
            pay.post("/charges", json={"id": "ch_1"}, status=201)
            return pay

        def charge(key):
            headers = {"Idempotency-Key": key} if key else {}
            requests.post("https://api.pay.test/charges", json={}, headers=headers).raise_for_status()

        @pytest.mark.idempotent(charge, args=("k",))
        def test_good(pay):
            assert [call.key for call in pay.calls] == ["k"]

        @pytest.mark.idempotent(charge, args=("",))
        def test_bad(pay):
            pass

        @pytest.mark.idempotent
        def test_body(pay):
            charge("k")
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:randomly")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*DUPLICATED POST https://api.pay.test/charges*"])


def test_declared_in_the_middle_of_a_check(chaos: Chaos, pay: Provider) -> None:
    def job() -> None:
        pay.get("/late", json={})

    with pytest.raises(Exception, match="declare routes before the check"):
        chaos.explore(job)
    with pytest.raises(Exception, match="declared while a job was running"):
        chaos.explore(lambda: chaos.http.provider("https://other.test"))
