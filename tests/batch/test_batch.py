"""A batch as a sequence of groups, and batches of groups that were never stored."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from replaydb import Batch, Buffer, Episode, EpisodeGroup, Fifo, InvalidInputError
from replaydb.batch.tensors import SequenceTensors
from replaydb.training import advantages, priorities
from support.batches import batch_of, ragged_groups
from support.examples import examples
from support.groups import group, groups


@pytest.fixture
def batch() -> Batch[EpisodeGroup]:
    """A batch of three groups with 2, 1 and 3 episodes."""
    several = [group("a"), group("b", rewards=[None]), group("c", rewards=[1.0, 2.0, 3.0])]
    return Batch(several, [0.5, 0.3, 0.2], [1.0, 0.8, 0.6], 7)


def test_groups_are_reached_by_position(batch: Batch[EpisodeGroup]) -> None:
    assert len(batch) == 3
    assert [one.group_uid for one in batch] == ["a", "b", "c"]
    assert [one.group_uid for one in reversed(batch)] == ["c", "b", "a"]
    assert batch[0].group_uid == batch[np.int64(-3)].group_uid == "a"
    assert batch[1] in batch
    assert group("d") not in batch
    for beyond in (3, -4):
        with pytest.raises(IndexError):
            batch[beyond]


@pytest.mark.parametrize(
    "chosen", [slice(1), slice(1, None), slice(None, None, -2), slice(5, 9), slice(None)]
)
def test_a_slice_is_a_batch(batch: Batch[EpisodeGroup], chosen: slice) -> None:
    part = batch[chosen]
    assert isinstance(part, Batch)
    assert list(part) == list(batch)[chosen]
    np.testing.assert_array_equal(part.weights, batch.weights[chosen])
    np.testing.assert_array_equal(part.probabilities, batch.probabilities[chosen])
    assert part.draw_id == 7


def test_a_batch_of_new_groups(batch: Batch[EpisodeGroup]) -> None:
    own = Batch(iter(batch))
    assert (own.draw_id, own.weights.tolist(), own.probabilities.tolist()) == (
        None,
        *[[1.0] * 3] * 2,
    )
    assert (own.ids, own.staleness) == ([-1] * 3, [None] * 3)
    np.testing.assert_array_equal(own.rewards, [1.0, 0.0, np.nan, 1.0, 2.0, 3.0])
    assert own.group_index.tolist() == [0, 0, 1, 2, 2, 2]
    assert repr(own) == "Batch(of 3 groups, ids=[-1, -1, -1])"
    found = advantages.dr_grpo(own.rewards, own.group_index)
    assert found.tolist() == [0.5, -0.5, 0.0, -1.0, 0.0, 1.0]
    assert list(map(priorities.LinearDecay(), own)) == [0.0] * 3
    there: Batch[EpisodeGroup] = pickle.loads(pickle.dumps(own))  # noqa: S301 - our own bytes
    assert list(there) == list(own)


def test_an_empty_batch() -> None:
    nothing: Batch[EpisodeGroup] = Batch([])
    assert not nothing
    assert (nothing.rewards.shape, nothing.group_index.shape) == ((0,), (0,))
    assert nothing.padded(0).token_ids.shape == (0, 0)


@settings(max_examples=examples(30), deadline=None)
@given(ragged_groups)
def test_tensors_of_stored_and_new_groups_are_equal(several: list[list[Episode]]) -> None:
    stored = batch_of(several)
    own = Batch([EpisodeGroup("task", episodes, status="failed") for episodes in several])
    assert_alike(own.padded(0), stored.padded(0))
    assert_alike(own.split(0), stored.split(0))
    assert_alike(own.packed(0, max_tokens=64), stored.packed(0, max_tokens=64))


def assert_alike(one: SequenceTensors, other: SequenceTensors) -> None:
    """Check that tensors are equal, except ids."""
    assert set(one.group_ids.tolist()) <= {-1}
    for kind in type(one).__mro__:
        for name in set(getattr(kind, "__slots__", ())) - {"group_ids"}:
            left, right = getattr(one, name), getattr(other, name)
            torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (([1],), "groups\\[0\\]"),
        ((None,), "groups"),
        (([group("a")], [0.5, 0.5]), "probabilities"),
        (([group("a")], None, 1.0), "weights"),
        (([group("a")], None, ["x"]), "weights"),
        (([group("a")], None, [1e39]), "weights\\[0\\]"),
        (([group("a")], None, [True]), "weights"),
        (([group("a")], ["0.5"]), "probabilities"),
    ],
)
def test_invalid_arguments(arguments: tuple[Any, ...], field: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{field}: expected"):
        Batch(*arguments)


async def test_groups_of_a_batch_can_be_put_but_not_named_by_id(buffer: Buffer) -> None:
    own = Batch(groups(2))
    with pytest.raises(InvalidInputError, match=r"^ids\[0\]: "):
        await buffer.update_priorities(own.ids, own.weights)
    ids = await buffer.put(own)
    assert (await buffer.sample(2, Fifo())).ids == ids
