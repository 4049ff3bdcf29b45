"""Statistics of the rewards of a group."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class RewardStats(NamedTuple):
    """Statistics of the rewards that are known; all None where none is.

    Attributes:
        mean: Their mean.
        std: Their standard deviation, that of the population.
        min: The lowest.
        max: The highest.
    """

    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None


def reward_stats(rewards: NDArray[np.float64]) -> RewardStats:
    """Statistics of some rewards [E], NaN where there is none.

    Equal rewards are their own mean and have a std of exactly 0.0. Rounding does not always give
    that, and what it leaves would pass a filter for `reward_std > 0`.
    """
    # Groups are small: numpy takes longer to be called than Python to add up.
    known = [reward for reward in rewards.tolist() if reward == reward]
    if not known:
        return RewardStats()
    low, high = min(known), max(known)
    if low == high:
        return RewardStats(low, 0.0, low, high)
    mean = sum(known) / len(known)
    squares = [(reward - mean) * (reward - mean) for reward in known]
    return RewardStats(mean, math.sqrt(sum(squares) / len(known)), low, high)
