"""Draws whose groups stay available (`sample`), and reads by a sampling strategy (`peek`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from sqlalchemy import ColumnElement

from replaydb.batch.batch import Batch
from replaydb.buffer.drawing import Drawing, Result, check_intact
from replaydb.buffer.requests import draw_request
from replaydb.database.repository import groups, preview
from replaydb.database.repository.draw_request import Drawn
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import BULK_SECONDS, end_in
from replaydb.database.tables.records import Stored
from replaydb.domain import checks
from replaydb.domain.policies import SamplingPolicy, Uniform
from replaydb.errors import InvalidInputError, NotEnoughGroupsError


class Sampling(Drawing):
    """Sample and peek."""

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
        fields: str | Iterable[str] | None = None,
    ) -> Batch:
        """Draw completed groups. They stay in the buffer and can be drawn again.

        Every call counts as a draw and is recorded. To read groups without drawing them, use
        `peek`. To consume each group once, use `lease`.

        Args:
            n: Number of groups, or `{task: number}`.
            policy: Sampling strategy: which groups are drawn, and in what order. Default:
                `Uniform()`, all eligible groups with the same probability.
            tasks: Name or names of the tasks to draw from. Default: all tasks. Not with a mapping
                as `n`.
            where: Condition over `replaydb.col` that groups must meet, such as `rdb.col.reward_std
                > 0`.
            max_staleness: Maximum staleness of the groups, in policy versions. It excludes groups
                whose version is unknown or not comparable. Default: only the limit of the buffer's
                settings.
            runs: Name or names of runs: draw only groups that they put. Default: all runs.
            step: Trainer step of the batch, recorded with the draw.
            timeout: Seconds to wait until enough groups are eligible. The call returns as soon as
                they are. 0 (default) is one attempt. None waits indefinitely.
            at_least: Smallest acceptable batch: draw between `at_least` and `n` groups as soon as
                `at_least` are eligible. Default: `n`. With 0 the call does not wait for groups, and
                the batch may be empty.
            fields: Name or names of the extras to read. Others are not read from the store, so the
                groups do not have them. Names that no group has are ignored; everything that is not
                an extra is always read. Default: all.

        Returns:
            The groups in the order of the draw, with probabilities, weights, staleness and the id
            of the draw. An empty batch is not recorded.

        Raises:
            NotEnoughGroupsError: Too few groups were eligible until `timeout`. Nothing was drawn.
            RateLimitedError: The rate limit blocked the draw until `timeout`.
            CorruptPayloadError: The stored bytes of some groups are damaged. These groups are now
                `failed`. `error.batch` has the others.
            InvalidInputError: An argument is invalid.
        """
        request = draw_request(n, policy, tasks, where, max_staleness, runs, at_least, step, fields)
        result = await self._draw(request, checks.seconds("timeout", timeout))
        check_intact(result.damaged, result.batch)
        return result.batch

    async def _sample_unread(
        self,
        n: int | Mapping[str, int],
        policy: SamplingPolicy,
        *,
        tasks: str | Iterable[str] | None,
        where: ColumnElement[bool] | None,
        max_staleness: int | None,
        runs: str | Iterable[str] | None,
        step: int,
        timeout: float | None,
    ) -> tuple[int | None, dict[int, int]]:
        """Draw groups as `sample` does, for ranks that read them with `_read_drawn`.

        Returns:
            The id of the draw, None if there are no groups, and the number of tokens of each group
            by id, in the order of the draw.
        """
        settings = self._row.settings
        drops = (
            settings.archived_payload != "keep"
            or settings.on_evict == "delete"
            or settings.keep_archived is not None
        )
        if settings.draw_limit is not None and drops:
            expected = "None to share a draw among ranks, because the last draw drops the payload"
            raise InvalidInputError("max_times_sampled", expected, settings.draw_limit)
        request = draw_request(n, policy, tasks, where, max_staleness, runs, None, step)
        request = replace(request, loads=False)
        result = await self._draw(request, checks.seconds("timeout", timeout))
        return result.drawn.draw_id, result.drawn.num_tokens

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
        fields: str | Iterable[str] | None = None,
    ) -> Batch:
        """Return groups that `sample` could draw, without drawing them. Writes nothing.

        Nothing is counted or recorded, no rate limit applies, and later draws are not affected. Nor
        are expired leases released, or groups removed that have outlived `time_to_live`.
        Random strategies choose independently in every call. They read the metadata of every
        eligible group, so the cost grows with the number of groups.

        Args:
            n: Number of groups, or `{task: number}`.
            policy: Sampling strategy. Default: `Uniform()`.
            tasks: Name or names of the tasks to read from. Default: all tasks. Not with a mapping
                as `n`.
            where: Condition over `replaydb.col` that groups must meet.
            max_staleness: Maximum staleness of the groups, in policy versions. It excludes groups
                whose version is unknown or not comparable. Default: only the limit of the buffer's
                settings.
            runs: Name or names of runs: return only groups that they put. Default: all runs.
            timeout: Seconds to wait until enough groups are eligible. 0 (default) is one attempt.
                None waits indefinitely.
            at_least: Return between `at_least` and `n` groups as soon as `at_least` are eligible.
                Default: `n`. 0 does not wait.
            fields: Name or names of the extras to read, see `sample`. Default: all.

        Returns:
            The groups, read in one consistent snapshot. Their `draw_id` is None.

        Raises:
            NotEnoughGroupsError: Too few groups were eligible until `timeout`.
            CorruptPayloadError: The stored bytes of some groups are damaged. `error.batch` has the
                others.
            InvalidInputError: An argument is invalid.
        """
        request = draw_request(
            n, policy, tasks, where, max_staleness, runs, at_least, fields=fields
        )
        seconds = checks.seconds("timeout", timeout)
        if not request.quotas:
            return Result.nothing().batch

        def work(session: Session) -> tuple[Drawn, Stored]:
            found = preview.peek(session, self._row, request)
            return found, groups.fetch(session, self.id, found.ids, request.fields)

        async with self._waiter(seconds, partial(self._explain, request)) as waiter:
            while True:
                try:
                    end = waiter.end or end_in(BULK_SECONDS)
                    found, stored = await self._read(
                        work, end, has_any=lambda it: bool(it[1].groups)
                    )
                    break
                except NotEnoughGroupsError as error:
                    await waiter.wait(error)
        result = Result.of(found, await self._decoded(stored, end, request.fields))
        check_intact(result.damaged, result.batch)
        return result.batch
