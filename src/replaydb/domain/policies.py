"""Sampling strategies: which groups a draw takes, and in what order.

Ordered strategies read an index from one end. Random strategies read the exponential clocks of
`docs/sampling.md`: every group has an exponential key whose rate is its weight, and a draw takes
the n groups with the smallest keys. This is weighted sampling without replacement within the batch.
Ties are broken by age: the oldest first, unless the strategy prefers the newest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from replaydb.domain import checks
from replaydb.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Fifo:
    """Oldest groups first, in the order in which they were put."""


@dataclass(frozen=True, slots=True)
class Lifo:
    """Newest groups first."""


@dataclass(frozen=True, slots=True)
class StalestFirst:
    """Lowest policy version first, then oldest group first; unknown versions last."""


@dataclass(frozen=True, slots=True)
class FreshestFirst:
    """Highest policy version first, then newest group first; unknown versions last."""


@dataclass(frozen=True, slots=True)
class TopPriority:
    """Highest priority first, then oldest group first."""


@dataclass(frozen=True, slots=True)
class LeastSampled:
    """Least often drawn groups first, then oldest group first."""


@dataclass(frozen=True, slots=True)
class Uniform:
    """All eligible groups with the same probability."""


@dataclass(frozen=True, slots=True)
class Prioritized:
    """Random, in proportion to `priority ** priority_exponent` (a setting of the buffer).

    Groups of priority 0 have weight 0: they are drawn only if no others are left, oldest first.

    Attributes:
        beta: Exponent of the importance weights `(w_i / min_j w_j) ** -beta`, in [0, 1]: 0 is no
            correction, 1 is full correction. From Prioritized Experience Replay (Schaul et al.,
            2016), normalised by the largest weight of the batch.
    """

    beta: float = 0.4

    def __post_init__(self) -> None:
        object.__setattr__(self, "beta", checks.number("beta", self.beta, least=0.0, most=1.0))


SimplePolicy = (
    Fifo | Lifo | StalestFirst | FreshestFirst | TopPriority | LeastSampled | Uniform | Prioritized
)


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One quota of a `Mix`.

    Attributes:
        weight: Size relative to the other shares of the batch.
        policy: Sampling strategy of the share.
        tasks: Tasks to draw from. None: all tasks that the call allows.
        where: Condition over `replaydb.col` that groups must meet.
        minimum: Minimum number of groups, whatever the weight.
    """

    weight: float
    policy: SimplePolicy = Uniform()
    tasks: str | Iterable[str] | None = None
    where: Any = None
    minimum: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", checks.number("weight", self.weight, least=0.0))
        object.__setattr__(self, "tasks", checks.names("tasks", self.tasks))
        object.__setattr__(self, "minimum", checks.whole_number("minimum", self.minimum))
        if not isinstance(self.policy, SimplePolicy):
            raise InvalidInputError("policy", "a policy that is not a Mix", repr(self.policy))


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Mix:
    """A batch of several shares with their own tasks or strategies, drawn in one transaction.

    The n groups are divided by largest remainder (Hamilton's method), after every share got its
    minimum. No group is in two shares. `Mix({"math": 3, "code": 1})` mixes tasks. `Mix([Share(1,
    Fifo(), where=col.times_sampled == 0), Share(1, Prioritized())])` mixes new groups with replayed
    ones.

    Attributes:
        shares: The shares, in the order of the batch.
    """

    shares: tuple[Share, ...]

    def __init__(
        self,
        shares: Mapping[str, float] | Iterable[Share],
        policy: SimplePolicy = Uniform(),
        *,
        minimum: int = 0,
    ) -> None:
        """Create a mix from shares, or from weights by task.

        Args:
            shares: Shares, or weights by task name.
            policy: Sampling strategy of each task, if `shares` has weights by task.
            minimum: Minimum number of groups of each task, if `shares` has weights by task.

        Raises:
            InvalidInputError: An argument is invalid, or no weight is above 0.
        """
        parts = (
            tuple(
                Share(
                    checks.number(f"shares[{task_name!r}]", weight, least=0.0),
                    policy,
                    tasks=task_name,
                    minimum=minimum,
                )
                for task_name, weight in shares.items()
            )
            if isinstance(shares, Mapping)
            else checks.instances("shares", shares, Share)
        )
        if not sum(part.weight for part in parts) > 0.0:
            raise InvalidInputError("shares", "at least one weight above 0", "none")
        object.__setattr__(self, "shares", parts)

    def quotas(self, n: int) -> list[int]:
        """Return how many of n groups each share gets.

        Raises:
            InvalidInputError: The sum of the minimums exceeds n.
        """
        n = checks.whole_number("n", n)
        least = [share.minimum for share in self.shares]
        if sum(least) > n:
            raise InvalidInputError("n", f"at least {sum(least)}, the sum of the minimums", n)
        # Divided by a power of two, which is exact, so that no sum is infinite.
        _, exponent = math.frexp(max(share.weight for share in self.shares))
        weights = [math.ldexp(share.weight, -exponent) for share in self.shares]
        ideal = [n * weight / sum(weights) for weight in weights]
        quotas = [max(low, math.floor(part)) for low, part in zip(least, ideal, strict=True)]
        # Add missing groups to the shares furthest below their ideal size, and take surplus groups
        # from those furthest above it. Earlier shares come first among equals.
        while (missing := n - sum(quotas)) != 0:
            due = [part - quota for part, quota in zip(ideal, quotas, strict=True)]
            if missing > 0:
                quotas[max(range(len(due)), key=due.__getitem__)] += 1
            else:
                free = [i for i in range(len(due)) if quotas[i] > least[i]]
                quotas[min(free, key=due.__getitem__)] -= 1
        return quotas


SamplingPolicy = SimplePolicy | Mix


def checked_policy(policy: Any) -> SamplingPolicy:
    """Return the argument if it is a sampling strategy, not for example its class.

    Raises:
        InvalidInputError: It is not.
    """
    if not isinstance(policy, SamplingPolicy):
        raise InvalidInputError("policy", "a sampling policy such as Uniform()", repr(policy))
    return policy
