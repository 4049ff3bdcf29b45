"""Exponential variates: their distribution, independence and reproducibility."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from replaydb.database.repository.tasks import exponentials

FROZEN = [
    0.8851243637911902,
    2.1003727599016013,
    0.0018346079449160736,
    0.6097883206378125,
    0.08290714350536424,
    0.6088010856025509,
]


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1, None])
def test_distribution_is_exponential(seed: int | None) -> None:
    variates, _ = exponentials(seed, "gsm8k", 0, 50_000)
    assert variates.dtype == np.float64
    assert stats.kstest(variates, "expon").pvalue > 0.001
    assert np.isfinite(variates).all()
    assert (variates >= 0.0).all()


def test_consecutive_variates_are_independent() -> None:
    variates, _ = exponentials(3, "gsm8k", 0, 50_001)
    ranks = np.argsort(np.argsort(variates)) / len(variates)
    assert stats.pearsonr(ranks[:-1], ranks[1:]).pvalue > 0.001


@pytest.mark.parametrize("sizes", [[4, 4], [1, 2, 3, 4, 5], [64, 0, 64], [7]])
def test_a_stream_resumes_at_its_counter(sizes: list[int]) -> None:
    """Unused words of a block of four are skipped, never returned twice."""
    expected, _ = exponentials(5, "gsm8k", 0, 4 * sum(-(-size // 4) for size in sizes))
    counter = 0
    for size in sizes:
        part, after = exponentials(5, "gsm8k", counter, size)
        np.testing.assert_array_equal(part, expected[4 * counter : 4 * counter + size])
        counter = after


def test_variates_are_the_same_in_every_version() -> None:
    """A seeded database created by one version must draw the same groups in the next."""
    np.testing.assert_allclose(exponentials(0, "gsm8k", 0, 3)[0], FROZEN[:3], rtol=1e-15)
    np.testing.assert_allclose(exponentials(2**63 - 1, "", 10**12, 3)[0], FROZEN[3:], rtol=1e-15)


@pytest.mark.parametrize("other", [(1, "gsm8k"), (0, "code"), (0, "gsm8k ")])
def test_seeds_and_tasks_have_independent_streams(other: tuple[int, str]) -> None:
    mine, _ = exponentials(0, "gsm8k", 0, 20_000)
    theirs, _ = exponentials(*other, 0, 20_000)
    assert not np.isin(mine, theirs).any()
    assert stats.spearmanr(mine, theirs).pvalue > 0.001


def test_without_a_seed_they_are_fresh() -> None:
    mine, _ = exponentials(None, "gsm8k", 0, 100)
    theirs, _ = exponentials(None, "gsm8k", 0, 100)
    assert not np.isin(mine, theirs).any()
