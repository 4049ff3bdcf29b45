"""Restart of verl's V1 trainer after it was killed with its queue and Ray instance.

Nothing is generated twice or lost. The trainer is verl's own, on a real TransferQueue, except for
the parts that need GPUs. Its first run is killed between two checkpoints. The second run is the
same program, and generates only the missing groups.

    pip install verl TransferQueue cachetools fastapi uvicorn
    python -m examples.verl_restart
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import ray
import transfer_queue as tq

from examples.verl_cpu import PROMPTS, Trainer, configuration, generated, start_queue
from replaydb import blocking

#: The first run is killed after this many generated prompts, in the second step after a checkpoint.
KILLED_AT = 14
#: Number of steps of the second run.
MORE_STEPS = 3


def durable(url: str, mode: str) -> list[str]:
    """Return the Hydra overrides that make a trainer durable; nothing else changes.

    With verl's agent loops, which need GPUs, use
    `replaydb.integrations.verl.DurableAgentLoopManager` instead of `DurableGenerator`.
    """
    sampler = "DurableReplayBuffer" if mode == "sync" else "DurableReplayBufferAsync"
    return [
        "trainer.v1.sampler.custom_sampler.path=pkg://replaydb.integrations.verl",
        f"trainer.v1.sampler.custom_sampler.name={sampler}",
        f'+trainer.v1.sampler.sampler_kwargs={{url: "{url}", run: grpo, poll_interval: 0.02}}',
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=examples.verl_cpu.DurableGenerator",
        "trainer.checkpoint_callback_class=replaydb.integrations.verl.AckOnCheckpoint",
    ]


def run_trainer(url: str, mode: str, folder: Path, steps: int, limit: int = PROMPTS) -> list[int]:
    """Run the trainer with its own Ray instance and queue.

    Returns:
        Prompts that the model was trained on, in this run and in earlier ones up to the checkpoint.
    """
    ray.init(
        address="local",
        num_cpus=2,  # one per actor of the queue
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        log_to_driver=False,
        configure_logging=False,
    )
    start_queue()
    trainer = Trainer(configuration(mode, folder, durable(url, mode)), folder / "log", limit)
    for _ in range(steps):
        trainer.step()
    tq.close()
    ray.shutdown()
    return trainer.model.trained


def kill(process: BaseProcess, url: str) -> None:
    """Kill the trainer, its Ray instance and its queue when all generated groups are stored."""
    with blocking.Store.open(url) as store:
        buffer = store.buffer("grpo")
        while buffer.count() < KILLED_AT:
            if not process.is_alive():
                raise RuntimeError("the trainer exited before it was killed")
            time.sleep(0.2)
    trainer = psutil.Process(process.pid)
    for one in (trainer, *trainer.children(recursive=True)):  # children: Ray and the queue
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.join()


def main() -> None:
    """Run the trainer twice on the same store."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("sync", "colocate_async"), default="sync")
    parser.add_argument(
        "--url",
        help="URL of the store, such as postgresql://... (default: a temporary SQLite file)",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        url = options.url or f"sqlite:///{folder}/grpo.db"
        # Forked, so that everything is imported already.
        arguments = (url, options.mode, folder, PROMPTS, KILLED_AT)
        first = multiprocessing.get_context("fork").Process(target=run_trainer, args=arguments)
        first.start()
        kill(first, url)
        [checkpoint] = (folder / "checkpoints").rglob("trained.json")
        before = generated(folder / "log")
        print(f"killed: generated {before}, trained {json.loads(checkpoint.read_text())}")
        trained = run_trainer(url, options.mode, folder, MORE_STEPS)
        after = generated(folder / "log")[len(before) :]
        print(f"resumed: generated {after}, trained {trained}")


if __name__ == "__main__":
    main()
