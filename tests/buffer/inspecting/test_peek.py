"""Peek writes nothing and does not affect later draws."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

import replaydb as rdb
from replaydb import Buffer, SamplingPolicy, Store
from replaydb.database.engines import backend_for
from replaydb.database.repository import preview
from replaydb.database.runtime.transactions import Database
from support.connections import transaction
from support.damage import damage
from support.draw_frequencies import DrawFrequencies
from support.engines import postgresql_nightly
from support.groups import group, groups
from support.invariants import statuses
from support.rows import contents
from support.sampling_model import request

POLICIES: list[SamplingPolicy] = [
    rdb.Uniform(),
    rdb.Prioritized(),
    rdb.FreshestFirst(),
    rdb.Mix({"gsm8k": 1, "code": 1}),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
async def test_nothing_is_written(store: Store, url: str, policy: SamplingPolicy) -> None:
    buffer = await store.buffer("math", rate_limit=rdb.MinSize(100), max_times_sampled=1, seed=3)
    await buffer.put([*groups(4, version=0), *groups(4, "code", version=0)])
    async with transaction(url) as connection:
        before = await contents(connection)
    with pytest.raises(rdb.RateLimitedError):
        await buffer.sample(6, policy)
    batch = await buffer.peek(
        6, policy, where=rdb.col.reward_std > 0.1, max_staleness=0, runs="test"
    )
    assert len(set(batch.ids)) == 6
    assert (batch.draw_id, batch.groups[0].times_sampled) == (None, 0)
    assert batch.rewards.shape == (12,)
    async with transaction(url) as connection:
        assert await contents(connection) == before


@postgresql_nightly
async def test_peek_selects_groups_like_a_draw(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview, "PAGE", 3)  # ten groups are several pages
    buffer = await store.buffer("math")
    weights = {1 + i: float(1 + i % 5) for i in range(10)}
    names = ("gsm8k", "code")
    await buffer.put(group(task=names[one > 6], priority=w) for one, w in weights.items())
    for policy, expected in (
        (rdb.Prioritized(beta=1.0), weights),
        (rdb.Uniform(), dict.fromkeys(weights, 1.0)),
    ):
        tally = DrawFrequencies(10)
        database = Database(backend_for(url))
        wanted = request(4, policy)
        for _ in range(400):
            found = await database.read(partial(preview.peek, cached=buffer._row, request=wanted))
            tally.add(found.ids, expected, {one: one - 1 for one in weights})
        await database.close()
        assert tally.p_value() > 1e-4
    chances = dict(zip(found.ids, found.probabilities, strict=True))
    assert set(chances.values()) == {0.1}
    drawn = await buffer.peek(10, rdb.Prioritized(beta=1.0))
    assert drawn.weights == pytest.approx([1 / weights[one] for one in drawn.ids])


@postgresql_nightly
async def test_peek_does_not_reveal_the_next_draw(buffer: Buffer) -> None:
    await buffer.put(groups(4))
    rounds = [((await buffer.peek(1)).ids, (await buffer.sample(1)).ids) for _ in range(30)]
    assert any(seen != drawn for seen, drawn in rounds)


async def test_peek_returns_as_many_groups_as_a_draw(buffer: Buffer, url: str) -> None:
    await buffer.put([*groups(3), *groups(2, "code"), group("bad", status="failed")])
    assert (await buffer.peek({"gsm8k": 2, "code": 1}, rdb.Lifo())).ids == [3, 2, 5]
    with pytest.raises(rdb.NotEnoughGroupsError) as caught:
        await buffer.peek({"gsm8k": 2, "code": 3})
    assert (caught.value.wanted, caught.value.available) == (3, 2)
    assert len(await buffer.peek(9, at_least=1)) == 5
    with pytest.raises(rdb.NotEnoughGroupsError):
        await buffer.peek(1, tasks="nothing", at_least=1)
    waiting = asyncio.create_task(buffer.peek(6, timeout=30))
    await asyncio.sleep(0)
    await buffer.put(group())
    assert len(await waiting) == 6


async def test_damage_found_by_peek_changes_nothing(buffer: Buffer, url: str) -> None:
    await buffer.put(groups(3))
    await damage(url, 2)
    with pytest.raises(rdb.CorruptPayloadError) as caught:
        await buffer.peek(3, rdb.Fifo())
    assert caught.value.group_ids == (2,)
    assert caught.value.batch is not None
    assert caught.value.batch.ids == [1, 3]
    assert set((await statuses(url)).values()) == {"completed"}
