"""Priority functions of groups, for prioritized sampling: finite numbers >= 0.

Pass a function of a group to `buffer.put(groups, priority=reward_std)`, or its results to
`buffer.update_priorities(batch.ids, map(reward_std, batch))`. Functions with parameters are
callable classes. You can pass any other function of a group as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replaydb.batch.stored import StoredGroup
from replaydb.domain import checks
from replaydb.domain.episodes import EpisodeGroup
from replaydb.domain.episodes.arrays import to_numpy
from replaydb.training import advantages, segments


def reward_std(group: EpisodeGroup) -> float:
    """Return the population standard deviation of the rewards; 0 if all are equal or unknown."""
    return group.reward_std or 0.0


def mean_absolute_advantage(group: EpisodeGroup) -> float:
    """Return mean |A|, of the stored advantages if every episode has one, else of `grpo`."""
    found = np.abs(_advantages(group))
    return float(found.mean()) if found.size else 0.0


def advantage_times_std(group: EpisodeGroup) -> float:
    """Return `sum |A| * std(r)`, the score of groups in TRL's replay buffer.

    Advantages are as in `mean_absolute_advantage`, the standard deviation as in `reward_std`.
    """
    return float(np.abs(_advantages(group)).sum()) * reward_std(group)


@dataclass(frozen=True, slots=True)
class Learnability:
    """Priority `p * (1 - p)`, where p is the fraction of episodes that solved the prompt.

    Sampling for learnability (Rutherford et al., 2024, No Regrets; Foster & Foerster, 2025,
    Learning to Reason at the Frontier of Learnability).

    Attributes:
        solved: Minimum reward of an episode that solved the prompt.
    """

    solved: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "solved", checks.number("solved", self.solved))

    def __call__(self, group: EpisodeGroup) -> float:
        """Return the score; 0 if no episode has a reward, at most 0.25."""
        rewards = group.rewards
        known = rewards[~np.isnan(rewards)]
        share = float((known >= self.solved).mean()) if known.size else 0.0
        return share * (1.0 - share)


@dataclass(frozen=True, slots=True)
class LinearDecay:
    """Priority `policy version - decay * times sampled`, at least 0: newer, less used groups first.

    `LinearDecayPriority` of Trinity-RFT, with the same default decay.

    Attributes:
        decay: Number of policy versions by which each use ages a group.
    """

    decay: float = 2.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay", checks.number("decay", self.decay))

    def __call__(self, group: EpisodeGroup) -> float:
        """Return the score; 0 if the policy version is unknown."""
        uses = group.times_sampled if isinstance(group, StoredGroup) else 0
        return max(0.0, (group.min_policy_version or 0) - self.decay * uses)


def td_errors(
    errors: Any,
    mask: Any,
    group_index: Any,
    num_groups: int,
    *,
    eta: float = 0.9,
    eps: float = 1e-6,
) -> NDArray[np.float64]:
    """Return priorities of groups from the TD errors of a value function.

    `eta * max |d| + (1 - eta) * mean |d| + eps` over the tokens of each group: the priority of R2D2
    (Kapturowski et al., 2019, section 2.3), based on prioritized experience replay (Schaul et al.,
    2016).

    Args:
        errors: TD error of each token, [N, L], an array or a tensor.
        mask: Tokens to include, bool [N, L], such as `loss_mask`.
        group_index: Index of the group of each sequence, [N].
        num_groups: Number of groups in the batch.
        eta: Weight of the largest error, 0 to 1; the mean has the weight `1 - eta`.
        eps: Minimum priority, so that groups without error can still be drawn.

    Returns:
        Priorities, float64 [num_groups], for `buffer.update_priorities(batch.ids, ...)`; `eps` for
        a group without tokens in the mask.

    Raises:
        InvalidInputError: A number is invalid.
    """
    eta = checks.number("eta", eta, least=0.0, most=1.0)
    eps = checks.number("eps", eps, least=0.0)
    num_groups = checks.whole_number("num_groups", num_groups)
    size, chosen = np.abs(to_numpy("errors", errors)), to_numpy("mask", mask).astype(np.bool_)
    index = np.broadcast_to(to_numpy("group_index", group_index)[:, None], chosen.shape)[chosen]
    values = size[chosen].astype(np.float64)
    counts = np.bincount(index, minlength=num_groups)
    largest = np.maximum(segments.most(values, index, num_groups), 0.0)
    mean = segments.total(values, index, num_groups) / np.maximum(counts, 1)
    mixed: NDArray[np.float64] = eta * largest + (1.0 - eta) * mean + eps
    return mixed


def _advantages(group: EpisodeGroup) -> NDArray[np.float64]:
    stored = group.advantages
    if not np.isnan(stored).any():
        return stored
    rewards = group.rewards
    return advantages.grpo(rewards, np.zeros(len(rewards), np.int64))
