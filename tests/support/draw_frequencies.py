"""Statistical test of observed draw frequencies against expected ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats


class DrawFrequencies:
    """Counts of classes over any number of draws without replacement.

    Given the history, the k-th group of a draw must be one of the remaining groups with probability
    proportional to its weight. The observed counts minus the sum of these conditional probabilities
    are therefore a martingale, and its covariance is the sum of the multinomial covariances. The
    test allows weights, filters and batch sizes to change between draws. For constant weights and
    n = 1 it is Pearson's chi-square test.
    """

    def __init__(self, num_classes: int) -> None:
        self.observed = np.zeros(num_classes)
        self.expected = np.zeros(num_classes)
        self._covariance = np.zeros((num_classes, num_classes))

    @property
    def num_draws(self) -> int:
        """Total number of drawn groups."""
        return int(self.observed.sum())

    def add(
        self, drawn: Sequence[int], weights: Mapping[int, float], classes: Mapping[int, int]
    ) -> None:
        """Add one draw.

        Args:
            drawn: Ids of the drawn groups in order.
            weights: Weights of all eligible groups by id.
            classes: Class of each group by id.
        """
        ids = list(weights)
        left = np.array([weights[one] for one in ids])
        labels = np.array([classes[one] for one in ids])
        positions = {one: position for position, one in enumerate(ids)}
        chances = np.zeros((len(drawn), len(self.observed)))
        for k, one in enumerate(drawn):
            if left.sum() == 0.0:  # only groups of weight 0 are left, whose order is not random
                chances = chances[:k]
                break
            chances[k] = np.bincount(labels, left / left.sum(), len(self.observed))
            self.observed[classes[one]] += 1
            left[positions[one]] = 0.0
        self.expected += chances.sum(0)
        self._covariance += np.diag(chances.sum(0)) - chances.T @ chances

    def p_value(self) -> float:
        """Return the probability of a deviation at least as large as the observed one."""
        live = np.diag(self._covariance) > 1e-9
        covariance = self._covariance[np.ix_(live, live)]
        deviation = (self.observed - self.expected)[live]
        values, vectors = np.linalg.eigh(covariance)
        solid = values > 1e-6 * values.max(initial=0.0)
        statistic = float(((vectors.T @ deviation)[solid] ** 2 / values[solid]).sum())
        return float(stats.chi2.sf(statistic, int(solid.sum())))


def pearson(observed: NDArray[np.float64], weights: Sequence[float]) -> float:
    """Return the p-value of Pearson's test for counts of single draws."""
    shares = np.array(weights) / np.sum(weights)
    return float(stats.chisquare(observed, shares * observed.sum()).pvalue)
