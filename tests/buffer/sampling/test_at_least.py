"""Draws with `at_least`: fewer groups than `n`, or none."""

from __future__ import annotations

from typing import Any

import pytest

import replaydb as rdb
from replaydb import Buffer, Mix, Store
from support.connections import transaction
from support.engines import postgresql_nightly
from support.groups import groups
from support.rows import contents

CALLS = ["sample", "peek", "lease"]


async def drawn(buffer: Buffer, call: str, n: Any, *args: Any, **options: Any) -> rdb.Batch:
    if call == "lease":
        lease = await buffer.lease(n, *args, ttl=60, **options)
        await lease.nack()
        return lease.batch
    batch: rdb.Batch = await getattr(buffer, call)(n, *args, **options)
    return batch


@postgresql_nightly
@pytest.mark.parametrize("call", CALLS)
async def test_between_at_least_and_n_groups(buffer: Buffer, call: str) -> None:
    ids = await buffer.put(groups(4))
    for least in (0, 3, 4):
        assert (await drawn(buffer, call, 6, rdb.Fifo(), at_least=least)).ids == ids
    assert (await drawn(buffer, call, 2, rdb.Fifo(), at_least=1)).ids == ids[:2]
    too_many: list[int | None] = [5, 6, None]
    for at_least in too_many:
        with pytest.raises(rdb.NotEnoughGroupsError) as caught:
            await drawn(buffer, call, 6, at_least=at_least)
        assert (caught.value.wanted, caught.value.available) == (at_least or 6, 4)


async def test_a_rate_limit_counts_the_groups_drawn(store: Store) -> None:
    buffer = await store.buffer("limited", rate_limit=rdb.MinSize(1))
    await buffer.put(groups(2))
    assert len(await buffer.sample(4, at_least=2)) == 2
    assert (await buffer.stats()).limited_samples == 2


@postgresql_nightly
@pytest.mark.parametrize("call", CALLS)
async def test_it_counts_the_groups_of_all_tasks(buffer: Buffer, call: str) -> None:
    await buffer.put([*groups(3, "a"), *groups(1, "b")])
    quotas = {"a": 3, "b": 3, "c": 1}
    batch = await drawn(buffer, call, quotas, rdb.Fifo(), at_least=4)
    assert [one.task_name for one in batch.groups] == ["a", "a", "a", "b"]
    mix = Mix({"a": 1, "b": 1}, rdb.Fifo())
    assert len(await drawn(buffer, call, 4, mix, at_least=3)) == 3
    with pytest.raises(rdb.NotEnoughGroupsError) as caught:
        await drawn(buffer, call, quotas, rdb.Fifo(), at_least=6)
    # At least two of "b", if there were one of "c".
    assert (caught.value.task_name, caught.value.wanted, caught.value.available) == ("b", 2, 1)


@postgresql_nightly
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("policy", [rdb.Uniform(), Mix({"a": 1})], ids=["Uniform", "Mix"])
async def test_an_empty_batch(
    buffer: Buffer, url: str, call: str, policy: rdb.SamplingPolicy
) -> None:
    async with transaction(url) as connection:
        before = await contents(connection)
    for n, at_least in ((3, 0), (0, 0), (0, None)):
        batch = await drawn(buffer, call, n, policy, at_least=at_least, timeout=20)
        assert (len(batch), batch.draw_id) == (0, None)
    assert batch.rewards.shape == batch.weights.shape == (0,)
    async with transaction(url) as connection:
        assert await contents(connection) == before


@postgresql_nightly
@pytest.mark.parametrize("call", CALLS)
async def test_a_quota_of_zero_is_left_out(buffer: Buffer, call: str) -> None:
    ids = await buffer.put([*groups(2, "a"), *groups(2, "b")])
    assert (await drawn(buffer, call, {"a": 0, "b": 2, "unseen": 0}, rdb.Fifo())).ids == ids[2:]
    nothing: list[dict[str, int]] = [{"a": 0}, {}]
    for quotas in nothing:
        assert len(await drawn(buffer, call, quotas, rdb.Fifo())) == 0


async def test_an_empty_lease(buffer: Buffer) -> None:
    async with buffer.lease(3, ttl=60, at_least=0) as lease:
        assert (lease.id, len(lease.batch)) == (0, 0)
        await lease.extend(90)
        await lease.ack(cursor={"gsm8k": 7})
        await lease.ack()
        await lease.nack(reason="no use")
        await lease.reject(reason="no use")
        with pytest.raises(rdb.InvalidInputError, match="ids"):
            await lease.ack([1])
    assert await buffer.leases() == []
    assert await buffer.cursor("gsm8k") == 7


async def test_a_rate_limit_is_not_a_lack_of_groups(store: Store) -> None:
    buffer = await store.buffer("math", rate_limit=rdb.MinSize(5))
    await buffer.put(groups(3))
    with pytest.raises(rdb.RateLimitedError):
        await buffer.sample(4, at_least=0)
    assert len(await buffer.sample({"gsm8k": 0})) == 0
    await buffer.put(groups(3, "code"))
    assert len(await buffer.sample(9, at_least=0)) == 6
