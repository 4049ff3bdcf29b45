"""Share of a training step that is spent waiting for batches, for the model of the demo.

The trainer of `examples.grpo_digits` computes its steps in a thread, as if on a device, on groups
of its rollout worker: 32 prompts with 8 completions of 17 tokens. Batches are drawn between steps,
or prefetched by a loader during steps.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator

import replaydb as rdb
from benchmarks.bench import Bench
from benchmarks.results import Result

STEPS = 60
STORED_GROUPS = 512


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure milliseconds of waiting and of training, and the share of waiting."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the demo does
    try:
        async with rdb.Store.open(await bench.database()) as store:
            buffer = await store.buffer("digits")
            trainer = _Trainer(max(4, min(STEPS, 3 * bench.options.rounds)))
            await buffer.put(trainer.roll_out())
            for prefetch in (0, 2):
                how = f"prefetch {prefetch}"
                bench.report(how)
                waiting, training = await trainer.train(buffer, prefetch)
                total = waiting + training
                for side, value, unit in (
                    ("waiting", 1e3 * waiting, "ms"),
                    ("training", 1e3 * training, "ms"),
                    ("total", 1e3 * total, "ms"),
                    ("waiting / total", 100 * waiting / total, "%"),
                ):
                    yield bench.result(
                        f"step, {how}: {side}", value, unit, side=side, prefetch=prefetch
                    )
    finally:
        torch.set_num_threads(threads)


class _Trainer:
    """The trainer of the demo, on groups generated with its initial policy."""

    def __init__(self, steps: int) -> None:
        from examples.grpo_digits.model import Policy
        from examples.grpo_digits.trainer import new_optimizer

        self._policy = Policy()
        self._optimizer = new_optimizer(self._policy)
        self._steps = steps

    def roll_out(self) -> list[rdb.EpisodeGroup]:
        import torch
        from examples.grpo_digits.rollout import GROUPS_PER_PUT, complete
        from examples.grpo_digits.task import training_prompts

        generator = torch.Generator().manual_seed(0)
        return [
            group
            for _ in range(STORED_GROUPS // GROUPS_PER_PUT)
            for group in complete(
                self._policy, 0, "bench", training_prompts(GROUPS_PER_PUT, generator), generator
            )
        ]

    async def train(self, buffer: rdb.Buffer, prefetch: int) -> tuple[float, float]:
        """Return the median seconds of waiting for a batch, and of the step on it."""
        from examples.grpo_digits.job import GROUPS_PER_STEP
        from examples.grpo_digits.trainer import update

        waits, steps = [], []
        async with buffer.loader(
            GROUPS_PER_STEP, prefetch=prefetch, num_steps=2 + self._steps
        ) as loader:
            start = time.perf_counter()
            async for batch in loader:
                drawn = time.perf_counter()
                await asyncio.to_thread(update, self._policy, self._optimizer, batch)
                waits.append(drawn - start)
                start = time.perf_counter()
                steps.append(start - drawn)
        return statistics.median(waits[2:]), statistics.median(steps[2:])
