"""Sampling policies: which groups a draw takes, and in what order.

Ordered policies read an index from one end. Random policies read the arrival clocks of
`docs/sampling.md`: every group waits an exponential time whose rate is its weight, and a draw
takes the first n arrivals, which is sampling without replacement within the batch, in proportion
to weight. Ties are broken by age: the oldest first, unless the policy asks for the newest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from replaydb import checks
from replaydb.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Fifo:
    """The oldest groups first, in the order they were put."""


@dataclass(frozen=True, slots=True)
class Lifo:
    """The newest groups first."""


@dataclass(frozen=True, slots=True)
class StalestFirst:
    """The oldest policy version first, the oldest group first within it; unknown versions last."""


@dataclass(frozen=True, slots=True)
class FreshestFirst:
    """The newest policy version first, the newest group first within it; unknown versions last."""


@dataclass(frozen=True, slots=True)
class TopPriority:
    """The highest priority first, the oldest group first among equals."""


@dataclass(frozen=True, slots=True)
class LeastSampled:
    """The groups drawn least often first, the oldest first among equals."""


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every eligible group with the same probability."""


@dataclass(frozen=True, slots=True)
class Prioritized:
    """In proportion to `priority ** priority_exponent` (a setting of the buffer).

    Groups of priority 0 are drawn only when nothing else is left.

    Attributes:
        beta: Exponent of the importance weights `(w_i / min_j w_j) ** -beta`, in [0, 1]:
            0 is no correction, 1 is full correction. From Prioritized Experience Replay
            (Schaul et al., 2016), normalised by the largest weight of the batch.
    """

    beta: float = 0.4

    def __post_init__(self) -> None:
        object.__setattr__(self, "beta", checks.number("beta", self.beta, least=0.0, most=1.0))


SimplePolicy = (
    Fifo | Lifo | StalestFirst | FreshestFirst | TopPriority | LeastSampled | Uniform | Prioritized
)


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One part of a `Mix`.

    Attributes:
        weight: Its part of the batch, relative to the other shares'.
        policy: How its groups are drawn.
        tasks: Tasks it draws from; None: all that the call allows.
        where: Only groups that meet this expression over `replaydb.col`.
        minimum: Groups it gets at least, whatever its weight.
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
    """A batch made of shares: of tasks, of policies, or of both, drawn in one transaction.

    The n groups are divided by largest remainder (Hamilton's method), after every share got its
    minimum; no group is in two shares. `Mix({"math": 3, "code": 1})` mixes tasks;
    `Mix([Share(1, Fifo(), where=col.times_sampled == 0), Share(1, Prioritized())])` mixes new
    groups with replayed ones.

    Attributes:
        shares: The parts, in the order of the batch.
    """

    shares: tuple[Share, ...]

    def __init__(
        self,
        shares: Mapping[str, float] | Iterable[Share],
        policy: SimplePolicy = Uniform(),
        *,
        minimum: int = 0,
    ) -> None:
        """Weights of tasks, each drawn by `policy` with a minimum; or shares as they are."""
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
            raise InvalidInputError("shares", "a weight above 0", "none")
        object.__setattr__(self, "shares", parts)

    def quotas(self, n: int) -> list[int]:
        """How many of n groups each share gets.

        Raises:
            InvalidInputError: The minimums together are more than n.
        """
        n = checks.whole_number("n", n)
        least = [share.minimum for share in self.shares]
        if sum(least) > n:
            raise InvalidInputError("n", f"at least {sum(least)}, the sum of the minimums", n)
        # Divided by a power of two, which changes no digit, so that no sum of them is infinite.
        _, exponent = math.frexp(max(share.weight for share in self.shares))
        weights = [math.ldexp(share.weight, -exponent) for share in self.shares]
        ideal = [n * weight / sum(weights) for weight in weights]
        quotas = [max(low, math.floor(part)) for low, part in zip(least, ideal, strict=True)]
        # What is missing goes to those furthest below their due, what is too much comes from
        # those furthest above it; earlier shares first among equals.
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
    """Refuse what is not a policy, such as the class instead of an instance."""
    if not isinstance(policy, SamplingPolicy):
        raise InvalidInputError("policy", "a sampling policy such as Uniform()", repr(policy))
    return policy
