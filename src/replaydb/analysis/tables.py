"""Tables of groups, episodes, draws, prompts, policies and runs, without tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Select,
    Text,
    func,
    literal,
    select,
    true,
    type_coerce,
)

from replaydb.analysis.columns import Damaged, batch_of, schema_of, to_damaged
from replaydb.analysis.lazy_table import Rows
from replaydb.analysis.source import Source, opened
from replaydb.database.filters import compiling
from replaydb.database.runtime.prepared import execute
from replaydb.database.statements.scans import WINDOW, Scan, plain
from replaydb.database.statements.selections import of_tasks
from replaydb.database.tables.expressions import among, bytewise
from replaydb.database.tables.schema import (
    draw,
    draw_group,
    episode,
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

    buffers: frozenset[str] | None
    tasks: frozenset[str] | None
    statuses: frozenset[str] | None
    eligible: ColumnElement[bool] | None

    @classmethod
    def of(cls, buffer: Names, tasks: Names, statuses: Names, runs: Names, where: Where) -> Which:
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

    def condition(self, source: Source) -> ColumnElement[bool]:
        """Return the filters as one condition."""
        return groups_of(self.buffer_ids(source), self.tasks, self.statuses, self.eligible)

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
    return _scanned(url, which, scan_groups, to_damaged(damaged))


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
    return _scanned(url, which, scan_episodes, to_damaged(damaged))


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
    which = Which.of(buffer, tasks, None, None, where)
    drawers = checks.names("runs", runs)
    return _scanned(
        url,
        which,
        lambda condition: scan_draws(
            condition if drawers is None else condition & drawn_by(drawers)
        ),
        "raise",
        draws_of,
    )


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
    schema = schema_of(select_prompts())

    def batches() -> Iterator[pa.RecordBatch]:
        with opened(url) as source:
            condition = which.condition(source)
            ids = which.buffer_ids(source)
            for buffer_id in sorted(source.buffer_ids().values() if ids is None else ids):
                for rows in _prompt_pages(source, condition, buffer_id):
                    yield batch_of(schema, rows, lambda row: -1)

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
    which = Which.of(buffer, None, None, None, None)
    return _scanned(url, which, scan_policies, "raise", policies_of)


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
    which = Which(None, None, None, None)
    return _scanned(url, which, lambda _: scan_runs(), "raise")


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


def _scanned(
    url: str | URL,
    which: Which,
    scan: Callable[[ColumnElement[bool]], Scan],
    damaged: Damaged,
    condition: Callable[..., ColumnElement[bool]] = groups_of,
) -> Rows:
    """Return the rows of a scan over what meets a condition."""
    which.check(url)
    schema = schema_of(scan(groups_of(None, None, None, None)).rows)
    index = schema.get_field_index("group_id")

    def batches() -> Iterator[pa.RecordBatch]:
        with opened(url) as source:
            ids = which.buffer_ids(source)
            wanted = condition(ids, which.tasks, which.statuses, which.eligible)
            for rows in source.pages(scan(wanted)):
                yield batch_of(schema, rows, lambda row: row[index], damaged)

    return Rows(schema, batches)


def _prompt_pages(
    source: Source, condition: ColumnElement[bool], buffer_id: int
) -> Iterator[list[Any]]:
    start = ""

    def work(connection: Connection) -> tuple[str | None, Any]:
        [(end,)] = execute(connection, select_end_of_prompts(buffer_id, start))
        if end is None:
            return None, []
        return end, execute(connection, select_prompt_page(condition, buffer_id, start, end))

    while True:
        end, rows = source.read(work)
        if end is None:
            return
        if rows:
            yield rows
        start = end
