"""SkyRL's fully asynchronous trainer around a stored generator, in a process that can be killed.

Workers, staleness manager, data loader, collection of mini-batches and checkpointed uids are the
trainer's own; models and their checkpoints are left out.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import integrations.skyrl.package  # noqa: F401

# isort: split
from skyrl.train.fully_async_trainer import (
    FullyAsyncRayPPOTrainer,
    _AsyncDataloader,
    _AsyncStalenessManager,
)
from skyrl.train.generators.base import GeneratorInterface
from skyrl.train.trainer import RayPPOTrainer
from torchdata.stateful_dataloader import StatefulDataLoader

from integrations.skyrl.outputs import output
from replaydb import blocking
from replaydb.integrations.skyrl import CheckpointedGroups, StoredGenerator

PROMPTS, GROUPS_PER_STEP, MAX_STALENESS = 24, 2, 1
ZERO_VARIANCE = 6  # every sixth prompt has equal rewards


class Generator(GeneratorInterface):
    """A generator that logs its prompts."""

    def __init__(self, log: Path) -> None:
        self.log = log

    async def generate(self, input_batch: Any) -> Any:
        uid = input_batch["trajectory_ids"][0].instance_id
        await asyncio.sleep(0.01)
        say(self.log, "generated", uid)
        reward = 1.0 if int(uid) % ZERO_VARIANCE == 0 else None
        return output(random.Random(uid), [uid], reward=reward, token_rewards=False)


class Saving:
    """Checkpoints without models: a folder, and the number of the latest."""

    def save_checkpoints(self) -> str:
        trainer: Any = self
        folder = trainer.folder / f"global_step_{trainer.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        (trainer.folder / "latest").write_text(str(trainer.global_step))
        return str(folder)

    def load_checkpoints(self) -> tuple[int, str]:
        trainer: Any = self
        latest = trainer.folder / "latest"
        step = int(latest.read_text()) if latest.exists() else 0
        return step, str(trainer.folder / f"global_step_{step}")


class WithoutModels(FullyAsyncRayPPOTrainer):
    def __init__(self, folder: Path, generator: StoredGenerator) -> None:
        self.folder, self.generator = folder, generator
        self.global_step, self.epoch = 1, 0
        self.loop: Callable[[], Awaitable[None]]
        self.mini_batch_size, self.sample_full_batch = GROUPS_PER_STEP, True
        self.all_timings: dict[str, float] = {}
        self.cfg = SimpleNamespace(
            trainer=SimpleNamespace(
                algorithm=SimpleNamespace(zero_variance_filter_tol=1e-6),
            ),
            generator=SimpleNamespace(
                n_samples_per_prompt=2,
                inference_engine=SimpleNamespace(backend="vllm"),
                sampling_params=None,
            ),
            environment=SimpleNamespace(env_class="math"),
        )
        prompts = [
            {"prompt": [], "env_class": "math", "env_extras": {}, "uid": str(i)}
            for i in range(PROMPTS)
        ]
        loader = StatefulDataLoader(prompts, batch_size=1, collate_fn=list)
        self.async_train_dataloader = _AsyncDataloader(loader, GROUPS_PER_STEP)
        self._staleness_manager = _AsyncStalenessManager(4, GROUPS_PER_STEP, MAX_STALENESS)

    async def train(self) -> None:
        await self.loop()


class Trainer(CheckpointedGroups, WithoutModels):
    pass


async def train(url: str, folder: Path, log: Path, steps: int, *, die: bool) -> None:
    with blocking.Store.open(url, run="skyrl") as store:
        generator = StoredGenerator(Generator(log), store.buffer("skyrl"))
        trainer = Trainer(folder, generator)
        step, _, consumed, filtered, _ = trainer.load_checkpoints()
        if step:
            trainer.async_train_dataloader.load_state_from_checkpoint(consumed, filtered)
            trainer._staleness_manager.load_state_from_checkpoint(step + 1)
        trainer.global_step = step + 1
        trainer.loop = partial(loop, trainer, log, steps, die=die)
        await trainer.train()


async def loop(trainer: Trainer, log: Path, steps: int, *, die: bool) -> None:
    queue: asyncio.Queue[Any] = asyncio.Queue(maxsize=GROUPS_PER_STEP * (MAX_STALENESS + 1))
    workers = [asyncio.create_task(trainer._run_generate_for_a_group_loop(queue)) for _ in range(3)]
    while trainer.global_step <= steps:
        groups, _, _ = await trainer._collect_generation_mini_batch(queue, asyncio.Event())
        say(log, "trained", *(group.uid for group in groups))
        await trainer.async_train_dataloader.mark_consumed_uids([one.uid for one in groups])
        if die and trainer.global_step == steps:
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.global_step % 2 == 0:
            await asyncio.to_thread(trainer.save_checkpoints)
            say(log, "saved", trainer.global_step)
        trainer.global_step += 1
        await trainer._staleness_manager.notify_capacity_change(trainer.global_step)
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers)


def run(url: str, folder: Path, log: Path, steps: int, die: bool) -> None:
    """Run training steps; `die` is `kill -9` after the last one, before its checkpoint."""
    RayPPOTrainer.save_checkpoints = Saving.save_checkpoints
    RayPPOTrainer.load_checkpoints = Saving.load_checkpoints
    import skyrl.train.fully_async_trainer as module

    module.get_sampling_params_for_backend = lambda *_: {}
    asyncio.run(train(url, folder, log, steps, die=die))


def say(log: Path, *words: object) -> None:
    with log.open("a") as file:
        print(*words, file=file)
