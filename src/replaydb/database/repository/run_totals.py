"""Statistics of a run, estimated from a bounded number of groups and draws.

No index has the ids of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Column, ColumnElement, Select, func, select

from replaydb.database.runtime.session import Session
from replaydb.database.tables.column_types import UtcDateTime
from replaydb.database.tables.expressions import among, bytewise, total
from replaydb.database.tables.schema import buffer, draw, draw_group, episode_group, group
from replaydb.domain.results import DrawOutcome, RunInfo, RunStats, VersionTotals

#: Number of consecutive ids that are read together, since they are on the same pages.
BLOCK = 64

Ids = Sequence[int]


def run_stats(session: Session, run: RunInfo, groups: int, draws: int) -> RunStats:
    """Return the statistics of a run, from up to `groups` groups and `draws` draws of its time."""
    put, _, share = _read_spread(
        session, group.id, groups, lambda ids: session.run(sum_put(ids, run.id))
    )
    found, ids, draw_share = _read_spread(
        session, draw.c.id, draws, lambda ids: session.run(sum_draws(ids, run.id))
    )
    drawn = session.run(count_drawn(ids, run.id)) if found else []
    [drew] = found or [None]
    return RunStats(
        run,
        share,
        tuple(VersionTotals(*row[:-4]) for row in put),  # the last columns are `_ends`
        min((row.first_at for row in put), default=None),
        max((row.last_at for row in put), default=None),
        draw_share,
        drew.num_draws if drew else 0,
        drew.first_step if drew else None,
        drew.last_step if drew else None,
        drew.first_at if drew else None,
        drew.last_at if drew else None,
        {
            (row.staleness, row.outcome and DrawOutcome(row.outcome)): row.num_groups
            for row in drawn
        },
    )


def _read_spread(
    session: Session, column: Column[int], most: int, read: Callable[[Ids], Sequence[Any]]
) -> tuple[list[Any], Ids, float]:
    """Read up to `most` evenly spread ids of a table, first of all ids, then of the run's range.

    Returns:
        The rows about the run, the ids that were read, and their share of the run's range of ids.
    """
    ends = (select(end(column)).scalar_subquery() for end in (func.min, func.max))
    [(first, last)] = session.run(select(*ends))
    if first is None:
        return [], [], 1.0
    ids = _spread(first, last, most)
    rows = [row for row in read(ids) if row.first is not None]
    if rows and len(ids) < last - first + 1:
        gap = (last - first) // max(1, most // BLOCK) + 1
        first = max(first, min(row.first for row in rows) - gap)
        last = min(last, max(row.last for row in rows) + gap)
        ids = _spread(first, last, most)
        rows = [row for row in read(ids) if row.first is not None]
    return rows, ids, len(ids) / (last - first + 1)


def _spread(first: int, last: int, most: int) -> Ids:
    """Return up to `most` ids of a range, in evenly spaced blocks of consecutive ids."""
    total = last - first + 1
    if total <= most:
        return range(first, last + 1)
    count = max(1, most // BLOCK)
    starts = (first + i * (total - BLOCK) // max(1, count - 1) for i in range(count))
    return sorted({start + i for start in starts for i in range(min(BLOCK, most))})


def sum_put(ids: Sequence[int], run_id: int) -> Select[Any]:
    """Sum up the groups that a run put, among these ids, by buffer, task and version."""
    key = (buffer.c.name.label("buffer_name"), group.task_name, group.min_policy_version)
    return (
        select(
            *key,
            func.count().label("num_groups"),
            total(group.num_episodes, "num_episodes"),
            total(group.num_tokens, "num_tokens"),
            func.avg(group.reward_mean).label("reward_mean"),
            *_ends(group.id, group.created_at),
        )
        .join_from(episode_group, buffer, buffer.c.id == group.buffer_id)
        .where(among(group.id, ids), group.run_id + 0 == run_id)
        .group_by(*key)
        .order_by(bytewise(buffer.c.name), bytewise(group.task_name), group.min_policy_version)
    )


def sum_draws(ids: Sequence[int], run_id: int) -> Select[Any]:
    """Sum up the draws that a run made, among these ids."""
    return select(
        func.count().label("num_draws"),
        func.min(draw.c.step).label("first_step"),
        func.max(draw.c.step).label("last_step"),
        *_ends(draw.c.id, draw.c.created_at),
    ).where(among(draw.c.id, ids), draw.c.run_id + 0 == run_id)


def count_drawn(ids: Sequence[int], run_id: int) -> Select[Any]:
    """Count the groups of draws of a run, among these ids of draws, by staleness and outcome."""
    key = (draw_group.c.staleness, draw_group.c.outcome)
    return (
        select(*key, func.count().label("num_groups"))
        .join_from(draw, draw_group, draw_group.c.draw_id == draw.c.id)
        .where(among(draw.c.id, ids), draw.c.run_id + 0 == run_id)
        .group_by(*key)
    )


def _ends(ids: ColumnElement[Any], times: ColumnElement[Any]) -> Sequence[ColumnElement[Any]]:
    return (
        func.min(ids).label("first"),
        func.max(ids).label("last"),
        func.min(times, type_=UtcDateTime()).label("first_at"),
        func.max(times, type_=UtcDateTime()).label("last_at"),
    )
