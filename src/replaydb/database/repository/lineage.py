"""Lineage: recorded draws and their outcomes, and statistics of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, Update, func, select

from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.runtime.prepared import Write, prepared
from replaydb.database.runtime.session import Session
from replaydb.database.statements.draw import set_outcome
from replaydb.database.statements.insertion import insert_into, insert_one_into
from replaydb.database.tables.column_types import Damaged
from replaydb.database.tables.expressions import among, bytewise, number_of, total
from replaydb.database.tables.schema import IS_LEASED, draw, draw_group, episode_group, group, run
from replaydb.database.tables.views import COPIED, IS_SAME, as_drawn, times_sampled
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.results import DrawInfo, DrawOutcome, PromptInfo
from replaydb.errors import CorruptPayloadError

_OUTCOMES = frozenset(DrawOutcome)

_drawn = draw_group.c


def record(
    buffer: LockedBuffer, facts: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> int:
    """Record the draw of a transaction. Return its id.

    Args:
        buffer: The buffer.
        facts: Columns of `draw`.
        groups: Columns of `draw_group`, in the order of the batch.
    """
    draw_id, writes = buffer.found.draw_id, []
    if draw_id is None:
        draw_id = buffer.session.inserted_id(insert_one_into(draw), dict(facts))
    else:
        writes = [Write(insert_into(draw), [{"id": draw_id, **facts}])]
    rows = [
        {"draw_id": draw_id, "position": position, **group} for position, group in enumerate(groups)
    ]
    writes.append(Write(insert_into(draw_group), rows))
    buffer.session.postpone(*writes)
    return draw_id


def settle(
    buffer: LockedBuffer, ids: Sequence[int], outcome: DrawOutcome, reason: str | None
) -> None:
    """Record the outcome of groups whose lease ends."""
    if ids:
        buffer.session.postpone(settle_groups(ids, outcome.value, reason, buffer.now))


def record_lost(buffer: LockedBuffer, draw_id: int, damaged: Mapping[int, str]) -> None:
    """Record that groups of a draw could not be read, with the reason by group id."""
    for reason in sorted(set(damaged.values())):
        ids = [group_id for group_id, why in damaged.items() if why == reason]
        buffer.session.run(mark_drawn_lost(draw_id, ids, reason, buffer.now))


def draws(session: Session, buffer_id: int, **which: Any) -> list[DrawInfo]:
    """Return draws of a buffer, newest first. `which` has the arguments of `select_draws`."""
    found = session.run(select_draws(buffer_id, **which))
    members: dict[int, list[Any]] = {row.id: [] for row in found}
    for row in session.run(select_drawn_groups(list(members))):
        members[row.draw_id].append(row)
    return [
        DrawInfo(
            row.id,
            row.run_name,
            row.step,
            row.policy,
            row.created_at,
            tuple(member.group_id for member in members[row.id]),
            tuple(member.probability for member in members[row.id]),
            tuple(member.weight for member in members[row.id]),
            tuple(member.staleness for member in members[row.id]),
            tuple(_outcome(member) for member in members[row.id]),
            tuple(member.outcome_reason for member in members[row.id]),
            tuple(
                row.created_at if member.outcome == DrawOutcome.SAMPLED else member.outcome_at
                for member in members[row.id]
            ),
            tuple(member.times_replaced for member in members[row.id]),
            tuple(member.task_name for member in members[row.id]),
            tuple(member.prompt_uid for member in members[row.id]),
            tuple(member.reward_mean for member in members[row.id]),
            tuple(member.group_run_name for member in members[row.id]),
            tuple(member.min_policy_version for member in members[row.id]),
        )
        for row in found
    ]


def _outcome(member: Any) -> DrawOutcome | None:
    if member.outcome is not None and member.outcome not in _OUTCOMES:
        raise CorruptPayloadError(
            f"draw {member.draw_id}: outcome can not be read: {Damaged(member.outcome)}",
            [member.group_id],
        )
    return member.outcome and DrawOutcome(member.outcome)


def steps(session: Session, buffer_id: int, **which: Any) -> list[int]:
    """Return the steps of draws of a buffer, ascending. `which`: arguments of `select_steps`."""
    found = session.run(select_steps(buffer_id, **which))
    return sorted(row.step for row in found)


def find_draw(session: Session, buffer_id: int, draw_id: int) -> DrawInfo | None:
    """Return one draw of a buffer; None if it is not recorded."""
    found = draws(session, buffer_id, draw_id=draw_id, limit=1)
    return found[0] if found else None


def prompts(session: Session, condition: ColumnElement[bool]) -> list[PromptInfo]:
    """Return the statistics of every prompt of the groups that meet a condition."""
    rows = session.run(select_prompts(condition))
    return [PromptInfo(**row._asdict()) for row in rows]


@prepared
def settle_groups(ids: Any, outcome: Any, reason: Any, now: Any) -> Update:
    """Record the outcome of leased groups. A group is leased by at most one draw."""
    return set_outcome(among(_drawn.group_id, ids) & IS_LEASED, outcome, reason, now)


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
    return set_outcome(lost, DrawOutcome.LOST.value, reason, now)


def select_draws(
    buffer_id: int,
    *,
    draw_id: int | None = None,
    step: int | None = None,
    runs: Sequence[str] | None = None,
    group_id: int | None = None,
    before: int | None = None,
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
    of_draw = (column for column in _drawn if column.key not in COPIED)
    of_group = map(as_drawn, ("task_name", "prompt_uid", "reward_mean", "min_policy_version"))
    return (
        select(*of_draw, *of_group, putter.c.name.label("group_run_name"))
        .outerjoin_from(draw_group, episode_group, IS_SAME)
        .outerjoin(putter, putter.c.id == func.coalesce(group.run_id, _drawn.group_run_id))
        .where(among(draw_group.c.draw_id, draw_ids))
        .order_by(draw_group.c.draw_id, draw_group.c.position)
    )


def select_prompts(condition: ColumnElement[bool]) -> Select[Any]:
    """Select counts, outcomes and rewards of groups per prompt and task."""
    status = group.group_status
    return (
        select(
            group.prompt_uid,
            group.task_name,
            func.count().label("num_groups"),
            total(group.num_episodes, "num_episodes"),
            total(times_sampled(), "times_sampled"),
            number_of(times_sampled() > 0).label("num_groups_sampled"),
            number_of(status == GroupStatus.EXPIRED.value).label("num_expired"),
            number_of(status == GroupStatus.FILTERED.value).label("num_filtered"),
            number_of(status == GroupStatus.FAILED.value).label("num_failed"),
            func.avg(group.reward_mean).label("reward_mean"),
            func.min(group.reward_min).label("reward_min"),
            func.max(group.reward_max).label("reward_max"),
            func.max(group.created_at).label("last_put_at"),
        )
        .where(condition, group.prompt_uid.is_not(None))
        .group_by(group.prompt_uid, group.task_name)
        .order_by(bytewise(group.task_name), bytewise(group.prompt_uid))
    )
