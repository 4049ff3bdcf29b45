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
from typing import Any, Literal

from replaydb.errors import InvalidInputError, InvalidSettingsError
from replaydb.inputs import INT64, all_of, setting, to_int, to_number


@dataclass(frozen=True, slots=True)
class Fifo:
    """The oldest groups first, in the order they were put."""


@dataclass(frozen=True, slots=True)
class Lifo:
    """The newest groups first."""


@dataclass(frozen=True, slots=True)
class StalestFirst:
    """The oldest policy version first; groups of unknown version last."""


@dataclass(frozen=True, slots=True)
class FreshestFirst:
    """The newest policy version first, the newest group first within it; unknown versions last."""


@dataclass(frozen=True, slots=True)
class TopPriority:
    """The highest priority first, the newest group first among equals."""


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
        object.__setattr__(self, "beta", to_number("beta", self.beta, least=0.0, most=1.0))


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
        object.__setattr__(self, "weight", to_number("weight", self.weight, least=0.0))
        object.__setattr__(self, "minimum", to_int("minimum", self.minimum, 0, INT64[1]))
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
                    to_number(f"shares[{task_name!r}]", weight, least=0.0),
                    policy,
                    tasks=task_name,
                    minimum=minimum,
                )
                for task_name, weight in shares.items()
            )
            if isinstance(shares, Mapping)
            else all_of(Share, "shares", shares)
        )
        if not sum(part.weight for part in parts) > 0.0:
            raise InvalidInputError("shares", "a weight above 0", "none")
        object.__setattr__(self, "shares", parts)

    def quotas(self, n: int) -> list[int]:
        """How many of n groups each share gets.

        Raises:
            InvalidInputError: The minimums together are more than n.
        """
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


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much may be stored; at least one limit. What is archived does not count.

    Attributes:
        groups: Groups at most.
        tokens: Tokens of their episodes at most.
        bytes: Bytes of their payloads at most.
    """

    groups: int | None = None
    tokens: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        limits = (self.groups, self.tokens, self.bytes)
        if all(limit is None for limit in limits):
            raise InvalidSettingsError("capacity: expected groups, tokens or bytes, got none")
        for name, limit in zip(("groups", "tokens", "bytes"), limits, strict=True):
            if limit is not None:
                _set_size(self, name)


#: Which group makes room for a new one; the oldest first among equals. Groups that can no longer
#: be drawn (expired, failed, filtered) go before all others. `least_recently_sampled` takes groups
#: that were never sampled last.
Eviction = Literal["oldest", "stalest", "lowest_priority", "most_sampled", "least_recently_sampled"]


@dataclass(frozen=True, slots=True)
class MinSize:
    """Draws wait until so many groups can be drawn."""

    size: int

    def __post_init__(self) -> None:
        _set_size(self, "size")


@dataclass(frozen=True, slots=True)
class SamplesPerInsert:
    """Keep draws and puts in proportion, as Reverb's limiter of this name does.

    With `diff = inserts * ratio - samples`, counted in groups since the limit was set, a draw
    waits while it would bring diff below `min_size * ratio - error_buffer`, and a put waits while
    it would bring diff above `min_size * ratio + error_buffer`.

    Attributes:
        ratio: Samples for each insert.
        min_size: Draws wait until so many groups were inserted; puts do not wait before.
        error_buffer: How far diff may stray to either side, at least `max(1, ratio)`. A batch
            larger than twice this can never be drawn.
    """

    ratio: float
    min_size: int
    error_buffer: float

    def __post_init__(self) -> None:
        _set_number(self, "ratio", above=0.0)
        _set_size(self, "min_size")
        _set_number(self, "error_buffer", least=max(1.0, self.ratio))


@dataclass(frozen=True, slots=True)
class Queue:
    """Every group is drawn once, and puts wait while `size` groups wait to be drawn."""

    size: int

    def __post_init__(self) -> None:
        _set_size(self, "size")


RateLimit = MinSize | SamplesPerInsert | Queue


def _set_size(settings: Any, name: str) -> None:
    """A field of a frozen dataclass as a whole number >= 1."""
    field = f"{type(settings).__name__}.{name}"
    size = setting(to_int, field, getattr(settings, name), low=1, high=INT64[1])
    object.__setattr__(settings, name, size)


def _set_number(settings: Any, name: str, **limits: float) -> None:
    """A field of a frozen dataclass as a finite number."""
    field = f"{type(settings).__name__}.{name}"
    number = setting(to_number, field, getattr(settings, name), **limits)
    object.__setattr__(settings, name, number)


def checked_policy(policy: Any) -> SamplingPolicy:
    """Refuse what is not a policy, such as the class instead of an instance."""
    if not isinstance(policy, SamplingPolicy):
        raise InvalidInputError("policy", "a sampling policy such as Uniform()", repr(policy))
    return policy
