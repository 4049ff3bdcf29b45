"""More clients than the server accepts connections, without a pooler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg
import pytest

import replaydb as rdb
from replaydb import Store
from replaydb.database.postgresql import connections
from replaydb.database.postgresql.backend import PostgresqlBackend
from support.groups import groups

LIMIT = 3


@pytest.fixture
async def limited_url(postgresql_url: str) -> AsyncIterator[str]:
    """The database for a role that may have `LIMIT` connections."""
    owner = await asyncpg.connect(postgresql_url)
    name = f"few_{uuid4().hex[:8]}"
    await owner.execute(
        f"CREATE ROLE {name} LOGIN CONNECTION LIMIT {LIMIT};"
        f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {name};"
        f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {name}"
    )
    parts = urlsplit(postgresql_url)
    address = parts.netloc.rpartition("@")[2]
    yield urlunsplit(parts._replace(netloc=f"{name}@{address}"))
    await owner.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")
    await owner.close()


@pytest.mark.usefixtures("from_snapshots")
async def test_all_workers_make_progress(postgresql_url: str, limited_url: str) -> None:
    """Each would use three connections, and keep them."""
    async with Store.open(postgresql_url) as store:
        await (await store.buffer("math", on_ack="return")).put(groups(20))

    async def work(number: int) -> int:
        async with Store.open(limited_url, run=f"worker {number}", pool_size=1) as store:
            buffer = await store.buffer("math", create=False)
            await buffer.put(groups(1, task=f"task {number}"))
            drawn = await buffer.sample(2, timeout=50)
            lease = await buffer.lease(1, ttl=60, timeout=50)
            await lease.ack()
            return len(drawn) + await buffer.count(tasks=f"task {number}")

    assert await asyncio.gather(*map(work, range(6))) == [3] * 6


async def test_a_waiting_call_keeps_no_connection(
    postgresql_url: str, limited_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In a shortage. Otherwise the puts that it waits for could never be made."""
    async with Store.open(postgresql_url) as store:
        await store.buffer("math")

    async def draw(number: int) -> int:
        async with Store.open(limited_url, run=f"trainer {number}", pool_size=1) as store:
            buffer = await store.buffer("math", create=False)
            return len(await buffer.sample(1, timeout=50))

    async def put() -> None:
        async with Store.open(limited_url, run="worker", pool_size=1) as store:
            await (await store.buffer("math", create=False)).put(groups(1))

    others = [await asyncpg.connect(limited_url) for _ in range(LIMIT)]
    drawing = [asyncio.create_task(draw(number)) for number in range(LIMIT + 1)]
    while caplog.text.count("connections are closed after use") < len(drawing):  # noqa: ASYNC110 - nothing signals it
        await asyncio.sleep(0.01)
    for one in others:
        await one.close()
    await asyncio.wait(drawing, timeout=0.5)
    await put()
    assert await asyncio.gather(*drawing) == [1] * (LIMIT + 1)


async def test_connections_are_kept_again_after_a_shortage(
    postgresql_url: str, limited_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the error of a shortage that lasts names its reason."""
    monkeypatch.setattr(connections, "SHORTAGE_SECONDS", 0.2)
    async with Store.open(postgresql_url) as store:
        await store.buffer("math")
    others = [await asyncpg.connect(limited_url) for _ in range(LIMIT)]
    with pytest.raises(rdb.DatabaseUnavailableError, match=r"too many connections .*53300"):
        await Store.open(limited_url)
    monkeypatch.setattr(connections, "SHORTAGE_SECONDS", 1000.0)
    await others[0].close()
    async with Store.open(limited_url) as store:
        backend = store._database.backend
        assert isinstance(backend, PostgresqlBackend)
        buffer = await store.buffer("math", create=False)
        putting = asyncio.create_task(buffer.put(groups(1)))
        await _short(backend)
        await others[1].close()
        await putting
        assert (backend.has_one_connection, _num_idle(backend)) == (True, 0)
        backend.connections._short_until = 0.0
        await buffer.count()
        assert not backend.has_one_connection
        assert _num_idle(backend)  # of this call, and perhaps of a notification sent meanwhile
        await others[2].close()


def _num_idle(backend: PostgresqlBackend) -> int:
    return sum(len(pool._idle) for pool in backend.connections._pools)


async def _short(backend: PostgresqlBackend) -> None:
    """Wait until the server has refused a connection."""
    while not backend.has_one_connection:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.01)
