"""Keeping a buffer within its capacity: room is made before anything comes in."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, assert_never

from sqlalchemy import ColumnElement, Connection

from replaydb.database.column_types import Damaged
from replaydb.database.repository import aging, buffers, groups, orders, tasks, transitions
from replaydb.database.repository.candidates import waits
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.repository.tasks import TaskAccount
from replaydb.database.schema import IDLE, group
from replaydb.database.statements.pools import Order, Pool, order_of
from replaydb.database.statements.selections import selection
from replaydb.episodes import GroupStatus
from replaydb.errors import BufferFullError, InvalidInputError
from replaydb.policies import Lifo, Uniform
from replaydb.settings import BufferSettings, Capacity

#: Victims are looked up this many at a time, at least.
PAGE = 16

#: Can not be drawn, so they go first, the oldest first, and nothing has to go for them.
DEAD = (GroupStatus.EXPIRED, GroupStatus.FAILED, GroupStatus.FILTERED)


@dataclass(slots=True)
class Size:
    """An amount of what capacity limits."""

    groups: int = 0
    tokens: int = 0
    bytes: int = 0

    def add(self, tokens: int, num_bytes: int) -> None:
        """One group more."""
        self.groups += 1
        self.tokens += tokens
        self.bytes += num_bytes

    def over(self, capacity: Capacity) -> Size:
        """By how much this exceeds a capacity, in each measure."""
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


def make_room(
    buffer: LockedBuffer,
    incoming: Mapping[str, Size],
    *,
    spared: Sequence[int] = (),
    rivals: Collection[int] = (),
) -> None:
    """Evict what it takes for groups of some tasks, which can be drawn, to come in.

    The tasks must be locked; with a capacity of the whole buffer, all its tasks.

    Args:
        buffer: The buffer.
        incoming: How much comes in, by task.
        spared: Ids of groups that do not go.
        rivals: Ids of newcomers that are in already, and may be evicted like all others.

    Raises:
        InvalidInputError: They would not even fit into an empty buffer.
        BufferFullError: Too much of what is stored is leased or still arriving.
    """
    for task_name, size in incoming.items():
        limit = buffer.settings.capacity_of(task_name)
        if limit is not None:
            mine = [buffer.accounts[task_name]]
            _fit(buffer, mine, size, limit, f"task {task_name!r}", spared, frozenset(rivals))
    limit = buffer.settings.capacity
    if limit is not None:
        everything = Size(
            sum(size.groups for size in incoming.values()),
            sum(size.tokens for size in incoming.values()),
            sum(size.bytes for size in incoming.values()),
        )
        mine = list(buffer.accounts.values())
        _fit(buffer, mine, everything, limit, "the buffer", spared, frozenset(rivals))


def shed(buffer: LockedBuffer, rivals: Collection[int] = ()) -> None:
    """Evict what it takes after groups have come in for which no room was made.

    Those are the ones that can not be drawn, of which the newest may go at once; and, where the
    best are kept, all that can be evicted: the `rivals`, by their ids.

    Raises:
        BufferFullError: A rival would go only because of what is leased or still arriving.
    """
    make_room(buffer, dict.fromkeys(buffer.accounts, Size()), rivals=rivals)


def check_fits(buffer: LockedBuffer, task_name: str, size: Size) -> None:
    """Refuse what would not fit into an empty buffer.

    Raises:
        InvalidInputError: It is larger than a capacity.
    """
    for limit, where in (
        (buffer.settings.capacity_of(task_name), f"task {task_name!r}"),
        (buffer.settings.capacity, "the buffer"),
    ):
        if limit is not None and size.over(limit):
            raise InvalidInputError("groups", f"no more at once than {limit} of {where}", size)


def evict_old(buffer: LockedBuffer) -> None:
    """Evict groups of locked tasks that have outlived `time_to_live`."""
    if buffer.settings.time_to_live is None:
        return
    cutoff = buffer.now - timedelta(seconds=buffer.settings.time_to_live)
    pools = _pools(buffer, buffer.accounts.values(), [*DEAD, *IDLE])
    stay, most = 0, PAGE
    while True:
        rows = orders.first_of_all(buffer.connection, pools, Order(group.id), most)
        known = [row for row in rows if not isinstance(row.created_at, Damaged)]
        old = [row.id for row in known if row.created_at < cutoff]
        _evict(buffer, old, "outlived time_to_live")
        # Ids ascend with age, but for what was put while a clock was wrong. So the search ends
        # with a page that is all young, and in which nothing claims to be of the future.
        young = {row.id for row in known if cutoff <= row.created_at <= buffer.now}
        if len(rows) < most or all(row.id in young for row in rows[stay:]):
            return
        stay = len(rows) - len(old)
        most = PAGE + 2 * stay


def has_old(
    connection: Connection, buffer_id: int, settings: BufferSettings, now: datetime
) -> bool:
    """Whether the first group that may be evicted has outlived `time_to_live`."""
    if settings.time_to_live is None:
        return False
    names = buffers.task_names(connection, buffer_id)
    pools = [Pool(buffer_id, name, status.value) for name in names for status in (*DEAD, *IDLE)]
    cutoff = now - timedelta(seconds=settings.time_to_live)
    first = orders.first_of_all(connection, pools, Order(group.id), 1)
    return any(not isinstance(row.created_at, Damaged) and row.created_at < cutoff for row in first)


def _fit(
    buffer: LockedBuffer,
    accounts: Sequence[TaskAccount],
    incoming: Size,
    limit: Capacity,
    where: str,
    spared: Sequence[int],
    rivals: frozenset[int],
) -> None:
    if incoming.over(limit):
        raise InvalidInputError("groups", f"no more at once than {limit} of {where}", incoming)
    full = BufferFullError(
        f"no room in {where}: all that is stored is leased or still arriving ({limit})"
    )
    refused = False
    while excess := _total(accounts, incoming).over(limit):
        victims = _victims(buffer, accounts, excess, spared)
        if not victims:
            raise full
        losers = rivals.intersection(victims)
        old = [group_id for group_id in victims if group_id not in losers]
        _evict(buffer, old, f"evicted: {buffer.settings.eviction}")
        _evict(buffer, sorted(losers), f"refused: {buffer.settings.eviction}")
        refused = refused or bool(losers)
    if refused and not _has_idle(buffer, accounts):
        raise full  # None of those who stay is better.


def _has_idle(buffer: LockedBuffer, accounts: Sequence[TaskAccount]) -> bool:
    pools = _pools(buffer, accounts, IDLE)
    return bool(orders.first_of_all(buffer.connection, pools, Order(group.id), 1))


def _total(accounts: Iterable[TaskAccount], incoming: Size) -> Size:
    stored = list(accounts)
    return Size(
        incoming.groups + sum(account.stored_groups for account in stored),
        incoming.tokens + sum(account.stored_tokens for account in stored),
        incoming.bytes + sum(account.stored_bytes for account in stored),
    )


def _victims(
    buffer: LockedBuffer, accounts: Sequence[TaskAccount], excess: Size, spared: Sequence[int]
) -> list[int]:
    """The next groups to go, no more than the excess takes; several calls may be needed."""
    limit = max(PAGE, excess.groups)
    others = ~selection(buffer.id, ids=spared) if spared else None
    for account in accounts:
        if account.is_expiring:  # what is too stale goes first
            aging.expire(buffer, account, limit)
    pools = _pools(buffer, accounts, DEAD)
    rows = orders.first_of_all(buffer.connection, pools, Order(group.id), limit, others)
    if not rows:
        pools = _pools(buffer, accounts, IDLE)
        order = _by_eviction(buffer)
        if order.clock is not None:
            return _at_random(buffer, accounts, order, excess, others)
        rows = orders.first_of_all(buffer.connection, pools, order, limit, others)
    return _enough(rows, excess)


def _enough(rows: Iterable[Any], excess: Size) -> list[int]:
    """The first of these groups, as many as the excess takes."""
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
    accounts: Sequence[TaskAccount],
    order: Order,
    excess: Size,
    eligible: ColumnElement[bool] | None,
) -> list[int]:
    """Victims by the uniform clocks: whoever would be drawn next goes.

    The clocks move on to the last of them, as in a draw. Exponential waits are memoryless, so
    groups that stay, and those that come in, arrive from there on as if nobody had looked. Where
    some are spared, and for statuses that keep no arrivals, waits are made for this once.
    """
    limit = max(PAGE, excess.groups)
    rate = float(sum(account.num_available for account in accounts))
    arrivals: list[tuple[float, Any]] = []
    for account in accounts:
        tasks.set_back_if_late(buffer.connection, account, "uniform", rate)
        for pool in _pools(buffer, [account], IDLE):
            if pool.status == GroupStatus.COMPLETED and eligible is None:
                rows = orders.first(buffer.connection, pool, order, limit)
                times = waits(account, "uniform", rows)
            else:
                most, by_age = account.stored_groups, Order(group.id)
                rows = orders.first(buffer.connection, pool, by_age, most, eligible)
                times = account.exponentials(buffer.settings, len(rows))
            arrivals.extend(zip(times.tolist(), rows, strict=True))
    arrivals.sort(key=lambda arrival: (arrival[0], arrival[1].id))
    chosen = _enough((row for _, row in arrivals[:limit]), excess)
    if chosen and eligible is None:
        elapsed, _ = arrivals[len(chosen) - 1]
        for account in accounts:
            account.advance_clock("uniform", elapsed)
            tasks.set_back_if_late(buffer.connection, account, "uniform")
    return chosen


def _by_eviction(buffer: LockedBuffer) -> Order:
    """Order of the victims."""
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


def _pools(
    buffer: LockedBuffer, accounts: Iterable[TaskAccount], statuses: Iterable[GroupStatus]
) -> list[Pool]:
    return [
        Pool(buffer.id, account.task_name, status.value)
        for account in accounts
        for status in statuses
    ]


def _evict(buffer: LockedBuffer, ids: Sequence[int], reason: str) -> None:
    if ids:
        rows = groups.scalars(buffer.connection, buffer.id, ids)
        transitions.retire(buffer, rows, reason, keep_payload=False)
