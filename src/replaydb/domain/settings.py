"""Buffer settings, stored in the database and shared by all processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial, wraps
from importlib.util import find_spec
from inspect import signature
from typing import Any, Literal, Self, TypedDict, TypeVar, get_args

from replaydb.domain import checks
from replaydb.domain.annotations import value_name
from replaydb.errors import ClientTooOldError, InvalidInputError, InvalidSettingsError

T = TypeVar("T")

#: Range of sampling weights other than 0. Within it, sums, ratios and exponential keys of any
#: number of weights are doubles with full precision.
LEAST_WEIGHT, MOST_WEIGHT = 1e-150, 1e150


def _checks_names(kind: type[T]) -> type[T]:
    """Class decorator: let the constructor name the closest setting if a name is unknown."""
    init = kind.__init__
    known = frozenset(signature(init).parameters) - {"self"}

    @wraps(init)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        check_names(given, known)
        init(self, *args, **given)

    setattr(kind, "__init__", checked)  # noqa: B010 - mypy forbids the assignment
    return kind


@_checks_names
@dataclass(frozen=True, slots=True)
class Capacity:
    """Maximum size of a buffer or task. Set at least one limit. Archived groups do not count.

    Attributes:
        groups: Maximum number of groups.
        tokens: Maximum number of tokens in their episodes.
        bytes: Maximum size of their payloads in bytes.
    """

    groups: int | None = None
    tokens: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        _apply_rules(self, groups=_or_none(_SIZE), tokens=_or_none(_SIZE), bytes=_or_none(_SIZE))
        if self.groups is self.tokens is self.bytes is None:
            raise _invalid("capacity", "groups, tokens or bytes", None)


@_checks_names
@dataclass(frozen=True, slots=True)
class Keep:
    """Retention of a history: how many of the newest entries to keep. Set at least one limit.

    Attributes:
        count: Maximum number of entries.
        seconds: Maximum age in seconds: of groups since they were put, of draws since they were
            made.
    """

    count: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        _apply_rules(self, count=_or_none(_SIZE), seconds=_or_none(checks.duration))
        if self.count is self.seconds is None:
            raise _invalid("keep", "count or seconds", None)


#: Which group is evicted for a new one; the oldest first among equals. Groups that can no longer
#: be drawn (expired, failed, filtered) are evicted before all others. `newest` evicts the newest
#: stored group. `uniform` evicts every group with the same probability. `lowest_priority` keeps the
#: groups with the highest priorities: new groups with a lower priority than all that stay are
#: refused. `least_recently_sampled` evicts never sampled groups last.
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
    """Rate limit: block draws until at least `size` groups can be drawn."""

    size: int

    def __post_init__(self) -> None:
        _apply_rules(self, size=_SIZE)


@_checks_names
@dataclass(frozen=True, slots=True)
class SamplesPerInsert:
    """Rate limit: keep draws and puts in proportion, as Reverb's limiter of this name does.

    With `diff = inserts * ratio - samples`, counted in groups since the limit was set, a draw waits
    while it would bring diff below `min_size * ratio - error_buffer`, and a put waits while it
    would bring diff above `min_size * ratio + error_buffer`.

    Attributes:
        ratio: Number of samples per insert.
        min_size: Number of inserted groups before the first draw. Puts do not wait before.
        error_buffer: Maximum deviation of diff to either side, at least `max(1, ratio)`. A batch
            larger than twice this can never be drawn.
    """

    ratio: float
    min_size: int
    error_buffer: float

    def __post_init__(self) -> None:
        _apply_rules(self, ratio=partial(checks.number, above=0.0), min_size=_SIZE)
        _apply_rules(self, error_buffer=partial(checks.number, least=max(1.0, self.ratio)))


@_checks_names
@dataclass(frozen=True, slots=True)
class Queue:
    """Rate limit: every group is drawn once, and puts wait while `size` groups wait to be drawn."""

    size: int

    def __post_init__(self) -> None:
        _apply_rules(self, size=_SIZE)


RateLimit = MinSize | SamplesPerInsert | Queue

Compression = Literal["zstd"]
OnEvict = Literal["archive", "delete"]
OnAck = Literal["archive", "return"]
ExpireBy = Literal["oldest_token", "newest_token"]
ArchivedPayload = Literal["keep", "drop"]
OnMissing = Literal["fail", "complete"]


@_checks_names
@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSettings:
    """Persistent settings of a buffer, shared by all processes.

    Attributes:
        max_staleness: Maximum staleness, in policy versions behind the buffer's. Staler groups
            expire when the policy advances, or at once when they are put. One number for all tasks,
            or a mapping by task; tasks that are not in the mapping have no limit. None: no limit.
        expire_by: Which token of a group with several versions `max_staleness` applies to. With
            "newest_token" a group expires only when all its tokens are too stale.
        priority_exponent: `Prioritized` draws in proportion to `priority ** priority_exponent`. 0
            gives equal weight to all groups with a priority above 0.
        seed: Seed for reproducible draws: the same sequence of calls by one client draws the same
            groups, on both engines. None: random.
        compression: Compression of payloads that are put from now on. None: uncompressed.
        capacity: Maximum size of the buffer. A put evicts other groups first, in its transaction.
        task_capacity: Maximum size of each task, or a mapping by task.
        eviction: Which groups are evicted.
        on_evict: "archive" keeps the metadata of an evicted group. "delete" deletes every group
            that would be archived: evicted, acked or drawn `max_times_sampled` times.
        time_to_live: Seconds after `put` or `open_group` when a group is evicted, unless it is
            leased or pending.
        max_times_sampled: Number of draws after which a group is archived, at the draw or the ack.
        max_attempts: Number of leases without an ack after which a group becomes `failed`, and of
            claims that end without their result.
        on_ack: What happens to an acked group: "archive" it, or "return" it to be drawn again.
        archived_payload: Whether to "keep" or "drop" the payloads of groups archived by an ack or
            by `max_times_sampled`.
        keep_archived: Retention of archived groups, per task: older ones are deleted. None: keep
            all.
        rate_limit: Rate limit of draws and puts. None: no limit.
        record_draws: Whether to record which groups every draw took.
        keep_draws: Retention of recorded draws: older ones are deleted, unless one of their groups
            is still leased. None: keep all.
        requires: Values that all episodes of a group need before it can be drawn: "reward",
            "advantage" or "metadata.NAME". A group without them waits, `pending`, until
            `Buffer.annotate` has added them. One name or several for all tasks, or a mapping by
            task.
        requires_timeout: Seconds that a group waits for these values, from when it has all its
            episodes. None: until the deadline of the group, if it has one.
        on_missing: What happens to a group whose values have not come in time, or cannot be added
            after `max_attempts` claims: "fail", or "complete" it without them.
        indexed_tags: Names of tags to index, so that filters that match few groups need not read
            all groups (`docs/filters.md`). Each index makes a put slightly slower.

    Raises:
        InvalidSettingsError: A setting is invalid. The message names the setting, the expected and
            the received value.
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
    requires: str | Collection[str] | Mapping[str, str | Collection[str]] = ()
    requires_timeout: float | None = None
    on_missing: OnMissing = "fail"
    indexed_tags: Collection[str] = ()

    def __post_init__(self) -> None:
        _apply_rules(self, **_RULES)
        # With such limits every put and every draw would wait indefinitely.
        max_groups = self.capacity.groups if self.capacity else None
        match self.rate_limit:
            case MinSize(size=least) | Queue(size=least) | SamplesPerInsert(min_size=least):
                if max_groups is not None and least > max_groups:
                    raise InvalidSettingsError(
                        f"rate_limit: waits for {least} groups, but capacity holds {max_groups}"
                    )

    def updated(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy with some settings changed, if this installation supports them.

        Raises:
            InvalidSettingsError: A setting is unknown or invalid, or needs a package that is not
                installed.
        """
        check_names(changes, _RULES)
        changed = replace(self, **changes)
        sets_compression = "compression" in changes and changed.compression is not None
        if sets_compression and find_spec("zstandard") is None:
            expected = "zstandard to be installed, pip install 'replaydb[zstd]'"
            raise _invalid("compression", expected, "zstd")
        return changed

    def max_staleness_of(self, task_name: str) -> int | None:
        """Return the staleness limit of a task, or None."""
        if isinstance(self.max_staleness, Mapping):
            return self.max_staleness.get(task_name)
        return self.max_staleness

    def requires_of(self, task_name: str) -> tuple[str, ...]:
        """Return the values that episodes of a task need."""
        if isinstance(self.requires, Mapping):
            return tuple(self.requires.get(task_name, ()))
        return tuple(self.requires)

    def capacity_of(self, task_name: str) -> Capacity | None:
        """Return the capacity of a task, or None."""
        if isinstance(self.task_capacity, Mapping):
            return self.task_capacity.get(task_name)
        return self.task_capacity

    @property
    def draw_limit(self) -> int | None:
        """How often a group may be drawn: once with a `Queue`; None: any number of times."""
        return 1 if isinstance(self.rate_limit, Queue) else self.max_times_sampled

    @property
    def is_exclusive(self) -> bool:
        """Whether puts and draws lock the whole buffer rather than single tasks."""
        return self.capacity is not None or self.rate_limit is not None

    @property
    def is_limited(self) -> bool:
        """Whether a put can be refused or must evict groups."""
        return self.is_exclusive or self.task_capacity is not None

    @property
    def keeps_best(self) -> bool:
        """Whether new groups are refused if their priority is too low."""
        return self.eviction == "lowest_priority"

    def weight(self, priority: float) -> float:
        """Return the sampling weight of a priority. Priority 0 has weight 0 with any exponent.

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
        """Return the settings as JSON for the `buffer` table."""
        stored = asdict(self)
        stored["indexed_tags"] = list(self.indexed_tags)
        own = self.requires
        stored["requires"] = (
            {task_name: list(names) for task_name, names in own.items()}
            if isinstance(own, Mapping)
            else list(own)
        )
        if self.rate_limit is not None:
            stored["rate_limit"]["kind"] = type(self.rate_limit).__name__
        return stored

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Return the settings for JSON from the `buffer` table.

        Raises:
            ClientTooOldError: A setting is not one of this version.
        """
        try:
            values = dict(stored)
            for name, kind in _KINDS.items():
                if limit := values.get(name):
                    values[name] = _limit(name, kind, limit)
            return cls(**values)
        except (InvalidSettingsError, TypeError, ValueError) as error:
            raise ClientTooOldError(
                f"the settings of a buffer are damaged, or of a newer replaydb: {error}"
            ) from error


class SettingsChanges(TypedDict, total=False):
    """Any fields of `BufferSettings`, as keyword arguments."""

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
    requires: str | Collection[str] | Mapping[str, str | Collection[str]]
    requires_timeout: float | None
    on_missing: OnMissing
    indexed_tags: Collection[str]


def all_changes(
    settings: BufferSettings | None, changes: Mapping[str, Any], *parameters: str
) -> dict[str, Any]:
    """Return all settings that a call sets: the fields of `settings`, overridden by `changes`.

    Args:
        settings: A complete set of settings, or None.
        changes: Single fields.
        parameters: Names of the other parameters of the call, to suggest for an unknown setting.

    Raises:
        InvalidSettingsError: A change is not a setting.
    """
    check_names(changes, [*_RULES, "settings", *parameters])
    if settings is None:
        return dict(changes)
    complete = checks.instance("settings", settings, BufferSettings)
    return {field.name: getattr(complete, field.name) for field in fields(complete)} | dict(changes)


#: Classes of limits whose JSON has no "kind".
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
    """Return a limit from its JSON, or a dict of limits by task."""
    try:
        if any(isinstance(own, Mapping) for own in stored.values()):
            return {task_name: _limit(name, kind, own) for task_name, own in stored.items()}
        given = {"kind": kind, **stored}
        return _LIMITS[given.pop("kind")](**given)
    except (AttributeError, KeyError, TypeError, InvalidSettingsError):
        raise _invalid(name, "a limit that this version supports", stored) from None


def _apply_rules(settings: Any, **rules: Rule) -> None:
    """Check fields of a frozen dataclass by their rules, and store what the rules return."""
    kind = type(settings).__name__
    for name, rule in rules.items():
        field = name if kind == "BufferSettings" else f"{kind}.{name}"
        try:
            value = rule(field, getattr(settings, name))
        except InvalidInputError as error:
            raise InvalidSettingsError(str(error)) from None
        object.__setattr__(settings, name, value)


def check_names(names: Iterable[str], known: Collection[str]) -> None:
    """Raise if a name is not a setting.

    Raises:
        InvalidSettingsError: With the first unknown name and the setting most similar to it.
    """
    for name in names:
        if name not in known:
            raise InvalidSettingsError(f"unknown setting {name!r}; {checks.meant(name, known)}")


def _invalid(setting: str, expected: str, actual: object) -> InvalidSettingsError:
    return InvalidSettingsError(f"{setting}: expected {expected}, got {actual!r}")


Rule = Callable[[str, Any], Any]


def _or_none(rule: Rule) -> Rule:
    return partial(checks.optional, rule)


def _one_of(choices: Any) -> Rule:
    """Return a rule for one of the strings of a Literal."""
    return partial(checks.one_of, choices=get_args(choices))


def _a(*kinds: type) -> Rule:
    """Return a rule for an instance of one of these classes."""
    return lambda field, value: checks.instance(field, value, *kinds)


def _per_task(rule: Rule) -> Rule:
    """Return a rule for one value for all tasks, or a mapping by task."""

    def check(field: str, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return rule(field, value)
        return {
            checks.name(field, task_name): rule(f"{field}[{task_name!r}]", own)
            for task_name, own in value.items()
        }

    return _or_none(check)


def _names(expected: str, rule: Rule) -> Rule:
    """Return a rule for one or several names: a sorted tuple without duplicates."""

    def check(field: str, value: Any) -> tuple[str, ...]:
        several = (value,) if isinstance(value, str) else checks.items(field, expected, value)
        return tuple(sorted({rule(field, each) for each in several}))

    return check


def _requires(field: str, value: Any) -> Any:
    """Return names of values for all tasks, or a mapping of them by task."""
    return () if value is None else _per_task(_names("names of values", value_name))(field, value)


_SIZE: Rule = partial(checks.whole_number, least=1)
_COUNT: Rule = partial(checks.whole_number, most=2**62 - 1)

#: Rule of each setting: checks a value and returns it as it is stored.
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
    "requires": _requires,
    "requires_timeout": _or_none(checks.duration),
    "on_missing": _one_of(OnMissing),
    "indexed_tags": _names("names of tags", checks.name),
}
