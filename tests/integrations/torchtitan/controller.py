"""The loops of torchtitan's controller around the work buffer, in a process that can be killed.

The data loop counts from 0, as the controller's does at every start. The sample builder and the
batcher are torchtitan's own. The log has `generated ID` before a group is finalized, and `trained
ID...` once slots are free.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import integrations.torchtitan.package  # noqa: F401

# isort: split
from torchtitan.experiments.rl.components.batcher import Batcher
from torchtitan.experiments.rl.components.training_sample_builder import TrainingSampleBuilder
from torchtitan.experiments.rl.components.work_buffer import RolloutGroupWork

from integrations.torchtitan.rollouts import Sample, rollout_group
from replaydb.integrations.torchtitan import RolloutGroupWorkBuffer

GROUPS_PER_STEP = 2
UNTRAINABLE = 5  # every fifth group has equal rewards


async def data_loop(buffer: RolloutGroupWorkBuffer, last: int) -> None:
    for group_id in range(last):
        if not await buffer.wait_for_slot():
            return
        sample = Sample(question=f"question {group_id}")
        await buffer.add_work(RolloutGroupWork(group_id=group_id, sample=sample))


async def rollout_loop(buffer: RolloutGroupWorkBuffer, log: Path) -> None:
    while (work := await buffer.claim_next()) is not None:
        assert work.sample == Sample(question=f"question {work.group_id}")
        await asyncio.sleep(0.01)
        group = rollout_group(work.group_id)
        if work.group_id % UNTRAINABLE == 0:
            group.rollouts = [replace(one, reward=1.0) for one in group.rollouts]
        say(log, "generated", work.group_id)
        await buffer.finalize_work(group)


async def train(buffer: RolloutGroupWorkBuffer, log: Path, steps: int, *, die: bool) -> None:
    builder = TrainingSampleBuilder.Config().build()
    batcher = Batcher.Config().build(
        num_prompts_per_train_step=GROUPS_PER_STEP, dp_degree=1, pad_id=0
    )
    for step in range(steps):
        batch, ids = None, []
        while batch is None:
            group = await buffer.take_finalized()
            assert group is not None
            built = builder.build_from_group(rollout_group=group)
            if built.training_samples:
                ids.append(group.group_id)
            else:
                await buffer.release_active_groups(1, reason="untrainable_group")
            batch = batcher.add_training_samples(training_sample_group=built)
        if die and step == steps - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        await buffer.release_active_groups(GROUPS_PER_STEP, reason="trained")
        say(log, "trained", *ids)


async def main(url: str, log: Path, last: int, steps: int, *, die: bool) -> None:
    config = RolloutGroupWorkBuffer.Config(url=url, sample_type=Sample, ttl=600.0)
    buffer = config.build(max_active_rollout_groups=8, window_size=3)
    async with asyncio.TaskGroup() as loops:
        loops.create_task(data_loop(buffer, last))
        for _ in range(4):
            loops.create_task(rollout_loop(buffer, log))
        await train(buffer, log, steps, die=die)
        await buffer.close()


def control(url: str, log: Path, last: int, steps: int, die: bool) -> None:
    """Run training steps; `die` is `kill -9` in the last one, after its batch was taken."""
    asyncio.run(main(url, log, last, steps, die=die))


def claim_and_die(url: str) -> None:
    """`kill -9` with a group in flight."""

    async def claim() -> None:
        config = RolloutGroupWorkBuffer.Config(url=url, sample_type=Sample, ttl=600.0)
        buffer = config.build(max_active_rollout_groups=4)
        work = await buffer.claim_next()
        assert work is not None
        assert work.group_id == 0
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(claim())


def say(log: Path, *words: object) -> None:
    with log.open("a") as file:
        print(*words, file=file)
