"""Groups that failed because their stored data is damaged, and their restoration.

Damage may be repaired later, for instance when a disk or a bucket is restored. The reason of such a
group therefore starts with its previous status.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Select, select

from replaydb.database.repository import transitions, updates
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.repository.updates import Update
from replaydb.database.runtime.session import Session
from replaydb.database.statements.selections import selection
from replaydb.database.tables.records import STATUSES
from replaydb.database.tables.schema import group
from replaydb.domain.episodes import GroupStatus

_REASON = re.compile(r"damaged \(was (\w+)\): ")


class Failed(NamedTuple):
    """A group that failed because of damage.

    Attributes:
        status: The status to restore.
        num_bytes: Size of its payload.
    """

    status: GroupStatus
    num_bytes: int


def fail(buffer: LockedBuffer, rows: Sequence[Any], reasons: Mapping[int, str]) -> None:
    """Mark groups as failed.

    Args:
        buffer: The buffer.
        rows: Scalars of the groups.
        reasons: Description of the damage, by group id.
    """
    changes = []
    for row in rows:
        before = row.leased_from or row.group_status
        reason = f"damaged (was {before}): {reasons[row.id]}"
        changes.append((row, {"status_reason": reason}))
    transitions.move(buffer, changes, GroupStatus.FAILED)


def failed(session: Session, buffer_id: int, ids: Sequence[int] | None = None) -> dict[int, Failed]:
    """Return the groups of a buffer that failed because of damage, in ascending order of ids.

    Args:
        session: In any transaction.
        buffer_id: The buffer.
        ids: Only these groups; None: all.
    """
    found = {}
    for row in session.run(select_failed_as_damaged(buffer_id, ids)):
        status = _status_before(row.status_reason)
        if status is not None:
            found[row.id] = Failed(status, row.num_bytes)
    return found


def restore(buffer: LockedBuffer, ids: Sequence[int]) -> None:
    """Restore the previous status of groups that are intact again, as `Buffer.update` would.

    All tasks of the buffer must be locked. Groups that are no longer failed are left unchanged.
    """
    by_status: dict[GroupStatus, list[int]] = {}
    for group_id, one in failed(buffer.session, buffer.id, ids).items():
        by_status.setdefault(one.status, []).append(group_id)
    for status, some in by_status.items():
        updates.apply(buffer, Update(some, status=status))


def _status_before(reason: str) -> GroupStatus | None:
    """Return the status to restore; None if the group did not fail because of damage."""
    match = _REASON.match(reason)
    if match is None or match[1] not in STATUSES:
        return None
    status = GroupStatus(match[1])
    # The deadline was removed, so generation can only be resumed.
    return GroupStatus.ABORTED if status is GroupStatus.PENDING else status


def select_failed_as_damaged(buffer_id: int, ids: Sequence[int] | None = None) -> Select[Any]:
    """Select failed groups of a buffer, all or by id, whose reason may be damage."""
    reason = group.status_reason
    is_failed = group.group_status == GroupStatus.FAILED.value
    which = selection(buffer_id, ids=ids, where=is_failed & reason.startswith("damaged ("))
    return select(group.id, reason, group.num_bytes).where(which).order_by(group.id)
