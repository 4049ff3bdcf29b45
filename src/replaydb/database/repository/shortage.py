"""Why a draw has too few groups, counted from the tables without a lock."""

from __future__ import annotations

from sqlalchemy import Connection

from replaydb.database.prepared import execute
from replaydb.database.repository.portions import DrawRequest, Portion
from replaydb.database.statements.counts import count_held, count_passed, count_status
from replaydb.episodes import GroupStatus
from replaydb.errors import NotEnoughGroupsError

#: An error must not take longer than a draw.
_MOST = NotEnoughGroupsError.COUNTED_TO


def explain(
    connection: Connection, buffer_id: int, request: DrawRequest, error: NotEnoughGroupsError
) -> None:
    """Enter in an error what there is instead of what was asked for."""
    short = error._portion
    portion = short if isinstance(short, Portion) else request.portions[0]
    by_status: dict[str, int] = {}
    for status in GroupStatus:
        statement = count_status(buffer_id, portion.tasks, status, _MOST)
        [(number,)] = execute(connection, statement)
        if number:
            by_status[status.value] = number
    leased_by: dict[str, int] = {}
    if by_status.keys() & {GroupStatus.LEASED.value, GroupStatus.PENDING.value}:
        holders = count_held(buffer_id, portion.tasks, _MOST)
        leased_by = {row.owner: row.held for row in execute(connection, holders)}
    passed: dict[str, int] = {}
    if portion.conditions:
        counts = count_passed(buffer_id, portion.tasks, request.statuses, portion.conditions, _MOST)
        (row,) = execute(connection, counts)
        passed = row._asdict()
    error.explain(by_status, leased_by, **passed)
