"""Whatever happens in a check with HTTP: nothing is left of it in the clients, the process or the provider."""

from __future__ import annotations

from typing import Any

import pytest
import requests
from pytest_httpserver import HTTPServer

from retrychaos import BaselineError, Chaos, WorldError
from tests.http.clients import CLIENTS, Send
from tests.http.conftest import PAY

URL = f"{PAY}/charges"


@pytest.mark.parametrize("duplicates", [1, 2])
@pytest.mark.parametrize("send", CLIENTS)
def test_a_check(send: Send, duplicates: int, untouched: Any) -> None:
    with Chaos(duplicates=duplicates, budget=60) as chaos:
        pay = chaos.http.provider(PAY)
        pay.put("/charges", json={})
        pay.state["n"] = 1
        with untouched():
            assert chaos.explore(send, "PUT", URL, {"a": 1}, {}).verdict == "proven"
        assert pay.state == {"n": 1}


@pytest.mark.parametrize("isolation", ["sample", "process"])
def test_a_real_server(isolation: str, httpserver: HTTPServer, untouched: Any) -> None:
    httpserver.expect_request("/x").respond_with_json({})
    session = requests.Session()
    url = httpserver.url_for("/x")
    with Chaos(duplicates=2, budget=60, isolation=isolation) as chaos:
        with untouched():
            chaos.explore(lambda: session.put(url, json={}).raise_for_status())
    session.close()


def boom(_: Any) -> Any:
    raise RuntimeError("in the test's code")


def test_everything_that_goes_wrong(untouched: Any) -> None:
    def fails() -> None:
        requests.post(URL, json={}).raise_for_status()

    def interrupts() -> None:
        requests.put(URL, json={})
        raise KeyboardInterrupt

    def escapes() -> None:
        requests.put("https://nobody.test/")

    with Chaos(duplicates=1) as chaos:
        pay = chaos.http.provider(PAY)
        pay.post("/charges", status=500)
        pay.put("/charges", json={})
        pay.get("/boom", boom)
        with untouched():
            with pytest.raises(BaselineError):
                chaos.explore(fails)
            with pytest.raises(KeyboardInterrupt):
                chaos.explore(interrupts)
            with pytest.raises(WorldError):
                chaos.explore(escapes)
            with pytest.raises(WorldError):
                chaos.explore(lambda: requests.get(f"{PAY}/boom"))
        assert chaos.explore(lambda: requests.put(URL, json={}).raise_for_status()).verdict == "proven"


def test_between_checks_the_network_is_the_users_own(httpserver: HTTPServer) -> None:
    httpserver.expect_request("/x").respond_with_json({"real": True})
    with Chaos(duplicates=1) as chaos:
        chaos.http.provider(httpserver.url_for("")).put("/x", json={"real": False})
        url = httpserver.url_for("/x")
        assert requests.put(url).json() == {"real": True}
        chaos.explore(lambda: requests.put(url).raise_for_status())
        assert requests.put(url).json() == {"real": True}
        assert len(httpserver.log) == 2
