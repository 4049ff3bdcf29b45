"""Failures of the database under an open store: full, locked, disconnected, read-only."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import asyncpg
import pytest
from sqlalchemy import event, make_url, select, text

import replaydb as rdb
from replaydb import Store
from replaydb.database.runtime.revisions import VERSION_TABLE
from replaydb.database.runtime.session import Session
from replaydb.database.tables.schema import task
from support.connections import terminate_connections, transaction
from support.groups import group, groups, long_group
from support.invariants import check_invariants
from support.proxy import PASS, Fate, Message, Proxy, Rule
from support.tables import table_sizes

TERMINATE_WAITING = (
    "SELECT count(pg_terminate_backend(pid, 2000)) FROM pg_stat_activity "
    "WHERE datname = current_database() AND wait_event_type = 'Lock'"
)


async def limit_pages(store: Store, more: int) -> None:
    """Let the file grow by this many pages at most, like a full disk."""

    def work(session: Session) -> None:
        pages = session.core.exec_driver_sql("PRAGMA page_count").scalar_one()
        session.core.exec_driver_sql(f"PRAGMA max_page_count = {pages + more}")

    await store._database.write(work)  # on the only connection that writes


async def test_a_full_disk(sqlite_url: str) -> None:
    async with Store.open(sqlite_url, run="a") as store:
        buffer = await store.buffer("math")
        ids = await buffer.put(groups(3))
        before = await table_sizes(sqlite_url)
        await limit_pages(store, 4)
        for attempt in range(3):
            with pytest.raises(rdb.DatabaseFullError, match=r"replay\.db") as caught:
                await buffer.put([group(f"small-{attempt}"), long_group("large", 50_000)])
            cause: Any = caught.value.__cause__
            assert cause.sqlite_errorname == "SQLITE_FULL"
        assert await table_sizes(sqlite_url) == before
        small, large = await asyncio.gather(
            buffer.put(group("small")), buffer.put(long_group("large", 50_000)),
            return_exceptions=True,
        )  # fmt: skip
        assert isinstance(large, rdb.DatabaseFullError)
        assert small == [ids[-1] + 1]
        assert len(await buffer.sample(4)) == 4
        await limit_pages(store, 1000)
        await buffer.put(long_group("large", 50_000))
    await check_invariants(sqlite_url)


async def test_a_file_that_stays_locked(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Store.open(sqlite_url, run="a") as store:
        buffer = await store.buffer("math")
        await buffer.put(groups(2))
        monkeypatch.setattr("replaydb.database.sqlite.connection.LOCK_SECONDS", 0.2)
        async with transaction(sqlite_url) as other:
            await other.execute(select(1))  # BEGIN runs with it
            with pytest.raises(rdb.DatabaseUnavailableError, match="SQLITE_BUSY") as raised:
                await buffer.put(group("a"))
            assert str(make_url(sqlite_url).database) in str(raised.value)
            assert await buffer.count() == 2  # readers do not wait for writers
        await buffer.put(group("a"))
        assert await buffer.count() == 3


async def test_a_put_waits_for_writers_of_other_processes(sqlite_url: str) -> None:
    async with Store.open(sqlite_url, run="a") as store:
        buffer = await store.buffer("math")
        async with transaction(sqlite_url) as other:
            await other.execute(select(1))
            put = asyncio.create_task(buffer.put(group("a")))
            await asyncio.sleep(0.3)
            assert not put.done()
        await asyncio.wait_for(put, 60)


async def test_lost_connections_are_replaced(postgresql_url: str) -> None:
    async with Store.open(postgresql_url, run="a") as store:
        buffer = await store.buffer("math")
        await buffer.put(groups(2))
        waiting = asyncio.create_task(buffer.sample(4, timeout=20))
        await asyncio.sleep(0.2)
        for _ in range(2):
            await terminate_connections(postgresql_url)
            await buffer.put(group())
            assert len(await buffer.sample(2)) == 2
            assert (await buffer.stats()).num_groups >= 3
        assert len(await asyncio.wait_for(waiting, 60)) == 4
    await check_invariants(postgresql_url)


async def test_a_put_whose_connection_is_lost_is_stored_once(postgresql_url: str) -> None:
    async with Store.open(postgresql_url, run="a") as store:
        buffer = await store.buffer("math")
        await buffer.put(group())
        async with transaction(postgresql_url) as connection:
            await connection.execute(select(task).with_for_update())
            put = asyncio.create_task(buffer.put([long_group("a", 9), group("b")]))
            while not await connection.scalar(text(TERMINATE_WAITING)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.2)
            assert not put.done()
            sizes = {"episode_group": 1, "payload": 1, "episode": 2, "transcript": 0}
            assert await table_sizes(postgresql_url) == sizes
        assert len(await put) == 2
        assert await buffer.count() == 3
    await check_invariants(postgresql_url)


def end_of_session(then: Literal["close", "stall"]) -> Rule:
    """Close the connection, or stall it, after the message with which the server ends it."""

    def rule(message: Message) -> Fate:
        is_end = (message.sender, message.kind) == ("server", b"E") and b"57P01" in message.body
        return Fate(then=then) if is_end else PASS

    return rule


@pytest.mark.parametrize("then", ["close", "stall"])
async def test_a_connection_that_is_lost_between_calls(
    proxy: Proxy, postgresql_url: str, then: Literal["close", "stall"]
) -> None:
    async with Store.open(proxy.url, run="a") as store:
        buffer = await store.buffer("math")
        await buffer.put(groups(2))
        await buffer.sample(1)
        proxy.rule = end_of_session(then)
        await terminate_connections(postgresql_url)
        await asyncio.sleep(0.1)
        async with asyncio.timeout(60):
            await buffer.put(group())
            assert len(await buffer.sample(2)) == 2
            assert await buffer.count() == 3
            assert len(await buffer.find()) == 3
    await check_invariants(postgresql_url)


@pytest.mark.parametrize("then", ["close", "stall"])
async def test_a_connection_that_is_lost_while_while_it_is_opened(
    proxy: Proxy, postgresql_url: str, then: Literal["close", "stall"]
) -> None:
    """The server ends it after the login. It announces that before it closes the connection."""
    lost: list[asyncpg.Connection] = []

    async def end(connection: asyncpg.Connection) -> None:
        if not lost:
            proxy.rule = end_of_session(then)
            lost.append(connection)
            await terminate_connections(postgresql_url)
            await asyncio.sleep(0.1)

    async with Store.open(proxy.url, run="a") as store:
        buffer = await store.buffer("math")
        await terminate_connections(postgresql_url)
        writer: Any = store._database.writer
        engine = writer.pool._connect.args[0]
        event.listen(engine, "connect", lambda one, _: one.run_async(end), insert=True)
        await buffer.put(group())
        assert len(lost) == 1
        assert await buffer.count() == 1
    await check_invariants(postgresql_url)


async def test_a_server_that_stops_while_a_store_is_opened(proxy: Proxy) -> None:
    def rule(message: Message) -> Fate:
        if VERSION_TABLE.encode() not in message.body:
            return PASS
        proxy.route_to("postgresql://127.0.0.1:1/nothing")  # nothing listens there
        return Fate(then="close")

    proxy.rule = rule
    with pytest.raises(rdb.DatabaseUnavailableError):
        await Store.open(proxy.url)


async def test_a_database_that_refuses_writes(own_postgresql_url: str) -> None:
    """Like a standby."""
    async with Store.open(own_postgresql_url, run="a") as store:
        await (await store.buffer("math")).put(group())
    name = make_url(own_postgresql_url).database
    async with transaction(own_postgresql_url) as connection:
        await connection.execute(
            text(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
        )
    async with Store.open(own_postgresql_url) as store:
        buffer = await store.buffer("math")
        for call in (
            lambda: buffer.put(group()),
            lambda: buffer.sample(1),
            lambda: buffer.advance_policy(1),
        ):
            with pytest.raises(rdb.DatabaseReadOnlyError, match="25006"):
                await call()
        assert await buffer.count() == 1
