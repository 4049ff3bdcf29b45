"""Turns to rows, by the prefix rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaydb import Episode, InvalidInputError, Turn
from replaydb.episodes.merging import TOKEN_REWARDS
from replaydb.training import merge_turns
from support.batches import batch_of


def turn(prompt: list[int], response: list[int], **fields: Any) -> Turn:
    return Turn(prompt_ids=prompt, response_ids=response, **fields)


def test_the_worked_example() -> None:
    """[10,20,30] -> [40,50], then a prompt that goes on from there with 60, 70."""
    rows, report = merge_turns(
        [turn([10, 20, 30], [40, 50]), turn([10, 20, 30, 40, 50, 60, 70], [80, 90])]
    )
    (row,) = rows
    assert row.prompt_ids.tolist() == [10, 20, 30]
    assert row.response_ids.tolist() == [40, 50, 60, 70, 80, 90]
    assert row.loss_mask.astype(int).tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1]
    assert row.turns == ()
    assert (report.num_turns, report.num_rows, report.num_mismatches) == (2, 1, 0)
    assert report.merge_ratio == 2.0
    assert (report.num_tokens_before, report.num_tokens_after) == (14, 9)


def test_a_prompt_that_does_not_go_on_begins_a_row() -> None:
    rows, report = merge_turns(
        [
            turn([1], [2], reward=0.5, finish_reason="tool"),
            turn([1, 3], [4], reward=1.0, finish_reason="stop"),
            turn([1, 3, 4], [5], reward=2.0, finish_reason="length"),
        ]
    )
    assert [row.token_ids.tolist() for row in rows] == [[1, 2], [1, 3, 4, 5]]
    assert [row.prompt_length for row in rows] == [1, 2]
    assert [row.reward for row in rows] == [0.5, 2.0]
    assert [row.finish_reason for row in rows] == ["tool", "length"]
    assert report.num_mismatches == 1
    assert report.merge_ratio == 1.5


def test_a_prompt_that_is_all_there_was_goes_on() -> None:
    rows, _ = merge_turns([turn([1], [2]), turn([1, 2], [3])])
    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 3]]
    assert rows[0].loss_mask.tolist() == [False, True, True]


def test_a_shorter_prompt_does_not_go_on() -> None:
    rows, _ = merge_turns([turn([1, 2], [3]), turn([1, 2], [4])])
    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 3], [1, 2, 4]]


def test_rewards_of_every_turn_are_kept_on_its_last_action() -> None:
    rows, _ = merge_turns(
        [
            turn([1], [2, 3], reward=0.25),
            turn([1, 2, 3, 4], [5], reward=None),
            turn([1, 2, 3, 4, 5, 6], [7, 8], reward=-1.0),
        ]
    )
    assert rows[0].token_extras[TOKEN_REWARDS].tolist() == [0, 0, 0.25, 0, 0, 0, 0, -1]
    assert rows[0].reward == -1.0


def test_no_rewards_at_all() -> None:
    rows, _ = merge_turns([turn([1], [2])])
    assert rows[0].reward is None
    assert rows[0].token_extras == {}


def test_a_turn_without_action_leaves_its_reward_where_it_ends() -> None:
    rows, _ = merge_turns([turn([1], [2], reward=1.0), turn([1, 2, 3], [], reward=4.0)])
    assert rows[0].token_extras[TOKEN_REWARDS].tolist() == [0, 1, 4]
    rows, _ = merge_turns([turn([1], [2], reward=1.0), turn([1, 2], [], reward=4.0)])
    assert rows[0].token_extras[TOKEN_REWARDS].tolist() == [0, 5]


def test_absent_logprobs_are_not_empty_ones() -> None:
    absent, _ = merge_turns([turn([1], []), turn([1, 2], [3])])
    assert absent[0].logprobs is None
    empty, _ = merge_turns([turn([1], [], logprobs=[]), turn([1, 2], [3])])
    assert empty[0].logprobs is not None
    np.testing.assert_array_equal(empty[0].logprobs, [0, 0, np.nan])
    alone, _ = merge_turns([turn([1], [], logprobs=[])])
    assert alone[0].logprobs is not None
    assert alone[0].logprobs.tolist() == [0]


def test_logprobs_and_versions_stay_with_their_tokens() -> None:
    rows, _ = merge_turns(
        [
            turn([1], [2], logprobs=[-0.5], policy_version=3),
            turn([1, 2, 9], [3, 4], logprobs=[-1.0, -2.0], policy_version=[4, 5]),
        ]
    )
    assert rows[0].logprobs is not None
    assert rows[0].logprobs.tolist() == [0, -0.5, 0, -1, -2]
    assert isinstance(rows[0].policy_version, np.ndarray)
    assert rows[0].policy_version.tolist() == [3, 3, 4, 4, 5]
    apart, _ = merge_turns([turn([1], [2], policy_version=3), turn([7], [8])])
    assert [row.policy_version for row in apart] == [3, None]


def test_realignment_inside_the_last_answer() -> None:
    """The server saw 5 6 (end) as 56 (end); what was sampled stays."""
    turns = [turn([1, 2], [5, 6, 99]), turn([1, 2, 56, 99, 7], [8, 99])]
    rows, report = merge_turns(turns)
    assert len(rows) == 2
    assert report.num_realigned == 0
    rows, report = merge_turns(turns, end_token_id=99)
    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 5, 6, 99, 7, 8, 99]]
    assert rows[0].loss_mask.astype(int).tolist() == [0, 0, 1, 1, 1, 0, 1, 1]
    assert (report.num_realigned, report.num_mismatches) == (1, 0)


def test_realignment_where_the_end_was_not_sampled() -> None:
    rows, _ = merge_turns([turn([1], [5, 6]), turn([1, 56, 99, 7], [8])], end_token_id=99)
    assert [row.token_ids.tolist() for row in rows] == [[1, 5, 6, 99, 7, 8]]


def test_realignment_goes_on_after_itself() -> None:
    turns = [
        turn([1], [5, 6, 99]),
        turn([1, 56, 99, 7], [8, 99]),
        turn([1, 56, 99, 7, 8, 99, 9], [10]),
    ]
    rows, report = merge_turns(turns, end_token_id=99)
    assert [row.token_ids.tolist() for row in rows] == [[1, 5, 6, 99, 7, 8, 99, 9, 10]]
    assert report.num_realigned == 1


@pytest.mark.parametrize("prompt", [[3, 56, 99, 7], [1, 56, 7]])
def test_no_realignment_before_the_answer_or_without_an_end(prompt: list[int]) -> None:
    rows, report = merge_turns([turn([1], [5, 99]), turn(prompt, [8])], end_token_id=99)
    assert len(rows) == 2
    assert (report.num_realigned, report.num_mismatches) == (0, 1)


def test_what_an_episode_has_goes_to_every_row() -> None:
    import torch

    value = torch.arange(6, dtype=torch.bfloat16)
    one = Episode(
        turns=[turn([1], [2]), turn([1, 2], [3]), turn([7], [])],
        reward=2.0,
        advantage=0.5,
        token_extras={"value": value},
        extras={"state": [1, 2]},
        metadata={"tool": "python"},
        policy_version=6,
    )
    made = batch_of([[one]]).padded(0)
    assert made.token_ids.tolist() == [[1, 2, 3], [7, 0, 0]]
    assert made.token_extras["value"].tolist() == [[0, 1, 4], [5, 0, 0]]
    assert made.extras["state"].tolist() == [[1, 2], [1, 2]]
    assert made.advantages.tolist() == [0.5, 0.5]
    assert made.policy_versions.tolist() == [6, 6]
    assert made.rewards.tolist() == [2.0, 2.0]


def test_versions_of_an_episode_whose_turns_have_none() -> None:
    turns = [turn([1], [2]), turn([7], [8]), turn([7, 8], [9])]
    one = Episode(turns=turns, policy_version=[1, 2, 3, 4, 5, 6, 7])
    made = batch_of([[one]]).padded(0)
    assert made.token_ids.tolist() == [[1, 2, 0], [7, 8, 9]]
    assert made.token_versions is not None
    assert made.token_versions.tolist() == [[1, 2, 0], [3, 4, 7]]


def test_no_turns() -> None:
    with pytest.raises(InvalidInputError, match="turns"):
        merge_turns([])


tokens = st.lists(st.integers(1, 3), max_size=4)


@st.composite
def chains(draw: st.DrawFn) -> list[Turn]:
    """Turns that mostly go on from what was before."""
    context: list[int] = []
    found = []
    for _ in range(draw(st.integers(1, 5))):
        context = context + draw(tokens) if draw(st.booleans()) else draw(tokens)
        response = draw(tokens)
        found.append(turn(context, response, reward=draw(st.none() | st.just(1.0))))
        context = context + response
    return found


@settings(deadline=None)
@given(chains())
def test_merging_is_the_rule_done_step_by_step(turns: list[Turn]) -> None:
    expected: list[tuple[list[int], list[int], list[int]]] = []
    prompt: list[int] = turns[0].prompt_ids.tolist()
    response: list[int] = []
    mask: list[int] = []
    for i, one in enumerate(turns):
        have, given_prompt = prompt + response, one.prompt_ids.tolist()
        if i and given_prompt[: len(have)] == have:
            fresh = given_prompt[len(have) :]
            response += fresh
            mask += [0] * len(fresh)
        elif i:
            expected.append((prompt, response, mask))
            prompt, response, mask = given_prompt, [], []
        response += one.response_ids.tolist()
        mask += [1] * len(one.response_ids)
    expected.append((prompt, response, mask))
    rows, report = merge_turns(turns)
    assert expected == [
        (
            row.prompt_ids.tolist(),
            row.response_ids.tolist(),
            row.loss_mask[row.prompt_length :].astype(int).tolist(),
        )
        for row in rows
    ]
    assert report.num_rows == len(rows)
    paid = sum(row.token_extras.get(TOKEN_REWARDS, np.zeros(1)).sum() for row in rows)
    if all(row.num_tokens for row in rows):
        assert paid == sum(one.reward or 0 for one in turns)


def test_merging_is_linear() -> None:
    """A thousand turns of a growing context: quadratic work would take minutes."""
    context: list[int] = []
    turns = []
    for i in range(1000):
        context = [*context, i]
        turns.append(turn(context, [-i]))
        context = [*context, -i]
    rows, _ = merge_turns(turns)
    assert [row.num_tokens for row in rows] == [2000]
