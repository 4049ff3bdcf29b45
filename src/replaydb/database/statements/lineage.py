"""Draws that were made, cursors, and what became of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Insert,
    Select,
    Update,
    case,
    cast,
    func,
    insert,
    select,
    update,
)

from replaydb.database.expressions import among
from replaydb.database.prepared import prepared
from replaydb.database.schema import IS_LEASED, cursor, draw, draw_group, group, run
from replaydb.episodes import GroupStatus
from replaydb.results import DrawOutcome

_drawn = draw_group.c


@cache
def insert_draw() -> Insert:
    """One draw, as a dict of its columns."""
    return insert(draw)


@cache
def insert_draw_groups() -> Insert:
    """The groups of a draw, as dicts of their columns."""
    return insert(draw_group)


@prepared
def settle(ids: Any, outcome: Any, reason: Any, now: Any) -> Update:
    """What has become of groups that were leased: a group is leased by one draw at most."""
    return _settle(among(_drawn.group_id, ids) & IS_LEASED, outcome, reason, now)


def lose_leased(condition: ColumnElement[bool], reason: str, now: datetime) -> Update:
    """Record as lost, among some groups, those that are leased: they are never given back."""
    held = select(group.id).where(condition, group.group_status == GroupStatus.LEASED.value)
    lost = _drawn.group_id.in_(held) & IS_LEASED
    return _settle(lost, DrawOutcome.LOST.value, reason, now)


def lose_drawn(draw_id: int, ids: Sequence[int], reason: str, now: datetime) -> Update:
    """Record as lost the groups that one draw took, but could not read.

    Another draw may have leased some since: what was taken from it is lost to it too.
    """
    taken = select(group.id).where(
        among(group.id, ids), group.group_status != GroupStatus.LEASED.value
    )
    theirs = IS_LEASED & _drawn.group_id.in_(taken)
    lost = among(_drawn.group_id, ids) & ((_drawn.draw_id == draw_id) | theirs)
    return _settle(lost, DrawOutcome.LOST.value, reason, now)


def _settle(which: ColumnElement[bool], outcome: Any, reason: Any, now: Any) -> Update:
    values = {_drawn.outcome: outcome, _drawn.outcome_reason: reason, _drawn.outcome_at: now}
    return update(draw_group).where(which).values(values)


def draws(
    buffer_id: int,
    *,
    draw_id: int | None,
    step: int | None,
    runs: Sequence[str] | None,
    group_id: int | None,
    before: int | None,
    limit: int,
) -> Select[Any]:
    """Draws of a buffer, the newest first."""
    statement = (
        select(draw, run.c.name.label("run_name"))
        .outerjoin_from(draw, run, run.c.id == draw.c.run_id)
        .where(draw.c.buffer_id == buffer_id)
    )
    if draw_id is not None:
        statement = statement.where(draw.c.id == draw_id)
    if step is not None:
        statement = statement.where(draw.c.step == step)
    if runs is not None:
        statement = statement.where(among(run.c.name, runs))
    if group_id is not None:
        members = select(draw_group.c.draw_id).where(draw_group.c.group_id == group_id)
        statement = statement.where(draw.c.id.in_(members))
    if before is not None:
        statement = statement.where(draw.c.id < before)
    return statement.order_by(draw.c.id.desc()).limit(limit)


def drawn_groups(draw_ids: Sequence[int]) -> Select[Any]:
    """Groups of some draws, in the order of each batch."""
    return (
        select(draw_group)
        .where(among(draw_group.c.draw_id, draw_ids))
        .order_by(draw_group.c.draw_id, draw_group.c.position)
    )


def find_cursor(buffer_id: int, name: str) -> Select[Any]:
    """Value of a cursor."""
    return select(cursor.c.value).where(cursor.c.buffer_id == buffer_id, cursor.c.name == name)


def update_cursor(buffer_id: int, name: str, values: Mapping[str, Any]) -> Update:
    """Change a cursor."""
    mine = (cursor.c.buffer_id == buffer_id) & (cursor.c.name == name)
    return update(cursor).where(mine).values(dict(values))


@cache
def insert_cursor() -> Insert:
    """One cursor, as a dict of its columns."""
    return insert(cursor)


def prompts(condition: ColumnElement[bool]) -> Select[Any]:
    """What became of the groups of every prompt."""

    def number(status: GroupStatus) -> ColumnElement[int]:
        return func.count(case((group.group_status == status.value, 1)))

    return (
        select(
            group.prompt_uid,
            group.task_name,
            func.count().label("num_groups"),
            cast(func.sum(group.num_episodes), BigInteger).label("num_episodes"),
            cast(func.sum(group.times_sampled), BigInteger).label("times_sampled"),
            func.count(case((group.times_sampled > 0, 1))).label("num_groups_sampled"),
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
        .order_by(group.task_name, group.prompt_uid)
    )
