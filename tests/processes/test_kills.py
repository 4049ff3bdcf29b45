"""Processes that are killed during calls, and connections that are terminated."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import text

from processes.children import Child, child
from processes.derived import derived_group
from processes.stored import acknowledged, check_draws, check_stored
from processes.worker import BUFFER, Acks
from replaydb import Buffer, DatabaseUnavailableError, NotEnoughGroupsError, Prioritized, Store
from support.connections import transaction
from support.engines import sqlite_nightly

MANY_KILLS = pytest.mark.parametrize("kills", [3, pytest.param(12, marks=pytest.mark.nightly)])


async def _kill_one(spawner: Child, role: str, after: float) -> None:
    """Let the spawner fork a process, and kill it after some seconds."""
    await spawner.send(role)
    pid = (await spawner.receive())["pid"]
    await asyncio.sleep(after)
    os.kill(pid, signal.SIGKILL)
    assert os.WTERMSIG((await spawner.receive())["status"]) == signal.SIGKILL


@MANY_KILLS
@pytest.mark.parametrize(
    ("engine_name", "layout"),
    [
        ("sqlite", "outside"),
        ("postgresql", "inside"),
        pytest.param("sqlite", "inside", marks=pytest.mark.nightly),
        pytest.param("postgresql", "outside", marks=pytest.mark.nightly),
    ],
)
async def test_a_writer_killed_in_the_middle_of_puts(url: str, tmp_path: Path, kills: int) -> None:
    """Acknowledged groups are stored, puts are atomic, and the store can be opened at once."""
    acks = tmp_path / "acks"
    async with child("spawner", url, str(acks)) as spawner:
        assert await spawner.receive() == {"ready": True}
        for _ in range(kills):
            before = len(acknowledged(acks))
            for patience in range(50):  # a machine under load may take long to start
                await _kill_one(spawner, "put", (1 + patience) * random.uniform(0.1, 0.35))
                if len(acknowledged(acks)) > before:
                    break
            async with asyncio.timeout(30), Store.open(url) as store:  # less than the lock timeout
                buffer = await store.buffer(BUFFER)
                await buffer.sample(1)
                assert await buffer.count() >= len(acknowledged(acks))
    assert await check_stored(url, acks) >= kills


@sqlite_nightly
@MANY_KILLS
async def test_a_sampler_killed_in_the_middle_of_draws(
    url: str, tmp_path: Path, kills: int
) -> None:
    """Draws are counted completely or not at all, and locks are released."""
    async with Store.open(url) as store:
        buffer = await store.buffer(BUFFER)
        await buffer.put([derived_group(f"7-{i}-0-of-1") for i in range(60)])
        async with child("spawner", url, str(tmp_path / "acks")) as spawner:
            assert await spawner.receive() == {"ready": True}
            for _ in range(kills):
                await _kill_one(spawner, "sample", random.uniform(0.1, 0.3))
                await buffer.sample(8, Prioritized(), timeout=60)
    assert await check_draws(url) >= kills * 8
    assert await check_stored(url, tmp_path / "acks") == 60


async def _drop_clients(url: str, stop: asyncio.Event, call_ended: asyncio.Event) -> None:
    """Terminate the connections of replaydb after every few calls."""
    async with transaction(url) as connection:
        while not stop.is_set():
            # Otherwise the transaction would see the connections at its beginning.
            await connection.execute(text("SELECT pg_stat_clear_snapshot()"))
            await connection.execute(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid() "
                    "AND application_name LIKE 'replaydb %'"
                )
            )
            for _ in range(random.randint(2, 12)):
                if stop.is_set():
                    return
                await call_ended.wait()
                call_ended.clear()


async def _put_some(
    buffer: Buffer, calls: int, acks: Acks, call_ended: asyncio.Event
) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for i in range(calls):
        uids = [f"{i}-0-{k}-of-3" for k in range(3)]
        try:
            await buffer.put([derived_group(uid) for uid in uids])
        except DatabaseUnavailableError:
            outcomes["unavailable"] += 1
        else:
            acks.add(uids)
            outcomes["succeeded"] += 1
        call_ended.set()
    return outcomes


async def _sample_some(buffer: Buffer, calls: int, call_ended: asyncio.Event) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for _ in range(calls):
        try:
            await buffer.sample(4, timeout=0.1)
        except DatabaseUnavailableError:
            outcomes["unavailable"] += 1
        except NotEnoughGroupsError:
            outcomes["empty"] += 1
        else:
            outcomes["succeeded"] += 1
        call_ended.set()
    return outcomes


@pytest.mark.parametrize("calls", [50, pytest.param(200, marks=pytest.mark.nightly)])
async def test_a_server_that_drops_its_clients(
    postgresql_url: str, tmp_path: Path, calls: int
) -> None:
    """Every call succeeds: the store determines the outcome of a broken commit, or retries."""
    acks = tmp_path / "acks"
    stop, call_ended = asyncio.Event(), asyncio.Event()
    async with Store.open(postgresql_url) as store:
        buffer = await store.buffer(BUFFER)
        dropping = asyncio.create_task(_drop_clients(postgresql_url, stop, call_ended))
        try:
            outcomes = await asyncio.gather(
                _put_some(buffer, calls, Acks(str(acks)), call_ended),
                _sample_some(buffer, calls, call_ended),
            )
        finally:
            stop.set()
            call_ended.set()
            await dropping
        assert all(one["succeeded"] for one in outcomes), outcomes
        assert not any(one["unavailable"] for one in outcomes), outcomes
        await buffer.put([derived_group(f"afterwards-0-{i}-of-8") for i in range(8)])
        await buffer.sample(8)
    await check_stored(postgresql_url, acks)
