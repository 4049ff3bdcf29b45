"""Commits whose answer is lost: their outcome is determined, and every write happens once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

import replaydb as rdb
from replaydb import Buffer, Episode, Lease, Store
from support.groups import group, groups
from support.invariants import check_invariants
from support.postgres import PostgresServer
from support.proxy import CLOSE, PASS, Fate, Message, Moment, Proxy, cut_commits, on_nth

MOMENTS: list[Moment] = ["answer", "request", "flight"]


def episode(number: int) -> Episode:
    return Episode(prompt_ids=[1], response_ids=[10 + number], reward=0.0)


class Calls:
    """All kinds of writes, each with a check that it happened exactly once."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    async def put(self) -> None:
        before = await self.buffer.count()
        [one] = await self.buffer.put(group("new"))
        assert await self.buffer.count() == before + 1
        assert (await self.buffer.get([one]))[0].group_uid == "new"

    async def puts(self) -> None:
        """Concurrent puts share a transaction."""
        ids = await asyncio.gather(*(self.buffer.put(group(f"new-{i}")) for i in range(6)))
        found = await self.buffer.get([one for [one] in ids])
        assert [one.group_uid for one in found] == [f"new-{i}" for i in range(6)]

    async def add_episodes(self) -> None:
        opened = await self.buffer.open_group("gsm8k", "pieces", 4)
        added = [self.buffer.add_episode("pieces", episode(i)) for i in range(4)]
        found = await asyncio.gather(*added)
        assert sorted(found) == ["completed"] + ["pending"] * 3 or found[-1] == "completed"
        [stored] = await self.buffer.get([opened])
        assert sorted(int(one.response_ids[0]) for one in stored.episodes) == [10, 11, 12, 13]

    async def sample(self) -> None:
        before = await self.sampled()
        batch = await self.buffer.sample(3, rdb.Uniform())
        assert await self.sampled() == before + 3
        [draw] = await self.buffer.draws(limit=1)
        assert (draw.id, list(draw.group_ids)) == (batch.draw_id, batch.ids)

    async def lease(self) -> None:
        lease = await self.buffer.lease(2, ttl=500)
        [live] = await self.buffer.leases()
        assert (live.id, live.num_groups) == (lease.id, 2)
        await lease.nack()
        assert await self.buffer.leases() == []

    async def ack(self) -> None:
        lease = await self.buffer.lease(2, ttl=500)
        await lease.ack(cursor={"data": {"next": 7}})
        assert await self.buffer.count(statuses="archived") == 2
        assert await self.buffer.cursor("data") == {"next": 7}

    async def nack(self) -> None:
        lease = await self.buffer.lease(2, ttl=500)
        await lease.nack(reason="no")
        assert {one.attempts for one in await self.buffer.get(lease.batch.ids)} == {1}

    async def ack_by_id(self) -> None:
        lease = await self.buffer.lease(2, ttl=500)
        await self.buffer.ack(lease.id)
        assert await self.buffer.count(statuses="archived") == 2

    async def revoke(self) -> None:
        lease = await self.buffer.lease(2, ttl=500)
        assert await self.buffer.revoke(lease.id) == lease.batch.ids
        assert {one.attempts for one in await self.buffer.get(lease.batch.ids)} == {1}

    async def open_lease(self) -> None:
        taken = await self.buffer.lease(2, ttl=500)
        lease = await self.buffer.open_lease(taken.id, ttl=1000)
        assert lease.batch.ids == taken.batch.ids
        await lease.ack()

    async def extend(self) -> None:
        lease: Lease = await self.buffer.lease(2, ttl=500)
        await lease.extend(1000)
        await lease.ack()

    async def update(self) -> None:
        ids = (await self.buffer.sample(2, rdb.Fifo())).ids
        assert await self.buffer.update_priorities(ids, np.array([3.0, 4.0])) == 2
        assert [one.priority for one in await self.buffer.get(ids)] == [3.0, 4.0]

    async def curate(self) -> None:
        ids = (await self.buffer.sample(2, rdb.Fifo())).ids
        assert await self.buffer.update(ids, status="archived", tags={"seen": 1}) == 2
        assert await self.buffer.update(ids[:1], status="completed", priority=2.0) == 1
        assert await self.buffer.count(statuses="completed") == 7

    async def advance(self) -> None:
        await self.buffer.update_settings(max_staleness=2)
        assert await self.buffer.advance_policy(5) == 8
        assert await self.buffer.count(statuses="expired") == 8

    async def delete(self) -> None:
        ids = (await self.buffer.sample(3, rdb.Fifo())).ids
        assert await self.buffer.delete(ids) == 3
        assert await self.buffer.count() == 5

    async def sampled(self) -> int:
        return sum(one.num_sampled for one in (await self.buffer.stats()).tasks)


CALLS: dict[str, Callable[[Calls], Awaitable[None]]] = {
    name: call for name, call in vars(Calls).items() if callable(call) and name[0] != "_"
}
del CALLS["sampled"]


@pytest.fixture
async def buffer(proxied_url: str, postgresql_url: str) -> Any:
    """A buffer with eight groups, behind a proxy for network faults."""
    async with Store.open(proxied_url, run="test") as store:
        buffer = await store.buffer("math")
        await buffer.put(groups(8, version=1))
        yield buffer
    await check_invariants(postgresql_url)


def each_once(names: Iterable[str]) -> Iterator[Any]:
    """Yield all calls and moments. One moment of each call is not nightly, in turn."""
    for number, name in enumerate(names):
        for moment in MOMENTS:
            marks = () if moment == MOMENTS[number % len(MOMENTS)] else pytest.mark.nightly
            yield pytest.param(name, moment, marks=marks)


@pytest.mark.parametrize(("name", "moment"), list(each_once(CALLS)))
async def test_every_write_happens_once(
    buffer: Buffer, proxy: Proxy, name: str, moment: Moment
) -> None:
    cut = cut_commits(moment, every=3, delay=0.2)  # reading an outcome commits, too
    fates = []

    def rule(message: Message) -> Fate:
        fates.append(cut(message))
        return fates[-1]

    proxy.rule = rule
    await CALLS[name](Calls(buffer))
    assert any(fate is not PASS for fate in fates)


@pytest.mark.usefixtures("from_snapshots")
@pytest.mark.parametrize(("name", "moment"), list(each_once(["sample", "lease"])))
async def test_a_draw_that_is_read_from_a_snapshot_happens_once(
    buffer: Buffer, proxy: Proxy, name: str, moment: Moment
) -> None:
    await test_every_write_happens_once(buffer, proxy, name, moment)


async def test_an_unreachable_server_leaves_the_outcome_unknown(
    buffer: Buffer,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    pass_time: Callable[[float], None],
) -> None:
    monkeypatch.setattr("replaydb.database.postgresql.transactions.COMMIT_SECONDS", 0.2)
    cut = cut_commits("answer")

    def rule(message: Message) -> Fate:
        return CLOSE if proxy.num_cut else cut(message)

    proxy.rule = rule
    puts = [asyncio.create_task(buffer.put(group(f"new-{i}"), timeout=60)) for i in range(3)]
    await proxy.until_cut()
    pass_time(60)
    outcomes = await asyncio.gather(*puts, return_exceptions=True)
    assert {type(one) for one in outcomes} == {rdb.OutcomeUnknownError}
    proxy.heal()
    again = [buffer.put(group(f"new-{i}"), on_duplicate="ignore") for i in range(3)]
    ids = {one for [one] in await asyncio.gather(*again)}
    assert len(ids) == 3
    assert await buffer.count() == 11


async def test_a_cancelled_commit_takes_no_effect_later(
    buffer: Buffer, proxy: Proxy, postgres: PostgresServer, postgresql_url: str
) -> None:
    """Otherwise groups would be leased without a holder."""
    fate = Fate(0, "stall")
    proxy.rule = on_nth(lambda one: one.asks_to_commit and one.wrote, fate, first=1, every=None)
    lease = asyncio.create_task(_lease(buffer))
    await proxy.until_cut()
    lease.cancel()
    await asyncio.wait_for(asyncio.wait([lease]), 60)
    assert lease.cancelled()
    writing = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND backend_xid IS NOT NULL"
    )
    left = await asyncio.to_thread(postgres.fetch_int, postgresql_url, writing)
    assert left == 0  # no transaction is left that could still be committed
    proxy.heal()
    assert await buffer.leases() == []


async def _lease(buffer: Buffer) -> Lease:
    return await buffer.lease(2, ttl=500)
