"""Every client, unmodified: a request is a step, counts once, and gets what the client gives in reality."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp
import httpx
import pytest
import requests
import requests.adapters
import urllib3
from sqlalchemy import Engine

from retrychaos import Chaos, Request, Response
from retrychaos.report.text import full_text
from retrychaos.world.http_provider import Provider
from tests.http.clients import CLIENTS, Send, by_aiohttp, by_httpx, by_requests, by_urllib_request
from tests.http.conftest import PAY, findings, is_paid, set_paid

CHARGE = f"POST {PAY}/charges"


def charge(engine: Engine, send: Send, order: int, headers: dict[str, str]) -> None:
    if is_paid(engine, order):
        return
    status, body = send("POST", f"{PAY}/charges", {"order": order}, headers)
    assert status == 201
    set_paid(engine, order, body["id"])


@pytest.mark.parametrize("send", CLIENTS)
@pytest.mark.parametrize("duplicates", [1, 2])
def test_a_key_makes_the_difference(chaos: Chaos, orders: Engine, pay: Provider, send: Send, duplicates: int) -> None:
    chaos = chaos(duplicates=duplicates, budget=60)
    good = chaos.explore(charge, orders, send, 1, {"Idempotency-Key": "order-1"})
    assert good.verdict == "proven", full_text(good)
    assert [(call.method, call.json, call.key) for call in pay.calls] == [("POST", {"order": 1}, "order-1")]
    bad = chaos.explore(charge, orders, send, 2, {})
    assert findings(bad) == [("duplicated", CHARGE)], full_text(bad)
    token = bad.findings[0].token
    again = chaos.run(charge, orders, send, 3, {}, plan=token)
    assert (again.kind, again.effect) == ("duplicated", CHARGE)
    assert [(step.kind, step.text) for step in again.timeline[0].steps if step.kind == "http"] == [("http", CHARGE)]


@pytest.mark.parametrize("send", CLIENTS)
def test_what_comes_back(chaos: Chaos, orders: Engine, pay: Provider, send: Send) -> None:
    pay.get("/charges/{id}", lambda request: {"id": request.params["id"], "page": request.query.get("page")})
    pay.post("/refused", json={"error": "card"}, status=402)

    def job() -> None:
        assert send("GET", f"{PAY}/charges/ch_7?page=2", None, {}) == (200, {"id": "ch_7", "page": "2"})
        assert send("POST", f"{PAY}/refused", {"a": 1}, {}) == (402, {"error": "card"})
        status, body = send("POST", f"{PAY}/nothing", {"a": 1}, {})
        assert status == 404 and "no route" in body["error"]
        set_paid(orders, 1, "x")

    report = chaos.explore(job)
    assert report.verdict == "proven", full_text(report)
    assert pay.calls == []  # refusals are no effects
    assert [request.method for request in pay.requests] == ["GET", "POST", "POST"]
    assert any(f"POST {PAY}/nothing" in note and "404" in note for note in report.warnings)


def test_urllib3_repeats_by_itself_and_each_counts(chaos: Chaos, pay: Provider, orders: Engine) -> None:
    def flaky(request: Request) -> Response:
        pay.state["tries"] = pay.state.get("tries", 0) + 1
        return Response(503 if pay.state["tries"] < 3 else 201, {"id": "ch"})

    pay.post("/flaky", flaky)

    def job() -> None:
        retry = urllib3.Retry(total=5, status_forcelist=[503], allowed_methods=None, backoff_factor=30)
        session = requests.Session()
        session.mount("https://", requests.adapters.HTTPAdapter(max_retries=retry))
        if not is_paid(orders, 1):
            assert session.post(f"{PAY}/flaky").status_code == 201
            set_paid(orders, 1, "x")

    started = time.monotonic()
    report = chaos.explore(job)
    assert time.monotonic() - started < 60  # the backoff takes no time
    assert len(pay.requests) == 3 and len(pay.calls) == 1
    assert ("duplicated", f"POST {PAY}/flaky") in findings(report)


@pytest.mark.parametrize("send", [by_requests, by_aiohttp, by_urllib_request])
def test_redirects_are_followed_as_usual(chaos: Chaos, pay: Provider, orders: Engine, send: Send) -> None:
    pay.get("/old", status=302, headers={"Location": "/new"})
    pay.get("/new", json={"at": "new"})

    def job() -> None:
        assert send("GET", f"{PAY}/old", None, {}) == (200, {"at": "new"})
        set_paid(orders, 1, "x")

    assert chaos.explore(job).verdict == "proven"
    assert [request.path for request in pay.requests] == ["/old", "/new"]


def test_a_redirected_post(chaos: Chaos, pay: Provider, orders: Engine) -> None:
    pay.post("/old", status=307, headers={"Location": f"{PAY}/charges"})

    def job() -> None:
        httpx.post(f"{PAY}/old", json={"a": 1}, follow_redirects=True).raise_for_status()
        requests.post(f"{PAY}/old", json={"a": 1}).raise_for_status()
        set_paid(orders, 1, "x")

    report = chaos.explore(job)
    assert findings(report)[0][0] == "duplicated"
    assert [call.path for call in pay.calls] == ["/old", "/charges"] * 2


def test_bodies_that_can_be_read_only_once(chaos: Chaos, pay: Provider, orders: Engine, tmp_path: Any) -> None:
    got: list[bytes] = []

    def take(request: Request) -> dict[str, str]:
        got.append(request.body)
        return {"id": "1"}

    pay.post("/upload", take)
    file = tmp_path / "body.bin"
    file.write_bytes(b"from a file")

    def pieces() -> Any:
        yield b"from "
        yield b"pieces"

    async def send() -> None:
        async def slowly() -> Any:
            yield b"from "
            yield b"pieces"

        async with aiohttp.ClientSession() as session:
            await session.post(f"{PAY}/upload", data=slowly())
        async with httpx.AsyncClient() as client:
            await client.post(f"{PAY}/upload", content=slowly())

    def job() -> None:
        requests.post(f"{PAY}/upload", data=pieces())
        httpx.post(f"{PAY}/upload", content=pieces())
        with file.open("rb") as opened:
            requests.post(f"{PAY}/upload", data=opened)
        with file.open("rb") as opened:
            urllib3.PoolManager().request("POST", f"{PAY}/upload", body=opened)
        asyncio.run(send())
        set_paid(orders, 1, "x")

    chaos.explore(job)
    assert got[:6] == [b"from pieces", b"from pieces", b"from a file", b"from a file", b"from pieces", b"from pieces"]
    assert len(pay.calls) == 6


def test_multipart_boundaries_are_no_difference(chaos: Chaos, pay: Provider, orders: Engine) -> None:
    pay.put("/file", json={"ok": True})

    def job() -> None:
        requests.put(f"{PAY}/file", files={"file": ("a.txt", b"content")}, data={"name": "a"})
        httpx.put(f"{PAY}/file", files={"file": ("a.txt", b"content")}, data={"name": "a"})
        set_paid(orders, 1, "x")

    report = chaos.explore(job)
    assert report.verdict == "proven", full_text(report)


def test_a_stream_that_is_closed_half_way(chaos: Chaos, pay: Provider, orders: Engine) -> None:
    pay.get("/long", body=b"x" * 100_000)

    def job() -> None:
        for _ in range(3):
            with requests.get(f"{PAY}/long", stream=True) as reply:
                assert next(reply.iter_content(10)) == b"x" * 10
            with httpx.stream("GET", f"{PAY}/long") as other:
                assert next(other.iter_bytes(10)) == b"x" * 10
        reply = urllib3.PoolManager(maxsize=1, block=True).request("GET", f"{PAY}/long", preload_content=False)
        assert reply.read(5) == b"xxxxx"
        reply.close()
        set_paid(orders, 1, "x")

    assert chaos(duplicates=2, budget=60).explore(job).verdict == "proven"
    assert len(pay.requests) == 7


def test_cookies_and_headers_of_an_answer(chaos: Chaos, pay: Provider, orders: Engine) -> None:
    pay.get("/login", json={}, headers={"Set-Cookie": "sid=42; Path=/", "X-Rate": "7"})
    pay.get("/me", lambda request: {"cookie": request.headers.get("cookie")})

    async def send() -> None:
        async with aiohttp.ClientSession() as session:
            reply = await session.get(f"{PAY}/login")
            assert reply.headers["x-rate"] == "7" and reply.cookies["sid"].value == "42"
            assert await (await session.get(f"{PAY}/me")).json() == {"cookie": "sid=42"}

    def job() -> None:
        session, client = requests.Session(), httpx.Client()
        for each in (session, client):
            assert each.get(f"{PAY}/login").headers["x-rate"] == "7"
            assert each.get(f"{PAY}/me").json() == {"cookie": "sid=42"}
        asyncio.run(send())
        set_paid(orders, 1, "x")

    report = chaos.explore(job)
    assert report.verdict == "proven", full_text(report)


def test_a_transport_of_the_users_that_repeats(chaos: Chaos, pay: Provider, orders: Engine) -> None:
    pay.post("/busy", lambda request: Response(503))

    class Again(httpx.BaseTransport):
        def __init__(self) -> None:
            self.below = httpx.HTTPTransport()

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            self.below.handle_request(request)
            return self.below.handle_request(request)

    def job() -> None:
        with httpx.Client(transport=Again()) as client:
            assert client.post(f"{PAY}/busy").status_code == 503
        set_paid(orders, 1, "x")

    assert chaos.explore(job).verdict == "proven"
    assert len(pay.requests) == 2


def test_a_job_that_imports_its_client_itself(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile(
        """
        import sys


        def job():
            import requests
            import httpx

            requests.post("https://api.pay.test/charges", json={"a": 1}).raise_for_status()
            httpx.post("https://api.pay.test/charges", json={"a": 2}).raise_for_status()


        def test_it(chaos):
            assert not {"requests", "httpx", "urllib3"} & set(sys.modules)
            pay = chaos.http.provider("https://api.pay.test")
            pay.post("/charges", json={})
            report = chaos.explore(job)
            assert report.verdict == "failed"
            assert [call.json for call in pay.calls] == [{"a": 1}, {"a": 2}]
            from urllib3.connectionpool import HTTPConnectionPool
            assert HTTPConnectionPool._make_request.__module__ == "urllib3.connectionpool"
        """
    )
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # plugins import clients
    result = pytester.runpytest_subprocess("-p", "retrychaos.plugin")
    result.assert_outcomes(passed=1)


def test_no_client_is_imported_by_a_check(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile(
        """
        import sys
        from sqlalchemy import text

        def job(engine):
            with engine.begin() as db:
                db.execute(text("INSERT OR REPLACE INTO t VALUES (1)"))

        def test_it(chaos):
            before = set(sys.modules)
            with chaos.sql.begin() as db:
                db.execute(text("CREATE TABLE t (id INTEGER PRIMARY KEY)"))
            assert chaos.explore(job, chaos.sql).verdict == "proven"
            names = {"requests", "httpx", "urllib3", "aiohttp", "urllib.request", "http.client"}
            assert not names & (set(sys.modules) - before)
        """
    )
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # plugins import clients
    result = pytester.runpytest_subprocess("-p", "retrychaos.plugin")
    result.assert_outcomes(passed=1)


def test_json_that_the_job_sends_is_what_the_test_sees(chaos: Chaos, pay: Provider) -> None:
    def job() -> None:
        requests.put(f"{PAY}/form", data={"a": "1", "b": ["2", "3"]})
        by_httpx("PUT", f"{PAY}/json", {"a": [1, None]}, {"X-Trace": "7"})

    pay.put("/form", json={})
    pay.put("/json", json={})
    chaos.explore(job)
    form, sent = pay.calls
    assert form.form == {"a": "1", "b": "3"} and form.json is None
    assert sent.json == {"a": [1, None]} and sent.headers["x-trace"] == "7"
    assert json.loads(sent.body) == sent.json and sent.path == "/json" and sent.key is None
