"""Trees of sequences: each shared token once, and everything else as in flat rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batch.test_trajectories import trajectories
from replaydb import Batch, Episode, EpisodeGroup, Ragged, Turn
from replaydb.training import PaddedBatch, TreeBatch, advantages
from support.batches import episode, ragged_groups, stored_group
from support.examples import examples
from support.samples import trees
from support.transformer import Transformer


def test_a_prompt_of_several_episodes_by_hand() -> None:
    several = [episode([1, 2], [3, 4], reward=1.0), episode([1, 2], [5], reward=2.0),
               episode([1, 7], [3], reward=3.0)]  # fmt: skip
    made = Batch([EpisodeGroup("t", several), EpisodeGroup("t", [episode([9], [8])])]).trees(-1)
    assert made.token_ids.tolist() == [[1, 2, 3, 4, 5, 7, 3], [9, 8, -1, -1, -1, -1, -1]]
    assert made.parents.tolist() == [[-1, 0, 1, 2, 1, 0, 5], [-1, 0, -1, -1, -1, -1, -1]]
    assert made.enter.tolist() == [list(range(7))] * 2
    assert made.exit.tolist() == [[7, 5, 4, 4, 5, 7, 7], [2, 2, 3, 4, 5, 6, 7]]
    assert made.position_ids.tolist() == [[0, 1, 2, 3, 2, 1, 2], [0, 1, 0, 0, 0, 0, 0]]
    assert made.sequence_index.tolist() == [[0, 0, 0, 0, 1, 2, 2], [3, 3, -1, -1, -1, -1, -1]]
    assert made.leaves.tolist() == [3, 4, 6, 1]
    assert made.loss_mask.int().tolist() == [[0, 0, 1, 1, 1, 0, 1], [0, 1, 0, 0, 0, 0, 0]]
    assert torch.equal(made.predicted, made.loss_mask)
    assert made.lengths.tolist() == [4, 3, 3, 2]
    assert [made.path(i).tolist() for i in range(4)] == [[0, 1, 2, 3], [0, 1, 4], [0, 5, 6], [0, 1]]
    assert made.per_token(made.rewards).nan_to_num().tolist()[0] == [1, 1, 1, 1, 2, 3, 3]
    assert made.before(made.token_ids).tolist()[0] == [1, 1, 2, 3, 2, 1, 7]
    assert made.tree_mask[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 0, 1, 0],
        [1, 0, 0, 0, 0, 1, 1],
    ]
    assert made.tree_mask[1, 2:].int().tolist() == np.eye(7, dtype=int)[2:].tolist()
    wider = Batch([EpisodeGroup("t", several)]).trees(0, pad_to_multiple_of=8)
    assert wider.token_ids.shape == (1, 8)
    assert wider.attention_mask.sum() == 7


def test_a_sampled_token_is_shared_with_nobody() -> None:
    """Two episodes sampled the same answer, each with its own reward."""
    several = [episode([1, 2], [3, 4], advantage=1.0), episode([1, 2], [3, 4], advantage=-1.0)]
    made = Batch([EpisodeGroup("t", several)]).trees(0)
    assert made.token_ids.tolist() == [[1, 2, 3, 4, 3, 4]]
    assert made.per_token(made.advantages).tolist()[0][2:] == [1, 1, -1, -1]
    empty = [episode([1, 2], []), episode([1, 2], []), episode([1], []), episode([], [])]
    made = Batch([EpisodeGroup("t", empty)]).trees(0)
    assert made.token_ids.tolist() == [[1, 2]]
    assert made.leaves.tolist() == [1, 1, 0, -1]
    assert [made.path(i).tolist() for i in range(4)] == [[0, 1], [0, 1], [0], []]


def test_context_with_other_values_is_not_shared() -> None:
    def with_extra(values: Any) -> Episode:
        return Episode(prompt_ids=[1, 2, 3], response_ids=[4], token_extras={"x": values})

    several = [with_extra([1, 2, 3, 4]), with_extra([1, 9, 3, 4])]
    made = Batch([EpisodeGroup("t", several)]).trees(0)
    assert made.token_ids.tolist() == [[1, 2, 3, 4, 2, 3, 4]]
    without = Batch([EpisodeGroup("t", several)]).trees(0, fields=())
    assert without.token_ids.tolist() == [[1, 2, 3, 4, 4]]
    ragged = [with_extra(Ragged([1, last], [1, 0, 1, 0])) for last in (1, 2)]
    made = Batch([EpisodeGroup("t", ragged)]).trees(0)
    assert made.token_ids.tolist() == [[1, 2, 3, 4, 3, 4]]
    unknown = [episode([1, 2], [3]), Episode(prompt_ids=[1, 2], response_ids=[4])]
    assert Batch([EpisodeGroup("t", unknown)]).trees(0).token_ids.tolist() == [[1, 2, 3, 1, 2, 4]]


def test_versions_of_context_are_those_of_the_first_sequence() -> None:
    several = [
        Episode(prompt_ids=[1, 2], response_ids=[3], policy_version=[version]) for version in (4, 5)
    ]
    made = Batch([EpisodeGroup("t", several)]).trees(0)
    assert made.token_ids.tolist() == [[1, 2, 3, 3]]
    assert made.token_versions is not None
    assert made.token_versions.tolist() == [[4, 4, 4, 5]]
    assert made.policy_versions.tolist() == [4, 5]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Ragged):
        return same(one.values, other.values) and same(one.offsets, other.offsets)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    raw = [each.flatten().contiguous().view(torch.uint8) for each in (one, other) if each.numel()]
    return not raw or torch.equal(*raw)


def check_leaves(tree: TreeBatch, flat: PaddedBatch) -> None:
    """Check that every leaf equals its flat row, byte for byte."""
    width = flat.token_ids.shape[1]
    for i, length in enumerate(flat.lengths.tolist()):
        row, path = int(tree.group_index[i]), tree.path(i)
        own = tree.sequence_index[row, path] == i
        assert len(path) == tree.lengths[i] == length
        assert same(tree.token_ids[row, path], flat.token_ids[i, :length])
        assert same(tree.position_ids[row, path], flat.position_ids[i, :length])
        assert same(tree.loss_mask[row, path] & own, flat.loss_mask[i, :length])
        assert same(tree.parents[row, path][1:], path[:-1])
        assert (tree.logprobs is None) == (flat.logprobs is None)
        if tree.logprobs is not None and flat.logprobs is not None:
            assert same(tree.logprobs[row, path], flat.logprobs[i, :length])
        if tree.token_versions is not None and flat.token_versions is not None:
            theirs = flat.token_versions[i, :length]
            assert same(tree.token_versions[row, path][own], theirs[own])
        assert tree.token_extras.keys() == flat.token_extras.keys()
        for name, values in tree.token_extras.items():
            theirs = flat.token_extras[name]
            if isinstance(values, Ragged):
                at = row * tree.token_ids.shape[1]
                for depth, position in enumerate(path.tolist()):
                    assert same(values[at + position], theirs[i * width + depth])
            elif name == "token_rewards":
                mine = values[row, path]
                assert same(torch.where(own, mine, torch.zeros_like(mine)), theirs[i, :length])
            else:
                assert same(values[row, path], theirs[i, :length])


def check_order(tree: TreeBatch) -> None:
    """Check that tokens are in depth-first order, and that intervals are those of subtrees."""
    for parents, exits, filled in zip(tree.parents, tree.exit, tree.attention_mask, strict=True):
        above = parents.tolist()
        size = int(filled.sum())
        assert filled[:size].all()
        last = list(range(1, len(above) + 1))
        for i in range(size - 1, -1, -1):
            assert above[i] < i
            if above[i] >= 0:
                last[above[i]] = max(last[above[i]], last[i])
        assert exits.tolist() == last
        for i in range(1, size):  # the token before is the parent, or its subtree is closed
            assert above[i] == i - 1 or above[i] < 0 or last[above[i]] > i


@settings(max_examples=examples(200), deadline=None)
@given(groups=trajectories() | ragged_groups, is_stored=st.booleans())
def test_every_leaf_is_its_flat_row(groups: list[list[Episode]], is_stored: bool) -> None:
    several: list[Any] = [
        stored_group(one) if is_stored else EpisodeGroup("t", one, status="aborted")
        for one in groups
    ]
    tree, flat = Batch(several).trees(0), Batch(several).padded(0)
    check_leaves(tree, flat)
    check_order(tree)
    for name in ("lengths", "prompt_lengths", "rewards", "advantages", "policy_versions", "weights",
                 "group_index", "group_ids", "episode_index", "has_logprobs"):  # fmt: skip
        assert same(getattr(tree, name), getattr(flat, name))
    assert tree.merged == flat.merged


@settings(max_examples=examples(200), deadline=None)
@given(
    st.sampled_from(["float32", "int8", "bfloat16", "ragged"]).flatmap(
        lambda kind: st.lists(trees(kind).flatmap(st.sampled_from), min_size=1, max_size=3)
    )
)
def test_leaves_of_trees_with_extras_are_flat_rows(several: list[Episode]) -> None:
    batch = Batch([EpisodeGroup("t", several)])
    tree = batch.trees(0)
    check_leaves(tree, batch.padded(0))
    check_order(tree)


def test_each_shared_prefix_is_there_once() -> None:
    """The main agent, a retry and four samples of the group: 30 + 4 * 40 of 40 * 7 tokens."""
    prompt = list(range(30))
    first = Turn(prompt_ids=prompt, response_ids=range(100, 105))
    turns = [first, *(Turn(parent=first, new_ids=[7], response_ids=[i] * 4) for i in range(3))]
    several = [Episode(turns=turns, reward=float(i)) for i in range(4)]
    batch = Batch([EpisodeGroup("t", several)])
    assert batch.padded(0).attention_mask.sum() == 4 * 3 * 40
    made = batch.trees(0)
    assert made.attention_mask.sum() == 30 + 4 * (5 + 1 + 3 * 4)
    assert made.loss_mask.sum() == 4 * (5 + 3 * 4)


def loss_of(model: Transformer, made: PaddedBatch | TreeBatch, gain: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses of a policy gradient, over the tokens in the loss."""
    if isinstance(made, TreeBatch):
        logits = made.before(model(made.token_ids, made.position_ids, made.tree_mask))
        wanted, of_token = made.predicted, made.per_token(gain)
        labels = made.token_ids
    else:
        length = made.token_ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask = causal & made.attention_mask[:, None] | torch.eye(length, dtype=torch.bool)
        logits = model(made.token_ids, made.position_ids, mask)
        labels, of_token = made.labels, made.per_token(gain)
        wanted = labels >= 0
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -(chosen * of_token)[wanted].sum()


@pytest.mark.parametrize("seed", range(5))
def test_a_transformer_has_the_same_loss_and_gradients(seed: int) -> None:
    """With prompts that the episodes of a group share, sub-agents, retries and discarded turns."""
    random = np.random.default_rng(seed)
    groups = []
    for _ in range(2):
        prompt = random.integers(0, 50, 8)
        several = []
        for _ in range(3):
            turns = [Turn(prompt_ids=prompt, response_ids=random.integers(0, 50, 3))]
            for i in range(6):
                above = turns[random.integers(len(turns))] if i != 2 else None
                new = random.integers(0, 50, 2)
                context: dict[str, Any] = {"parent": above, "new_ids": new}
                if above is None:
                    context = {"prompt_ids": new}
                response = random.integers(0, 50, 3)
                discarded = bool(random.random() < 0.2)
                turns.append(Turn(**context, response_ids=response, is_discarded=discarded))
            several.append(Episode(turns=turns, reward=random.random()))
        several.append(Episode(prompt_ids=prompt, response_ids=random.integers(0, 50, 5), reward=0))
        groups.append(EpisodeGroup("t", several))
    batch = Batch(groups)
    torch.manual_seed(seed)
    model = Transformer(50)
    found = []
    for made in (batch.padded(0), batch.trees(0)):
        gain = torch.as_tensor(advantages.grpo(batch.rewards, batch.group_index)).float()
        model.zero_grad()
        loss = loss_of(model, made, gain[made.episode_index])
        loss.backward()
        found.append((loss.detach(), [one.grad.clone() for one in model.parameters()]))  # type: ignore[union-attr]
    (flat, flat_grads), (tree, tree_grads) = found
    assert batch.trees(0).attention_mask.sum() < 0.8 * batch.padded(0).attention_mask.sum()
    torch.testing.assert_close(tree, flat, rtol=1e-5, atol=1e-5)
    for one, other in zip(tree_grads, flat_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_moved_batches_keep_the_fields_of_trees() -> None:
    made = Batch([EpisodeGroup("t", [episode([1], [2])])]).trees(0, device="meta")
    assert {one.device.type for one in (made.parents, made.exit, made.leaves)} == {"meta"}
