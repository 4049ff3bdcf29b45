"""The groups that a draw has chosen: they are counted or leased, and get new keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Update, bindparam, func, type_coerce, update

from replaydb.database.repository import tasks
from replaydb.database.repository.choosing import Candidates, rates
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.repository.tasks import GroupSums, waiting_times
from replaydb.database.runtime.prepared import Write, prepared
from replaydb.database.statements.candidates import Order
from replaydb.database.tables.expressions import among
from replaydb.database.tables.schema import episode_group, group
from replaydb.database.tables.staleness import staleness_of
from replaydb.domain.episodes import GroupStatus

_NOW = group.last_sampled_at.type


@dataclass(frozen=True, slots=True)
class Chosen:
    """Groups of one partition that were chosen, and those that were passed over.

    Attributes:
        order: The order in which they were read.
        part: All groups that were read.
        positions: Positions of the chosen ones in `part` [n].
        elapsed: How far the clock of the partition advances.
    """

    order: Order
    part: Candidates
    positions: NDArray[np.int64]
    elapsed: float

    @property
    def ids(self) -> list[int]:
        """Ids of the chosen groups."""
        ids: list[int] = self.part.ids[self.positions].tolist()
        return ids


def take(buffer: LockedBuffer, chosen: Sequence[Chosen], lease_id: int | None) -> None:
    """Lease or count the chosen groups, and set new keys of these and of those passed over.

    Args:
        buffer: The buffer, with the tasks of the groups locked.
        chosen: The groups.
        lease_id: Id of the lease; None if the groups are sampled.
    """
    ids = [group_id for one in chosen for group_id in one.ids]
    counted: dict[Order, list[dict[str, Any]]] = {}
    skipped: dict[Order, list[dict[str, Any]]] = {}
    unkeyed: list[int] = []
    for one in chosen:
        part, task = one.part, one.part.task
        task.num_sampled += len(one.ids)
        if lease_id is not None:
            sums = GroupSums(len(one.ids), float(part.weights[one.positions].sum()), 0, 0)
            # The sizes stay: what is leased is stored like what can be drawn.
            task.move(part.status, GroupStatus.LEASED, sums)
        if part.clock is None:
            unkeyed += one.ids
            continue
        task.advance_clock(part.clock, one.elapsed)
        tasks.set_back_if_late(buffer.session, task, part.clock)
        passed = np.flatnonzero(~part.eligible & (part.keys <= one.elapsed))
        # What is leased gets its next arrival when it comes back.
        again = passed if lease_id is not None else np.append(one.positions, passed)
        variates = task.exponentials(buffer.settings, len(again))
        keys = task.time(part.clock) + waiting_times(
            variates, rates(part.clock, part.weights[again])
        )
        changes = [
            {"group_id": group_id, "new_key": key}
            for group_id, key in zip(part.ids[again].tolist(), keys.tolist(), strict=True)
        ]
        number = len(again) - len(passed)
        counted.setdefault(one.order, []).extend(changes[:number])
        skipped.setdefault(one.order, []).extend(changes[number:])
    if lease_id is not None and ids:
        version = buffer.row.policy_version
        leased = mark_leased(ids, lease_id, buffer.now, version)
        buffer.session.postpone(leased)
    elif unkeyed:
        buffer.session.postpone(mark_sampled(unkeyed, buffer.now))
    for order, rows in counted.items():
        timed = [row | {"now": buffer.now} for row in rows]
        buffer.session.postpone(Write(mark_sampled_and_rekey(order), timed))
    for order, rows in skipped.items():
        buffer.session.postpone(Write(rekey(order), rows))


@prepared
def mark_leased(ids: Any, lease: Any, now: Any, policy_version: Any) -> Update:
    """Lease groups. This counts as a draw unless the groups are released unused."""
    values = {
        # The staleness of expired and failed groups has not been updated since they became so.
        group.staleness: staleness_of(group.comparable_version, policy_version),
        group.leased_from: group.group_status,
        group.group_status: GroupStatus.LEASED.value,
        group.lease_id: lease,
    }
    return mark_sampled.build(ids, now).values(values)


@prepared
def mark_sampled(ids: Any, now: Any) -> Update:
    """Count one draw of each group."""
    return (
        update(episode_group).where(among(group.id, ids)).values(_sampled(type_coerce(now, _NOW)))
    )


@cache
def mark_sampled_and_rekey(order: Order) -> Update:
    """Count one draw of groups, and set new keys: dicts of `group_id`, `new_key` and `now`."""
    return rekey(order).values(_sampled(bindparam("now", type_=_NOW)))


@cache
def rekey(order: Order) -> Update:
    """Set new keys of groups that were passed over: dicts of `group_id` and `new_key`."""
    return (
        update(episode_group)
        .where(group.id == bindparam("group_id"))
        .values({order.column: bindparam("new_key", type_=order.column.type)})
    )


def _sampled(now: ColumnElement[Any]) -> dict[Any, Any]:
    return {
        group.times_sampled: group.times_sampled + 1,
        group.first_sampled_at: func.coalesce(group.first_sampled_at, now),
        group.last_sampled_at: now,
    }
