"""Rollout worker: complete the next prompts of its share of the dataset with the newest weights.

A put stores the groups and the position after their prompts in one transaction. A worker that is
killed before it generates the same prompts again, and one that is killed after it continues with
the next ones. The uid of a group is the number of its prompt, so that even two workers that were
started with one number by mistake could not store a prompt twice.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException

import replaydb as rdb
from examples.async_grpo import checkpoint
from examples.async_grpo.job import (
    BUFFER,
    DATASET,
    GROUPS_PER_PUT,
    GROUPS_PER_STEP,
    MAX_STALENESS,
    NUM_WORKERS,
    RUN,
    STEP,
    parser_of,
    phase,
    worker_cursor,
)
from examples.grpo_digits.model import Policy
from examples.grpo_digits.rollout import complete


async def work(url: str, folder: Path, worker: int) -> None:
    """Generate until the process is killed."""
    policy, generator = Policy(), torch.Generator()
    generator.seed()
    async with rdb.Store.open(url, run=RUN, migrate=True) as store:
        buffer = await store.buffer(BUFFER, max_staleness=MAX_STALENESS)
        position = await buffer.cursor(worker_cursor(worker)) or 0
        while True:
            # Each worker waits until there is room for a put of every worker, because admission
            # reserves nothing. So no group becomes too stale to be trained on.
            await buffer.admission(
                GROUPS_PER_STEP, max_staleness=MAX_STALENESS, n=NUM_WORKERS * GROUPS_PER_PUT
            )
            version = await load_newest(buffer, folder, policy)
            numbers = [worker + NUM_WORKERS * n for n in range(position, position + GROUPS_PER_PUT)]
            prompts = DATASET[[number % len(DATASET) for number in numbers]]
            uids = [str(number) for number in numbers]
            groups = complete(policy, version, str(worker), prompts, generator, group_uids=uids)
            phase(folder, f"generated-{position}-worker{worker}")
            await buffer.put(groups, cursor={worker_cursor(worker): position + GROUPS_PER_PUT})
            phase(folder, f"put-{position}-worker{worker}")
            position += GROUPS_PER_PUT


async def load_newest(buffer: rdb.Buffer, folder: Path, policy: Policy) -> int:
    """Load the valid checkpoint. Return its policy version."""
    while True:
        step: int | None = await buffer.cursor(STEP)
        try:
            if step is not None:
                checkpoint.load_weights(folder, step, policy)
                return step
        except CheckpointException:
            if await buffer.cursor(STEP) == step:
                raise
        else:  # the trainer has not started yet
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = parser_of("examples.async_grpo.worker")
    parser.add_argument("--worker", type=int, choices=range(NUM_WORKERS), required=True)
    options = parser.parse_args()
    asyncio.run(work(options.url, options.folder, options.worker))
