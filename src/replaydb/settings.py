"""The settings of a buffer: kept with it in the database, so that every process obeys the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, Self, get_args

from replaydb.errors import InvalidInputError, InvalidSettingsError
from replaydb.inputs import (
    LONGEST_SECONDS,
    optional,
    setting,
    to_flag,
    to_int,
    to_name,
    to_number,
)
from replaydb.policies import Capacity, Eviction, MinSize, Queue, RateLimit, SamplesPerInsert

#: Sampling weights lie between these, or are 0: sums, ratios and waiting times of such weights,
#: of however many groups, are doubles with all their digits.
LEAST_WEIGHT, MOST_WEIGHT = 1e-150, 1e150


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSettings:
    """What a buffer is told once and every process that opens it follows.

    Attributes:
        max_staleness: Groups whose staleness (policy versions behind the buffer's) exceeds this
            expire when the policy advances, or at once when they are put. One number for every
            task, or one for each task named; None, and tasks not named, have no limit.
        priority_exponent: `Prioritized` draws in proportion to `priority ** priority_exponent`.
            0 makes every group with a priority above 0 equal.
        seed: Makes random draws reproducible: the same history of calls by one client draws the
            same groups, on either engine. None draws fresh entropy.
        compression: How payloads put from now on are compressed; None stores them as they are.
        capacity: Of the whole buffer. Room is made before a put, in its transaction.
        task_capacity: Of each task, or of each task named.
        eviction: Which groups make room.
        on_evict: "archive" keeps the scalars of an evicted group. "delete" keeps nothing of any
            group that leaves: evicted, acked or drawn `max_times_sampled` times.
        time_to_live: Seconds after which groups that nobody holds are evicted.
        max_times_sampled: A group is archived by the draw, or the ack, that reaches this.
        max_attempts: A group becomes `failed` when so many of its leases ended without an ack.
        on_ack: "archive" a leased group that was acked, or "return" it to be drawn again.
        archived_payload: "keep" or "drop" the payloads of groups archived by an ack or by
            `max_times_sampled`.
        rate_limit: Holds draws and puts in proportion.
        record_draws: Keep the lineage: which groups every draw took.

    Raises:
        InvalidSettingsError: Naming the setting, what it takes and what came.
    """

    max_staleness: int | Mapping[str, int] | None = None
    priority_exponent: float = 1.0
    seed: int | None = None
    compression: Literal["zstd"] | None = None
    capacity: Capacity | None = None
    task_capacity: Capacity | Mapping[str, Capacity] | None = None
    eviction: Eviction = "oldest"
    on_evict: Literal["archive", "delete"] = "archive"
    time_to_live: float | None = None
    max_times_sampled: int | None = None
    max_attempts: int | None = None
    on_ack: Literal["archive", "return"] = "archive"
    archived_payload: Literal["keep", "drop"] = "keep"
    rate_limit: RateLimit | None = None
    record_draws: bool = True

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            object.__setattr__(self, name, setting(rule, name, getattr(self, name)))
        self._check_together()

    def _check_together(self) -> None:
        """Refuse limits under which every put and every draw would wait for ever."""
        room = self.capacity.groups if self.capacity else None
        match self.rate_limit:
            case MinSize(size=least) | Queue(size=least) | SamplesPerInsert(min_size=least):
                if room is not None and least > room:
                    raise InvalidSettingsError(
                        f"rate_limit: waits for {least} groups, but capacity holds {room}"
                    )

    def updated(self, changes: Mapping[str, Any]) -> Self:
        """These settings with some of them changed, as this installation can obey them.

        Raises:
            InvalidSettingsError: Unknown, impossible, or in need of what is not installed.
        """
        changed = self._with(changes)
        asked = "compression" in changes and changed.compression is not None
        if asked and find_spec("zstandard") is None:
            raise _refused("compression", "the extra `replaydb[zstd]` to be installed", "zstd")
        return changed

    def _with(self, changes: Mapping[str, Any]) -> Self:
        known = {field.name for field in fields(self)}
        for name in changes:
            if name not in known:
                raise _refused(name, f"one of {', '.join(sorted(known))}", "an unknown setting")
        return replace(self, **changes)

    def max_staleness_of(self, task_name: str) -> int | None:
        """The limit for one task."""
        if isinstance(self.max_staleness, Mapping):
            return self.max_staleness.get(task_name)
        return self.max_staleness

    def capacity_of(self, task_name: str) -> Capacity | None:
        """What one task may hold."""
        if isinstance(self.task_capacity, Mapping):
            return self.task_capacity.get(task_name)
        return self.task_capacity

    @property
    def draw_limit(self) -> int | None:
        """How often a group may be drawn: a queue's are drawn once."""
        return 1 if isinstance(self.rate_limit, Queue) else self.max_times_sampled

    @property
    def is_exclusive(self) -> bool:
        """Whether puts and draws must see the whole buffer stand still, not only their tasks."""
        return self.capacity is not None or self.rate_limit is not None

    @property
    def is_limited(self) -> bool:
        """Whether a put can be refused, or has to make room."""
        return self.is_exclusive or self.task_capacity is not None

    def weight(self, priority: float) -> float:
        """Sampling weight of a priority. A priority of 0 weighs 0, whatever the exponent.

        Raises:
            InvalidInputError: The weight is neither 0 nor in [LEAST_WEIGHT, MOST_WEIGHT].
        """
        if priority == 0.0:
            return 0.0
        try:
            weight = float(priority**self.priority_exponent)
        except OverflowError:
            weight = math.inf
        if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
            raise InvalidInputError(
                "priority",
                f"0, or a number that to the power of priority_exponent={self.priority_exponent} "
                f"is in [{LEAST_WEIGHT:g}, {MOST_WEIGHT:g}]",
                priority,
            )
        return weight

    def to_json(self) -> dict[str, Any]:
        """As kept in the `buffer` table."""
        stored = asdict(self)
        if self.rate_limit is not None:
            stored["rate_limit"] = {
                "kind": type(self.rate_limit).__name__,
                **asdict(self.rate_limit),
            }
        return stored

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """From the `buffer` table; settings that this version does not know are refused."""
        values = dict(stored)
        if capacity := values.get("capacity"):
            values["capacity"] = Capacity(**capacity)
        if capacity := values.get("task_capacity"):
            values["task_capacity"] = (
                {task_name: Capacity(**own) for task_name, own in capacity.items()}
                if any(isinstance(own, Mapping) for own in capacity.values())
                else Capacity(**capacity)
            )
        if limit := values.get("rate_limit"):
            facts = dict(limit)
            values["rate_limit"] = _RATE_LIMITS[facts.pop("kind")](**facts)
        return cls()._with(values)


_RATE_LIMITS: dict[str, Callable[..., RateLimit]] = {
    kind.__name__: kind for kind in get_args(RateLimit)
}


Rule = Callable[[str, Any], Any]


def _whole(least: int = 0, most: int = 2**62 - 1) -> Rule:
    return partial(to_int, low=least, high=most)


def _or_none(rule: Rule) -> Rule:
    return partial(optional, rule)


def _each(rule: Rule) -> Rule:
    """One value for all tasks, or one for each task named."""

    def check(field: str, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return optional(rule, field, value)
        return {
            to_name(field, task_name): rule(f"{field}[{task_name!r}]", own)
            for task_name, own in value.items()
        }

    return check


def _one_of(*choices: str | None) -> Rule:
    def check(field: str, value: Any) -> Any:
        if not (value is None or isinstance(value, str)) or value not in choices:
            raise InvalidInputError(field, f"one of {choices}", repr(value))
        return value

    return check


def _a(*kinds: type) -> Rule:
    def check(field: str, value: Any) -> Any:
        if not isinstance(value, kinds):
            raise InvalidInputError(
                field, " or ".join(kind.__name__ for kind in kinds), repr(value)
            )
        return value

    return check


#: What each setting takes, as it is kept.
_RULES: dict[str, Rule] = {
    "max_staleness": _each(_whole()),
    "priority_exponent": partial(to_number, least=0.0),
    "seed": _or_none(_whole(most=2**63 - 1)),
    "compression": _one_of(None, "zstd"),
    "capacity": _or_none(_a(Capacity)),
    "task_capacity": _each(_a(Capacity)),
    "eviction": _one_of(*get_args(Eviction)),
    "on_evict": _one_of("archive", "delete"),
    "time_to_live": _or_none(partial(to_number, above=0.0, most=LONGEST_SECONDS)),
    "max_times_sampled": _or_none(_whole(1)),
    "max_attempts": _or_none(_whole(1)),
    "on_ack": _one_of("archive", "return"),
    "archived_payload": _one_of("keep", "drop"),
    "rate_limit": _or_none(_a(*get_args(RateLimit))),
    "record_draws": to_flag,
}


def _refused(setting: str, expected: str, actual: object) -> InvalidSettingsError:
    return InvalidSettingsError(f"{setting}: expected {expected}, got {actual!r}")
