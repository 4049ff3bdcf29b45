"""Conversion of slime's samples to groups and back, without loss."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import replaydb as rdb
from integrations.identical import identical
from integrations.slime.samples import fields, groups
from integrations.slime.upstream import FIELDS, Sample
from replaydb.integrations.slime import from_samples, to_samples
from support.engines import both_engines
from support.examples import examples


def sample(**changes: Any) -> Any:
    """A sample of two tokens of prompt and three of response."""
    return (
        Sample().to_dict()
        | {
            "prompt": "1 + 1?",
            "tokens": [1, 2, 5, 6, 7],
            "response_length": 3,
            "reward": 0.5,
            "loss_mask": [1, 0, 1],
            "rollout_log_probs": [-0.5, 0.0, -0.25],
            "weight_versions": ["4", "3"],
            "status": "completed",
        }
        | changes
    )


@settings(deadline=None)
@given(groups())
def test_samples_round_trip(samples: list[Any]) -> None:
    found = to_samples(from_samples(samples))
    assert identical(ordered(found), ordered(samples))


@settings(deadline=None, max_examples=examples(30))
@given(st.lists(fields(), min_size=1, max_size=2))
def test_instances_round_trip(values: list[dict[str, Any]]) -> None:
    given_ = [Sample.from_dict(one) for one in values]
    assert {*vars(given_[0])} == FIELDS
    found = to_samples(from_samples([given_[0], given_]), Sample)
    assert identical(found, [given_[0], given_])


@both_engines
async def test_stored_samples_round_trip(url: str) -> None:
    several: list[list[Any]] = []

    @settings(deadline=None, database=None, max_examples=examples(60))
    @given(groups())
    def collect(samples: list[Any]) -> None:
        several.append(samples)

    collect()
    async with rdb.Store.open(url, run="test") as store:
        buffer = await store.buffer("slime")
        ids = await buffer.put([from_samples(samples) for samples in several])
        for group, samples in zip(await buffer.get(ids), several, strict=True):
            assert identical(ordered(to_samples(group)), ordered(samples))


def ordered(value: Any) -> Any:
    """Return samples with their fields in alphabetical order."""
    if isinstance(value, dict):
        return {name: value[name] for name in sorted(value)}
    return [ordered(one) for one in value]


def test_fields_become_columns() -> None:
    group = from_samples([sample(), sample(status="truncated", weight_versions=["a"])], "math")
    assert (group.task_name, group.prompt, group.status) == ("math", "1 + 1?", "completed")
    one, other = group.episodes
    assert one.prompt_ids.tolist() == [1, 2]
    assert one.response_ids.tolist() == [5, 6, 7]
    assert one.loss_mask.tolist() == [False, False, True, False, True]
    assert one.logprobs is not None
    assert one.logprobs.tolist() == [0.0, 0.0, -0.5, 0.0, -0.25]
    assert (one.reward, one.policy_version, one.turns[0].finish_reason) == (0.5, 3, "stop")
    assert (other.policy_version, other.turns[0].finish_reason) == (None, "length")
    stored = one.metadata["slime"]["samples"][0]["fields"]
    assert {"tokens", "loss_mask", "rollout_log_probs", "prompt", "reward"}.isdisjoint(stored)


def test_values_of_tokens_become_token_extras() -> None:
    experts = torch.arange(16, dtype=torch.int32).reshape(4, 2, 2)
    one = sample(
        teacher_log_probs=[-0.1, -0.2, -0.3],
        rollout_routed_experts=experts,
        rollout_top_p_token_ids=torch.tensor([8, 9, 10], dtype=torch.int32),
        rollout_top_p_token_offsets=torch.tensor([0, 2, 2, 3], dtype=torch.int32),
    )
    group = from_samples([one])
    [episode] = group.episodes
    [turn] = episode.turns
    assert turn.token_extras["teacher_log_probs"].tolist() == [0, 0, -0.1, -0.2, -0.3]
    assert turn.token_extras["rollout_routed_experts"].tolist() == experts.tolist()
    assert turn.token_extras["rollout_top_p_token_ids"].tolist() == [[], [], [8, 9], [], [10]]
    assert episode.extras == {}
    assert identical(ordered(to_samples(group)), ordered([one]))


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout_routed_experts": np.zeros((3, 1, 1)), "tokens": [1, 5, 6, 7]},  # of the response?
        {"rollout_routed_experts": np.zeros((5, 1, 1))},
        {"rollout_top_p_token_ids": [8, 9], "rollout_top_p_token_offsets": [0, 1, 1, 1]},
        {"rollout_top_p_token_ids": [8, 9], "rollout_top_p_token_offsets": [0, 3, 1, 2]},
        {"rollout_top_p_token_ids": [8, 9], "rollout_top_p_token_offsets": [0, 2]},
        {"teacher_log_probs": [-0.5]},
        {"prompt": [{"image": b"\xff"}]},
        {"prompt": [{"weight": math.nan}]},
    ],
)
def test_values_that_do_not_fit_are_kept_elsewhere(changes: Any) -> None:
    group = from_samples([sample(**changes)])
    assert group.episodes[0].token_extras == {}
    assert group.prompt == (None if "prompt" in changes else "1 + 1?")
    assert identical(ordered(to_samples(group)), ordered([sample(**changes)]))


def test_a_list_of_samples_is_one_episode() -> None:
    split = [sample(rollout_id=7, reward=0.25), sample(rollout_id=7, tokens=[1, 9, 9, 9])]
    group = from_samples([split, sample(rollout_id=8)])
    assert [len(episode.turns) for episode in group.episodes] == [2, 1]
    assert group.episodes[0].reward == 0.75
    assert identical(ordered(to_samples(group)), ordered([split, sample(rollout_id=8)]))


def test_a_removed_sample_is_not_in_the_loss() -> None:
    [episode] = from_samples([sample(remove_sample=True)]).episodes
    assert episode.num_loss_tokens == 0


def test_a_reward_of_several_values() -> None:
    one = sample(reward={"score": 0.75, "format": math.nan})
    assert from_samples([one]).episodes[0].reward is None
    assert from_samples([one], reward_key="score").episodes[0].reward == 0.75
    assert from_samples([one], reward_key="format").episodes[0].reward is None


@pytest.mark.parametrize("status", ["pending", "aborted"])
def test_an_unfinished_sample_aborts_its_group(status: str) -> None:
    assert from_samples([sample(), [sample(status=status)]]).status == "aborted"


def test_unknown_and_missing_fields() -> None:
    one = sample(reward_spec={"kind": [1, 1.0, True]}, rollout_indexer_topk=np.arange(3))
    del one["label"], one["loss_mask"], one["prompt"], one["rollout_routed_experts"]
    assert identical(ordered(to_samples(from_samples([one]))), ordered([one]))


@pytest.mark.parametrize(
    ("samples", "field"),
    [
        ("text", "samples"),
        (3, "samples"),
        ([3], "samples[0]"),
        ([[[sample()]]], "samples[0][0]"),
        ([sample(tokens=[0.5] * 5)], "samples[0].tokens"),
        ([sample(tokens=[2**31] * 5)], "samples[0].tokens"),
        ([sample(response_length=6)], "samples[0].response_length"),
        ([sample(response_length=None)], "samples[0].response_length"),
        ([sample(), [sample(loss_mask=[1])]], "samples[1][0].loss_mask"),
        ([sample(rollout_log_probs=[0.0] * 5)], "samples[0].rollout_log_probs"),
        ([sample(rollout_log_probs=[math.inf] * 3)], "samples[0].rollout_log_probs"),
        ([sample(metadata={"a": [object()]})], "samples[0].metadata.a[0]"),
        ([], "episodes"),
    ],
)
def test_invalid_samples(samples: Any, field: str) -> None:
    with pytest.raises(rdb.InvalidInputError) as caught:
        from_samples(samples)
    assert caught.value.field == field


def test_other_groups_are_refused() -> None:
    other = rdb.EpisodeGroup("math", [rdb.Episode(prompt_ids=[1], response_ids=[2])])
    with pytest.raises(rdb.InvalidInputError, match="from_samples"):
        to_samples(other)
