"""Values and requests that a database can never accept: refused, and not sent again."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from sqlalchemy import LargeBinary, bindparam, func, insert, literal, select

import replaydb as rdb
from replaydb import EpisodeGroup, Store
from replaydb.database.postgresql import combined_reads, errors
from replaydb.database.postgresql.combined_writes import fit_together
from replaydb.database.postgresql.errors import message_bytes
from replaydb.database.runtime import transactions
from replaydb.database.runtime.prepared import Bound, Write
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import Database
from replaydb.database.tables.schema import cursor
from replaydb.domain import checks
from support.engines import both_engines
from support.groups import episode, group, groups
from support.proxy import CLOSE, PASS, Fate, Message, Proxy

PIXELS = {"pixels": np.zeros(20_000, np.uint8)}
LONG = "é" * 6_000


@pytest.fixture
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MAX_BYTES", 10_000)


@pytest.mark.usefixtures("low_limit")
async def test_large_values_are_refused_by_name(store: Store) -> None:
    buffer = await store.buffer("math", indexed_tags=["kind"])
    large = group("large", extras=PIXELS)
    await buffer.open_group("gsm8k", "open", 1)

    async def refused(field: str, call: Any) -> None:
        with pytest.raises(rdb.InvalidInputError, match="at most 10000 bytes") as caught:
            await call
        assert caught.value.field == field

    calls: dict[str, Any] = {
        "groups[1]": buffer.put([group("small"), large]),
        "groups[0]": buffer.put(large),
        "the prompt and extras": buffer.open_group("gsm8k", "other", 1, extras=PIXELS),
        "episode": buffer.add_episode("open", episode(extras=PIXELS)),
        "cursor.data[0]": buffer.put([], cursor={"data": [LONG]}),
    }
    for field, call in calls.items():
        await refused(field, call)
    with pytest.raises(rdb.InvalidInputError, match=r"text: .*at most 10000 bytes.* got 12000"):
        episode(text=LONG)
    with pytest.raises(rdb.InvalidInputError, match=r"tags\.kind: .*at most 10000 bytes"):
        group(tags={"kind": LONG})
    assert await buffer.count() == 1


@pytest.mark.usefixtures("low_limit")
@pytest.mark.parametrize("layout", ["outside"])
async def test_large_payloads_fit_outside_the_database(store: Store) -> None:
    buffer = await store.buffer("math")
    await buffer.put(group("large", extras=PIXELS))
    [found] = (await buffer.sample(1)).groups
    assert found.extras["pixels"].nbytes == 20_000


@pytest.mark.usefixtures("low_limit")
async def test_puts_in_the_same_transaction_are_stored(store: Store) -> None:
    buffer = await store.buffer("math")
    calls = [buffer.put(group(f"g{i}", extras=PIXELS if i == 3 else None)) for i in range(6)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [i for i, one in enumerate(results) if isinstance(one, BaseException)] == [3]
    assert await buffer.count() == 5


async def test_a_server_that_closes_the_connection(
    proxied_url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is all a server tells of a message that is too large. It is sent once."""
    monkeypatch.setattr(errors, "MAX_BYTES", 15_000)
    sent = 0

    def rule(message: Message) -> Fate:
        nonlocal sent
        if (message.sender, message.kind) != ("client", b"B") or len(message.body) < 15_000:
            return PASS
        sent += 1
        return CLOSE

    async with Store.open(proxied_url) as store:
        buffer = await store.buffer("math")
        proxy.rule = rule
        with pytest.raises(rdb.DatabaseError, match="more than 15000 bytes") as caught:
            await buffer.put(group(tags={"kind": ["x" * 1000] * 20}))
        assert type(caught.value) is rdb.DatabaseError
        assert sent == 1
        several = groups(3)
        several.insert(2, group("large", extras=PIXELS))
        results = await asyncio.gather(*map(buffer.put, several), return_exceptions=True)
        assert [type(one) for one in results] == [list, list, rdb.DatabaseError, list]
        assert await buffer.count() == 3


def test_sizes_of_messages() -> None:
    half = bytes(600)
    assert message_bytes([half, memoryview(half)]) == 1200
    assert message_bytes([["a", [half.decode(), half]], 1]) == 1201
    assert message_bytes([(1, half), (2, half)]) == 600  # of `executemany`: each is a message
    assert message_bytes([half, 1, None, "é"]) == 602


@pytest.mark.parametrize("engine_name", ["sqlite"])
async def test_rows_above_the_limit_of_sqlite(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect

    def limited(*args: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **options)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 15_000)
        return connection

    monkeypatch.setattr(sqlite3, "connect", limited)
    async with Store.open(url) as store:
        buffer = await store.buffer("math")
        for call in (
            buffer.put(group(extras=PIXELS)),
            buffer.put(group(tags={"kind": ["x" * 1000] * 20})),
            buffer.put([], cursor={"data": ["x" * 1000] * 20}),
        ):
            with pytest.raises(rdb.DatabaseError, match=r"SQLITE_MAX_LENGTH.*Nothing was stored"):
                await call
        assert await buffer.count() == 0


@pytest.mark.parametrize("engine_name", ["postgresql"])
async def test_statements_with_too_many_parameters(store: Store) -> None:
    """asyncpg refuses to send them, and the database is not unavailable because of that."""
    some = select(literal(1).in_(range(40_000)))
    with pytest.raises(rdb.DatabaseError) as caught:
        await store._database.read(lambda session: session.run(some))
    assert type(caught.value) is rdb.DatabaseError


def test_the_number_of_rows_of_a_statement_is_limited() -> None:
    row = {"buffer_id": 1, "name": "x" * 255, "value": 1}
    assert fit_together([Write(insert(cursor), [row] * 90_000)])
    assert not fit_together([Write(insert(cursor), [row] * 110_000)])


@pytest.mark.parametrize("engine_name", ["postgresql"])
async def test_texts_that_a_server_cannot_return_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draw reads them in another way. It is recorded once."""
    buffer = await store.buffer("math")
    await buffer.put([EpisodeGroup("gsm8k", [episode(text=f"text {i}")]) for i in range(4)])
    together = combined_reads.after_reads

    def fail(last: Bound[Any], reads: Sequence[Bound[Any]]) -> Bound[Any]:
        if len(reads) > 1:  # also payloads and texts
            reads = [Bound(select(func.array_fill(1, [1 << 30]).label("all")), {})]
        return together(last, reads)

    monkeypatch.setattr(combined_reads, "after_reads", fail)
    drawn = await buffer.sample(4)
    assert sorted(one.episodes[0].text or "" for one in drawn.groups) == [
        f"text {i}" for i in range(4)
    ]
    lease = await buffer.lease(4, ttl=60)
    assert all(one.episodes[0].text for one in lease.batch.groups)
    await lease.ack()
    assert [one.times_sampled for one in await buffer.find()] == [2] * 4


@pytest.mark.usefixtures("from_snapshots")
async def test_a_draw_may_take_longer_if_it_is_large(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default a second for each byte, here."""
    monkeypatch.setattr(transactions, "SLOWEST_BYTES_PER_SECOND", 1)
    buffer = await store.buffer("math")
    await buffer.put(group(extras=PIXELS))
    begin, limits = Database._begin_to_read, []

    def recorded(database: Database, read: Any, result: Any, end: float) -> Any:
        limits.append(end - asyncio.get_running_loop().time())
        return begin(database, read, result, end)

    monkeypatch.setattr(Database, "_begin_to_read", recorded)
    await buffer.sample(1, timeout=None)
    await (await buffer.lease(1, ttl=60, timeout=0)).ack()
    assert len(limits) == 2
    assert min(limits) > 19_000


@pytest.mark.nightly
@both_engines
async def test_the_largest_payload_is_stored(store: Store) -> None:
    buffer = await store.buffer("math")
    pixels = np.zeros(checks.MAX_BYTES - 10_000, np.uint8)
    pixels[-1] = 7
    await buffer.put(group("large", extras={"pixels": pixels}))
    [found] = (await buffer.sample(1)).groups
    assert found.extras["pixels"][-1] == 7
    with pytest.raises(rdb.InvalidInputError, match="at most 999000000 bytes"):
        await buffer.put(group("larger", extras={"pixels": np.zeros(checks.MAX_BYTES, np.uint8)}))


@pytest.mark.nightly
async def test_a_message_of_a_gigabyte(store: Store) -> None:
    data = bytearray(1 << 30)
    length = select(func.length(bindparam("data", bytes(data), LargeBinary)))

    def work(session: Session) -> Any:
        return session.run(length)

    with pytest.raises(rdb.DatabaseError, match="bytes") as caught:
        await store._database.write(work)
    assert type(caught.value) is rdb.DatabaseError


@pytest.mark.nightly
async def test_a_draw_of_a_gigabyte_of_texts(store: Store) -> None:
    buffer = await store.buffer("math")
    for _ in range(19):
        await buffer.put(EpisodeGroup("gsm8k", [episode(text="x" * 60_000_000)]))
    drawn = await buffer.sample(19)
    assert sum(len(one.episodes[0].text or "") for one in drawn.groups) == 19 * 60_000_000
