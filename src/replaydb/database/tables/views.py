"""Views for analysis: joined tables with names instead of ids, and without payloads."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    ColumnElement,
    CreateView,
    Double,
    Label,
    Select,
    Table,
    case,
    func,
    literal_column,
    select,
)

from replaydb.database.tables.column_types import UtcDateTime
from replaydb.database.tables.expressions import number_of, total
from replaydb.database.tables.schema import (
    annotation,
    buffer,
    draw,
    draw_group,
    episode,
    episode_group,
    metadata,
    policy_change,
    run,
    task,
    turn,
)
from replaydb.database.tables.staleness import staleness_at
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.results import DrawOutcome

_group = episode_group.c
_staleness = staleness_at(buffer.c.policy_version)

#: Outcomes of drawn groups that count as trained on. A sampled group counts even if its step was
#: lost and repeated, because samples are not acknowledged.
TRAINED = (DrawOutcome.SAMPLED, DrawOutcome.ACKED)


def was_trained_on(outcome: ColumnElement[str]) -> ColumnElement[bool]:
    """Whether the outcome of a drawn group is in `TRAINED`."""
    return outcome.in_([literal_column(repr(name.value)) for name in TRAINED])


#: Whether a drawn group still has the content that was drawn.
IS_SAME = (_group.id == draw_group.c.group_id) & (
    _group.times_replaced == draw_group.c.times_replaced
)


#: Columns of drawn groups that are copied from a group when it is replaced, and NULL before.
COPIED = (
    *("task_name", "prompt_uid", "num_tokens", "reward_mean", "reward_std"),
    *("min_policy_version", "max_policy_version"),
)
#: Those that annotations change. They are copied before, with `num_tokens`, which is never NULL.
ANNOTATED = ("reward_mean", "reward_std")
_is_annotated = draw_group.c.num_tokens.is_not(None)


def value_drawn(name: str) -> ColumnElement[Any]:
    """Return the value that a column of a drawn group had when it was drawn.

    It is NULL if the group was deleted since. The query must join groups by `IS_SAME`.
    """
    if name in ANNOTATED:
        return case((_is_annotated, draw_group.c[name]), else_=_group[name])
    return func.coalesce(_group[name], draw_group.c[name])


def as_drawn(name: str) -> Label[Any]:
    """Return `value_drawn` under its own name."""
    return value_drawn(name).label(name)


def times_sampled() -> ColumnElement[int]:
    """Return the number of draws of a group, with those of the same prompt that it replaced."""
    replaced = _count_trained(_IS_OF_PROMPT)
    return _group.times_sampled + case((_group.times_replaced > 0, replaced), else_=0)


#: Whether a drawn group is content, since replaced, of the prompt that the group has now.
_IS_OF_PROMPT = (draw_group.c.task_name == _group.task_name) & (
    draw_group.c.prompt_uid == _group.prompt_uid
)


def _count_trained(which: ColumnElement[bool]) -> ColumnElement[int]:
    """Return the number of times that a group was trained on, in draws that meet a condition."""
    return (
        select(func.count())
        .where(
            draw_group.c.group_id == _group.id,
            was_trained_on(draw_group.c.outcome),
            which,
        )
        .correlate(episode_group)
        .scalar_subquery()
    )


#: Columns that are internal to draws, or that the overview shows under another name.
_INTERNAL = {"id", "buffer_id", "run_id", "task_name", "uniform_key", "priority_key", "weight"} | {
    "lease_id",
    "leased_from",
    "min_episodes",
    "deadline",
    "is_evicted",
    "times_annotated",
}


def select_groups() -> Select[tuple[object, ...]]:
    """Select a row for each group."""
    shown = [
        _staleness.label("staleness") if column is _group.staleness else column
        for column in _group
        if column.key not in _INTERNAL
    ]
    return (
        select(
            _group.id.label("group_id"),
            buffer.c.name.label("buffer_name"),
            run.c.name.label("run_name"),
            _group.task_name,
            *shown,
            run.c.lineage.label("run_lineage"),
        )
        .join_from(episode_group, buffer, buffer.c.id == _group.buffer_id)
        .outerjoin(run, run.c.id == _group.run_id)
    )


def select_episodes() -> Select[tuple[object, ...]]:
    """Select a row for each episode."""
    return _select_members(episode)


def select_turns() -> Select[tuple[object, ...]]:
    """Select a row for each turn."""
    return _select_members(turn)


def _select_members(of: Table) -> Select[tuple[object, ...]]:
    """Select the rows of a table of what groups consist of, with their groups."""
    key = [column.key for column in of.primary_key]
    return (
        select(
            *(of.c[name] for name in key),
            buffer.c.name.label("buffer_name"),
            _group.task_name,
            _group.prompt_uid,
            _group.group_status,
            *(column for column in of.c if column.key not in key),
            run.c.name.label("run_name"),
            run.c.lineage.label("run_lineage"),
        )
        .join_from(of, episode_group, _group.id == of.c.group_id)
        .join(buffer, buffer.c.id == _group.buffer_id)
        .outerjoin(run, run.c.id == _group.run_id)
    )


def select_annotations() -> Select[tuple[object, ...]]:
    """Select a row for each value that was added to an episode or turn after it was stored."""
    of = annotation.c
    return (
        select(
            *(of.group_id, of.number, of.position),
            case((of.turn >= 0, of.turn)).label("turn"),
            of.name,
            buffer.c.name.label("buffer_name"),
            _group.task_name,
            _group.prompt_uid,
            _group.group_status,
            *(of.value, of.previous, of.changes, of.author, of.policy_version),
            run.c.name.label("run_name"),
            of.created_at.label("annotated_at"),
        )
        .join_from(annotation, episode_group, _group.id == of.group_id)
        .join(buffer, buffer.c.id == _group.buffer_id)
        .outerjoin(run, run.c.id == of.run_id)
    )


def select_history() -> Select[tuple[object, ...]]:
    """Select a row for each group of each draw."""
    putter = run.alias("putter")
    return (
        select(
            draw.c.id.label("draw_id"),
            draw.c.created_at.label("drawn_at"),
            buffer.c.name.label("buffer_name"),
            run.c.name.label("run_name"),
            draw.c.step,
            draw.c.policy,
            draw_group.c.position,
            draw_group.c.group_id,
            draw_group.c.probability,
            draw_group.c.weight,
            draw_group.c.staleness,
            draw_group.c.outcome,
            draw_group.c.outcome_reason,
            case(
                (draw_group.c.outcome == DrawOutcome.SAMPLED.value, draw.c.created_at),
                else_=draw_group.c.outcome_at,
            ).label("outcome_at"),
            *map(as_drawn, ("task_name", "prompt_uid", "reward_mean", "reward_std")),
            putter.c.name.label("group_run_name"),
            putter.c.lineage.label("group_run_lineage"),
            *map(as_drawn, ("min_policy_version", "max_policy_version", "num_tokens")),
        )
        .join_from(draw, draw_group, draw_group.c.draw_id == draw.c.id)
        .join(buffer, buffer.c.id == draw.c.buffer_id)
        .outerjoin(run, run.c.id == draw.c.run_id)
        .outerjoin(episode_group, IS_SAME)
        .outerjoin(putter, putter.c.id == func.coalesce(_group.run_id, draw_group.c.group_run_id))
    )


def select_prompts() -> Select[tuple[object, ...]]:
    """Select a row for each prompt with a uid, per task."""
    # Draws by versions that did not keep replaced content count for the group.
    trained = _count_trained(draw_group.c.task_name.is_(None) | _IS_OF_PROMPT)
    return (
        select(
            buffer.c.name.label("buffer_name"),
            _group.task_name,
            _group.prompt_uid,
            func.count(_group.id).label("num_groups"),
            total(_group.num_episodes, "num_episodes"),
            total(_group.num_tokens, "num_tokens"),
            func.avg(_group.reward_mean, type_=Double()).label("reward_mean"),
            func.min(_group.reward_min).label("reward_min"),
            func.max(_group.reward_max).label("reward_max"),
            func.min(_group.min_policy_version).label("first_version"),
            func.max(_group.max_policy_version).label("last_version"),
            total(times_sampled(), "times_sampled"),
            total(trained, "times_trained"),
            func.min(_group.created_at, type_=UtcDateTime()).label("first_put_at"),
            func.max(_group.created_at, type_=UtcDateTime()).label("last_put_at"),
        )
        .join_from(episode_group, buffer, buffer.c.id == _group.buffer_id)
        .where(_group.prompt_uid.is_not(None))
        .group_by(buffer.c.name, _group.prompt_uid, _group.task_name)
    )


def select_policies() -> Select[tuple[object, ...]]:
    """Select a row for each change of a buffer's policy version."""
    later, following = policy_change.alias("later"), policy_change.alias("following")
    next_id = (
        select(func.min(later.c.id))
        .where(later.c.buffer_id == policy_change.c.buffer_id, later.c.id > policy_change.c.id)
        .correlate(policy_change)
        .scalar_subquery()
    )
    return (
        select(
            policy_change.c.id.label("change_id"),
            buffer.c.name.label("buffer_name"),
            run.c.name.label("run_name"),
            policy_change.c.lineage,
            policy_change.c.policy_version,
            policy_change.c.began_at,
            following.c.began_at.label("ended_at"),
        )
        .join_from(policy_change, buffer, buffer.c.id == policy_change.c.buffer_id)
        .outerjoin(run, run.c.id == policy_change.c.run_id)
        .outerjoin(following, following.c.id == next_id)
    )


def select_tasks() -> Select[tuple[object, ...]]:
    """Select a row for each task of each buffer."""
    of_status = (
        number_of(_group.group_status == status.value).label(f"num_{status.value}")
        for status in GroupStatus
    )
    own = (task.c.max_staleness, task.c.num_inserted, task.c.num_sampled)
    return (
        select(
            buffer.c.name.label("buffer_name"),
            task.c.task_name,
            buffer.c.policy_version,
            *own,
            func.count(_group.id).label("num_groups"),
            *of_status,
            func.sum(_group.num_tokens).label("num_tokens"),
            func.sum(_group.num_bytes).label("num_bytes"),
            func.avg(_group.reward_mean).label("reward_mean"),
            func.min(_staleness).label("min_staleness"),
            func.max(_staleness).label("max_seen_staleness"),
        )
        .join_from(task, buffer, buffer.c.id == task.c.buffer_id)
        .outerjoin(
            episode_group,
            (_group.buffer_id == task.c.buffer_id) & (_group.task_name == task.c.task_name),
        )
        .group_by(task.c.id, buffer.c.name, task.c.task_name, buffer.c.policy_version, *own)
    )


group_overview = CreateView(select_groups(), "group_overview", metadata=metadata)
episode_overview = CreateView(select_episodes(), "episode_overview", metadata=metadata)
turn_overview = CreateView(select_turns(), "turn_overview", metadata=metadata)
annotation_history = CreateView(select_annotations(), "annotation_history", metadata=metadata)
training_history = CreateView(select_history(), "training_history", metadata=metadata)
task_overview = CreateView(select_tasks(), "task_overview", metadata=metadata)
prompt_overview = CreateView(select_prompts(), "prompt_overview", metadata=metadata)
policy_overview = CreateView(select_policies(), "policy_overview", metadata=metadata)

VIEWS = (
    group_overview,
    episode_overview,
    turn_overview,
    annotation_history,
    training_history,
    task_overview,
    prompt_overview,
    policy_overview,
)
