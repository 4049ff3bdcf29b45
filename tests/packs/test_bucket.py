"""Packs in a bucket: failures of the service, and the errors they raise."""

from __future__ import annotations

import asyncio
import logging
import pickle
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from uuid import uuid4

import pytest

from replaydb import PayloadsUnavailableError
from replaydb.packs import PayloadStore, Range
from support.s3 import KEY, SECRET, S3Server, credentials

from .conftest import opened, soon


def calls(
    payload_store: PayloadStore, seconds: float = 30.0
) -> list[Callable[[], Awaitable[object]]]:
    """Return a call of each kind, with this time limit."""

    async def listed() -> list[object]:
        return [each async for each in payload_store.listed(end=soon(seconds))]

    return [
        lambda: payload_store.prepare(soon(seconds)),
        lambda: payload_store.check(soon(seconds)),
        lambda: payload_store.write(uuid4().hex, [b"a"], sync=True, end=soon(seconds)),
        lambda: payload_store.read([Range(uuid4().hex, 0, 1)], end=soon(seconds)),
        lambda: payload_store.remove([uuid4().hex], end=soon(seconds)),
        listed,
    ]


@asynccontextmanager
async def answering(answer: bytes | None) -> AsyncIterator[int]:
    """Run a service that gives this answer to every request, or none. Yields its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, asyncio.CancelledError):
            while await reader.readuntil(b"\r\n\r\n"):
                if answer is not None:
                    head = f"HTTP/1.1 403 Forbidden\r\nContent-Length: {len(answer)}\r\n\r\n"
                    writer.write(head.encode() + answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_a_service_that_does_not_answer(s3: S3Server) -> None:
    async with answering(None) as port, opened(s3.url("x", port=port)) as payload_store:
        async with asyncio.timeout(60):
            for call in calls(payload_store, 0.1):
                with pytest.raises(PayloadsUnavailableError, match="no answer in time"):
                    await call()


async def test_a_service_that_is_down_comes_back(s3: S3Server) -> None:
    async with opened(s3.url(uuid4().hex)) as payload_store:
        await payload_store.prepare(soon())
        pack = uuid4().hex
        await payload_store.write(pack, [b"abc"], sync=True, end=soon())
        s3.kill()
        for call in calls(payload_store, 0.2):
            with pytest.raises(PayloadsUnavailableError, match="no answer in time"):
                await call()
        waiting = asyncio.create_task(payload_store.read([Range(pack, 0, 3)], end=soon(60)))
        await asyncio.to_thread(s3.start)
        (found,) = await waiting
        assert isinstance(found, memoryview)
        assert bytes(found) == b"abc"  # written before the service was killed


async def test_a_missing_bucket(s3: S3Server) -> None:
    async with opened(s3.url("x", bucket="nowhere")) as payload_store:
        for call in calls(payload_store):
            with pytest.raises(PayloadsUnavailableError) as raised:
                await call()
            assert raised.value.reason.startswith("the service answers 40")
        with pytest.raises(PayloadsUnavailableError, match="404 NoSuchBucket"):
            await payload_store.check(soon())


@pytest.mark.parametrize(
    ("key", "secret", "code"),
    [(KEY, "another", "SignatureDoesNotMatch"), ("another", SECRET, "InvalidAccessKeyId")],
)
async def test_refused_credentials(
    s3: S3Server, key: str, secret: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in credentials(key, secret).items():
        monkeypatch.setenv(name, value)
    async with opened(s3.url("x")) as payload_store:
        for call in calls(payload_store):
            with pytest.raises(PayloadsUnavailableError, match=f"403 {code}"):
                await call()


async def test_no_secret_is_shown(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "the-token")
    secrets = (KEY, SECRET, "the-token")
    caplog.set_level(logging.DEBUG)
    answer = f"<Error><Code>Denied</Code><Id>{'; '.join(secrets)}</Id></Error>".encode()
    async with answering(answer) as port, opened(s3.url("x", port=port)) as payload_store:
        shown = [repr(payload_store), payload_store.url, str(vars(payload_store))]
        for call in calls(payload_store):
            with pytest.raises(PayloadsUnavailableError, match="403 Denied") as raised:
                await call()
            error = raised.value
            assert (error.__cause__, error.__context__) == (None, None)
            shown += ["".join(traceback.format_exception(error)), str(vars(error))]
            shown.append(repr(pickle.loads(pickle.dumps(error)).args))  # noqa: S301 - our own bytes
    shown.append(caplog.text)
    assert [text for text in shown for secret in secrets if secret in text] == []


async def test_missing_credentials(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in credentials():
        monkeypatch.delenv(name)
    async with answering(b"denied") as port:
        # The metadata service that a machine in a cloud asks for credentials.
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{port}/169.254.169.254")
        async with opened(s3.url("x")) as payload_store:
            with pytest.raises(PayloadsUnavailableError, match="no credentials were found"):
                await payload_store.check(soon())


async def test_near_ranges_are_fetched_together(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(s3.url(uuid4().hex)) as payload_store:
        await payload_store.prepare(soon())
        pack, parts = uuid4().hex, [b"a" * 1000, b"b" * 300_000, b"c" * 1000, b"d" * 1000]
        first, _, third, fourth = await payload_store.write(pack, parts, sync=True, end=soon())
        objects = payload_store._objects
        fetched = objects._fetched  # type: ignore[attr-defined]
        requested: list[tuple[int, int]] = []

        async def counted(name: str, start: int, stop: int) -> object:
            requested.append((start, stop))
            return await fetched(name, start, stop)

        monkeypatch.setattr(objects, "_fetched", counted)
        wanted = [Range(pack, at, 1000) for at in (fourth, first, third)]
        found = await payload_store.read(wanted, end=soon())
        assert [bytes(each)[:1] for each in found] == [b"d", b"a", b"c"]  # type: ignore[arg-type]
        assert sorted(requested) == [(first, first + 1000), (third, fourth + 1000)]


async def test_names_ascend_even_if_a_clock_is_behind(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = s3.url(uuid4().hex)
    async with opened(url) as right, opened(url) as behind:
        await right.prepare(soon())
        newest = right.new_name()
        await right.write(newest, [b"abc"], sync=True, end=soon())
        monkeypatch.setattr("replaydb.packs.store.time.time_ns", lambda: 0)
        assert right.new_name() > newest
        late = behind.new_name()
        assert late < newest
        await behind.write(late, [b"abc"], sync=True, end=soon())
        assert behind.new_name() > newest
