"""Replacing zero-variance groups by replay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sqlalchemy import update

from replaydb import (
    Buffer,
    Capacity,
    ConsumedGroupError,
    DuplicateGroupError,
    EpisodeGroup,
    Fifo,
    GroupStatus,
    InvalidInputError,
    Prioritized,
    Store,
    TopPriority,
    col,
)
from replaydb.database.tables.schema import payload
from replaydb.training import priorities, replace_uninformative
from support.connections import transaction
from support.groups import group, groups

EQUAL = [0.1, 0.1, 0.1]


def fresh() -> list[EpisodeGroup]:
    """Informative groups first and last, and two zero-variance groups between them."""
    return [
        group("first"),
        group("equal", rewards=EQUAL, tags={"level": 3}),
        group("unrewarded", rewards=[None]),
        group("last", rewards=[0.5, 0.25]),
    ]


async def test_stored_groups_replace_zero_variance_groups(buffer: Buffer) -> None:
    stored = await buffer.put(groups(3, "code"))
    done = await replace_uninformative(fresh(), buffer, Fifo(), step=7)
    assert [one.group_uid for one in done.batch.groups] == ["first", "code-0", "code-1", "last"]
    assert done.replayed_ids == stored[:2]
    assert done.num_missing == 0
    assert [one.group_uid for one in await buffer.get(done.fresh_ids)] == ["first", "last"]
    filtered = await buffer.get(done.filtered_ids)
    assert [one.group_uid for one in filtered] == ["equal", "unrewarded"]
    assert all(one.status is GroupStatus.FILTERED for one in filtered)
    assert filtered[0].tags == {"level": 3, "filtered": "rewards within 1e-06 of each other"}
    (draw,) = await buffer.draws()
    assert draw.step == 7
    assert draw.id == done.batch.draw_id
    assert sorted(draw.group_ids) == sorted(done.batch.ids)


async def test_an_empty_buffer_leaves_groups_missing(buffer: Buffer) -> None:
    done = await replace_uninformative(fresh(), buffer)
    assert [one.group_uid for one in done.batch.groups] == ["first", "last"]
    assert (done.replayed_ids, done.num_missing) == ([], 2)


async def test_no_informative_groups(buffer: Buffer) -> None:
    done = await replace_uninformative([group(rewards=EQUAL)], buffer)
    assert len(done.batch) == 0
    assert done.num_missing == 1
    assert len(done.filtered_ids) == 1
    nothing = await replace_uninformative([], buffer)
    assert (len(nothing.batch), nothing.num_missing) == (0, 0)


async def test_too_few_stored_groups_replace_the_first_ones(buffer: Buffer) -> None:
    await buffer.put(group("old"))
    done = await replace_uninformative(fresh(), buffer, Prioritized())
    assert [one.group_uid for one in done.batch.groups] == ["first", "old", "last"]
    assert (done.missing, done.num_missing) == ([2], 1)


async def test_uninformative_and_fresh_groups_replace_nothing(buffer: Buffer) -> None:
    """Even if a fresh group has by far the highest priority."""
    await buffer.put([group("flat", rewards=EQUAL, priority=99.0), group("old")])
    several = [group("fresh", priority=99.0), group("equal", rewards=EQUAL)]
    done = await replace_uninformative(several, buffer, TopPriority())
    assert [one.group_uid for one in done.batch.groups] == ["fresh", "old"]


async def test_filters_of_replay(buffer: Buffer) -> None:
    await buffer.advance_policy(5)
    await buffer.put([group("a", version=1), group("b", version=4), group("c", "code", version=5)])
    several = [group("fresh", version=5), group("equal", version=5, rewards=EQUAL)]
    done = await replace_uninformative(
        several, buffer, Fifo(), max_staleness=2, where=col.task_name == "gsm8k"
    )
    assert [one.group_uid for one in done.batch.groups] == ["fresh", "b"]


async def test_the_caller_defines_informative(buffer: Buffer) -> None:
    """Here: half-solved fresh groups, and hard stored groups with equal rewards."""
    hard = group("hard", rewards=EQUAL, tags={"level": 3})
    await buffer.put([group("easy", tags={"level": 1}), hard])
    several = [group("all", rewards=[1.0, 0.9]), group("half", rewards=[1.0, 0.0])]
    done = await replace_uninformative(
        several,
        buffer,
        Fifo(),
        informative=lambda one: np.mean(one.rewards) < 0.9,
        where=col.tags["level"] > 2,
    )
    assert [one.group_uid for one in done.batch.groups] == ["hard", "half"]
    [filtered] = await buffer.get(done.filtered_ids)
    assert filtered.tags == {"filtered": "uninformative"}
    assert several[0].tags == {}


async def test_a_verdict_that_is_not_a_bool_stores_nothing(buffer: Buffer) -> None:
    wrong: Any = lambda one: one.reward_std  # noqa: E731
    with pytest.raises(InvalidInputError) as caught:
        await replace_uninformative(fresh(), buffer, informative=wrong)
    assert caught.value.field == "informative(groups[0])"
    assert await buffer.count() == 0


async def test_priorities_of_stored_groups(buffer: Buffer) -> None:
    done = await replace_uninformative(fresh(), buffer, priority=priorities.reward_std)
    found = await buffer.get([*done.fresh_ids, *done.filtered_ids])
    assert [one.priority for one in found] == [0.5, 0.125, 0.0, 0.0]


async def test_a_duplicate_stores_nothing(buffer: Buffer) -> None:
    await buffer.put(group("first"))
    with pytest.raises(DuplicateGroupError):
        await replace_uninformative(fresh(), buffer)
    assert await buffer.count() == 1


async def test_a_repeated_step_replaces_its_stored_groups(buffer: Buffer) -> None:
    """The trainer resumed from a checkpoint, and new generations may be informative or not."""
    stored = [
        group("first", rewards=EQUAL, status="filtered"),
        group("equal", rewards=[0.0, 1.0]),
        group("old"),
    ]
    first, equal, old = await buffer.put(stored)
    done = await replace_uninformative(fresh(), buffer, Fifo(), on_duplicate="replace")
    assert [one.group_uid for one in done.batch.groups] == ["first", "old", "last"]
    assert (done.replayed_ids, done.missing) == ([old], [2])
    assert done.fresh_ids[0] == first
    assert done.filtered_ids[0] == equal
    assert await buffer.count() == 5
    assert (await buffer.find(uids="equal"))[0].reward_max == EQUAL[0]


async def test_a_repeated_step_whose_groups_were_consumed(store: Store) -> None:
    buffer = await store.buffer("once", max_times_sampled=1)
    first = await replace_uninformative(fresh(), buffer, Fifo(), step=3)
    with pytest.raises(ConsumedGroupError):
        await replace_uninformative(fresh(), buffer, Fifo(), on_duplicate="replace", step=3)
    again = await replace_uninformative(fresh(), buffer, Fifo(), on_duplicate="renew", step=3)
    assert len(again.fresh_ids) == len(first.fresh_ids)
    assert set(again.fresh_ids).isdisjoint(first.fresh_ids)


async def test_a_full_buffer_keeps_its_good_groups(buffer: Buffer) -> None:
    await buffer.update_settings(capacity=Capacity(groups=4))
    good = await buffer.put(groups(4))
    flat = [group(f"flat-{i}", rewards=EQUAL) for i in range(4)]
    done = await replace_uninformative(flat, buffer, Fifo())
    assert (done.replayed_ids, done.missing) == (good, [])
    mixed = [group(f"flat-{i}", rewards=EQUAL) for i in range(4, 8)]
    mixed[2:2] = [group("fresh")]
    done = await replace_uninformative(mixed, buffer, Fifo())
    assert [one.group_uid for one in done.batch.groups] == [
        "gsm8k-1", "gsm8k-2", "fresh", "gsm8k-3",
    ]  # fmt: skip
    assert done.missing == [4]
    assert await buffer.count(statuses="completed") == 4


async def test_refused_informative_groups_are_not_replaced(buffer: Buffer) -> None:
    """The full buffer refuses an informative group with a lower priority than all stored ones."""
    await buffer.update_settings(capacity=Capacity(groups=2), eviction="lowest_priority")
    [first, _] = await buffer.put(groups(2), priority=9.0)
    several = [group("refused", priority=0.1), group("equal", rewards=EQUAL)]
    done = await replace_uninformative(several, buffer, Fifo())
    assert (done.batch.ids, done.fresh_ids, done.missing) == ([first], [], [0])


async def test_damage_loses_no_fresh_group(buffer: Buffer, url: str) -> None:
    [old] = await buffer.put(group("old"))
    async with transaction(url) as connection:
        await connection.execute(update(payload).values(checksum=payload.c.checksum - 1))
    done = await replace_uninformative(fresh(), buffer)
    assert [one.group_uid for one in done.batch.groups] == ["first", "last"]
    assert done.missing == [1, 2]
    assert await buffer.count(statuses="failed") == 1
    assert old not in done.batch.ids


async def test_fresh_groups_that_are_evicted_at_once_are_missing(buffer: Buffer) -> None:
    await buffer.update_settings(capacity=Capacity(groups=1))
    done = await replace_uninformative([group("a")], buffer)
    assert done.num_missing == 0
    await buffer.update_settings(capacity=None, max_staleness=0)
    await buffer.advance_policy(9)
    stale = await replace_uninformative([group("old", version=1)], buffer)
    assert (stale.num_missing, stale.fresh_ids) == (1, [])
