"""Which groups each strategy draws, in which order, with which probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

import replaydb as rdb
from replaydb import Buffer, EpisodeGroup, SamplingPolicy, Store
from support.engines import postgresql_nightly
from support.groups import group, groups

# uid: version, priority, number of earlier draws
FACTS: dict[str, tuple[int | None, float, int]] = {
    "a": (3, 1.0, 1),
    "b": (None, 2.0, 0),
    "c": (1, 0.0, 2),
    "d": (3, 2.0, 1),
    "e": (None, 0.0, 0),
    "f": (1, 0.5, 0),
}

ORDERS: list[tuple[SamplingPolicy, str]] = [
    (rdb.LeastSampled(), "befadc"),  # before other draws, which change this order
    (rdb.Fifo(), "abcdef"),
    (rdb.Lifo(), "fedcba"),
    (rdb.StalestFirst(), "cfadbe"),
    (rdb.FreshestFirst(), "dafceb"),
    (rdb.TopPriority(), "bdafce"),
]


async def filled(buffer: Buffer, tasks: Sequence[str] = ("gsm8k",)) -> None:
    """The groups of `FACTS`, alternating between two tasks."""
    given: list[EpisodeGroup] = []
    for i, (uid, (version, priority, _)) in enumerate(FACTS.items()):
        given.append(group(uid, tasks[i % len(tasks)], version=version, priority=priority))
    ids = dict(zip(FACTS, await buffer.put(given), strict=True))
    for uid, (_, _, drawn) in FACTS.items():
        for _ in range(drawn):
            await buffer.sample(1, where=rdb.col.id == ids[uid])


def uids(batch: rdb.Batch) -> str:
    return "".join(one.group_uid for one in batch.groups)


@pytest.mark.parametrize("tasks", [("gsm8k",), ("a", "b", "c")], ids=len)
async def test_the_order_of_a_strategy(buffer: Buffer, tasks: tuple[str, ...]) -> None:
    await filled(buffer, tasks)
    for policy, expected in ORDERS:
        if policy == rdb.LeastSampled():
            assert uids(await buffer.sample(3, policy)) == expected[:3]
            assert uids(await buffer.sample(6, policy)) == "abdefc"
            continue
        for n in (1, 3, 5, 6):
            batch = await buffer.sample(n, policy)
            assert uids(batch) == expected[:n], policy
            assert batch.probabilities.tolist() == batch.weights.tolist() == [1.0] * n
            assert batch.probabilities.dtype == batch.weights.dtype == np.dtype(np.float64)


async def test_a_filter_leaves_the_order_as_it_is(buffer: Buffer) -> None:
    await filled(buffer)
    some = rdb.col.group_uid.in_(["a", "b", "c", "e"])
    for policy, expected in ORDERS:
        batch = await buffer.sample(4, policy, where=some)
        assert uids(batch) == "".join(uid for uid in expected if uid in "abce"), policy


@pytest.mark.parametrize("where", [None, rdb.col.id != 4], ids=["all", "filtered"])
async def test_the_oldest_first_among_the_highest(
    buffer: Buffer, where: sa.ColumnElement[bool] | None
) -> None:
    """With any number of equal priorities around the last group drawn."""
    priorities = [1.0, 3.0, 2.0, 2.0, 3.0, 2.0, 2.0, 1.0]
    await buffer.put([group(priority=priority) for priority in priorities])
    await buffer.put([group(task="code", priority=2.0)])
    expected = [one for one in (2, 5, 3, 4, 6, 7, 9, 1, 8) if where is None or one != 4]
    for n in range(1, len(expected) + 1):
        assert (await buffer.sample(n, rdb.TopPriority(), where=where)).ids == expected[:n]
        assert (await buffer.peek(n, rdb.TopPriority(), where=where)).ids == expected[:n]


async def test_only_completed_groups_are_drawn(buffer: Buffer) -> None:
    await buffer.put([group(status=status) for status in ("failed", "aborted", "filtered")])
    for policy, _ in [*ORDERS, (rdb.Uniform(), ""), (rdb.Prioritized(), "")]:
        with pytest.raises(rdb.NotEnoughGroupsError):
            await buffer.sample(1, policy, at_least=1)


@postgresql_nightly
@pytest.mark.parametrize("policy", [rdb.Uniform(), rdb.Prioritized()], ids=str)
async def test_a_batch_holds_no_group_twice(buffer: Buffer, policy: SamplingPolicy) -> None:
    ids = await buffer.put([*groups(10), *groups(7, "code")])
    for n in (1, 5, 16, 17):
        batch = await buffer.sample(n, policy)
        assert len(set(batch.ids)) == len(batch) == n
        assert set(batch.ids) <= set(ids)


@postgresql_nightly
async def test_uniform_odds(buffer: Buffer) -> None:
    await buffer.put([*groups(4, priority=9.0), *groups(6, "code"), group(status="failed")])
    cases: list[tuple[dict[str, Any], float]] = [
        ({"n": 3}, 1 / 10),
        ({"n": 3, "tasks": "gsm8k"}, 1 / 4),
        ({"n": 2, "where": rdb.col.task_name == "code"}, 1 / 10),
        ({"n": 1, "where": rdb.col.group_uid == "code-3"}, 1 / 10),
    ]
    for arguments, chance in cases:
        batch = await buffer.sample(**arguments)
        assert batch.probabilities == pytest.approx(chance)
        assert batch.weights.tolist() == [1.0] * len(batch)
    quotas = await buffer.sample({"code": 2, "gsm8k": 1})
    assert quotas.probabilities == pytest.approx([1 / 6, 1 / 6, 1 / 4])


@postgresql_nightly
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
async def test_prioritized_odds(store: Store, exponent: float, beta: float) -> None:
    buffer = await store.buffer("math", priority_exponent=exponent)
    priorities = dict(zip(await buffer.put([group(priority=p) for p in PRIORITIES]), PRIORITIES,
                          strict=True))  # fmt: skip
    total = sum(priority**exponent for priority in PRIORITIES)
    for n in (1, 3, 4):
        batch = await buffer.sample(n, rdb.Prioritized(beta=beta))
        weights = [priorities[one] ** exponent for one in batch.ids]
        assert batch.probabilities == pytest.approx([weight / total for weight in weights])
        smallest = min(weights)
        expected = [(weight / smallest) ** -beta for weight in weights]
        assert batch.weights == pytest.approx(expected)
        assert batch.weights.max() == 1.0


PRIORITIES = (1.0, 2.0, 3.0, 4.0)


@postgresql_nightly
async def test_prioritized_odds_over_several_tasks(buffer: Buffer) -> None:
    await buffer.put([group("a", "x", priority=1.0), group("b", "y", priority=3.0)])
    together = await buffer.sample(2, rdb.Prioritized(beta=1.0))
    assert dict(zip(uids(together), together.probabilities, strict=True)) == {"a": 0.25, "b": 0.75}
    assert dict(zip(uids(together), together.weights, strict=True)) == {"a": 1.0, "b": 1 / 3}
    apart = await buffer.sample({"x": 1, "y": 1}, rdb.Prioritized(beta=1.0))
    assert (uids(apart), apart.probabilities.tolist()) == ("ab", [1.0, 1.0])


@postgresql_nightly
@pytest.mark.parametrize("tasks", [("gsm8k",), ("gsm8k", "code")], ids=len)
async def test_zero_priority_is_drawn_only_when_nothing_else_is_left(
    buffer: Buffer, tasks: tuple[str, ...]
) -> None:
    await filled(buffer, tasks)  # c and e have priority 0
    for _ in range(15):
        assert set(uids(await buffer.sample(4, rdb.Prioritized()))) == set("abdf")
        five = await buffer.sample(5, rdb.Prioritized(beta=1.0))
        assert set(uids(five)[:4]) == set("abdf")
        assert uids(five)[4] in "ce"
        assert (five.probabilities[4], five.weights[4]) == (0.0, 1.0)
        assert sum(five.probabilities) == pytest.approx(1.0)
    nothing_else = await buffer.sample(1, rdb.Prioritized(), where=rdb.col.priority == 0.0)
    assert (nothing_else.probabilities.tolist(), nothing_else.weights.tolist()) == ([0.0], [1.0])


async def test_the_same_seed_draws_the_same_on_both_engines(
    sqlite_url: str, postgresql_url: str
) -> None:
    histories = []
    for url in (sqlite_url, postgresql_url):
        async with Store.open(url) as store:
            histories.append(await _history(await store.buffer("math", seed=11)))
            other = await _history(await store.buffer("other seed", seed=12))
            assert other != histories[0]
    assert histories[0] == histories[1]


async def _history(buffer: Buffer) -> list[list[str]]:
    await buffer.put([*groups(30, priority=2.0), *groups(30, "code")])
    drawn = []
    policies: list[SamplingPolicy] = [rdb.Uniform(), rdb.Prioritized()]
    for policy in policies * 3:
        for where in (None, rdb.col.group_uid.like("%3"), rdb.col.group_uid == "code-29"):
            n = 1 if where is not None else 10
            batch = await buffer.sample(n, policy, where=where)
            drawn.append([one.group_uid for one in batch.groups])
        await buffer.update_priorities(batch.ids, [5.0] * len(batch))
    return drawn


@postgresql_nightly
@pytest.mark.parametrize("policy", [rdb.Uniform(), rdb.Prioritized()], ids=str)
async def test_draws_are_as_frequent_as_their_weights(store: Store, policy: SamplingPolicy) -> None:
    buffer = await store.buffer("math", seed=5)
    ids = await buffer.put([group(priority=priority) for priority in PRIORITIES])
    drawn: Counter[int] = Counter()
    for _ in range(150):
        drawn.update((await buffer.sample(1, policy)).ids)
    weights = PRIORITIES if isinstance(policy, rdb.Prioritized) else (1.0,) * 4
    expected = np.array(weights) / sum(weights) * 150
    counts = np.array([drawn[one] for one in ids])
    assert ((counts - expected) ** 2 / expected).sum() < 11.3  # chi-square, 3 df, p > 0.01


@pytest.mark.parametrize("beta", [-0.1, 1.1])
def test_beta_is_a_fraction(beta: float) -> None:
    with pytest.raises(rdb.InvalidInputError) as caught:
        rdb.Prioritized(beta=beta)
    assert caught.value.field == "beta"
