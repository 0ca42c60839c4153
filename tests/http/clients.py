"""The same request by each client, unmodified: ``send(method, url, body, headers)`` gives status and JSON."""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import aiohttp
import botocore.awsrequest
import botocore.httpsession
import httpx
import requests
import urllib3

Reply: TypeAlias = tuple[int, Any]
Send: TypeAlias = Callable[[str, str, Any, Mapping[str, str]], Reply]

kept_session = requests.Session()
kept_client = httpx.Client()
kept_pool = urllib3.PoolManager()


def by_requests(method: str, url: str, body: Any, headers: Mapping[str, str]) -> Reply:
    reply = requests.request(method, url, json=body, headers=dict(headers))
    return reply.status_code, reply.json()


def by_kept_requests_session(method: str, url: str, body: Any, headers: Mapping[str, str]) -> Reply:
    reply = kept_session.request(method, url, json=body, headers=dict(headers))
    return reply.status_code, reply.json()


def by_urllib3(method: str, url: str, body: Any, headers: Mapping[str, str]) -> Reply:
    reply = kept_pool.request(method, url, json=body, headers=dict(headers))
    return reply.status, reply.json()


def by_botocore(method: str, url: str, body: Any, headers: Mapping[str, str]) -> Reply:
    session = botocore.httpsession.URLLib3Session()
    request = botocore.awsrequest.AWSRequest(method, url, dict(headers), json.dumps(body).encode()).prepare()
    reply = session.send(request)
    return reply.status_code, json.loads(reply.content)


def by_httpx(method: str, url: str, body: Any, headers: Mapping[str, str]) -> Reply:
    reply = kept_client.request(method, url, json=body, headers=dict(headers))
    return reply.status_code, reply.json()


def by_httpx_async(method: str, url: str, body: Any, headers: Mapping[str, str]) -> Reply:
    async def send() -> Reply:
        async with httpx.AsyncClient() as client:
            reply = await client.request(method, url, json=body, headers=dict(headers))
            return reply.status_code, reply.json()

    return asyncio.run(send())


def by_aiohttp(method: str, url: str, body: Any, headers: Mapping[str, str]) -> Reply:
    async def send() -> Reply:
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, url, json=body, headers=dict(headers)) as reply,
        ):
            return reply.status, await reply.json()

    return asyncio.run(send())


def by_urllib_request(method: str, url: str, body: Any, headers: Mapping[str, str]) -> Reply:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(url, data=data, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def by_http_client(method: str, url: str, body: Any, headers: Mapping[str, str]) -> Reply:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc)
    data = None if body is None else json.dumps(body)
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    connection.request(method, target, data, {"Content-Type": "application/json", **headers})
    reply = connection.getresponse()
    try:
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


CLIENTS: list[Send] = [
    by_requests,
    by_kept_requests_session,
    by_urllib3,
    by_botocore,
    by_httpx,
    by_httpx_async,
    by_aiohttp,
    by_urllib_request,
    by_http_client,
]
