"""Advantages, compared with values computed by hand and with a loop over ragged groups."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaydb import InvalidInputError
from replaydb.training import advantages

# Group 0 has the rewards 1, 0, 0; group 1 has 2, 4.
REWARDS = np.array([1.0, 2.0, 0.0, 0.0, 4.0])
GROUPS = np.array([0, 1, 0, 0, 1])
METHODS: list[Callable[..., Any]] = [
    advantages.grpo,
    advantages.dr_grpo,
    advantages.rloo,
    advantages.batch_normalised,
    lambda rewards, index: advantages.pass_at_k(rewards, index, 2),
]


def test_grpo_by_hand() -> None:
    sample = advantages.grpo(REWARDS, GROUPS, eps=0.0)
    # Group 0: mean 1/3, squares 4/9 + 1/9 + 1/9 = 2/3, over 2 is 1/3. Group 1: mean 3, std sqrt 2.
    expected = np.array([2 / 3 * 3**0.5, -(0.5**0.5), -(3**0.5) / 3, -(3**0.5) / 3, 0.5**0.5])
    np.testing.assert_allclose(sample, expected)
    population = advantages.grpo(REWARDS, GROUPS, std="population", eps=0.0)
    np.testing.assert_allclose(population[[1, 4]], [-1.0, 1.0])
    np.testing.assert_allclose(population[0], 2 / 3 / (2 / 9) ** 0.5)
    with_eps = advantages.grpo(REWARDS, GROUPS, std="population", eps=1.0)
    np.testing.assert_allclose(with_eps[[1, 4]], [-0.5, 0.5])


def test_dr_grpo_by_hand() -> None:
    found = advantages.dr_grpo(REWARDS, GROUPS)
    np.testing.assert_allclose(found, [2 / 3, -1.0, -1 / 3, -1 / 3, 1.0])


def test_rloo_by_hand() -> None:
    found = advantages.rloo(REWARDS, GROUPS)
    np.testing.assert_allclose(found, [1.0, -2.0, -0.5, -0.5, 2.0])


def test_batch_normalised_by_hand() -> None:
    found = advantages.batch_normalised(REWARDS, GROUPS, eps=0.0)
    np.testing.assert_allclose(
        found, np.array([2 / 3, -1.0, -1 / 3, -1 / 3, 1.0]) / REWARDS.std(ddof=1)
    )


def test_pass_at_k_by_hand() -> None:
    """Two correct episodes of four, k = 2: one pair of six fails."""
    rewards = np.array([1.0, 1.0, 0.0, 0.0])
    found = advantages.pass_at_k(rewards, np.zeros(4, int), 2)
    scale = (1 / 6 * 5 / 6) ** 0.5
    np.testing.assert_allclose(found * scale, [1 / 6, 1 / 6, 1 / 6 - 1 / 3, 1 / 6 - 1 / 3])


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=2, max_size=7), st.integers(1, 7))
def test_pass_at_k_is_the_mean_over_all_draws_of_k(right: list[bool], k: int) -> None:
    n, k = len(right), min(k, len(right))
    draws = list(combinations(range(n), k))
    solved = np.array([any(right[i] for i in draw) for draw in draws], float)
    mean, scale = solved.mean(), solved.std()
    found = advantages.pass_at_k(np.array(right, float), np.zeros(n, int), k)
    for i in range(n):
        mine = np.mean([hit for draw, hit in zip(draws, solved, strict=True) if i in draw])
        expected = (mine - mean) / scale if scale > 1e-12 else 0.0
        assert found[i] == pytest.approx(expected, abs=1e-9)


def test_pass_at_1_is_grpo_of_the_population() -> None:
    right = np.array([1.0, 0.0, 0.0, 1.0, 1.0])
    np.testing.assert_allclose(
        advantages.pass_at_k(right, np.zeros(5, int), 1),
        advantages.grpo(right, np.zeros(5, int), std="population", eps=0.0),
    )


@pytest.mark.parametrize("method", METHODS)
def test_equal_rewards_give_exactly_zero(method: Callable[..., Any]) -> None:
    """The computed std of ten float32 values 0.1 is not 0."""
    rewards = torch.full((10,), 0.1)
    assert method(rewards, torch.zeros(10, dtype=torch.int64)).tolist() == [0.0] * 10
    mixed = method(np.array([0.1, 0.1, 0.1, 0.0, 1.0]), np.array([0, 0, 0, 1, 1]))
    assert mixed[:3].tolist() == [0.0, 0.0, 0.0]
    assert (mixed[3:] != 0.0).all() or method is METHODS[-1]


@pytest.mark.parametrize("method", METHODS)
def test_tensors_and_arrays_agree(method: Callable[..., Any]) -> None:
    of_arrays = method(REWARDS, GROUPS)
    of_tensors = method(torch.tensor(REWARDS), torch.tensor(GROUPS))
    assert of_tensors.dtype == torch.float64
    np.testing.assert_allclose(of_arrays, of_tensors.numpy())
    half = method(torch.tensor(REWARDS, dtype=torch.float16), torch.tensor(GROUPS))
    assert half.dtype == torch.float32


@pytest.mark.parametrize("method", METHODS)
def test_missing_rewards_are_excluded(method: Callable[..., Any]) -> None:
    with_gap = method(np.append(REWARDS, np.nan), np.append(GROUPS, 0))
    np.testing.assert_allclose(with_gap[:-1], method(REWARDS, GROUPS))
    assert with_gap[-1] == 0.0
    assert method(np.array([np.nan]), np.array([0])).tolist() == [0.0]


@pytest.mark.parametrize("method", METHODS)
def test_empty_batches_and_groups_of_one(method: Callable[..., Any]) -> None:
    assert method(np.array([]), np.array([], int)).tolist() == []
    if method is not METHODS[-1]:
        assert method(np.array([3.0]), np.array([0])).tolist() == [0.0]


rewards_of_groups = st.lists(
    st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=6), min_size=1, max_size=5
)


@settings(deadline=None)
@given(rewards_of_groups)
def test_groups_do_not_mix(groups: list[list[float]]) -> None:
    rewards = np.concatenate([np.array(group) for group in groups])
    index = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    shuffled = np.random.default_rng(0).permutation(len(rewards))
    for method in (advantages.grpo, advantages.dr_grpo, advantages.rloo):
        together = method(rewards, index)
        alone = [method(np.array(group), np.zeros(len(group), int)) for group in groups]
        np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-12)
        np.testing.assert_allclose(
            method(rewards[shuffled], index[shuffled]), together[shuffled], atol=1e-9
        )


@settings(deadline=None)
@given(rewards_of_groups)
def test_rloo_matches_a_loop(groups: list[list[float]]) -> None:
    for group in groups:
        rewards = np.array(group)
        found = advantages.rloo(rewards, np.zeros(len(group), int), tolerance=0.0)
        for i, reward in enumerate(group):
            others = [other for j, other in enumerate(group) if j != i]
            expected = reward - np.mean(others) if others and np.ptp(rewards) else 0.0
            assert found[i] == pytest.approx(expected, abs=1e-9)


def test_wrong_arguments() -> None:
    with pytest.raises(InvalidInputError, match="group_index"):
        advantages.grpo(REWARDS, GROUPS[:-1])
    with pytest.raises(InvalidInputError, match="group_index"):
        advantages.grpo(REWARDS, GROUPS - 1)
    with pytest.raises(InvalidInputError, match="std"):
        advantages.grpo(REWARDS, GROUPS, std="both")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="k"):
        advantages.pass_at_k(REWARDS, GROUPS, 0)
