"""Public class `Buffer`, assembled from one mixin per kind of call, and its `loader`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement

from replaydb.batch.batch import Batch
from replaydb.buffer.claiming import Claiming
from replaydb.buffer.lease import Lease
from replaydb.buffer.leasing import Leasing
from replaydb.buffer.loader import Collated, Loader
from replaydb.buffer.managing import Managing
from replaydb.buffer.pacing import Pacing
from replaydb.buffer.requests import draw_request
from replaydb.buffer.sampling import Sampling
from replaydb.buffer.tracing import traced
from replaydb.database.repository import lineage
from replaydb.domain import checks
from replaydb.domain.policies import SamplingPolicy, Uniform
from replaydb.errors import CorruptPayloadError


@traced
class Buffer(Claiming, Sampling, Leasing, Managing, Pacing):
    """A named collection of episode groups in a store. Get it from `Store.buffer`.

    Unless its documentation says otherwise, a call is one transaction: it takes effect completely
    or not at all, also if it is cancelled. Calls may run concurrently in any number of asyncio
    tasks and processes.

    Besides the errors listed for each call, a call raises `UnknownBufferError` if the buffer was
    deleted, `StoreClosedError` after `Store.close`, and a `DatabaseError` if the database fails.
    """

    async def _read_drawn(
        self, draw_id: int, ids: list[int], fields: frozenset[str] | None
    ) -> Batch:
        """Read groups of a sample that another process has drawn: see `_sample_unread`.

        Damaged groups become `failed`, as in the process that draws.
        """
        try:
            return await self.redraw(draw_id, ids, fields=fields)
        except CorruptPayloadError as error:
            if not self._database.backend.read_only:
                record = await self._read(lambda it: lineage.find_draw(it, self.id, draw_id))
                if record is not None:
                    seen = dict(zip(record.group_ids, record.times_replaced, strict=True))
                    damaged = dict.fromkeys(error.group_ids, error.reason)
                    await self._mark_failed(damaged, seen, draw_id)
            raise

    def loader(
        self,
        batch_size: int | Mapping[str, int],
        policy: SamplingPolicy = Uniform(),
        *,
        prefetch: int = 2,
        lease: bool = False,
        ttl: float = 600.0,
        collate: Callable[[Batch], Collated] | None = None,
        tasks: str | Iterable[str] | None = None,
        where: ColumnElement[bool] | None = None,
        max_staleness: int | None = None,
        runs: str | Iterable[str] | None = None,
        first_step: int = 0,
        num_steps: int | None = None,
        timeout: float | None = None,
        at_least: int | None = None,
        fields: str | Iterable[str] | None = None,
    ) -> Loader[Collated]:
        """Return an async iterator of batches that are drawn in the background.

        `async with buffer.loader(...) as loader: async for batch in loader: ...` draws and decodes
        the next batches while the trainer works on the current one.

        Args:
            batch_size: Number of groups per batch, or `{task: number}`, as `n` of `sample`.
            policy: Sampling strategy. A batch is drawn when it is prefetched, not when you ask for
                it.
            prefetch: Maximum number of batches to prepare ahead. With 0 a batch is drawn only when
                you ask for it.
            lease: Whether to lease the groups of each batch instead of sampling them, see `Loader`.
            ttl: Duration of these leases in seconds. They are extended while the event loop runs.
            collate: Function that is called with each `Batch` in a thread, on the current CUDA
                device and stream of this call. The loader returns its result instead of the batch.
            tasks: Name or names of the tasks to draw from. Default: all tasks. Not with a mapping
                as `batch_size`.
            where: Condition over `replaydb.col` that groups must meet.
            max_staleness: Maximum staleness of the groups, in policy versions. It excludes groups
                whose version is unknown or not comparable. Default: only the limit of the buffer's
                settings.
            runs: Name or names of runs: draw only groups that they put. Default: all runs.
            first_step: Trainer step to record with the first batch. Each later batch has the next
                number.
            num_steps: Number of batches after which iteration ends. Default: no end.
            timeout: Seconds to wait for each batch. None (default) waits indefinitely.
            at_least: Smallest acceptable batch. Default: `batch_size`. 0 does not wait for groups.
            fields: Name or names of the extras to read, see `sample`. Default: all.

        Returns:
            The loader. Nothing is drawn before the first batch is asked for.

        Raises:
            InvalidInputError: An argument is invalid. The errors of `sample` and `lease` are raised
                when you ask for a batch.
        """
        count, quotas = checks.quotas("batch_size", batch_size)
        checks.whole_number("batch_size", count, least=1)
        n = count if quotas is None else quotas
        checks.optional(checks.function, "collate", collate)
        leased, ttl = checks.flag("lease", lease), checks.duration("ttl", ttl)
        options: dict[str, Any] = {
            "tasks": checks.names("tasks", tasks),
            "where": where,
            "max_staleness": max_staleness,
            "runs": checks.names("runs", runs),
            "at_least": at_least,
            "fields": checks.names("fields", fields),
        }
        draw_request(n, policy, **options)  # raise invalid arguments now, not with the first batch
        seconds = checks.seconds("timeout", timeout)

        async def draw(step: int) -> tuple[Batch, Lease | None]:
            if not leased:
                return await self.sample(n, policy, step=step, timeout=seconds, **options), None
            taken = await self.lease(n, policy, ttl=ttl, step=step, timeout=seconds, **options)
            return taken.batch, taken

        return Loader(
            draw,
            partial(self.redraw, fields=options["fields"]),
            collate,
            prefetch=checks.whole_number("prefetch", prefetch),
            first_step=checks.whole_number("first_step", first_step),
            num_steps=checks.optional(checks.whole_number, "num_steps", num_steps),
        )
