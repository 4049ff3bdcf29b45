"""The judge on trial: `Tally` must agree with Pearson, accept what is right, catch what is not."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from support.tally import Tally, pearson

WEIGHTS = {one: float(one + 1) for one in range(12)}
LABELS = {one: one for one in WEIGHTS}


def drawn_in_proportion(
    rng: np.random.Generator, weights: dict[int, float], n: int, power: float = 1.0
) -> list[int]:
    """By exponential keys (Efraimidis and Spirakis, 2006): not the arithmetic of `Tally`."""
    ids = np.array(list(weights))
    keys = rng.exponential(size=len(ids)) / np.array(list(weights.values())) ** power
    found: list[int] = ids[np.argsort(keys)[:n]].tolist()
    return found


def tally_of(n: int, times: int, seed: int, power: float = 1.0) -> Tally:
    rng = np.random.default_rng(seed)
    tally = Tally(len(WEIGHTS))
    for _ in range(times):
        tally.add(drawn_in_proportion(rng, WEIGHTS, n, power), WEIGHTS, LABELS)
    return tally


def test_single_draws_are_judged_as_pearson_does() -> None:
    tally = tally_of(n=1, times=2000, seed=1)
    assert tally.p_value() == pytest.approx(pearson(tally.observed, list(WEIGHTS.values())))


def test_p_values_of_exact_draws_are_uniform() -> None:
    p_values = [tally_of(n=5, times=60, seed=seed).p_value() for seed in range(200)]
    assert stats.kstest(p_values, "uniform").pvalue > 0.001


@pytest.mark.parametrize("n", [1, 5, 10])
def test_slightly_wrong_weights_are_caught(n: int) -> None:
    assert tally_of(n, times=20_000 // n, seed=2, power=0.9).p_value() < 1e-4


def test_inclusion_probabilities_are_those_of_successive_sampling() -> None:
    expected = tally_of(n=5, times=1500, seed=3).expected / 1500
    rng = np.random.default_rng(4)
    drawn = [one for _ in range(20_000) for one in drawn_in_proportion(rng, WEIGHTS, 5)]
    np.testing.assert_allclose(expected, np.bincount(drawn) / 20_000, atol=0.02)
