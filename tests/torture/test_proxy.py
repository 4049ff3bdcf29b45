"""The fault-injecting proxy, checked with a bare driver."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from support.proxy import (
    CLOSE,
    Proxy,
    Rule,
    break_messages,
    cut_commits,
    delay_all,
    on_nth,
)

LOST = (asyncpg.PostgresConnectionError, asyncpg.InterfaceError, OSError)
INSERT = "INSERT INTO cut VALUES ($1)"


@pytest.fixture
async def direct(postgresql_url: str) -> Any:
    """A direct connection, with a table for this test."""
    connection = await asyncpg.connect(postgresql_url)
    await connection.execute("CREATE TABLE cut (x text)")
    yield connection
    await connection.execute("DROP TABLE cut")
    await connection.close()


@pytest.fixture
async def client(proxied_url: str, direct: Any) -> Any:
    """A connection through the proxy."""
    connection = await asyncpg.connect(proxied_url)
    yield connection
    connection.terminate()


async def stored(direct: Any) -> list[str]:
    return [row["x"] for row in await direct.fetch("SELECT x FROM cut ORDER BY x")]


async def insert(client: Any, value: str) -> None:
    async with client.transaction():
        await client.execute(INSERT, value)


async def test_a_good_network(client: Any, direct: Any, proxy: Proxy) -> None:
    large = "x" * 3_000_000
    await insert(client, large)
    assert await client.fetchval("SELECT x FROM cut") == large
    assert (proxy.num_accepted, proxy.num_open, proxy.num_committed, proxy.num_cut) == (1, 1, 1, 0)
    with pytest.raises(asyncpg.DivisionByZeroError):
        await client.fetchval("SELECT 1 / 0")
    with pytest.raises(TimeoutError):  # a cancel request uses a separate connection
        await client.execute("SELECT pg_sleep(60)", timeout=0.05)
    assert await client.fetchval("SELECT 1") == 1
    async with client.transaction(readonly=True):
        await client.fetch("SELECT * FROM cut")
    assert proxy.num_committed == 1  # commits of read-only transactions do not count


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (cut_commits("answer"), True),
        (cut_commits("request"), False),
        (cut_commits("flight"), True),
        (break_messages("close", "client", b"B"), False),
        (break_messages("close", "server", b"C", first=2), False),  # of BEGIN, and of INSERT
    ],
)
async def test_cuts(client: Any, direct: Any, proxy: Proxy, rule: Rule, kept: bool) -> None:
    """The client loses its connection, and the server has committed or not as documented."""
    proxy.rule = rule
    with pytest.raises(LOST):
        await insert(client, "a")
    assert client.is_closed()
    # The lock waits until the server has finished the transaction.
    await direct.execute("BEGIN; LOCK TABLE cut; COMMIT")
    assert await stored(direct) == ["a"] * kept
    assert proxy.num_cut == 1


async def test_a_commit_in_flight(client: Any, direct: Any, proxy: Proxy) -> None:
    """The client is disconnected before the server receives the COMMIT."""
    proxy.rule = cut_commits("flight", delay=3)  # far longer than the next read takes
    with pytest.raises(LOST):
        await insert(client, "a")
    assert await stored(direct) == []
    await direct.execute("BEGIN; LOCK TABLE cut; COMMIT")
    assert await stored(direct) == ["a"]


async def test_some_commits_of_many(direct: Any, proxy: Proxy) -> None:
    """COMMITs are counted over all connections, without read-only transactions."""
    proxy.rule = cut_commits("answer", first=2, every=3)
    lost = []
    for i in range(9):
        connection = await asyncpg.connect(proxy.url)
        async with connection.transaction():
            await connection.fetch("SELECT * FROM cut")
        try:
            await insert(connection, str(i))
        except LOST:
            lost.append(i)
        connection.terminate()
    assert lost == [1, 4, 7]
    assert (proxy.num_cut, proxy.num_committed) == (3, 9)
    assert await stored(direct) == [str(i) for i in range(9)]


async def test_dropped_and_refused(client: Any, proxy: Proxy) -> None:
    proxy.refuse()
    assert await client.fetchval("SELECT 1") == 1
    with pytest.raises(OSError, match="Connect"):
        await asyncpg.connect(proxy.url)
    proxy.drop()
    with pytest.raises(LOST):
        await client.fetchval("SELECT 1")
    proxy.heal()
    again = await asyncpg.connect(proxy.url)
    assert await again.fetchval("SELECT 1") == 1
    again.terminate()


@pytest.mark.parametrize("sender", ["client", "server"])
async def test_stalled(client: Any, direct: Any, proxy: Proxy, sender: Any) -> None:
    """A call gets no response until the network heals."""
    proxy.stall(sender)
    put = asyncio.create_task(client.execute("INSERT INTO cut VALUES ('a')"))
    await asyncio.sleep(0.05)
    assert not put.done()
    if sender == "client":
        assert await stored(direct) == []
    proxy.heal()
    await asyncio.wait_for(put, 60)
    assert await stored(direct) == ["a"]


async def test_stalled_in_the_middle_of_a_payload(client: Any, direct: Any, proxy: Proxy) -> None:
    """The server waits for the rest of the message."""
    await client.execute(INSERT, "prepared")
    proxy.rule = break_messages("stall", "client", b"B", num_bytes=5_000, at_least=100_000)
    put = asyncio.create_task(insert(client, "x" * 1_000_000))
    await proxy.until_cut()
    assert not put.done()
    proxy.heal()
    await asyncio.wait_for(put, 60)
    assert len((await stored(direct))[1]) == 1_000_000


async def test_half_an_answer(client: Any, direct: Any, proxy: Proxy) -> None:
    await insert(client, "x" * 1_000_000)
    proxy.rule = break_messages("close", "server", b"D", num_bytes=2_000, at_least=100_000)
    with pytest.raises(LOST):
        await client.fetchval("SELECT x FROM cut")
    proxy.rule = on_nth(lambda message: message.kind == b"", CLOSE, first=1, every=1)
    with pytest.raises(LOST):
        await asyncpg.connect(proxy.url)


async def test_slow(client: Any, direct: Any, proxy: Proxy) -> None:
    """Messages stay in order."""
    proxy.rule = delay_all(0.002)
    await insert(client, "a")
    assert await client.fetchval("SELECT x FROM cut") == "a"
