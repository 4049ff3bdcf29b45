"""verl's V1 trainer, killed with its queue and its Ray: nothing is generated twice or lost.

The trainer is verl's own, on a real TransferQueue, but for what needs GPUs. Its first life is
killed in the middle; the second one is the same program, begun again, and generates only what is
missing.

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

#: The first life is killed when so many prompts are generated, in the second step since a
#: checkpoint; the second one makes so many steps.
KILLED_AT, MORE_STEPS = 14, 3


def durable(url: str, mode: str) -> list[str]:
    """All that changes: overrides of Hydra, where before there were none.

    `DurableGenerator` stands where `replaydb.integrations.verl.DurableAgentLoopManager` does with
    verl's agent loops, which need GPUs.
    """
    sampler = "DurableReplayBuffer" if mode == "sync" else "DurableReplayBufferAsync"
    return [
        "trainer.v1.sampler.custom_sampler.path=pkg://replaydb.integrations.verl",
        f"trainer.v1.sampler.custom_sampler.name={sampler}",
        f'+trainer.v1.sampler.sampler_kwargs={{url: "{url}", run: grpo, poll_interval: 0.02}}',
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=examples.verl_cpu.DurableGenerator",
        "trainer.checkpoint_callback_class=replaydb.integrations.verl.AckOnCheckpoint",
    ]


def live(url: str, mode: str, folder: Path, steps: int, limit: int = PROMPTS) -> list[int]:
    """A life of the trainer, with a Ray and a queue of its own.

    Returns:
        What the model has been trained on, in this life and up to its checkpoint in earlier ones.
    """
    ray.init(
        address="local",
        num_cpus=2,  # one for each actor of the queue
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


def kill(life: BaseProcess, url: str) -> None:
    """Kill all of it when the store has what it generated; it waits for more then."""
    with blocking.Store.open(url) as store:
        buffer = store.buffer("grpo")
        while buffer.count() < KILLED_AT:
            if not life.is_alive():
                raise RuntimeError("the trainer ended by itself")
            time.sleep(0.2)
    trainer = psutil.Process(life.pid)
    for one in (trainer, *trainer.children(recursive=True)):  # the others are its Ray and its queue
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    life.join()


def main() -> None:
    """Two lives on one store."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("sync", "colocate_async"), default="sync")
    parser.add_argument("--url", help="a store, such as postgresql://...; a file of its own if not")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        url = options.url or f"sqlite:///{folder}/grpo.db"
        # A process of its own, in which everything is imported already.
        arguments = (url, options.mode, folder, PROMPTS, KILLED_AT)
        first = multiprocessing.get_context("fork").Process(target=live, args=arguments)
        first.start()
        kill(first, url)
        [checkpoint] = (folder / "checkpoints").rglob("trained.json")
        before = generated(folder / "log")
        print(f"killed: generated {before}, trained {json.loads(checkpoint.read_text())}")
        trained = live(url, options.mode, folder, MORE_STEPS)
        after = generated(folder / "log")[len(before) :]
        print(f"went on: generated {after}, trained {trained}")


if __name__ == "__main__":
    main()
