"""Metrics for loggers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text

from replaydb import Buffer, DatabaseUnavailableError, Fifo, GroupStatus, Lifo, Store
from replaydb.database.runtime import transactions
from replaydb.database.statements.statistics import STALENESS_BINS
from support.clock import Clock
from support.connections import transaction
from support.groups import episode, group, groups
from support.postgres import PostgresServer


async def test_an_empty_buffer(buffer: Buffer) -> None:
    found = await buffer.metrics()
    assert all(type(number) is float for number in found.values())
    assert found["gen/groups"] == found["buffer/groups"] == found["train/groups"] == 0
    assert "train/reward_mean" not in found
    assert "buffer/wait_mean" not in found


async def test_metrics_of_generated_stored_replayed_and_trained_groups(buffer: Buffer) -> None:
    await buffer.put(
        [
            group("a", rewards=[1.0, 0.0], version=0),
            group("b", rewards=[1.0, 1.0], version=0),
            group("c", "code", rewards=[0.0, 0.5], version=0),
            group("d", "code", status=GroupStatus.FILTERED, rewards=[0.0], version=0),
        ]
    )
    await buffer.advance_policy(2)
    await buffer.sample(2, Fifo())  # a and b
    await buffer.sample(2, Lifo())  # c and b again
    found = await buffer.metrics()
    expected = {
        "gen/groups": 4,
        "gen/recent_groups": 0,
        "buffer/groups": 4,
        "buffer/episodes": 7,
        "buffer/tokens": 35,
        "buffer/dropped": 1,
        "buffer/deleted": 0,
        "buffer/unsampled": 0,
        "buffer/starved_tasks": 0,
        "buffer/policy_version": 2,
        "buffer/staleness_mean": 2,
        "buffer/staleness_max": 2,
        "buffer/staleness/2": 3,
        "buffer/staleness/1": 0,
        "buffer/status/completed": 3,
        "buffer/status/filtered": 1,
        "buffer/status/leased": 0,
        "buffer/task/gsm8k/completed": 2,
        "buffer/task/code/filtered": 1,
        "buffer/reward_mean": (0.5 + 1.0 + 0.25) / 3,
        "replay/groups": 1,
        "replay/share": 0.25,
        "replay/samples_per_insert": 1,
        "replay/reward_mean": 1.0,
        "replay/staleness_mean": 2,
        "train/draws": 2,
        "train/drawn": 4,
        "gen/task/gsm8k": 2,
        "gen/task/code": 2,
        "train/task/gsm8k": 3,
        "train/task/code": 1,
        "train/groups": 4,
        "train/tokens": 40,
        "train/unique": 0.75,
        "train/reward_mean": (0.5 + 1.0 + 0.25 + 1.0) / 4,
        "train/reward_std": (0.5 + 0.0 + 0.25 + 0.0) / 4,
        "train/staleness_mean": 2,
        "train/staleness_max": 2,
        "train/staleness/2": 4,
    }
    assert {name: found.get(name) for name in expected} == pytest.approx(expected)
    assert found["buffer/bytes"] > 0


async def test_only_the_last_draws_count_as_recent(buffer: Buffer) -> None:
    await buffer.put(group("a", rewards=[0.0, 0.0]))
    await buffer.sample(1)
    await buffer.put([group("b", rewards=[1.0, 0.0]), group("c", rewards=[1.0, 1.0])])
    await buffer.sample(3)
    found = await buffer.metrics(draws=1)
    assert (found["train/draws"], found["train/groups"]) == (1, 3)
    assert found["replay/groups"] == 1
    assert found["gen/recent_groups"] == 0
    await buffer.put(group("d", rewards=[0.0, 0.5, 1.0]))
    await buffer.put([group("e", rewards=[1.0, 1.0]), group("f", rewards=[0.5, 0.5])])
    found = await buffer.metrics(draws=1)
    assert found["gen/recent_groups"] == 3
    assert found["gen/reward_mean"] == pytest.approx(2 / 3)
    assert found["gen/reward_std"] == pytest.approx((1 / 6) ** 0.5 / 3)
    assert found["gen/uninformative"] == pytest.approx(2 / 3)
    whole = await buffer.metrics(draws=2)
    assert whole["train/groups"] == 4
    assert whole["gen/recent_groups"] == 5


async def test_without_draws_everything_is_recent(buffer: Buffer) -> None:
    await buffer.put(groups(3))
    assert (await buffer.metrics())["gen/recent_groups"] == 3


async def test_times(buffer: Buffer, clock: Clock) -> None:
    await buffer.put(group("a"))
    clock.jump(1000)
    await buffer.put(group("b"))
    await buffer.sample(2)
    found = await buffer.metrics()
    for name, seconds in {
        "wait_max": 1000,
        "wait_mean": 500,
        "age_max": 1000,
        "age_mean": 500,
    }.items():
        assert found[f"buffer/{name}"] == pytest.approx(seconds, abs=5)


async def test_waiting_is_from_completion_to_the_first_draw(buffer: Buffer, clock: Clock) -> None:
    await buffer.open_group("gsm8k", "slow", 1)
    clock.jump(1000)
    await buffer.add_episode("slow", episode())
    await buffer.sample(1)
    clock.jump(1000)
    await buffer.sample(1)
    found = await buffer.metrics()
    assert found["buffer/age_max"] == pytest.approx(2000, abs=5)
    assert found["buffer/wait_max"] == pytest.approx(0, abs=5)


async def test_starved_tasks_and_deleted_groups(buffer: Buffer) -> None:
    ids = await buffer.put([*groups(2), *groups(1, "code")])
    await buffer.delete(ids[2:])
    lease = await buffer.lease(1, ttl=60)
    found = await buffer.metrics()
    assert found["buffer/starved_tasks"] == 1
    assert found["buffer/deleted"] == 1
    assert found["buffer/status/leased"] == 1
    await lease.ack()
    assert (await buffer.metrics())["buffer/groups"] == 1


async def test_leased_and_released_groups_are_not_trained(buffer: Buffer) -> None:
    async def trained() -> tuple[float, ...]:
        found = await buffer.metrics()
        return tuple(found[name] for name in ("train/draws", "train/groups", "replay/groups"))

    await buffer.put(groups(2))
    async with buffer.lease(1, ttl=60):
        pass
    await (await buffer.lease(1, ttl=60)).nack()
    taken = await buffer.lease(1, ttl=60)
    assert await trained() == (1, 1, 0)
    await taken.nack()
    await buffer.sample(1)
    assert await trained() == (2, 2, 0)
    await buffer.sample(1)
    assert await trained() == (3, 3, 1)
    await buffer.delete((await buffer.draws())[0].group_ids)
    found = await buffer.metrics()
    assert found["train/deleted"] == found["replay/deleted"] + 1 == 2


async def test_every_staleness_has_a_bin(buffer: Buffer) -> None:
    await buffer.advance_policy(40)
    ages = [-3, 0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 40]
    await buffer.put([group(f"g{age}", version=40 - age) for age in ages])
    await buffer.sample(len(ages))
    found = await buffer.metrics()
    expected = [1, 1, 1, 1, 2, 2, 2, 2]
    for prefix in ("buffer", "train"):
        bins = [found[f"{prefix}/staleness/{name}"] for name, *_ in STALENESS_BINS]
        assert bins == expected


async def test_buffers_do_not_mix(buffer: Buffer, store: object) -> None:
    other = await store.buffer("other")  # type: ignore[attr-defined]
    await buffer.put(groups(2))
    await buffer.sample(1)
    found = await other.metrics()
    assert found["gen/groups"] == found["train/groups"] == found["buffer/groups"] == 0


async def test_every_name_is_documented(buffer: Buffer) -> None:
    await buffer.put(groups(2, version=0))
    await buffer.sample(2)
    await buffer.sample(2)
    await buffer.put(groups(1, "later"))
    text = (Path(__file__).parents[3] / "docs" / "training.md").read_text(encoding="utf8")
    documented = set(re.findall(r"`((?:gen|buffer|replay|train)/[^`]+)`", text))
    found = await buffer.metrics()
    shown = {
        re.sub(r"(?<=/staleness/).*", "<bin>", re.sub(r"(?<=/status/).*", "<status>", name))
        for name in found
    }
    shown = {re.sub(r"(?<=^buffer/task/).*", "<task>/<status>", name) for name in shown}
    shown = {re.sub(r"^(gen|train)/task/.*", r"\1/task/<task>", name) for name in shown}
    assert shown == documented
    for name, *_ in STALENESS_BINS:
        assert f"`{name}`" in text


async def test_sums_over_large_buffers_are_computed_in_time(
    postgresql_url: str, postgres: PostgresServer, pass_time: Callable[[float], None]
) -> None:
    """A lock stands in for a scan of millions of rows, which takes longer than other calls may."""
    async with Store.open(postgresql_url) as store:
        buffer = await store.buffer("math")
        await buffer.put(groups(3))
        async with transaction(postgresql_url) as connection:
            await connection.execute(text("LOCK TABLE episode_group"))
            sums = asyncio.gather(buffer.count(), buffer.stats(), buffer.metrics())
            ordinary = asyncio.create_task(buffer.stats(totals=False))
            await postgres.until_blocked(postgresql_url, 4)
            pass_time(2 * transactions.PATIENCE_SECONDS)
            with pytest.raises(DatabaseUnavailableError):
                await ordinary
            assert not sums.done()
        count, stats, metrics = await sums
        assert count == stats.totals[0].num_groups == metrics["buffer/groups"] == 3
