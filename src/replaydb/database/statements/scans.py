"""Keyset-paginated scans of whole tables, for analysis.

A scan reads a table by its primary key, in windows of a fixed number of rows, however many of them
match. Every statement thus reads a bounded number of rows, so that no snapshot lasts long.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Select,
    Text,
    func,
    literal,
    select,
    true,
    tuple_,
    type_coerce,
)

from replaydb.database.statements.pages import SHOWN
from replaydb.database.statements.selections import of_tasks
from replaydb.database.tables.column_types import is_json
from replaydb.database.tables.expressions import among, bytewise, json_as_stored
from replaydb.database.tables.schema import (
    buffer,
    draw,
    draw_group,
    episode,
    episode_group,
    group,
    policy_change,
    run,
    transcript,
)
from replaydb.database.tables.views import (
    as_drawn,
    select_episodes,
    select_groups,
    select_history,
    select_policies,
    select_prompts,
)

#: Rows of a table in a window; fewer for draws, each of which has the groups of a batch.
WINDOW, DRAWS = 4096, 256


@dataclass(frozen=True, slots=True)
class Scan:
    """Rows of a query in the order of their keys.

    Attributes:
        rows: The query, without conditions.
        keys: Columns that identify a row; the first one is the id that windows are ranges of.
        window: The primary key of the table that is scanned.
        size: Rows of that table in a window.
        condition: Only rows that meet this condition.
        same: Columns of other tables that are equal to the first key, for the planner to start at.
    """

    rows: Select[Any]
    keys: Sequence[ColumnElement[Any]]
    window: Column[int]
    size: int
    condition: ColumnElement[bool]
    same: Sequence[ColumnElement[int]] = ()

    def page(self, start: int, end: int, after: Sequence[Any] | None, limit: int) -> Select[Any]:
        """Select the first rows of a window that come after a row.

        The keys are appended as the last columns.

        Args:
            start: The last id of the previous window.
            end: The last id of this window.
            after: Keys of the last row read; None for the first page of a window.
            limit: Maximum number of rows.
        """
        named = (key.label(f"key_{i}") for i, key in enumerate(self.keys))
        statement = self.rows.add_columns(*named).where(self.condition)
        for column in (self.keys[0], *self.same):
            least = column > start if after is None else column >= after[0]
            statement = statement.where(least, column <= end)
        if after is not None:
            last = (literal(value, key.type) for value, key in zip(after, self.keys, strict=True))
            statement = statement.where(tuple_(*self.keys) > tuple_(*last))
        return statement.order_by(*self.keys).limit(limit)

    def sizes(
        self, start: int, end: int, after: Sequence[Any] | None, limit: int
    ) -> Select[Any] | None:
        """Select the size of the texts of each row of such a page; None if no row has texts."""
        texts = [
            func.coalesce(func.length(json_as_stored(column)), 0)
            for column in self.rows.selected_columns
            if isinstance(column.type, Text)
        ]
        if not texts:
            return None
        page = self.page(start, end, after, limit)
        return page.with_only_columns(sum(texts, literal(0)), maintain_column_froms=True)

    def end_of_window(self, start: int, top: int) -> Select[Any]:
        """Select the last id of the window after an id; NULL if there are no rows up to `top`."""
        ids = select(self.window).where(self.window > start, self.window <= top)
        return select(func.max(ids.order_by(self.window).limit(self.size).subquery().c.id))

    @property
    def top(self) -> Select[Any]:
        """Select the last id of the table."""
        return select(func.max(self.window))


def scan_groups(condition: ColumnElement[bool]) -> Scan:
    """Scan rows of `group_overview`."""
    return Scan(plain(select_groups()), [group.id], group.id, WINDOW, condition)


def scan_episodes(condition: ColumnElement[bool]) -> Scan:
    """Scan rows of `episode_overview`, with their texts as they are stored."""
    key = episode.c.group_id, episode.c.position
    text = (
        select(type_coerce(transcript.c.text, Text))
        .where(transcript.c.group_id == key[0], transcript.c.position == key[1])
        .correlate(episode)
        .scalar_subquery()
    )
    rows = select_episodes().add_columns(text.label("text"))
    return Scan(plain(rows), key, group.id, WINDOW, condition, [group.id])


def scan_draws(condition: ColumnElement[bool]) -> Scan:
    """Scan rows of `training_history`."""
    key = draw_group.c.draw_id, draw_group.c.position
    return Scan(plain(select_history()), key, draw.c.id, DRAWS, condition, [draw.c.id])


def scan_runs() -> Scan:
    """Scan rows of `run`, with the column names of the views."""
    columns = (
        run.c.id.label("run_id"),
        run.c.name.label("run_name"),
        *(column for column in run.c if column.key not in {"id", "name"}),
    )
    return Scan(plain(select(*columns)), [run.c.id], run.c.id, WINDOW, true())


def scan_policies(condition: ColumnElement[bool]) -> Scan:
    """Scan rows of `policy_overview`."""
    own = policy_change.c.id
    return Scan(plain(select_policies()), [own], own, WINDOW, condition)


def scan_group_sizes(condition: ColumnElement[bool]) -> Scan:
    """Scan ids and sizes of groups, from which the reads of payloads are planned."""
    rows = select(group.id, group.num_bytes, group.num_tokens)
    return Scan(rows, [group.id], group.id, WINDOW, condition)


def select_groups_with_names(condition: ColumnElement[bool], ids: Sequence[int]) -> Select[Any]:
    """Select the columns of groups that users can see, with names of buffer, run and lineage."""
    return (
        select(*SHOWN, buffer.c.name.label("buffer_name"), run.c.lineage.label("run_lineage"))
        .join_from(episode_group, buffer, buffer.c.id == group.buffer_id)
        .outerjoin(run, run.c.id == group.run_id)
        .where(among(group.id, ids), condition)
        .order_by(group.id)
    )


def select_prompt_page(
    condition: ColumnElement[bool], buffer_id: int, start: str, end: str
) -> Select[Any]:
    """Select rows of `prompt_overview`: prompts of a buffer after the uid `start`, up to `end`.

    Prompts have the order of the index, which is that of the locale of the server: in another one,
    each window would read all groups.
    """
    return (
        select_prompts()
        .where(
            group.buffer_id == buffer_id,
            group.prompt_uid > start,
            group.prompt_uid <= end,
            condition,
        )
        .order_by(group.prompt_uid, bytewise(group.task_name))
    )


def select_end_of_prompts(buffer_id: int, start: str) -> Select[Any]:
    """Select the last uid of the window of groups after a prompt; NULL if there are none."""
    uids = (
        select(group.prompt_uid.label("uid"))
        .where(group.buffer_id == buffer_id, group.prompt_uid > start)
        .order_by(group.prompt_uid)
        .limit(WINDOW)
        .subquery()
    )
    return select(func.max(uids.c.uid))


def select_buffer_ids() -> Select[Any]:
    """Select the ids and names of all buffers."""
    return select(buffer.c.id, buffer.c.name).order_by(buffer.c.id)


def groups_of(
    buffers: Collection[int] | None,
    tasks: Collection[str] | None,
    statuses: Collection[str] | None,
    eligible: ColumnElement[bool] | None,
) -> ColumnElement[bool]:
    """Return one condition for all conditions given, written so that planners use no index."""
    condition = of_buffers(group.buffer_id, buffers)
    if tasks is not None:
        condition &= of_tasks(tasks)
    if statuses is not None:
        condition &= among(group.group_status, sorted(statuses))
    return condition if eligible is None else condition & func.coalesce(eligible, literal(False))


def draws_of(
    buffers: Collection[int] | None,
    tasks: Collection[str] | None,
    statuses: Collection[str] | None,
    eligible: ColumnElement[bool] | None,
) -> ColumnElement[bool]:
    """Return the condition for draws from buffers, of groups that meet the other conditions.

    Of content that was replaced since the draw, only the task is known.
    """
    condition = of_buffers(draw.c.buffer_id, buffers) & groups_of(None, None, statuses, eligible)
    if tasks is None:
        return condition
    return condition & among(as_drawn("task_name"), sorted(tasks))


def policies_of(
    buffers: Collection[int] | None,
    tasks: Collection[str] | None,
    statuses: Collection[str] | None,
    eligible: ColumnElement[bool] | None,
) -> ColumnElement[bool]:
    """Return the condition for policy versions of buffers; the other conditions do not apply."""
    return of_buffers(policy_change.c.buffer_id, buffers)


def of_buffers(column: ColumnElement[int], ids: Collection[int] | None) -> ColumnElement[bool]:
    """Return the condition for rows of buffers; None: of all buffers."""
    return true() if ids is None else (column + 0).in_(sorted(ids))


def drawn_by(names: Collection[str]) -> ColumnElement[bool]:
    """Return the condition for draws made by runs."""
    return among(run.c.name, sorted(names))


def plain(rows: Select[Any]) -> Select[Any]:
    """Return the query with JSON columns as their stored text."""
    shown = [
        json_as_stored(column).label(column.key) if is_json(column.type) else column
        for column in rows.selected_columns
    ]
    return rows.with_only_columns(*shown)
