"""What a run put and drew: of a bounded number of groups and draws, however many there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Column, Connection

from replaydb.database.prepared import execute
from replaydb.database.schema import draw, group
from replaydb.database.statements.run_sums import count_drawn, select_ends, sum_draws, sum_put
from replaydb.results import DrawOutcome, RunInfo, RunStats, VersionTotals

#: Ids that are looked at next to each other, as they are on the same pages.
STRETCH = 64

Ids = Sequence[int]


def run_stats(connection: Connection, run: RunInfo, groups: int, draws: int) -> RunStats:
    """What a run put and drew, of so many groups and draws of its time."""
    put, _, share = _looked_at(
        connection, group.id, groups, lambda ids: execute(connection, sum_put(ids, run.id))
    )
    found, ids, draw_share = _looked_at(
        connection, draw.c.id, draws, lambda ids: execute(connection, sum_draws(ids, run.id))
    )
    drawn = execute(connection, count_drawn(ids, run.id)) if found else []
    [drew] = found or [None]
    return RunStats(
        run,
        share,
        tuple(
            VersionTotals(
                row.buffer_name,
                row.task_name,
                row.min_policy_version,
                row.num_groups,
                row.num_episodes,
                row.num_tokens,
                row.reward_mean,
            )
            for row in put
        ),
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


def _looked_at(
    connection: Connection, column: Column[int], most: int, look: Callable[[Ids], Sequence[Any]]
) -> tuple[list[Any], Ids, float]:
    """Rows of what a run did, the ids that were looked at, and how much of its time they are.

    First among ids of all times, then among those of the time between the first and the last that
    were its own.
    """
    [ends] = execute(connection, select_ends(column))
    first, last = ends.first, ends.last
    if first is None:
        return [], [], 1.0
    ids = _spread(first, last, most)
    rows = [row for row in look(ids) if row.first is not None]
    if rows and len(ids) < last - first + 1:
        gap = (last - first) // max(1, most // STRETCH) + 1
        first = max(first, min(row.first for row in rows) - gap)
        last = min(last, max(row.last for row in rows) + gap)
        ids = _spread(first, last, most)
        rows = [row for row in look(ids) if row.first is not None]
    return rows, ids, len(ids) / (last - first + 1)


def _spread(first: int, last: int, most: int) -> Ids:
    """So many ids of a range at most, in stretches that are as far from one another."""
    total = last - first + 1
    if total <= most:
        return range(first, last + 1)
    count = max(1, most // STRETCH)
    starts = (first + i * (total - STRETCH) // max(1, count - 1) for i in range(count))
    return sorted({start + i for start in starts for i in range(min(STRETCH, most))})
