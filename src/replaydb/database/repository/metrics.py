"""Metrics of a buffer for experiment loggers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from sqlalchemy import ColumnElement, Label, Select, Subquery, case, func, literal, select

from replaydb.database.repository import buffers
from replaydb.database.repository.capacity import UNSAMPLABLE
from replaydb.database.runtime.prepared import prepared
from replaydb.database.runtime.session import Session
from replaydb.database.statements.buffer import select_buffer
from replaydb.database.statements.statistics import (
    STALENESS_BINS,
    select_by_status,
    select_task_counters,
)
from replaydb.database.tables.column_types import UtcDateTime
from replaydb.database.tables.expressions import number_of, seconds_between, total
from replaydb.database.tables.schema import draw, draw_group, episode_group, group
from replaydb.database.tables.staleness import current_staleness
from replaydb.database.tables.views import IS_SAME, as_drawn, was_trained_on
from replaydb.domain.episodes import GroupStatus

_Rows = Sequence[Mapping[str, Any]]

#: Sums of ages are computed from this time on, so that they do not depend on the current time.
EPOCH = datetime(2020, 1, 1, tzinfo=UTC)


def collect(
    session: Session,
    buffer_id: int,
    buffer_name: str,
    num_draws: int,
    *,
    sums: bool,
) -> dict[str, float]:
    """Return the metrics of a buffer by name; `docs/training.md` lists them.

    Args:
        session: A snapshot.
        buffer_id: Id of the buffer.
        buffer_name: Name of the buffer.
        num_draws: Number of the last draws that count as recent.
        sums: Whether to include sums over all groups.

    Raises:
        UnknownBufferError: The buffer was deleted.
    """
    reads = [
        select_buffer(buffer_id),
        select_task_counters(buffer_id),
        sum_last_draws(buffer_id, num_draws),
    ]
    if sums:
        reads.append(sum_by_status(buffer_id, num_draws))
    found, counters, [last], *of_groups = session.read_together(reads)
    state = buffers.checked(found, buffer_name)
    now = state.time(session)
    drawn = last._asdict()
    tasks = [row._asdict() | {"num_added": row.num_inserted - row.num_replaced} for row in counters]
    rows = [_aged(row._asdict(), now) for row in chain.from_iterable(of_groups)]
    numbers = {
        **(_generated(rows) | _stored(rows, tasks) if sums else {}),
        **_from_counters(tasks),
        "buffer/policy_version": state.policy_version,
        **_replayed(drawn, tasks),
        **_trained(drawn),
        **_cumulative(tasks),
    }
    return {name: float(number) for name, number in numbers.items() if number is not None}


def _aged(row: dict[str, Any], now: datetime) -> dict[str, Any]:
    """Return a row of `sum_by_status` with ages at a time."""
    elapsed = (now - EPOCH).total_seconds()
    ages = {"age_sum": row["age_sum"] + row["num_groups"] * elapsed}
    return row | ages | {"age_max": row["age_max"] + elapsed}


def _from_counters(tasks: _Rows) -> dict[str, Any]:
    return {
        "gen/groups": _sum(tasks, "num_added"),
        "gen/replaced": _sum(tasks, "num_replaced"),
        "buffer/groups": _sum(tasks, "num_groups"),
        "buffer/tokens": _sum(tasks, "num_tokens"),
        "buffer/bytes": _sum(tasks, "num_bytes"),
        "buffer/starved_tasks": sum(1 for task in tasks if not task["num_available"]),
    }


def _generated(rows: _Rows) -> dict[str, Any]:
    rewarded = _sum(rows, "num_new_rewarded")
    return {
        "gen/recent_groups": _sum(rows, "num_new"),
        "gen/reward_mean": _ratio(_sum(rows, "new_reward_sum"), rewarded),
        "gen/reward_std": _ratio(_sum(rows, "new_reward_std_sum"), rewarded),
        "gen/uninformative": _ratio(_sum(rows, "num_new_even"), rewarded),
    }


def _stored(rows: _Rows, tasks: _Rows) -> dict[str, Any]:
    unarchived = [row for row in rows if row["group_status"] != GroupStatus.ARCHIVED]
    completed = [row for row in rows if row["group_status"] == GroupStatus.COMPLETED]
    dropped = [row for row in rows if row["group_status"] in UNSAMPLABLE]
    total = _sum(rows, "num_groups")
    numbers = {
        "buffer/episodes": _sum(unarchived, "num_episodes"),
        "buffer/dropped": _sum(dropped, "num_groups"),
        "buffer/deleted": max(0, _sum(tasks, "num_added") - total),
        "buffer/unsampled": _sum(completed, "num_unsampled"),
        "buffer/age_mean": _ratio(_sum(completed, "age_sum"), _sum(completed, "num_groups")),
        "buffer/age_max": _max(completed, "age_max"),
        "buffer/wait_mean": _ratio(_sum(rows, "wait_sum"), _sum(rows, "num_waited")),
        "buffer/wait_max": _max(rows, "wait_max"),
        "buffer/reward_mean": _ratio(
            _sum(completed, "reward_sum"), _sum(completed, "num_rewarded")
        ),
        "buffer/staleness_mean": _ratio(
            _sum(completed, "staleness_sum"), _sum(completed, "num_known_staleness")
        ),
        "buffer/staleness_max": _max(completed, "staleness_max"),
    }
    for name, *_ in STALENESS_BINS:
        numbers[f"buffer/staleness/{name}"] = _sum(completed, f"staleness_{name}")
    for status in GroupStatus:
        mine = [row for row in rows if row["group_status"] == status]
        numbers[f"buffer/status/{status.value}"] = _sum(mine, "num_groups")
    for row in rows:
        numbers[f"buffer/task/{row['task_name']}/{row['group_status']}"] = row["num_groups"]
    return numbers


def _replayed(drawn: Mapping[str, Any], tasks: _Rows) -> dict[str, Any]:
    return {
        "replay/groups": drawn["num_replayed"],
        "replay/deleted": drawn["num_replayed_deleted"],
        "replay/share": _ratio(drawn["num_replayed"], drawn["num_groups"]),
        "replay/samples_per_insert": _ratio(_sum(tasks, "num_sampled"), _sum(tasks, "num_added")),
        "replay/reward_mean": drawn["replayed_reward_mean"],
        "replay/staleness_mean": drawn["replayed_staleness_mean"],
    }


def _trained(drawn: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {
        "train/draws": drawn["num_draws"],
        "train/groups": drawn["num_groups"],
        "train/deleted": drawn["num_deleted"],
        "train/tokens": drawn["num_tokens"] or 0,
        "train/unique": _ratio(drawn["num_distinct"], drawn["num_groups"]),
        "train/reward_mean": drawn["reward_mean"],
        "train/reward_std": drawn["reward_std"],
        "train/staleness_mean": drawn["staleness_mean"],
        "train/staleness_max": drawn["staleness_max"],
    }
    for name, *_ in STALENESS_BINS:
        numbers[f"train/staleness/{name}"] = drawn[f"staleness_{name}"]
    return numbers


def _cumulative(tasks: _Rows) -> dict[str, Any]:
    """Return the counters that never decrease, in total and by task."""
    numbers = {"train/drawn": _sum(tasks, "num_sampled")}
    for task in tasks:
        numbers[f"gen/task/{task['task_name']}"] = task["num_added"]
        numbers[f"train/task/{task['task_name']}"] = task["num_sampled"]
    return numbers


def _sum(rows: _Rows, name: str) -> Any:
    return sum(row[name] or 0 for row in rows)


def _max(rows: _Rows, name: str) -> Any:
    return max((row[name] for row in rows if row[name] is not None), default=None)


def _ratio(total: Any, count: Any) -> float | None:
    return float(total) / float(count) if count else None


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
        number_of(again).label("num_replayed"),
        number_of(~row.is_known).label("num_deleted"),
        number_of(again & ~row.is_known).label("num_replayed_deleted"),
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
    return select_by_status(
        buffer_id,
        number_of(group.times_sampled == 0).label("num_unsampled"),
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
        number_of(new).label("num_new"),
        func.count(case((new, group.reward_mean))).label("num_new_rewarded"),
        number_of(new & even).label("num_new_even"),
        func.sum(case((new, group.reward_mean))).label("new_reward_sum"),
        func.sum(case((new, group.reward_std))).label("new_reward_std_sum"),
        *_histogram(staleness),
    )


def _histogram(staleness: ColumnElement[int]) -> Iterable[Label[int]]:
    for name, least, most in STALENESS_BINS:
        inside = staleness.between(least, most)
        yield number_of(inside).label(f"staleness_{name}")
