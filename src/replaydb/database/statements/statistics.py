"""Statistics of a buffer for users and loggers, each computed in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Label,
    Select,
    Subquery,
    case,
    func,
    literal,
    literal_column,
    select,
)

from replaydb.database.runtime.prepared import prepared
from replaydb.database.tables.column_types import UtcDateTime
from replaydb.database.tables.expressions import bytewise, seconds_between, total
from replaydb.database.tables.schema import IS_IDLE, draw, draw_group, episode_group, group, task
from replaydb.database.tables.staleness import current_staleness
from replaydb.database.tables.views import IS_SAME, as_drawn, times_sampled, was_trained_on
from replaydb.domain.episodes import GroupStatus


@prepared
def select_totals(buffer_id: Any) -> Select[Any]:
    """Select counts, sizes, staleness and rewards per task and status."""
    staleness = current_staleness(buffer_id)
    return _by_status(
        buffer_id,
        func.min(staleness).label("min_staleness"),
        func.avg(staleness).label("mean_staleness"),
        func.max(staleness).label("max_staleness"),
        func.avg(group.reward_mean).label("reward_mean"),
    )


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


def select_prompts(condition: ColumnElement[bool]) -> Select[Any]:
    """Select counts, outcomes and rewards of groups per prompt and task."""

    def number(status: GroupStatus) -> ColumnElement[int]:
        return func.count(case((group.group_status == status.value, 1)))

    return (
        select(
            group.prompt_uid,
            group.task_name,
            func.count().label("num_groups"),
            total(group.num_episodes, "num_episodes"),
            total(times_sampled(), "times_sampled"),
            func.count(case((times_sampled() > 0, 1))).label("num_groups_sampled"),
            number(GroupStatus.EXPIRED).label("num_expired"),
            number(GroupStatus.FILTERED).label("num_filtered"),
            number(GroupStatus.FAILED).label("num_failed"),
            func.avg(group.reward_mean).label("reward_mean"),
            func.min(group.reward_min).label("reward_min"),
            func.max(group.reward_max).label("reward_max"),
            func.max(group.created_at).label("last_put_at"),
        )
        .where(condition, group.prompt_uid.is_not(None))
        .group_by(group.prompt_uid, group.task_name)
        .order_by(bytewise(group.task_name), bytewise(group.prompt_uid))
    )


#: Sums of ages are computed from this time on, so that they do not depend on the current time.
EPOCH = datetime(2020, 1, 1, tzinfo=UTC)
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


@prepared
def sum_last_draws(buffer_id: Any, num_draws: Any) -> Select[Any]:
    """Select sums over the groups of the last `num_draws` draws of a buffer, as one row.

    A draw replays a group if the group was trained on in an earlier draw.
    """
    row = _last_drawn(buffer_id, num_draws).c
    again = row.replayed == 1
    return select(
        func.count(row.draw_id.distinct()).label("num_draws"),
        func.count().label("num_groups"),
        func.count(row.group_id.distinct()).label("num_distinct"),
        func.count(case((again, 1))).label("num_replayed"),
        func.count(case((~row.is_known, 1))).label("num_deleted"),
        func.count(case((again & ~row.is_known, 1))).label("num_replayed_deleted"),
        total(row.num_tokens, "num_tokens"),
        func.avg(row.reward_mean).label("reward_mean"),
        func.avg(row.reward_std).label("reward_std"),
        func.avg(case((again, row.reward_mean))).label("replayed_reward_mean"),
        func.avg(row.staleness).label("staleness_mean"),
        func.max(row.staleness).label("staleness_max"),
        func.avg(case((again, row.staleness))).label("replayed_staleness_mean"),
        *_histogram(row.staleness),
    )


def _last_drawn(buffer_id: Any, limit: Any) -> Subquery:
    """Select the groups of the last draws of a buffer that were trained on."""
    recent = (
        select(draw.c.id, draw.c.created_at)
        .where(draw.c.buffer_id == buffer_id)
        .order_by(draw.c.id.desc())
        .limit(limit)
        .subquery("recent")
    )
    earlier = draw_group.alias("earlier")
    was_drawn = (
        select(literal(1))
        .where(
            earlier.c.group_id == draw_group.c.group_id,
            earlier.c.draw_id < draw_group.c.draw_id,
            was_trained_on(earlier.c.outcome),
        )
        .exists()
    )
    return (
        select(
            recent.c.id.label("draw_id"),
            recent.c.created_at,
            draw_group.c.group_id,
            draw_group.c.staleness,
            case((was_drawn, 1), else_=0).label("replayed"),
            as_drawn("task_name").is_not(None).label("is_known"),
            *map(as_drawn, ("reward_mean", "reward_std", "num_tokens")),
        )
        .join_from(recent, draw_group, draw_group.c.draw_id == recent.c.id)
        .outerjoin(episode_group, IS_SAME)
        .where(was_trained_on(draw_group.c.outcome))
        .subquery("drawn")
    )


@prepared
def sum_by_status(buffer_id: Any, num_draws: Any) -> Select[Any]:
    """Select sums over the groups per task and status.

    Groups are new if they were put after the first of the last `num_draws` draws of the buffer; all
    are if it has none. `age_sum` and `age_max` are the ages at `EPOCH`, which are negative.
    """
    age = seconds_between(group.created_at, literal(EPOCH, UtcDateTime()))
    waited = seconds_between(group.completed_at, group.first_sampled_at)
    since = select(func.min(_last_drawn(buffer_id, num_draws).c.created_at)).scalar_subquery()
    new = since.is_(None) | (group.created_at >= since)
    even = group.reward_max == group.reward_min
    staleness = current_staleness(buffer_id)
    return _by_status(
        buffer_id,
        func.count(case((group.times_sampled == 0, 1))).label("num_unsampled"),
        func.sum(age).label("age_sum"),
        func.max(age).label("age_max"),
        func.count(waited).label("num_waited"),
        func.sum(waited).label("wait_sum"),
        func.max(waited).label("wait_max"),
        func.count(staleness).label("num_known_staleness"),
        total(staleness, "staleness_sum"),
        func.max(staleness).label("staleness_max"),
        func.count(group.reward_mean).label("num_rewarded"),
        func.sum(group.reward_mean).label("reward_sum"),
        func.count(case((new, 1))).label("num_new"),
        func.count(case((new, group.reward_mean))).label("num_new_rewarded"),
        func.count(case((new & even, 1))).label("num_new_even"),
        func.sum(case((new, group.reward_mean))).label("new_reward_sum"),
        func.sum(case((new, group.reward_std))).label("new_reward_std_sum"),
        *_histogram(staleness),
    )


def _by_status(buffer_id: Any, *sums: ColumnElement[Any]) -> Select[Any]:
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


def _histogram(staleness: ColumnElement[int]) -> Iterable[Label[int]]:
    for name, least, most in STALENESS_BINS:
        inside = staleness.between(least, most)
        yield func.count(case((inside, 1))).label(f"staleness_{name}")
