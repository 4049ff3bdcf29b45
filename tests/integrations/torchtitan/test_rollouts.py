"""Conversion of rollouts to episodes and back, and training rows compared with torchtitan's."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from torchtitan.experiments.rl.components.training_sample_builder import TrainingSampleBuilder
from torchtitan.experiments.rl.observability import metrics as m
from torchtitan.experiments.rl.rollout import Rollout, RolloutGroup, RolloutStatus
from torchtitan.experiments.rl.types import TrainingSample

import replaydb as rdb
from integrations.agents import payload_bytes, trajectories
from integrations.torchtitan.rollouts import failed_group, rollout, rollout_group
from replaydb.integrations.torchtitan import (
    from_training_sample,
    to_group,
    to_rollout_group,
    to_training_sample,
    to_training_samples,
)


def theirs(one: Rollout) -> list[TrainingSample]:
    rows: list[TrainingSample] = (
        TrainingSampleBuilder.Config().build().rollout_to_training_samples(one)
    )
    return rows


async def stored(buffer: rdb.Buffer, group: RolloutGroup) -> rdb.EpisodeGroup:
    await buffer.put(to_group(group))
    [read] = await buffer.get(uids=str(group.group_id))
    return read


async def test_groups_round_trip(buffer: rdb.Buffer) -> None:
    group = rollout_group(7, size=4, turns=3)
    read = await stored(buffer, group)
    assert repr(to_rollout_group(read)) == repr(group)  # metric values do not implement ==
    assert read.min_policy_version == min(
        turn.min_policy_version for one in group.rollouts for turn in one.turns
    )
    assert read.max_policy_version == max(
        turn.max_policy_version for one in group.rollouts for turn in one.turns
    )


async def test_each_token_and_message_of_a_run_of_agents_is_stored_once(
    buffer: rdb.Buffer,
) -> None:
    """The prompt of a turn has all messages of the conversation so far."""
    group = rollout_group(9, size=8, turns=15)
    rng = random.Random(4)
    for one, steps in zip(group.rollouts, trajectories(rng), strict=True):
        messages = [{"role": "user", "content": "Fix it."}]
        for turn, step in zip(one.turns, steps, strict=True):
            turn.prompt_token_ids, turn.completion_token_ids = step.context, step.response
            turn.completion_logprobs, turn.prompt_messages = step.logprobs, list(messages)
            turn.completion_message = {"role": "assistant", "content": str(step.response)}
            turn.env_messages = [{"role": "tool", "content": str(step.answer)}]
            messages += [turn.completion_message, *turn.env_messages]
    edited = group.rollouts[0].turns[7]  # and its fourth message is 1.0 in place of 1
    edited.prompt_messages[3] = {"role": "tool", "content": 1.0}
    group.rollouts[0].turns[8].prompt_messages[3] = {"role": "tool", "content": 1}
    made = to_group(group)
    assert payload_bytes([made], 2) <= 0.45 * payload_bytes([made], 1)
    content = str(group.rollouts[1].turns[3].env_messages[0]["content"])
    assert str([turn.metadata for turn in made.episodes[1].turns]).count(content) == 1
    assert repr(to_rollout_group(await stored(buffer, group))) == repr(group)


async def test_rewards_round_trip_with_their_types(buffer: rdb.Buffer) -> None:
    group = rollout_group(8, size=1)
    [one] = group.rollouts
    one.reward_breakdown = {"judge": math.nan, "format": 1.0, "tests": True, "\ud83d\ude00": 2}
    one.turns[0].env_rewards = {"tests": math.inf, "model": np.float32(0.5)}
    assert repr(to_rollout_group(await stored(buffer, group))) == repr(group)


async def test_any_tool_arguments_round_trip(buffer: rdb.Buffer) -> None:
    arguments = {"x": math.nan, "y": 2**90, "a\0b": 1, "\ud800": ["\0", "\udfff"], "": -0.0}
    call = {"function": {"name": "add\0", "arguments": arguments}, "id": None}
    group = rollout_group(9, size=2, turns=2)
    for one in group.rollouts:
        one.turns[0].completion_message = {"role": "assistant", "content": "", "tool_calls": [call]}
        one.turns[1].prompt_messages = [one.turns[0].completion_message]
        one.turns[1].env_messages = [{"role": "tool", "content": np.arange(6).reshape(2, 3)}]
    assert repr(to_rollout_group(await stored(buffer, group))) == repr(group)


async def test_a_group_that_failed_keeps_its_metrics(buffer: rdb.Buffer) -> None:
    read = await stored(buffer, failed_group(3))
    assert read.status is rdb.GroupStatus.FAILED
    assert repr(to_rollout_group(read)) == repr(failed_group(3))


async def test_a_rollout_without_turns_or_answer(buffer: rdb.Buffer) -> None:
    early = Rollout(group_id=1, rollout_id=0, status=RolloutStatus.ERROR)
    long = rollout(random.Random(0), 1, 1)
    turn = replace(long.turns[0], completion_token_ids=[], completion_logprobs=[])
    turn = replace(turn, min_policy_version=None, max_policy_version=None)
    long = replace(long, turns=[turn], status=RolloutStatus.TRUNCATED_PROMPT_TOO_LONG)
    group = RolloutGroup(group_id=1, rollouts=[early, long])
    read = await stored(buffer, group)
    assert repr(to_rollout_group(read)) == repr(group)
    assert to_training_samples(read) == theirs(long) == []


def test_rows_equal_torchtitans() -> None:
    rng = random.Random(12)
    branched = 0
    for number in range(2000):
        one = rollout(rng, number, number % 8, turns=rng.randrange(1, 7))
        rows = to_training_samples(to_group(RolloutGroup(group_id=number, rollouts=[one])))
        assert rows == theirs(one)
        branched += len(rows) > 1
    assert branched > 300


def test_the_lowest_version_of_a_row_is_of_its_oldest_turn() -> None:
    """torchtitan uses the version of the first turn, though the field is called the oldest."""
    one = rollout(random.Random(1), turns=1)
    [first] = one.turns
    prompt = first.prompt_token_ids + first.completion_token_ids
    older = replace(first, prompt_token_ids=prompt, min_policy_version=-2, max_policy_version=-2)
    one = replace(one, turns=[first, older])
    [ours] = to_training_samples(to_group(RolloutGroup(group_id=0, rollouts=[one])))
    [their] = theirs(one)
    assert ours.min_policy_version == -2 < their.min_policy_version
    assert replace(their, min_policy_version=-2) == ours


def test_an_empty_last_answer_is_left_out() -> None:
    """torchtitan raises an error, and so does its batcher."""
    one = rollout(random.Random(1), turns=1)
    [first] = one.turns
    prompt = first.prompt_token_ids + first.completion_token_ids
    silent = replace(
        first, prompt_token_ids=prompt, completion_token_ids=[], completion_logprobs=[]
    )
    with pytest.raises(ValueError, match="no completion"):
        theirs(replace(one, turns=[first, silent]))
    group = RolloutGroup(group_id=0, rollouts=[replace(one, turns=[first, silent])])
    assert to_training_samples(to_group(group)) == theirs(one)


async def test_training_samples_round_trip(buffer: rdb.Buffer) -> None:
    rows = theirs(rollout(random.Random(4), 5, 2, turns=20))
    assert len(rows) > 1
    rows[0].advantage = [0.1 * i for i in range(len(rows[0].token_ids))]  # one for each token
    [group_id] = await buffer.put(rdb.EpisodeGroup("rows", map(from_training_sample, rows)))
    [read] = await buffer.get([group_id])
    assert [to_training_sample(row) for row in read.episodes] == rows


@pytest.mark.parametrize("field", ["reward", "advantage"])
def test_errors_name_fields_that_are_not_finite(field: str) -> None:
    group = rollout_group(1)
    setattr(group.rollouts[1], field, float("nan"))
    with pytest.raises(rdb.InvalidInputError, match=field):
        to_group(group)


@pytest.mark.parametrize("value", [object(), 1j])
@pytest.mark.parametrize("field", ["reward_breakdown", "env_rewards", "env_messages"])
def test_values_that_cannot_be_encoded_are_named(field: str, value: object) -> None:
    group = rollout_group(1)
    one = group.rollouts[0]
    setattr(one if field == "reward_breakdown" else one.turns[0], field, {"judge": value})
    with pytest.raises(rdb.InvalidInputError, match=rf"{field}\.judge: expected numbers, text"):
        to_group(group)


def test_metrics_can_be_scalars_of_numpy() -> None:
    group = replace(rollout_group(1), metrics=[m.Metric("x", m.Sum(np.float32(0.5)))])
    assert to_rollout_group(to_group(group)).metrics[0].value.value == 0.5


def test_a_metric_of_another_type_is_refused() -> None:
    class Median(m.Mean):
        pass

    group = replace(rollout_group(1), metrics=[m.Metric("x", Median(1.0))])
    with pytest.raises(rdb.InvalidInputError, match=r"metrics.*Median"):
        to_group(group)


def test_a_group_without_advantages_makes_no_rows() -> None:
    group = rollout_group(1)
    group.rollouts[0].advantage = None
    with pytest.raises(rdb.InvalidInputError, match="advantage"):
        to_training_samples(to_group(group))
