"""Which turns continue each other, and the rows that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaydb import Episode, Turn, codec
from replaydb.domain.episodes import forest
from replaydb.domain.episodes.turns import parents_of
from replaydb.training import merge_turns
from support.examples import examples
from support.samples import trees


def turn(prompt: Sequence[int], response: Sequence[int], **fields: Any) -> Turn:
    return Turn(prompt_ids=prompt, response_ids=response, **fields)


def ids(one: Turn) -> list[int]:
    return [*one.prompt_ids.tolist(), *one.response_ids.tolist()]


def plain(turns: Sequence[Turn]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Return what each turn continues, and which are trained on, by comparing all of them."""
    continues: list[int] = []
    trained: list[bool] = []
    for i, (one, named) in enumerate(zip(turns, parents_of(turns), strict=True)):
        context = one.prompt_ids.tolist()
        begins = [j for j in range(i) if context[: turns[j].num_tokens] == ids(turns[j])]
        fits = [j for j in begins if trained[j] or len(turns[j].response_ids)]
        best = max(fits, key=lambda j: (turns[j].num_tokens, trained[j], j), default=-1)
        above = named if named in begins else best
        continues.append(above)
        below = [trained[j] for j in (named, above) if j >= 0]
        trained.append(not one.is_discarded and all(below))
    return tuple(continues), tuple(trained)


@settings(max_examples=examples(400), deadline=None)
@given(trees("float32").flatmap(st.sampled_from))
def test_the_forest_is_that_of_a_plain_implementation(one: Episode) -> None:
    """Also of what is read from a payload, whose turns are stored by other parents."""
    assert one.forest == plain(one.turns)
    [found] = codec.decode([part.data for part in codec.encode([one])]).episodes
    assert found.forest == one.forest


@settings(max_examples=examples(400), deadline=None)
@given(trees("float32").flatmap(st.sampled_from))
def test_rows_are_the_paths_and_each_response_is_in_one_loss(one: Episode) -> None:
    continues, trained = one.forest
    rows, report = merge_turns(one, interleaved=True)
    ends = [i for i in range(len(trained)) if trained[i]]
    ends = [i for i in ends if not any(continues[j] == i for j in ends)]
    assert sorted(row.last_turn for row in rows) == ends
    owned = [row.turns[row.num_shared :] for row in rows]
    assert [mine[0] for mine in owned] == sorted(mine[0] for mine in owned)
    assert sorted(i for mine in owned for i in mine) == [i for i, it in enumerate(trained) if it]
    for row in rows:
        assert [continues[i] for i in row.turns] == [-1, *row.turns[:-1]]
        assert (row.first_turn, row.last_turn) == (row.turns[0], row.turns[-1])
        assert row.episode.token_ids.tolist() == ids(one.turns[row.last_turn])
        expected = np.zeros(row.episode.num_tokens, np.bool_)
        rewards = np.zeros(row.episode.num_tokens, np.float32)
        for i in row.turns[row.num_shared :]:
            mine = one.turns[i]
            end, size = mine.num_tokens, len(mine.response_ids)
            expected[end - size : end] = mine.loss_mask
            if mine.reward is not None and len(rewards):
                last = np.flatnonzero(mine.loss_mask)
                rewards[end - size + last[-1] if len(last) else max(end - 1, 0)] += mine.reward
        assert row.episode.loss_mask.tolist() == expected.tolist()
        if (paid := row.episode.token_extras.get("token_rewards")) is not None:
            assert paid.tolist() == rewards.tolist()
    assert one.row_lengths == [one.turns[end].num_tokens for end in ends]
    assert sorted(one.row_lengths) == sorted(row.episode.num_tokens for row in rows)
    assert one.num_loss_tokens == sum(row.episode.num_loss_tokens for row in rows)
    assert one.num_tokens == report.num_tokens_after
    assert (report.num_turns, report.num_rows) == (len(trained), len(rows))
    assert report.num_discarded == trained.count(False)


A, B, C, D = [1, 2], [3, 4], [5, 6], [7, 8]


def rows_of(turns: Sequence[Turn], **options: Any) -> list[tuple[tuple[int, ...], int]]:
    rows = merge_turns(turns, interleaved=True, **options)[0]
    return [(row.turns, row.num_shared) for row in rows]


def test_a_sub_agent_between_turns_of_the_main_one() -> None:
    main = turn(A, B)
    sub = turn(C, D)
    turns = [main, sub, turn(C + D, [9]), turn(A + B + [9], [1])]
    assert rows_of(turns) == [((0, 3), 0), ((1, 2), 0)]
    assert [row.turns for row in merge_turns(turns)[0]] == [(0,), (1, 2), (3,)]
    by_parent = [main, sub, Turn(parent=sub, new_ids=[], response_ids=[9]),
                 Turn(parent=main, new_ids=[9], response_ids=[1])]  # fmt: skip
    assert rows_of(by_parent) == rows_of(turns)


def test_many_sub_agents_before_the_main_one_continues() -> None:
    subs = [turn([100 + i], [i]) for i in range(20)]
    turns = [turn(A, B), *subs, turn(A + B + C, D)]
    assert rows_of(turns)[0] == ((0, 21), 0)
    assert len(rows_of(turns)) == 21


def test_a_retry_whose_first_attempt_is_discarded_takes_its_place() -> None:
    """The shared response is in the loss of the first branch that is trained on."""
    first = turn(A, B)
    turns = [first, turn(A + B + C, [1]), turn(A + B + C, [2]), turn(A + B + C + [2], D)]
    assert rows_of(turns) == [((0, 1), 0), ((0, 2, 3), 1)]
    turns[1] = turn(A + B + C, [1], is_discarded=True)
    assert rows_of(turns) == [((0, 2, 3), 0)]
    assert merge_turns(turns)[0] == merge_turns(turns, interleaved=True)[0]
    turns.append(turn(A + B + C + [1], D))  # below the discarded one
    assert rows_of(turns) == [((0, 2, 3), 0)]
    assert Episode(turns=turns).num_loss_tokens == 2 + 1 + 2
    named = Turn(parent=turns[1], prompt_ids=[9], response_ids=[9])  # by its parent only
    assert rows_of([*turns, named]) == [((0, 2, 3), 0)]


def test_a_retry_of_a_turn_that_failed_without_a_response() -> None:
    """It has the context of the failed turn, and does not follow it."""
    failed = turn(A + B + C, [], is_discarded=True)
    turns = [turn(A, B), failed, turn(A + B + C, D)]
    assert rows_of(turns) == [((0, 2), 0)]
    turns[2] = Turn(parent=failed, new_ids=[], response_ids=D)
    assert rows_of(turns) == [((0,), 0)]


def test_equal_turns() -> None:
    """A turn continues the last of them, but one that is trained on first."""
    lost, kept = turn(A, B, is_discarded=True), turn(A, B)
    for turns in ([lost, kept, turn(A + B, C)], [kept, lost, turn(A + B, C)]):
        kept_at = turns.index(kept)
        assert rows_of(turns) == [((kept_at, 2), 0)]
    assert rows_of([kept, turn(A, B), turn(A + B, C)]) == [((0,), 0), ((1, 2), 0)]


def test_nothing_is_trained_on() -> None:
    one = Episode(turns=[turn(A, B, is_discarded=True), turn(A + B + C, D)], reward=1.0)
    rows, report = merge_turns(one, interleaved=True)
    assert rows == []
    assert (report.num_discarded, report.num_rows, report.merge_ratio) == (2, 0, 1.0)
    assert (one.num_tokens, one.num_loss_tokens, one.row_lengths) == (0, 0, [])


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_parent_that_was_tokenized_differently(interleaved: bool) -> None:
    """With an end token, a turn is realigned with its parent, or with the end of a branch."""
    first, answer = turn([1], [5, 6, 99]), [1, 56, 99, 7]
    sub = turn([2], [3, 99])
    turns = [first, sub, turn(answer, [8])] if interleaved else [first, turn(answer, [8])]
    rows, report = merge_turns(turns, interleaved=interleaved, end_token_id=99)
    assert rows[0].episode.token_ids.tolist() == [1, 5, 6, 99, 7, 8]
    assert rows[0].turns == (0, len(turns) - 1)
    assert report.num_realigned == 1
    if interleaved:
        named = Turn(parent=first, prompt_ids=answer, response_ids=[8])
        assert merge_turns([first, sub, named], interleaved=True, end_token_id=99)[0] == rows


def test_a_realigned_turn_does_not_begin_a_branch_above_it() -> None:
    """Its context begins with the first turn, too, and the second one follows that."""
    first = turn([1], [2])
    turns = [first, turn([1, 2, 3], [5, 6, 99]), turn([1, 2, 3, 56, 99, 7], [8])]
    assert rows_of(turns) == [((0, 1), 0), ((0, 2), 1)]
    assert rows_of(turns, end_token_id=99) == [((0, 1, 2), 0)]


def test_a_forest_takes_time_linear_in_its_tokens() -> None:
    """Two thousand turns of interleaved agents: comparing all of them takes minutes."""
    contexts = [[agent] for agent in range(4)]
    turns = []
    for i in range(2000):
        context = contexts[i % 4]
        context += range(10)
        turns.append(turn(context, [i]))
        context.append(i)
    one = Episode(turns=turns)
    assert one.row_lengths == [len(context) for context in contexts]
    assert forest.forest_of(turns).continues == (*[-1] * 4, *range(1996))
