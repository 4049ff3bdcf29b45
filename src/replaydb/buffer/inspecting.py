"""Read-only calls: list, read and count groups, and read draws, statistics and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement

from replaydb.batch.batch import Batch
from replaydb.batch.stored import StoredGroup
from replaydb.buffer.core import BufferCore
from replaydb.buffer.drawing import check_intact
from replaydb.buffer.requests import eligible, named, order, page_start
from replaydb.database.filters import compiling
from replaydb.database.filters.group_columns import col
from replaydb.database.repository import cursors, earlier_values, groups, lineage, metrics
from replaydb.database.repository.listing import Listing, find
from replaydb.database.repository.tags import narrowed
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import BULK_SECONDS, end_in
from replaydb.database.tables.records import Stored
from replaydb.domain import checks
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.results import BufferStats, DrawInfo, EpisodeInfo, GroupInfo, PromptInfo
from replaydb.errors import (
    InvalidInputError,
    PayloadGoneError,
    UnknownDrawError,
    UnknownGroupError,
)


class Inspecting(BufferCore):
    """Read groups, draws, statistics and metrics. Nothing is changed."""

    async def find(
        self,
        ids: Iterable[int] | None = None,
        *,
        uids: str | Iterable[str] | None = None,
        tasks: str | Iterable[str] | None = None,
        statuses: str | Iterable[str] | None = None,
        where: ColumnElement[bool] | None = None,
        runs: str | Iterable[str] | None = None,
        order_by: ColumnElement[Any] = col.id,
        limit: int | None = None,
        after: GroupInfo | tuple[Any, int] | None = None,
    ) -> list[GroupInfo]:
        """Return metadata of groups of any status, without their episodes.

        To read many groups, use pages: `page = await buffer.find(limit=1000, after=page[-1])`.

        Args:
            ids: Only groups with these ids. Ids that do not exist are ignored.
            uids: Only groups with these uids, instead of `ids`.
            tasks: Only groups of these tasks.
            statuses: Only groups with these statuses.
            where: Only groups that meet this condition over `replaydb.col`.
            runs: Only groups that these runs put.
            order_by: Column of `replaydb.col` with numbers or times, or its `desc()`. Groups with
                equal values are sorted by id in the same direction. Groups without a value come
                last. Default: by id.
            limit: Maximum number of groups. Default: all.
            after: Where the page begins: the last `GroupInfo` of the previous page, or a tuple
                `(value, id)` of its value in the `order_by` column and its id. The page continues
                from these values, even if the group has changed since. Not with `ids` or `uids`.

        Returns:
            One `GroupInfo` per group, in the order of `order_by`.

        Raises:
            CorruptPayloadError: The metadata of some groups is damaged. `error.group_ids` names
                them.
            InvalidInputError: An argument is invalid.
        """
        names, sort = named(ids, uids), order(order_by)
        begin = None if after is None else page_start(after, sort)
        if begin is not None and names is not None:
            raise InvalidInputError("after", "None if ids or uids are given", begin[1])
        listing = Listing(
            names,
            checks.names("tasks", tasks),
            checks.some_of("statuses", statuses, GroupStatus),
            compiling.all_of(eligible(where, None, runs).values()),
            sort,
            begin,
            checks.optional(checks.whole_number, "limit", limit),
        )
        return await self._read(
            lambda session: find(session, self._row, listing), end=end_in(BULK_SECONDS)
        )

    async def get(
        self,
        ids: Iterable[int] | None = None,
        *,
        uids: str | Iterable[str] | None = None,
        fields: str | Iterable[str] | None = None,
    ) -> list[StoredGroup]:
        """Read groups of any status with their episodes.

        Args:
            ids: Ids of the groups.
            uids: Uids of the groups, instead of `ids`.
            fields: Name or names of the extras to read, see `sample`. Default: all.

        Returns:
            The groups, in the order of `ids` or `uids`.

        Raises:
            UnknownGroupError: Some groups are not in the buffer. `error.batch` has the groups that
                could be read, in the same order.
            CorruptPayloadError: The stored bytes of some groups are damaged. `error.batch` has the
                others.
            PayloadGoneError: The episodes of some groups were dropped. Only their metadata is left.
                `error.batch` has the others.
            InvalidInputError: Neither or both of `ids` and `uids` were given.
        """
        wanted = named(ids, uids)
        if wanted is None:
            raise InvalidInputError("ids", "ids or uids", "neither")
        names = checks.names("fields", fields)

        def work(session: Session) -> tuple[dict[int | str, int], Stored]:
            known = groups.ids_by_name(session, self.id, wanted)
            return known, groups.fetch(session, self.id, sorted(set(known.values())), names)

        end = end_in(BULK_SECONDS)
        known, stored = await self._read(work, end, has_any=lambda it: bool(it[1].groups))
        found = await self._decoded(stored, end, names)
        read = [found.groups[known[name]] for name in wanted if known.get(name) in found.groups]
        there = found.groups.keys() | found.corrupt.keys() | found.gone
        if missing := [name for name in wanted if known.get(name) not in there]:
            raise UnknownGroupError(missing, Batch(read))
        check_intact(found.corrupt, Batch(read))
        if found.gone:
            raise PayloadGoneError(sorted(found.gone), batch=Batch(read))
        return read

    async def episodes(
        self, group_id: int, *, position: int = 0, limit: int = 1000
    ) -> list[EpisodeInfo]:
        """Return metadata of the episodes of a group, without their tokens.

        It is available even if the tokens were dropped or are damaged.

        Args:
            group_id: Id of the group.
            position: Index of the first episode to return, from 0.
            limit: Maximum number of episodes.

        Returns:
            One `EpisodeInfo` per episode, in order; empty for an unknown group.

        Raises:
            InvalidInputError: An argument is invalid.
        """
        number = checks.whole_number("group_id", group_id)
        first = checks.whole_number("position", position, most=checks.INT32[1])
        most = checks.whole_number("limit", limit)
        return await self._read(
            lambda session: groups.episodes(session, self.id, number, first, most),
            single=True,
        )

    async def texts(self, ids: Iterable[int]) -> dict[int, dict[int, str]]:
        """Return transcripts (the `text` of episodes), without reading tokens.

        Args:
            ids: Ids of the groups.

        Returns:
            `{group_id: {position: text}}`. Unknown groups and episodes without text are omitted.

        Raises:
            InvalidInputError: An argument is invalid.
        """
        wanted = checks.ids("ids", ids)
        return await self._read(
            lambda session: groups.texts(session, self.id, wanted), end=end_in(BULK_SECONDS)
        )

    async def count(
        self,
        *,
        tasks: str | Iterable[str] | None = None,
        statuses: str | Iterable[str] | None = None,
        where: ColumnElement[bool] | None = None,
        limit: int | None = None,
    ) -> int:
        """Return the number of groups, by default of all tasks and statuses.

        Args:
            tasks: Only groups of these tasks.
            statuses: Only groups with these statuses.
            where: Only groups that meet this condition over `replaydb.col`.
            limit: Stop counting at this number: the result is at most `limit`. Default: count all.

        Returns:
            The number of groups.

        Raises:
            InvalidInputError: An argument is invalid.
        """
        which = self._selection(tasks, statuses, where)
        most = checks.optional(checks.whole_number, "limit", limit)
        return await self._read(
            lambda session: groups.count(session, narrowed(session, self._row, which), most),
            end=end_in(BULK_SECONDS),
            single=which.where is None,  # a filter may use a tag index
        )

    async def stats(self, *, totals: bool = True) -> BufferStats:
        """Return a consistent snapshot of group counts, sizes, staleness and rewards.

        Args:
            totals: Whether to sum over all groups. With False `BufferStats.totals` is empty and the
                cost does not depend on the number of groups.

        Returns:
            Counters per task, and totals per task and status.

        Raises:
            InvalidInputError: An argument is invalid.
        """
        sums = checks.flag("totals", totals)
        return await self._read(
            lambda session: groups.stats(session, self.id, self.name, sums=sums),
            end=end_in(BULK_SECONDS) if sums else None,
            single=True,
        )

    async def prompts(
        self,
        *,
        tasks: str | Iterable[str] | None = None,
        where: ColumnElement[bool] | None = None,
    ) -> list[PromptInfo]:
        """Return statistics of every prompt that has a `prompt_uid`.

        The statistics are the number of its groups that were put, sampled, expired, filtered or
        failed, and their rewards. Groups that were deleted, or renewed by a put, are not counted,
        nor are their draws.

        Args:
            tasks: Only groups of these tasks.
            where: Only groups that meet this condition over `replaydb.col`.

        Returns:
            One `PromptInfo` per task and prompt.

        Raises:
            InvalidInputError: An argument is invalid.
        """
        which = self._selection(tasks, None, where)
        return await self._read(
            lambda session: lineage.prompts(session, narrowed(session, self._row, which))
        )

    async def cursor(self, name: str) -> Any:
        """Return the JSON value that `put` or `Lease.ack` last wrote under a name.

        Args:
            name: Name of the cursor.

        Returns:
            The value, or None if the cursor was never written.

        Raises:
            InvalidInputError: `name` is invalid.
        """
        checks.name("name", name)
        return await self._read(lambda session: cursors.read(session, self.id, name), single=True)

    async def draws(
        self,
        *,
        step: int | None = None,
        runs: str | Iterable[str] | None = None,
        group_id: int | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> list[DrawInfo]:
        """Return recorded draws, newest first.

        Args:
            step: Only draws for this trainer step.
            runs: Only draws made by these runs.
            group_id: Only draws that took this group.
            before: Only draws with a lower id. For the next page, pass the id of the last draw of
                the previous page.
            limit: Maximum number of draws.

        Returns:
            One `DrawInfo` per draw.

        Raises:
            InvalidInputError: An argument is invalid.
        """
        names = checks.names("runs", runs)
        which = {
            "draw_id": None,
            "step": checks.optional(checks.whole_number, "step", step),
            "runs": None if names is None else sorted(names),
            "group_id": checks.optional(checks.whole_number, "group_id", group_id),
            "before": checks.optional(checks.whole_number, "before", before),
            "limit": checks.whole_number("limit", limit, least=1),
        }
        return await self._read(lambda session: lineage.draws(session, self.id, **which))

    async def steps(
        self,
        *,
        runs: str | Iterable[str] | None = None,
        above: int | None = None,
        below: int | None = None,
        limit: int = 100,
    ) -> list[int]:
        """Return trainer steps that have recorded draws.

        Args:
            runs: Only steps that these runs drew for.
            above: Only steps greater than this.
            below: Only steps less than this.
            limit: Maximum number of steps. If there are more, the lowest are returned. If `below`
                is given without `above`, the highest are returned instead.

        Returns:
            The steps, ascending.

        Raises:
            InvalidInputError: An argument is invalid.
        """
        names = checks.names("runs", runs)
        which = {
            "runs": None if names is None else sorted(names),
            "above": checks.optional(checks.whole_number, "above", above),
            "below": checks.optional(checks.whole_number, "below", below),
            "limit": checks.whole_number("limit", limit),
        }
        return await self._read(lambda session: lineage.steps(session, self.id, **which))

    async def redraw(
        self,
        draw_id: int,
        ids: Iterable[int] | None = None,
        *,
        fields: str | Iterable[str] | None = None,
    ) -> Batch:
        """Return the batch of an earlier draw again. Nothing is counted or recorded.

        Args:
            draw_id: Id of the draw, from `Batch.draw_id` or `draws`.
            ids: Ids of groups of the draw. Default: all.
            fields: Name or names of the extras to read, see `sample`. Default: all.

        Returns:
            The groups in the order of the draw, with its probabilities, weights and staleness.

        Raises:
            UnknownDrawError: The draw is not recorded.
            PayloadGoneError: Some of its groups were deleted or replaced, or their episodes
                dropped. `error.batch` has the others.
            CorruptPayloadError: The stored bytes of some groups are damaged. `error.batch` has the
                others.
            InvalidInputError: Some of `ids` are not groups of the draw.
        """
        number = checks.whole_number("draw_id", draw_id)
        wanted = checks.optional(checks.ids, "ids", ids)
        names = checks.names("fields", fields)

        def work(session: Session) -> tuple[DrawInfo, Stored, Sequence[Any]]:
            record = lineage.find_draw(session, self.id, number)
            if record is None:
                raise UnknownDrawError(number)
            chosen = record.group_ids if wanted is None else wanted
            if others := sorted(set(chosen) - set(record.group_ids)):
                raise InvalidInputError("ids", f"groups of draw {number}", others)
            later = session.run(earlier_values.select_later(number, chosen))
            return record, groups.fetch(session, self.id, chosen, names), later

        end = end_in(BULK_SECONDS)
        record, stored, later = await self._read(work, end=end)
        found = await self._decoded(stored, end, names)
        earlier_values.undo(found.groups, later)
        chosen = set(record.group_ids if wanted is None else wanted)
        replaced = [
            group_id
            for group_id, times in zip(record.group_ids, record.times_replaced, strict=True)
            if group_id in found.groups and found.groups[group_id].times_replaced != times
        ]
        sound = [
            group_id in found.groups and group_id not in replaced for group_id in record.group_ids
        ]
        intact = [found.groups[group_id] for group_id in compress(record.group_ids, sound)]
        for group, staleness in zip(intact, compress(record.staleness, sound), strict=True):
            group.staleness = staleness
        probabilities, weights = np.array(record.probabilities), np.array(record.weights)
        batch = Batch(intact, probabilities[sound], weights[sound], number)
        check_intact(found.corrupt, batch)
        if len(batch) < len(chosen):
            gone = [one for one in record.group_ids if one in chosen and one not in batch.ids]
            raise PayloadGoneError(gone, replaced, batch)
        return batch

    async def metrics(self, *, draws: int = 100, totals: bool = True) -> dict[str, float]:
        """Return metrics of the buffer for a logger such as W&B or TensorBoard.

        Args:
            draws: Number of most recent recorded draws that `train/` and `replay/` metrics cover.
                `gen/recent_groups` and the rewards in `gen/` cover the groups put since the first
                of these draws.
            totals: Whether to sum over all groups. With False the metrics that need these sums are
                omitted, and the cost does not depend on the number of groups.

        Returns:
            Values by name, from one consistent snapshot. `docs/training.md` lists the names.
            Metrics without data, such as the mean of no rewards, are omitted.

        Raises:
            InvalidInputError: An argument is invalid.
        """
        sums = checks.flag("totals", totals)
        number = checks.whole_number("draws", draws, least=1)

        found = await self._read(
            lambda session: metrics.collect(session, self.id, self.name, number, sums=sums),
            end=end_in(BULK_SECONDS) if sums else None,
            single=True,
        )
        cache = self._payloads.cache
        return found if cache is None else found | cache.metrics()
