"""How often groups were drawn, against how often they should have been."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats


class Tally:
    """Counts of classes over any number of draws without replacement.

    The k-th group of a draw must be one of those not yet in it, in proportion to weight, whatever
    happened before. So the observed counts minus the sum of those conditional chances is a
    martingale, whose covariance is the sum of the multinomial ones: this takes changing weights,
    filters and batch sizes, and is Pearson's chi-square where nothing changes and n is 1.
    """

    def __init__(self, num_classes: int) -> None:
        self.observed = np.zeros(num_classes)
        self.expected = np.zeros(num_classes)
        self._covariance = np.zeros((num_classes, num_classes))

    @property
    def num_draws(self) -> int:
        """Groups drawn in all."""
        return int(self.observed.sum())

    def add(
        self, drawn: Sequence[int], weights: Mapping[int, float], classes: Mapping[int, int]
    ) -> None:
        """One draw, in its order, from groups of these weights."""
        ids = list(weights)
        left = np.array([weights[one] for one in ids])
        labels = np.array([classes[one] for one in ids])
        positions = {one: position for position, one in enumerate(ids)}
        chances = np.zeros((len(drawn), len(self.observed)))
        for k, one in enumerate(drawn):
            if left.sum() == 0.0:  # nothing but weight 0 is left: nothing is random any more
                chances = chances[:k]
                break
            chances[k] = np.bincount(labels, left / left.sum(), len(self.observed))
            self.observed[classes[one]] += 1
            left[positions[one]] = 0.0
        self.expected += chances.sum(0)
        self._covariance += np.diag(chances.sum(0)) - chances.T @ chances

    def p_value(self) -> float:
        """Chance of a deviation as large as this one."""
        live = np.diag(self._covariance) > 1e-9
        covariance = self._covariance[np.ix_(live, live)]
        deviation = (self.observed - self.expected)[live]
        values, vectors = np.linalg.eigh(covariance)
        solid = values > 1e-6 * values.max(initial=0.0)
        statistic = float(((vectors.T @ deviation)[solid] ** 2 / values[solid]).sum())
        return float(stats.chi2.sf(statistic, int(solid.sum())))


def pearson(observed: NDArray[np.float64], weights: Sequence[float]) -> float:
    """The p-value of plain counts of single draws."""
    shares = np.array(weights) / np.sum(weights)
    return float(stats.chisquare(observed, shares * observed.sum()).pvalue)
