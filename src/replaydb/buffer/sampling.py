"""Drawing groups that stay: to train on, or only to look at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from sqlalchemy import ColumnElement, Connection

from replaydb import checks
from replaydb.batch.batch import Batch
from replaydb.buffer.drawing import Drawing, Result
from replaydb.buffer.requests import draw_request
from replaydb.database.records import Stored
from replaydb.database.repository import groups, looks
from replaydb.database.repository.portions import Drawn
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
        at_least: int | None = None,
    ) -> Batch:
        """Draw groups; they stay in the buffer and can be drawn again.

        Every call counts as a draw and is recorded. To look at groups without drawing them, call
        `peek`.

        Args:
            n: How many groups; or how many of each task.
            policy: How groups are chosen, and in what order.
            tasks: Only groups of these tasks (not together with quotas in `n`).
            where: Only groups that meet this expression over `replaydb.col`.
            max_staleness: Only groups at most this many policy versions behind. Groups whose
                version is unknown, or does not compare, are never among them.
            runs: Only groups that these runs put.
            step: The trainer step the batch is for, for the record.
            timeout: Seconds to wait until there are enough; None waits for ever. The call ends as
                soon as there are.
            at_least: Take fewer than `n` groups, but so many in all, rather than wait or fail; None
                means all of `n`. With 0 the call does not wait, and the batch may be empty.

        Returns:
            The groups, in the order of the draw. A batch of none is not recorded.

        Raises:
            NotEnoughGroupsError: There were not enough in time; nothing was drawn.
            RateLimitedError: The rate limit did not let so many out, in time.
            CorruptPayloadError: Stored bytes of some groups are damaged. They are marked
                `failed`; `error.batch` holds the others.
            InvalidInputError: An argument is wrong.
        """
        request = draw_request(n, policy, tasks, where, max_staleness, runs, at_least, step)
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
        at_least: int | None = None,
    ) -> Batch:
        """Look at groups that `sample` might draw, without drawing them.

        The arguments are those of `sample`, but for `step`, since nothing is written: no counter,
        no record, no new arrival. No rate limit holds it back, and no draw comes out differently
        for it. Random policies choose anew in every call, by reading the scalars of every eligible
        group.

        Returns:
            The groups as they are, at one moment; `draw_id` is None.

        Raises:
            NotEnoughGroupsError: There were not enough in time.
            CorruptPayloadError: Stored bytes of some groups are damaged; `error.batch` holds the
                others.
            InvalidInputError: An argument is wrong.
        """
        request = draw_request(n, policy, tasks, where, max_staleness, runs, at_least)

        seconds = checks.seconds("timeout", timeout)
        if not request.portions:
            return Result.nothing().batch

        def work(connection: Connection) -> tuple[Drawn, Stored]:
            found = looks.look(connection, self._row, request)
            return found, groups.stored(self._database.backend, connection, found.rows)

        async with self._patience(seconds, partial(self._explain, request)) as patience:
            while True:
                try:
                    end = patience.end or end_in(BULK_SECONDS)
                    found, stored = await self._read(
                        work, end, has_any=lambda it: bool(it[1].groups)
                    )
                    break
                except NotEnoughGroupsError as error:
                    await patience.wait(error)
        result = Result.of(found, await self._decoded(stored, end))
        result.raise_if_damaged()
        return result.batch
