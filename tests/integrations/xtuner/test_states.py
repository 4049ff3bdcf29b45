"""Conversion of rollout states to episodes and back, without loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import ray
import torch
from xtuner.v1.data_proto.rl_data import (
    RolloutFunctionCall,
    RolloutState,
    RolloutToolCall,
    SampleParams,
    Status,
)

import replaydb as rdb
from integrations.identical import identical
from integrations.xtuner.conftest import Open
from integrations.xtuner.states import state
from replaydb.integrations.xtuner.states import to_episode, to_state


async def stored(build: Open, one: RolloutState) -> RolloutState:
    buffer = build()
    await buffer.put([one], "math")
    [[found]] = await buffer.get(1, "math", Status.COMPLETED)
    return found


async def test_states_round_trip(build: Open) -> None:
    one = state(
        1,
        response_model_steps=[3, 3, 4],
        sample_params=SampleParams(temperature=0.5, stops=["</s>"]),
        tool_calls=[
            RolloutToolCall(id="a", function=RolloutFunctionCall(name="f", arguments={"x": [1]}))
        ],
        reward={"score": 0.5, "parts": {"format": float("inf")}},
        tools=[{"$ref": "#/a", "parameters": None}],
        extra_fields={"难度": {"nested": [1, [2.5, None, True]]}},
    )
    assert await stored(build, one) == one


@pytest.mark.parametrize(
    "fields",
    [
        {"response_ids": None, "logprobs": None, "response_mask": None, "response": None},
        {"response_ids": [], "logprobs": [], "response_mask": [], "response_model_steps": []},
        {"logprobs": [-0.1] * 5},  # prompt included
        {"response_model_steps": [2]},
        {"prompt_ids": None, "response_mask": None},
        {"input_ids": [1, 2, 5, 6, 7], "labels": [-100, -100, 5, 6, 7]},
        {"tokens": [1, 3], "input_ids": [1, 2]},
        {"tokens": None, "input_ids": []},
        {"tokens": [], "prompt_ids": []},
        {"tokens": [True, 2]},
        {"reward": None},
        {"reward": {"other": 1}},
        {"reward": {"score": float("inf")}},
        {"reward": {"score": 10**400}},
    ],
)
def test_missing_and_unusual_fields_round_trip(fields: dict[str, Any]) -> None:
    one = state(1, **fields)
    assert identical(to_state(to_episode(one, 0)), one)


def test_tokens_of_a_state_are_stored_once() -> None:
    one = state(1, prompt_ids=[*range(1000)], tokens=[*range(1000)])
    one.input_ids = [*range(1000), 5, 6, 7]
    episode = to_episode(one, 0)
    assert sum(array.nbytes for array in episode.extras.values()) < 1000
    assert identical(to_state(episode), one)


async def test_a_reward_that_is_nan(build: Open) -> None:
    """The column is None, the state keeps the value."""
    one = state(1, reward={"score": float("nan")})
    assert to_episode(one, 0).reward is None
    found = await stored(build, one)
    assert found.reward is not None
    assert np.isnan(found.reward["score"])


def test_columns_of_a_state() -> None:
    episode = to_episode(state(1, response_model_steps=[3, 4, 4]), 9)
    assert (episode.reward, episode.finish_reason) == (1.0, "stop")
    assert episode.prompt_ids.tolist() == [1, 2]
    assert episode.response_ids.tolist() == [5, 6, 7]
    assert episode.loss_mask.astype(int).tolist() == [0, 0, 1, 0, 1]
    assert episode.logprobs is not None
    assert episode.logprobs.tolist() == [0.0, 0.0, -0.5, -0.25, -1.0]
    assert episode.policy_version.tolist() == [3, 3, 3, 4, 4]  # type: ignore[union-attr]
    assert to_episode(state(1), 9).policy_version == 9


async def test_arrays(build: Open) -> None:
    pixels = np.arange(6, dtype=np.float32).reshape(2, 3)
    image = torch.ones(2, 2, dtype=torch.bfloat16)
    one = state(1, routed_experts=pixels > 2, mm_info={"pixel_values": pixels, "image": image})
    found = await stored(build, one)
    np.testing.assert_array_equal(found.routed_experts, pixels > 2)
    assert found.mm_info["pixel_values"].dtype == np.float32
    np.testing.assert_array_equal(found.mm_info["pixel_values"], pixels)
    assert torch.equal(found.mm_info["image"], image)
    found.mm_info["pixel_values"][0, 0] = 7.0  # a copy: the stored array is unchanged


@pytest.mark.usefixtures("cluster")
async def test_ray_references(build: Open) -> None:
    """Their objects are stored, because they are lost with the cluster."""
    experts = np.array([[1, 2], [3, 4]])
    nested = {"scores": [0.25, 0.75], "more": np.ones(2)}
    one = state(
        1,
        routed_experts=ray.put(experts),
        mm_info={"pixel_values": ray.put(experts + 1)},
        extra_fields={"outer": {"inner": ray.put(nested)}, "several": [ray.put(1), ray.put(2)]},
    )
    found = await stored(build, one)
    assert isinstance(found.routed_experts, ray.ObjectRef)
    np.testing.assert_array_equal(ray.get(found.routed_experts), experts)
    np.testing.assert_array_equal(ray.get(found.mm_info["pixel_values"]), experts + 1)
    assert ray.get(found.extra_fields["several"]) == [1, 2]
    inner = ray.get(found.extra_fields["outer"]["inner"])
    assert inner["scores"] == [0.25, 0.75]
    np.testing.assert_array_equal(inner["more"], [1.0, 1.0])


@pytest.mark.usefixtures("cluster")
def test_ray_references_survive_their_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    episode = to_episode(state(1, routed_experts=ray.put(np.ones(2))), 0)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    np.testing.assert_array_equal(to_state(episode).routed_experts, [1.0, 1.0])


async def test_values_keep_their_types(build: Open) -> None:
    values = [
        [Status.FAILED, SampleParams(n=3), state(7, status=Status.ABORTED)],
        [{2: 2, None: 3, (1, 2): 5}, {"$array": "a"}, (1, {2}), "\0\ud83d\ude00", 10**5000],
        [bytearray(b"a"), np.array([[1, 2], None], object), torch.ones(2).bfloat16()],
    ]
    found = await stored(build, state(1, extra_fields={"values": values}))
    assert identical(found.extra_fields["values"], values)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_ids": [2**31, 1, -(2**40)]},
        {"prompt_ids": [-(2**31)]},
        {"response_mask": [2, 1, 0]},
        {"response_model_steps": [2**31] * 3},
        {"logprobs": [-1e300, -0.1, float("-inf")]},
        {"group_id": 2**40, "rollout_id": 2**63, "session_id": 2**70},
    ],
)
def test_numbers_beyond_the_columns(fields: dict[str, Any]) -> None:
    one = state(1, **fields)
    found = to_state(to_episode(one, 0))
    assert dict(found) == dict(one)


def test_fields_are_not_validated_again() -> None:
    """XTuner assigns values that its annotations do not allow."""
    one = state(1)
    one.response_mask, one.uid = np.array([1, 0, 1]), 7
    found = to_state(to_episode(one, 0))
    assert identical(found.response_mask, one.response_mask)
    assert (found.uid, found.rollout_id) == (7, 1)


class _Mine(RolloutState):
    more: int = 1


async def test_objects_that_cannot_be_stored_are_refused(build: Open) -> None:
    buffer = build()
    endless: dict[str, Any] = {}
    endless["self"] = endless
    for value in (object(), endless, np.zeros(1, [("a", int)]), type(buffer)):
        with pytest.raises(rdb.InvalidInputError, match=r"state.extra_fields.what"):
            await buffer.put([state(1, extra_fields={"what": value})], "math")
    with pytest.raises(rdb.InvalidInputError, match="items: expected states of the class"):
        await buffer.put([_Mine.model_construct(**dict(state(1)))], "math")
    assert len(buffer) == 0
