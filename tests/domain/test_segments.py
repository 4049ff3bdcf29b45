"""Turns that continue other turns, and rows of tokens that share prefixes."""

from __future__ import annotations

import copy
import pickle
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaydb import Batch, Episode, EpisodeGroup, InvalidInputError, Ragged, Turn
from replaydb.domain.episodes.turns import with_own_extras
from replaydb.training import merge_turns
from support.batches import stored_group
from support.examples import examples
from support.samples import trees


def same_tensors(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and torch.equal(torch.nan_to_num(one, 7), torch.nan_to_num(other, 7))
    if isinstance(one, Ragged):
        return same_tensors(vars_of(one), vars_of(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_tensors(one[k], other[k]) for k in one)
    return bool(one == other)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.sampled_from(["float32", "int8", "bfloat16", "ragged"]).flatmap(
        lambda kind: st.lists(trees(kind), min_size=1, max_size=3)
    )
)
def test_turns_by_parent_are_as_whole_turns(several: list[tuple[Episode, Episode]]) -> None:
    for by_parent, whole in several:
        assert list(by_parent.turns) == list(whole.turns)
        assert np.array_equal(by_parent.token_ids, whole.token_ids)
    # A parent decides what a turn continues, if there are several turns that it could continue.
    several = [pair for pair in several if pair[0].forest == pair[1].forest]
    for by_parent, whole in several:
        assert [row.episode for row in merge_turns(by_parent)[0]] == [
            row.episode for row in merge_turns(whole)[0]
        ]
    batches = [
        Batch([EpisodeGroup("t", [pair[i] for pair in several], group_uid="g", status="aborted")])
        for i in (0, 1)
    ]
    layouts: list[Callable[[Batch[Any]], Any]] = [
        lambda batch: batch.padded(9, side="left", max_length=7),
        lambda batch: batch.split(9, max_prompt_length=4, max_length=5),
        lambda batch: batch.packed(9, max_tokens=200),
    ]
    for make in layouts:
        one, other = (vars_of(make(batch)) for batch in batches)
        assert same_tensors(one, other)


def vars_of(tensors: Any) -> dict[str, Any]:
    return {name: getattr(tensors, name) for name in tensors.__dataclass_fields__}


@pytest.mark.parametrize("extra", [None, np.zeros, np.arange])
def test_memory_is_that_of_the_distinct_tokens(extra: Callable[[int], Any] | None) -> None:
    new, response = [1] * 400, [2] * 400
    tracemalloc.start()
    turns: list[Turn] = []
    for i in range(300):
        context: dict[str, Any] = (
            {"parent": turns[-1], "new_ids": new} if i else {"prompt_ids": new}
        )
        extras = None if extra is None else {"x": extra(800 * (i + 1))}
        turns.append(Turn(**context, response_ids=response, token_extras=extras))
    group = EpisodeGroup("t", [Episode(turns=turns)])
    del extras
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert group.num_tokens == 800 * 300
    assert used < 4 * 300 * 800 * 4
    assert turns[-1].prompt_ids.tolist() == (new + response) * 299 + new


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "turn"),
        ({"prompt_ids": [1], "new_ids": [1]}, "turn"),
        ({"new_ids": [1]}, "parent"),
        ({"parent": "first", "new_ids": [1]}, "parent"),
        ({"parent": Turn(prompt_ids=[1], response_ids=[]), "new_ids": [0.5]}, "new_ids"),
    ],
)
def test_wrong_parents(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Turn(response_ids=[2], **arguments)
    assert caught.value.field == field


def test_a_parent_is_an_earlier_turn_of_the_episode() -> None:
    first = Turn(prompt_ids=[1], response_ids=[2])
    second = Turn(parent=first, new_ids=[3], response_ids=[4])
    for turns in ([second], [second, first]):
        with pytest.raises(InvalidInputError, match=r"turns\[0\]\.parent: expected an earlier"):
            Episode(turns=turns)
    assert Episode(turns=[first, second]).turns[1].parent is first


def test_values_of_all_but_the_last_token() -> None:
    values = np.arange(4)[:, None]
    one = Episode(prompt_ids=[1, 2], response_ids=[3, 4, 5], token_extras={"x": values})
    other = Episode(token_ids=[1, 2, 3], loss_mask=[0, 1, 1], token_extras={"x": [[7], [8]]})
    assert one.token_extras["x"].tolist() == values.tolist()
    padded = Batch([EpisodeGroup("t", [one, other])]).padded(0)
    assert padded.token_extras["x"][..., 0].tolist() == [[0, 1, 2, 3, 0], [7, 8, 0, 0, 0]]


@pytest.mark.parametrize("first", [0, 1])
def test_an_extra_keeps_what_differs_from_its_parent(first: int) -> None:
    above = Turn(prompt_ids=[1, 2], response_ids=[3], token_extras={"x": [0, 1, 2]})
    values = np.array([first, 1, 2, 3, 4])
    below = Turn(parent=above, new_ids=[4], response_ids=[5], token_extras={"x": values})
    column = below.segment.columns["token/x"]
    assert below.token_extras["x"].tolist() == values.tolist()
    assert column.begin == (0 if first else 3)


@pytest.mark.parametrize(
    "above", [None, np.ones((3, 2), np.uint8), np.ones((2, 2), np.uint8), np.ones((3, 2), np.int8)]
)
def test_extras_of_own_tokens_follow_those_of_the_parent(above: Any) -> None:
    extras = {} if above is None else {"x": above}
    parent = Turn(prompt_ids=[1, 2], response_ids=[3], token_extras=extras)
    own = np.arange(6, dtype=np.uint8).reshape(3, 2)
    more = {"x": own, "y": Ragged.of([[1], [], [2, 3]])}
    turn = Turn(parent=parent, new_ids=[4], response_ids=[5, 6], token_extras={"z": [7, 8]})
    made = with_own_extras(turn, more)
    before = (
        above if above is not None and above.shape == (3, 2) and above.dtype == own.dtype else 0
    )
    assert made.token_extras["x"].tolist() == [
        *(np.zeros((3, 2), int) + before).tolist(),
        *own.tolist(),
    ]
    assert made.token_extras["y"].tolist() == [[], [], [], [1], [], [2, 3]]
    assert made.token_extras["z"].tolist() == [0, 0, 0, 0, 7, 8]
    assert turn.token_extras.keys() == {"z"}
    assert made == Turn(
        parent=parent, new_ids=[4], response_ids=[5, 6], token_extras=made.token_extras
    )
    first = with_own_extras(Turn(prompt_ids=[1], response_ids=[2]), {"x": [5, 6]})
    assert first == Turn(prompt_ids=[1], response_ids=[2], token_extras={"x": [5, 6]})


@pytest.mark.parametrize(
    ("extras", "field"),
    [
        ({"x": [1]}, "token_extras['x']"),
        ({"z": [1, 2]}, "token_extras"),
        ({"": [1, 2]}, "token_extras name"),
    ],
)
def test_wrong_extras_of_own_tokens(extras: dict[str, Any], field: str) -> None:
    parent = Turn(prompt_ids=[1, 2], response_ids=[3])
    turn = Turn(parent=parent, new_ids=[4], response_ids=[5], token_extras={"z": [7]})
    with pytest.raises(InvalidInputError) as caught:
        with_own_extras(turn, extras)
    assert caught.value.field == field


def test_rewards_of_tokens_have_a_value_for_the_last_token() -> None:
    for made in (Episode, Turn):
        with pytest.raises(InvalidInputError, match="token_rewards"):
            made(prompt_ids=[1, 2], response_ids=[3], token_extras={"token_rewards": [0.0, 1.0]})


def pickled(one: Any) -> Any:
    return pickle.loads(pickle.dumps(one))  # noqa: S301 - our own bytes


@pytest.mark.parametrize("copied", [pickled, copy.deepcopy])
@pytest.mark.parametrize("is_stored", [False, True])
def test_long_episodes_are_pickled_and_copied(
    copied: Callable[[EpisodeGroup], EpisodeGroup], is_stored: bool
) -> None:
    """Without recursion from turn to parent, and without a copy of each context."""
    turns = [Turn(prompt_ids=range(40), response_ids=[1])]
    for i in range(1999):
        turns.append(Turn(parent=turns[-1], new_ids=[2], response_ids=[i]))
    group: EpisodeGroup = EpisodeGroup("t", [Episode(turns=turns)])
    if is_stored:
        group = stored_group(group.episodes)
    [made] = copied(group).episodes
    assert len(pickle.dumps(made)) < 2**20
    assert made.turns[-1] == turns[-1]
    assert made.turns[-1].parent is made.turns[-2]
    assert made.turns[-1].segment.parent is made.turns[-2].segment
    assert not made.turns[-1].prompt_ids.flags.writeable


@pytest.mark.parametrize("copied", [pickled, copy.deepcopy])
def test_the_last_of_many_is_pickled_and_copied_alone(copied: Callable[[Any], Any]) -> None:
    turn = Turn(prompt_ids=range(40), response_ids=[0])
    steps, context = [], [*range(40)]
    for i in range(1, 2000):
        turn = Turn(parent=turn, new_ids=[2], response_ids=[i])
        steps.append(Episode(prompt_ids=context, response_ids=[i]))
        context = [*context, i]
    # episodes that are stored together share the beginnings of their prompts
    episode = stored_group(steps).episodes[-1]
    assert episode.segments[0].parent is not None
    assert copied(turn) == turn
    assert copied(episode) == episode == steps[-1]
