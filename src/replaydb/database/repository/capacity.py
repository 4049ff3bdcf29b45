"""Capacity limits and eviction: space is freed before groups are added."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, assert_never

from sqlalchemy import ColumnElement

from replaydb.database.repository import (
    aging,
    groups,
    locked,
    ordered_reads,
    tasks,
    transitions,
)
from replaydb.database.repository.choosing import remaining_times
from replaydb.database.repository.locked import LockedBuffer, UnfinishedMaintenanceError
from replaydb.database.repository.tasks import TaskState
from replaydb.database.statements.candidates import Order, Partition, order_of
from replaydb.database.statements.selections import selection
from replaydb.database.tables.column_types import Damaged
from replaydb.database.tables.schema import IDLE, group
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.policies import Lifo, Uniform
from replaydb.domain.settings import Capacity
from replaydb.errors import BufferFullError, InvalidInputError

#: Minimum number of groups read at a time to choose victims.
PAGE = 16

#: Groups that can not be drawn: they are evicted first, oldest first, and evict no other groups.
UNSAMPLABLE = (GroupStatus.EXPIRED, GroupStatus.FAILED, GroupStatus.FILTERED)
#: All statuses from which groups are evicted.
EVICTABLE = (*UNSAMPLABLE, *IDLE)


@dataclass(slots=True)
class Size:
    """Groups, tokens and bytes: the measures that a capacity limits."""

    groups: int = 0
    tokens: int = 0
    bytes: int = 0

    def add(self, tokens: int, num_bytes: int) -> None:
        """Add one group."""
        self.groups += 1
        self.tokens += tokens
        self.bytes += num_bytes

    def over(self, capacity: Capacity) -> Size:
        """Return by how much this exceeds a capacity, in each measure."""
        return Size(
            *(
                0 if limit is None else max(0, amount - limit)
                for amount, limit in (
                    (self.groups, capacity.groups),
                    (self.tokens, capacity.tokens),
                    (self.bytes, capacity.bytes),
                )
            )
        )

    def __bool__(self) -> bool:
        return self.groups > 0 or self.tokens > 0 or self.bytes > 0


def free_space(
    buffer: LockedBuffer,
    incoming: Mapping[str, Size],
    *,
    protected: Sequence[int] = (),
    rivals: Collection[int] = (),
) -> None:
    """Evict groups until new samplable groups of some tasks fit.

    The tasks must be locked; if the whole buffer has a capacity, all its tasks must be.

    Args:
        buffer: The buffer.
        incoming: Size of the new groups, by task.
        protected: Ids of groups that must not be evicted.
        rivals: Ids of new groups that are already inserted, and can be evicted like all others.

    Raises:
        InvalidInputError: The new groups would not fit into an empty buffer.
        BufferFullError: Too many of the stored groups are leased, pending or protected: see
            `_must_wait`.
    """
    for task_states, limit, where in _limits(buffer, incoming):
        sizes = [incoming[task.task_name] for task in task_states if task.task_name in incoming]
        size = Size(
            sum(size.groups for size in sizes),
            sum(size.tokens for size in sizes),
            sum(size.bytes for size in sizes),
        )
        _fit(buffer, task_states, size, limit, where, protected, frozenset(rivals))


def evict_excess(buffer: LockedBuffer, rivals: Collection[int] = ()) -> None:
    """Evict groups after new ones were inserted without `free_space`.

    No space is freed for groups that can not be drawn: the newest of them may be evicted at once.
    Nor is it freed, in a buffer that keeps the best groups, for the `rivals`: new groups that can
    be evicted, by id.

    Raises:
        BufferFullError: A rival would be evicted only because the other groups are leased or
            pending.
    """
    free_space(buffer, dict.fromkeys(buffer.task_states, Size()), rivals=rivals)


def evict_surplus(buffer: LockedBuffer) -> None:
    """Evict groups beyond capacities that were lowered.

    Raises:
        UnfinishedMaintenanceError: There are too many for the transaction of a call.
    """
    if not evict_some(buffer, locked.MAINTAINED_AT_ONCE):
        raise UnfinishedMaintenanceError(buffer, evicts=True)


def check_fits(buffer: LockedBuffer, task_name: str, size: Size) -> None:
    """Check that a group would fit into an empty buffer.

    Raises:
        InvalidInputError: It is larger than a capacity.
    """
    for _, limit, where in _limits(buffer, [task_name]):
        _check_fits(size, limit, where)


def is_old(buffer: LockedBuffer, row: Any) -> bool:
    """Return whether a group is older than `time_to_live`, as far as its age can be read."""
    seconds = buffer.settings.time_to_live
    if seconds is None or isinstance(row.created_at, Damaged):
        return False
    return bool(row.created_at < buffer.now - timedelta(seconds=seconds))


def evict_old(buffer: LockedBuffer, most: int) -> bool:
    """Evict about `most` groups of locked tasks that are older than `time_to_live`.

    Returns:
        Whether there are no others.
    """
    if buffer.settings.time_to_live is None:
        return True
    partitions = _partitions(buffer, buffer.task_states.values(), EVICTABLE)
    stay, page, num_evicted = 0, PAGE, 0
    while num_evicted < most:
        rows = ordered_reads.first_of_all(buffer.session, partitions, Order(group.id), page)
        old = [row.id for row in rows if is_old(buffer, row)]
        _evict(buffer, old, "outlived time_to_live")
        num_evicted += len(old)
        # Ids are in order of age, except for groups put while a clock was wrong. So the search
        # ends at a page in which no group is old, and none has a time in the future.
        known = [row for row in rows if not isinstance(row.created_at, Damaged)]
        young = {row.id for row in known if row.created_at <= buffer.now} - set(old)
        if len(rows) < page or all(row.id in young for row in rows[stay:]):
            return True
        stay = len(rows) - len(old)
        page = PAGE + 2 * stay
    return False


def evict_some(buffer: LockedBuffer, most: int) -> bool:
    """Evict about `most` groups beyond capacities that were lowered.

    Returns:
        Whether there are no others that can be evicted.
    """
    num_evicted = 0
    for task_states, limit, _ in _limits(buffer, buffer.task_states):
        while excess := _total(task_states, Size()).over(limit):
            if num_evicted >= most:
                return False
            victims = _victims(buffer, task_states, excess, ())
            if not victims:
                break
            _evict(buffer, victims, f"evicted: {buffer.settings.eviction}")
            num_evicted += len(victims)
    return True


def _limits(
    buffer: LockedBuffer, task_names: Iterable[str]
) -> Iterator[tuple[list[TaskState], Capacity, str]]:
    """Yield the capacities of tasks and that of the buffer, with their tasks and a name."""
    for task_name in task_names:
        limit = buffer.settings.capacity_of(task_name)
        if limit is not None:
            yield [buffer.task_states[task_name]], limit, f"task {task_name!r}"
    if buffer.settings.capacity is not None:
        yield list(buffer.task_states.values()), buffer.settings.capacity, "the buffer"


def _fit(
    buffer: LockedBuffer,
    task_states: Sequence[TaskState],
    incoming: Size,
    limit: Capacity,
    where: str,
    protected: Sequence[int],
    rivals: frozenset[int],
) -> None:
    _check_fits(incoming, limit, where)
    full = BufferFullError(
        f"no space in {where} ({limit}), and no group can be evicted: all others are leased or "
        "pending, or kept by the same put or update"
    )
    refused = False
    while excess := _total(task_states, incoming).over(limit):
        victims = _victims(buffer, task_states, excess, protected)
        if not victims:
            if not _must_wait(task_states, incoming, excess):
                break
            if protected:
                _check_fits_with(buffer, task_states, incoming, limit, where, protected)
            raise full
        losers = rivals.intersection(victims)
        old = [group_id for group_id in victims if group_id not in losers]
        _evict(buffer, old, f"evicted: {buffer.settings.eviction}")
        _evict(buffer, sorted(losers), f"refused: {buffer.settings.eviction}")
        refused = refused or bool(losers)
    if refused and not _has_idle(buffer, task_states):
        raise full  # the groups that remain can not be evicted, so they are not better


def _must_wait(task_states: Sequence[TaskState], incoming: Size, excess: Size) -> bool:
    """Return whether something must wait because leased and pending groups leave no space for it.

    An episode adds no group. It waits for the tokens and bytes of leased groups, but not for those
    of pending groups, which might all wait for each other.
    """
    if incoming.groups or not incoming:
        return bool(incoming)
    is_leased = any(task.num_leased for task in task_states)
    return is_leased and (excess.tokens > 0 or excess.bytes > 0)


def _check_fits_with(
    buffer: LockedBuffer,
    task_states: Iterable[TaskState],
    incoming: Size,
    limit: Capacity,
    where: str,
    protected: Sequence[int],
) -> None:
    """Check that new groups and the protected ones would fit into an empty buffer together."""
    names = {task.task_name for task in task_states}
    size = replace(incoming)
    for row in groups.scalars(buffer.session, buffer.id, protected):
        if row.task_name in names and row.group_status in (*UNSAMPLABLE, *IDLE):
            size.add(row.num_tokens, row.num_bytes)
    _check_fits(size, limit, where)


def _check_fits(size: Size, limit: Capacity, where: str) -> None:
    if size.over(limit):
        raise InvalidInputError("groups", f"at most {limit}, the capacity of {where}", size)


def _has_idle(buffer: LockedBuffer, task_states: Sequence[TaskState]) -> bool:
    partitions = _partitions(buffer, task_states, IDLE)
    return bool(ordered_reads.first_of_all(buffer.session, partitions, Order(group.id), 1))


def _total(task_states: Iterable[TaskState], incoming: Size) -> Size:
    stored = list(task_states)
    return Size(
        incoming.groups + sum(task.stored_groups for task in stored),
        incoming.tokens + sum(task.stored_tokens for task in stored),
        incoming.bytes + sum(task.stored_bytes for task in stored),
    )


def _victims(
    buffer: LockedBuffer, task_states: Sequence[TaskState], excess: Size, protected: Sequence[int]
) -> list[int]:
    """Return the next groups to evict, no more than the excess requires.

    Several calls may be needed.
    """
    limit = min(max(PAGE, excess.groups), locked.MAINTAINED_AT_ONCE)
    others = ~selection(buffer.id, ids=protected) if protected else None
    for task in task_states:
        if task.is_expiring:  # groups that are too stale are evicted first
            aging.expire(buffer, task, limit)
    partitions = _partitions(buffer, task_states, UNSAMPLABLE)
    rows = ordered_reads.first_of_all(buffer.session, partitions, Order(group.id), limit, others)
    if not rows:
        partitions = _partitions(buffer, task_states, IDLE)
        order = _by_eviction(buffer)
        if order.clock is not None:
            return _at_random(buffer, task_states, order, excess, others)
        rows = ordered_reads.first_of_all(buffer.session, partitions, order, limit, others)
    return _enough(rows, excess)


def _enough(rows: Iterable[Any], excess: Size) -> list[int]:
    """Return the ids of the first groups whose sizes together cover the excess."""
    freed, chosen = Size(), []
    for row in rows:
        chosen.append(row.id)
        freed.add(row.num_tokens, row.num_bytes)
        if (
            freed.groups >= excess.groups
            and freed.tokens >= excess.tokens
            and freed.bytes >= excess.bytes
        ):
            break
    return chosen


def _at_random(
    buffer: LockedBuffer,
    task_states: Sequence[TaskState],
    order: Order,
    excess: Size,
    eligible: ColumnElement[bool] | None,
) -> list[int]:
    """Choose victims by the uniform clocks: the groups that `Uniform` would draw next.

    The clocks advance to the key of the last victim, as in a draw. Exponential waiting times are
    memoryless, so the remaining and the new groups keep the right distribution from there on. If
    some groups are protected, and for statuses without stored keys, keys are generated for this
    call alone.
    """
    limit = min(max(PAGE, excess.groups), locked.MAINTAINED_AT_ONCE)
    rate = float(sum(task.num_available for task in task_states))
    keyed: list[tuple[float, Any]] = []
    for task in task_states:
        tasks.set_back_if_late(buffer.session, task, "uniform", rate)
        for partition in _partitions(buffer, [task], IDLE):
            if partition.status == GroupStatus.COMPLETED and eligible is None:
                rows = ordered_reads.first(buffer.session, partition, order, limit)
                times = remaining_times(task, "uniform", rows)
            else:
                most, by_age = task.stored_groups, Order(group.id)
                rows = ordered_reads.first(buffer.session, partition, by_age, most, eligible)
                times = task.exponentials(buffer.settings, len(rows))
            keyed.extend(zip(times.tolist(), rows, strict=True))
    keyed.sort(key=lambda pair: (pair[0], pair[1].id))
    chosen = _enough((row for _, row in keyed[:limit]), excess)
    if chosen and eligible is None:
        elapsed, _ = keyed[len(chosen) - 1]
        for task in task_states:
            task.advance_clock("uniform", elapsed)
            tasks.set_back_if_late(buffer.session, task, "uniform")
    return chosen


def _by_eviction(buffer: LockedBuffer) -> Order:
    """Return the order in which groups are evicted."""
    match buffer.settings.eviction:
        case "oldest":
            return Order(group.id)
        case "newest":
            return order_of(Lifo())
        case "uniform":
            return order_of(Uniform())
        case "stalest":
            return Order(group.comparable_version)
        case "lowest_priority":
            return Order(group.priority)
        case "least_recently_sampled":
            return Order(group.last_sampled_at)
        case "most_sampled":
            return Order(group.times_sampled, descending=True)
        case _:
            assert_never(buffer.settings.eviction)


def _partitions(
    buffer: LockedBuffer, task_states: Iterable[TaskState], statuses: Iterable[GroupStatus]
) -> list[Partition]:
    return [
        Partition(buffer.id, task.task_name, status.value)
        for task in task_states
        for status in statuses
    ]


def _evict(buffer: LockedBuffer, ids: Sequence[int], reason: str) -> None:
    if ids:
        rows = groups.scalars(buffer.session, buffer.id, ids)
        transitions.retire(buffer, rows, reason, keep_payload=False, is_evicted=True)
