"""Statistics of the rewards of a group."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class RewardStats(NamedTuple):
    """Statistics of the known rewards; all None if there are none.

    Attributes:
        mean: Mean.
        std: Population standard deviation.
        min: Lowest reward.
        max: Highest reward.
    """

    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None


def reward_stats(rewards: NDArray[np.float64]) -> RewardStats:
    """Return statistics of rewards [E], NaN where there is none.

    Equal rewards have a std of exactly 0.0 and are their own mean. With rounding errors, such
    groups would pass a filter for `reward_std > 0`.
    """
    # Groups are small: calling numpy takes longer than adding up in Python.
    known = [reward for reward in rewards.tolist() if reward == reward]
    if not known:
        return RewardStats()
    low, high = min(known), max(known)
    if low == high:
        return RewardStats(low, 0.0, low, high)
    mean = sum(known) / len(known)
    squares = [(reward - mean) * (reward - mean) for reward in known]
    return RewardStats(mean, math.sqrt(sum(squares) / len(known)), low, high)
