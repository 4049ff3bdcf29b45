"""Padded and split tensors, against layouts worked out by hand and against plain loops."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from replaydb import Batch, Episode, EpisodeGroup, InvalidInputError, Turn
from replaydb.batch import padding
from replaydb.batch.columns import UNKNOWN_VERSION
from replaydb.training import advantages
from support.batches import batch_of, episode, ragged_groups


def two_groups() -> Batch:
    """Group 100 with two episodes and group 101 with one: sequences of 3, 5 and 2 tokens."""
    first = [
        episode([1, 2], [3], reward=1.0, policy_version=4),
        episode([1], [4, 5, 6, 7], reward=0.5, advantage=-2.0, policy_version=[3, 4, 4, 5]),
    ]
    return batch_of([first, [Episode(token_ids=[8, 9], loss_mask=[0, 1])]], [1.0, 0.5])


def test_right_padded_by_hand() -> None:
    made = two_groups().padded(-1)
    assert made.token_ids.tolist() == [[1, 2, 3, -1, -1], [1, 4, 5, 6, 7], [8, 9, -1, -1, -1]]
    assert made.attention_mask.int().tolist() == [[1, 1, 1, 0, 0], [1] * 5, [1, 1, 0, 0, 0]]
    assert made.loss_mask.int().tolist() == [[0, 0, 1, 0, 0], [0, 1, 1, 1, 1], [0, 1, 0, 0, 0]]
    assert made.position_ids.tolist() == [[0, 1, 2, 0, 0], [0, 1, 2, 3, 4], [0, 1, 0, 0, 0]]
    assert made.logprobs is not None
    torch.testing.assert_close(
        made.logprobs,
        torch.tensor(
            [
                [0, 0, -0.1, 0, 0],
                [0, -0.1, -0.2, -0.3, -0.4],
                [np.nan, np.nan, 0, 0, 0],
            ]
        ),
        equal_nan=True,
    )
    assert made.token_versions is not None
    unknown = UNKNOWN_VERSION
    assert made.token_versions.tolist() == [
        [4, 4, 4, 0, 0],
        [3, 3, 4, 4, 5],
        [unknown, unknown, 0, 0, 0],
    ]


def test_left_padded_by_hand() -> None:
    made = two_groups().padded(0, side="left", pad_to_multiple_of=3)
    assert made.token_ids.tolist() == [
        [0, 0, 0, 1, 2, 3],
        [0, 1, 4, 5, 6, 7],
        [0, 0, 0, 0, 8, 9],
    ]
    assert made.position_ids.tolist() == [
        [0, 0, 0, 0, 1, 2],
        [0, 0, 1, 2, 3, 4],
        [0, 0, 0, 0, 0, 1],
    ]


def test_values_per_sequence() -> None:
    made = two_groups().padded(0)
    assert made.lengths.tolist() == [3, 5, 2]
    assert made.prompt_lengths.tolist() == [2, 1, 1]
    assert made.group_index.tolist() == [0, 0, 1]
    assert made.group_ids.tolist() == [100, 100, 101]
    assert made.episode_index.tolist() == [0, 1, 2]
    assert made.weights.tolist() == [1.0, 1.0, 0.5]
    assert made.policy_versions.tolist() == [4, 3, UNKNOWN_VERSION]
    assert made.has_logprobs.tolist() == [True, True, False]
    torch.testing.assert_close(made.rewards, torch.tensor([1.0, 0.5, np.nan]), equal_nan=True)
    torch.testing.assert_close(
        made.advantages, torch.tensor([np.nan, -2.0, np.nan]), equal_nan=True
    )
    assert len(made) == 3
    assert made.merged is None


def test_versions_of_tokens_and_of_episodes_side_by_side() -> None:
    """The last two episodes are stored in one part."""
    versions = [None, 7, [4, 3]]
    members = [episode([1], [2, 2], policy_version=version) for version in versions]
    made = batch_of([members]).padded(0)
    assert made.token_versions is not None
    assert made.token_versions.tolist() == [[UNKNOWN_VERSION] * 3, [7, 7, 7], [3, 4, 3]]
    assert made.policy_versions.tolist() == [UNKNOWN_VERSION, 7, 3]
    assert made.present == {}  # extras only


def test_dtypes() -> None:
    made = two_groups().padded(0)
    assert made.token_ids.dtype == torch.int64
    assert made.loss_mask.dtype == made.attention_mask.dtype == torch.bool
    assert made.logprobs is not None
    assert made.logprobs.dtype == made.rewards.dtype == torch.float32


def test_max_length_truncates_and_marks_sequences() -> None:
    made = two_groups().padded(0, max_length=3)
    assert made.token_ids.tolist() == [[1, 2, 3], [1, 4, 5], [8, 9, 0]]
    assert made.truncated.tolist() == [False, True, False]
    assert made.lengths.tolist() == [3, 3, 2]
    assert made.loss_mask.int().tolist() == [[0, 0, 1], [0, 1, 1], [0, 1, 0]]
    assert two_groups().padded(0, max_length=1).prompt_lengths.tolist() == [1, 1, 1]


def test_labels_and_shifts_stay_within_a_sequence() -> None:
    made = two_groups().padded(0)
    assert made.labels.tolist() == [
        [-100, 3, -100, -100, -100],
        [4, 5, 6, 7, -100],
        [9, -100, -100, -100, -100],
    ]
    left = two_groups().padded(0, side="left")
    assert left.labels.tolist() == [
        [-100, -100, -100, 3, -100],
        [4, 5, 6, 7, -100],
        [-100, -100, -100, 9, -100],
    ]
    assert left.shifted(left.token_ids, -1).tolist() == [
        [-1, -1, 2, 3, -1],
        [4, 5, 6, 7, -1],
        [-1, -1, -1, 9, -1],
    ]
    wide = made.token_ids[:, :, None].repeat(1, 1, 2)
    assert made.shifted(wide)[0].tolist() == [[2, 2], [3, 3], [0, 0], [0, 0], [0, 0]]


def test_values_of_sequences_at_their_tokens() -> None:
    made = two_groups().padded(0)
    assert made.per_token(torch.tensor([2.0, 3.0, 4.0])).tolist() == [
        [2, 2, 2, 0, 0],
        [3, 3, 3, 3, 3],
        [4, 4, 0, 0, 0],
    ]


def test_split_by_hand() -> None:
    made = two_groups().split(0)
    assert made.prompt_ids.tolist() == [[1, 2], [0, 1], [0, 8]]
    assert made.prompt_mask.int().tolist() == [[1, 1], [0, 1], [0, 1]]
    assert made.response_ids.tolist() == [[3, 0, 0, 0], [4, 5, 6, 7], [9, 0, 0, 0]]
    assert made.response_mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert made.loss_mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert made.logprobs is not None
    torch.testing.assert_close(
        made.logprobs,
        torch.tensor([[-0.1, 0, 0, 0], [-0.1, -0.2, -0.3, -0.4], [np.nan, 0, 0, 0]]),
        equal_nan=True,
    )
    assert made.input_ids.tolist()[1] == [0, 1, 4, 5, 6, 7]
    assert made.position_ids.tolist()[1] == [0, 0, 1, 2, 3, 4]
    assert made.attention_mask.int().tolist()[2] == [0, 1, 1, 0, 0, 0]
    assert made.per_token(torch.tensor([2.0, 3.0, 4.0])).tolist()[2] == [4, 0, 0, 0]


def test_split_shortens_prompts_at_the_front_and_responses_at_the_end() -> None:
    made = two_groups().split(0, max_prompt_length=1, max_length=2, prompt_side="right")
    assert made.prompt_ids.tolist() == [[2], [1], [8]]
    assert made.response_ids.tolist() == [[3, 0], [4, 5], [9, 0]]
    assert made.truncated.tolist() == [True, True, False]
    assert made.lengths.tolist() == [2, 3, 2]
    assert made.prompt_lengths.tolist() == [1, 1, 1]
    left = two_groups().split(0, side="left")
    assert left.response_ids.tolist() == [[0, 0, 0, 3], [4, 5, 6, 7], [0, 0, 0, 9]]


def test_parts_without_episodes_have_no_tokens() -> None:
    """Such as the prompt of a group that is still to be generated."""
    prompt = EpisodeGroup("gsm8k", [], status="aborted", prompt_ids=[1, 2])
    batch = Batch([prompt, EpisodeGroup("gsm8k", [episode([1, 2], [3, 4])])])
    assert batch.split(0).response_ids.tolist() == [[3, 4]]
    assert batch.padded(0, max_length=3).token_ids.tolist() == [[1, 2, 3]]
    assert batch.packed(0, max_tokens=4).token_ids.tolist() == [[1, 2, 3, 4]]


def test_extras_of_tokens_and_episodes() -> None:
    bfloat = torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16)
    groups = [
        [
            episode([1], [2], token_extras={"value": bfloat}, extras={"image": np.ones((2, 2))}),
            episode([1], [2, 3], extras={"image": np.zeros((2, 2)), "level": 7}),
        ]
    ]
    made = batch_of(groups).padded(0)
    assert made.token_extras["value"].dtype == torch.bfloat16
    assert made.token_extras["value"].tolist() == [[[1.5], [2.5], [0]], [[0], [0], [0]]]
    assert made.extras["image"].shape == (2, 2, 2)
    assert made.extras["level"].tolist() == [0, 7]
    assert made.present["value"].tolist() == [True, False]
    assert made.present["level"].tolist() == [False, True]
    assert "image" not in made.present
    assert batch_of(groups).split(0).token_extras["value"].tolist() == [[[2.5], [0]], [[0], [0]]]


def test_extras_of_several_shapes_stay_apart() -> None:
    groups = [[episode([1], [2], extras={"image": np.ones(n)}) for n in (2, 3)]]
    made = batch_of(groups).padded(0)
    assert [image.tolist() for image in made.extras["image"]] == [[1, 1], [1, 1, 1]]
    moved = made.to("cpu")
    assert [image.tolist() for image in moved.extras["image"]] == [[1, 1], [1, 1, 1]]


def test_token_extras_of_several_dtypes_are_refused_unless_left_out() -> None:
    groups = [[episode([1], [2], token_extras={"value": np.ones(2, k)}) for k in ("f4", "f8")]]
    with pytest.raises(InvalidInputError, match="one dtype and shape"):
        batch_of(groups).padded(0)
    assert batch_of(groups).padded(0, fields=["logprobs"]).token_extras == {}


def test_only_the_requested_fields() -> None:
    groups = [[episode([1], [2], token_extras={"value": [1.0, 2.0]}, extras={"level": 3})]]
    made = batch_of(groups).padded(0, fields=["value"])
    assert made.logprobs is None
    assert made.extras == {}
    assert made.token_extras["value"].tolist() == [[1, 2]]
    made = batch_of(groups).padded(0, fields=["rewards", "loss_mask", "level"])
    assert made.rewards.shape == (1,)
    assert (made.lengths.tolist(), made.loss_mask.tolist()) == ([2], [[False, True]])
    assert (made.logprobs, made.token_extras, list(made.extras)) == (None, {}, ["level"])
    with pytest.raises(InvalidInputError, match=r"some of level, logprobs, .*, rewards, .*value"):
        batch_of(groups).padded(0, fields=["values"])


def test_nothing_to_pad() -> None:
    made = batch_of([[], []]).padded(0)
    assert made.token_ids.shape == (0, 0)
    assert made.logprobs is None
    assert batch_of([[Episode(token_ids=[], loss_mask=[])]]).padded(0).token_ids.shape == (1, 0)
    assert batch_of([]).split(0).prompt_ids.shape == (0, 0)


def test_stored_arrays_are_copied() -> None:
    batch = two_groups()
    batch.padded(0).token_ids[:] = -7
    batch.padded(0).group_index[:] = -7
    assert batch.padded(0).token_ids[0].tolist() == [1, 2, 3, 0, 0]
    assert batch.groups[0].episodes[0].token_ids.tolist() == [1, 2, 3]


def test_turns_are_merged_and_rows_find_their_episode() -> None:
    trajectory = Episode(
        turns=[
            Turn(prompt_ids=[1, 2], response_ids=[3], reward=0.25),
            Turn(prompt_ids=[1, 2, 3, 4], response_ids=[5], reward=0.5),
            Turn(prompt_ids=[9], response_ids=[7], reward=1.0),
        ]
    )
    made = batch_of([[episode([6], [6], reward=3.0)], [trajectory]]).padded(0)
    assert made.token_ids.tolist() == [[6, 6, 0, 0, 0], [1, 2, 3, 4, 5], [9, 7, 0, 0, 0]]
    assert made.loss_mask.int().tolist() == [[0, 1, 0, 0, 0], [0, 0, 1, 0, 1], [0, 1, 0, 0, 0]]
    assert made.episode_index.tolist() == [0, 1, 1]
    assert made.group_index.tolist() == [0, 1, 1]
    assert made.rewards.tolist() == [3.0, 1.75, 1.75]
    assert made.token_extras["token_rewards"].tolist() == [
        [0, 0, 0, 0, 0],
        [0, 0, 0.25, 0, 0.5],
        [0, 1.0, 0, 0, 0],
    ]
    assert made.merged is not None
    assert (made.merged.num_turns, made.merged.num_rows) == (3, 2)


def test_advantages_of_episodes_apply_to_all_their_sequences() -> None:
    apart = [Turn(prompt_ids=[1], response_ids=[2]), Turn(prompt_ids=[3], response_ids=[4])]
    batch = batch_of(
        [
            [Episode(turns=apart, reward=1.0), episode([1], [2], reward=0.0)],
            [episode([1], [2], reward=5.0), episode([1], [2]), episode([1], [2], reward=3.0)],
        ]
    )
    assert batch.group_index.tolist() == [0, 0, 1, 1, 1]
    np.testing.assert_array_equal(batch.rewards, [1.0, 0.0, 5.0, np.nan, 3.0])
    gain = advantages.dr_grpo(batch.rewards, batch.group_index)
    assert gain[batch.padded(0).episode_index].tolist() == [0.5, 0.5, -0.5, 1.0, 0.0, -1.0]
    assert batch_of([]).rewards.tolist() == batch_of([]).group_index.tolist() == []


@settings(deadline=None)
@given(ragged_groups)
def test_padded_equals_a_plain_loop(groups: list[list[Episode]]) -> None:
    batch = batch_of(groups)
    episodes = [(i, one) for i, members in enumerate(groups) for one in members]
    for side in ("left", "right"):
        made = batch.padded(0, side=side)
        assert len(made) == len(episodes)
        assert made.group_index.tolist() == [i for i, _ in episodes]
        for row, (_, one) in enumerate(episodes):
            width = made.token_ids.shape[1]
            begin = width - one.num_tokens if side == "left" else 0
            span = slice(begin, begin + one.num_tokens)
            assert made.attention_mask[row].nonzero().flatten().tolist() == list(range(width))[span]
            assert made.token_ids[row, span].tolist() == one.token_ids.tolist()
            assert made.loss_mask[row, span].tolist() == one.loss_mask.tolist()
            assert not made.loss_mask[row, ~made.attention_mask[row]].any()
            if one.logprobs is not None and made.logprobs is not None:
                assert made.logprobs[row, span].tolist() == one.logprobs.tolist()
            elif made.logprobs is not None:
                assert made.logprobs[row, span].isnan().all()
            if "values" in one.token_extras:
                expected = one.token_extras["values"]
                assert made.token_extras["values"][row, span].tolist() == expected.tolist()


@settings(deadline=None)
@given(ragged_groups)
def test_split_holds_every_token_once(groups: list[list[Episode]]) -> None:
    made = batch_of(groups).split(0)
    whole = batch_of(groups).padded(0)
    for row in range(len(made)):
        tokens = made.input_ids[row][made.attention_mask[row]]
        assert tokens.tolist() == whole.token_ids[row][whole.attention_mask[row]].tolist()
        assert int(made.prompt_mask[row].sum()) == int(whole.prompt_lengths[row])
        response = whole.attention_mask[row] & (
            whole.position_ids[row] >= whole.prompt_lengths[row]
        )
        mask = made.response_mask[row]
        assert made.loss_mask[row][mask].tolist() == whole.loss_mask[row][response].tolist()
        if made.logprobs is not None and whole.logprobs is not None:
            torch.testing.assert_close(
                made.logprobs[row][mask], whole.logprobs[row][response], equal_nan=True
            )


def test_for_cuda_memory_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU nothing can be pinned, so the request for it is checked."""
    asked = []

    def without_pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: object, pin_memory: bool = False, **options: object) -> torch.Tensor:
            asked.append(pin_memory)
            return make(*args, **options)

        return made

    monkeypatch.setattr(torch, "zeros", without_pinning(torch.zeros))
    monkeypatch.setattr(torch, "empty", without_pinning(torch.empty))
    copied: list[torch.Tensor] = []

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert padding.is_pinned("cuda:0")
    assert not padding.is_pinned("cpu")
    assert not padding.is_pinned(None)
    value = torch.tensor([1.5, 2.5], dtype=torch.bfloat16)
    batch = batch_of([[episode([1], [2], token_extras={"value": value})]])
    expected = batch.padded(-1)
    monkeypatch.setattr(padding, "is_pinned", lambda device: device is not None)
    made = batch.padded(-1, device="cpu")
    assert asked == [True] * 4
    assert any(made.attention_mask is one for one in copied)
    assert made.token_ids.tolist() == expected.token_ids.tolist()
    assert made.token_extras["value"].tolist() == [[1.5, 2.5]]
