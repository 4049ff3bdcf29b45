"""Closing stores: running calls end first, later calls raise."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import replaydb as rdb
from replaydb import Buffer, Store
from replaydb.database.engines import backend_for
from replaydb.database.sqlite.backend import SqliteBackend
from support.groups import group
from support.invariants import check_invariants

CALLS: dict[str, Callable[[Store, Buffer], Awaitable[Any]]] = {
    "store.buffer": lambda store, _: store.buffer("math"),
    "store.buffers": lambda store, _: store.buffers(),
    "store.runs": lambda store, _: store.runs(),
    "put": lambda _, buffer: buffer.put(group()),
    "sample": lambda _, buffer: buffer.sample(1),
    "sample and wait": lambda _, buffer: buffer.sample(9, timeout=None),
    "get": lambda _, buffer: buffer.get([1]),
    "count": lambda _, buffer: buffer.count(),
    "stats": lambda _, buffer: buffer.stats(),
    "find": lambda _, buffer: buffer.find(),
    "delete": lambda _, buffer: buffer.delete([1]),
    "update": lambda _, buffer: buffer.update([1], status="archived"),
    "wait_until": lambda _, buffer: buffer.wait_until(at_least=9),
    "update_priorities": lambda _, buffer: buffer.update_priorities([1], [1.0]),
    "advance_policy": lambda _, buffer: buffer.advance_policy(1),
    "update_settings": lambda _, buffer: buffer.update_settings(seed=1),
}


async def test_calls_on_a_closed_store_raise(url: str) -> None:
    async with Store.open(url) as store:
        buffer = await store.buffer("math")
        await buffer.put(group())
    for call in CALLS.values():
        with pytest.raises(rdb.StoreClosedError):
            await asyncio.wait_for(call(store, buffer), 60)
    await store.close()


async def test_closing_several_times_at_once(url: str) -> None:
    for _ in range(5):
        store = await Store.open(url)
        await (await store.buffer("math")).put(group())
        await asyncio.gather(*(store.close() for _ in range(4)))
        await store.close()


async def test_closing_finishes_running_puts(url: str) -> None:
    store = await Store.open(url)
    buffer = await store.buffer("math")
    puts = [asyncio.create_task(buffer.put(group())) for _ in range(20)]
    await asyncio.sleep(0)
    await store.close()
    assert len({group_id for [group_id] in await asyncio.gather(*puts)}) == 20
    await check_invariants(url)


async def test_closing_during_concurrent_calls(url: str) -> None:
    """Each call succeeds or raises `StoreClosedError`; no connection stays open."""
    rng = random.Random(7)
    for number in range(3):
        store = await Store.open(url)
        buffer = await store.buffer("math")
        await buffer.put([group() for _ in range(3)])
        names = rng.choices([name for name in CALLS if "and wait" not in name], k=24)
        calls = [asyncio.ensure_future(CALLS[name](store, buffer)) for name in names]
        calls.append(asyncio.ensure_future(buffer.sample(99, timeout=None)))
        await asyncio.sleep(rng.choice([0, 0.001, 0.01]))
        await store.close()
        outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
        allowed = (rdb.StoreClosedError, rdb.UnknownGroupError)
        unexpected = [
            one
            for one in outcomes
            if isinstance(one, BaseException) and not isinstance(one, allowed)
        ]
        assert not unexpected, number
        gc.collect()  # complains about connections that were not closed
    await check_invariants(url)


async def test_closing_ends_waiting_calls(url: str) -> None:
    store = await Store.open(url)
    buffer = await store.buffer("math")
    waiting = asyncio.create_task(buffer.sample(1, timeout=None))
    await asyncio.sleep(0.1)
    await store.close()
    with pytest.raises(rdb.StoreClosedError):
        await asyncio.wait_for(waiting, 60)


async def test_an_error_inside_the_block_closes_the_store(url: str) -> None:
    with pytest.raises(ZeroDivisionError):
        async with Store.open(url) as store:
            _ = 1 / 0
    with pytest.raises(rdb.StoreClosedError):
        await store.runs()


async def test_a_connection_closes_even_if_its_close_is_interrupted(sqlite_url: str) -> None:
    """Its thread gets two requests to stop and answers one."""
    backend = backend_for(sqlite_url)
    assert isinstance(backend, SqliteBackend)
    connection = await backend.opened([])
    closing = asyncio.create_task(connection.close())
    await asyncio.sleep(0)
    connection.stop()
    await asyncio.wait_for(closing, 60)
