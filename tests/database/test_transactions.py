"""Transactions that are run again: how often, and no longer than the store is open."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import Connection, insert

import replaydb as rdb
from replaydb import Store
from replaydb.database.engines.protocol import LostRaceError
from replaydb.database.schema import run
from replaydb.database.transactions import ATTEMPTS
from support.proxy import Proxy


async def test_a_constraint_that_is_violated_every_time_is_an_error(
    store: Store, engine_name: str
) -> None:
    """On PostgreSQL it looks like a lost race, but not until the call's time is up."""
    await (await store.buffer("math")).put([], cursor={"data": 1})  # enters the run
    attempts = 0

    def work(connection: Connection) -> None:
        nonlocal attempts
        attempts += 1
        started = store._database.backend.now(connection)
        connection.execute(insert(run).values(name="test", started_at=started, metadata={}))

    with pytest.raises(rdb.DatabaseError):
        await asyncio.wait_for(store._database.write(work), 20)
    assert attempts == (ATTEMPTS if engine_name == "postgresql" else 1)


async def test_what_was_cut_off_is_not_run_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing takes less time than the pause before the next attempt."""
    attempts, lost = 0, asyncio.Event()
    loop = asyncio.get_running_loop()

    def work(_: Connection) -> None:
        nonlocal attempts
        attempts += 1
        loop.call_soon_threadsafe(lost.set)
        raise LostRaceError

    monkeypatch.setattr("replaydb.database.transactions.random.uniform", lambda *_: 0.5)
    call = asyncio.create_task(store._database.write(work))
    await lost.wait()
    await asyncio.wait_for(store.close(timeout=0.1), 20)
    with pytest.raises(rdb.StoreClosedError):
        await asyncio.wait_for(call, 20)
    assert attempts == 1


async def test_closing_does_not_wait_for_the_end_of_an_outage(
    proxied_url: str, proxy: Proxy
) -> None:
    async with Store.open(proxied_url, run="far") as store:
        buffer = await store.buffer("math")
        proxy.refuse()
        proxy.drop()
        call = asyncio.create_task(buffer.count())
        await asyncio.sleep(0.2)
        assert not call.done()
        await asyncio.wait_for(store.close(timeout=None), 20)
        with pytest.raises(rdb.DatabaseUnavailableError):
            await call
