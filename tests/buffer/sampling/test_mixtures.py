"""Mix: batches of several tasks and strategies, in one transaction."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import replaydb as rdb
from replaydb import Buffer, Mix, Share
from support.engines import postgresql_nightly
from support.groups import group, groups
from support.invariants import group_rows


@pytest.mark.parametrize(
    ("weights", "minimum", "n", "expected"),
    [
        ([3, 1], 0, 8, [6, 2]),
        ([1, 1, 1], 0, 10, [4, 3, 3]),  # equal remainders: the first
        ([53, 24, 23], 0, 10, [5, 3, 2]),  # 5.3, 2.4, 2.3
        ([47, 16, 15.8, 12, 6.1, 3.1], 0, 10, [5, 2, 1, 1, 1, 0]),
        ([0.1, 0.2, 0.7], 0, 10, [1, 2, 7]),
        ([97, 2, 1], 1, 10, [8, 1, 1]),
        ([97, 2, 1], 2, 10, [6, 2, 2]),
        ([1, 0], 0, 5, [5, 0]),
        ([1, 0], 2, 5, [3, 2]),
        ([1, 1], 3, 6, [3, 3]),
        ([5, 3, 1], 0, 1, [1, 0, 0]),
    ],
)
def test_largest_remainder(weights: list[float], minimum: int, n: int, expected: list[int]) -> None:
    shares = {f"task-{i}": weight for i, weight in enumerate(weights)}
    assert Mix(shares, minimum=minimum).quotas(n) == expected


@pytest.mark.parametrize("n", [1, 7, 64, 1000])
def test_quotas_add_up(n: int) -> None:
    weights = [0.3, 1e-9, 7.7, 123.4, 1 / 3]
    quotas = Mix([Share(weight) for weight in weights]).quotas(n)
    assert sum(quotas) == n
    for quota, weight in zip(quotas, weights, strict=True):
        assert abs(quota - n * weight / sum(weights)) < 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Mix({}),
        lambda: Mix({"a": 0.0}),
        lambda: Mix([rdb.Fifo()]),  # type: ignore[list-item]
        lambda: Share(1, Mix({"a": 1})),  # type: ignore[arg-type]
        lambda: Mix({"a": 1, "b": 1}, minimum=3).quotas(5),
    ],
)
def test_impossible_mixtures(wrong: Any) -> None:
    with pytest.raises(rdb.InvalidInputError):
        wrong()


def tasks_of(batch: rdb.Batch) -> list[str]:
    return [one.task_name for one in batch.groups]


async def test_quotas_are_all_or_nothing(buffer: Buffer, url: str) -> None:
    await buffer.put([*groups(5, "a"), *groups(2, "b")])
    before = await group_rows(url)
    with pytest.raises(rdb.NotEnoughGroupsError) as caught:
        await buffer.sample({"a": 3, "b": 3}, rdb.Uniform())
    assert (caught.value.task_name, caught.value.wanted, caught.value.available) == ("b", 3, 2)
    with pytest.raises(rdb.NotEnoughGroupsError):
        await buffer.lease({"b": 1, "nothing": 1}, ttl=60)
    assert await group_rows(url) == before
    batch = await buffer.sample({"b": 2, "a": 3}, rdb.Fifo())
    assert tasks_of(batch) == ["b", "b", "a", "a", "a"]
    batch = await buffer.sample({"a": 9, "b": 9, "c": 9}, at_least=1)
    assert Counter(tasks_of(batch)) == {"a": 5, "b": 2}
    async with buffer.lease({"a": 1, "b": 2}, ttl=60) as lease:
        assert tasks_of(lease.batch) == ["a", "b", "b"]
    with pytest.raises(rdb.InvalidInputError):
        await buffer.sample({"a": 1}, tasks="a")
    with pytest.raises(rdb.InvalidInputError):
        await buffer.sample({"a": 1}, Mix({"a": 1}))


async def test_a_mixture_of_tasks(buffer: Buffer) -> None:
    await buffer.put([*groups(9, "a"), *groups(9, "b"), *groups(9, "c")])
    batch = await buffer.sample(8, Mix({"b": 3, "a": 1}, rdb.Fifo()))
    assert tasks_of(batch) == ["b"] * 6 + ["a"] * 2
    assert batch.ids == [*range(10, 16), 1, 2]
    (draw,) = await buffer.draws()
    assert draw.policy == "Mix(3 Fifo(), 1 Fifo())"
    batch = await buffer.sample(6, Mix({"a": 100, "c": 1}, rdb.Lifo(), minimum=2))
    assert batch.ids == [9, 8, 7, 6, 27, 26]
    with pytest.raises(rdb.NotEnoughGroupsError) as caught:
        await buffer.sample(20, Mix({"a": 1, "b": 1}))
    assert (caught.value.task_name, caught.value.wanted) == ("a", 10)


async def test_a_mixture_of_new_and_replayed_groups(buffer: Buffer) -> None:
    await buffer.put(groups(10))
    seen = (await buffer.sample(4, rdb.Fifo())).ids
    await buffer.update_priorities(seen, [0.0, 0.0, 5.0, 1.0])
    unseen = rdb.col.times_sampled == 0
    mix = Mix(
        [Share(1, rdb.Fifo(), where=unseen), Share(1, rdb.Prioritized(beta=1.0), where=~unseen)]
    )
    batch = await buffer.sample(4, mix)
    assert batch.ids[:2] == [5, 6]
    assert set(batch.ids[2:]) == set(seen[2:])
    assert batch.weights.max() == 1.0
    assert batch.weights[:2].tolist() == [1.0, 1.0]


@postgresql_nightly
@pytest.mark.parametrize("policy", [rdb.Fifo(), rdb.Uniform(), rdb.Prioritized(), rdb.Lifo()])
async def test_no_group_is_in_two_shares(buffer: Buffer, policy: rdb.SamplingPolicy) -> None:
    assert not isinstance(policy, Mix)
    await buffer.put(groups(12))
    for _ in range(5):
        mix = Mix([Share(1, rdb.Uniform()), Share(1, policy), Share(1, rdb.TopPriority())])
        batch = await buffer.sample(12, mix)
        assert sorted(batch.ids) == list(range(1, 13))
    lease = await buffer.lease(12, Mix([Share(1, rdb.Fifo()), Share(3, policy)]), ttl=60)
    assert len(set(lease.batch.ids)) == 12
    await lease.nack()


async def test_shares_within_what_the_call_allows(buffer: Buffer) -> None:
    await buffer.advance_policy(3)
    await buffer.put([group(f"{t}{v}", t, version=v) for t in "abc" for v in (1, 2, 3)])
    mix = Mix([Share(1, rdb.Fifo(), tasks=["a", "b"]), Share(1, rdb.Lifo())])
    batch = await buffer.sample(4, mix, tasks=["b", "c"], max_staleness=1)
    assert [one.group_uid for one in batch.groups] == ["b2", "b3", "c3", "c2"]
    where = rdb.col.group_uid != "b2"
    batch = await buffer.sample(2, mix, tasks="b", where=where)
    assert [one.group_uid for one in batch.groups] == ["b1", "b3"]
    with pytest.raises(rdb.NotEnoughGroupsError):
        await buffer.sample(2, mix, tasks="c")
    batch = await buffer.sample(2, mix, tasks="c", at_least=1)
    assert [one.group_uid for one in batch.groups] == ["c3"]
