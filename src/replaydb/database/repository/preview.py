"""Reads of a draw that take no locks and write nothing: `Buffer.peek`, and slow filters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Select, bindparam, or_, select

from replaydb.database.filters import compiling
from replaydb.database.repository import aging, buffers, ordered_reads, tasks
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.choosing import Candidates, batch_of, first, rates
from replaydb.database.repository.draw_request import Drawn, DrawRequest, Quota
from replaydb.database.repository.tags import (
    MAX_LOOKUPS,
    MAX_LOOKUPS_IN_ORDER,
    look_up_in_snapshot,
    narrowed,
)
from replaydb.database.repository.tasks import GroupSums, TaskState, exponentials, waiting_times
from replaydb.database.runtime.prepared import Bound
from replaydb.database.runtime.session import Session
from replaydb.database.statements.candidates import (
    CANDIDATE,
    OF_TASK,
    Order,
    Partition,
    order_of,
    select_among,
    verdict,
)
from replaydb.database.statements.episode_group import select_sums
from replaydb.database.statements.selections import Selection, selection
from replaydb.database.tables.expressions import comes_after
from replaydb.database.tables.schema import group
from replaydb.domain.episodes import GroupStatus
from replaydb.errors import NotEnoughGroupsError

#: Groups per page for which keys are generated.
PAGE = 8192
#: A filter that more groups meet is evaluated under the locks.
MOST_CANDIDATES = MAX_LOOKUPS
#: Candidates for each group wanted of an ordered draw. Other calls may take the first of them.
CANDIDATES_PER_GROUP = 2


def peek(session: Session, cached: BufferRow, request: DrawRequest) -> Drawn:
    """Return groups that a draw might take now.

    For random sampling strategies, keys are generated for this call alone. The stored keys
    determine the next draw: a caller that knew them, and changed groups accordingly, would bias it.

    Args:
        session: A snapshot.
        cached: Row of the buffer as cached in this process.
        request: The draw to preview.

    Raises:
        NotEnoughGroupsError: There are fewer groups than `at_least`.
    """
    task_states = tasks.read(session, cached.id)
    fresh = _fresh(session, cached, task_states)
    parts: list[Drawn] = []
    for position, quota in enumerate(request.quotas):
        taken = [group_id for part in parts for group_id in part.ids]
        of_fresh = replace(quota, eligible=compiling.all_of([quota.eligible, fresh]))
        parts.append(_quota(session, cached, task_states.values(), of_fresh, taken))
        available, least = len(parts[-1].ids), request.least(position, len(taken))
        if available < least:
            raise NotEnoughGroupsError(least, available, quota.task_name, quota=quota)
    return Drawn.concatenate(parts)


def with_candidates(session: Session, cached: BufferRow, request: DrawRequest) -> DrawRequest:
    """Return a request with the groups that meet its filters, unless they are many."""

    def evaluated(quota: Quota) -> Quota:
        if quota.eligible is None:
            return quota
        candidates: dict[str, list[int]] = {}
        if quota.is_ordered and request.statuses == (GroupStatus.COMPLETED,):
            task_states = tasks.read(session, cached.id).values()
            more = replace(quota, count=CANDIDATES_PER_GROUP * quota.count)
            found = _quota(session, cached, task_states, more, ())
            for name, group_id in zip(found.task_names, found.ids, strict=True):
                candidates.setdefault(name, []).append(group_id)
            return replace(quota, candidates=candidates)
        which = Selection(
            cached.id, tasks=quota.tasks, statuses=request.statuses, where=quota.eligible
        )
        statement = select_candidates(narrowed(session, cached, which), MOST_CANDIDATES + 1)
        rows = session.run(statement)
        if len(rows) > MOST_CANDIDATES:
            return quota
        for row in rows:
            candidates.setdefault(row.task_name, []).append(row.id)
        return replace(quota, candidates=candidates)

    return replace(request, quotas=tuple(map(evaluated, request.quotas)), is_evaluated=True)


def _fresh(
    session: Session, cached: BufferRow, task_states: Mapping[str, TaskState]
) -> ColumnElement[bool] | None:
    """Return the condition that excludes groups that a draw would expire first; None: no such.

    Those groups are also subtracted from the task counters.
    """
    expiring = [task for task in task_states.values() if task.is_expiring]
    if not expiring:
        return None
    row = buffers.state(session, cached.id, cached.name)
    stale = [aging.has_to_expire(row, task) for task in expiring]
    for sums in session.run(select_sums(or_(*stale))):
        left = GroupSums(sums.num_groups, sums.weight, sums.num_tokens, sums.num_bytes)
        task_states[sums.task_name].move(sums.group_status, GroupStatus.EXPIRED, left)
    return ~or_(*stale)


def _quota(
    session: Session,
    cached: BufferRow,
    task_states: Iterable[TaskState],
    quota: Quota,
    taken: Sequence[int],
) -> Drawn:
    order = order_of(quota.policy)
    others = ~selection(cached.id, ids=taken) if taken else None
    eligible = compiling.all_of([quota.eligible, others])
    mine = [task for task in task_states if quota.tasks is None or task.task_name in quota.tasks]
    most = MAX_LOOKUPS_IN_ORDER if order.clock is None else MAX_LOOKUPS
    ids = look_up_in_snapshot(session, cached, quota.eligible, most)
    candidates = []
    for task in mine:
        partition = Partition(cached.id, task.task_name, GroupStatus.COMPLETED.value)
        if ids is not None:
            rows = session.run(select_among(partition, order, ids, eligible))
            keys = _keys(order, rows, partition)
        elif order.clock is None:
            rows = ordered_reads.first(session, partition, order, quota.count, eligible)
            keys = _keys(order, rows, partition)
        else:
            rows, keys = _first_by_new_key(session, partition, order, quota.count, eligible)
        candidates.append(Candidates.of(task, GroupStatus.COMPLETED, rows, keys))
    if not any(len(part.ids) for part in candidates):
        return Drawn.empty()
    chosen = first(candidates, quota.count, newest_first=order.newest_first)
    return batch_of(quota.policy, mine, candidates, chosen)


def _keys(order: Order, rows: Sequence[Any], partition: Partition) -> NDArray[np.float64]:
    """Return the sort keys of rows: keys generated for this call, or values of the sort column."""
    if order.clock is None:
        return np.array([ordered_reads.sort_key(order, row) for row in rows], np.float64)
    weights = np.array([row.weight for row in rows], np.float64)
    variates, _ = exponentials(None, partition.task_name, 0, len(rows))
    return waiting_times(variates, rates(order.clock, weights))


def _first_by_new_key(
    session: Session,
    partition: Partition,
    order: Order,
    count: int,
    eligible: ColumnElement[bool] | None,
) -> tuple[list[Any], NDArray[np.float64]]:
    """Return the eligible groups of a partition with the smallest generated keys, and the keys."""
    best: list[Any] = []
    times = np.zeros(0)
    last = 0
    while True:
        statement = select_page_of_eligible(partition, eligible, last, PAGE)
        page = session.run(statement)
        best.extend(page)
        times = np.concatenate([times, _keys(order, page, partition)])
        kept = np.argsort(times, kind="stable")[:count]
        best, times = [best[i] for i in kept], times[kept]
        if len(page) < PAGE:
            return best, times
        last = page[-1].id


def select_candidates(condition: ColumnElement[bool], most: int) -> Select[Any]:
    """Select the ids and tasks of up to `most` groups, in any order."""
    return select(group.id, group.task_name).where(condition).limit(most)


def select_page_of_eligible(
    partition: Partition, eligible: ColumnElement[bool] | None, after: int, limit: int
) -> Bound[Select[Any]]:
    """Select up to `limit` eligible groups of a partition, in order of ids after an id."""
    # Not by id alone, for the same reason as in `_MEMBERS_BY_AGE`.
    status = bindparam("partition_status", type_=group.group_status.type)
    later = comes_after(group.group_status, status, group.id, bindparam("after_id"))
    statement = select(*CANDIDATE).where(OF_TASK & later, verdict(eligible))
    statement = statement.order_by(group.group_status, group.id).limit(bindparam("most"))
    return Bound(statement, partition.values | {"after_id": after, "most": limit}, is_cached=False)
