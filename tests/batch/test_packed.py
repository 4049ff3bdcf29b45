"""Packed rows, against layouts worked out by hand and as a round trip through every layout."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaydb import Batch, Episode, InvalidInputError
from replaydb.batch import PackedBatch
from support.batches import batch_of, episode, ragged_groups


def lengths_batch(*lengths: int) -> Batch:
    """A batch with one group per sequence, with tokens 10, 11, ... then 20, 21, ..."""
    return batch_of(
        [
            [episode([10 * i], list(range(10 * i + 1, 10 * i + n)))]
            for i, n in enumerate(lengths, start=1)
        ]
    )


def test_next_fit_by_hand() -> None:
    made = lengths_batch(3, 2, 4, 1).packed(-1, max_tokens=5)
    assert made.token_ids.tolist() == [[10, 11, 12, 20, 21], [30, 31, 32, 33, 40]]
    assert made.sequence_index.tolist() == [[0, 0, 0, 1, 1], [2, 2, 2, 2, 3]]
    assert made.position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert made.cu_seqlens.tolist() == [0, 3, 5, 9, 10]
    assert made.max_seqlen == 4
    assert made.row_lengths.tolist() == [5, 5]


def test_padding_ends_rows_and_is_a_segment() -> None:
    made = lengths_batch(3, 4, 2).packed(-1, max_tokens=5)
    assert made.token_ids.tolist() == [
        [10, 11, 12, -1, -1],
        [20, 21, 22, 23, -1],
        [30, 31, -1, -1, -1],
    ]
    assert made.attention_mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]
    assert made.sequence_index.tolist()[0] == [0, 0, 0, -1, -1]
    assert made.position_ids.tolist() == [[0, 1, 2, 0, 0], [0, 1, 2, 3, 0], [0, 1, 0, 0, 0]]
    assert made.cu_seqlens.tolist() == [0, 3, 5, 9, 10, 12, 15]
    assert made.cu_seqlens.dtype == torch.int32
    assert made.row_cu_seqlens(1).tolist() == [0, 4, 5]
    assert made.row_lengths.tolist() == [3, 4, 2]


def test_first_fit_needs_fewer_rows() -> None:
    batch = lengths_batch(3, 4, 2, 1)
    assert len(batch.packed(0, max_tokens=5).token_ids) == 3
    made = batch.packed(0, max_tokens=5, fit="first")
    assert made.token_ids.tolist() == [[20, 21, 22, 23, 40], [10, 11, 12, 30, 31]]
    assert made.sequence_index.tolist() == [[1, 1, 1, 1, 3], [0, 0, 0, 2, 2]]
    assert made.group_index.tolist() == [0, 1, 2, 3]


def test_shifts_do_not_cross_sequences() -> None:
    made = lengths_batch(3, 2).packed(0, max_tokens=6)
    assert made.shifted(made.token_ids, -1).tolist() == [[11, 12, -1, 21, -1, -1]]
    assert made.labels.tolist() == [[11, 12, -100, 21, -100, -100]]


def test_values_of_sequences_at_their_tokens() -> None:
    made = lengths_batch(3, 2).packed(0, max_tokens=6)
    assert made.per_token(torch.tensor([0.5, 2.0])).tolist() == [[0.5, 0.5, 0.5, 2, 2, 0]]


def test_oversized_sequences_are_refused_or_dropped() -> None:
    batch = lengths_batch(3, 6, 2)
    with pytest.raises(InvalidInputError, match="at least 6, the length of the longest"):
        batch.packed(0, max_tokens=5)
    made = batch.packed(0, max_tokens=5, drop_oversized=True)
    assert made.token_ids.tolist() == [[10, 11, 12, 30, 31]]
    assert made.dropped.tolist() == [1]
    assert made.truncated.tolist() == [False, True, False]
    assert made.lengths.tolist() == [3, 0, 2]
    everything = batch.packed(0, max_tokens=1, drop_oversized=True)
    assert everything.token_ids.shape == (0, 1)
    assert everything.per_token(torch.ones(3)).shape == (0, 1)


def test_nothing_to_pack() -> None:
    made = batch_of([]).packed(0, max_tokens=4)
    assert made.token_ids.shape == (0, 4)
    assert made.cu_seqlens.tolist() == [0]
    assert made.max_seqlen == 0


@settings(deadline=None)
@given(ragged_groups, st.integers(0, 9), st.sampled_from(["next", "first"]))
def test_padded_to_flat_to_packed_to_flat(
    groups: list[list[Episode]], spare: int, fit: str
) -> None:
    batch = batch_of(groups)
    padded = batch.padded(0)
    longest = int(padded.lengths.max()) if len(padded) else 0
    packed = batch.packed(0, max_tokens=max(longest + spare, 1), fit=fit)  # type: ignore[arg-type]
    order = in_sequence_order(packed)
    for name in ("token_ids", "loss_mask", "logprobs", "token_versions"):
        there, here = getattr(packed, name), getattr(padded, name)
        assert (there is None) == (here is None)
        if here is not None:
            flat = here[padded.attention_mask]
            torch.testing.assert_close(
                there.reshape(-1)[order], flat, rtol=0, atol=0, equal_nan=True
            )
    for name, values in padded.token_extras.items():
        flat = values[padded.attention_mask]
        assert torch.equal(packed.token_extras[name].flatten(0, 1)[order], flat)
    index = packed.sequence_index.reshape(-1)[order]
    assert index.tolist() == np.repeat(np.arange(len(padded)), padded.lengths).tolist()
    positions = packed.position_ids.reshape(-1)[order]
    assert positions.tolist() == padded.position_ids[padded.attention_mask].tolist()
    assert check_segments(packed)


def in_sequence_order(packed: PackedBatch) -> torch.Tensor:
    """Return the indices of all tokens, sequence after sequence."""
    index = packed.sequence_index.reshape(-1)
    indices = packed.attention_mask.reshape(-1).nonzero().flatten()
    return indices[torch.argsort(index[indices], stable=True)]


def check_segments(packed: PackedBatch) -> bool:
    """Check that between two bounds there is one complete sequence in one row, or only padding."""
    index = packed.sequence_index.reshape(-1)
    bounds = packed.cu_seqlens.tolist()
    assert bounds == sorted(set(bounds))
    assert bounds[-1] == index.numel()
    seen = []
    for begin, end in pairwise(bounds):
        members = set(index[begin:end].tolist())
        assert len(members) == 1
        member = members.pop()
        width = packed.token_ids.shape[1]
        assert begin // width == (end - 1) // width
        if member >= 0:
            seen.append(member)
            assert end - begin == int(packed.lengths[member])
    return sorted(seen) == packed.lengths.nonzero().flatten().tolist()
