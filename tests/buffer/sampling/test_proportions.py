"""`Uniform` and `Prioritized` draw in exact proportion, whatever else changes in the buffer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

import replaydb as rdb
from replaydb.database.repository import draws
from support.draw_frequencies import DrawFrequencies
from support.engines import postgresql_nightly
from support.sampling_model import (
    EVERYTHING,
    Filter,
    GroupSpec,
    SamplingModel,
    draw_often,
    level_below,
    request,
    tagged,
)

POLICIES = [rdb.Uniform(), rdb.Prioritized()]
SEED = 20_260_115


def with_policy(chosen: rdb.Uniform | rdb.Prioritized) -> pytest.MarkDecorator:
    """Draw with this policy in `make test`. Both run the same code, on other columns."""
    return pytest.mark.parametrize(
        "policy",
        [it if it == chosen else pytest.param(it, marks=pytest.mark.nightly) for it in POLICIES],
        ids=["uniform", "prioritized"],
    )


@pytest.fixture
async def buffer(url: str) -> AsyncIterator[rdb.Buffer]:
    async with rdb.Store.open(url) as store:
        yield await store.buffer("math", seed=SEED, priority_exponent=0.7)


@pytest.fixture
async def sqlite_buffer(sqlite_url: str) -> AsyncIterator[rdb.Buffer]:
    """For tests that do not depend on the engine: both draw the same (`test_seeds.py`)."""
    async with rdb.Store.open(sqlite_url) as store:
        yield await store.buffer("math", seed=SEED, priority_exponent=0.7)


@pytest.fixture
def effort(engine_name: str) -> int:
    """Number of draws: all on SQLite, a quarter on PostgreSQL, which runs the same code."""
    return 4 if engine_name == "sqlite" else 1


def groups(count: int, task: str = "gsm8k", first: int = 0) -> list[GroupSpec]:
    """Groups with priorities from 0.1 to 10, levels 0 to 9, and a label of their own each."""
    rng = np.random.default_rng(first)
    return [
        GroupSpec(f"{task}-{first + i}", task, float(10 ** rng.uniform(-1, 1)), i % 10, first + i)
        for i in range(count)
    ]


async def world_of(buffer: rdb.Buffer, several: list[GroupSpec]) -> SamplingModel:
    model = SamplingModel(buffer, max(known.label for known in several) + 1, exponent=0.7)
    await model.put(several)
    return model


@with_policy(rdb.Prioritized())
@postgresql_nightly
async def test_plain_draws(buffer: rdb.Buffer, policy: rdb.Uniform | rdb.Prioritized) -> None:
    model = await world_of(buffer, groups(60))
    await model.draw(700, 30, policy)
    assert model.by_label.num_draws == 21_000
    model.check()


@with_policy(rdb.Uniform())
@postgresql_nightly
async def test_plain_draws_one_by_one(
    buffer: rdb.Buffer, policy: rdb.Uniform | rdb.Prioritized, effort: int
) -> None:
    model = await world_of(buffer, groups(10))
    await model.draw(400 * effort, 1, policy)
    model.check()


@with_policy(rdb.Uniform())
@postgresql_nightly
async def test_filters_that_change_from_draw_to_draw(
    buffer: rdb.Buffer, policy: rdb.Uniform | rdb.Prioritized, effort: int
) -> None:
    """Half, a tenth and all are eligible in turn; every draw is an index scan that skips groups."""
    model = await world_of(buffer, groups(80))
    for _ in range(20 * effort):
        await model.draw(2, 15, policy, level_below(5))
        await model.draw(1, 6, policy, tagged(9))
        await model.draw(2, 40, policy)
        await model.draw(1, 6, policy, tagged(2))
    model.check()


@with_policy(rdb.Uniform())
@pytest.mark.parametrize("walk", [16, pytest.param(0, marks=pytest.mark.nightly)])
async def test_rare_filters_that_fall_back_to_a_scan(
    sqlite_buffer: rdb.Buffer,
    policy: rdb.Uniform | rdb.Prioritized,
    walk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether an index scan is abandoned depends on stored keys, which must not bias later draws.

    With index scans of 16 rows, about half of the filtered draws are full scans.
    """
    monkeypatch.setattr(draws, "KEYS_READ_PER_GROUP", 0)
    monkeypatch.setattr(draws, "KEYS_READ_AT_LEAST", walk)
    model = await world_of(sqlite_buffer, groups(50))
    for _ in range(400):
        await model.draw(1, 2, policy, tagged(4))
        await model.draw(1, 23, policy)
    assert model.by_label.num_draws >= 10_000
    model.check()


@pytest.mark.nightly
@with_policy(rdb.Prioritized())
async def test_filters_evaluated_before_the_locks(
    sqlite_buffer: rdb.Buffer,
    policy: rdb.Uniform | rdb.Prioritized,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """About half of the filtered draws are rolled back, which must not keep the keys they read."""
    monkeypatch.setattr(draws, "MOST_SCANNED", 0)
    monkeypatch.setattr(draws, "KEYS_READ_PER_GROUP", 0)
    monkeypatch.setattr(draws, "KEYS_READ_AT_LEAST", 16)
    model = await world_of(sqlite_buffer, groups(50))
    for _ in range(400):
        await model.draw(1, 2, policy, tagged(4))
        await model.draw(1, 23, policy)
    model.check()


@pytest.mark.nightly
async def test_a_rare_filter_at_the_usual_limits(url: str, effort: int) -> None:
    """Index scans of 200 rows for 12 of 50 eligible groups among 800: both kinds of scan occur."""
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("math", seed=SEED)
        several = [
            GroupSpec(f"group-{i}", "gsm8k", 1.0, 1 if i % 16 == 0 else 0, 1 if i % 16 == 0 else 0)
            for i in range(800)
        ]
        model = await world_of(buffer, several)
        for _ in range(20 * effort):
            await model.draw(1, 12, rdb.Uniform(), tagged(1))
            await model.draw(1, 240, rdb.Uniform())
        model.check()


@with_policy(rdb.Prioritized())
@postgresql_nightly
async def test_groups_are_put_deleted_and_updated_between_draws(
    buffer: rdb.Buffer, policy: rdb.Uniform | rdb.Prioritized, effort: int
) -> None:
    """A core of 30 groups stays unchanged.

    Other groups are labelled by their last change, a put or an update, and whether to a high
    priority: their time until the next draw must follow from it at once.
    """
    rng = np.random.default_rng(5)
    core = groups(30)
    model = SamplingModel(buffer, 34, exponent=0.7)
    await model.put(core)
    guests = [GroupSpec(f"guest-{i}", "gsm8k", 1.0, i % 10, 30) for i in range(30)]
    await model.put(guests)
    for step in range(20 * effort):
        await model.draw(4, 16, policy)
        await model.draw(3, 4, policy, level_below(3))
        await model.draw(3, 16, policy)
        visiting = [one for one, known in model.groups.items() if known.label >= 30]
        chosen = rng.choice(visiting, 15, replace=False).tolist()
        await model.delete(chosen[:5])
        priorities = {one: float(rng.choice([0.1, 8.0])) for one in chosen[5:]}
        await model.prioritize(priorities)
        for one, priority in priorities.items():
            model.groups[one] = replace(model.groups[one], label=32 + (priority > 1.0))
        newcomers = [
            GroupSpec(f"guest-{step}-{i}", "gsm8k", priority, i, 30 + (priority > 1.0))
            for i, priority in enumerate(rng.choice([0.2, 5.0], 5).tolist())
        ]
        await model.put(newcomers)
    model.check()


@pytest.mark.parametrize(
    ("policy", "n"),
    [
        (rdb.Uniform(), 1),
        (rdb.Prioritized(), 6),
        pytest.param(rdb.Prioritized(), 1, marks=pytest.mark.nightly),
        pytest.param(rdb.Uniform(), 6, marks=pytest.mark.nightly),
    ],
    ids=["uniform-1", "prioritized-6", "prioritized-1", "uniform-6"],
)
@postgresql_nightly
async def test_several_very_uneven_tasks_together(
    buffer: rdb.Buffer, policy: rdb.Uniform | rdb.Prioritized, n: int, effort: int
) -> None:
    """Draws over all tasks, over some and over one in turn, with and without a filter."""
    several = groups(1, "rare", 0) + groups(7, "code", 1) + groups(60, "math", 8)
    model = await world_of(buffer, several)
    for _ in range(10 * effort):
        await model.draw(6, n, policy)
        await model.draw(2, n, policy, tasks=frozenset({"math"}))
        await model.draw(4, n, policy, level_below(4))
        await model.draw(2, n, policy, tasks=frozenset({"rare", "code"}))
        await model.draw(4, n, policy, tasks=frozenset({"code", "math"}))
    model.check()


async def test_tasks_without_groups_in_a_draw(sqlite_buffer: rdb.Buffer) -> None:
    """A light task waits long: draws that take none of its groups must advance its clock."""
    heavy = [GroupSpec(f"heavy-{i}", "heavy", 10.0, 0, 0) for i in range(30)]
    light = [GroupSpec(f"light-{i}", "light", 1.0, 0, 1) for i in range(10)]
    model = SamplingModel(sqlite_buffer, 2, exponent=0.7)
    await model.put(heavy + light)
    await model.draw(1200, 4, rdb.Prioritized())
    model.check()


@with_policy(rdb.Prioritized())
@postgresql_nightly
async def test_quotas_draw_each_task_in_proportion(
    buffer: rdb.Buffer, policy: rdb.Uniform | rdb.Prioritized, effort: int
) -> None:
    model = await world_of(buffer, groups(20, "code") + groups(30, "math", 20))
    tallies = {"code": DrawFrequencies(50), "math": DrawFrequencies(50)}
    wanted = request({"code": 5, "math": 3}, policy)
    labels = {one: known.label for one, known in model.groups.items()}
    power = 0.7 if isinstance(policy, rdb.Prioritized) else 0.0
    weights = {
        task: {one: k.priority**power for one, k in model.groups.items() if k.task == task}
        for task in tallies
    }
    for drawn in await draw_often(buffer, wanted, 100 * effort):
        for task, ids in (("code", drawn.ids[:5]), ("math", drawn.ids[5:])):
            tallies[task].add(ids, weights[task], labels)
    assert min(tally.p_value() for tally in tallies.values()) > 0.001


@pytest.mark.parametrize("condition", [EVERYTHING, level_below(6)], ids=["all", "filtered"])
@postgresql_nightly
async def test_weight_zero_comes_only_when_nothing_else_is_left(
    buffer: rdb.Buffer, condition: Filter, effort: int
) -> None:
    idle = [GroupSpec(f"idle-{i}", "gsm8k", 0.0, i, 0) for i in range(10)]
    model = SamplingModel(buffer, 41, exponent=0.7)
    await model.put(idle + groups(40, first=1))
    await model.draw(60 * effort, 4, rdb.Prioritized(), condition)
    model.check()
    eligible = [known for known in model.groups.values() if condition.holds(known)]
    positive = sum(known.priority > 0 for known in eligible)
    for drawn in await draw_often(
        buffer, request(len(eligible), rdb.Prioritized(), where=condition.where), 20
    ):
        priorities = [model.groups[one].priority for one in drawn.ids]
        assert all(priorities[:positive])
        assert not any(priorities[positive:])
    model._past = {}
    await model.draw(60 * effort, 4, rdb.Prioritized(), condition)
    model.check()
