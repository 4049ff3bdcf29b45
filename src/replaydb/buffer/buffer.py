"""Buffer: all that can be done with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sqlalchemy import ColumnElement

from replaydb import checks
from replaydb.batch.batch import Batch
from replaydb.buffer.lease import Lease
from replaydb.buffer.leasing import Leasing
from replaydb.buffer.loader import Collated, Loader
from replaydb.buffer.managing import Managing
from replaydb.buffer.pacing import Pacing
from replaydb.buffer.putting import Putting
from replaydb.buffer.requests import draw_request
from replaydb.buffer.sampling import Sampling
from replaydb.policies import SamplingPolicy, Uniform
from replaydb.tracing import traced


@traced
class Buffer(Putting, Sampling, Leasing, Managing, Pacing):
    """A named collection of episode groups; got from `Store.buffer`.

    Every call is one transaction: it happens whole or not at all, also when it is cancelled.
    Calls may run concurrently, in any number of tasks and processes.
    """

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
    ) -> Loader[Collated]:
        """Batches one after another, made ready while the trainer works on the one before.

        Args:
            batch_size: How many groups; or how many of each task, as for `sample`.
            policy: How groups are chosen; a batch is chosen when it is prefetched.
            prefetch: Batches to have ready at most; 0 draws only when one is asked for.
            lease: Hold the groups of each batch, see `Loader`.
            ttl: Seconds that leases last; they are extended while the event loop runs.
            collate: Called in a thread with each `Batch`; what it returns is handed out instead.
            tasks: See `sample`.
            where: See `sample`.
            max_staleness: See `sample`.
            runs: See `sample`.
            first_step: The trainer step of the first batch, for the record; they count up.
            num_steps: End after so many batches.
            timeout: Seconds to wait for each batch; None waits for ever.
            at_least: See `sample`.

        Raises:
            InvalidInputError: An argument is wrong. What `sample` raises comes with the batch.
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
        }
        draw_request(n, policy, **options)  # what every draw would refuse is refused here
        seconds = checks.seconds("timeout", timeout)

        async def draw(step: int) -> tuple[Batch, Lease | None]:
            if not leased:
                return await self.sample(n, policy, step=step, timeout=seconds, **options), None
            held = await self.lease(n, policy, ttl=ttl, step=step, timeout=seconds, **options)
            return held.batch, held

        return Loader(
            draw,
            self.redraw,
            collate,
            prefetch=checks.whole_number("prefetch", prefetch),
            first_step=checks.whole_number("first_step", first_step),
            num_steps=checks.optional(checks.whole_number, "num_steps", num_steps),
        )
