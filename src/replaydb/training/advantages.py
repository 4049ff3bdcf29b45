"""Advantages of the episodes of ragged groups.

Every function takes rewards [E] and the group of each [E] (`batch.rewards, batch.group_index`, or
tensors on any device), groups may be of any size and in any order, and the result is what came in:
float64 arrays from numpy and lists, tensors from tensors. A reward that is NaN (there is none)
counts in no statistic, and its advantage is 0. In a group whose rewards are all equal, that is
`max - min <= tolerance`, all advantages are exactly 0: a standard deviation of equal floats need
not be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

from replaydb import checks
from replaydb.episodes.arrays import Array
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
        rewards: [E].
        group_index: Group of each, [E].
        std: "sample" divides the squares by n - 1, as `torch.std` and so TRL does; "population"
            by n, as `numpy.std` does. They differ by a factor of sqrt(n / (n - 1)).
        eps: Added to the standard deviation; 1e-4 is TRL's, 1e-6 verl's.
        tolerance: Rewards of a group that are this close are equal.

    Raises:
        InvalidInputError: Shapes differ, or an argument is wrong.
    """
    checks.one_of("std", std, get_args(Std))
    eps = checks.number("eps", eps, least=0.0)
    groups = _Groups.of(rewards, group_index, tolerance)
    return cast(
        "A", groups.result(groups.centred / (groups.std(1 if std == "sample" else 0) + eps))
    )


def dr_grpo(rewards: A, group_index: Any, *, tolerance: float = 1e-6) -> A:
    """`r - mean` within each group.

    GRPO done right (Liu et al., 2025, Understanding R1-Zero-Like Training, section 3.2): without
    the division, which weighs up prompts that are very easy or very hard.

    Args:
        rewards: [E].
        group_index: Group of each, [E].
        tolerance: See `grpo`.

    Raises:
        InvalidInputError: Shapes differ.
    """
    groups = _Groups.of(rewards, group_index, tolerance)
    return cast("A", groups.result(groups.centred))


def rloo(rewards: A, group_index: Any, *, tolerance: float = 1e-6) -> A:
    """`r - mean of the others` within each group; 0 in a group of one.

    REINFORCE leave-one-out (Ahmadian et al., 2024, Back to Basics, section 3.3; Kool et al.,
    2019), which is `n / (n - 1) * (r - mean)`.

    Args:
        rewards: [E].
        group_index: Group of each, [E].
        tolerance: See `grpo`.

    Raises:
        InvalidInputError: Shapes differ.
    """
    groups = _Groups.of(rewards, group_index, tolerance)
    size = groups.size[groups.index]
    return cast("A", groups.result(groups.centred * size / (size - 1.0).clip(1.0)))


def pass_at_k(rewards: A, group_index: Any, k: int, *, solved: float = 1.0) -> A:
    """Advantages for the chance that at least one of k episodes solves the prompt.

    The analytical form of pass@k training (Chen et al., 2025, Pass@k Training for Adaptively
    Balancing Exploration and Exploitation, equations 14 and 15): with n episodes of which w are
    wrong, `p = 1 - C(w, k) / C(n, k)` and `s = sqrt(p * (1 - p))`, a right one has `(1 - p) / s`
    and a wrong one `(1 - p - C(w - 1, k - 1) / C(n - 1, k - 1)) / s`. All are 0 where s is 0:
    nothing is right, or any k contain a right one.

    Args:
        rewards: [E].
        group_index: Group of each, [E].
        k: At least 1; in smaller groups, their size.
        solved: Rewards of at least this are right.

    Raises:
        InvalidInputError: Shapes differ, or an argument is wrong.
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

    The mean is the group's and the standard deviation (of the sample) that of all rewards: "Lite
    PPO" (Liu et al., 2025, Tricks or Traps? A Deep Dive into RL for LLM Reasoning, section 4.1),
    TRL's `scale_rewards="batch"`.

    Args:
        rewards: [E].
        group_index: Group of each, [E].
        eps: Added to the standard deviation.
        tolerance: See `grpo`.

    Raises:
        InvalidInputError: Shapes differ.
    """
    groups = _Groups.of(rewards, group_index, tolerance)
    eps = checks.number("eps", eps, least=0.0)
    whole = _Groups.of(rewards, groups.index * 0, tolerance)
    return cast("A", groups.result(groups.centred / (whole.std(1) + eps)))


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """Rewards by group: arrays of numpy or of torch.

    Attributes:
        values: Rewards, 0 where there is none, [E].
        known: Where there is one, bool [E].
        index: Group of each, [E].
        count: Groups.
        size: Rewards of each group that are known, [count].
        centred: Distance from the mean of the group, [E].
        varied: Whether the rewards of its group differ, bool [E].
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
        """Look at the groups."""
        given, index, count = segments.checked(rewards, group_index)
        known = given == given  # but for NaN, in both libraries
        values = segments.where(known, given, 0.0)
        size = segments.total(segments.where(known, values * 0.0 + 1.0, 0.0), index, count)
        mean = segments.total(values, index, count) / size.clip(1.0)
        lowest = segments.least(segments.where(known, given, float("inf")), index, count)
        highest = segments.most(segments.where(known, given, -float("inf")), index, count)
        varied = (highest - lowest > checks.number("tolerance", tolerance))[index] & known
        return cls(values, known, index, count, size, values - mean[index], varied)

    def std(self, correction: int) -> Any:
        """Standard deviation of the rewards of the group of each [E]."""
        squares = segments.where(self.known, self.centred**2, 0.0)
        summed = segments.total(squares, self.index, self.count)
        return ((summed / (self.size - correction).clip(1.0)) ** 0.5)[self.index]

    def result(self, advantages: Any) -> Any:
        """The advantages where the rewards of the group differ, 0 elsewhere."""
        return segments.where(self.varied, advantages, 0.0)


def _none_of(wrong: Any, n: Any, k: int) -> Any:
    """`C(wrong, k) / C(n, k)` for each group; k at most n. 0 to 1."""
    share = wrong * 0.0 + 1.0
    for i in range(k):
        drawn = segments.where(n > i, (wrong - i) / (n - i).clip(1.0), 1.0)
        share = share * drawn.clip(0.0)
    return share
