"""Sample: numbers of groups, tasks and filters, and the effects of a draw."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

import replaydb as rdb
from replaydb import Buffer, SamplingPolicy
from replaydb.database.repository import tasks as task_states
from replaydb.database.repository.tasks import exponentials
from replaydb.database.tables import schema
from support.engines import postgresql_nightly
from support.groups import group, groups

POLICIES: list[SamplingPolicy] = [rdb.Fifo(), rdb.Uniform(), rdb.Prioritized()]


def names(batch: rdb.Batch) -> list[str]:
    return sorted(one.group_uid for one in batch.groups)


@postgresql_nightly
@pytest.mark.parametrize(("task", "there"), [("code", 2), ("unseen", 0)])
async def test_quotas_are_all_or_nothing(buffer: Buffer, task: str, there: int) -> None:
    ids = await buffer.put([*groups(5), *groups(2, "code")])
    for policy in POLICIES:
        with pytest.raises(rdb.NotEnoughGroupsError, match=task) as caught:
            await buffer.sample({"gsm8k": 2, task: 3}, policy)
        error = caught.value
        assert (error.wanted, error.available, error.task_name) == (3, there, task)
    assert [one.times_sampled for one in await buffer.get(ids)] == [0] * 7
    assert {one.num_sampled for one in (await buffer.stats()).tasks} == {0}
    for policy in POLICIES:
        partial = await buffer.sample({"gsm8k": 2, task: 3}, policy, at_least=1)
        expected = ["gsm8k"] * 2 + [task] * there
        assert [one.task_name for one in partial.groups] == expected
        assert len(set(partial.ids)) == len(expected)


async def test_not_enough_groups_in_total(buffer: Buffer) -> None:
    await buffer.put([*groups(2), *groups(1, "code"), group(status="failed")])
    for policy in POLICIES:
        with pytest.raises(rdb.NotEnoughGroupsError) as caught:
            await buffer.sample(4, policy)
        error = caught.value
        assert (error.wanted, error.available, error.task_name) == (4, 3, None)
        assert "4" in str(error)
        assert "3" in str(error)
        assert len(await buffer.sample(4, policy, at_least=1)) == 3
        with pytest.raises(rdb.NotEnoughGroupsError):
            await buffer.sample(1, policy, tasks="unseen", at_least=1)
        with pytest.raises(rdb.NotEnoughGroupsError):
            await buffer.sample({"unseen": 1, "other": 1}, policy, at_least=1)


async def test_tasks(buffer: Buffer) -> None:
    await buffer.put([*groups(2), *groups(2, "code"), *groups(2, "数学 '")])
    for tasks in ("code", ["code"], {"code"}, ("code", "unseen"), (one for one in ["code"])):
        assert names(await buffer.sample(2, tasks=tasks)) == ["code-0", "code-1"]
    both = await buffer.sample(4, rdb.Lifo(), tasks=["数学 '", "gsm8k"])
    assert [one.group_uid for one in both.groups] == ["数学 '-1", "数学 '-0", "gsm8k-1", "gsm8k-0"]
    with pytest.raises(rdb.NotEnoughGroupsError):
        await buffer.sample(1, tasks=[])


FILTERS: list[tuple[Any, str]] = [
    (rdb.col.reward_std > 0.1, "ad"),
    (rdb.col.reward_std == 0.0, "b"),
    (rdb.col.reward_mean.is_(None), "c"),
    (rdb.col.tags["level"].as_string() == "hard", "ac"),
    (rdb.col.tags["level"].as_string() != "hard", "d"),
    (rdb.col.tags["n"].as_integer() >= 2, "cd"),
    (rdb.col.tags["x"].as_float() < 0.5, "a"),
    (rdb.col.tags["ok"].as_boolean(), "d"),
    (rdb.col.tags[("deep", "key")].as_string() == "it's 100%", "a"),
    (rdb.col.prompt_uid == "p1", "ab"),
    (rdb.col.prompt_uid.is_(None), "d"),
    (rdb.col.prompt_uid.in_(["p2", "p3"]), "c"),
    (rdb.col.prompt_uid != "p1", "c"),
    (~(rdb.col.reward_std > 0.1), "b"),
    (rdb.col.group_uid.like("%a%") | (rdb.col.priority > 1), "ab"),
    ((rdb.col.num_episodes == 2) & (rdb.col.num_tokens > 5), "abcd"),
    (rdb.col.has_transcript, ""),
    (rdb.col.id.between(2, 3), "bc"),
    (~rdb.col.id.between(2, 3) & (rdb.col.id > 0), "ad"),
    (~rdb.col.id.between(2, 3), "ad"),
    (sa.func.length(rdb.col.group_uid) == 1, "abcd"),
    (sa.true(), "abcd"),
    (sa.false(), ""),
    (rdb.col.created_at > datetime(2020, 1, 1, tzinfo=UTC), "abcd"),
    (rdb.col.min_policy_version >= 2, "cd"),
    (sa.case((rdb.col.prompt_uid == "p2", True), else_=False), "c"),
]


@postgresql_nightly
async def test_conditions(buffer: Buffer) -> None:
    await buffer.put(
        [
            group("a", prompt_uid="p1", version=1,
                  tags={"level": "hard", "x": 0.25, "deep": {"key": "it's 100%"}}),
            group("b", prompt_uid="p1", rewards=[1, 1], priority=2.0, tags={"n": 1}),
            group("c", prompt_uid="p2", rewards=[None, None], version=2,
                  tags={"level": "hard", "n": 2}),
            group("d", version=3, tags={"level": "easy", "n": 3, "ok": True, "x": 0.75}),
        ]
    )  # fmt: skip
    for where, expected in FILTERS:
        assert await buffer.count(where=where) == len(expected), str(where)
        for policy in POLICIES:
            if expected:
                batch = await buffer.sample(4, policy, where=where, at_least=1)
                assert names(batch) == list(expected), str(where)
            with pytest.raises(rdb.NotEnoughGroupsError) as caught:
                await buffer.sample(len(expected) + 1, policy, where=where)
            assert caught.value.available == len(expected)


@postgresql_nightly
async def test_few_among_many(buffer: Buffer) -> None:
    """At a large clock value, where an index scan falls back to a full scan."""
    await buffer.put([group(f"{i}", priority=1.0 + i % 3) for i in range(400)])
    rare = rdb.col.group_uid.in_(["7", "399"])
    for policy in POLICIES:
        for n, where in ((2, rare), (40, rdb.col.group_uid.like("%9")), (400, None)):
            batch = await buffer.sample(n, policy, where=where)
            assert len(set(batch.ids)) == n
        with pytest.raises(rdb.NotEnoughGroupsError) as caught:
            await buffer.sample(3, policy, where=rare)
        assert (caught.value.wanted, caught.value.available) == (3, 2)


async def test_staleness(buffer: Buffer) -> None:
    await buffer.put([group(f"v{v}", version=v) for v in (1, 3, 5, None)])
    await buffer.advance_policy(5)
    for limit, expected in ((0, "v5"), (1, "v5"), (2, "v3 v5"), (4, "v1 v3 v5"), (99, "v1 v3 v5")):
        for policy in POLICIES:
            batch = await buffer.sample(9, policy, max_staleness=limit, at_least=1)
            assert names(batch) == expected.split()
    hit = await buffer.sample(1, max_staleness=4, where=rdb.col.min_policy_version < 3)
    assert (names(hit), hit.staleness) == (["v1"], [4])
    everything = await buffer.sample(4, rdb.Fifo())
    assert everything.staleness == [4, 2, 0, None]


async def test_effects_of_a_draw(buffer: Buffer) -> None:
    given = [*groups(3, tags={"a": 1}), *groups(1, "code")]
    ids = await buffer.put(given)
    before = datetime.now(UTC)
    drawn = await buffer.sample(2, rdb.Fifo())
    first = await buffer.get(ids)
    await buffer.sample(1, rdb.Uniform(), where=rdb.col.id == ids[0])
    again = await buffer.get(ids)
    assert list(drawn.groups) == given[:2]
    assert again == given
    assert [one.times_sampled for one in drawn.groups] == [1, 1]
    assert [one.times_sampled for one in again] == [2, 1, 0, 0]
    assert drawn.groups[0].last_sampled_at == first[0].last_sampled_at
    assert drawn.groups[0].first_sampled_at == again[0].first_sampled_at
    assert [one.first_sampled_at for one in again[2:]] == [None, None]
    assert [one.last_sampled_at for one in again[2:]] == [None, None]
    at = [again[0].first_sampled_at, again[0].last_sampled_at]
    assert at[0] is not None
    assert at[1] is not None
    assert before <= at[0] < at[1] < before + timedelta(minutes=1)
    counters = {one.task_name: one.num_sampled for one in (await buffer.stats()).tasks}
    assert counters == {"code": 0, "gsm8k": 3}


async def test_a_batch(buffer: Buffer) -> None:
    ids = await buffer.put(groups(3))
    batch = await buffer.sample(3, rdb.Fifo())
    assert batch.ids == ids
    assert len(batch) == 3
    assert repr(batch) == f"Batch(of 3 groups, ids={ids})"
    assert batch.probabilities.shape == batch.weights.shape == (3,)


other = schema.episode_group.alias()

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": {"gsm8k": -1}}, "n['gsm8k']"),
    ({"n": 3, "at_least": 4}, "at_least"),
    ({"n": {"gsm8k": 1, "code": 1}, "at_least": 3}, "at_least"),
    ({"n": {"gsm8k": 1}, "tasks": "gsm8k"}, "tasks"),
    ({"where": True}, "where"),
    ({"where": sa.text("reward_std > 0.1")}, "where"),
    ({"where": sa.text("1 = 1") & (rdb.col.id > 0)}, "where"),
    ({"where": sa.literal_column("1") == 1}, "where"),
    ({"where": sa.literal_column("reward_std", sa.Double) > 0.1}, "where"),
    ({"where": sa.column("reward_std") > 0.1}, "where"),
    ({"where": rdb.col.reward_std}, "where"),
    ({"where": rdb.col.reward_std + 1}, "where"),
    ({"where": rdb.col.tags["level"]}, "where"),
    ({"where": schema.buffer.c.id == 1}, "where"),
    ({"where": (rdb.col.id > 0) & (schema.buffer.c.policy_version > 0)}, "where"),
    ({"where": other.c.id == 1}, "where"),
    ({"where": sa.exists().where(schema.buffer.c.id == rdb.col.run_id)}, "where"),
    ({"where": rdb.col.id.in_(sa.select(schema.buffer.c.id))}, "where"),
]


@pytest.mark.parametrize("policy", [rdb.Uniform(), rdb.Prioritized()])
async def test_only_tasks_of_the_drawn_groups_generate_keys(
    buffer: Buffer, policy: SamplingPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    await buffer.put([one for i in range(9) for one in groups(2, f"task-{i}")])
    numbers: list[int] = []

    def counted(*args: Any) -> Any:
        numbers.append(args[-1])
        return exponentials(*args)

    monkeypatch.setattr(task_states, "exponentials", counted)
    await buffer.sample(2, policy)
    assert sum(numbers) == 2
    assert 0 not in numbers


async def test_invalid_arguments(buffer: Buffer) -> None:
    [group_id] = await buffer.put(group())
    for arguments, field in REFUSED:
        with pytest.raises(rdb.InvalidInputError) as caught:
            await buffer.sample(**{"n": 1} | arguments)
        assert caught.value.field == field, arguments
    for where in (arguments["where"] for arguments, field in REFUSED if field == "where"):
        for call in (buffer.count, buffer.delete):
            with pytest.raises(rdb.InvalidInputError, match="where"):
                await call(where=where)
    assert (await buffer.get([group_id]))[0].times_sampled == 0
