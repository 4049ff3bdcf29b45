"""Drawing groups that stay: to train on, or only to look at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from sqlalchemy import ColumnElement, Connection

from replaydb import checks
from replaydb.batch.batch import Batch
from replaydb.buffer.drawing import Drawing, Result, explaining
from replaydb.buffer.requests import describe, eligible, portions
from replaydb.database.records import Stored, decoded
from replaydb.database.repository import groups, looks
from replaydb.database.repository.portions import Drawn, DrawRequest
from replaydb.database.transactions import BULK_SECONDS, end_in
from replaydb.errors import NotEnoughGroupsError
from replaydb.policies import SamplingPolicy, Uniform


class Sampling(Drawing):
    """Batches of groups that can be drawn again."""

    async def sample(
        self,
        n: int | Mapping[str, int],
        policy: SamplingPolicy = Uniform(),
        *,
        tasks: str | Iterable[str] | None = None,
        where: ColumnElement[bool] | None = None,
        max_staleness: int | None = None,
        runs: str | Iterable[str] | None = None,
        step: int | None = None,
        timeout: float | None = 0,
        allow_partial: bool = False,
    ) -> Batch:
        """Draw groups; they stay in the buffer and can be drawn again.

        Every call counts as a draw and is recorded. To look at groups without drawing them, call
        `peek`.

        Args:
            n: How many groups; or how many of each task, all or nothing.
            policy: Which ones.
            tasks: Only groups of these tasks (not together with quotas in `n`).
            where: Only groups that meet this expression over `replaydb.col`.
            max_staleness: Only groups at most this many policy versions behind. Groups whose
                version is unknown, or does not compare, are never among them.
            runs: Only groups that these runs put.
            step: The trainer step the batch is for, for the record.
            timeout: Seconds to wait until there are enough; None waits for ever.
            allow_partial: When the time is up, take what there is, unless that is nothing.

        Returns:
            The groups, in the order of the draw.

        Raises:
            NotEnoughGroupsError: There were not enough in time; nothing was drawn.
            RateLimitedError: The rate limit did not let so many out, in time.
            CorruptPayloadError: Stored bytes of some groups are damaged. They are marked
                `failed`; `error.batch` holds the others.
            InvalidInputError: An argument is wrong.
        """
        condition = eligible(where, max_staleness, runs)
        request = DrawRequest(
            portions(n, policy, tasks, condition),
            describe(policy),
            checks.flag("allow_partial", allow_partial),
            checks.optional(checks.whole_number, "step", step),
        )
        result = await self._draw(request, checks.seconds("timeout", timeout))
        result.raise_if_damaged()
        return result.batch

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

            def work(connection: Connection) -> tuple[Drawn, Stored]:
                found = looks.look(connection, self.id, wanted)
                return found, groups.stored(connection, found.rows)

            found, stored = await self._database.read(work, end=end or end_in(BULK_SECONDS))
            result = Result.of(found, await decoded(stored))
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
