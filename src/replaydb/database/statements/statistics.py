"""Statistics of a buffer for users and loggers, each computed in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import ColumnElement, Label, Select, func, literal_column, select

from replaydb.database.runtime.prepared import prepared
from replaydb.database.tables.expressions import bytewise, total
from replaydb.database.tables.schema import IS_IDLE, group, task
from replaydb.domain.episodes import GroupStatus


@prepared
def select_task_counters(buffer_id: Any) -> Select[Any]:
    """Select the counters of every task, and the version range of its samplable groups."""

    def version(pick: Callable[[Any], Any]) -> Label[int | None]:
        """Read the extreme version from one end of its index."""
        return (
            select(pick(group.comparable_version))
            .where(
                group.buffer_id == task.c.buffer_id,
                group.task_name == task.c.task_name,
                group.group_status == literal_column(repr(GroupStatus.COMPLETED.value)),
                IS_IDLE,
                group.comparable_version.is_not(None),
            )
            .correlate(task)
            .scalar_subquery()
            .label(f"{pick(group.comparable_version).name}_version")
        )

    columns = (
        task.c.task_name,
        task.c.max_staleness,
        task.c.num_available,
        task.c.num_pending,
        task.c.num_leased,
        task.c.num_inserted,
        task.c.num_replaced,
        task.c.num_sampled,
        task.c.stored_groups.label("num_groups"),
        task.c.stored_tokens.label("num_tokens"),
        task.c.stored_bytes.label("num_bytes"),
        version(func.max),
        version(func.min),
    )
    mine = task.c.buffer_id == buffer_id
    return select(*columns).where(mine).order_by(bytewise(task.c.task_name))


#: Bins of staleness: name, minimum and maximum.
STALENESS_BINS: tuple[tuple[str, int, int], ...] = (
    ("below_0", -(2**62), -1),
    ("0", 0, 0),
    ("1", 1, 1),
    ("2", 2, 2),
    ("3_4", 3, 4),
    ("5_8", 5, 8),
    ("9_16", 9, 16),
    ("above_16", 17, 2**62),
)


def select_by_status(buffer_id: Any, *sums: ColumnElement[Any]) -> Select[Any]:
    """Select counts and sizes per task and status, and further aggregates."""
    return (
        select(
            group.task_name,
            group.group_status,
            func.count().label("num_groups"),
            total(group.num_episodes, "num_episodes"),
            total(group.num_tokens, "num_tokens"),
            total(group.num_bytes, "num_bytes"),
            *sums,
        )
        .where(group.buffer_id == buffer_id)
        .group_by(group.task_name, group.group_status)
        .order_by(bytewise(group.task_name), bytewise(group.group_status))
    )
