"""Looking into a buffer, and at the record of what was drawn; nothing is changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Connection

from replaydb import checks
from replaydb.batch.batch import Batch
from replaydb.batch.stored import StoredGroup
from replaydb.buffer.core import BufferCore
from replaydb.buffer.drawing import reasons
from replaydb.buffer.requests import eligible, named, order, place
from replaydb.database import filters
from replaydb.database.group_columns import col
from replaydb.database.records import Decoded, Stored
from replaydb.database.repository import groups, lineage, metrics
from replaydb.database.repository.listing import Listing, find
from replaydb.database.repository.tags import narrowed
from replaydb.database.transactions import BULK_SECONDS, end_in
from replaydb.episodes import GroupStatus
from replaydb.errors import (
    CorruptPayloadError,
    InvalidInputError,
    PayloadGoneError,
    UnknownDrawError,
    UnknownGroupError,
)
from replaydb.results import BufferStats, DrawInfo, EpisodeInfo, GroupInfo, PromptInfo


class Inspecting(BufferCore):
    """What is stored, and what became of it."""

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
        """What is known of groups of any status, without reading their episodes.

        Nothing is drawn, counted or changed. To go through many groups, take them in pages:
        `page = await buffer.find(limit=1000, after=page[-1])`.

        Args:
            ids: Only groups of these ids; those that are gone are passed over.
            uids: Only groups of these uids, instead of `ids`.
            tasks: Only groups of these tasks.
            statuses: Only groups of these statuses.
            where: Only groups that meet this expression over `replaydb.col`.
            runs: Only groups that these runs put.
            order_by: A column of `replaydb.col` that holds numbers or times, or its `desc()`.
                Equal ones are sorted by id in the same direction; groups without a value come
                last.
            limit: How many at most; by default all.
            after: The last group of the page before, in the same order, or what it had in the
                column of `order_by` and its id, which may be elsewhere by now. Not with `ids` or
                `uids`.

        Raises:
            CorruptPayloadError: Tags or times of some cannot be read; it names them.
            InvalidInputError: An argument is wrong.
        """
        names, sort = named(ids, uids), order(order_by)
        begin = None if after is None else place(after, sort)
        if begin is not None and names is not None:
            raise InvalidInputError("after", "None where ids or uids name the groups", begin[1])
        listing = Listing(
            names,
            checks.names("tasks", tasks),
            checks.some_of("statuses", statuses, GroupStatus),
            filters.all_of(eligible(where, None, runs).values()),
            sort,
            begin,
            checks.optional(checks.whole_number, "limit", limit),
        )
        return await self._read(
            lambda connection: find(connection, self._row, listing), end=end_in(BULK_SECONDS)
        )

    async def get(
        self, ids: Iterable[int] | None = None, *, uids: str | Iterable[str] | None = None
    ) -> list[StoredGroup]:
        """Read groups of any status, in the order asked for.

        Where some cannot be read, the error has the others as `batch`, in that order.

        Args:
            ids: Ids of the groups.
            uids: Uids of the groups, instead of `ids`.

        Raises:
            UnknownGroupError: Some are not in the buffer.
            CorruptPayloadError: Stored bytes of some are damaged.
            PayloadGoneError: Some have lost their episodes; only their scalars are left.
        """
        wanted = named(ids, uids)
        if wanted is None:
            raise InvalidInputError("ids", "ids or uids", "neither")

        def work(connection: Connection) -> tuple[dict[int | str, int], Stored]:
            known = groups.ids_by_name(connection, self.id, wanted)
            return known, groups.fetch(
                self._database.backend, connection, self.id, sorted(set(known.values()))
            )

        end = end_in(BULK_SECONDS)
        known, stored = await self._read(work, end, has_any=lambda it: bool(it[1].groups))
        found = await self._decoded(stored, end)
        read = [found.groups[known[name]] for name in wanted if known.get(name) in found.groups]
        there = found.groups.keys() | found.corrupt.keys() | found.gone
        if missing := [name for name in wanted if known.get(name) not in there]:
            raise UnknownGroupError(missing, Batch(read))
        if bad := found.corrupt:
            raise CorruptPayloadError(reasons(bad), sorted(bad), Batch(read))
        if found.gone:
            raise PayloadGoneError(sorted(found.gone), batch=Batch(read))
        return read

    async def episodes(
        self, group_id: int, *, position: int = 0, limit: int = 1000
    ) -> list[EpisodeInfo]:
        """What is known of the episodes of a group, in order, without reading their tokens.

        It is there also of groups whose tokens were dropped, or are damaged.

        Args:
            group_id: The group. One that is not there has no episodes.
            position: The first one wanted.
            limit: How many at most.
        """
        number = checks.whole_number("group_id", group_id)
        first = checks.whole_number("position", position)
        most = checks.whole_number("limit", limit)
        return await self._read(
            lambda connection: groups.episodes(connection, self.id, number, first, most)
        )

    async def texts(self, ids: Iterable[int]) -> dict[int, dict[int, str]]:
        """What episodes of groups say, by id and position, without reading their tokens.

        Episodes that were put without text are left out, as are groups that are not there.

        Args:
            ids: Ids of the groups.
        """
        wanted = checks.ids("ids", ids)
        return await self._read(
            lambda connection: groups.texts(connection, self.id, wanted), end=end_in(BULK_SECONDS)
        )

    async def _fetch(self, ids: Sequence[int]) -> Decoded:
        end = end_in(BULK_SECONDS)
        stored = await self._read(
            lambda connection: groups.fetch(self._database.backend, connection, self.id, ids),
            end=end,
        )
        return await self._decoded(stored, end)

    async def count(
        self,
        *,
        tasks: str | Iterable[str] | None = None,
        statuses: str | Iterable[str] | None = None,
        where: ColumnElement[bool] | None = None,
        limit: int | None = None,
    ) -> int:
        """How many groups there are: of every task and status, unless some are named.

        Args:
            tasks: Only groups of these tasks.
            statuses: Only groups of these statuses.
            where: Only groups that meet this expression over `replaydb.col`.
            limit: Count no further: where there are more, so many are read and returned.
        """
        which = self._selection(tasks, statuses, where)
        most = checks.optional(checks.whole_number, "limit", limit)
        return await self._read(
            lambda connection: groups.count(
                connection, narrowed(connection, self._row, which), most
            )
        )

    async def stats(self, *, totals: bool = True) -> BufferStats:
        """Sizes, staleness and rewards of every task and status, at one moment.

        Args:
            totals: Whether to sum over all groups. False leaves `BufferStats.totals` out, and is
                quick however many groups there are.
        """
        sums = checks.flag("totals", totals)
        return await self._read(
            lambda connection: groups.stats(connection, self.id, self.name, sums=sums)
        )

    async def prompts(
        self,
        *,
        tasks: str | Iterable[str] | None = None,
        where: ColumnElement[bool] | None = None,
    ) -> list[PromptInfo]:
        """What became of every prompt that has a `prompt_uid`: how often it was generated,
        sampled, expired, filtered, and with what rewards. Groups that were deleted do not count.
        """  # noqa: D205
        which = self._selection(tasks, None, where)
        return await self._read(
            lambda connection: lineage.prompts(connection, narrowed(connection, self._row, which))
        )

    async def cursor(self, name: str) -> Any:
        """The JSON value last written under a name by `put` or `ack`; None if there is none."""
        checks.name("name", name)
        return await self._read(lambda connection: lineage.cursor(connection, self.id, name))

    async def draws(
        self,
        *,
        step: int | None = None,
        runs: str | Iterable[str] | None = None,
        group_id: int | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> list[DrawInfo]:
        """Draws that were recorded, the newest first.

        Args:
            step: Only those for this trainer step.
            runs: Only those made by these runs.
            group_id: Only those that took this group.
            before: Only those older than this draw id: where the next page begins.
            limit: How many at most.
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
        return await self._read(lambda connection: lineage.draws(connection, self.id, **which))

    async def steps(
        self,
        *,
        runs: str | Iterable[str] | None = None,
        above: int | None = None,
        below: int | None = None,
        limit: int = 100,
    ) -> list[int]:
        """Trainer steps that draws were recorded for, ascending.

        Args:
            runs: Only those that these runs drew for.
            above: Only higher ones, the first of them.
            below: Only lower ones; without `above`, the last of them.
            limit: How many at most.
        """
        names = checks.names("runs", runs)
        which = {
            "runs": None if names is None else sorted(names),
            "above": checks.optional(checks.whole_number, "above", above),
            "below": checks.optional(checks.whole_number, "below", below),
            "limit": checks.whole_number("limit", limit),
        }
        return await self._read(lambda connection: lineage.steps(connection, self.id, **which))

    async def redraw(self, draw_id: int) -> Batch:
        """The very batch of an earlier draw again; nothing is counted.

        Raises:
            UnknownDrawError: The draw is not recorded.
            PayloadGoneError: Groups of it were deleted, or replaced, or only their scalars are
                left. `error.batch` holds the others.
            CorruptPayloadError: Stored bytes of some groups are damaged. `error.batch` holds the
                others.
        """
        number = checks.whole_number("draw_id", draw_id)

        def work(connection: Connection) -> tuple[DrawInfo, Stored]:
            record = lineage.find_draw(connection, self.id, number)
            if record is None:
                raise UnknownDrawError(number)
            return record, groups.fetch(
                self._database.backend, connection, self.id, record.group_ids
            )

        end = end_in(BULK_SECONDS)
        record, stored = await self._read(work, end=end)
        found = await self._decoded(stored, end)
        replaced = [
            group_id
            for group_id, times in zip(record.group_ids, record.times_replaced, strict=True)
            if group_id in found.groups and found.groups[group_id].times_replaced != times
        ]
        sound = [
            group_id in found.groups and group_id not in replaced for group_id in record.group_ids
        ]
        whole = [found.groups[group_id] for group_id in compress(record.group_ids, sound)]
        for group, staleness in zip(whole, compress(record.staleness, sound), strict=True):
            group.staleness = staleness
        probabilities, weights = np.array(record.probabilities), np.array(record.weights)
        batch = Batch(whole, probabilities[sound], weights[sound], number)
        if found.corrupt:
            raise CorruptPayloadError(reasons(found.corrupt), sorted(found.corrupt), batch)
        if not all(sound):
            gone = [group_id for group_id in record.group_ids if group_id not in batch.ids]
            raise PayloadGoneError(gone, replaced, batch)
        return batch

    async def metrics(self, *, draws: int = 100, totals: bool = True) -> dict[str, float]:
        """Numbers for a logger such as W&B or TensorBoard, at one moment.

        Generated, kept, dropped, replayed and trained data are apart; `docs/training.md` lists
        every name. What there is nothing to say about (the mean of no rewards) is left out.

        Args:
            draws: `train/` and `replay/` are about so many of the last recorded draws, and `gen/`
                about what was put since the first of them.
            totals: Whether to sum over all groups. False leaves out what only that can tell, and
                is quick however many groups there are.
        """
        sums = checks.flag("totals", totals)
        number = checks.whole_number("draws", draws, least=1)

        def work(connection: Connection) -> dict[str, float]:
            now = self._database.backend.now(connection)
            return metrics.collect(connection, self.id, self.name, number, now, sums=sums)

        return await self._read(work)
