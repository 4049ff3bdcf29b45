"""Tables of groups, episodes, annotations, draws, prompts, policies and runs, without tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from sqlalchemy import (
    URL,
    ColumnElement,
    Select,
    Text,
    func,
    literal,
    select,
    type_coerce,
)

from replaydb.analysis.arrow import Damaged, Rows, batch_of, schema_of, to_damaged
from replaydb.analysis.source import Source, opened
from replaydb.database.filters import compiling
from replaydb.database.statements.scans import EVERY, WINDOW, Scan
from replaydb.database.statements.selections import of_tasks
from replaydb.database.tables.column_types import is_json
from replaydb.database.tables.expressions import among, bytewise, json_as_stored
from replaydb.database.tables.schema import (
    annotation,
    draw,
    draw_group,
    episode,
    group,
    policy_change,
    run,
    transcript,
    turn,
)
from replaydb.database.tables.views import (
    as_drawn,
    select_annotations,
    select_episodes,
    select_groups,
    select_history,
    select_policies,
    select_prompts,
    select_turns,
)
from replaydb.domain import checks
from replaydb.domain.episodes import GroupStatus
from replaydb.errors import UnknownBufferError

Names = str | Iterable[str] | None
Where = ColumnElement[bool] | None

#: Draws in a window: each has the groups of a batch.
DRAWS = 256


@dataclass(frozen=True, slots=True)
class Which:
    """Filters of groups.

    Attributes:
        buffers: Names of buffers; None for all.
        tasks: Names of tasks; None for all.
        statuses: Statuses; None for all.
        eligible: A further condition, or None.
    """

    buffers: frozenset[str] | None = None
    tasks: frozenset[str] | None = None
    statuses: frozenset[str] | None = None
    eligible: ColumnElement[bool] | None = None

    @classmethod
    def of(
        cls,
        buffer: Names,
        tasks: Names = None,
        statuses: Names = None,
        runs: Names = None,
        where: Where = None,
    ) -> Which:
        """Build filters from the arguments of a call.

        Raises:
            InvalidInputError: An argument is invalid.
        """
        names = checks.names("runs", runs)
        putters = None if names is None else compiling.of_runs(sorted(names))
        return cls(
            checks.names("buffer", buffer),
            checks.names("tasks", tasks),
            checks.some_of("statuses", statuses, GroupStatus),
            compiling.all_of([putters, compiling.checked(where)]),
        )

    def buffer_ids(self, source: Source) -> list[int] | None:
        """Return the ids of the buffers; None for all.

        Raises:
            UnknownBufferError: A buffer does not exist.
        """
        if self.buffers is None:
            return None
        known = source.buffer_ids()
        for name in sorted(self.buffers - known.keys()):
            raise UnknownBufferError(name)
        return [known[name] for name in self.buffers]

    def condition(self, ids: Collection[int] | None) -> ColumnElement[bool]:
        """Return the filters as one condition, given the ids of the buffers."""
        return groups_of(ids, self.tasks, self.statuses, self.eligible)

    def check(self, url: str | URL) -> None:
        """Raise if the store or a buffer does not exist."""
        with opened(url) as source:
            self.buffer_ids(source)


def groups(
    url: str | URL,
    *,
    buffer: Names = None,
    tasks: Names = None,
    statuses: Names = None,
    runs: Names = None,
    where: Where = None,
    damaged: Damaged = "raise",
) -> Rows:
    """Return groups, with the columns of the view `group_overview`.

    Times are UTC timestamps, names and statuses are strings, `tags` is JSON text.

    Args:
        url: The store, as for `Store.open`.
        buffer: Name or names of buffers; None (default) for all.
        tasks: Only groups of these tasks.
        statuses: Only groups of these statuses.
        runs: Only groups that these runs put.
        where: Only groups that meet this condition over `replaydb.col`.
        damaged: What to do with a group whose row has an unreadable value: "raise" (default) a
            `CorruptPayloadError` that names it while rows are read, or "skip" it.

    Returns:
        Lazy rows.

    Raises:
        InvalidInputError: An argument is invalid.
        UnknownBufferError: The buffer does not exist.
        DatabaseError: The store does not exist or cannot be read.
    """
    which = Which.of(buffer, tasks, statuses, runs, where)
    return scanned(url, which, lambda ids: scan_groups(which.condition(ids)), to_damaged(damaged))


def episodes(
    url: str | URL,
    *,
    buffer: Names = None,
    tasks: Names = None,
    statuses: Names = None,
    runs: Names = None,
    where: Where = None,
    damaged: Damaged = "raise",
) -> Rows:
    """Return episodes, with the columns of the view `episode_overview` and their `text`.

    Includes episodes whose tokens were dropped. `metadata` is JSON text.

    Args:
        url: The store, as for `Store.open`.
        buffer: Name or names of buffers; None (default) for all.
        tasks: Only episodes of groups of these tasks.
        statuses: Only episodes of groups of these statuses.
        runs: Only episodes of groups that these runs put.
        where: Only episodes of groups that meet this condition over `replaydb.col`.
        damaged: "raise" (default) or "skip", as for `groups`.

    Returns:
        Lazy rows.

    Raises:
        InvalidInputError: An argument is invalid.
        UnknownBufferError: The buffer does not exist.
        DatabaseError: The store does not exist or cannot be read.
    """
    which = Which.of(buffer, tasks, statuses, runs, where)
    return scanned(url, which, lambda ids: scan_episodes(which.condition(ids)), to_damaged(damaged))


def turns(
    url: str | URL,
    *,
    buffer: Names = None,
    tasks: Names = None,
    statuses: Names = None,
    runs: Names = None,
    where: Where = None,
    damaged: Damaged = "raise",
) -> Rows:
    """Return turns without their tokens, with the columns of the view `turn_overview`.

    Includes turns of trajectories that are not finished. `metadata` is JSON text.

    Args:
        url: The store, as for `Store.open`.
        buffer: Name or names of buffers; None (default) for all.
        tasks: Only turns of groups of these tasks.
        statuses: Only turns of groups of these statuses.
        runs: Only turns of groups that these runs put.
        where: Only turns of groups that meet this condition over `replaydb.col`.
        damaged: "raise" (default) or "skip", as for `groups`.

    Returns:
        Lazy rows.

    Raises:
        InvalidInputError: An argument is invalid.
        UnknownBufferError: The buffer does not exist.
        DatabaseError: The store does not exist or cannot be read.
    """
    which = Which.of(buffer, tasks, statuses, runs, where)
    return scanned(url, which, lambda ids: scan_turns(which.condition(ids)), to_damaged(damaged))


def annotation_history(
    url: str | URL,
    *,
    buffer: Names = None,
    tasks: Names = None,
    statuses: Names = None,
    runs: Names = None,
    where: Where = None,
    damaged: Damaged = "raise",
) -> Rows:
    """Return values that arrived later, in their order for each group: `annotation_history`.

    `changes` is JSON text.

    Args:
        url: The store, as for `Store.open`.
        buffer: Name or names of buffers; None (default) for all.
        tasks: Only values of groups of these tasks.
        statuses: Only values of groups of these statuses.
        runs: Only values that these runs added.
        where: Only values of groups that meet this condition over `replaydb.col`.
        damaged: "raise" (default) or "skip", as for `groups`.

    Returns:
        Lazy rows.

    Raises:
        InvalidInputError: An argument is invalid.
        UnknownBufferError: The buffer does not exist.
        DatabaseError: The store does not exist or cannot be read.
    """
    which = Which.of(buffer, tasks, statuses, where=where)
    annotators = checks.names("runs", runs)

    def scan(ids: Collection[int] | None) -> Scan:
        return scan_annotations(which.condition(ids) & of_runs(annotators))

    return scanned(url, which, scan, to_damaged(damaged))


def draws(
    url: str | URL,
    *,
    buffer: Names = None,
    tasks: Names = None,
    runs: Names = None,
    where: Where = None,
) -> Rows:
    """Return drawn groups, one row for each group of each draw: the view `training_history`.

    Args:
        url: The store, as for `Store.open`.
        buffer: Name or names of buffers; None (default) for all.
        tasks: Only groups of these tasks.
        runs: Only draws that these runs made.
        where: Only groups that meet this condition over `replaydb.col`. With `tasks` or `where`,
            groups that were deleted after the draw are omitted; with `where`, also groups that were
            replaced.

    Returns:
        Lazy rows.

    Raises:
        InvalidInputError: An argument is invalid.
        UnknownBufferError: The buffer does not exist.
        DatabaseError: The store does not exist or cannot be read.
    """
    which = Which.of(buffer, tasks, where=where)
    drawers = checks.names("runs", runs)

    def scan(ids: Collection[int] | None) -> Scan:
        return scan_draws(draws_of(ids, drawers, which.tasks, which.eligible))

    return scanned(url, which, scan)


def prompts(
    url: str | URL,
    *,
    buffer: Names = None,
    tasks: Names = None,
    statuses: Names = None,
    runs: Names = None,
    where: Where = None,
) -> Rows:
    """Return prompts that have a uid: the view `prompt_overview` over the selected groups.

    Args:
        url: The store, as for `Store.open`.
        buffer: Name or names of buffers; None (default) for all.
        tasks: Count only groups of these tasks.
        statuses: Count only groups of these statuses.
        runs: Count only groups that these runs put.
        where: Count only groups that meet this condition over `replaydb.col`.

    Returns:
        Lazy rows.

    Raises:
        InvalidInputError: An argument is invalid.
        UnknownBufferError: The buffer does not exist.
        DatabaseError: The store does not exist or cannot be read.
    """
    which = Which.of(buffer, tasks, statuses, runs, where)
    which.check(url)
    schema = schema_of(scan_prompts(which.condition(None), 0).rows)

    def batches() -> Iterator[pa.RecordBatch]:
        with opened(url) as source:
            ids = which.buffer_ids(source)
            for buffer_id in sorted(source.buffer_ids().values() if ids is None else ids):
                scan = scan_prompts(which.condition(None), buffer_id).within(which.eligible)
                for rows in source.pages(scan):
                    yield batch_of(schema, rows)

    return Rows(schema, batches)


def policies(url: str | URL, *, buffer: Names = None) -> Rows:
    """Return the policy versions that buffers advanced to: the view `policy_overview`.

    Args:
        url: The store, as for `Store.open`.
        buffer: Name or names of buffers; None (default) for all.

    Returns:
        Lazy rows.

    Raises:
        InvalidInputError: An argument is invalid.
        UnknownBufferError: The buffer does not exist.
        DatabaseError: The store does not exist or cannot be read.
    """
    which = Which.of(buffer)
    return scanned(url, which, scan_policies)


def runs(url: str | URL) -> Rows:
    """Return runs: `run_id`, `run_name`, `lineage`, `started_at`, `metadata` as JSON text.

    Args:
        url: The store, as for `Store.open`.

    Returns:
        Lazy rows.

    Raises:
        InvalidURLError: The URL cannot be used.
        DatabaseError: The store does not exist or cannot be read.
    """
    return scanned(url, Which(), lambda _: scan_runs())


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


def scan_turns(condition: ColumnElement[bool]) -> Scan:
    """Scan rows of `turn_overview`."""
    key = turn.c.group_id, turn.c.position, turn.c.turn
    return Scan(plain(select_turns()), key, group.id, WINDOW, condition, [group.id])


def scan_annotations(condition: ColumnElement[bool]) -> Scan:
    """Scan rows of `annotation_history`."""
    key = tuple(annotation.primary_key.columns)
    return Scan(plain(select_annotations()), key, group.id, WINDOW, condition, [group.id])


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
    return Scan(plain(select(*columns)), [run.c.id], run.c.id, WINDOW, EVERY)


def scan_policies(buffers: Collection[int] | None) -> Scan:
    """Scan rows of `policy_overview`."""
    own, condition = policy_change.c.id, of_buffers(policy_change.c.buffer_id, buffers)
    return Scan(plain(select_policies()), [own], own, WINDOW, condition)


def scan_prompts(condition: ColumnElement[bool], buffer_id: int) -> Scan:
    """Scan rows of `prompt_overview` of a buffer.

    Prompts have the order of the index, which is that of the locale of the server: in another one,
    each window would read all groups.
    """
    keys = group.prompt_uid, bytewise(group.task_name)
    own = group.buffer_id == buffer_id
    return Scan(select_prompts(), keys, group.prompt_uid, WINDOW, condition, of=own, start="")


def groups_of(
    buffers: Collection[int] | None = None,
    tasks: Collection[str] | None = None,
    statuses: Collection[str] | None = None,
    eligible: ColumnElement[bool] | None = None,
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
    runs: Collection[str] | None,
    tasks: Collection[str] | None,
    eligible: ColumnElement[bool] | None,
) -> ColumnElement[bool]:
    """Return the condition for draws from buffers and by runs, of groups of tasks.

    Of content that was replaced since the draw, only the task is known.
    """
    condition = of_buffers(draw.c.buffer_id, buffers) & groups_of(eligible=eligible)
    condition &= of_runs(runs)
    return condition if tasks is None else condition & among(as_drawn("task_name"), sorted(tasks))


def of_runs(names: Collection[str] | None) -> ColumnElement[bool]:
    """Return the condition for rows of runs; None: of all runs."""
    return EVERY if names is None else among(run.c.name, sorted(names))


def of_buffers(column: ColumnElement[int], ids: Collection[int] | None) -> ColumnElement[bool]:
    """Return the condition for rows of buffers; None: of all buffers."""
    return EVERY if ids is None else (column + 0).in_(sorted(ids))


def plain(rows: Select[Any]) -> Select[Any]:
    """Return the query with JSON columns as their stored text."""
    shown = [
        json_as_stored(column).label(column.key) if is_json(column.type) else column
        for column in rows.selected_columns
    ]
    return rows.with_only_columns(*shown)


def scanned(
    url: str | URL,
    which: Which,
    scan: Callable[[Collection[int] | None], Scan],
    damaged: Damaged = "raise",
) -> Rows:
    """Return the rows of a scan.

    Args:
        url: The store.
        which: Filters; `scan` has to apply them.
        scan: Returns the scan, given the ids of the buffers, or None for all.
        damaged: What to do with a row that has an unreadable value.
    """
    which.check(url)
    schema = schema_of(scan(None).rows)

    def batches() -> Iterator[pa.RecordBatch]:
        with opened(url) as source:
            for rows in source.pages(scan(which.buffer_ids(source)).within(which.eligible)):
                yield batch_of(schema, rows, damaged)

    return Rows(schema, batches)
