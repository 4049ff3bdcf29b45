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
from replaydb.database.records import Decoded, Stored, decoded
from replaydb.database.repository import groups, lineage, metrics
from replaydb.database.transactions import BULK_SECONDS, end_in
from replaydb.errors import (
    CorruptPayloadError,
    PayloadGoneError,
    UnknownDrawError,
    UnknownGroupError,
)
from replaydb.results import BufferStats, DrawInfo, PromptInfo


class Inspecting(BufferCore):
    """What is stored, and what became of it."""

    async def get(self, ids: Iterable[int]) -> list[StoredGroup]:
        """Read groups of any status, in the order asked for.

        Raises:
            UnknownGroupError: Some are not in the buffer.
            PayloadGoneError: Of some only the scalars are left.
            CorruptPayloadError: Stored bytes of some are damaged.
        """
        wanted = checks.ids("ids", ids)
        decoded = await self._fetch(wanted)
        known = decoded.groups.keys() | decoded.corrupt.keys() | decoded.gone
        if missing := [one for one in wanted if one not in known]:
            raise UnknownGroupError(missing)
        if decoded.corrupt:
            raise CorruptPayloadError(reasons(decoded.corrupt), sorted(decoded.corrupt))
        if decoded.gone:
            raise PayloadGoneError(sorted(decoded.gone))
        return [decoded.groups[one] for one in wanted]

    async def _fetch(self, ids: Sequence[int]) -> Decoded:
        return await decoded(
            await self._database.read(
                lambda connection: groups.fetch(connection, self.id, ids), end=end_in(BULK_SECONDS)
            )
        )

    async def count(
        self,
        *,
        tasks: str | Iterable[str] | None = None,
        statuses: str | Iterable[str] | None = None,
        where: ColumnElement[bool] | None = None,
    ) -> int:
        """How many groups there are: of every task and status, unless some are named."""
        condition = self._selection(None, tasks, statuses, where)
        return await self._database.read(lambda connection: groups.count(connection, condition))

    async def stats(self) -> BufferStats:
        """Sizes, staleness and rewards of every task and status, at one moment."""
        return await self._database.read(
            lambda connection: groups.stats(connection, self.id, self.name)
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
        condition = self._selection(None, tasks, None, where)
        return await self._database.read(lambda connection: lineage.prompts(connection, condition))

    async def cursor(self, name: str) -> Any:
        """The JSON value last written under a name by `put` or `ack`; None if there is none."""
        checks.name("name", name)
        return await self._database.read(
            lambda connection: lineage.cursor(connection, self.id, name)
        )

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
        return await self._database.read(
            lambda connection: lineage.draws(connection, self.id, **which)
        )

    async def redraw(self, draw_id: int) -> Batch:
        """The very batch of an earlier draw again; nothing is counted.

        Raises:
            UnknownDrawError: There is no record of it.
            PayloadGoneError: Groups of it were deleted, or replaced, or only their scalars are
                left. `error.batch` holds the others; so for the next.
            CorruptPayloadError: Stored bytes are damaged.
        """
        number = checks.whole_number("draw_id", draw_id)

        def work(connection: Connection) -> tuple[DrawInfo, Stored]:
            record = lineage.find_draw(connection, self.id, number)
            if record is None:
                raise UnknownDrawError(number)
            return record, groups.fetch(connection, self.id, record.group_ids)

        record, stored = await self._database.read(work, end=end_in(BULK_SECONDS))
        found = await decoded(stored)
        replaced = [
            one
            for one, times in zip(record.group_ids, record.times_replaced, strict=True)
            if one in found.groups and found.groups[one].times_replaced != times
        ]
        sound = [one in found.groups and one not in replaced for one in record.group_ids]
        whole = [found.groups[one] for one in compress(record.group_ids, sound)]
        for group, staleness in zip(whole, compress(record.staleness, sound), strict=True):
            group.staleness = staleness
        probabilities, weights = np.array(record.probabilities), np.array(record.weights)
        batch = Batch(whole, probabilities[sound], weights[sound], number)
        if found.corrupt:
            raise CorruptPayloadError(reasons(found.corrupt), sorted(found.corrupt), batch)
        if not all(sound):
            gone = [one for one in record.group_ids if one not in batch.ids]
            raise PayloadGoneError(gone, replaced, batch)
        return batch

    async def metrics(self, *, draws: int = 100) -> dict[str, float]:
        """Numbers for a logger such as W&B or TensorBoard, at one moment.

        Generated, kept, dropped, replayed and trained data are apart; `docs/training.md` lists
        every name. What there is nothing to say about (the mean of no rewards) is left out.

        Args:
            draws: `train/` and `replay/` are about so many of the last recorded draws, and `gen/`
                about what was put since the first of them.
        """
        number = checks.whole_number("draws", draws, least=1)

        def work(connection: Connection) -> dict[str, float]:
            now = self._database.backend.now(connection)
            return metrics.collect(connection, self.id, number, now)

        return await self._database.read(work)
