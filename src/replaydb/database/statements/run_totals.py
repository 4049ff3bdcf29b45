"""Totals of a run over given ids of groups and draws, since no index has the ids of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Column, ColumnElement, Select, func, select

from replaydb.database.tables.column_types import UtcDateTime
from replaydb.database.tables.expressions import among, bytewise, total
from replaydb.database.tables.schema import buffer, draw, draw_group, episode_group, group


def select_ends(ids: Column[int]) -> Select[Any]:
    """Select the first and the last id of a table."""
    return select(
        select(func.min(ids)).scalar_subquery().label("first"),
        select(func.max(ids)).scalar_subquery().label("last"),
    )


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
