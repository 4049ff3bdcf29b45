"""Importance ratios, compared with values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from replaydb import InvalidInputError
from replaydb.training import importance
from support.batches import batch_of, episode

LOGPROBS = torch.tensor([[0.0, -1.0, -2.0], [0.0, -0.5, math.nan]])
BEHAVIOUR = torch.tensor([[0.0, -2.0, -1.0], [math.nan, -0.5, math.nan]])
MASK = torch.tensor([[False, True, True], [False, True, False]])


def test_token_ratios() -> None:
    found = importance.token_ratios(LOGPROBS, BEHAVIOUR, MASK)
    torch.testing.assert_close(found, torch.tensor([[1, math.e, 1 / math.e], [1.0, 1.0, 1.0]]))


def test_gradients_flow_and_nan_outside_the_mask_does_not() -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    importance.token_ratios(logprobs, BEHAVIOUR, MASK).sum().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(
        logprobs.grad, torch.tensor([[0, math.e, 1 / math.e], [0.0, 1.0, 0.0]])
    )


def test_sequence_ratios_are_geometric_means() -> None:
    behaviour = torch.tensor([[0.0, -3.0, -1.0], [0.0, -0.25, 0.0]])
    found = importance.sequence_ratios(LOGPROBS, behaviour, MASK)
    expected = torch.tensor([math.exp((2.0 - 1.0) / 2), math.exp(-0.25)])
    torch.testing.assert_close(found, expected[:, None].expand(2, 3))


def test_sequence_ratios_of_packed_rows() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -3.0, -4.0, 0.0]])
    behaviour = torch.tensor([[-2.0, -2.0, -1.0, -1.0, 0.0]])
    mask = torch.tensor([[True, True, True, True, False]])
    index = torch.tensor([[1, 1, 0, 0, -1]])
    found = importance.sequence_ratios(logprobs, behaviour, mask, index)
    first, second = math.exp(0.5), math.exp(-2.5)
    torch.testing.assert_close(found, torch.tensor([[first, first, second, second, 1.0]]))


def test_packed_and_padded_sequences_have_the_same_ratios() -> None:
    batch = batch_of([[episode([1], [2, 3]), episode([1], [4])], [episode([5, 6], [7, 8, 9])]])
    padded, packed = batch.padded(0), batch.packed(0, max_tokens=8)
    assert padded.logprobs is not None
    assert packed.logprobs is not None
    new = 0.5
    wide = importance.sequence_ratios(padded.logprobs * new, padded.logprobs, padded.loss_mask)
    dense = importance.sequence_ratios(
        packed.logprobs * new, packed.logprobs, packed.loss_mask, packed.sequence_index
    )
    torch.testing.assert_close(dense[packed.attention_mask], wide[padded.attention_mask])


def test_truncated_and_clipped() -> None:
    ratios = torch.tensor([0.1, 1.0, 5.0], requires_grad=True)
    weights = importance.truncated(ratios, 2.0)
    torch.testing.assert_close(weights, torch.tensor([0.1, 1.0, 2.0]))
    assert not weights.requires_grad
    torch.testing.assert_close(importance.clipped(ratios), torch.tensor([0.8, 1.0, 1.2]))
    torch.testing.assert_close(importance.clipped(ratios, 0.2, 0.28)[2], torch.tensor(1.28))
    assert importance.clipped(ratios).requires_grad
    with pytest.raises(InvalidInputError, match="cap"):
        importance.truncated(ratios, 0.0)


@pytest.mark.parametrize("missing", [math.nan, -math.inf, math.inf])
def test_missing_behaviour_logprobs_are_refused(missing: float) -> None:
    behaviour = torch.full((2, 3), missing)
    with pytest.raises(InvalidInputError, match="not recorded"):
        importance.token_ratios(LOGPROBS, behaviour, MASK)
    with pytest.raises(InvalidInputError, match="not recorded"):
        importance.off_policyness(LOGPROBS, behaviour, MASK)
    with pytest.raises(InvalidInputError, match="one shape"):
        importance.token_ratios(LOGPROBS, BEHAVIOUR[:1], MASK)


def test_fresh_tokens() -> None:
    groups = [
        [
            episode([1], [2, 3, 4], policy_version=[3, 5, 6]),
            episode([1], [2], policy_version=4),
            episode([1], [2]),
        ]
    ]
    batch = batch_of(groups)
    padded = importance.fresh_tokens(batch.padded(0), 6, 1)
    assert padded.int().tolist() == [[0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert importance.fresh_tokens(batch.padded(0), 6, 2)[1].tolist() == [False, True, False, False]
    split = importance.fresh_tokens(batch.split(0), 6, 1)
    assert split.int().tolist() == [[0, 1, 1], [0, 0, 0], [0, 0, 0]]
    packed = importance.fresh_tokens(batch.packed(0, max_tokens=8), 6, 1)
    assert packed.int().tolist() == [[0, 0, 1, 1, 0, 0, 0, 0]]


def test_fresh_tokens_of_episodes_with_one_version() -> None:
    batch = batch_of([[episode([1], [2], policy_version=4), episode([1], [2])]])
    assert batch.padded(0).token_versions is None
    assert importance.fresh_tokens(batch.padded(0), 5, 1).tolist() == [[False, True], [False] * 2]
    assert not importance.fresh_tokens(batch.padded(0), 6, 1).any()
    assert importance.fresh_tokens(batch.packed(0, max_tokens=4), 5, 1).tolist() == [
        [False, True, False, False]
    ]


def test_off_policyness() -> None:
    found = importance.off_policyness(LOGPROBS, BEHAVIOUR, MASK)
    ratios = np.array([math.e, 1 / math.e, 1.0])
    assert found["ratio/mean"] == pytest.approx(ratios.mean(), rel=1e-6)
    assert found["ratio/min"] == pytest.approx(1 / math.e, rel=1e-6)
    assert found["ratio/max"] == pytest.approx(math.e, rel=1e-6)
    assert found["ratio/clipped"] == pytest.approx(2 / 3)
    assert found["ratio/ess"] == pytest.approx(ratios.sum() ** 2 / (3 * (ratios**2).sum()))
    assert found["kl/k1"] == pytest.approx(0.0)
    assert found["kl/k3"] == pytest.approx((ratios - 1 - np.log(ratios)).mean(), rel=1e-6)
    assert importance.off_policyness(LOGPROBS, BEHAVIOUR, MASK & False) == {}


def test_the_effective_sample_size_of_huge_ratios() -> None:
    """Squares of ratios may be beyond doubles."""
    logprobs = torch.zeros(1, 4)
    behaviour = torch.tensor([[-400.0, -400.0, -1.0, -1.0]])
    found = importance.off_policyness(logprobs, behaviour, torch.ones(1, 4, dtype=torch.bool))
    assert found["ratio/ess"] == pytest.approx(0.5)
