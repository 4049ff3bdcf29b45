"""PgBouncer with transaction pooling: no sessions, and few connections to the server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from urllib.parse import parse_qs, quote, urlsplit

import asyncpg
import pytest

import replaydb as rdb
from replaydb import Store
from replaydb.database import migrations
from support import pgbouncer
from support.groups import group, groups
from support.invariants import check_invariants

_LISTENING = (
    "SELECT count(*) FROM pg_stat_activity "
    "WHERE datname = current_database() AND query LIKE 'LISTEN%'"
)


@pytest.fixture(params=["true", "prepared"])
def bounced_url(postgresql_url: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of an empty database through PgBouncer."""
    if pgbouncer.executable() is None:
        pytest.skip(pgbouncer.MISSING)  # the summary shows the reason
    if request.param == "prepared" and not pgbouncer.prepares():
        pytest.skip("PgBouncer 1.21 or later is not installed.")
    settings = "max_prepared_statements = 5" if request.param == "prepared" else ""
    with pgbouncer.pgbouncer(postgresql_url, settings) as pooler:
        yield pooler.url.replace("pgbouncer=true", f"pgbouncer={request.param}")


async def test_prepared_statements_with_a_pooler_that_loses_them(postgresql_url: str) -> None:
    if pgbouncer.executable() is None:
        pytest.skip(pgbouncer.MISSING)
    settings = "max_prepared_statements = 0" if pgbouncer.prepares() else ""
    with pgbouncer.pgbouncer(postgresql_url, settings) as pooler:
        url = pooler.url.replace("pgbouncer=true", "pgbouncer=prepared")
        with pytest.raises(rdb.DatabaseError, match=r"PgBouncer 1\.21"):
            await _use_from_two_stores(url)


async def _use_from_two_stores(url: str) -> None:
    async with Store.open(url) as one, Store.open(url) as other:
        for store in (one, other) * 10:
            buffer = await store.buffer("math")
            await asyncio.gather(*(buffer.put(group()) for _ in range(3)), buffer.stats())


async def test_all_calls_work_without_a_session(bounced_url: str) -> None:
    async def trainer(name: str) -> None:
        """Repeat the same statements, each time on another connection to the server."""
        async with Store.open(bounced_url, run="one") as store:
            buffer = await store.buffer("math", capacity=rdb.Capacity(groups=50))
            for number in range(8):
                await buffer.put([group(f"{name}{number}-{i}") for i in range(5)])
                batch = await buffer.sample(2, rdb.Prioritized(), step=number)
                await buffer.update_priorities(batch.ids, [0.5, 2.0])
            async with buffer.lease(3, ttl=60) as lease:
                assert len(lease.batch) == 3
            await buffer.advance_policy(1)

    await asyncio.gather(*(trainer(name) for name in "abcd"))
    async with Store.open(bounced_url, read_only=True) as store:
        buffer = await store.buffer("math")
        assert len(await buffer.draws()) == 4 * 9
        assert await buffer.count(statuses="completed") <= 50


async def test_a_draw_returns_payloads_that_it_drops(bounced_url: str) -> None:
    async with Store.open(bounced_url, run="a") as store:
        buffer = await store.buffer("once", max_times_sampled=1, archived_payload="drop")
        put = groups(3)
        ids = await buffer.put(put)
        batch = await buffer.sample(3, rdb.Fifo())
        assert [one.episodes for one in batch.groups] == [one.episodes for one in put]
        with pytest.raises(rdb.PayloadGoneError):
            await buffer.redraw((await buffer.draws())[0].id)
        assert await buffer.count(statuses="archived") == len(ids)


async def test_a_waiting_call_sees_groups_of_other_stores(bounced_url: str) -> None:
    """LISTEN does not work through PgBouncer, so waiting calls poll."""
    async with Store.open(bounced_url) as store, Store.open(bounced_url) as other:
        buffer = await store.buffer("math")
        waiting = asyncio.create_task(buffer.sample(1, timeout=30))
        await asyncio.sleep(0)
        await (await other.buffer("math")).put(group())
        assert len(await waiting) == 1


async def test_a_waiting_call_is_notified_through_a_direct_connection(
    bounced_url: str, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NOTIFY goes through PgBouncer. Without waiting calls, no connection is direct."""
    monkeypatch.setattr("replaydb.database.runtime.signals.RECHECK_SECONDS", 60.0)
    folder = parse_qs(urlsplit(postgresql_url).query)["host"][0]
    url = bounced_url.replace("me@", "postgres@") + f"&listen={quote(folder, safe='')}"
    async with Store.open(url) as store, Store.open(url) as other:
        buffer, there = await store.buffer("math"), await other.buffer("math")
        await there.put(group())
        assert await num_direct(postgresql_url) == 0
        waiting = asyncio.create_task(buffer.sample(3, timeout=50))
        async with asyncio.timeout(60):
            while await num_direct(postgresql_url) == 0:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.01)
            for _ in range(2):
                await asyncio.sleep(0.2)
                await there.put(group())
            assert len(await waiting) == 3


async def num_direct(url: str) -> int:
    """Return how many sessions listen."""
    connection = await asyncpg.connect(url)
    try:
        return int(await connection.fetchval(_LISTENING))
    finally:
        await connection.close()


async def test_an_upgrade_through_pgbouncer(empty_postgresql_url: str) -> None:
    if pgbouncer.executable() is None:
        pytest.skip(pgbouncer.MISSING)
    with pgbouncer.pgbouncer(empty_postgresql_url) as pooler:
        await migrations.upgrade(pooler.url)
        assert await migrations.check(pooler.url) == ()


async def test_more_clients_than_the_server_has_connections(
    bounced_url: str, postgresql_url: str
) -> None:
    """PgBouncer opens 5 connections."""
    async with Store.open(bounced_url) as store:
        await store.buffer("math")

    async def client(number: int) -> int:
        async with Store.open(bounced_url, pool_size=1) as store:
            buffer = await store.buffer("math", create=False)
            await buffer.put(group(f"g{number}"))
            return len(await buffer.sample(1, timeout=60))

    assert await asyncio.gather(*(client(number) for number in range(40))) == [1] * 40
    await check_invariants(postgresql_url)
