"""What is known of groups, episodes, draws, prompts and runs, without their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from sqlalchemy import URL, ColumnElement, Connection

from replaydb import checks
from replaydb.analysis.columns import Damaged, batch_of, schema_of, to_damaged
from replaydb.analysis.rows import Rows
from replaydb.analysis.source import Source, opened
from replaydb.database import filters
from replaydb.database.prepared import execute
from replaydb.database.statements import walks
from replaydb.database.statements.walks import Walk
from replaydb.episodes import GroupStatus
from replaydb.errors import UnknownBufferError

Names = str | Iterable[str] | None
Where = ColumnElement[bool] | None


@dataclass(frozen=True, slots=True)
class Which:
    """Which groups to read.

    Attributes:
        buffers: Of which buffers, by name; None: of all. So for the others.
        tasks: Of which tasks.
        statuses: Of which statuses.
        eligible: What else they have to meet.
    """

    buffers: frozenset[str] | None
    tasks: frozenset[str] | None
    statuses: frozenset[str] | None
    eligible: ColumnElement[bool] | None

    @classmethod
    def of(cls, buffer: Names, tasks: Names, statuses: Names, runs: Names, where: Where) -> Which:
        """From the arguments of a call.

        Raises:
            InvalidInputError: One of them is wrong.
        """
        names = checks.names("runs", runs)
        putters = None if names is None else filters.of_runs(sorted(names))
        return cls(
            checks.names("buffer", buffer),
            checks.names("tasks", tasks),
            checks.some_of("statuses", statuses, GroupStatus),
            filters.all_of([putters, filters.checked(where)]),
        )

    def buffer_ids(self, source: Source) -> list[int] | None:
        """The buffers; None: all.

        Raises:
            UnknownBufferError: There is no such buffer.
        """
        if self.buffers is None:
            return None
        known = source.buffer_ids()
        for name in sorted(self.buffers - known.keys()):
            raise UnknownBufferError(name)
        return [known[name] for name in self.buffers]

    def condition(self, source: Source) -> ColumnElement[bool]:
        """As one condition."""
        return walks.groups_of(self.buffer_ids(source), self.tasks, self.statuses, self.eligible)

    def check(self, url: str | URL) -> None:
        """Refuse a store or a buffer that is not there."""
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
    """Groups, a row each, with the columns of the view `group_overview`.

    Times are timestamps in UTC, names and statuses strings, `tags` JSON text.

    Args:
        url: The store, as for `Store.open`.
        buffer: Only of this buffer, or of these; by default of all.
        tasks: Only of these tasks.
        statuses: Only of these statuses.
        runs: Only what these runs put.
        where: Only what meets this expression over `replaydb.col`.
        damaged: What to do with a group in whose row something stands that cannot be read: "raise"
            a `CorruptPayloadError` that names it, or "skip" it.

    Raises:
        InvalidInputError: An argument is wrong.
        UnknownBufferError: There is no such buffer.
        DatabaseError: There is no such store, or it cannot be read.
    """
    which = Which.of(buffer, tasks, statuses, runs, where)
    return _walked(url, which, walks.walk_groups, to_damaged(damaged))


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
    """Episodes, a row each, with the columns of the view `episode_overview`, and their `text`.

    There is a row also for an episode whose tokens were dropped. `metadata` is JSON text.

    Args:
        url: The store, as for `Store.open`.
        buffer: Only of groups of this buffer, or of these; by default of all.
        tasks: Only of groups of these tasks.
        statuses: Only of groups of these statuses.
        runs: Only of groups that these runs put.
        where: Only of groups that meet this expression over `replaydb.col`.
        damaged: As for `groups`.

    Raises:
        InvalidInputError: An argument is wrong.
        UnknownBufferError: There is no such buffer.
        DatabaseError: There is no such store, or it cannot be read.
    """
    which = Which.of(buffer, tasks, statuses, runs, where)
    return _walked(url, which, walks.walk_episodes, to_damaged(damaged))


def draws(
    url: str | URL,
    *,
    buffer: Names = None,
    tasks: Names = None,
    runs: Names = None,
    where: Where = None,
) -> Rows:
    """Groups that were drawn, a row for each group of each draw: the view `training_history`.

    Args:
        url: The store, as for `Store.open`.
        buffer: Only draws from this buffer, or from these; by default from all.
        tasks: Only groups of these tasks.
        runs: Only draws that these runs made.
        where: Only groups that meet this expression over `replaydb.col`. With `tasks` or `where`
            groups that were deleted since are left out.

    Raises:
        InvalidInputError: An argument is wrong.
        UnknownBufferError: There is no such buffer.
        DatabaseError: There is no such store, or it cannot be read.
    """
    which = Which.of(buffer, tasks, None, None, where)
    drawers = checks.names("runs", runs)
    return _walked(
        url,
        which,
        lambda condition: walks.walk_draws(
            condition if drawers is None else condition & walks.drawn_by(drawers)
        ),
        "raise",
        walks.draws_of,
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
    """Prompts that have a uid, a row each: the view `prompt_overview` over the groups asked for.

    Args:
        url: The store, as for `Store.open`.
        buffer: Only of this buffer, or of these; by default of all.
        tasks: Only groups of these tasks count. So for the others.
        statuses: Only groups of these statuses.
        runs: Only groups that these runs put.
        where: Only groups that meet this expression over `replaydb.col`.

    Raises:
        InvalidInputError: An argument is wrong.
        UnknownBufferError: There is no such buffer.
        DatabaseError: There is no such store, or it cannot be read.
    """
    which = Which.of(buffer, tasks, statuses, runs, where)
    which.check(url)
    schema = schema_of(walks.prompt_rows())

    def batches() -> Iterator[pa.RecordBatch]:
        with opened(url) as source:
            condition = which.condition(source)
            ids = which.buffer_ids(source)
            for buffer_id in sorted(source.buffer_ids().values() if ids is None else ids):
                for rows in _prompt_pages(source, condition, buffer_id):
                    yield batch_of(schema, rows, lambda row: -1)

    return Rows(schema, batches)


def policies(url: str | URL, *, buffer: Names = None) -> Rows:
    """Versions that the policies of buffers came to, a row each: the view `policy_overview`.

    Args:
        url: The store, as for `Store.open`.
        buffer: Only of this buffer, or of these; by default of all.

    Raises:
        InvalidInputError: An argument is wrong.
        UnknownBufferError: There is no such buffer.
        DatabaseError: There is no such store, or it cannot be read.
    """
    which = Which.of(buffer, None, None, None, None)
    return _walked(url, which, walks.walk_policies, "raise", walks.policies_of)


def runs(url: str | URL) -> Rows:
    """Runs, a row each: `run_id`, `run_name`, `lineage`, `started_at`, `metadata` as JSON text.

    Args:
        url: The store, as for `Store.open`.

    Raises:
        InvalidURLError: The URL cannot be used.
        DatabaseError: There is no such store, or it cannot be read.
    """
    which = Which(None, None, None, None)
    return _walked(url, which, lambda _: walks.walk_runs(), "raise")


def _walked(
    url: str | URL,
    which: Which,
    walk: Callable[[ColumnElement[bool]], Walk],
    damaged: Damaged,
    condition: Callable[..., ColumnElement[bool]] = walks.groups_of,
) -> Rows:
    """Rows of a walk through what some condition leaves."""
    which.check(url)
    schema = schema_of(walk(walks.groups_of(None, None, None, None)).rows)
    place = schema.get_field_index("group_id")

    def batches() -> Iterator[pa.RecordBatch]:
        with opened(url) as source:
            ids = which.buffer_ids(source)
            wanted = condition(ids, which.tasks, which.statuses, which.eligible)
            for rows in source.pages(walk(wanted)):
                yield batch_of(schema, rows, lambda row: row[place], damaged)

    return Rows(schema, batches)


def _prompt_pages(
    source: Source, condition: ColumnElement[bool], buffer_id: int
) -> Iterator[list[Any]]:
    start = ""

    def work(connection: Connection) -> tuple[str | None, Any]:
        [(end,)] = execute(connection, walks.select_end_of_prompts(buffer_id, start))
        if end is None:
            return None, []
        return end, execute(connection, walks.select_prompt_page(condition, buffer_id, start, end))

    while True:
        end, rows = source.read(work)
        if end is None:
            return
        if rows:
            yield rows
        start = end
