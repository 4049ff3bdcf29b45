"""Manual updates of groups: priorities, tags and statuses (`Buffer.update`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Update as UpdateRows
from sqlalchemy import update

from replaydb.database.repository import aging, capacity, groups, maintenance, tags, transitions
from replaydb.database.repository.capacity import Size
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.repository.transitions import Change
from replaydb.database.runtime.prepared import prepared
from replaydb.database.statements.episode_group import update_each_group
from replaydb.database.statements.selections import EXPIRING, TOO_STALE
from replaydb.database.tables.expressions import among
from replaydb.database.tables.records import is_gone
from replaydb.database.tables.schema import episode_group, group
from replaydb.database.tables.staleness import staleness_of
from replaydb.domain.episodes import GroupStatus
from replaydb.errors import (
    GroupLeasedError,
    InvalidInputError,
    PayloadGoneError,
)


@dataclass(frozen=True, slots=True)
class Update:
    """New values for some groups; None leaves a value unchanged.

    Attributes:
        names: The groups, by id or by uid; unknown ones are skipped.
        statuses: Only groups of these statuses; None: of any status.
        priorities: One for each name. If a group is named twice, the last one is used.
        tags: Merged into the tags of every group.
        status: New status of every group.
        reason: New `status_reason` of every group.
    """

    names: Sequence[int] | Sequence[str]
    statuses: frozenset[str] | None = None
    priorities: Sequence[float] | None = None
    tags: Mapping[str, Any] | None = None
    status: GroupStatus | None = None
    reason: str | None = None


def apply(buffer: LockedBuffer, update: Update) -> int:
    """Update groups of a buffer with all its tasks locked. Return the number of groups.

    Raises:
        GroupLeasedError: Some groups are leased, so their status cannot be changed.
        PayloadGoneError: Some groups have lost their payload, so they stay archived.
        InvalidInputError: Some groups have no episodes, so they cannot be completed.
        BufferFullError: There is no space for groups that return from the archive.
        CorruptPayloadError: The tags of some groups cannot be read.
        StillExpiringError: Some groups that are too stale have not expired yet.
    """
    maintenance.sweep(buffer)
    found = groups.ids_by_name(buffer.session, buffer.id, update.names)
    rows = groups.scalars(buffer.session, buffer.id, sorted(set(found.values())))
    if update.statuses is not None:
        rows = [row for row in rows if row.group_status in update.statuses]
    ids = [row.id for row in rows]
    buffer.kept |= dict.fromkeys(ids)
    if update.priorities is not None:
        named = zip(update.names, update.priorities, strict=True)
        new = {found[name]: priority for name, priority in named if name in found}
        groups.update_priorities(buffer, rows, new)
    if update.tags:
        tags.merge(buffer, ids, update.tags)
    if update.reason is not None:
        reasons = [{"group_id": group_id, "status_reason": update.reason} for group_id in ids]
        buffer.session.run_many(update_each_group(), reasons)
    if update.status is not None:
        # Read again, since their weights may have changed.
        rows = groups.scalars(buffer.session, buffer.id, ids)
        _set_status(buffer, rows, update.status, update.reason)
    return len(ids)


def _set_status(
    buffer: LockedBuffer, rows: Sequence[Any], status: GroupStatus, reason: str | None
) -> None:
    _check(rows, status)
    moving = [row for row in rows if row.group_status != status]
    if status is GroupStatus.ARCHIVED:
        keep = buffer.settings.archived_payload == "keep"
        transitions.archive(buffer, moving, reason, keep_payload=keep)
        return
    by_status: dict[GroupStatus, list[Change]] = {}
    incoming: dict[str, Size] = {}
    for row in moving:
        into, values = _new_values(buffer, row, status, reason)
        by_status.setdefault(into, []).append((row, values))
        if row.group_status == GroupStatus.ARCHIVED and into not in capacity.UNSAMPLABLE:
            size = incoming.setdefault(row.task_name, Size())
            size.add(row.num_tokens, row.num_bytes)
    if incoming:
        aging.check_expired(buffer)  # or else this may expire some of the rows
        capacity.free_space(buffer, incoming, protected=[row.id for row in rows])
    for into, changes in by_status.items():
        if into is GroupStatus.COMPLETED:
            transitions.reopen(buffer, changes)
            done = mark_completed([row.id for row, _ in changes], buffer.now)
            buffer.session.run(done)
        else:
            transitions.move(buffer, changes, into)
    if any(row.group_status == GroupStatus.ARCHIVED for row in moving):
        capacity.evict_excess(buffer)


def _check(rows: Sequence[Any], status: GroupStatus) -> None:
    """Check that groups can get a status."""
    if leased := [row.id for row in rows if row.group_status == GroupStatus.LEASED]:
        raise GroupLeasedError(leased)
    if status is GroupStatus.ARCHIVED:
        return
    if gone := [row.id for row in rows if not row.num_bytes and is_gone(row._asdict())]:
        raise PayloadGoneError(gone)
    empty = [row.id for row in rows if not row.num_episodes]
    if empty and status is GroupStatus.COMPLETED:
        shown = f"groups {', '.join(map(str, empty))} without episodes"
        raise InvalidInputError("status", "only groups with episodes for 'completed'", shown)


def _new_values(
    buffer: LockedBuffer, row: Any, status: GroupStatus, reason: str | None
) -> tuple[GroupStatus, dict[str, Any]]:
    """Return the new status of a group, expired if it is too stale, and other columns to change."""
    staleness = row.staleness
    attempts = 0 if status is GroupStatus.COMPLETED else row.attempts
    if status in EXPIRING:  # groups of other statuses did not age, so their staleness is old
        staleness = staleness_of(row.comparable_version, buffer.row.policy_version)
        if buffer.is_too_stale(row.task_name, staleness, row.version_span):
            status, reason = GroupStatus.EXPIRED, TOO_STALE
    values = {
        "status_reason": reason,
        "staleness": staleness,
        "attempts": attempts,
        "archived_at": None,
    }
    return status, values


@prepared
def mark_completed(ids: Any, now: Any) -> UpdateRows:
    """Set the time of completion of groups that do not have one."""
    missing = among(group.id, ids) & group.completed_at.is_(None)
    return update(episode_group).where(missing).values({group.completed_at: now})
