"""Looking at groups without drawing them, and at the record of what was drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import compress

import numpy as np
from sqlalchemy import ColumnElement
from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb import checks
from replaydb.batch.batch import Batch
from replaydb.buffer.core import BufferCore
from replaydb.buffer.drawing import Result, explaining, reasons
from replaydb.buffer.requests import describe, eligible, portions
from replaydb.database.records import Decoded
from replaydb.database.repository import groups, leases, lineage, looks
from replaydb.database.repository.portions import DrawRequest
from replaydb.database.transactions import BULK_SECONDS, end_in
from replaydb.errors import (
    CorruptPayloadError,
    NotEnoughGroupsError,
    PayloadGoneError,
    UnknownDrawError,
)
from replaydb.policies import SamplingPolicy, Uniform
from replaydb.results import DrawInfo, LeaseInfo


class Looking(BufferCore):
    """Everything that reads batches, and what is known of draws, and changes nothing."""

    async def peek(
        self,
        n: int | Mapping[str, int],
        policy: SamplingPolicy = Uniform(),
        *,
        tasks: str | Iterable[str] | None = None,
        where: ColumnElement[bool] | None = None,
        max_staleness: int | None = None,
        runs: str | Iterable[str] | None = None,
        timeout: float | None = 0,
        allow_partial: bool = False,
    ) -> Batch:
        """Look at groups that `sample` might draw, without drawing them.

        Nothing is written: no counter, no record, no new arrival. No rate limit holds it back,
        and no draw comes out differently for it. Random policies choose anew in every call, by
        reading the scalars of every eligible group.

        Args:
            n: As for `sample`; so are all others.
            policy: See `sample`.
            tasks: See `sample`.
            where: See `sample`.
            max_staleness: See `sample`.
            runs: See `sample`.
            timeout: See `sample`.
            allow_partial: See `sample`.

        Returns:
            The groups as they are, at one moment; `draw_id` is None.

        Raises:
            NotEnoughGroupsError: There were not enough in time.
            CorruptPayloadError: Stored bytes of some groups are damaged; `error.batch` holds the
                others.
            InvalidInputError: An argument is wrong.
        """
        condition = eligible(where, max_staleness, runs)
        request = DrawRequest(
            portions(n, policy, tasks, condition),
            describe(policy),
            checks.flag("allow_partial", allow_partial),
        )

        async def attempt(last: bool, end: float | None) -> Batch:
            wanted = replace(request, allow_partial=last and request.allow_partial)

            async def work(connection: AsyncConnection) -> Result:
                found = await looks.look(connection, self.id, wanted)
                return Result.of(found, await groups.with_payloads(connection, found.rows))

            result = await self._database.read(work, end=end or end_in(BULK_SECONDS))
            result.raise_if_damaged()
            return result.batch

        seconds = checks.seconds("timeout", timeout)
        explain = explaining(self._database, self.id, request)
        try:
            return await self._in_time(
                attempt, seconds, unless=NotEnoughGroupsError, explain=explain
            )
        except NotEnoughGroupsError as error:
            await explain(error)
            raise

    async def leases(self) -> list[LeaseInfo]:
        """Leases that have not expired, the oldest first."""

        async def work(connection: AsyncConnection) -> list[LeaseInfo]:
            now = await self._database.backend.now(connection)
            return await leases.live(connection, self.id, now)

        return await self._database.read(work)

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

        async def work(connection: AsyncConnection) -> tuple[DrawInfo, Decoded]:
            record = await lineage.find_draw(connection, self.id, number)
            if record is None:
                raise UnknownDrawError(number)
            return record, await groups.fetch(connection, self.id, record.group_ids)

        record, decoded = await self._database.read(work, end=end_in(BULK_SECONDS))
        replaced = [
            one
            for one, times in zip(record.group_ids, record.times_replaced, strict=True)
            if one in decoded.groups and decoded.groups[one].times_replaced != times
        ]
        sound = [one in decoded.groups and one not in replaced for one in record.group_ids]
        found = [decoded.groups[one] for one in compress(record.group_ids, sound)]
        for group, staleness in zip(found, compress(record.staleness, sound), strict=True):
            group.staleness = staleness
        probabilities, weights = np.array(record.probabilities), np.array(record.weights)
        batch = Batch(found, probabilities[sound], weights[sound], number)
        if decoded.corrupt:
            raise CorruptPayloadError(reasons(decoded.corrupt), sorted(decoded.corrupt), batch)
        if not all(sound):
            gone = [one for one in record.group_ids if one not in batch.ids]
            raise PayloadGoneError(gone, replaced, batch)
        return batch
