"""Access control, request limits and security headers of the web UI."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from replaydb import Buffer, InvalidInputError, Store
from replaydb.ui import application, safety, serve, serving
from replaydb.ui.app import ROUTES
from support.groups import group
from ui.conftest import OpenClient

TOKEN = "0123456789abcdef"  # noqa: S105
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>\x1b[2J\u202e{{7*7}}"


@pytest.fixture
def engine_name() -> str:
    """None of these tests depends on the engine."""
    return "sqlite"


async def test_every_response_has_the_headers(browser: httpx.AsyncClient) -> None:
    statuses = {}
    for path in ("/", "/none", "/?buffer=none", "/static/ui.css", "/?" + "x" * 9000):
        answer = await browser.get(path)
        statuses[path[:15]] = answer.status_code
        for name, value in safety.HEADERS.items():
            assert answer.headers[name] == value
        assert answer.headers["Cache-Control"] == "no-store"
    assert list(statuses.values()) == [200, 404, 404, 200, 414]
    policy = safety.HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


async def test_only_get_and_head_are_allowed(browser: httpx.AsyncClient) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
        for path in ("/", "/static/ui.css"):
            answer = await browser.request(method, path)
            assert (answer.status_code, answer.headers["Allow"]) == (405, "GET, HEAD"), method
    assert (await browser.head("/")).status_code == 200
    assert (await browser.get("/groups/")).status_code == 404  # no redirect


async def test_other_hosts_than_loopback_are_refused(browser: httpx.AsyncClient) -> None:
    for host in (
        *("evil.example", "evil.example:8765", "localhost.evil", "10.0.0.1", ""),
        *("localhost:evil", "127.0.0.1:8765@evil", "[::1].evil", "[::1", "127.0.0.2"),
    ):
        assert (await browser.get("/", headers={"Host": host})).status_code == 421, host
    for good in ("localhost", "127.0.0.1:1", "[::1]:8765", "LOCALHOST:80"):
        assert (await browser.get("/", headers={"Host": good})).status_code == 200


async def test_other_sites_can_link_but_not_embed(browser: httpx.AsyncClient) -> None:
    for site in ("cross-site", "same-site"):
        headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"}
        assert (await browser.get("/", headers=headers)).status_code == 403
        headers["Sec-Fetch-Mode"] = "navigate"
        assert (await browser.get("/", headers=headers)).status_code == 200


async def test_a_token_is_exchanged_for_a_session_cookie(
    store: Store, open_client: OpenClient
) -> None:
    await store.buffer("math")
    async with open_client(token=TOKEN) as client:
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": f"Basic {TOKEN}"}):
            answer = await client.get("/?buffer=math", headers=headers)
            assert answer.status_code == 401
            assert "policy version" not in answer.text
        assert (await client.post("/?buffer=math", data={"token": "x"})).status_code == 401
        answer = await client.post("/?buffer=math", data={"token": TOKEN})
        assert (answer.status_code, answer.headers["Location"]) == (303, "./?buffer=math")
        assert TOKEN not in str(answer.headers)
        assert {"HttpOnly", "SameSite=strict"} <= set(answer.headers["Set-Cookie"].split("; "))
        assert "policy version" in (await client.get("/?buffer=math")).text
        assert (await client.post("/", content=b"x" * 9000)).status_code == 413
        [name] = client.cookies
    async with open_client(token=TOKEN) as client:
        for forged in ("x", TOKEN, ""):
            headers = {"Cookie": f"{name}={forged}"}
            assert (await client.get("/", headers=headers)).status_code == 401
    async with open_client(token=TOKEN) as client:
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        assert (await client.get("/", headers=bearer)).status_code == 200
    token = "schlüssel für uns à"  # noqa: S105
    async with open_client(token=token) as client:
        for encoded in (token.encode(), token.encode("latin-1")):
            bearers = {b"Authorization": b"Bearer " + encoded}
            assert (await client.get("/", headers=bearers)).status_code == 200


async def test_the_cookie_is_secure_with_tls(open_client: OpenClient) -> None:
    """Also if the browser uses TLS and a proxy forwards the request as plain HTTP."""
    async with open_client(token=TOKEN) as client:
        for address, forwarded, secure in (
            ("http://localhost", "", False),
            ("http://localhost", "http", False),
            ("http://localhost", "http, https", False),  # TLS between two proxies only
            ("https://pages.example", "", True),
            ("http://localhost", "https", True),
            ("http://localhost", "HTTPS, http", True),
        ):
            headers = {"X-Forwarded-Proto": forwarded} if forwarded else {}
            for answer in (
                await client.post(f"{address}/", data={"token": TOKEN}, headers=headers),
                await client.get(f"{address}/?token={TOKEN}", headers=headers),
            ):
                cookie = answer.headers["Set-Cookie"].split("; ")
                assert ("Secure" in cookie) == secure, (address, forwarded)


async def test_a_token_in_the_url_is_removed(open_client: OpenClient) -> None:
    async with open_client(token=TOKEN) as client:
        assert (await client.get("/?token=nonsense")).status_code == 401
        answer = await client.get(f"/groups?a=%3Cb&token={TOKEN}&c=1")
        assert 'content="0; url=./groups?a=%3Cb&amp;c=1"' in answer.text
        assert TOKEN not in answer.text + str(answer.headers)
        assert (await client.get("/")).status_code == 200


async def test_a_link_from_another_site_reloads_the_page(open_client: OpenClient) -> None:
    """A browser omits a strict cookie when it follows a link from another site."""
    async with open_client(token=TOKEN) as client:
        headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
        answer = await client.get("/groups?a=1", headers=headers)
        assert 'content="0; url=./groups?a=1"' in answer.text
        assert (
            await client.get("/groups?a=1", headers={"Sec-Fetch-Site": "same-origin"})
        ).status_code == 401


def test_listening_beyond_loopback_requires_a_token(sqlite_url: str) -> None:
    for host in ("0.0.0.0", "::", "10.0.0.1", "node7"):  # noqa: S104
        with pytest.raises(InvalidInputError, match="token"):
            serve(sqlite_url, host=host)
    with pytest.raises(InvalidInputError, match="at least 16 characters, got 5") as refused:
        serve(sqlite_url, token="short")  # noqa: S106
    assert "short" not in str(refused.value)


async def test_hostile_names_are_escaped(store: Store, browser: httpx.AsyncClient) -> None:
    await store.buffer(HOSTILE)
    page = (await browser.get("/")).text
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "\\x1b[2J\\u202e{{7*7}}" in page
    answer = await browser.get("/", params={"buffer": HOSTILE})
    assert "<img src=x" not in answer.text


async def test_slow_requests_time_out(
    buffer: Buffer, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await buffer.put([group()])
    ended = []

    async def hang(self: Store) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(self)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "runs", hang)
        patched.setattr(safety, "RESPONSE_SECONDS", 0.05)
        assert (await browser.get("/runs")).status_code == 504
        assert len(ended) == 1
        patched.setattr(safety, "MAX_CONCURRENT", 1)
        patched.setattr(safety, "MAX_WAITING", 3)
        many = await asyncio.gather(*(browser.get("/runs") for _ in range(20)))
        assert {answer.status_code for answer in many} == {503, 504}
    assert (await browser.get("/")).status_code == 200


async def test_slow_readers_do_not_block_other_requests(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed responses have their own slots, and release them."""

    async def download(request: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b"x"

        return StreamingResponse(chunks())

    monkeypatch.setitem(ROUTES, "download", download)
    app = application(sqlite_url)
    transport = httpx.ASGITransport(app)
    begun, reading = asyncio.Semaphore(0), asyncio.Event()

    async def receive() -> Message:
        return await asyncio.Future()

    async def slow(message: Message) -> None:
        begun.release()
        await reading.wait()

    scope = {
        "type": "http", "method": "GET", "path": "/download", "query_string": b"",
        "headers": [(b"host", b"localhost")],
    }  # fmt: skip
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        many = [asyncio.create_task(app(dict(scope), receive, slow)) for _ in range(12)]
        for _ in range(safety.MAX_DOWNLOADS):
            await begun.acquire()
        pages = await asyncio.gather(*(client.get("/") for _ in range(3)))
        assert [page.status_code for page in pages] == [200] * 3
        with monkeypatch.context() as soon:
            soon.setattr(safety, "BUSY_SECONDS", 0.1)
            busy = await client.get("/download")
        assert (busy.status_code, busy.headers["Retry-After"]) == (503, "5")
        reading.set()
        await asyncio.gather(*many)
        assert (await client.get("/download")).text == "xxx"


async def test_clients_that_do_not_read_are_disconnected(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safety, "STALLED_SECONDS", 0.1)
    app = application(sqlite_url)

    async def receive() -> Message:
        return await asyncio.Future()

    async def never(message: Message) -> None:
        await asyncio.Future()

    scope = {
        "type": "http", "method": "GET", "path": "/", "query_string": b"",
        "headers": [(b"host", b"localhost")],
    }  # fmt: skip
    async with app.router.lifespan_context(app), asyncio.timeout(60):
        with pytest.raises(ConnectionError):
            await app(scope, receive, never)


async def test_an_unexpected_error_reveals_nothing(
    browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(self: Store) -> None:
        raise RuntimeError("postgresql://me:secret@host/db")

    monkeypatch.setattr(Store, "buffer_names", fail)
    answer = await browser.get("/?private=1")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "GET / failed" in caplog.text
    assert "private" not in caplog.text


async def test_incomplete_requests_time_out(pass_time: Callable[[float], None]) -> None:
    """No data, half of the headers, and half of a second request on a kept connection."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        pass_time(serving.HEAD_SECONDS)  # an answer can take longer than the headers
        await asyncio.sleep(0.02)
        await Response("here")(scope, receive, send)

    config = uvicorn.Config(
        answered, lifespan="off", ws="none", log_level="critical", timeout_keep_alive=10**6
    )
    server = await asyncio.get_running_loop().create_server(
        lambda: serving._Protocol(config, ServerState(), {}), "127.0.0.1", 0
    )
    request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    half = request[:20]
    async with server, asyncio.timeout(600):
        for sent, num_responses in ((b"", 0), (half, 0), (request, 1), (request + half, 1)):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(sent)
            for _ in range(num_responses):
                assert (await reader.readuntil(b"here")).startswith(b"HTTP/1.1 200")
                writer.write(half)
            await asyncio.sleep(0.02)  # until the server has them
            pass_time(serving.HEAD_SECONDS)
            assert await reader.read() == b""
            writer.close()


async def test_shutdown_does_not_wait_for_clients_that_do_not_read() -> None:
    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            while True:
                yield bytes(1 << 20)

        await StreamingResponse(chunks())(scope, receive, send)

    server = serving._server(endless)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ending = asyncio.create_task(server.serve([listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readline()
        server.should_exit = True
        async with asyncio.timeout(60):
            await ending
        writer.close()
