"""Statements on recorded draws and the outcomes of their groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Insert, Select, Update, func, insert, select, update

from replaydb.database.runtime.prepared import prepared
from replaydb.database.tables.expressions import among
from replaydb.database.tables.schema import IS_LEASED, draw, draw_group, episode_group, group, run
from replaydb.database.tables.views import IS_SAME, as_drawn
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.results import DrawOutcome

_drawn = draw_group.c
#: Columns of drawn groups that are not copied from the group.
_OF_DRAW = (
    *("draw_id", "position", "group_id", "probability", "weight", "staleness"),
    *("outcome", "outcome_reason", "outcome_at", "times_replaced"),
)


@cache
def insert_draw() -> Insert:
    """Insert a draw, given as a dict of its columns. Returns its id."""
    return insert(draw).returning(draw.c.id)


@cache
def insert_known_draw() -> Insert:
    """Insert a draw, given as a dict of its columns with its id."""
    return insert(draw)


@cache
def insert_draw_groups() -> Insert:
    """Insert the groups of a draw, given as dicts of their columns."""
    return insert(draw_group)


@prepared
def settle_groups(ids: Any, outcome: Any, reason: Any, now: Any) -> Update:
    """Record the outcome of leased groups. A group is leased by at most one draw."""
    return _settle(among(_drawn.group_id, ids) & IS_LEASED, outcome, reason, now)


def mark_leased_lost(condition: ColumnElement[bool], reason: str, now: datetime) -> Update:
    """Record the outcome lost for the groups that are leased, among those meeting a condition."""
    leased = select(group.id).where(condition, group.group_status == GroupStatus.LEASED.value)
    lost = _drawn.group_id.in_(leased) & IS_LEASED
    return _settle(lost, DrawOutcome.LOST.value, reason, now)


def mark_drawn_lost(draw_id: int, ids: Sequence[int], reason: str, now: datetime) -> Update:
    """Record the outcome lost for groups that one draw took but could not read.

    Another draw may have leased some of them since. If they were taken from its lease, they are
    lost for that draw too.
    """
    unleased = select(group.id).where(
        among(group.id, ids), group.group_status != GroupStatus.LEASED.value
    )
    theirs = IS_LEASED & _drawn.group_id.in_(unleased)
    lost = among(_drawn.group_id, ids) & ((_drawn.draw_id == draw_id) | theirs)
    return _settle(lost, DrawOutcome.LOST.value, reason, now)


def keep_drawn(condition: ColumnElement[bool]) -> Update:
    """Copy what was drawn of groups that meet a condition to their draws, before it is replaced."""
    is_current = (_drawn.group_id == group.id) & (_drawn.times_replaced == group.times_replaced)
    values = {
        _drawn.group_run_id: group.run_id,
        _drawn.task_name: group.task_name,
        _drawn.prompt_uid: group.prompt_uid,
        _drawn.reward_mean: group.reward_mean,
        _drawn.reward_std: group.reward_std,
        _drawn.min_policy_version: group.min_policy_version,
        _drawn.max_policy_version: group.max_policy_version,
        _drawn.num_tokens: group.num_tokens,
    }
    return update(draw_group).where(condition, is_current).values(values)


def _settle(which: ColumnElement[bool], outcome: Any, reason: Any, now: Any) -> Update:
    values = {_drawn.outcome: outcome, _drawn.outcome_reason: reason, _drawn.outcome_at: now}
    return update(draw_group).where(which).values(values)


def select_draws(
    buffer_id: int,
    *,
    draw_id: int | None,
    step: int | None,
    runs: Sequence[str] | None,
    group_id: int | None,
    before: int | None,
    limit: int,
) -> Select[Any]:
    """Select draws of a buffer, newest first."""
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


def select_steps(
    buffer_id: int,
    *,
    runs: Sequence[str] | None,
    above: int | None,
    below: int | None,
    limit: int,
) -> Select[Any]:
    """Select the steps of draws: the first ones above a step, or the last ones below a step."""
    which = select(draw.c.step).where(draw.c.buffer_id == buffer_id, draw.c.step.is_not(None))
    if runs is not None:
        which = which.where(draw.c.run_id.in_(select(run.c.id).where(among(run.c.name, runs))))
    if above is not None:
        which = which.where(draw.c.step > above)
    if below is not None:
        which = which.where(draw.c.step < below)
    last = above is None and below is not None
    return which.distinct().order_by(draw.c.step.desc() if last else draw.c.step).limit(limit)


def select_drawn_groups(draw_ids: Sequence[int]) -> Select[Any]:
    """Select the groups of draws as they were drawn, in the order of each batch."""
    putter = run.alias("putter")
    of_group = map(as_drawn, ("task_name", "prompt_uid", "reward_mean", "min_policy_version"))
    return (
        select(
            *(_drawn[name] for name in _OF_DRAW), *of_group, putter.c.name.label("group_run_name")
        )
        .outerjoin_from(draw_group, episode_group, IS_SAME)
        .outerjoin(putter, putter.c.id == func.coalesce(group.run_id, _drawn.group_run_id))
        .where(among(draw_group.c.draw_id, draw_ids))
        .order_by(draw_group.c.draw_id, draw_group.c.position)
    )
