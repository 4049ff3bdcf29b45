"""Connections to SQLite: none is lost or stays open, whenever calls are cancelled."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

import replaydb as rdb
from replaydb import Store
from replaydb.database.engines import backend_for
from replaydb.database.runtime.prepared import plan_of
from replaydb.database.runtime.session import Session
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
                await connection.transact(lambda _session: None, end)
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


async def test_text_that_is_not_utf8_does_not_keep_the_snapshot_of_a_call(
    sqlite_url: str, tmp_path: Path
) -> None:
    """The statement that failed was still running, so later writes waited for its snapshot."""
    async with Store.open(sqlite_url) as store:
        buffer = await store.buffer("math")
        ids = await buffer.put([group(), group()])
        _set_reasons(tmp_path, "CAST(x'ff41' AS TEXT)")
        with pytest.raises(rdb.DatabaseError, match="UTF-8") as of_reader:
            await buffer.find()
        with pytest.raises(rdb.DatabaseError, match="UTF-8") as of_writer:
            await buffer.sample(2)
        _set_reasons(tmp_path, "NULL")
        assert len(await buffer.find()) == 2
        assert len(await buffer.sample(2, timeout=10)) == 2
        assert await buffer.put(group(), timeout=10) > ids
    assert of_reader.value is not of_writer.value  # both are kept, with their tracebacks


async def test_a_further_connection_compiles_no_prepared_statement_again(sqlite_url: str) -> None:
    async with Store.open(sqlite_url) as store:
        buffer = await store.buffer("math")
        await buffer.put(group())
        pool = _pool(store._database.reader)
        await buffer.stats()
        before, [first] = plan_of.cache_info().misses, pool._idle
        async with pool.connection(math.inf) as used:
            assert used is first
            await buffer.stats()
        assert plan_of.cache_info().misses == before


async def test_a_cancelled_change_of_the_tables_runs_no_more_statements(sqlite_url: str) -> None:
    """An interrupt of SQLite ends only a statement that is running."""
    num_run = 0
    has_begun, loop = asyncio.Event(), asyncio.get_running_loop()

    def work(session: Session) -> None:
        nonlocal num_run
        for _ in range(20):
            session.core.execute(select(1))
            num_run += 1
            loop.call_soon_threadsafe(has_begun.set)
            time.sleep(0.05)

    changing = asyncio.create_task(backend_for(sqlite_url).schema.change(work))
    await has_begun.wait()
    changing.cancel()
    await asyncio.wait([changing])
    assert changing.cancelled()
    assert num_run < 20


def _set_reasons(folder: Path, value: str) -> None:
    [file] = folder.glob("*.db")
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(f"UPDATE episode_group SET status_reason = {value}")  # noqa: S608


def _pool(transactions: Any) -> Any:
    return transactions.pool


def _is_closed(folder: Path) -> bool:
    """Whether the last connection was closed, which removes the log."""
    return not list(folder.glob("*-wal"))
