"""Requests that no provider answers: tools of the test, servers on this machine, and nobody."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable
from typing import Any

import aiohttp
import httpx
import pytest
import requests
import requests.adapters
import responses
import respx
import urllib3
from pytest_httpserver import HTTPServer
from sqlalchemy import Engine

from retrychaos import Chaos, WorldError
from retrychaos.report.text import full_text
from retrychaos.world.http_provider import Provider
from tests.http.clients import CLIENTS, Send, by_httpx, by_httpx_async, by_requests
from tests.http.conftest import PAY, findings, fresh, is_paid, set_paid

CHARGE = f"POST {PAY}/charges"


def charge(engine: Engine, send: Send, guarded: bool) -> None:
    if guarded and is_paid(engine, 1):
        return
    status, body = send("POST", f"{PAY}/charges", {"order": 1}, {})
    assert status == 201
    set_paid(engine, 1, body["id"])


def put(engine: Engine, send: Send) -> None:
    status, body = send("PUT", f"{PAY}/charges/1", {"order": 1}, {})
    assert status == 201
    set_paid(engine, 1, body["id"])


# -- tools of the test -----------------------------------------------------------------------------------------------


@responses.activate
def test_responses_in_the_test(chaos: Chaos, orders: Engine) -> None:
    responses.post(f"{PAY}/charges", json={"id": "1"}, status=201)
    responses.put(f"{PAY}/charges/1", json={"id": "1"}, status=201)
    report = chaos.explore(charge, orders, by_requests, True)
    assert findings(report) == [("duplicated", CHARGE)], full_text(report)
    fresh(orders)
    assert chaos.explore(put, orders, by_requests).verdict == "proven"
    fresh(orders)
    assert chaos(duplicates=2, budget=60).explore(put, orders, by_requests).verdict == "proven"


def test_responses_in_the_job(chaos: Chaos, orders: Engine) -> None:
    @responses.activate
    def job() -> None:
        responses.post(f"{PAY}/charges", json={"id": "1"}, status=201)
        charge(orders, by_requests, True)
        assert len(responses.calls) <= 1

    assert findings(chaos.explore(job)) == [("duplicated", CHARGE)]


@responses.activate
def test_responses_repeats_by_itself(chaos: Chaos, orders: Engine) -> None:
    answers = iter([503, 503, 201] * 100)
    responses.add_callback("POST", f"{PAY}/charges", lambda request: (next(answers), {}, '{"id": "1"}'))

    def job() -> None:
        retry = urllib3.Retry(total=5, status_forcelist=[503], allowed_methods=None)
        with requests.Session() as session:
            session.mount("https://", requests.adapters.HTTPAdapter(max_retries=retry))
            if not is_paid(orders, 1):
                session.post(f"{PAY}/charges", json={})
                set_paid(orders, 1, "x")

    report = chaos.explore(job)
    assert findings(report) == [("duplicated", CHARGE)], full_text(report)
    assert report.steps == 7  # two for each transaction, and three requests


@respx.mock
@pytest.mark.parametrize("send", [by_httpx, by_httpx_async])
def test_respx_in_the_test(chaos: Chaos, orders: Engine, send: Send) -> None:
    respx.post(f"{PAY}/charges").respond(201, json={"id": "1"})
    respx.put(f"{PAY}/charges/1").respond(201, json={"id": "1"})
    report = chaos.explore(charge, orders, send, True)
    assert findings(report) == [("duplicated", CHARGE)], full_text(report)
    fresh(orders)
    assert chaos(duplicates=2, budget=60).explore(put, orders, send).verdict == "proven"


def test_respx_in_the_job(chaos: Chaos, orders: Engine) -> None:
    @respx.mock
    def job() -> None:
        respx.post(f"{PAY}/charges").respond(201, json={"id": "1"})
        charge(orders, by_httpx, True)

    assert findings(chaos.explore(job)) == [("duplicated", CHARGE)]


def test_a_mock_transport(chaos: Chaos, orders: Engine) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(201, json={"id": "1"}))

    def send(method: str, url: str, body: Any, headers: Any) -> tuple[int, Any]:
        with httpx.Client(transport=transport, base_url=PAY) as client:
            reply = client.request(method, url, json=body)
            return reply.status_code, reply.json()

    assert findings(chaos.explore(charge, orders, send, True)) == [("duplicated", CHARGE)]
    fresh(orders)
    assert chaos(duplicates=2, budget=60).explore(put, orders, send).verdict == "proven"


def test_an_adapter_of_the_users(chaos: Chaos, orders: Engine) -> None:
    class Fake(requests.adapters.BaseAdapter):
        def send(self, request: Any, **kwargs: Any) -> requests.Response:
            reply = requests.Response()
            reply.status_code, reply._content, reply.request = 201, b'{"id": "1"}', request
            reply.url = request.url
            return reply

        def close(self) -> None: ...

    def send(method: str, url: str, body: Any, headers: Any) -> tuple[int, Any]:
        with requests.Session() as session:
            session.mount("https://", Fake())
            reply = session.request(method, url, json=body)
            return reply.status_code, reply.json()

    assert findings(chaos.explore(charge, orders, send, True)) == [("duplicated", CHARGE)]


@responses.activate
def test_a_provider_goes_before_a_mock(chaos: Chaos, orders: Engine, pay: Provider) -> None:
    responses.post("https://mail.test/send", json={"id": "m"}, status=201)

    def job() -> None:
        if is_paid(orders, 1):
            return
        reply = requests.post(f"{PAY}/charges", json={}, headers={"Idempotency-Key": "1"})
        assert reply.json() == {"id": "ch_1"}
        requests.post("https://mail.test/send", json={}).raise_for_status()
        set_paid(orders, 1, "x")

    assert findings(chaos.explore(job)) == [("duplicated", "POST https://mail.test/send")]
    assert len(pay.calls) == 1


def test_something_stands_in_for_aiohttp(
    chaos: Chaos, orders: Engine, pay: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As aioresponses does."""

    class Answer:
        status, headers, _body = 201, {"x": "y"}, b"{}"

        async def read(self) -> bytes:
            return self._body

    async def stand_in(session: Any, method: str, url: Any, **more: Any) -> Any:
        return Answer()

    monkeypatch.setattr(aiohttp.ClientSession, "_request", stand_in)

    def job(method: str) -> None:
        async def send() -> None:
            async with aiohttp.ClientSession() as session:
                await session._request(method, "https://r.test/c", json={"a": 1}, params={"b": "2"})
                reply = await session._request("POST", f"{PAY}/charges", json={}, headers={"Idempotency-Key": "1"})
                assert await reply.json() == {"id": "ch_1"}

        asyncio.run(send())
        set_paid(orders, 1, "x")

    chaos = chaos(duplicates=2, budget=60)
    assert findings(chaos.explore(job, "POST")) == [("duplicated", "POST https://r.test/c")]
    fresh(orders)
    assert chaos.explore(job, "PUT").verdict == "proven"
    assert len(pay.calls) == 1 and pay.calls[0].key == "1"


@responses.activate
def test_an_address_with_ids_is_one_effect(chaos: Chaos, orders: Engine) -> None:
    responses.post(re.compile(rf"{PAY}/orders/.*"), json={}, status=201)

    def job() -> None:
        requests.post(f"{PAY}/orders/17/refund?reason=late", json={}).raise_for_status()
        set_paid(orders, 1, "x")

    assert findings(chaos.explore(job)) == [("duplicated", f"POST {PAY}/orders/{{}}/refund")]


# -- servers on this machine -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("send", CLIENTS)
def test_a_server_of_the_test(chaos: Chaos, orders: Engine, httpserver: HTTPServer, send: Send) -> None:
    httpserver.expect_request("/charges").respond_with_json({"id": "1"}, status=201)
    url = httpserver.url_for("/charges")

    def job(method: str) -> None:
        if not is_paid(orders, 1):
            assert send(method, url, {"order": 1}, {}) == (201, {"id": "1"})
            set_paid(orders, 1, "x")

    report = chaos.explore(job, "POST")
    assert findings(report) == [("duplicated", "POST http://localhost/charges")], full_text(report)
    fresh(orders)
    report = chaos.explore(job, "PUT")
    assert report.verdict == "proven", full_text(report)
    assert len(httpserver.log) > 4


def test_a_server_of_the_test_and_two_deliveries(chaos: Chaos, orders: Engine, httpserver: HTTPServer) -> None:
    httpserver.expect_request("/charges").respond_with_json({"id": "1"}, status=201)
    url = httpserver.url_for("/charges")
    session = requests.Session()

    def job(method: str) -> None:
        if not is_paid(orders, 1):
            reply = session.request(method, url, json={})
            with session.get(url, stream=True) as other:
                assert other.json() == reply.json() == {"id": "1"}
            set_paid(orders, 1, "x")

    chaos = chaos(duplicates=2, budget=120)
    report = chaos.explore(job, "PUT")
    assert report.verdict == "proven", full_text(report)
    fresh(orders)
    assert findings(chaos.explore(job, "POST")) == [("duplicated", "POST http://localhost/charges")]
    session.close()


def test_nobody_listens_on_this_machine(chaos: Chaos, orders: Engine) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]

        def job() -> None:
            with contextlib.suppress(requests.ConnectionError):
                requests.post(f"http://127.0.0.1:{port}/x", json={})
            set_paid(orders, 1, "x")

        assert chaos.explore(job).verdict == "proven"


# -- nobody ----------------------------------------------------------------------------------------------------------


REFUSED: list[tuple[Callable[[], Any], type[Exception]]] = [
    (lambda: requests.post("https://nobody.test/x", json={}), requests.ConnectionError),
    (lambda: urllib3.PoolManager().request("POST", "http://93.184.216.34/x"), urllib3.exceptions.MaxRetryError),
    (lambda: httpx.post("https://nobody.test/x", json={}), httpx.ConnectError),
    (lambda: asyncio.run(_async_httpx()), httpx.ConnectError),
    (lambda: asyncio.run(_aiohttp()), aiohttp.ClientConnectorError),
    (lambda: CLIENTS[3]("POST", "https://nobody.test/x", {}, {}), Exception),
    (lambda: CLIENTS[7]("POST", "https://nobody.test/x", {}, {}), OSError),
    (lambda: CLIENTS[8]("POST", "https://nobody.test/x", {}, {}), ConnectionRefusedError),
]


async def _async_httpx() -> None:
    async with httpx.AsyncClient() as client:
        await client.post("https://nobody.test/x", json={})


async def _aiohttp() -> None:
    async with aiohttp.ClientSession() as session:
        await session.post("https://nobody.test/x", json={})


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would have gone to the network or to a name server."""
    asked: list[Any] = []

    def ask(*args: Any, **kwargs: Any) -> Any:
        asked.append(args)
        raise OSError("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    monkeypatch.setattr(socket.socket, "connect", ask)
    return asked


@pytest.mark.parametrize(("send", "error"), REFUSED)
def test_a_request_that_nobody_answers(
    chaos: Chaos, orders: Engine, no_network: list[Any], send: Callable[[], Any], error: type[Exception]
) -> None:
    def job() -> None:
        with pytest.raises(error):
            send()
        set_paid(orders, 1, "x")

    report = chaos.explore(job)
    assert no_network == []
    assert report.verdict == "inconclusive" and not report.ok
    assert "nobody answers for that address" in report.stop_reason and "chaos.http.provider(" in report.stop_reason
    assert " at tests/http/" in report.stop_reason


def test_a_job_that_fails_for_that_reason(chaos: Chaos, orders: Engine, no_network: list[Any]) -> None:
    with pytest.raises(WorldError, match=r"nobody\.test/x at .*test_elsewhere"):
        chaos.explore(lambda: requests.post("https://nobody.test/x", json={}).raise_for_status())
    assert no_network == []


def test_a_proxy_is_no_way_out(
    chaos: Chaos, orders: Engine, pay: Provider, no_network: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:3128")

    def job(url: str) -> None:
        for post in (requests.post, httpx.post):
            with contextlib.suppress(OSError, httpx.ConnectError):
                post(url, json={}, headers={"Idempotency-Key": "1"}).raise_for_status()
        set_paid(orders, 1, "x")

    report = chaos.explore(job, "https://nobody.test/x")
    assert "nobody answers" in report.stop_reason and no_network == []
    fresh(orders)
    report = chaos.explore(job, f"{PAY}/charges")
    assert report.verdict == "proven", full_text(report)
    assert len(pay.calls) == 1 and len(pay.requests) == 2


def test_inside_a_watched_call_it_is_covered(chaos: Chaos, orders: Engine, httpserver: HTTPServer) -> None:
    httpserver.expect_request("/charges").respond_with_json({"id": "1"}, status=201)

    class Gateway:
        def charge(self, key: str) -> None:
            requests.post(httpserver.url_for("/charges"), json={})

    chaos.watch(Gateway, "charge", key="key")

    def job() -> None:
        Gateway().charge("1")
        set_paid(orders, 1, "x")

    report = chaos.explore(job)
    assert report.verdict == "proven", full_text(report)


# -- what may have arrived -------------------------------------------------------------------------------------------


def test_no_answer_in_time_is_no_excuse(chaos: Chaos, orders: Engine) -> None:
    """Sent and forgotten: whoever does not wait for the answer has sent it nevertheless."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x"

        def by_requests() -> None:
            requests.post(url, json={}, timeout=0.05)

        def by_http() -> None:
            httpx.post(url, json={}, timeout=0.05)

        def by_wait() -> None:
            async def send() -> None:
                async with aiohttp.ClientSession() as session:
                    await asyncio.wait_for(session.post(url, json={}), 0.05)

            asyncio.run(send())

        def by_limit() -> None:
            async def send() -> None:
                async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.05)) as session:
                    await session.post(url, json={})

            asyncio.run(send())

        for send in (by_requests, by_http, by_wait, by_limit):

            def job() -> None:
                with pytest.raises((OSError, httpx.ReadTimeout, TimeoutError)):
                    send()  # noqa: B023
                set_paid(orders, 1, "x")

            fresh(orders)
            assert findings(chaos.explore(job)) == [("duplicated", "POST http://localhost/x")], send


@responses.activate
def test_a_mock_that_gives_no_answer(chaos: Chaos, orders: Engine) -> None:
    responses.post("https://slow.test/x", body=requests.ReadTimeout("too slow"))
    responses.post("https://down.test/x", body=requests.ConnectTimeout("nobody there"))

    def job(url: str) -> None:
        with contextlib.suppress(requests.RequestException):
            requests.post(url, json={})
        set_paid(orders, 1, "x")

    assert findings(chaos.explore(job, "https://slow.test/x")) == [("duplicated", "POST https://slow.test/x")]
    fresh(orders)
    assert chaos.explore(job, "https://down.test/x").verdict == "proven"


@responses.activate
def test_a_key_that_is_sent_to_a_mock(chaos: Chaos, orders: Engine) -> None:
    responses.post("https://mock.test/x", json={})

    def job() -> None:
        requests.post("https://mock.test/x", json={}, headers={"idempotency-key": "1"})
        set_paid(orders, 1, "x")

    report = chaos.explore(job)
    assert findings(report) == [("duplicated", "POST https://mock.test/x")]
    assert any("sent with an Idempotency-Key" in note and "chaos.http.provider" in note for note in report.notes)


def test_a_transport_that_changes_the_address(chaos: Chaos, orders: Engine, pay: Provider) -> None:
    class ByName(httpx.BaseTransport):
        def __init__(self) -> None:
            self.below = httpx.HTTPTransport()

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            moved = httpx.Request(
                request.method, f"{PAY}{request.url.path}", headers=request.headers, content=request.read()
            )
            return self.below.handle_request(moved)

    def job() -> None:
        with httpx.Client(transport=ByName()) as client:
            client.post("http://pay.service/charges", json={}, headers={"Idempotency-Key": "1"}).raise_for_status()
        set_paid(orders, 1, "x")

    report = chaos.explore(job)
    assert len(pay.requests) == 1
    assert report.verdict == "proven", full_text(report)


def test_a_pool_of_threads_that_is_older_than_the_check(chaos: Chaos, orders: Engine, pay: Provider) -> None:
    """It is seen what is sent there. (In a fork there is no such thread, so the check cannot come to an end.)"""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()

        def job() -> None:
            pool.submit(lambda: requests.post(f"{PAY}/charges", json={})).result().raise_for_status()
            set_paid(orders, 1, "x")

        chaos(budget=2).explore(job)
    assert len(pay.calls) == 1


def test_other_protocols_over_http_client_are_escapes(chaos: Chaos, orders: Engine) -> None:
    import threading
    import xmlrpc.client
    from xmlrpc.server import SimpleXMLRPCServer

    with SimpleXMLRPCServer(("127.0.0.1", 0), logRequests=False) as server:
        server.register_function(int, "take")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"

        def job(where: str) -> None:
            with contextlib.suppress(OSError):
                xmlrpc.client.ServerProxy(where).take(1)
            set_paid(orders, 1, "x")

        report = chaos.explore(job, url)
        assert report.verdict == "inconclusive" and "connection to localhost" in report.stop_reason
        fresh(orders)
        report = chaos.explore(job, "http://nobody.test")
        assert report.verdict == "inconclusive" and "nobody answers" in report.stop_reason
        server.shutdown()
