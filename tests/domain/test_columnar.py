"""Groups from flat and padded arrays equal groups of episodes with the same values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaydb.codec import encode
from replaydb.domain.episodes import Episode, EpisodeGroup
from replaydb.errors import InvalidInputError
from support.examples import examples

#: Fields with a value per token, and the dtype in which they are given.
PER_TOKEN = {"loss_mask": bool, "logprobs": np.float32, "versions": np.int32, "value": np.float16}


@st.composite
def rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Episodes as the lengths of their prompt and response, and values of their tokens."""
    lengths = st.tuples(st.integers(0, 4), st.integers(0, 4))
    seed = draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)
    return [
        {
            "prompt": prompt,
            "token_ids": generator.integers(-100, 2**31, prompt + response, np.int64),
            "loss_mask": generator.random(prompt + response) < 0.5,
            "logprobs": generator.standard_normal(prompt + response, np.float32),
            "versions": generator.integers(-5, 5, prompt + response, np.int32),
            "value": generator.standard_normal((prompt + response, 2)).astype(np.float16),
            "reward": float(generator.integers(0, 3)),
        }
        for prompt, response in draw(st.lists(lengths, min_size=1, max_size=5))
    ]


def padded(columns: list[np.ndarray], starts: list[int], width: int) -> np.ndarray:
    """Return rows of a width, each with its column at a start, and noise around it."""
    shape = (len(columns), width, *columns[0].shape[1:])
    found = np.ones(shape, columns[0].dtype)
    for row, column, start in zip(found, columns, starts, strict=True):
        row[start : start + len(column)] = column
    return found


@given(rows(), st.sampled_from(["flat", "right", "split"]), st.booleans(), st.data())
@settings(max_examples=examples(100))
def test_arrays_and_episodes_give_the_same_group(
    episodes: list[dict[str, Any]], layout: str, responses: bool, data: st.DataObject
) -> None:
    """In every layout, with values of all tokens or only of responses, as arrays or tensors."""
    prompts = [one["prompt"] for one in episodes]
    sizes = [len(one["token_ids"]) for one in episodes]
    most_prompt = max(prompts)
    most = most_prompt + max(size - prompt for size, prompt in zip(sizes, prompts, strict=True))
    as_tensor = data.draw(st.booleans())

    def columns(name: str, *, whole: bool) -> Any:
        values = [one[name] if whole else one[name][one["prompt"] :] for one in episodes]
        if layout == "flat":
            found = np.concatenate(values)
        elif layout == "right":  # padding on the right: responses begin at different columns
            found = padded(values, [0] * len(values), max(sizes))
        else:  # prompts end, and responses begin, at the same column
            starts = [most_prompt - prompt if whole else 0 for prompt in prompts]
            found = padded(values, starts, most if whole else most - most_prompt)
        return torch.from_numpy(found) if as_tensor else found

    whole = not responses or layout == "right"
    arrays: dict[str, Any] = {"token_ids": columns("token_ids", whole=True)}
    if layout == "split":
        present = [np.ones(size, bool) for size in sizes]
        starts = [most_prompt - prompt for prompt in prompts]
        mask = padded([~one for one in present], starts, most)
        arrays["attention_mask"] = ~mask
    else:
        arrays["lengths"] = sizes
    given_names = data.draw(st.sets(st.sampled_from(list(PER_TOKEN))))
    for name in given_names:
        values = columns(name, whole=whole)
        match name:
            case "versions":
                arrays["token_versions"] = values
            case "value":
                arrays["token_extras"] = {"value": values}
            case _:
                arrays[name] = values
    made = EpisodeGroup.from_arrays(
        "math",
        **arrays,
        prompt_lengths=prompts,
        rewards=[one["reward"] for one in episodes],
        group_uid="one",
    )

    def of(one: dict[str, Any], name: str) -> Any:
        if name not in given_names:
            return None
        return one[name] if whole else one[name][one["prompt"] :]

    expected = EpisodeGroup(
        "math",
        [
            Episode(
                prompt_ids=one["token_ids"][: one["prompt"]],
                response_ids=one["token_ids"][one["prompt"] :],
                loss_mask=of(one, "loss_mask"),
                logprobs=of(one, "logprobs"),
                policy_version=of(one, "versions"),
                token_extras={"value": of(one, "value")} if "value" in given_names else None,
                reward=one["reward"],
            )
            for one in episodes
        ],
        group_uid="one",
    )
    assert made == expected
    assert encode(made.episodes) == encode(expected.episodes)


OF_GROUP: dict[str, Any] = {
    "prompt_uid": "p",
    "priority": 2,
    "tags": {"level": 1},
    "expected_episodes": 4,
    "prompt": "1 + 1 =",
    "extras": {"picture": np.zeros(3, np.uint8)},
    "group_uid": "one",
}


def test_values_of_episodes_and_of_the_group() -> None:
    made = EpisodeGroup.from_arrays(
        "math",
        token_ids=[1, 2, 3, 4, 5],
        lengths=[2, 3],
        loss_mask=[0, 1, 0, 0, 1],
        rewards=[True, np.nan],
        advantages=torch.tensor([0.5, float("nan")], dtype=torch.bfloat16),
        policy_versions=[7, 8],
        finish_reasons=["stop", None],
        episode_extras={"image": np.arange(4, dtype=">i2").reshape(2, 2)},
        metadata=[None, {"turn": 1}],
        texts=["1 + 1 = 2", None],
        **OF_GROUP,
    )
    assert made == EpisodeGroup(
        "math",
        [
            Episode(
                token_ids=[1, 2],
                loss_mask=[0, 1],
                reward=1.0,
                advantage=0.5,
                policy_version=7,
                finish_reason="stop",
                extras={"image": np.array([0, 1], np.int16)},
                text="1 + 1 = 2",
            ),
            Episode(
                token_ids=[3, 4, 5],
                loss_mask=[0, 0, 1],
                policy_version=8,
                extras={"image": np.array([2, 3], np.int16)},
                metadata={"turn": 1},
            ),
        ],
        **OF_GROUP,
    )
    assert [one.prompt_length for one in made.episodes] == [1, 2]
    assert made.texts == ["1 + 1 = 2", None]


def test_prompts_end_at_the_first_token_in_the_loss() -> None:
    """Without one, an episode is a prompt."""
    made = EpisodeGroup.from_arrays(
        "math",
        token_ids=[[1, 2, 3], [4, 5, 6], [7, 8, 9]],
        lengths=[3, 2, 0],
        loss_mask=[[0, 1, 0], [0, 0, 1], [1, 1, 1]],
    )
    assert [one.prompt_length for one in made.episodes] == [1, 2, 0]
    assert made.num_loss_tokens == 1


def test_arrays_are_copied() -> None:
    tokens, logprobs = np.array([1, 2, 3], np.int32), np.zeros(3, np.float32)
    extra, bf16 = np.zeros((3, 2)), torch.zeros(3, dtype=torch.bfloat16)
    made = EpisodeGroup.from_arrays(
        "math",
        token_ids=tokens,
        lengths=[3],
        prompt_lengths=[1],
        logprobs=logprobs,
        token_extras={"extra": extra, "bf16": bf16},
        rewards=[1],
    )
    for array in (tokens, logprobs, extra, bf16):
        array[:] = 9
    [episode] = made.episodes
    assert episode.token_ids.tolist() == [1, 2, 3]
    assert not np.any(episode.logprobs)
    assert not episode.token_extras["extra"].any()
    assert not episode.token_extras["bf16"].any()
    with pytest.raises(ValueError, match="read-only"):
        episode.token_extras["extra"][0] = 1


def test_prompts_get_the_lowest_version_of_their_response() -> None:
    made = EpisodeGroup.from_arrays(
        "math",
        token_ids=[[0, 1, 2, 3], [1, 2, 3, 4]],
        attention_mask=[[0, 1, 1, 1], [1, 1, 0, 0]],
        prompt_lengths=[1, 2],
        token_versions=[[5, 4], [7, 7]],
    )
    first, second = made.episodes
    np.testing.assert_array_equal(first.policy_version, [4, 5, 4])
    assert second.policy_version is None
    assert made.min_policy_version is None


FLAT: dict[str, Any] = {"token_ids": [1, 2, 3], "lengths": [1, 2], "prompt_lengths": [0, 1]}
PADDED: dict[str, Any] = {
    "token_ids": [[1, 2, 3], [4, 5, 6]],
    "attention_mask": [[0, 1, 1], [1, 1, 0]],
    "prompt_lengths": [1, 1],
}


@pytest.mark.parametrize(
    ("arrays", "changes", "field", "expected", "actual"),
    [
        (FLAT, {"token_ids": 1}, "token_ids", "shape [T] or [E, L]", "shape []"),
        (FLAT, {"token_ids": [1.5, 2, 3]}, "token_ids", "integers", "dtype float64"),
        (FLAT, {"token_ids": [], "lengths": []}, "token_ids", "at least one episode", "none"),
        (FLAT, {"lengths": None}, "lengths", "the number of tokens of each episode", "None"),
        (
            FLAT,
            {"lengths": [1, 1]},
            "lengths",
            "lengths with a sum of 3, as many as token_ids",
            "2",
        ),
        (FLAT, {"lengths": [4, -1]}, "lengths[0]", "an integer from 0 to 3", "4"),
        (FLAT, {"lengths": [-1, 4]}, "lengths[0]", "an integer from 0 to 3", "-1"),
        (FLAT, {"prompt_lengths": [2, 1]}, "prompt_lengths[0]", "an integer from 0 to 1", "2"),
        (FLAT, {"prompt_lengths": [1]}, "prompt_lengths", "shape [2]", "shape [1]"),
        (
            FLAT,
            {"prompt_lengths": None},
            "prompt_lengths",
            "a value, if there is no loss_mask",
            "None",
        ),
        (
            FLAT,
            {"prompt_lengths": None, "loss_mask": [1, 1]},
            "prompt_lengths",
            "a value, if loss_mask has only responses",
            "None",
        ),
        (
            FLAT,
            {"loss_mask": [1]},
            "loss_mask",
            "shape [3], or [2] for the responses",
            "shape [1]",
        ),
        (FLAT, {"loss_mask": [0, 2, 1]}, "loss_mask", "bools, or integers 0 and 1", "2"),
        (FLAT, {"logprobs": [1, 2, "a"]}, "logprobs", "a bool, integer or float array", "dtype"),
        (
            FLAT,
            {"token_extras": {"a": np.zeros((1, 2))}},
            "token_extras['a']",
            "shape [3, ...], or [2, ...] for the responses",
            "shape [1, 2]",
        ),
        (
            FLAT,
            {"token_extras": {"logprobs": [1, 2, 3]}},
            "token_extras",
            "a name that is not in use",
            "'logprobs'",
        ),
        (
            FLAT,
            {"token_extras": {"a": [1, 2, 3]}, "episode_extras": {"a": [1, 2]}},
            "episode_extras",
            "a name that is not in use",
            "'a'",
        ),
        (
            FLAT,
            {"episode_extras": {"a": [1, 2, 3]}},
            "episode_extras['a']",
            "shape [2], one per episode",
            "shape [3]",
        ),
        (
            FLAT,
            {"rewards": [1, np.inf]},
            "rewards[1]",
            "a finite number from -3.40282e+38 to 3.40282e+38, or NaN",
            "inf",
        ),
        (
            FLAT,
            {"rewards": [1e39, 1]},
            "rewards[0]",
            "a finite number from -3.40282e+38 to 3.40282e+38, or NaN",
            "1e+39",
        ),
        (
            FLAT,
            {"advantages": [1, -np.inf]},
            "advantages[1]",
            "a finite number from -3.40282e+38 to 3.40282e+38, or NaN",
            "-inf",
        ),
        (
            FLAT,
            {"advantages": [1, 1e39]},
            "advantages[1]",
            "a finite number from -3.40282e+38 to 3.40282e+38, or NaN",
            "1e+39",
        ),
        (FLAT, {"advantages": 1.0}, "advantages", "shape [2], one per episode", "shape []"),
        (FLAT, {"rewards": [[1], [2]]}, "rewards", "real numbers, shape [2]", "shape [2, 1]"),
        (
            FLAT,
            {"rewards": np.ones(2, np.complex64)},
            "rewards",
            "real numbers, shape [2]",
            "complex",
        ),
        (FLAT, {"policy_versions": [1]}, "policy_versions", "shape [2], one per episode", "[1]"),
        (
            {"token_ids": [], "lengths": [0], "prompt_lengths": [0]},
            {"policy_versions": 1, "token_versions": []},
            "policy_versions",
            "None, as token_versions is given",
            "a value",
        ),
        (FLAT, {"policy_versions": 2**31}, "policy_versions", "an integer from", "2147483648"),
        (FLAT, {"policy_versions": 1.5}, "policy_versions", "an integer", "1.5"),
        (
            FLAT,
            {"policy_versions": 1, "token_versions": [1, 2, 3]},
            "policy_versions",
            "None, as token_versions is given",
            "a value",
        ),
        (
            FLAT,
            {"finish_reasons": ["stop"]},
            "finish_reasons",
            "2 values, one per episode",
            "1",
        ),
        (FLAT, {"finish_reasons": ["stop", 1]}, "finish_reasons[1]", "a str", "1"),
        (FLAT, {"texts": "ab"}, "texts", "a value or None for each episode", "str"),
        (FLAT, {"metadata": [{}, {"a": np.nan}]}, "metadata[1].a", "a finite number", "nan"),
        (FLAT, {"task_name": ""}, "task_name", "1 to 255 characters", "0 characters"),
        (FLAT, {"expected_episodes": 1}, "expected_episodes", "an integer from 2", "1"),
        (
            FLAT,
            {"attention_mask": [1, 1, 1], "lengths": None},
            "attention_mask",
            "the shape of padded token_ids [E, L]",
            "shape [3]",
        ),
        (PADDED, {"lengths": [2, 2]}, "attention_mask", "None, as lengths is given", "a value"),
        (
            PADDED,
            {"attention_mask": [[1, 1]]},
            "attention_mask",
            "the shape of padded token_ids [E, L]",
            "shape [1, 2]",
        ),
        (PADDED, {"attention_mask": None, "lengths": [1]}, "lengths", "shape [2]", "shape [1]"),
        (
            PADDED,
            {"attention_mask": None, "lengths": [1, 4]},
            "lengths[1]",
            "an integer from 0 to 3",
            "4",
        ),
        (
            PADDED,
            {"logprobs": [[0.5, 0.5], [0.5, 0.5]], "prompt_lengths": [1, 2]},
            "logprobs",
            "shape [2, 3], or [2, R] if the last R columns of token_ids are the responses",
            "shape [2, 2]",
        ),
        (
            PADDED,
            {"logprobs": [0.5] * 4},
            "logprobs",
            "shape [2, 3], or [2, R] if the last R columns of token_ids are the responses",
            "shape [4]",
        ),
    ],
)
def test_invalid_arrays(
    arrays: dict[str, Any], changes: dict[str, Any], field: str, expected: str, actual: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        EpisodeGroup.from_arrays(**{"task_name": "math"} | arrays | changes)
    assert caught.value.field == field
    assert expected in caught.value.expected
    assert actual in str(caught.value.actual)
