"""`DrawFrequencies` agrees with Pearson's test, accepts correct draws and rejects biased ones."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from support.draw_frequencies import DrawFrequencies, pearson

WEIGHTS = {one: float(one + 1) for one in range(12)}
LABELS = {one: one for one in WEIGHTS}


def drawn_in_proportion(
    rng: np.random.Generator, weights: dict[int, float], n: int, power: float = 1.0
) -> list[int]:
    """Draw by exponential keys (Efraimidis and Spirakis, 2006), an independent computation."""
    ids = np.array(list(weights))
    keys = rng.exponential(size=len(ids)) / np.array(list(weights.values())) ** power
    found: list[int] = ids[np.argsort(keys)[:n]].tolist()
    return found


def frequencies(n: int, times: int, seed: int, power: float = 1.0) -> DrawFrequencies:
    rng = np.random.default_rng(seed)
    counted = DrawFrequencies(len(WEIGHTS))
    for _ in range(times):
        counted.add(drawn_in_proportion(rng, WEIGHTS, n, power), WEIGHTS, LABELS)
    return counted


def test_single_draws_have_the_p_value_of_pearson() -> None:
    counted = frequencies(n=1, times=2000, seed=1)
    assert counted.p_value() == pytest.approx(pearson(counted.observed, list(WEIGHTS.values())))


def test_p_values_of_exact_draws_are_uniform() -> None:
    p_values = [frequencies(n=5, times=60, seed=seed).p_value() for seed in range(200)]
    assert stats.kstest(p_values, "uniform").pvalue > 0.001


@pytest.mark.parametrize("n", [1, 5, 10])
def test_slightly_wrong_weights_are_detected(n: int) -> None:
    assert frequencies(n, times=20_000 // n, seed=2, power=0.9).p_value() < 1e-4


def test_inclusion_probabilities_are_those_of_successive_sampling() -> None:
    expected = frequencies(n=5, times=1500, seed=3).expected / 1500
    rng = np.random.default_rng(4)
    drawn = [one for _ in range(20_000) for one in drawn_in_proportion(rng, WEIGHTS, 5)]
    np.testing.assert_allclose(expected, np.bincount(drawn) / 20_000, atol=0.02)
