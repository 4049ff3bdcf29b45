"""Batches of trajectories with branches: all their rows, and each sampled token in one loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaydb import Batch, Episode, EpisodeGroup, Turn
from support.batches import stored_group
from support.examples import examples


@st.composite
def trajectories(draw: st.DrawFn) -> list[list[Episode]]:
    """Return groups of episodes whose turns form trees. No token is sampled twice."""
    sampled = count(100)
    return [
        [draw(_trajectory(sampled)) for _ in range(draw(st.integers(1, 3)))]
        for _ in range(draw(st.integers(1, 2)))
    ]


@st.composite
def _trajectory(draw: st.DrawFn, sampled: count[int]) -> Episode:
    turns: list[Turn] = []
    for i in range(draw(st.integers(1, 7))):
        response = [next(sampled) for _ in range(draw(st.integers(0, 3)))]
        new = draw(st.lists(st.integers(1, 3), max_size=2))
        above = draw(st.none() | st.sampled_from(range(i))) if i else None
        context: dict[str, Any] = {"prompt_ids": new}
        if above is not None:
            parent = turns[above]
            whole = [*parent.prompt_ids.tolist(), *parent.response_ids.tolist(), *new]
            by_parent: dict[str, Any] = {"parent": parent, "new_ids": new}
            context = draw(st.sampled_from([by_parent, {"prompt_ids": whole}]))
        turns.append(
            Turn(
                **context,
                response_ids=response,
                loss_mask=[draw(st.integers(0, 3)) > 0 for _ in response],
                token_rewards=[float(one) for one in response],
                logprobs=[-float(one) for one in response],
                is_discarded=draw(st.integers(0, 5)) == 0,
            )
        )
    return Episode(turns=turns, reward=sum(turn.reward or 0.0 for turn in turns))


LAYOUTS: dict[str, Callable[[Batch[Any]], tuple[Any, Any]]] = {
    "padded": lambda batch: (made := batch.padded(0), made.token_ids),
    "left": lambda batch: (made := batch.padded(0, side="left"), made.token_ids),
    "split": lambda batch: (made := batch.split(0), made.response_ids),
    "packed": lambda batch: (made := batch.packed(0, max_tokens=200), made.token_ids),
    "trees": lambda batch: (made := batch.trees(0), made.token_ids),
}


def wanted(groups: list[list[Episode]]) -> Counter[int]:
    """Return the sampled tokens that are trained on."""
    return Counter(
        token
        for episodes in groups
        for one in episodes
        for turn, is_trained in zip(one.turns, one.forest.is_trained, strict=True)
        if is_trained
        for token in turn.response_ids[turn.loss_mask].tolist()
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=examples(150), deadline=None)
@given(groups=trajectories(), is_stored=st.booleans())
def test_each_sampled_token_is_in_one_loss(
    layout: str, groups: list[list[Episode]], is_stored: bool
) -> None:
    several: list[Any] = [
        stored_group(one) if is_stored else EpisodeGroup("t", one) for one in groups
    ]
    made, ids = LAYOUTS[layout](Batch(several))
    assert Counter(ids[made.loss_mask].tolist()) == wanted(groups)
    assert sum(wanted(groups).values()) == sum(one.num_loss_tokens for one in several)
    # rewards and logprobs are those of the sampled tokens
    paid = made.token_extras.get("token_rewards")
    if paid is not None:
        assert torch.equal(paid[made.loss_mask], ids[made.loss_mask].float())
        sampled = sum(
            sum(turn.response_ids.tolist())
            for episodes in groups
            for one in episodes
            for turn, is_trained in zip(one.turns, one.forest.is_trained, strict=True)
            if is_trained
        )
        assert paid.sum() == sampled
    if made.logprobs is not None:
        assert torch.equal(made.logprobs[made.loss_mask], -ids[made.loss_mask].float())
    # all rows of an episode have its index and reward
    episodes = [one for episodes in groups for one in episodes]
    rows = [i for i, one in enumerate(episodes) for _ in one.row_lengths]
    assert made.episode_index.tolist() == rows
    assert made.rewards.tolist() == [episodes[i].reward for i in rows]
    of_group = [owner for owner, episodes in enumerate(groups) for _ in episodes]
    assert made.group_index.tolist() == [of_group[i] for i in rows]
    assert sum(made.lengths.tolist()) == sum(one.num_tokens for one in several)


def test_main_sub_sub_main_are_two_rows() -> None:
    main = Turn(prompt_ids=[1], response_ids=[10], token_rewards=[1.0])
    sub = Turn(prompt_ids=[2], response_ids=[11])
    turns = [
        main,
        sub,
        Turn(parent=sub, new_ids=[3], response_ids=[12]),
        Turn(parent=main, new_ids=[4], response_ids=[13]),
    ]
    one = Episode(turns=turns, reward=1.0, advantage=0.5)
    made = Batch([EpisodeGroup("t", [one, Episode(prompt_ids=[1], response_ids=[9])])]).padded(0)
    assert made.token_ids.tolist() == [[1, 10, 4, 13], [2, 11, 3, 12], [1, 9, 0, 0]]
    assert made.episode_index.tolist() == [0, 0, 1]
    assert made.rewards.tolist()[:2] == [1.0, 1.0]
    assert made.advantages.tolist()[:2] == [0.5, 0.5]
    assert made.token_extras["token_rewards"].tolist() == [[0, 1, 0, 0], [0] * 4, [0] * 4]


def test_a_trajectory_without_trained_turns_has_no_row() -> None:
    lost = Episode(turns=[Turn(prompt_ids=[1], response_ids=[2], is_discarded=True)], reward=1.0)
    kept = Episode(prompt_ids=[1], response_ids=[3], reward=0.0)
    group = EpisodeGroup("t", [lost, kept])
    made = Batch([group]).padded(0)
    assert (made.episode_index.tolist(), made.group_index.tolist()) == ([1], [0])
    assert (group.num_tokens, group.num_loss_tokens) == (2, 1)
    for layout in LAYOUTS.values():
        made, _ = layout(Batch([EpisodeGroup("t", [lost])]))
        assert (len(made), made.loss_mask.sum()) == (0, 0)
