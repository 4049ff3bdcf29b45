"""Merging turns to rows, by the prefix rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaydb import Episode, InvalidInputError, Turn
from replaydb.domain.episodes.building import TOKEN_REWARDS
from replaydb.training import MergedRow, MergeReport, merge_turns
from support.batches import batch_of


def turn(prompt: list[int], response: list[int], **fields: Any) -> Turn:
    return Turn(prompt_ids=prompt, response_ids=response, **fields)


def step(prompt: list[int], response: list[int], **fields: Any) -> Episode:
    return Episode(prompt_ids=prompt, response_ids=response, **fields)


def merge(
    turns: list[Turn], *, end_token_id: int | None = None
) -> tuple[list[Episode], MergeReport]:
    """Return the rows without their turn indexes."""
    rows, report = merge_turns(turns, end_token_id=end_token_id)
    return [row.episode for row in rows], report


def test_the_worked_example() -> None:
    """[10,20,30] -> [40,50], then a prompt that continues with 60, 70."""
    rows, report = merge(
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


def test_a_prompt_that_does_not_continue_begins_a_row() -> None:
    rows, report = merge(
        [
            turn([1], [2], reward=0.5, finish_reason="tool"),
            turn([1, 3], [4], reward=1.0, finish_reason="stop"),
            turn([1, 3, 4], [5], reward=2.0, finish_reason="length"),
        ]
    )
    assert [row.token_ids.tolist() for row in rows] == [[1, 2], [1, 3, 4, 5]]
    assert [row.prompt_length for row in rows] == [1, 2]
    assert [row.reward for row in rows] == [3.5, 3.5]
    assert [row.finish_reason for row in rows] == ["tool", "length"]
    assert report.num_mismatches == 1
    assert report.merge_ratio == 1.5


def test_rewards_of_every_turn_are_kept_on_its_last_action() -> None:
    rows, _ = merge(
        [
            turn([1], [2, 3], reward=0.25),
            turn([1, 2, 3, 4], [5], reward=None),
            turn([1, 2, 3, 4, 5, 6], [7, 8], reward=-1.0),
        ]
    )
    assert rows[0].token_extras[TOKEN_REWARDS].tolist() == [0, 0, 0.25, 0, 0, 0, 0, -1]
    assert rows[0].reward == -0.75


def test_no_rewards_at_all() -> None:
    rows, _ = merge([turn([1], [2])])
    assert rows[0].reward is None
    assert rows[0].token_extras == {}


def test_a_turn_without_action_leaves_its_reward_where_it_ends() -> None:
    rows, _ = merge([turn([1], [2], reward=1.0), turn([1, 2, 3], [], reward=4.0)])
    assert rows[0].token_extras[TOKEN_REWARDS].tolist() == [0, 1, 4]
    rows, _ = merge([turn([1], [2], reward=1.0), turn([1, 2], [], reward=4.0)])
    assert rows[0].token_extras[TOKEN_REWARDS].tolist() == [0, 5]


def test_absent_logprobs_are_not_empty_ones() -> None:
    absent, _ = merge([turn([1], []), turn([1, 2], [3])])
    assert absent[0].logprobs is None
    empty, _ = merge([turn([1], [], logprobs=[]), turn([1, 2], [3])])
    assert empty[0].logprobs is not None
    np.testing.assert_array_equal(empty[0].logprobs, [0, 0, np.nan])
    alone, _ = merge([turn([1], [], logprobs=[])])
    assert alone[0].logprobs is not None
    assert alone[0].logprobs.tolist() == [0]
    assert alone[0].logprobs.dtype == np.float32


def test_logprobs_and_versions_stay_with_their_tokens() -> None:
    rows, _ = merge(
        [
            turn([1], [2], logprobs=[-0.5], policy_version=3),
            turn([1, 2, 9], [3, 4], logprobs=[-1.0, -2.0], policy_version=[4, 5]),
        ]
    )
    assert rows[0].logprobs is not None
    assert rows[0].logprobs.tolist() == [0, -0.5, 0, -1, -2]
    assert isinstance(rows[0].policy_version, np.ndarray)
    assert rows[0].policy_version.tolist() == [3, 3, 4, 4, 5]
    apart, _ = merge([turn([1], [2], policy_version=3), turn([7], [8])])
    assert [row.policy_version for row in apart] == [3, None]


def test_realignment_inside_the_last_answer() -> None:
    """The server sent 5 6 (end) as 56 (end); the sampled tokens are kept."""
    turns = [turn([1, 2], [5, 6, 99]), turn([1, 2, 56, 99, 7], [8, 99])]
    rows, report = merge(turns)
    assert len(rows) == 2
    assert report.num_realigned == 0
    rows, report = merge(turns, end_token_id=99)
    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 5, 6, 99, 7, 8, 99]]
    assert rows[0].loss_mask.astype(int).tolist() == [0, 0, 1, 1, 1, 0, 1, 1]
    assert (report.num_realigned, report.num_mismatches) == (1, 0)


def test_realignment_where_the_end_was_not_sampled() -> None:
    rows, _ = merge([turn([1], [5, 6]), turn([1, 56, 99, 7], [8])], end_token_id=99)
    assert [row.token_ids.tolist() for row in rows] == [[1, 5, 6, 99, 7, 8]]


def test_realignment_of_consecutive_turns() -> None:
    turns = [
        turn([1], [5, 6, 99]),
        turn([1, 56, 99, 7], [8, 99]),
        turn([1, 56, 99, 7, 8, 99, 9], [10]),
    ]
    rows, report = merge(turns, end_token_id=99)
    assert [row.token_ids.tolist() for row in rows] == [[1, 5, 6, 99, 7, 8, 99, 9, 10]]
    assert report.num_realigned == 1


@pytest.mark.parametrize("prompt", [[3, 56, 99, 7], [1, 56, 7]])
def test_no_realignment_before_the_answer_or_without_an_end(prompt: list[int]) -> None:
    rows, report = merge([turn([1], [5, 99]), turn(prompt, [8])], end_token_id=99)
    assert len(rows) == 2
    assert (report.num_realigned, report.num_mismatches) == (0, 1)


def test_fields_of_an_episode_go_to_every_row() -> None:
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
    for nothing in ([], 3, [3], [turn([1], [2]), step([1], [2])], [step([1], [2]), 3]):
        with pytest.raises(InvalidInputError, match=r"turns|trajectory"):
            merge_turns(nothing)  # type: ignore[arg-type]


def test_rows_have_the_indexes_of_their_turns() -> None:
    turns = [turn([1], [2]), turn([1, 2, 3], [4]), turn([9], [8]), turn([7], [6])]
    rows, _ = merge_turns(turns)
    assert [(row.first_turn, row.last_turn) for row in rows] == [(0, 1), (2, 2), (3, 3)]
    assert merge_turns(Episode(turns=turns))[0] == rows


def test_rewards_are_placed_at_tokens_in_the_loss() -> None:
    """An appended end token and the output of a tool are not actions."""
    rows, _ = merge(
        [
            turn([1], [2, 99], loss_mask=[1, 0], reward=0.5),
            turn([1, 2, 99, 3], [4, 5, 6], loss_mask=[True, False, False], reward=1.0),
            turn([1, 2, 99, 3, 4, 5, 6], [7, 8], loss_mask=[0, 0], reward=2.0),
        ]
    )
    assert rows[0].loss_mask.astype(int).tolist() == [0, 1, 0, 0, 1, 0, 0, 0, 0]
    assert rows[0].token_extras[TOKEN_REWARDS].tolist() == [0, 0.5, 0, 0, 1, 0, 0, 0, 2]


def test_rewards_of_tokens_stay_with_them() -> None:
    turns = [
        turn([1], [2, 3], token_rewards=[0.25, 0.5]),
        turn([1, 2, 3, 4], [5], reward=2.0),
        turn([9], [8, 7], token_rewards=[-1, 0]),
        turn([6], [5]),
    ]
    rows, _ = merge(turns)
    assert [row.token_extras[TOKEN_REWARDS].tolist() for row in rows] == [
        [0, 0.25, 0.5, 0, 2],
        [0, -1, 0],
        [0, 0],
    ]
    assert [row.reward for row in rows] == [1.75] * 3
    assert {str(row.token_extras[TOKEN_REWARDS].dtype) for row in rows} == {"float32"}


def test_token_extras_of_turns() -> None:
    import torch

    first, second = torch.ones(2).bfloat16(), torch.full((4,), 2.0).bfloat16()
    turns = [
        turn([1], [2], token_extras={"value": first}),
        turn([1, 2, 3], [4], token_extras={"value": second, "expert": [[5]]}),
        turn([9], [8]),
    ]
    rows, _ = merge(turns)
    assert rows[0].token_extras["value"].tolist() == [1, 1, 2, 2]
    assert rows[0].token_extras["value"].dtype == torch.bfloat16
    assert rows[0].token_extras["expert"].tolist() == [[0], [0], [0], [5]]
    assert rows[1].token_extras["value"].tolist() == [0, 0]


def test_steps_stored_as_episodes() -> None:
    steps = [
        step([1], [2], reward=0.5, finish_reason="tool", metadata={"step": 0}),
        step(
            [1, 2, 3],
            [4, 5],
            token_extras={TOKEN_REWARDS: np.array([0.25, 0.0])},
            finish_reason="stop",
            advantage=0.5,
            extras={"state": [1]},
            metadata={"step": 1},
            text="the end",
        ),
        step([7], [8], token_extras={TOKEN_REWARDS: [1]}, policy_version=3),
    ]
    (row, other), report = merge_turns(steps)
    assert (row.first_turn, row.last_turn, other.first_turn) == (0, 1, 2)
    assert row.episode.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert row.episode.token_extras[TOKEN_REWARDS].tolist() == [0, 0.5, 0, 0.25, 0]
    assert (row.episode.reward, other.episode.reward) == (1.75, 1.75)
    assert (row.episode.finish_reason, row.episode.advantage) == ("stop", 0.5)
    assert (row.episode.metadata, row.episode.text) == ({"step": 1}, "the end")
    assert row.episode.extras["state"].tolist() == [1]
    assert (row.episode.policy_version, other.episode.policy_version) == (None, 3)
    assert (report.num_turns, report.num_rows) == (3, 2)


@pytest.mark.parametrize(
    ("single", "field"),
    [
        (Episode(token_ids=[1, 2], loss_mask=[1, 1], reward=1.0), None),
        (step([1], [2], loss_mask=[1, 1]), "loss_mask"),
        (step([1], [2], token_extras={TOKEN_REWARDS: [1.0, 0.0]}), TOKEN_REWARDS),
        (step([1], [2], token_extras={TOKEN_REWARDS: [1.0]}, reward=2.0), "reward"),
        (step([1], [2], token_extras={TOKEN_REWARDS: [[1.0]]}), TOKEN_REWARDS),
    ],
)
def test_episodes_that_cannot_be_a_turn(single: Episode, field: str | None) -> None:
    if field is None:
        assert merge_turns([single])[0][0].episode.loss_mask.all()
        return
    with pytest.raises(InvalidInputError) as caught:
        merge_turns([single])
    assert caught.value.field == field


def test_extras_of_different_shapes() -> None:
    steps = [
        step([1], [2], token_extras={"value": np.zeros(2)}),
        step([1, 2], [3], token_extras={"value": np.zeros(3, np.float32)}),
    ]
    with pytest.raises(InvalidInputError, match=r"token_extras\['value'\].*float32.*float64"):
        merge_turns(steps)


def test_the_last_row_has_the_finish_reason_of_its_episode() -> None:
    apart = [turn([1], [2], finish_reason="tool"), turn([3], [4]), turn([5], [6])]
    rows, _ = merge_turns(Episode(turns=apart, finish_reason="length"))
    assert [row.episode.finish_reason for row in rows] == ["tool", None, "length"]


tokens = st.lists(st.integers(1, 3), max_size=4)
quarters = st.integers(-8, 8).map(lambda n: n / 4)


@st.composite
def chains(draw: st.DrawFn) -> list[Turn]:
    """Turns that mostly continue the turn before."""
    context: list[int] = []
    found = []
    for _ in range(draw(st.integers(1, 5))):
        context = context + draw(tokens) if draw(st.booleans()) else draw(tokens)
        response = draw(tokens)
        size = len(response)
        mask = draw(st.none() | st.lists(st.booleans(), min_size=size, max_size=size))
        rewards = draw(st.none() | st.lists(quarters, min_size=size, max_size=size))
        fields: dict[str, Any] = {
            "loss_mask": mask,
            "token_rewards": rewards,
            "reward": draw(st.none() | quarters) if rewards is None else None,
            "logprobs": draw(st.none() | st.just([-0.5] * size)),
            "policy_version": draw(st.none() | st.just(3) | st.just([4] * size)),
            "finish_reason": draw(st.none() | st.just("stop")),
        }
        if draw(st.booleans()):
            fields["token_extras"] = {"value": np.arange(1.0, len(context) + size + 1)}
        found.append(turn(context, response, **fields))
        context = context + response
    return found


def as_step(one: Turn) -> Episode:
    rewards = {} if one.token_rewards is None else {TOKEN_REWARDS: one.token_rewards}
    return Episode(
        prompt_ids=one.prompt_ids,
        response_ids=one.response_ids,
        loss_mask=one.loss_mask,
        logprobs=one.logprobs,
        reward=one.reward,
        policy_version=one.policy_version,
        finish_reason=one.finish_reason,
        token_extras=one.token_extras | rewards,
    )


@settings(deadline=None)
@given(chains())
def test_turns_an_episode_of_them_and_single_steps_are_merged_alike(turns: list[Turn]) -> None:
    found = merge_turns(turns)
    assert merge_turns(Episode(turns=turns)) == found
    assert merge_turns([Episode(turns=turns[:2]), *map(as_step, turns[2:])]) == found
    assert merge_turns(map(as_step, turns)) == found


@settings(deadline=None)
@given(chains())
def test_rows_and_tensors_agree(turns: list[Turn]) -> None:
    rows: list[MergedRow] = merge_turns(turns, interleaved=True)[0]  # as in a batch
    made = batch_of([[step([5], [6])], [Episode(turns=turns)]]).padded(0)
    paid = made.token_extras.get(TOKEN_REWARDS)
    assert made.episode_index.tolist() == [0] + [1] * len(rows)
    for i, (one, *_) in enumerate(rows, start=1):
        size = one.num_tokens
        assert made.token_ids[i, :size].tolist() == one.token_ids.tolist()
        assert made.loss_mask[i, :size].tolist() == one.loss_mask.tolist()
        reward = made.rewards[i].item()
        assert reward == one.reward or (np.isnan(reward) and one.reward is None)
        assert (paid is None) == (one.reward is None)
        if paid is not None:
            assert paid[i, :size].tolist() == one.token_extras[TOKEN_REWARDS].tolist()


def test_the_reward_of_a_turn_before_the_first_token_is_not_lost() -> None:
    first = Turn(prompt_ids=[], response_ids=[], reward=0.25)
    [row] = merge([first, Turn(prompt_ids=[], response_ids=[1, 2], reward=1.0)])[0]
    assert row.token_extras[TOKEN_REWARDS].tolist() == [0.25, 1.0]


@settings(deadline=None)
@given(chains())
def test_merging_equals_a_plain_implementation_of_the_rule(turns: list[Turn]) -> None:
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
        mask += one.loss_mask.astype(int).tolist()
    expected.append((prompt, response, mask))
    rows, report = merge(turns)
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
    rows, _ = merge(turns)
    assert [row.num_tokens for row in rows] == [2000]
