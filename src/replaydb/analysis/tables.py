"""Tables of groups, episodes, draws, prompts, policies and runs, without tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from sqlalchemy import URL, ColumnElement, Connection

from replaydb.analysis.columns import Damaged, batch_of, schema_of, to_damaged
from replaydb.analysis.lazy_table import Rows
from replaydb.analysis.source import Source, opened
from replaydb.database.filters import compiling
from replaydb.database.runtime.prepared import execute
from replaydb.database.statements import scans
from replaydb.database.statements.scans import Scan
from replaydb.database.tables.views import select_prompts
from replaydb.domain import checks
from replaydb.domain.episodes import GroupStatus
from replaydb.errors import UnknownBufferError

Names = str | Iterable[str] | None
Where = ColumnElement[bool] | None


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
        return scans.groups_of(self.buffer_ids(source), self.tasks, self.statuses, self.eligible)

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
    return _scanned(url, which, scans.scan_groups, to_damaged(damaged))


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
    return _scanned(url, which, scans.scan_episodes, to_damaged(damaged))


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
        lambda condition: scans.scan_draws(
            condition if drawers is None else condition & scans.drawn_by(drawers)
        ),
        "raise",
        scans.draws_of,
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
    return _scanned(url, which, scans.scan_policies, "raise", scans.policies_of)


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
    return _scanned(url, which, lambda _: scans.scan_runs(), "raise")


def _scanned(
    url: str | URL,
    which: Which,
    scan: Callable[[ColumnElement[bool]], Scan],
    damaged: Damaged,
    condition: Callable[..., ColumnElement[bool]] = scans.groups_of,
) -> Rows:
    """Return the rows of a scan over what meets a condition."""
    which.check(url)
    schema = schema_of(scan(scans.groups_of(None, None, None, None)).rows)
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
        [(end,)] = execute(connection, scans.select_end_of_prompts(buffer_id, start))
        if end is None:
            return None, []
        return end, execute(connection, scans.select_prompt_page(condition, buffer_id, start, end))

    while True:
        end, rows = source.read(work)
        if end is None:
            return
        if rows:
            yield rows
        start = end
