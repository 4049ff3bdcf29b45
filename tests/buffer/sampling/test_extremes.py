"""Draws stay exact with very different weights: clocks are shifted back before they lose digits."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest
from sqlalchemy import select, update

import replaydb as rdb
from replaydb.database.repository import draws
from replaydb.database.statements.candidates import order_of
from replaydb.database.tables.schema import episode_group, group, task
from support.connections import transaction
from support.draw_frequencies import pearson
from support.engines import postgresql_nightly
from support.sampling_model import Filter, GroupSpec, SamplingModel, level_below, tagged, to_group

SEED = 20_261_121
#: 24 orders of magnitude; the levels are those of the filters.
MAGNITUDES = (1e-12, 1e-6, 1.0, 1e6, 1e12)

Change = Callable[[SamplingModel, int], Awaitable[None]]


@pytest.fixture
async def buffer(url: str) -> AsyncIterator[rdb.Buffer]:
    async with rdb.Store.open(url) as store:
        yield await store.buffer("math", seed=SEED)


@pytest.fixture
def effort(engine_name: str) -> int:
    """Number of draws: all on SQLite, a quarter on PostgreSQL, which runs the same code."""
    return 4 if engine_name == "sqlite" else 1


def known(
    name: str, priority: float, level: int, label: int, task_name: str = "gsm8k"
) -> GroupSpec:
    return GroupSpec(name, task_name, priority, level, label)


def of_priority(priorities: list[float]) -> list[rdb.EpisodeGroup]:
    return [
        to_group(known(f"{i}", priority, 0, 0), policy_version=None)
        for i, priority in enumerate(priorities)
    ]


def far_apart() -> list[GroupSpec]:
    """Three groups of each magnitude, and one of weight 0."""
    several = [
        known(f"{priority:g}-{i}", priority * (1 + i), level, 3 * level + i)
        for level, priority in enumerate(MAGNITUDES)
        for i in range(3)
    ]
    return [*several, known("idle", 0.0, 0, 15)]


@postgresql_nightly
async def test_a_batch_that_takes_a_tiny_weight_leaves_no_trace(buffer: rdb.Buffer) -> None:
    """The clock then advances by 1e16, of which a double has no digits left for thirds."""
    priorities = [1.0, 1.0, 1.0, 1e-16]
    ids = await buffer.put(of_priority(priorities))
    counts = np.zeros(3)
    for _ in range(90):
        assert len(await buffer.sample(4, rdb.Prioritized())) == 4
        for _ in range(2):
            [one] = (await buffer.sample(1, rdb.Prioritized())).ids
            counts[ids.index(one)] += 1
    assert pearson(counts, priorities[:3]) > 0.001, counts


async def test_a_batch_that_takes_a_tiny_weight_rewrites_no_other(
    buffer: rdb.Buffer, url: str
) -> None:
    """Otherwise every such batch would rewrite all keys of the task."""
    heavy = await buffer.put(of_priority([1.0] * 3))
    await buffer.put([to_group(known(f"tiny-{i}", 1e-16, 0, 0)) for i in range(20)])
    keys = select(group.id, group.priority_key)
    async with transaction(url) as connection:
        before = dict((await connection.execute(keys)).all())
    for _ in range(3):
        batch = await buffer.sample(5, rdb.Prioritized())
        assert set(heavy) < set(batch.ids)
    async with transaction(url) as connection:
        after = dict((await connection.execute(keys)).all())
        clock = await connection.scalar(select(task.c.priority_clock))
    assert {one for one in before if after[one] != before[one]} == set(heavy)
    # Groups with later keys were not passed.
    assert clock == pytest.approx(3 * draws.MAX_CLOCK_ADVANCE / 3.0, rel=1e-6)
    assert all(key >= clock for key in after.values())


@pytest.mark.parametrize(
    "max_advance", [draws.MAX_CLOCK_ADVANCE, pytest.param(math.inf, marks=pytest.mark.nightly)]
)
@postgresql_nightly
async def test_batches_that_take_nearly_everything(
    buffer: rdb.Buffer, effort: int, max_advance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By full scans, which do not move the clock, and by index scans, after which it is shifted."""
    monkeypatch.setattr(draws, "MAX_CLOCK_ADVANCE", max_advance)
    model = SamplingModel(buffer, 16)
    await model.put(far_apart())
    for _ in range(15 * effort):
        await model.draw(1, 15, rdb.Prioritized())
        await model.draw(4, 2, rdb.Prioritized())
        await model.draw(1, 16, rdb.Prioritized())
        await model.draw(2, 8, rdb.Prioritized())
        await model.draw(1, 9, rdb.Prioritized(), level_below(3))
        await model.draw(2, 1, rdb.Prioritized())
        await model.draw(1, 3, rdb.Prioritized(), tagged(1))
        await model.draw(1, 3, rdb.Uniform())
    model.check()


@postgresql_nightly
async def test_index_scans_that_are_abandoned(
    buffer: rdb.Buffer, effort: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """About every other one ends at the key of a tiny weight, after all larger weights."""
    monkeypatch.setattr(draws, "KEYS_READ_PER_GROUP", 0)
    monkeypatch.setattr(draws, "KEYS_READ_AT_LEAST", 13)
    monkeypatch.setattr(draws, "MAX_CLOCK_ADVANCE", math.inf)
    model = SamplingModel(buffer, 16)
    await model.put(far_apart())
    tiny = Filter(rdb.col.group_uid == "1e-12-0", lambda known: known.uid == "1e-12-0")
    for _ in range(25 * effort):
        await model.draw(1, 1, rdb.Prioritized(), tiny)
        await model.draw(3, 2, rdb.Prioritized())
    model.check()


@postgresql_nightly
async def test_groups_are_put_and_deleted_between_draws(buffer: rdb.Buffer, effort: int) -> None:
    rng = np.random.default_rng(7)
    model = SamplingModel(buffer, 16)
    await model.put(far_apart())
    for step in range(12 * effort):
        await model.draw(1, 16, rdb.Prioritized())
        ids = rng.permutation(list(model.groups)).tolist()
        gone = [model.groups[one] for one in ids[:3]]
        await model.delete(ids[:3])
        await model.draw(1, 12, rdb.Prioritized())
        await model.prioritize({one: float(10.0 ** rng.integers(-12, 12)) for one in ids[3:6]})
        await model.draw(2, 1, rdb.Prioritized())
        await model.put([replace(one, uid=f"{one.label}-{step}") for one in gone])
        await model.draw(3, 1, rdb.Prioritized())
    model.check()


async def run_late(model: SamplingModel) -> None:
    """Advance the clock to about 1e20: small for tiny weights, large for others."""
    await model.draw(1, len(model.groups), rdb.Prioritized())


def heavy(step: int, priority: float = 1.0) -> list[GroupSpec]:
    return [known(f"heavy-{step}-{i}", priority, 1, i) for i in range(3)]


async def by_a_put(model: SamplingModel, step: int) -> None:
    await run_late(model)
    for one in heavy(step):
        await model.put([one])


async def by_a_nack(model: SamplingModel, step: int) -> None:
    several = heavy(step)
    ids = await model.buffer.put([to_group(one) for one in several])
    lease = await model.buffer.lease(3, where=tagged(1).where, ttl=600)
    await run_late(model)
    await lease.nack()
    model.groups |= dict(zip(ids, several, strict=True))


async def by_new_priorities(model: SamplingModel, step: int) -> None:
    await model.put(heavy(step, 1e-20))
    await run_late(model)
    ids = [one for one, known in model.groups.items() if known.level == 1]
    await model.prioritize(dict.fromkeys(ids, 1.0))


async def by_another_exponent(model: SamplingModel, step: int) -> None:
    await model.put(heavy(step, 1e-4))
    model.exponent = 5.0
    await model.buffer.update_settings(priority_exponent=model.exponent)
    await run_late(model)
    model.exponent = 1.0
    await model.buffer.update_settings(priority_exponent=model.exponent)


WAYS: list[Change] = [by_a_put, by_a_nack, by_new_priorities, by_another_exponent]


@pytest.mark.parametrize("appear", WAYS, ids=lambda way: way.__name__)
@postgresql_nightly
async def test_large_weights_put_at_a_large_clock_value(
    buffer: rdb.Buffer, effort: int, appear: Change
) -> None:
    model = SamplingModel(buffer, 4)
    await model.put([known(f"light-{i}", 1e-20, 0, 3) for i in range(4)])
    for step in range(12 * effort):
        await appear(model, step)
        await model.draw(4, 1, rdb.Prioritized())
        await model.delete([one for one, known in model.groups.items() if known.level == 1])
    model.check()


async def test_a_large_clock_value_with_small_keys_of_other_tasks(
    buffer: rdb.Buffer, url: str
) -> None:
    """Keys 1e-20 apart advance it too: a group behind many of them must not wait forever."""
    light = [known(f"light-{i}", 1.0, 0, 0, "light") for i in range(8)]
    await SamplingModel(buffer, 1).put([*light, known("heavy", 1e20, 0, 0, "heavy")])
    await buffer.sample({"light": 8}, rdb.Prioritized())
    batch = await buffer.sample(1, rdb.Prioritized())
    assert batch.groups[0].task_name == "heavy"
    async with transaction(url) as connection:
        rows = await connection.execute(select(task.c.task_name, task.c.priority_clock))
    clocks = {row.task_name: row.priority_clock for row in rows}
    assert 0.0 < clocks["light"] == clocks["heavy"] < 1e-18


@pytest.mark.parametrize("policy", [rdb.Uniform(), rdb.Prioritized()], ids=["uniform", "priority"])
async def test_an_old_clock_is_shifted_back_with_its_keys(
    buffer: rdb.Buffer, url: str, policy: rdb.Uniform | rdb.Prioritized
) -> None:
    """Also with keys of groups of weight 0."""
    await buffer.put(of_priority([1.0, 2.0, 3.0, 0.0]))
    order = order_of(policy)
    clock = task.c[f"{order.clock}_clock"]
    async with transaction(url) as connection:
        before = dict((await connection.execute(select(group.id, order.column))).all())
        await connection.execute(update(task).values({clock: 2.0**40}))
        await connection.execute(
            update(episode_group).values({order.column: order.column + 2.0**40})
        )
    batch = await buffer.sample(2, policy)
    async with transaction(url) as connection:
        time = await connection.scalar(select(clock))
        after = dict((await connection.execute(select(group.id, order.column))).all())
    assert time == pytest.approx(before[batch.ids[1]], rel=0.001)
    assert all(time <= key for key in after.values())
    left = set(before) - set(batch.ids)
    assert [after[one] for one in left] == pytest.approx([before[one] for one in left], rel=0.001)


async def test_sums_and_ratios_at_the_ends_of_the_range(buffer: rdb.Buffer) -> None:
    priorities = [1e150, 1e150, 1.0, 1.0, 1e-150, 0.0]
    ids = await buffer.put(of_priority(priorities))
    for _ in range(3):
        batch = await buffer.sample(6, rdb.Prioritized(beta=1.0))
        assert batch.ids[-2:] == ids[-2:]
        order = [ids.index(one) for one in batch.ids]
        chances = [priorities[i] / 2e150 for i in order]
        assert batch.probabilities.tolist() == pytest.approx(chances, rel=1e-6, abs=0.0)
        weights = [1e-150 / priorities[i] if priorities[i] else 1.0 for i in order]
        assert batch.weights.tolist() == pytest.approx(weights, rel=1e-9, abs=0.0)
    await buffer.delete(ids[:2])
    batch = await buffer.sample(2, rdb.Prioritized())
    assert batch.probabilities.tolist() == pytest.approx([0.5, 0.5])


TOO_FAR = [1e151, 1.7e308, 1e-151, 5e-324]


@pytest.mark.parametrize("priority", TOO_FAR)
async def test_weights_out_of_range_are_refused(buffer: rdb.Buffer, priority: float) -> None:
    first, second = await buffer.put(of_priority([1.0, 2.0]))
    with pytest.raises(rdb.InvalidInputError, match="priority: expected") as caught:
        await buffer.put(to_group(known("new", priority, 0, 0)))
    assert (caught.value.field, caught.value.actual) == ("priority", priority)
    with pytest.raises(rdb.InvalidInputError, match="priority_exponent=1"):
        await buffer.update_priorities([first, second], [3.0, priority])
    assert [one.priority for one in await buffer.get([first, second])] == [1.0, 2.0]
    await buffer.update_settings(priority_exponent=0.1)  # with it they all have a weight
    await buffer.update_priorities([first], [priority])
    batch = await buffer.sample(2, rdb.Prioritized())
    chances = {first: priority**0.1, second: 2.0**0.1}
    total = sum(chances.values())
    assert [chances[one] / total for one in batch.ids] == pytest.approx(batch.probabilities)
    with pytest.raises(rdb.InvalidSettingsError, match="priority_exponent=1"):
        await buffer.update_settings(priority_exponent=1.0)
    assert (await buffer.stats()).settings.priority_exponent == 0.1


async def test_probabilities_after_a_large_weight_was_drawn(buffer: rdb.Buffer) -> None:
    """A sum of 1e18 has no digits for the small weights that remain."""
    await buffer.put(of_priority([1e18, 1.0, 2.0, 4.0]))
    mix = rdb.Mix([rdb.Share(1, rdb.TopPriority()), rdb.Share(3, rdb.Prioritized())])
    async with buffer.lease(4, mix, ttl=60) as lease:
        weights = [one.priority for one in lease.batch.groups[1:]]
        chances = [weight / 7.0 for weight in weights]
        assert lease.batch.probabilities[1:].tolist() == pytest.approx(chances)
