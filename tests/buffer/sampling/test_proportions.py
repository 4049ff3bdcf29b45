"""`Uniform` and `Prioritized` draw in exact proportion, whatever else happens to the buffer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

import replaydb as rdb
from replaydb.database.repository import draws
from support.engines import postgresql_nightly
from support.tally import Tally
from support.world import EVERYTHING, Filter, Known, World, draw_often, level_below, request, tagged

POLICIES = [rdb.Uniform(), rdb.Prioritized()]
SEED = 20_260_115


@pytest.fixture(params=POLICIES, ids=["uniform", "prioritized"])
def policy(request: pytest.FixtureRequest) -> rdb.Uniform | rdb.Prioritized:
    chosen: rdb.Uniform | rdb.Prioritized = request.param
    return chosen


@pytest.fixture
async def buffer(url: str) -> AsyncIterator[rdb.Buffer]:
    async with rdb.Store.open(url) as store:
        yield await store.buffer("math", seed=SEED, priority_exponent=0.7)


@pytest.fixture
async def sqlite_buffer(sqlite_url: str) -> AsyncIterator[rdb.Buffer]:
    """For what the engine has no part in: the draws of both are the same (`test_seeds.py`)."""
    async with rdb.Store.open(sqlite_url) as store:
        yield await store.buffer("math", seed=SEED, priority_exponent=0.7)


@pytest.fixture
def effort(engine_name: str) -> int:
    """How much is drawn: all of it on SQLite, a quarter on PostgreSQL, which runs the same code."""
    return 4 if engine_name == "sqlite" else 1


def groups(count: int, task: str = "gsm8k", first: int = 0) -> list[Known]:
    """Priorities from 0.1 to 10, levels 0 to 9; every group has its own label."""
    rng = np.random.default_rng(first)
    return [
        Known(f"{task}-{first + i}", task, float(10 ** rng.uniform(-1, 1)), i % 10, first + i)
        for i in range(count)
    ]


async def world_of(buffer: rdb.Buffer, several: list[Known]) -> World:
    world = World(buffer, max(known.label for known in several) + 1, exponent=0.7)
    await world.put(several)
    return world


@postgresql_nightly
async def test_plain_draws(buffer: rdb.Buffer, policy: rdb.Uniform | rdb.Prioritized) -> None:
    world = await world_of(buffer, groups(60))
    await world.draw(700, 30, policy)
    assert world.by_label.num_draws == 21_000
    world.check()


@postgresql_nightly
async def test_plain_draws_one_by_one(
    buffer: rdb.Buffer, policy: rdb.Uniform | rdb.Prioritized, effort: int
) -> None:
    world = await world_of(buffer, groups(10))
    await world.draw(400 * effort, 1, policy)
    world.check()


@postgresql_nightly
async def test_filters_that_change_from_draw_to_draw(
    buffer: rdb.Buffer, policy: rdb.Uniform | rdb.Prioritized, effort: int
) -> None:
    """Half, a tenth and all are eligible in turn; every draw is a walk that thins."""
    world = await world_of(buffer, groups(80))
    for _ in range(20 * effort):
        await world.draw(2, 15, policy, level_below(5))
        await world.draw(1, 6, policy, tagged(9))
        await world.draw(2, 40, policy)
        await world.draw(1, 6, policy, tagged(2))
    world.check()


@pytest.mark.parametrize("walk", [16, pytest.param(0, marks=pytest.mark.nightly)])
async def test_rare_filters_that_fall_back_to_a_scan(
    sqlite_buffer: rdb.Buffer,
    policy: rdb.Uniform | rdb.Prioritized,
    walk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether a walk is given up depends on stored arrivals, which must not show afterwards.

    With a walk of 16 rows about half of the filtered draws are scans.
    """
    monkeypatch.setattr(draws, "WALK_PER_GROUP", 0)
    monkeypatch.setattr(draws, "WALK_AT_LEAST", walk)
    world = await world_of(sqlite_buffer, groups(50))
    for _ in range(400):
        await world.draw(1, 2, policy, tagged(4))
        await world.draw(1, 23, policy)
    assert world.by_label.num_draws >= 10_000
    world.check()


@postgresql_nightly
async def test_a_rare_filter_at_the_usual_limits(url: str, effort: int) -> None:
    """Walks of 200 rows for 12 of 50 eligible groups among 800: either way of drawing comes up."""
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("math", seed=SEED)
        several = [
            Known(f"group-{i}", "gsm8k", 1.0, 1 if i % 16 == 0 else 0, 1 if i % 16 == 0 else 0)
            for i in range(800)
        ]
        world = await world_of(buffer, several)
        for _ in range(20 * effort):
            await world.draw(1, 12, rdb.Uniform(), tagged(1))
            await world.draw(1, 240, rdb.Uniform())
        world.check()


@postgresql_nightly
async def test_groups_that_come_and_go(
    buffer: rdb.Buffer, policy: rdb.Uniform | rdb.Prioritized, effort: int
) -> None:
    """Groups are put, deleted and given new priorities between draws, a core of 30 is not.

    Guests are labelled by what came last, a put or an update, and whether to a high priority: how
    long they wait then is to follow from it at once.
    """
    rng = np.random.default_rng(5)
    core = groups(30)
    world = World(buffer, 34, exponent=0.7)
    await world.put(core)
    guests = [Known(f"guest-{i}", "gsm8k", 1.0, i % 10, 30) for i in range(30)]
    await world.put(guests)
    for step in range(20 * effort):
        await world.draw(4, 16, policy)
        await world.draw(3, 4, policy, level_below(3))
        await world.draw(3, 16, policy)
        visiting = [one for one, known in world.groups.items() if known.label >= 30]
        chosen = rng.choice(visiting, 15, replace=False).tolist()
        await world.delete(chosen[:5])
        priorities = {one: float(rng.choice([0.1, 8.0])) for one in chosen[5:]}
        await world.prioritize(priorities)
        for one, priority in priorities.items():
            world.groups[one] = replace(world.groups[one], label=32 + (priority > 1.0))
        newcomers = [
            Known(f"guest-{step}-{i}", "gsm8k", priority, i, 30 + (priority > 1.0))
            for i, priority in enumerate(rng.choice([0.2, 5.0], 5).tolist())
        ]
        await world.put(newcomers)
    world.check()


@pytest.mark.parametrize("n", [1, 6])
@postgresql_nightly
async def test_several_very_uneven_tasks_together(
    buffer: rdb.Buffer, policy: rdb.Uniform | rdb.Prioritized, n: int, effort: int
) -> None:
    """Draws over all tasks, over some and over one in turn, with and without a filter."""
    several = groups(1, "rare", 0) + groups(7, "code", 1) + groups(60, "math", 8)
    world = await world_of(buffer, several)
    for _ in range(10 * effort):
        await world.draw(6, n, policy)
        await world.draw(2, n, policy, tasks=frozenset({"math"}))
        await world.draw(4, n, policy, level_below(4))
        await world.draw(2, n, policy, tasks=frozenset({"rare", "code"}))
        await world.draw(4, n, policy, tasks=frozenset({"code", "math"}))
    world.check()


async def test_tasks_without_arrivals_in_a_draw(sqlite_buffer: rdb.Buffer) -> None:
    """A light task waits long: the draws that pass it by must bring its turn nearer."""
    heavy = [Known(f"heavy-{i}", "heavy", 10.0, 0, 0) for i in range(30)]
    light = [Known(f"light-{i}", "light", 1.0, 0, 1) for i in range(10)]
    world = World(sqlite_buffer, 2, exponent=0.7)
    await world.put(heavy + light)
    await world.draw(1200, 4, rdb.Prioritized())
    world.check()


@postgresql_nightly
async def test_quotas_draw_each_task_in_proportion(
    buffer: rdb.Buffer, policy: rdb.Uniform | rdb.Prioritized, effort: int
) -> None:
    world = await world_of(buffer, groups(20, "code") + groups(30, "math", 20))
    tallies = {"code": Tally(50), "math": Tally(50)}
    wanted = request({"code": 5, "math": 3}, policy)
    labels = {one: known.label for one, known in world.groups.items()}
    power = 0.7 if isinstance(policy, rdb.Prioritized) else 0.0
    weights = {
        task: {one: k.priority**power for one, k in world.groups.items() if k.task == task}
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
    idle = [Known(f"idle-{i}", "gsm8k", 0.0, i, 0) for i in range(10)]
    world = World(buffer, 41, exponent=0.7)
    await world.put(idle + groups(40, first=1))
    await world.draw(60 * effort, 4, rdb.Prioritized(), condition)
    world.check()
    eligible = [known for known in world.groups.values() if condition.holds(known)]
    positive = sum(known.priority > 0 for known in eligible)
    for drawn in await draw_often(
        buffer, request(len(eligible), rdb.Prioritized(), where=condition.where), 20
    ):
        priorities = [world.groups[one].priority for one in drawn.ids]
        assert all(priorities[:positive])
        assert not any(priorities[positive:])
    world._past = {}
    await world.draw(60 * effort, 4, rdb.Prioritized(), condition)
    world.check()
