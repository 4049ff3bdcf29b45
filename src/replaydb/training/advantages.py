"""Group-relative advantages of episodes, for groups of any size.

Every function takes rewards [E] and the group index of each episode [E], such as `batch.rewards`
and `batch.group_index`. Episodes may be in any order. Numpy arrays and lists return float64 arrays;
torch tensors, on any device, return tensors. An episode without a reward (NaN) is excluded from all
statistics and has the advantage 0. In a zero-variance group (`max - min <= tolerance`), all
advantages are exactly 0, since the computed standard deviation of equal floats may differ from 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

from replaydb.domain import checks
from replaydb.domain.episodes.arrays import Array
from replaydb.training import segments

A = TypeVar("A", bound=Array)

Std = Literal["sample", "population"]


def grpo(
    rewards: A,
    group_index: Any,
    *,
    std: Std = "sample",
    eps: float = 1e-4,
    tolerance: float = 1e-6,
) -> A:
    """`(r - mean) / (std + eps)` within each group.

    Group relative policy optimisation (Shao et al., 2024, DeepSeekMath, section 4.1.2).

    Args:
        rewards: Reward of each episode, [E]; NaN for none.
        group_index: Index of the group of each episode, integers >= 0, [E].
        std: "sample" divides the sum of squares by n - 1, like `torch.std` and TRL; "population"
            divides by n, like `numpy.std`. They differ by a factor of sqrt(n / (n - 1)).
        eps: Added to the standard deviation; TRL uses 1e-4, verl 1e-6.
        tolerance: Rewards of a group whose range is at most this count as equal.

    Returns:
        Advantages, [E].

    Raises:
        InvalidInputError: Shapes differ, or an argument is invalid.
    """
    checks.one_of("std", std, get_args(Std))
    eps = checks.number("eps", eps, least=0.0)
    groups = _Groups.of(rewards, group_index, tolerance)
    return cast(
        "A", groups.result(groups.centred / (groups.std(1 if std == "sample" else 0) + eps))
    )


def dr_grpo(rewards: A, group_index: Any, *, tolerance: float = 1e-6) -> A:
    """`r - mean` within each group.

    Dr. GRPO (Liu et al., 2025, Understanding R1-Zero-Like Training, section 3.2): without the
    division by the standard deviation, which gives very easy and very hard prompts more weight.

    Args:
        rewards: Reward of each episode, [E]; NaN for none.
        group_index: Index of the group of each episode, integers >= 0, [E].
        tolerance: See `grpo`.

    Returns:
        Advantages, [E].

    Raises:
        InvalidInputError: Shapes differ, or an argument is invalid.
    """
    groups = _Groups.of(rewards, group_index, tolerance)
    return cast("A", groups.result(groups.centred))


def rloo(rewards: A, group_index: Any, *, tolerance: float = 1e-6) -> A:
    """`r - mean of the other rewards` within each group; 0 in a group of one.

    REINFORCE leave-one-out (Ahmadian et al., 2024, Back to Basics, section 3.3; Kool et al.,
    2019), which is `n / (n - 1) * (r - mean)`.

    Args:
        rewards: Reward of each episode, [E]; NaN for none.
        group_index: Index of the group of each episode, integers >= 0, [E].
        tolerance: See `grpo`.

    Returns:
        Advantages, [E].

    Raises:
        InvalidInputError: Shapes differ, or an argument is invalid.
    """
    groups = _Groups.of(rewards, group_index, tolerance)
    size = groups.size[groups.index]
    return cast("A", groups.result(groups.centred * size / (size - 1.0).clip(1.0)))


def pass_at_k(rewards: A, group_index: Any, k: int, *, solved: float = 1.0) -> A:
    """Advantages for pass@k, the probability that at least one of k episodes solves the prompt.

    The analytical form of pass@k training (Chen et al., 2025, Pass@k Training for Adaptively
    Balancing Exploration and Exploitation, equations 14 and 15). With n episodes, w of them wrong,
    `p = 1 - C(w, k) / C(n, k)` and `s = sqrt(p * (1 - p))`, the advantage of a correct episode is
    `(1 - p) / s`, and that of a wrong one `(1 - p - C(w - 1, k - 1) / C(n - 1, k - 1)) / s`. All
    are 0 if s is 0: no episode is correct, or any k episodes contain a correct one.

    Args:
        rewards: Reward of each episode, [E]; NaN for none.
        group_index: Index of the group of each episode, integers >= 0, [E].
        k: Number of attempts, at least 1; limited to the size of each group.
        solved: Minimum reward of a correct episode.

    Returns:
        Advantages, [E].

    Raises:
        InvalidInputError: Shapes differ, or an argument is invalid.
    """
    draws = checks.whole_number("k", k, least=1)
    solved = checks.number("solved", solved)
    groups = _Groups.of(rewards, group_index, -1.0)
    ones = groups.values * 0.0 + 1.0
    right = segments.where(groups.known & (groups.values >= solved), ones, 0.0)
    n = groups.size
    wrong = n - segments.total(right, groups.index, groups.count)
    failed = _none_of(wrong, n, draws)
    failed_with_a_wrong_one = _none_of(wrong - 1.0, n - 1.0, draws - 1)
    spread = (failed * (1.0 - failed)).clip(0.0) ** 0.5
    penalty = failed_with_a_wrong_one[groups.index] * (1.0 - right)
    scale = spread[groups.index]
    advantages = (failed[groups.index] - penalty) / segments.where(scale > 0.0, scale, 1.0)
    return cast("A", groups.result(segments.where(scale > 0.0, advantages, 0.0)))


def batch_normalised(
    rewards: A, group_index: Any, *, eps: float = 1e-4, tolerance: float = 1e-6
) -> A:
    """`(r - mean of the group) / (std of the batch + eps)`.

    The mean is over the group, the sample standard deviation over all rewards of the batch: "Lite
    PPO" (Liu et al., 2025, Tricks or Traps? A Deep Dive into RL for LLM Reasoning, section 4.1),
    or `scale_rewards="batch"` in TRL.

    Args:
        rewards: Reward of each episode, [E]; NaN for none.
        group_index: Index of the group of each episode, integers >= 0, [E].
        eps: Added to the standard deviation.
        tolerance: See `grpo`.

    Returns:
        Advantages, [E].

    Raises:
        InvalidInputError: Shapes differ, or an argument is invalid.
    """
    groups = _Groups.of(rewards, group_index, tolerance)
    eps = checks.number("eps", eps, least=0.0)
    batch = _Groups.of(rewards, groups.index * 0, tolerance)
    return cast("A", groups.result(groups.centred / (batch.std(1) + eps)))


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """Rewards by group, as numpy arrays or torch tensors.

    Attributes:
        values: Rewards, 0 for episodes without one, [E].
        known: Whether the episode has a reward, bool [E].
        index: Group index of each episode, [E].
        count: Number of groups.
        size: Number of known rewards of each group, [count].
        centred: Difference from the mean of the group, [E].
        varied: Whether the rewards of the group differ and the reward is known, bool [E].
    """

    values: Any
    known: Any
    index: Any
    count: int
    size: Any
    centred: Any
    varied: Any

    @classmethod
    def of(cls, rewards: Any, group_index: Any, tolerance: float) -> _Groups:
        """Compute the statistics of each group."""
        given, index, count = segments.checked(rewards, group_index)
        known = given == given  # False for NaN, in numpy and torch
        values = segments.where(known, given, 0.0)
        size = segments.total(segments.where(known, values * 0.0 + 1.0, 0.0), index, count)
        mean = segments.total(values, index, count) / size.clip(1.0)
        lowest = segments.least(segments.where(known, given, float("inf")), index, count)
        highest = segments.most(segments.where(known, given, -float("inf")), index, count)
        varied = (highest - lowest > checks.number("tolerance", tolerance))[index] & known
        return cls(values, known, index, count, size, values - mean[index], varied)

    def std(self, correction: int) -> Any:
        """Standard deviation of the rewards of each episode's group, [E]."""
        squares = segments.where(self.known, self.centred**2, 0.0)
        summed = segments.total(squares, self.index, self.count)
        return ((summed / (self.size - correction).clip(1.0)) ** 0.5)[self.index]

    def result(self, advantages: Any) -> Any:
        """Return the advantages, but 0 in zero-variance groups and for unknown rewards."""
        return segments.where(self.varied, advantages, 0.0)


def _none_of(wrong: Any, n: Any, k: int) -> Any:
    """Return `C(wrong, k) / C(n, k)` for each group, with k limited to n."""
    share = wrong * 0.0 + 1.0
    for i in range(k):
        drawn = segments.where(n > i, (wrong - i) / (n - i).clip(1.0), 1.0)
        share = share * drawn.clip(0.0)
    return share
