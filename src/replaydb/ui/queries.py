"""Rows of downloads, as tables of `analysis`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import URL, BigInteger, Double, cast, func, select

from replaydb import analysis
from replaydb.analysis import Rows
from replaydb.analysis.tables import (
    DRAWS,
    Which,
    draws_of,
    of_buffers,
    scan_draws,
    scan_episodes,
    scanned,
)
from replaydb.database.filters.group_columns import col
from replaydb.database.statements.scans import Scan
from replaydb.database.tables.column_types import UtcDateTime
from replaydb.database.tables.expressions import total
from replaydb.database.tables.schema import (
    buffer,
    draw,
    episode,
    episode_group,
    group,
    run,
    task,
)
from replaydb.database.tables.views import select_tasks
from replaydb.errors import InvalidInputError
from replaydb.ui.addresses import GroupQuery

#: Types of columns for which the engines return different types.
_TYPES = {"num_tokens": BigInteger, "num_bytes": BigInteger, "reward_mean": Double}


def tasks(url: str | URL, name: str | None) -> Rows:
    """Return the tasks of a buffer, or of all buffers: the view `task_overview`."""
    rows = select_tasks()
    shown = [
        cast(column, _TYPES[column.key]).label(column.key) if column.key in _TYPES else column
        for column in rows.selected_columns
    ]
    rows = rows.with_only_columns(*shown)

    def scan(ids: Collection[int] | None) -> Scan:
        condition = of_buffers(task.c.buffer_id, ids)
        return Scan(rows, [task.c.id], task.c.id, DRAWS, condition)

    return scanned(url, Which.of(name), scan)


def run_totals(url: str | URL, runs: Sequence[str]) -> Rows:
    """Return totals of the stored groups of runs, by buffer, task and oldest policy version."""
    version = group.min_policy_version
    rows = (
        select(
            run.c.name.label("run_name"),
            buffer.c.name.label("buffer_name"),
            task.c.task_name,
            version,
            func.count().label("num_groups"),
            total(group.num_episodes, "num_episodes"),
            total(group.num_tokens, "num_tokens"),
            func.avg(group.reward_mean, type_=Double()).label("reward_mean"),
            func.min(group.reward_min).label("reward_min"),
            func.max(group.reward_max).label("reward_max"),
            func.min(group.created_at, type_=UtcDateTime()).label("first_put_at"),
            func.max(group.created_at, type_=UtcDateTime()).label("last_put_at"),
        )
        .join_from(task, buffer, buffer.c.id == task.c.buffer_id)
        .join(
            episode_group,
            (group.buffer_id == task.c.buffer_id) & (group.task_name == task.c.task_name),
        )
        .join(run, run.c.id == group.run_id)
        .group_by(task.c.id, run.c.id, run.c.name, buffer.c.name, task.c.task_name, version)
    )
    keys = task.c.id, run.c.id, func.coalesce(version, -1)
    scan = Scan(rows, keys, task.c.id, DRAWS, run.c.name.in_(runs))
    return scanned(url, Which(), lambda _: scan)


def prompt(url: str | URL, name: str, uid: str, task_name: str | None) -> Rows:
    """Return the outcomes of a prompt, one row per task: the view `prompt_overview`."""
    return analysis.prompts(url, buffer=name, tasks=task_name, where=col.prompt_uid == uid)


def episodes(
    url: str | URL, name: str, group_id: int, positions: Sequence[int] | None = None
) -> Rows:
    """Return all episodes of a group, or those at some positions, with their stored texts."""
    which = Which.of(name, where=col.id == group_id)

    def scan(ids: Collection[int] | None) -> Scan:
        condition = which.condition(ids)
        return scan_episodes(
            condition if positions is None else condition & episode.c.position.in_(positions)
        )

    return scanned(url, which, scan)


def drawn(
    url: str | URL, name: str, *, step: int | None, run_name: str | None, draw_id: int | None
) -> Rows:
    """Return the groups of one draw of a buffer, or of the draws of a step."""
    which = Which.of(name)
    runs = None if run_name is None else [run_name]

    def scan(ids: Collection[int] | None) -> Scan:
        found = scan_draws(draws_of(ids, runs, None, None))
        if draw_id is not None:
            return replace(found, of=draw.c.id == draw_id)
        return replace(found, of=draw.c.buffer_id.in_(ids or ()) & (draw.c.step == step))

    return scanned(url, which, scan)


def groups(url: str | URL, name: str, query: GroupQuery) -> Rows:
    """Return the groups of a query.

    Raises:
        InvalidInputError: The query searches for a text, which downloads do not support.
    """
    if query.text is not None:
        expected = "no text search in a download; remove this query parameter"
        raise InvalidInputError("text", expected, repr(query.text[:100]))
    return analysis.groups(
        url,
        buffer=name,
        tasks=query.task or None,
        statuses=query.status or None,
        runs=query.run or None,
        where=query.condition,
    )


def tokens(url: str | URL, name: str, group_id: int, position: int) -> Rows:
    """Return the tokens of an episode, one row per token."""
    rows = analysis.tokens(url, buffer=name, where=col.id == group_id, per="token")

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in rows.reader():
            yield batch.filter(pc.equal(batch["position"], position))

    return Rows(rows.schema, batches)
