"""Rows of downloads: queries over the views of the database, and tables of `analysis`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import (
    URL,
    BigInteger,
    Double,
    Select,
    Text,
    func,
    select,
    type_coerce,
)
from sqlalchemy import cast as cast_
from sqlalchemy.types import TypeEngine

from replaydb import analysis
from replaydb.database.filters.group_columns import col
from replaydb.database.tables.column_types import UtcDateTime
from replaydb.database.tables.expressions import bytewise, total
from replaydb.database.tables.schema import transcript
from replaydb.database.tables.views import (
    episode_overview,
    group_overview,
    prompt_overview,
    task_overview,
    training_history,
)
from replaydb.errors import InvalidInputError
from replaydb.ui.addresses import GroupQuery

_view = group_overview.table.c
_episodes = episode_overview.table.c
_drawn = training_history.table.c
_tasks = task_overview.table.c
_prompts = prompt_overview.table.c


def select_tasks(buffer: str | None) -> Select[Any]:
    """Select the tasks of a buffer, or of all buffers."""
    kinds: dict[str, type[TypeEngine[Any]]] = {
        "num_tokens": BigInteger,  # the engines return sums and means in different types
        "num_bytes": BigInteger,
        "reward_mean": Double,
    }
    columns = [
        cast_(column, kinds[column.key]).label(column.key) if column.key in kinds else column
        for column in _tasks
    ]
    by = (bytewise(_tasks.buffer_name), bytewise(_tasks.task_name))
    statement = select(*columns).order_by(*by)
    return statement if buffer is None else statement.where(_tasks.buffer_name == buffer)


def select_prompt(buffer: str, uid: str, task: str | None) -> Select[Any]:
    """Select the outcomes of a prompt, one row per task."""
    mine = (_prompts.buffer_name == buffer) & (_prompts.prompt_uid == uid)
    by = bytewise(_prompts.task_name)
    statement = select(*_prompts).where(mine).order_by(by)
    return statement if task is None else statement.where(_prompts.task_name == task)


def select_run_groups(runs: Sequence[str]) -> Select[Any]:
    """Select totals of the stored groups of runs, by buffer, task and oldest policy version."""
    names = (_view.run_name, _view.buffer_name, _view.task_name)
    return (
        select(
            *names,
            _view.min_policy_version,
            func.count().label("num_groups"),
            total(_view.num_episodes, "num_episodes"),
            total(_view.num_tokens, "num_tokens"),
            func.avg(_view.reward_mean, type_=Double()).label("reward_mean"),
            func.min(_view.reward_min).label("reward_min"),
            func.max(_view.reward_max).label("reward_max"),
            func.min(_view.created_at, type_=UtcDateTime()).label("first_put_at"),
            func.max(_view.created_at, type_=UtcDateTime()).label("last_put_at"),
        )
        .where(_view.run_name.in_(runs))
        .group_by(*names, _view.min_policy_version)
        .order_by(*map(bytewise, names), _view.min_policy_version)
    )


def select_episodes(buffer: str, group_id: int) -> Select[Any]:
    """Select the episodes of a group."""
    mine = (_episodes.buffer_name == buffer) & (_episodes.group_id == group_id)
    return select(*_episodes).where(mine).order_by(_episodes.position)


def select_texts(buffer: str, group_id: int, positions: Sequence[int]) -> Select[Any]:
    """Select episodes of a group by position, with their stored texts."""
    text = (
        select(type_coerce(transcript.c.text, Text))
        .where(
            transcript.c.group_id == _episodes.group_id,
            transcript.c.position == _episodes.position,
        )
        .scalar_subquery()
    )
    statement = select_episodes(buffer, group_id).add_columns(text.label("text"))
    return statement.where(_episodes.position.in_(positions))


def select_drawn(
    buffer: str, *, step: int | None = None, run: str | None = None, draw: int | None = None
) -> Select[Any]:
    """Select the drawn groups of a buffer.

    Args:
        buffer: The buffer.
        step: Only draws of this step.
        run: Only draws of this run.
        draw: Only the draw of this id.
    """
    statement = select(*_drawn).where(_drawn.buffer_name == buffer)
    for column, value in ((_drawn.step, step), (_drawn.run_name, run), (_drawn.draw_id, draw)):
        if value is not None:
            statement = statement.where(column == value)
    return statement.order_by(_drawn.draw_id, _drawn.position)


def groups(url: str | URL, buffer: str, query: GroupQuery) -> analysis.Rows:
    """Return the groups of a query, read page by page.

    Raises:
        InvalidInputError: The query searches for a text, which downloads do not support.
    """
    if query.text is not None:
        expected = "no text search in a download; remove this query parameter"
        raise InvalidInputError("text", expected, repr(query.text[:100]))
    return analysis.groups(
        url,
        buffer=buffer,
        tasks=query.task or None,
        statuses=query.status or None,
        runs=query.run or None,
        where=query.condition,
    )


def tokens(url: str | URL, buffer: str, group_id: int, position: int) -> analysis.Rows:
    """Return the tokens of an episode, one row per token."""
    rows = analysis.tokens(url, buffer=buffer, where=col.id == group_id, per="token")

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in rows.reader():
            yield batch.filter(pc.equal(batch["position"], position))

    return analysis.Rows(rows.schema, batches)
