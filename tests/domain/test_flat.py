"""Columns of episodes, and the views returned from them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from replaydb.domain.episodes import Episode, Turn
from replaydb.domain.episodes.flat import NO_VERSION, FlatTurns, flatten
from replaydb.domain.episodes.merging import merge_turns, restarts
from support.samples import sample_episodes

NAN = np.nan


def test_columns_are_concatenated() -> None:
    first = Episode(
        prompt_ids=[1], response_ids=[2, 3], logprobs=[-1.0, -2.0], reward=1.0, policy_version=7
    )
    second = Episode(
        token_ids=[4, 5], loss_mask=[0, 0], advantage=2.0, policy_version=[8, 9], metadata={"a": 1}
    )
    flat = flatten([first, second])
    assert (flat.num_episodes, len(flat.token_ids)) == (2, 5)
    assert flat.offsets.tolist() == [0, 3, 5]
    assert flat.lengths.tolist() == [3, 2]
    assert flat.prompt_lengths.tolist() == [1, 2]
    assert flat.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert flat.loss_mask.tolist() == [False, True, True, False, False]
    np.testing.assert_array_equal(flat.rewards, [1.0, NAN])
    np.testing.assert_array_equal(flat.advantages, [NAN, 2.0])
    assert flat.logprobs is not None
    np.testing.assert_array_equal(flat.logprobs, np.array([0, -1, -2, NAN, NAN], np.float32))
    assert flat.has_logprobs.tolist() == [True, False]
    assert flat.versions.tolist() == [7, NO_VERSION]
    assert flat.token_versions is not None
    assert flat.token_versions[3:].tolist() == [8, 9]
    assert flat.has_token_versions.tolist() == [False, True]
    assert flat.metadata == ({}, {"a": 1})
    assert flat.finish_reasons == (None, None)
    assert flat.turns is None
    dtypes = {
        "lengths": "int64",
        "prompt_lengths": "int64",
        "rewards": "float64",
        "advantages": "float64",
        "versions": "int64",
        "token_ids": "int32",
        "loss_mask": "bool",
        "logprobs": "float32",
        "token_versions": "int32",
        "has_logprobs": "bool",
        "has_token_versions": "bool",
    }
    assert {name: str(getattr(flat, name).dtype) for name in dtypes} == dtypes


def test_fields_without_values_have_no_column() -> None:
    flat = flatten([Episode(token_ids=[1], loss_mask=[1])] * 2)
    assert flat.logprobs is None
    assert flat.token_versions is None
    assert flat.token_extras == flat.extras == {}
    assert flat.each_token_extras == flat.each_extras == {}
    assert not flat.has_logprobs.any()


def test_extras_with_equal_shapes_are_columns_others_stay_with_episodes() -> None:
    first, second, third = sample_episodes()
    flat = flatten([first, second, third])
    assert set(flat.token_extras) == {"values"}
    assert flat.token_extras["values"].shape == (11, 1)
    assert set(flat.extras) == {"shared"}
    assert flat.extras["shared"].shape == (3, 4)
    assert {i: set(extras) for i, extras in flat.each_token_extras.items()} == {0: {"only/here"}}
    assert {i: set(extras) for i, extras in flat.each_extras.items()} == {
        0: {"state"},
        1: {"scalar"},
        2: {"empty"},
    }


@pytest.mark.parametrize(
    "other",
    [np.zeros(2, np.int64), np.zeros((2, 1), np.int32), torch.zeros(2).bfloat16()],
    ids=["dtype", "shape", "library"],
)
def test_extras_that_differ_are_kept_apart(other: object) -> None:
    episodes = [
        Episode(token_ids=[1, 2], loss_mask=[1, 1], token_extras={"a": array}, extras={"b": array})
        for array in (np.zeros(2, np.int32), other)
    ]
    flat = flatten(episodes)
    assert flat.token_extras == flat.extras == {}
    assert list(flat.each_token_extras) == list(flat.each_extras) == [0, 1]
    assert flat.episodes() == episodes


def test_tensors_are_joined_as_tensors() -> None:
    row = torch.tensor([[1.5], [-2.0]], dtype=torch.bfloat16)
    one = Episode(token_ids=[1, 2], loss_mask=[1, 1], token_extras={"a": row}, extras={"b": row})
    flat = flatten([one, one])
    joined, stacked = flat.token_extras["a"], flat.extras["b"]
    assert isinstance(joined, torch.Tensor)
    assert isinstance(stacked, torch.Tensor)
    assert joined.flatten().tolist() == [1.5, -2.0, 1.5, -2.0]
    assert (joined.dtype, tuple(stacked.shape)) == (torch.bfloat16, (2, 2, 1))


def test_turn_columns() -> None:
    plain = Episode(token_ids=[1], loss_mask=[1], logprobs=[-3.0])
    flat = flatten([plain, sample_episodes()[2], plain])
    turns = flat.turns
    assert turns is not None
    assert turns.counts.tolist() == [0, 2, 0]
    assert turns.lengths.tolist() == [3, 1]
    assert turns.prompt_lengths.tolist() == [1, 1]
    np.testing.assert_array_equal(turns.rewards, [0.25, 0.5])
    assert turns.versions.tolist() == [NO_VERSION] * 2
    assert turns.has_logprobs.tolist() == [True, False]
    assert turns.has_token_versions.tolist() == [True, False]
    assert turns.finish_reasons == ("tool_call", None)
    assert turns.metadata == ({"tool": "search"}, {})
    # the episode's version is unknown because that of one turn is
    assert flat.has_token_versions.tolist() == [False] * 3
    assert flat.versions.tolist() == [NO_VERSION] * 3
    assert flat.token_versions is not None
    assert flat.token_versions.tolist() == [0, 0, 1, 2, 0, 0]


def test_fields_of_some_turns_round_trip() -> None:
    turns = [
        Turn(prompt_ids=[1], response_ids=[2, 3], loss_mask=[0, 1], token_rewards=[1.0, 2.0]),
        Turn(prompt_ids=[4], response_ids=[5], reward=0.5, token_extras={"a": [6, 7]}),
        Turn(prompt_ids=[], response_ids=[8], token_extras={"b": [9], "a": [8]}),
    ]
    other = Episode(token_ids=[1], loss_mask=[1], token_extras={"a": np.zeros(1)})
    for episodes in ([Episode(turns=turns)], [other, Episode(turns=turns), other]):
        flat = flatten(episodes)
        assert flat.episodes() == episodes
        assert flat.turns is not None
        assert flat.turns.token_extras == ((), ("a",), ("b", "a"))
        assert flat.turns.has_token_rewards.tolist() == [True, False, False]
        assert flat.turns.token_rewards is not None
        begin = len(flat.token_ids) - 6 if len(episodes) == 1 else 1
        assert flat.turns.token_rewards[begin : begin + 6].tolist() == [0, 1, 2, 0, 0, 0]


def test_versions_of_turns_round_trip() -> None:
    turns = [
        Turn(prompt_ids=[1], response_ids=[2, 3], policy_version=[5, 4]),
        Turn(prompt_ids=[4, 5], response_ids=[6], policy_version=6),
        Turn(prompt_ids=[], response_ids=[7]),
    ]
    for chosen in (turns, turns[:2], turns[1:2], turns[2:]):
        episode = Episode(turns=chosen)
        assert flatten([episode]).episodes() == [episode]


def test_round_trip_and_texts() -> None:
    episodes = sample_episodes()
    flat = flatten(episodes)
    assert flat.episodes() == episodes
    assert [one.text for one in flat.episodes(["a", None, "c"])] == ["a", None, "c"]


def test_no_episodes() -> None:
    flat = flatten([])
    assert (flat.num_episodes, len(flat.token_ids), flat.episodes()) == (0, 0, [])
    assert flat.offsets.tolist() == [0]
    assert flat.token_ids.dtype == np.int32


def test_episodes_are_views_and_read_only() -> None:
    flat = flatten(sample_episodes())
    for episode in flat.episodes():
        views = [(episode.extras["shared"], flat.extras["shared"])]
        for one in episode.turns or [episode]:  # joint arrays of turns are copies
            views += [(one.prompt_ids, flat.token_ids), (one.loss_mask, flat.loss_mask)]
            if "values" in one.token_extras:
                views.append((one.token_extras["values"], flat.token_extras["values"]))
        for view, column in views:
            assert isinstance(view, np.ndarray)
            assert np.shares_memory(view, column) or not len(view)
            assert not view.flags.writeable


def test_equality() -> None:
    flat = flatten(sample_episodes())
    assert flat == flatten(sample_episodes())
    assert flat != replace(flat, rewards=flat.rewards + 1)
    assert flat != replace(flat, turns=None)
    assert isinstance(flat.turns, FlatTurns)
    assert flat != replace(flat, turns=replace(flat.turns, finish_reasons=("a", "b")))
    assert flat != "flat"
    assert flat.turns != "turns"


def test_restarts_match_the_mismatches_of_merging() -> None:
    """With their indexes, also after episodes without turns. A branch is no restart."""
    whole = [Turn(prompt_ids=[1], response_ids=[2]), Turn(prompt_ids=[1, 2, 3], response_ids=[])]
    cut = [*whole, Turn(prompt_ids=[1, 2], response_ids=[3]), Turn(prompt_ids=[], response_ids=[])]
    longer = Turn(prompt_ids=[1, 2, 3, 4], response_ids=[5])
    episodes = [
        Episode(prompt_ids=[7], response_ids=[8, 9]),
        Episode(turns=whole),
        Episode(turns=cut),
        Episode(turns=[*whole, longer, Turn(prompt_ids=[1, 2, 3, 5, 5, 6], response_ids=[7])]),
    ]
    found = list(restarts(episodes))
    assert found == [(2, 3)]
    for i, episode in enumerate(episodes):
        assert merge_turns(episode, interleaved=True)[1].num_mismatches == sum(
            it == i for it, _ in found
        )
    assert list(restarts(episodes[:1])) == []
