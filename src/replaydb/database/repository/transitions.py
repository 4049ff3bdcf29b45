"""Status transitions of groups, with the matching updates of task counters.

Every function takes a locked buffer, and groups of its locked tasks only: either their scalars,
read while the locks are held, or a condition that selects them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Delete, Select, Update, func, select, update
from sqlalchemy import delete as delete_from

from replaydb.database.repository import packs, tasks
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.repository.tasks import GroupSums, TaskState
from replaydb.database.repository.trajectories import close_trajectories
from replaydb.database.runtime.prepared import Write, prepared
from replaydb.database.statements.draw import set_outcome
from replaydb.database.statements.episode_group import (
    select_ids,
    select_sums,
    update_each_group,
    update_staleness,
)
from replaydb.database.statements.payload import delete_payloads, delete_transcripts
from replaydb.database.statements.selections import of_tasks
from replaydb.database.tables.expressions import among
from replaydb.database.tables.schema import IS_LEASED, draw_group, episode_group, group, lease
from replaydb.database.tables.staleness import LIVE, staleness_of
from replaydb.database.tables.views import ANNOTATED, COPIED, IS_SAME, value_drawn
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.results import DrawOutcome

#: Scalars of a group, and other columns to change with its status: the same ones for all groups.
Change = tuple[Any, Mapping[str, Any]]

_drawn = draw_group.c


def move(
    buffer: LockedBuffer,
    changes: Sequence[Change],
    status: GroupStatus,
    *,
    are_closed: bool = False,
) -> None:
    """Set a status other than completed, and end any lease on the groups.

    `are_closed`: whether nothing is open in those that are pending.
    """
    _leave(buffer, [row for row, _ in changes], status, are_closed=are_closed)
    new = [_changed(row, status, values) for row, values in changes]
    buffer.session.postpone(Write(update_each_group(), new))


def reopen(
    buffer: LockedBuffer,
    changes: Sequence[Change],
    *,
    are_closed: bool = False,
) -> None:
    """Make groups samplable, with new keys, and end any lease on them.

    `are_closed`: whether nothing is open in those that are pending.
    """
    status = GroupStatus.COMPLETED
    _recount(buffer.task_states, [row for row, _ in changes], status)
    if not are_closed:
        _close_trajectories(buffer, [row for row, _ in changes], status)
    by_task: dict[str, list[Change]] = {}
    for change in changes:
        by_task.setdefault(change[0].task_name, []).append(change)
    new = []
    for task_name, mine in by_task.items():
        task = buffer.task_states[task_name]
        for clock in tasks.CLOCKS:
            tasks.set_back_if_late(buffer.session, task, clock)
        weights = np.array([row.weight for row, _ in mine], np.float64)
        waits = (wait.tolist() for wait in task.waits(buffer.settings, weights))
        for (row, values), uniform, prioritized in zip(mine, *waits, strict=True):
            keys = {
                "uniform_key": task.uniform_clock + uniform,
                "priority_key": task.priority_clock + prioritized,
            }
            new.append(_changed(row, status, values) | keys)
    buffer.session.postpone(Write(update_each_group(), new))


def archive(
    buffer: LockedBuffer,
    rows: Sequence[Any],
    reason: str | None,
    *,
    keep_payload: bool,
    is_evicted: bool = False,
) -> None:
    """Archive groups, given by their scalars, with or without their payloads.

    Unless they are evicted (without their payloads), they count as consumed.
    """
    if not rows:
        return
    _leave(buffer, rows, GroupStatus.ARCHIVED)
    ids = [row.id for row in rows]
    if is_evicted:
        buffer.evicted |= dict.fromkeys(ids)
    if keep_payload:
        buffer.session.postpone(archive_groups(ids, reason, buffer.now))
        return
    buffer.session.postpone(archive_scalars(ids, reason, buffer.now, is_evicted))
    if buffer.row.uses_payload_store:
        packs.release(buffer.session, ids, buffer.shares)
    else:
        buffer.session.postpone(delete_payloads(ids))
    buffer.session.postpone(delete_transcripts(ids))


def retire(
    buffer: LockedBuffer,
    rows: Sequence[Any],
    reason: str,
    *,
    keep_payload: bool,
    is_evicted: bool = False,
) -> None:
    """Archive groups, or delete them, as the setting `on_evict` says."""
    if buffer.settings.on_evict == "archive":
        archive(buffer, rows, reason, keep_payload=keep_payload, is_evicted=is_evicted)
        return
    _recount(buffer.task_states, rows, GroupStatus.ARCHIVED)
    erase(buffer, [row.id for row in rows])


def erase(buffer: LockedBuffer, ids: Sequence[int]) -> None:
    """Delete groups that task counters no longer include."""
    if not ids:
        return
    if buffer.row.uses_payload_store:
        packs.release(buffer.session, ids, buffer.shares)
    buffer.session.run(delete_groups_by_id(ids))
    buffer.erased |= dict.fromkeys(ids)


def expire(buffer: LockedBuffer, rows: Sequence[Any], reason: str) -> None:
    """Expire idle groups, given by their scalars."""
    if rows:
        _recount(buffer.task_states, rows, GroupStatus.EXPIRED)
        ids = [row.id for row in rows]
        buffer.session.postpone(expire_groups(ids, reason, buffer.row.policy_version))


def delete(
    buffer: LockedBuffer,
    condition: ColumnElement[bool],
    reason: str,
) -> int:
    """Delete groups and everything that belongs to them. Return the number of groups.

    Draws and leases that had leased some of them record that.
    """
    condition &= of_tasks(buffer.task_states)  # tasks created meanwhile are not locked
    sums = buffer.session.run(select_sums(condition))
    _take_from_leases(buffer, sums, condition, reason)
    return _delete(buffer, sums, condition)


def replace(buffer: LockedBuffer, condition: ColumnElement[bool]) -> None:
    """Delete groups that are replaced by a put. Draws keep a copy of what they took."""
    condition &= of_tasks(buffer.task_states)
    sums = buffer.session.run(select_sums(condition))
    _take_from_leases(buffer, sums, condition, "replaced")
    if any(row.num_drawn for row in sums):
        buffer.session.run(keep_drawn(condition))
    _delete(buffer, sums, condition)


def _take_from_leases(
    buffer: LockedBuffer, sums: Sequence[Any], condition: ColumnElement[bool], reason: str
) -> None:
    """Record in draws and leases that they lose leased groups.

    Leases that the caller holds do not record it.
    """
    if all(row.group_status != GroupStatus.LEASED for row in sums):
        return
    buffer.session.run(mark_leased_lost(condition, reason, buffer.now))
    lost: dict[int, list[int]] = {}
    for row in buffer.session.run(select_losses(condition)):
        lost.setdefault(row.id, list(row.lost_ids or ())).append(row.group_id)
    for lease_id, ids in lost.items():
        if lease_id not in buffer.scope.held:
            buffer.session.run(set_lost(lease_id, ids))


def _delete(buffer: LockedBuffer, sums: Sequence[Any], condition: ColumnElement[bool]) -> int:
    for row in sums:
        buffer.task_states[row.task_name].leave(row.group_status, _sums(row))
    if buffer.row.uses_payload_store:
        ids = [row.id for row in buffer.session.run(select_ids(condition))]
        packs.release(buffer.session, ids, buffer.shares)
    return int(buffer.session.run(delete_groups(condition)))


def _leave(
    buffer: LockedBuffer, rows: Sequence[Any], status: GroupStatus, *, are_closed: bool = False
) -> None:
    """Count groups under a new status. Groups that stop aging get their final staleness."""
    _recount(buffer.task_states, rows, status)
    if not are_closed:
        _close_trajectories(buffer, rows, status)
    if status not in LIVE and any(task.is_behind for task in buffer.task_states.values()):
        ids = [row.id for row in rows if row.group_status in LIVE]
        buffer.session.run(age_groups_by_id(ids, buffer.row.policy_version))


def _close_trajectories(buffer: LockedBuffer, rows: Sequence[Any], status: GroupStatus) -> None:
    """Close what is open of groups that are not pending any more."""
    if status is not GroupStatus.PENDING and (
        ids := [row.id for row in rows if row.group_status == GroupStatus.PENDING]
    ):
        buffer.session.postpone(close_trajectories(ids, f"the group is {status.value}"))


def _recount(
    task_states: Mapping[str, TaskState], rows: Sequence[Any], status: GroupStatus
) -> None:
    alike: dict[tuple[str, str], list[Any]] = {}
    for row in rows:
        alike.setdefault((row.task_name, row.group_status), []).append(row)
    for (task_name, before), some in alike.items():
        task_states[task_name].move(before, status, GroupSums.of(some))


def _changed(row: Any, status: GroupStatus, values: Mapping[str, Any]) -> dict[str, Any]:
    new = {"group_id": row.id, "group_status": status.value, "lease_id": None, "leased_from": None}
    if status is not GroupStatus.PENDING:
        new["deadline"] = None  # deadlines apply to pending groups only
    return new | dict(values)


def _sums(row: Any) -> GroupSums:
    return GroupSums(row.num_groups, row.weight, row.num_tokens, row.num_bytes)


def mark_leased_lost(condition: ColumnElement[bool], reason: str, now: datetime) -> Update:
    """Record the outcome lost for the groups that are leased, among those meeting a condition."""
    leased = select(group.id).where(condition, group.group_status == GroupStatus.LEASED.value)
    lost = _drawn.group_id.in_(leased) & IS_LEASED
    return set_outcome(lost, DrawOutcome.LOST.value, reason, now)


def keep_drawn(condition: ColumnElement[bool]) -> Update:
    """Copy what was drawn of groups that meet a condition to their draws: they are replaced."""
    values: dict[Any, Any] = {_drawn[name]: value_drawn(name) for name in COPIED}
    values[_drawn.group_run_id] = group.run_id
    return update(draw_group).where(condition, IS_SAME).values(values)


def keep_annotated(condition: ColumnElement[bool]) -> Update:
    """Copy the values that annotations change of groups that meet a condition to their draws."""
    names = (*ANNOTATED, "num_tokens")
    values: dict[Any, Any] = {_drawn[name]: value_drawn(name) for name in names}
    values[_drawn.times_annotated] = func.coalesce(_drawn.times_annotated, group.times_annotated)
    return update(draw_group).where(condition, IS_SAME).values(values)


@prepared
def archive_groups(ids: Any, reason: Any, now: Any) -> Update:
    """Archive groups."""
    values = {
        group.group_status: GroupStatus.ARCHIVED.value,
        group.lease_id: None,
        group.leased_from: None,
        group.status_reason: reason,
        group.archived_at: now,
        group.deadline: None,
        group.is_evicted: False,
    }
    return update(episode_group).where(among(group.id, ids)).values(values)


@prepared
def archive_scalars(ids: Any, reason: Any, now: Any, is_evicted: Any) -> Update:
    """Archive groups whose payloads are deleted."""
    values = {group.has_transcript: False, group.num_bytes: 0, group.is_evicted: is_evicted}
    return archive_groups.build(ids, reason, now).values(values)


@prepared
def expire_groups(ids: Any, reason: Any, policy_version: Any) -> Update:
    """Expire groups, with their final staleness."""
    values = {
        group.group_status: GroupStatus.EXPIRED.value,
        group.status_reason: reason,
        group.staleness: staleness_of(group.comparable_version, policy_version),
    }
    return update(episode_group).where(among(group.id, ids)).values(values)


@prepared
def age_groups_by_id(ids: Any, policy_version: Any) -> Update:
    """Update the staleness of live groups by id."""
    return update_staleness(policy_version).where(among(group.id, ids))


def delete_groups(condition: ColumnElement[bool]) -> Delete:
    """Delete groups and everything that belongs to them."""
    return delete_from(episode_group).where(condition)


@prepared
def delete_groups_by_id(ids: Any) -> Delete:
    """Delete groups, by id, and everything that belongs to them."""
    return delete_from(episode_group).where(among(group.id, ids))


def select_losses(condition: ColumnElement[bool]) -> Select[Any]:
    """Select leased groups, with their leases, which are locked in order."""
    return (
        select(lease.c.id, lease.c.lost_ids, group.id.label("group_id"))
        .join_from(lease, episode_group, group.lease_id == lease.c.id)
        .where(condition)
        .order_by(lease.c.id, group.id)
        .with_for_update(of=lease)
    )


@prepared
def set_lost(lease_id: Any, lost_ids: Any) -> Update:
    """Record which groups a lease has lost."""
    return update(lease).where(lease.c.id == lease_id).values({lease.c.lost_ids: lost_ids})
