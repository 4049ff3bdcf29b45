"""The rows that views show, as queries over the views of the database: what downloads have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import (
    URL,
    BigInteger,
    Case,
    Column,
    ColumnElement,
    Double,
    ScalarSelect,
    Select,
    Text,
    func,
    select,
    type_coerce,
)
from sqlalchemy import cast as cast_
from sqlalchemy.sql.visitors import replacement_traverse
from sqlalchemy.types import TypeEngine

from replaydb import analysis
from replaydb.database import filters
from replaydb.database.column_types import UtcDateTime
from replaydb.database.expressions import total
from replaydb.database.group_columns import col
from replaydb.database.schema import episode_group, run, transcript
from replaydb.database.views import (
    episode_overview,
    group_overview,
    prompt_overview,
    task_overview,
    training_history,
)
from replaydb.errors import InvalidInputError
from replaydb.ui.addresses import Groups

#: Rows of a download; `replaydb export` has no limit.
MOST_ROWS = 100_000

_view = group_overview.table.c
_episodes = episode_overview.table.c
_drawn = training_history.table.c
_tasks = task_overview.table.c
_prompts = prompt_overview.table.c


def select_tasks(buffer: str | None) -> Select[Any]:
    """The tasks of a buffer, or of all."""
    kinds: dict[str, type[TypeEngine[Any]]] = {
        "num_tokens": BigInteger,  # sums and means, of which engines have types of their own
        "num_bytes": BigInteger,
        "reward_mean": Double,
    }
    columns = [
        cast_(column, kinds[column.key]).label(column.key) if column.key in kinds else column
        for column in _tasks
    ]
    statement = select(*columns).order_by(_tasks.buffer_name, _tasks.task_name).limit(MOST_ROWS)
    return statement if buffer is None else statement.where(_tasks.buffer_name == buffer)


def select_prompt(buffer: str, uid: str, task: str | None) -> Select[Any]:
    """What became of a prompt, by task."""
    mine = (_prompts.buffer_name == buffer) & (_prompts.prompt_uid == uid)
    statement = select(*_prompts).where(mine).order_by(_prompts.task_name).limit(MOST_ROWS)
    return statement if task is None else statement.where(_prompts.task_name == task)


def select_runs() -> Select[Any]:
    """The runs of the store."""
    named = (run.c.id.label("run_id"), run.c.name.label("run_name"))
    rest = (run.c.lineage, run.c.started_at, run.c.metadata)
    return select(*named, *rest).order_by(run.c.id).limit(MOST_ROWS)


def select_put(runs: Sequence[str]) -> Select[Any]:
    """What some runs put, by buffer, task and the oldest version that made a token of it."""
    by = (_view.run_name, _view.buffer_name, _view.task_name, _view.min_policy_version)
    return (
        select(
            *by,
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
        .group_by(*by)
        .order_by(*by)
        .limit(MOST_ROWS)
    )


def select_episodes(buffer: str, group_id: int) -> Select[Any]:
    """The episodes of a group."""
    mine = (_episodes.buffer_name == buffer) & (_episodes.group_id == group_id)
    return select(*_episodes).where(mine).order_by(_episodes.position).limit(MOST_ROWS)


def select_said(buffer: str, group_id: int, positions: Sequence[int]) -> Select[Any]:
    """Some episodes of a group, with their texts as they are stored."""
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
    """The groups that a draw took, or the draws for a step or all, of one run or of all."""
    statement = select(*_drawn).where(_drawn.buffer_name == buffer)
    for column, value in ((_drawn.step, step), (_drawn.run_name, run), (_drawn.draw_id, draw)):
        if value is not None:
            statement = statement.where(column == value)
    return statement.order_by(_drawn.draw_id, _drawn.position).limit(MOST_ROWS)


def select_groups(buffer: str, asked: Groups) -> Select[Any]:
    """The groups that an address asks for.

    Raises:
        InvalidInputError: It asks for a text, which downloads do not look for.
    """
    if asked.text is not None:
        raise InvalidInputError("text", "none in a download, which reads no completions", "one")
    statement = select(*_view).where(_view.buffer_name == buffer)
    for column, names in (
        (_view.task_name, asked.task),
        (_view.group_status, asked.status),
        (_view.run_name, asked.run),
    ):
        if names:
            statement = statement.where(column.in_(names))
    where = filters.checked(asked.condition)
    if where is not None:
        statement = statement.where(_over_view(where))
    return statement.order_by(_view.group_id).limit(MOST_ROWS)


def _over_view(where: ColumnElement[bool]) -> ColumnElement[bool]:
    """A filter over the columns of groups as one over those of the view."""

    def replaced(element: Any, **_: Any) -> ColumnElement[Any] | None:
        match element:
            case Case() if element.else_ is episode_group.c.staleness:
                return _view.staleness  # the view knows what it is now
            case ScalarSelect():  # a bound of that column, for its index
                [bound] = element.element.selected_columns
                return cast("Case[Any]", bound).else_
            case Column(table=table, key=key) if table is episode_group:
                name = "group_id" if key == "id" else key
                return _view[name] if name in _view else _in_table(key)
        return None

    return replacement_traverse(where, {}, replaced)


def _in_table(key: str) -> ColumnElement[Any]:
    """A column of a group that its view leaves out."""
    whole = episode_group.alias("whole")
    return select(whole.c[key]).where(whole.c.id == _view.group_id).scalar_subquery()


def groups(url: str | URL, buffer: str, asked: Groups) -> analysis.Rows:
    """The groups that an address asks for."""
    return analysis.groups(
        url,
        buffer=buffer,
        tasks=asked.task or None,
        statuses=asked.status or None,
        runs=asked.run or None,
        where=asked.condition,
    )


def tokens(url: str | URL, buffer: str, group_id: int, position: int) -> analysis.Rows:
    """The tokens of an episode."""
    rows = analysis.tokens(url, buffer=buffer, where=col.id == group_id, per="token")

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in rows.reader():
            yield batch.filter(pc.equal(batch["position"], position))

    return analysis.Rows(rows.schema, batches)
