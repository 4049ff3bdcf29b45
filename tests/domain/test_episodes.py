"""Construction of episodes, and the error for each mistake."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from enum import StrEnum
from typing import Any

import numpy as np
import pytest
import torch

from replaydb.domain.episodes import Episode, EpisodeGroup, Turn
from replaydb.domain.episodes.turns import MARKS
from replaydb.errors import InvalidInputError

PROMPT, RESPONSE = [1, 2, 3], [4, 5, 6, 7]


def completion(**changes: Any) -> Episode:
    return Episode(**{"prompt_ids": PROMPT, "response_ids": RESPONSE} | changes)


def turn(**changes: Any) -> Turn:
    return Turn(**{"prompt_ids": [1, 2], "response_ids": [3]} | changes)


def test_prompt_and_response() -> None:
    episode = completion(
        logprobs=[-1, -2.5, math.nan, 0.0],
        reward=True,
        advantage=np.float32(-0.5),
        policy_version=torch.tensor(3),
        finish_reason="stop",
        metadata={"level": (1, 2.5, None, True, {"deep": []})},
        text="four",
    )
    assert episode.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert episode.token_ids.dtype == np.int32
    assert episode.loss_mask.tolist() == [False] * 3 + [True] * 4
    assert episode.logprobs is not None
    assert episode.logprobs.dtype == np.float32
    np.testing.assert_array_equal(episode.logprobs, [0, 0, 0, -1, -2.5, np.nan, 0])
    assert (episode.prompt_length, episode.num_tokens, episode.num_loss_tokens) == (3, 7, 4)
    assert episode.prompt_ids.tolist() == PROMPT
    assert episode.response_ids.tolist() == RESPONSE
    assert (episode.reward, episode.advantage, episode.policy_version) == (1.0, -0.5, 3)
    assert (episode.min_policy_version, episode.max_policy_version) == (3, 3)
    assert episode.metadata == {"level": [1, 2.5, None, True, {"deep": []}]}
    assert (episode.finish_reason, episode.text) == ("stop", "four")
    assert (episode.turns, episode.num_turns) == ((), 1)
    assert repr(episode) == "Episode(7 tokens, 4 in the loss, reward=1.0)"


def test_everything_optional_is_absent_by_default() -> None:
    episode = completion()
    absent = ["logprobs", "reward", "advantage", "policy_version", "finish_reason", "text"]
    assert [getattr(episode, name) for name in absent] == [None] * 6
    assert episode.min_policy_version is None
    assert episode.token_extras == episode.extras == episode.metadata == {}


def test_tokens_and_mask() -> None:
    episode = Episode(
        token_ids=np.arange(5, dtype=np.uint16), loss_mask=[0, 0, 1, 0, 1], logprobs=np.ones(5)
    )
    assert episode.prompt_length == 2
    assert episode.loss_mask.tolist() == [False, False, True, False, True]
    assert Episode(token_ids=[1, 2], loss_mask=[False, False]).prompt_length == 2
    assert Episode(token_ids=[1, 2], loss_mask=[True, True]).prompt_length == 0
    assert Episode(token_ids=[], loss_mask=[]).num_tokens == 0


@pytest.mark.parametrize("mask", [[1, 0, 1, 1], [0, 0, 0, 1, 0, 1, 1]])
def test_mask_of_response_or_of_all(mask: list[int]) -> None:
    episode = completion(loss_mask=mask)
    assert episode.loss_mask.tolist() == [False] * 3 + [True, False, True, True]
    assert episode.prompt_length == 3


def test_turns_are_concatenated() -> None:
    first = turn(logprobs=[-1.0], reward=0.25, policy_version=4, finish_reason="tool")
    second = turn(prompt_ids=[7], response_ids=[8, 9], reward=0.5, policy_version=[6, 5])
    episode = Episode(turns=[first, second])
    assert episode.token_ids.tolist() == [1, 2, 3, 7, 8, 9]
    assert episode.loss_mask.tolist() == [False, False, True, False, True, True]
    np.testing.assert_array_equal(episode.logprobs, [0, 0, -1, 0, np.nan, np.nan])
    assert np.asarray(episode.policy_version).tolist() == [4, 4, 4, 5, 6, 5]
    assert (episode.reward, episode.prompt_length, episode.num_turns) == (0.75, 2, 2)
    assert episode.turns == (first, second)
    assert episode.turns[1].logprobs is None


def test_turns_have_a_mask_rewards_and_extras_of_their_own() -> None:
    first = turn(response_ids=[3, 4], loss_mask=[True, 0], token_extras={"a": [[5], [6]]})
    second = turn(token_rewards=[0.5], token_extras={"a": [[7], [8], [9]], "b": [1.0]})
    assert first.loss_mask.tolist() == [True, False]
    assert second.loss_mask.tolist() == [True]
    assert first.token_extras["a"].tolist() == [[0], [0], [5], [6]]
    assert second.token_extras["b"].tolist() == [0, 0, 1]
    assert first.token_rewards is None
    assert second.token_rewards is not None
    assert str(second.token_rewards.dtype) == "float32"
    episode = Episode(turns=[first, second], token_extras={"whole": np.arange(7)})
    assert episode.loss_mask.astype(int).tolist() == [0, 0, 1, 0, 0, 0, 1]
    assert episode.token_extras["a"].tolist() == [[0], [0], [5], [6], [7], [8], [9]]
    assert episode.token_extras["b"].tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert episode.token_extras["whole"].tolist() == list(range(7))
    assert episode.reward == 0.5
    for array in (first.loss_mask, second.token_rewards, episode.token_extras["a"]):
        assert isinstance(array, np.ndarray)
        assert not array.flags.writeable
    assert second == second
    assert first != second


def test_the_reward_of_a_turn_is_the_sum_of_its_tokens() -> None:
    rewards = [0.1] * 1000
    one = turn(response_ids=[3] * 1000, token_rewards=rewards)
    assert one.reward == pytest.approx(100.0, rel=1e-6)
    assert one.reward != 100.0
    both = turn(response_ids=[3] * 1000, token_rewards=rewards, reward=100.0)
    assert both.reward == 100.0
    assert turn(response_ids=[], token_rewards=[]).reward == 0.0
    assert turn(token_rewards=torch.tensor([0.5]).bfloat16(), reward=0.5).reward == 0.5


def test_turn_versions_and_rewards_together() -> None:
    known, unknown = turn(policy_version=2), turn()
    assert Episode(turns=[known, known]).policy_version == 2
    assert Episode(turns=[known, unknown]).policy_version is None
    assert Episode(turns=[unknown, unknown], policy_version=9).policy_version == 9
    assert Episode(turns=[unknown]).reward is None
    assert Episode(turns=[unknown]).logprobs is None
    assert Episode(turns=[turn(reward=1.0)], reward=0.0).reward == 0.0


def test_versions_per_token() -> None:
    of_response = completion(policy_version=[5, 4, 6, 6]).policy_version
    assert np.asarray(of_response).tolist() == [4, 4, 4, 5, 4, 6, 6]
    episode = completion(policy_version=np.arange(7))
    assert (episode.min_policy_version, episode.max_policy_version) == (0, 6)
    assert completion(response_ids=[], policy_version=[]).policy_version is None


def test_versions_of_turns_without_tokens_do_not_count() -> None:
    empty = Turn(prompt_ids=[], response_ids=[], policy_version=9)
    one = Turn(prompt_ids=[1], response_ids=[2], policy_version=[5])
    episode = Episode(turns=[empty, one])
    assert (episode.min_policy_version, episode.max_policy_version) == (5, 5)
    assert Episode(turns=[empty, empty]).max_policy_version == 9


def test_token_extras_of_response_get_zeros_in_front() -> None:
    episode = completion(
        token_extras={"values": np.ones((4, 2), np.float16), "all": list(range(7))}
    )
    values = episode.token_extras["values"]
    assert values.dtype == np.float16
    assert values.tolist() == [[0, 0]] * 3 + [[1, 1]] * 4
    assert episode.token_extras["all"].tolist() == list(range(7))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_dtypes_that_numpy_lacks_stay_torch_tensors(dtype: str) -> None:
    tensor = torch.ones(4, 2, requires_grad=True).to(getattr(torch, dtype))
    episode = completion(token_extras={"values": tensor}, extras={"state": tensor.t()})
    values, state = episode.token_extras["values"], episode.extras["state"]
    assert isinstance(values, torch.Tensor)
    assert isinstance(state, torch.Tensor)
    assert (values.dtype, values.requires_grad) == (tensor.dtype, False)
    assert values.float().tolist() == [[0, 0]] * 3 + [[1, 1]] * 4
    assert state.is_contiguous()


def test_torch_inputs_become_numpy_where_numpy_can() -> None:
    episode = completion(
        response_ids=torch.tensor(RESPONSE),
        logprobs=torch.full((4,), -0.5, dtype=torch.bfloat16, requires_grad=True),
        reward=torch.tensor(0.5, requires_grad=True),
        extras={"grad": torch.ones(2, requires_grad=True), "conj": torch.tensor([1j]).conj()},
    )
    assert episode.logprobs is not None
    assert episode.logprobs.tolist() == [0, 0, 0, -0.5, -0.5, -0.5, -0.5]
    assert episode.reward == 0.5
    assert isinstance(episode.extras["grad"], np.ndarray)
    assert episode.extras["conj"].tolist() == [-1j]


def test_extras_keep_dtype_and_shape() -> None:
    given: dict[str, Any] = {"scalar": np.uint8(7), "none": np.empty((0, 3), np.int16), "list": [1]}
    extras = completion(extras=given).extras
    assert (extras["scalar"].shape, str(extras["scalar"].dtype)) == ((), "uint8")
    assert (extras["none"].shape, str(extras["none"].dtype)) == ((0, 3), "int16")


def test_big_endian_becomes_little_with_the_same_bits() -> None:
    signalling = np.array([0x7FA00001, 0x3F800000], ">u4").view(">f4")
    episode = Episode(
        token_ids=np.array([1, 2], ">i4"),
        loss_mask=[1, 1],
        logprobs=signalling,
        extras={"same": signalling},
    )
    assert episode.token_ids.tolist() == [1, 2]
    assert episode.logprobs is not None
    for array in (episode.logprobs, np.asarray(episode.extras["same"])):
        assert array.dtype.isnative
        assert array.view(np.uint32).tolist() == [0x7FA00001, 0x3F800000]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_a_logprob_of_minus_infinity_was_not_recorded(dtype: str) -> None:
    given = torch.tensor([-math.inf, -0.5, math.nan, -1.0], dtype=getattr(torch, dtype))
    turn = Turn(prompt_ids=[1, 2, 3], response_ids=[1, 2, 3, 4], logprobs=given)
    columns = EpisodeGroup.from_arrays(
        "t", token_ids=[[1, 2, 3, 4]], lengths=[4], prompt_lengths=[0], logprobs=given[None]
    )
    for one in (completion(logprobs=given), turn, columns.episodes[0]):
        assert one.logprobs is not None
        assert not one.logprobs.flags.writeable
        assert str(one.logprobs[-4:].tolist()) == "[nan, -0.5, nan, -1.0]"


def test_arrays_are_read_only_copies() -> None:
    given: dict[str, Any] = {
        "ids": np.arange(4),
        "extra": np.arange(4),
        "tensor": torch.zeros(4).bfloat16(),
    }
    episode = completion(
        response_ids=given["ids"],
        logprobs=np.zeros(7, np.float32),
        policy_version=np.zeros(7, np.int32),
        token_extras={"a": given["extra"], "whole": np.zeros(7)},
        extras={"b": given["extra"], "c": given["tensor"]},
    )
    for array in given.values():
        array[0] = 9
    assert episode.token_ids[3] == episode.token_extras["a"][3] == episode.extras["b"][0] == 0
    assert episode.extras["c"][0] == 0
    arrays = [episode.token_ids, episode.loss_mask, episode.logprobs, episode.policy_version]
    for array in [*arrays, *episode.token_extras.values(), episode.extras["b"]]:
        assert isinstance(array, np.ndarray)
        assert not array.flags.writeable
    with pytest.raises(AttributeError):
        episode.reward = math.nan  # type: ignore[misc]


def test_equality_is_of_bits() -> None:
    quiet, other = (
        np.array([bits], np.uint32).view(np.float32) for bits in (0x7FC00000, 0x7FC00001)
    )

    def with_nan(nan: Any) -> Episode:
        return Episode(token_ids=[1], loss_mask=[1], logprobs=nan)

    assert with_nan(quiet) == with_nan(quiet)
    assert with_nan(quiet) != with_nan(other)
    same: dict[str, Any] = {
        "extras": {"x": np.zeros(2, np.int16)},
        "metadata": {"a": 1},
        "policy_version": 1,
    }
    base = completion(**same)
    assert base == completion(**same)
    for change in (
        {"extras": {"x": np.zeros(2, np.uint16)}},
        {"extras": {"x": np.zeros((2, 1), np.int16)}},
        {"extras": {"y": np.zeros(2, np.int16)}},
        {"extras": {"x": torch.zeros(2).bfloat16()}},
        {"metadata": {"a": 1.0}},
        {"metadata": {"a": True}},
        {"metadata": {"a": [1]}},
        {"policy_version": [1] * 7},
        {"logprobs": [0.0] * 4},
        {"reward": 0.0},
        {"text": ""},
        {"finish_reason": ""},
        {"loss_mask": [1, 1, 1, 0]},
        {"response_ids": [4, 5, 6, 8]},
    ):
        assert completion(**same | change) != base, change
    assert Episode(turns=[turn()]) != Episode(turns=[turn(finish_reason="x")])
    assert base != "base"
    assert turn() != "turn"


def test_turns_of_a_trajectory() -> None:
    """Their marks are part of them, and uids are those of one turn of the group."""
    marks: dict[str, Any] = {"uid": "a", "agent": "main", "state": "s/1", "is_discarded": True}
    one = turn(**marks)
    assert {name: getattr(one, name) for name in MARKS} == marks
    assert {name: getattr(turn(), name) for name in MARKS} == dict.fromkeys(MARKS[:3]) | {
        "is_discarded": False
    }
    assert one == turn(**marks)
    for name, value in [("uid", "b"), ("agent", None), ("state", ""), ("is_discarded", False)]:
        assert one != turn(**marks | {name: value})
    group = EpisodeGroup("math", [Episode(turns=[one]), Episode(turns=[turn(uid="b"), turn()])])
    assert pickle.loads(pickle.dumps(group)) == group  # noqa: S301 - our own bytes
    with pytest.raises(InvalidInputError) as caught:
        EpisodeGroup("math", [Episode(turns=[turn(), one]), Episode(turns=[turn(), one])])
    expected = "a uid that no other turn of the group has; episodes[0].turns[1].uid is the same"
    error = caught.value
    assert (error.field, error.expected, error.actual) == (
        "episodes[1].turns[1].uid",
        expected,
        "a",
    )


ONE_WAY = "token_ids, or prompt_ids and response_ids, or turns"
NOT_IN_USE = "a name that is not in use"


@pytest.mark.parametrize(
    ("arguments", "field", "expected", "actual"),
    [
        ({}, "episode", ONE_WAY, "none of them"),
        ({"prompt_ids": [1]}, "episode", ONE_WAY, "prompt_ids"),
        ({"token_ids": [1], "turns": []}, "episode", ONE_WAY, "token_ids and turns"),
        ({"token_ids": [1]}, "loss_mask", "shape [1]", "None"),
        ({"token_ids": [1], "loss_mask": [1, 1]}, "loss_mask", "shape [1]", "shape [2]"),
        ({"turns": []}, "turns", "at least one", "none"),
        ({"turns": 3}, "turns", "a sequence of Turn", "int"),
        ({"turns": [turn(), {}]}, "turns[1]", "Turn", "dict"),
        (
            {"turns": [turn(uid="a"), turn(), turn(uid="a")]},
            "turns[2].uid",
            "a uid that no other turn of the group has; turns[0].uid is the same",
            "a",
        ),
        (
            {"turns": [turn()], "logprobs": [0.0] * 3},
            "logprobs",
            "None, since the turns have their own",
            "a value",
        ),
        (
            {"turns": [turn()], "loss_mask": [1] * 3},
            "loss_mask",
            "None, since the turns have their own",
            "a value",
        ),
        (
            {"turns": [turn(token_extras={"text": [1]})]},
            "token_extras of turns",
            NOT_IN_USE,
            "'text'",
        ),
        (
            {"turns": [turn(token_extras={"a": [1]})], "token_extras": {"a": [1, 2, 3]}},
            "token_extras",
            NOT_IN_USE,
            "'a'",
        ),
        (
            {"turns": [turn(reward=1.0)], "token_extras": {"token_rewards": [1, 2, 3]}},
            "token_extras",
            NOT_IN_USE,
            "'token_rewards'",
        ),
        (
            {"turns": [turn(reward=1.0)], "extras": {"token_rewards": 1}},
            "extras",
            NOT_IN_USE,
            "'token_rewards'",
        ),
        (
            {"turns": [turn(token_extras={"a": [1]}), turn(token_extras={"a": [[1]]})]},
            "token_extras['a']",
            "one dtype and shape in all turns",
            """["('int64', 1)", "('int64',)"]""",
        ),
        (
            {"turns": [turn(policy_version=1)], "policy_version": 1},
            "policy_version",
            "None, since the turns have their own",
            "a value",
        ),
    ],
)
def test_invalid_combinations_of_arguments(
    arguments: dict[str, Any], field: str, expected: str, actual: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Episode(**arguments)
    assert (caught.value.field, caught.value.expected) == (field, expected)
    assert str(caught.value.actual) == actual


LOW_HIGH = "an integer from -2147483648 to 2147483647"
A_NUMBER = "a finite number"
OF_FLOAT32 = "numbers in the range of float32"
A_REWARD = "a finite number >= -3.40282e+38 and <= 3.40282e+38"
ARRAY = "a bool, integer or float array"


@pytest.mark.parametrize(
    ("arguments", "field", "expected", "actual"),
    [
        ({"prompt_ids": [[1, 2]]}, "prompt_ids", "one dimension", "shape [1, 2]"),
        ({"prompt_ids": [1.0]}, "prompt_ids", "integers", "dtype float64"),
        ({"prompt_ids": [True]}, "prompt_ids", "integers", "dtype bool"),
        ({"response_ids": [2**31]}, "response_ids", "32-bit integers", "2147483648"),
        ({"response_ids": [-(2**31) - 1]}, "response_ids", "32-bit integers", "-2147483649"),
        ({"response_ids": torch.ones(2)}, "response_ids", "integers", "dtype float32"),
        ({"response_ids": ["a"]}, "response_ids", ARRAY, "dtype <U1"),
        ({"response_ids": [None]}, "response_ids", ARRAY, "dtype object"),
        ({"loss_mask": [1, 0]}, "loss_mask", "shape [7] or [4]", "shape [2]"),
        ({"loss_mask": [0, 1, 2, 1]}, "loss_mask", "bools, or integers 0 and 1", "2"),
        ({"loss_mask": [0.5] * 4}, "loss_mask", "bools, or integers 0 and 1", "dtype float64"),
        ({"logprobs": [0.0] * 5}, "logprobs", "shape [7] or [4]", "shape [5]"),
        ({"logprobs": np.zeros(4, np.int64)}, "logprobs", "floats", "dtype int64"),
        ({"logprobs": [1j] * 4}, "logprobs", ARRAY, "dtype complex128"),
        ({"reward": math.nan}, "reward", A_REWARD, "nan"),
        ({"reward": 10**400}, "reward", A_REWARD, "inf"),
        (
            {"reward": 3.5e38},
            "reward",
            A_REWARD,
            "3.5e+38",
        ),  # infinite in float32
        ({"reward": "1"}, "reward", A_REWARD, "'1'"),
        ({"reward": np.zeros(1)}, "reward", A_REWARD, "array([0.])"),
        ({"advantage": -math.inf}, "advantage", A_REWARD, "-inf"),
        ({"advantage": 1e39}, "advantage", A_REWARD, "1e+39"),
        ({"logprobs": [-1e39, 0.0, 0.0, 0.0]}, "logprobs", OF_FLOAT32, "-1e+39"),
        ({"logprobs": [-math.inf, 1e39, 0.0, 0.0]}, "logprobs", OF_FLOAT32, "1e+39"),
        ({"logprobs": [math.inf] * 4}, "logprobs", "finite numbers, -inf or NaN", "inf"),
        (
            {"token_extras": {"token_rewards": [1.0, -1e39, 0.0, 0.0]}},
            "token_extras['token_rewards']",
            OF_FLOAT32,
            "-1e+39",
        ),
        ({"policy_version": 1.0}, "policy_version", "an integer", "1.0"),
        ({"policy_version": True}, "policy_version", "an integer", "True"),
        ({"policy_version": 2**31}, "policy_version", LOW_HIGH, "2147483648"),
        ({"policy_version": [1, 2]}, "policy_version", "shape [7] or [4]", "shape [2]"),
        ({"finish_reason": 3}, "finish_reason", "a str", "3"),
        ({"text": b"a"}, "text", "a str", "b'a'"),
        ({"extras": [1]}, "extras", "a mapping of names to arrays", "list"),
        ({"extras": {"": 1}}, "extras name", "1 to 255 characters", "0 characters"),
        ({"extras": {3: 1}}, "extras name", "a str", "3"),
        ({"extras": {"reward": 1}}, "extras", NOT_IN_USE, "'reward'"),
        ({"token_extras": {"prompt_ids": 1}}, "token_extras", NOT_IN_USE, "'prompt_ids'"),
        ({"token_extras": {"a": [0] * 4}, "extras": {"a": 1}}, "extras", NOT_IN_USE, "'a'"),
        ({"extras": {"a": ["x"]}}, "extras['a']", ARRAY, "dtype <U1"),
        ({"extras": {"a": torch.eye(2).to_sparse()}}, "extras['a']", None, None),
        ({"extras": {"a": np.zeros(2, "M8[s]")}}, "extras['a']", ARRAY, "dtype datetime64[s]"),
        ({"extras": {"a": torch.zeros(1, dtype=torch.complex128)}}, "extras['a']", ARRAY, None),
        (
            {"token_extras": {"a": np.zeros((5, 2))}},
            "token_extras['a']",
            "shape [7, ...] or [4, ...]",
            "shape [5, 2]",
        ),
        ({"token_extras": {"a": 1.0}}, "token_extras['a']", "shape [7] or [4]", "shape []"),
        ({"metadata": [1]}, "metadata", "a mapping", "[1]"),
        ({"metadata": {1: 2}}, "metadata", "str keys", "1"),
        ({"metadata": {"a": [math.nan]}}, "metadata.a[0]", A_NUMBER, "nan"),
        ({"metadata": {"a": b"x"}}, "metadata.a", "JSON values", "bytes"),
        ({"metadata": {"a": np.zeros(2)}}, "metadata.a", "JSON values", "ndarray"),
        ({"metadata": {"a": 2**64}}, "metadata.a", "integers of at most 64 bits", "a larger one"),
        ({"metadata": {"a\0": 1}}, "metadata key", "no NUL character", "one at 1"),
    ],
)
def test_invalid_values(
    arguments: dict[str, Any], field: str, expected: str | None, actual: str | None
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        completion(**arguments)
    assert caught.value.field == field
    assert expected is None or caught.value.expected == expected
    assert actual is None or str(caught.value.actual) == actual


def test_ragged_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"^extras\['a'\]: expected a rectangular array"):
        completion(extras={"a": [[1], [1, 2]]})


def test_circular_metadata_is_refused() -> None:
    circle: dict[str, Any] = {}
    circle["again"] = circle
    with pytest.raises(InvalidInputError, match="at most 100 levels of nesting"):
        completion(metadata=circle)


@pytest.mark.parametrize(
    ("arguments", "field", "expected", "actual"),
    [
        ({"logprobs": [0.0, 0.0]}, "logprobs", "shape [1]", "shape [2]"),
        ({"policy_version": [1, 2]}, "policy_version", "shape [1]", "shape [2]"),
        ({"response_ids": [1.5]}, "response_ids", "integers", "dtype float64"),
        ({"prompt_ids": None}, "turn", "prompt_ids, or new_ids with parent", "none of them"),
        ({"reward": math.inf}, "reward", A_REWARD, "inf"),
        ({"metadata": {"a": {1}}}, "metadata.a", "JSON values", "set"),
        ({"finish_reason": "\0"}, "finish_reason", "no NUL character", "one at 0"),
        ({"loss_mask": [1, 1, 1]}, "loss_mask", "shape [1]", "shape [3]"),
        ({"loss_mask": [2]}, "loss_mask", "bools, or integers 0 and 1", "2"),
        ({"token_rewards": [1.0, 2.0]}, "token_rewards", "shape [1]", "shape [2]"),
        ({"token_rewards": [math.nan]}, "token_rewards", "finite numbers", "nan"),
        ({"token_rewards": [math.inf]}, "token_rewards", "finite numbers", "inf"),
        ({"token_rewards": [1e300]}, "token_rewards", OF_FLOAT32, "1e+300"),
        (
            {"response_ids": [1, 2], "token_rewards": [3e38, 3e38]},
            "token_rewards",
            A_REWARD,
            "6.0000000109955115e+38",
        ),
        ({"logprobs": [-1e39]}, "logprobs", OF_FLOAT32, "-1e+39"),
        (
            {"token_rewards": [0.5], "reward": 0.50001},
            "reward",
            "the sum of token_rewards, 0.5",
            "0.50001",
        ),
        ({"token_extras": {"a": [1] * 4}}, "token_extras['a']", "shape [3] or [1]", "shape [4]"),
        ({"token_extras": {"reward": [1]}}, "token_extras", NOT_IN_USE, "'reward'"),
    ],
)
def test_invalid_turns(arguments: dict[str, Any], field: str, expected: str, actual: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        turn(**arguments)
    assert (caught.value.field, caught.value.expected) == (field, expected)
    assert str(caught.value.actual) == actual


def test_absent_logprobs_of_a_turn_differ_from_empty_ones() -> None:
    empty = turn(response_ids=[], logprobs=[])
    assert empty.logprobs is not None
    assert empty != turn(response_ids=[])


def test_strings_of_enums_become_plain() -> None:
    class Why(StrEnum):
        STOP = "stop"

    episode = completion(finish_reason=Why.STOP, metadata={"why": Why.STOP, "at": np.float64(1)})
    assert type(episode.finish_reason) is type(episode.metadata["why"]) is str
    assert type(episode.metadata["at"]) is float


def test_torch_is_not_imported() -> None:
    script = (
        "import sys, replaydb.codec as c;"
        "import replaydb.domain.episodes as e;"
        "ep = e.Episode(prompt_ids=[1], response_ids=[2], logprobs=[0.5], extras={'a': 1});"
        "several = [c.encode([ep], version=version) for version in (1, 2)];"
        "assert all(c.decode([core.data]).episodes == [ep] for [core] in several);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
