"""Connections to SQLite: none is lost or stays open, whenever calls are cancelled."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

import replaydb as rdb
from replaydb import Store
from replaydb.database.sqlite import begin
from support.groups import group


async def test_a_call_cancelled_again_during_its_rollback_returns_its_connection(
    sqlite_url: str,
) -> None:
    async with Store.open(sqlite_url) as store:
        buffer = await store.buffer("math")
        pool = _pool(store._database.writer)
        has_begun = asyncio.Event()

        async def call() -> None:
            end = asyncio.get_running_loop().time() + 60
            async with pool.connection(end) as connection:
                await connection.transact(lambda _session: None, end, begin=begin.immediate)
                has_begun.set()
                await asyncio.sleep(60)

        calling = asyncio.create_task(call())
        await has_begun.wait()
        calling.cancel()
        await asyncio.sleep(0)  # now it rolls back
        calling.cancel()
        await asyncio.wait([calling])
        assert calling.cancelled()
        assert pool.num_used == 0
        await buffer.put(group(), timeout=10)


async def test_a_connection_whose_opening_is_cancelled_is_closed(
    sqlite_url: str, tmp_path: Path
) -> None:
    async with Store.open(sqlite_url) as store:
        await (await store.buffer("math")).put(group())
        pool = _pool(store._database.reader)
        for number in range(20):
            opening = asyncio.create_task(pool._connect())
            await asyncio.sleep(number % 5 / 1000)
            opening.cancel()
            await asyncio.wait([opening])
            if not opening.cancelled():
                await opening.result().close()
    assert _is_closed(tmp_path)


async def test_a_call_that_outlives_its_store_closes_its_connection(
    sqlite_url: str, tmp_path: Path
) -> None:
    async with Store.open(sqlite_url) as store:
        await (await store.buffer("math")).put(group())
        slow = asyncio.create_task(store._database.read(lambda _session: time.sleep(2)))
        await asyncio.sleep(0.1)
        await store.close(timeout=0)
    with pytest.raises(rdb.DatabaseUnavailableError):
        await slow
    assert _is_closed(tmp_path)


async def test_a_snapshot_that_outlives_its_store_closes_its_connection(
    sqlite_url: str, tmp_path: Path
) -> None:
    store = await Store.open(sqlite_url)
    await (await store.buffer("math")).put(group())
    async with store._database.snapshot(asyncio.get_running_loop().time() + 60) as snapshot:
        await snapshot.read(lambda session: session.now())
        await store.close()
    await asyncio.sleep(0.1)
    assert _is_closed(tmp_path)


def _pool(transactions: Any) -> Any:
    return transactions.pool


def _is_closed(folder: Path) -> bool:
    """Whether the last connection was closed, which removes the log."""
    return not list(folder.glob("*-wal"))
