"""Payloads in an object store, on both engines, while servers are killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import pytest

import replaydb as rdb
from replaydb import Buffer, EpisodeGroup, PayloadsUnavailableError, Store
from support.clock import Clock
from support.engines import postgresql_nightly, sqlite_nightly
from support.groups import groups, long_group
from support.invariants import check_invariants, statuses
from support.postgres import PostgresServer
from support.s3 import S3Server, credentials
from support.workers import Worker, kill_all

TOKENS = 2000
_A_BACKEND = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'replaydb %' LIMIT 1"


@pytest.fixture
def payload_url(s3: S3Server) -> str:
    """URL of an unused prefix."""
    return s3.url(f"tests/{uuid4().hex}")


@pytest.fixture
async def store(url: str, payload_url: str) -> AsyncIterator[Store]:
    """A store with its payloads at that URL."""
    async with Store.open(url, run="test", payloads=payload_url) as opened:
        yield opened
    await check_invariants(url)


@pytest.fixture
async def buffer(store: Store) -> Buffer:
    """An empty buffer."""
    return await store.buffer("math")


def tokens(group: EpisodeGroup) -> list[int]:
    return list(group.episodes[0].token_ids)


async def test_put_sample_lease_and_redraw(url: str, buffer: Buffer) -> None:
    await buffer.put([long_group(str(i), TOKENS) for i in range(8)])
    batch = await buffer.sample(8, step=1)
    assert {group.group_uid for group in batch} == {str(i) for i in range(8)}
    assert all(tokens(group) == list(range(TOKENS)) for group in batch)
    async with Store.open(url) as other:  # reads the payload location from the database
        there = await other.buffer("math", create=False)
        async with there.lease(3, ttl=60) as lease:
            assert all(tokens(group) == list(range(TOKENS)) for group in lease.batch)
        (draw,) = await there.draws(step=1)
        assert [group.id for group in await there.redraw(draw.id)] == batch.ids


@postgresql_nightly
async def test_while_the_object_store_is_down(url: str, buffer: Buffer, s3: S3Server) -> None:
    await buffer.put(groups(4))
    s3.kill()
    async with asyncio.timeout(30):
        outcomes = await asyncio.gather(
            buffer.sample(2, timeout=0.5),
            buffer.lease(2, ttl=60, timeout=0.5),
            buffer.put(groups(2, "late"), timeout=0.5),
            return_exceptions=True,
        )
    assert [isinstance(each, rdb.DatabaseUnavailableError) for each in outcomes] == [True] * 3
    assert isinstance(outcomes[0], PayloadsUnavailableError)
    assert set((await statuses(url)).values()) == {"completed"}  # leased groups were returned
    assert len(await statuses(url)) == 4
    waiting = asyncio.create_task(buffer.put(groups(2, "waits")))
    await asyncio.to_thread(s3.start)
    await waiting
    assert len((await buffer.sample(6)).ids) == 6


def put_and_log(url: str, log: Path, name: str) -> None:
    """Put groups without end, and log each acknowledged put."""
    os.environ.update(credentials())  # the fork server may have started without them
    asyncio.run(_put_and_log(url, log, name))


async def _put_and_log(url: str, log: Path, name: str) -> None:
    async with Store.open(url, run=name) as store:
        buffer = await store.buffer("math", create=False)
        for nth in range(1_000_000):
            uid = f"{name}-{nth}"
            try:
                await buffer.put(long_group(uid, TOKENS), timeout=0.3)
            except rdb.DatabaseUnavailableError:
                await asyncio.sleep(0.05)
                continue
            with log.open("a") as file:
                file.write(f"{uid}\n")


async def _wait_for_puts(log: Path, count: int) -> None:
    """Wait until this many more puts were acknowledged."""

    def number() -> int:
        return len(log.read_text().splitlines()) if log.exists() else 0

    async with asyncio.timeout(60):
        wanted = number() + count
        while number() < wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def _kill_database(url: str) -> None:
    """Kill a backend of PostgreSQL, which makes the server restart and recover."""
    if url.startswith("postgresql"):
        connection = await asyncpg.connect(url)
        pid = await connection.fetchval(_A_BACKEND)
        connection.terminate()
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def durable(url: str, postgres: PostgresServer) -> Iterator[None]:
    """Use synchronous commits, as in production. The test server is faster without them."""
    if not url.startswith("postgresql"):
        yield
        return
    name = urlsplit(url).path.removeprefix("/")
    postgres.execute(url, f'ALTER DATABASE "{name}" SET synchronous_commit = on')
    yield
    postgres.execute(url, f'ALTER DATABASE "{name}" RESET synchronous_commit')


@sqlite_nightly
@pytest.mark.usefixtures("durable")
async def test_no_acknowledged_put_is_lost_when_all_servers_are_killed(
    url: str, store: Store, buffer: Buffer, s3: S3Server, tmp_path: Path, clock: Clock
) -> None:
    log = tmp_path / "log"
    crew = [Worker(put_and_log, url, log, name) for name in "ab"]
    try:
        await _wait_for_puts(log, 10)
        s3.kill()
        await _kill_database(url)
        await asyncio.to_thread(s3.start)
        await _wait_for_puts(log, 10)
        await _kill_database(url)
        await _wait_for_puts(log, 5)
    finally:
        await kill_all(crew)
    s3.kill()  # it may still be storing what the killed workers sent
    await asyncio.to_thread(s3.start)
    acknowledged = set(log.read_text().splitlines())
    stored = {each.group_uid: each.id for each in await buffer.find(limit=None)}
    assert acknowledged <= stored.keys()
    found = await buffer.get(list(stored.values()))
    assert all(len(group.episodes[0].token_ids) == TOKENS for group in found)

    before = await store.prune()
    clock.jump(timedelta(days=2).total_seconds())
    report = await store.prune(dry_run=False)
    assert (before.num_orphans, report.num_packs) == (0, before.num_packs)
    assert len(await buffer.get(list(stored.values()))) == len(stored)
    assert (await store.prune()).num_orphans == 0
