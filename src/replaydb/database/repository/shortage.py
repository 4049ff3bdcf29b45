"""Counts that explain why a draw found too few groups, read without locks."""

from __future__ import annotations

from sqlalchemy import Connection

from replaydb.database.repository.draw_request import DrawRequest, Quota
from replaydb.database.runtime.prepared import execute
from replaydb.database.statements.counts import count_leased_by_owner, count_passed, count_status
from replaydb.domain.episodes import GroupStatus
from replaydb.errors import NotEnoughGroupsError

#: Limit of each count, so that an error does not take longer than a draw.
_MOST = NotEnoughGroupsError.COUNTED_TO


def explain(
    connection: Connection, buffer_id: int, request: DrawRequest, error: NotEnoughGroupsError
) -> None:
    """Add to an error the counts of groups by status, by lease owner, and by unmet condition."""
    short = error._quota
    quota = short if isinstance(short, Quota) else request.quotas[0]
    by_status: dict[str, int] = {}
    for status in GroupStatus:
        statement = count_status(buffer_id, quota.tasks, status, _MOST)
        [(number,)] = execute(connection, statement)
        if number:
            by_status[status.value] = number
    leased_by: dict[str, int] = {}
    if by_status.keys() & {GroupStatus.LEASED.value, GroupStatus.PENDING.value}:
        owners = count_leased_by_owner(buffer_id, quota.tasks, _MOST)
        leased_by = {row.owner: row.num_groups for row in execute(connection, owners)}
    passed: dict[str, int] = {}
    if quota.conditions:
        counts = count_passed(buffer_id, quota.tasks, request.statuses, quota.conditions, _MOST)
        (row,) = execute(connection, counts)
        passed = row._asdict()
    error.explain(by_status, leased_by, **passed)
