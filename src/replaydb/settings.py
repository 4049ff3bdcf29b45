"""The settings of a buffer: kept with it in the database, so that every process obeys the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial, wraps
from importlib.util import find_spec
from inspect import signature
from typing import Any, Literal, Self, TypedDict, TypeVar, get_args

from replaydb import checks
from replaydb.errors import InvalidInputError, InvalidSettingsError

T = TypeVar("T")

#: Sampling weights lie between these, or are 0: sums, ratios and waiting times of such weights,
#: of however many groups, are doubles with all their digits.
LEAST_WEIGHT, MOST_WEIGHT = 1e-150, 1e150


def _checks_names(kind: type[T]) -> type[T]:
    """Let the constructor of settings say which one was meant by a name that is unknown to it."""
    init = kind.__init__
    known = frozenset(signature(init).parameters) - {"self"}

    @wraps(init)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        check_names(given, known)
        init(self, *args, **given)

    setattr(kind, "__init__", checked)  # noqa: B010 - as a method it may not be assigned to
    return kind


@_checks_names
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
        _settle(self, groups=_or_none(_SIZE), tokens=_or_none(_SIZE), bytes=_or_none(_SIZE))
        if self.groups is self.tokens is self.bytes is None:
            raise _refused("capacity", "groups, tokens or bytes", None)


@_checks_names
@dataclass(frozen=True, slots=True)
class Keep:
    """How much of a history is kept, the newest of it; at least one limit.

    Attributes:
        count: So many at most.
        seconds: For so long at most: groups since they were put, draws since they were made.
    """

    count: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        _settle(self, count=_or_none(_SIZE), seconds=_or_none(checks.duration))
        if self.count is self.seconds is None:
            raise _refused("keep", "count or seconds", None)


#: Which group makes room for a new one; the oldest first among equals. Groups that can no longer
#: be drawn (expired, failed, filtered) go before all others. `newest` takes the newest of those
#: that are stored. `uniform` takes every group with the same probability. `lowest_priority` keeps
#: the best: newcomers that are worse than all that stays are refused.
#: `least_recently_sampled` takes groups that were never sampled last.
Eviction = Literal[
    "oldest",
    "newest",
    "uniform",
    "stalest",
    "lowest_priority",
    "most_sampled",
    "least_recently_sampled",
]


@_checks_names
@dataclass(frozen=True, slots=True)
class MinSize:
    """Draws wait until so many groups can be drawn."""

    size: int

    def __post_init__(self) -> None:
        _settle(self, size=_SIZE)


@_checks_names
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
        _settle(self, ratio=partial(checks.number, above=0.0), min_size=_SIZE)
        _settle(self, error_buffer=partial(checks.number, least=max(1.0, self.ratio)))


@_checks_names
@dataclass(frozen=True, slots=True)
class Queue:
    """Every group is drawn once, and puts wait while `size` groups wait to be drawn."""

    size: int

    def __post_init__(self) -> None:
        _settle(self, size=_SIZE)


RateLimit = MinSize | SamplesPerInsert | Queue

Compression = Literal["zstd"]
OnEvict = Literal["archive", "delete"]
OnAck = Literal["archive", "return"]
ExpireBy = Literal["oldest_token", "newest_token"]
ArchivedPayload = Literal["keep", "drop"]


@_checks_names
@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSettings:
    """What a buffer is told once and every process that opens it follows.

    Attributes:
        max_staleness: Groups whose staleness (policy versions behind the buffer's) exceeds this
            expire when the policy advances, or at once when they are put. One number for every
            task, or one for each task named; None, and tasks not named, have no limit.
        expire_by: Which token of a group of several versions `max_staleness` is about. By
            "newest_token" a group expires once none of its tokens is fresh.
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
        keep_archived: How many archived groups of each task are kept, and for how long; others are
            deleted, the oldest first. None: all, for ever.
        rate_limit: What holds draws and puts back; None: nothing does.
        record_draws: Keep the lineage: which groups every draw took.
        keep_draws: How many draws are kept in the lineage, and for how long; others are deleted,
            the oldest first, but none of which groups are still leased. None: all, for ever.
        indexed_tags: Tags, by their names, whose groups are found without reading all others where
            a filter asks for few (`docs/filters.md`). Each group that is put costs a little more.

    Raises:
        InvalidSettingsError: Naming the setting, what it takes and what came.
    """

    max_staleness: int | Mapping[str, int] | None = None
    expire_by: ExpireBy = "oldest_token"
    priority_exponent: float = 1.0
    seed: int | None = None
    compression: Compression | None = None
    capacity: Capacity | None = None
    task_capacity: Capacity | Mapping[str, Capacity] | None = None
    eviction: Eviction = "oldest"
    on_evict: OnEvict = "archive"
    time_to_live: float | None = None
    max_times_sampled: int | None = None
    max_attempts: int | None = None
    on_ack: OnAck = "archive"
    archived_payload: ArchivedPayload = "keep"
    keep_archived: Keep | None = None
    rate_limit: RateLimit | None = None
    record_draws: bool = True
    keep_draws: Keep | None = None
    indexed_tags: Collection[str] = ()

    def __post_init__(self) -> None:
        _settle(self, **_RULES)
        # Limits under which every put and every draw would wait for ever.
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
            InvalidSettingsError: A setting is unknown or impossible, or needs a package that is
                not installed.
        """
        check_names(changes, _RULES)
        changed = replace(self, **changes)
        asked = "compression" in changes and changed.compression is not None
        if asked and find_spec("zstandard") is None:
            expected = "zstandard to be installed, pip install 'replaydb[zstd]'"
            raise _refused("compression", expected, "zstd")
        return changed

    def max_staleness_of(self, task_name: str) -> int | None:
        """The staleness limit of one task; None where it has none."""
        if isinstance(self.max_staleness, Mapping):
            return self.max_staleness.get(task_name)
        return self.max_staleness

    def capacity_of(self, task_name: str) -> Capacity | None:
        """The capacity of one task; None where it has none."""
        if isinstance(self.task_capacity, Mapping):
            return self.task_capacity.get(task_name)
        return self.task_capacity

    @property
    def draw_limit(self) -> int | None:
        """How often a group may be drawn: once from a `Queue`; None: any number of times."""
        return 1 if isinstance(self.rate_limit, Queue) else self.max_times_sampled

    @property
    def is_exclusive(self) -> bool:
        """Whether puts and draws must see the whole buffer stand still, not only their tasks."""
        return self.capacity is not None or self.rate_limit is not None

    @property
    def is_limited(self) -> bool:
        """Whether a put can be refused, or has to make room."""
        return self.is_exclusive or self.task_capacity is not None

    @property
    def keeps_best(self) -> bool:
        """Whether what is put must be better than what is stored, or else is refused."""
        return self.eviction == "lowest_priority"

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
        """The settings as JSON, as the `buffer` table keeps them."""
        stored = asdict(self)
        stored["indexed_tags"] = list(self.indexed_tags)
        if self.rate_limit is not None:
            stored["rate_limit"]["kind"] = type(self.rate_limit).__name__
        return stored

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Settings from the `buffer` table; what this version does not know is refused."""
        values = dict(stored)
        for name, kind in _KINDS.items():
            if limit := values.get(name):
                values[name] = _limit(name, kind, limit)
        return cls(**values)


class SettingsChanges(TypedDict, total=False):
    """Fields of `BufferSettings`, any of them, as keyword arguments."""

    max_staleness: int | Mapping[str, int] | None
    expire_by: ExpireBy
    priority_exponent: float
    seed: int | None
    compression: Compression | None
    capacity: Capacity | None
    task_capacity: Capacity | Mapping[str, Capacity] | None
    eviction: Eviction
    on_evict: OnEvict
    time_to_live: float | None
    max_times_sampled: int | None
    max_attempts: int | None
    on_ack: OnAck
    archived_payload: ArchivedPayload
    keep_archived: Keep | None
    rate_limit: RateLimit | None
    record_draws: bool
    keep_draws: Keep | None
    indexed_tags: Collection[str]


def all_changes(
    settings: BufferSettings | None, changes: Mapping[str, Any], *parameters: str
) -> dict[str, Any]:
    """What a call sets: every field of settings that were given, and the changes to them.

    Args:
        settings: All of them, or None.
        changes: Single fields.
        parameters: What else the call takes, which a change may have been meant to be.

    Raises:
        InvalidSettingsError: A change is no setting.
    """
    check_names(changes, [*_RULES, "settings", *parameters])
    if settings is None:
        return dict(changes)
    whole = checks.instance("settings", settings, BufferSettings)
    return {field.name: getattr(whole, field.name) for field in fields(whole)} | dict(changes)


#: What limits are whose JSON does not say it.
_KINDS = {
    "capacity": "Capacity",
    "task_capacity": "Capacity",
    "keep_archived": "Keep",
    "keep_draws": "Keep",
    "rate_limit": "",
}
_LIMITS: dict[str, Callable[..., Any]] = {
    kind.__name__: kind for kind in (Capacity, Keep, *get_args(RateLimit))
}


def _limit(name: str, kind: str, stored: Mapping[str, Any]) -> Any:
    """A limit from its JSON, or one for each task."""
    if any(isinstance(own, Mapping) for own in stored.values()):
        return {task_name: _limit(name, kind, own) for task_name, own in stored.items()}
    given = {"kind": kind, **stored}
    try:
        return _LIMITS[given.pop("kind")](**given)
    except (KeyError, TypeError, InvalidSettingsError):
        raise _refused(name, "a limit that this version knows", dict(stored)) from None


def _settle(settings: Any, **rules: Rule) -> None:
    """Keep, of fields of a frozen dataclass, what their rules make of them."""
    kind = type(settings).__name__
    for name, rule in rules.items():
        field = name if kind == "BufferSettings" else f"{kind}.{name}"
        try:
            value = rule(field, getattr(settings, name))
        except InvalidInputError as error:
            raise InvalidSettingsError(str(error)) from None
        object.__setattr__(settings, name, value)


def check_names(names: Iterable[str], known: Collection[str]) -> None:
    """Refuse settings that there are not.

    Raises:
        InvalidSettingsError: Naming the first of them, and the one that it resembles.
    """
    for name in names:
        if name not in known:
            raise InvalidSettingsError(f"unknown setting {name!r}; {checks.meant(name, known)}")


def _refused(setting: str, expected: str, actual: object) -> InvalidSettingsError:
    return InvalidSettingsError(f"{setting}: expected {expected}, got {actual!r}")


Rule = Callable[[str, Any], Any]


def _or_none(rule: Rule) -> Rule:
    return partial(checks.optional, rule)


def _one_of(choices: Any) -> Rule:
    """One of the strings of a Literal."""
    return partial(checks.one_of, choices=get_args(choices))


def _a(*kinds: type) -> Rule:
    """An instance of one of these."""
    return lambda field, value: checks.instance(field, value, *kinds)


def _per_task(rule: Rule) -> Rule:
    """One value for all tasks, or one for each task named."""

    def check(field: str, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return rule(field, value)
        return {
            checks.name(field, task_name): rule(f"{field}[{task_name!r}]", own)
            for task_name, own in value.items()
        }

    return _or_none(check)


def _tag_names(field: str, value: Any) -> tuple[str, ...]:
    """One name or several, each once, in order."""
    several = (value,) if isinstance(value, str) else checks.items(field, "names of tags", value)
    return tuple(sorted({checks.name(field, each) for each in several}))


_SIZE: Rule = partial(checks.whole_number, least=1)
_COUNT: Rule = partial(checks.whole_number, most=2**62 - 1)

#: What each setting takes, as it is kept.
_RULES: dict[str, Rule] = {
    "max_staleness": _per_task(_COUNT),
    "expire_by": _one_of(ExpireBy),
    "priority_exponent": partial(checks.number, least=0.0),
    "seed": _or_none(checks.whole_number),
    "compression": _or_none(_one_of(Compression)),
    "capacity": _or_none(_a(Capacity)),
    "task_capacity": _per_task(_a(Capacity)),
    "eviction": _one_of(Eviction),
    "on_evict": _one_of(OnEvict),
    "time_to_live": _or_none(checks.duration),
    "max_times_sampled": _or_none(_SIZE),
    "max_attempts": _or_none(_SIZE),
    "on_ack": _one_of(OnAck),
    "archived_payload": _one_of(ArchivedPayload),
    "keep_archived": _or_none(_a(Keep)),
    "rate_limit": _or_none(_a(*get_args(RateLimit))),
    "record_draws": checks.flag,
    "keep_draws": _or_none(_a(Keep)),
    "indexed_tags": _tag_names,
}
