"""How much of a trainer's step goes to the store, for the model of the demo.

The trainer of `examples.grpo_digits` takes its steps in a thread, as a real one would on a device,
on groups that its rollout worker made: 32 prompts of 8 completions of 17 tokens. Drawing is in
line, or a loader's that goes on while a step is taken.
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
    """Milliseconds of waiting and of training, and the share of the first."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the demo does
    try:
        async with rdb.Store.open(await bench.database()) as store:
            buffer = await store.buffer("digits")
            trainer = _Trainer(max(4, min(STEPS, 3 * bench.options.rounds)))
            await buffer.put(trainer.roll_out())
            for prefetch in (0, 2):
                how = f"loader, prefetch {prefetch}" if prefetch else "in line"
                bench.say(how)
                waiting, training = await trainer.train(buffer, prefetch)
                whole = waiting + training
                for side, value, unit in (
                    ("waiting", 1e3 * waiting, "ms"),
                    ("training", 1e3 * training, "ms"),
                    ("both", 1e3 * whole, "ms"),
                    ("the store's share", 100 * waiting / whole, "%"),
                ):
                    yield bench.result(
                        f"step, {how}: {side}", value, unit, side=side, prefetch=prefetch
                    )
    finally:
        torch.set_num_threads(threads)


class _Trainer:
    """The demo's, on groups of its own first policy."""

    def __init__(self, steps: int) -> None:
        from examples.grpo_digits.model import Policy
        from examples.grpo_digits.trainer import new_optimizer

        self._policy = Policy()
        self._optimizer = new_optimizer(self._policy)
        self._steps = steps

    def roll_out(self) -> list[rdb.EpisodeGroup]:
        import torch
        from examples.grpo_digits.rollout import GROUPS_PER_PUT, complete

        generator = torch.Generator().manual_seed(0)
        return [
            group
            for _ in range(STORED_GROUPS // GROUPS_PER_PUT)
            for group in complete(self._policy, 0, "bench", generator)
        ]

    async def train(self, buffer: rdb.Buffer, prefetch: int) -> tuple[float, float]:
        """Median seconds of waiting for a batch, and of the step on it."""
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
