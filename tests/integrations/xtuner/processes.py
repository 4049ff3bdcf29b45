"""Functions that run in other processes and use XTuner's buffer."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import integrations.xtuner.conftest
from integrations.xtuner.states import state
from replaydb.integrations.xtuner import SqlReplayBufferConfig

assert integrations.xtuner.conftest


def die_training(url: str, consume: str, folder: str, times: int) -> None:
    """Put six groups, take two and save, `times` times; be killed before the model is saved."""

    async def work() -> None:
        buffer = SqlReplayBufferConfig(url=url, consume=consume, order="fifo").build()
        for uid in range(6):
            await buffer.put([state(uid)], "math")
        for step in range(times):
            await buffer.take_batch({"math": 2})
            await buffer.save(Path(folder) / f"ckpt-step-{step}")
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(work())


def die_beginning(url: str) -> None:
    """Put four groups, take two, and be killed before the first checkpoint."""

    async def work() -> None:
        buffer = SqlReplayBufferConfig(url=url, consume="saved", order="fifo").build()
        for uid in range(4):
            await buffer.put([state(uid)], "math")
        await buffer.take_batch({"math": 2})
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(work())


def consume(url: str, times: int, took: str) -> None:
    """Take up to three groups of each task at a time, and write their uids to a file."""

    async def work() -> list[str]:
        buffer = SqlReplayBufferConfig(url=url).build()
        batches = [(await buffer.take_batch({"math": 3, "code": 3}))[0] for _ in range(times)]
        buffer._storage.close()
        return [
            str(group[0].rollout_id)
            for batch in batches
            for groups in batch.values()
            for group in groups
        ]

    Path(took).write_text(" ".join(asyncio.run(work())))
