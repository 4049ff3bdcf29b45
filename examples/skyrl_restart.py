"""Restart of a SkyRL trainer without generating completed prompts again.

A trainer requests prompts, trains on the first of them, saves a checkpoint, and exits. The next
trainer resumes: its data loader returns the prompts that are not in the checkpoint, and only the
prompt without stored completions is generated.

    pip install skyrl
    python -m examples.skyrl_restart
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from typing import Any

from skyrl.train.generators.base import (
    BatchMetadata,
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
    TrajectoryID,
)

from replaydb import blocking
from replaydb.integrations.skyrl import StoredGenerator

COMPLETIONS = 4


class Adding(GeneratorInterface):
    """A generator with random answers instead of an inference engine.

    Attributes:
        generated: The prompts that it received.
    """

    def __init__(self) -> None:
        self.generated: list[str] = []

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Return an answer for each row of the input."""
        uids = [one.instance_id for one in input_batch["trajectory_ids"] or ()]
        self.generated += dict.fromkeys(uids)
        answers = [int(uid) + random.choice((1, 2)) for uid in uids]
        return {
            "prompt_token_ids": [[int(uid)] for uid in uids],
            "response_ids": [[answer] for answer in answers],
            "rewards": [float(a == int(uid) + 1) for a, uid in zip(answers, uids, strict=True)],
            "loss_masks": [[1] for _ in uids],
            "stop_reasons": ["stop" for _ in uids],
            "rollout_logprobs": [[-0.7] for _ in uids],
            "rollout_metrics": {},
        }


def batch(uids: list[str], step: int) -> Any:
    """Return the input that SkyRL's trainer passes to its generator: a row for each answer."""
    ids = [TrajectoryID(uid, repetition) for uid in uids for repetition in range(COMPLETIONS)]
    return {
        "prompts": [[{"role": "user", "content": f"{one.instance_id} + 1 ="}] for one in ids],
        "env_classes": ["adding"] * len(ids),
        "env_extras": [{} for _ in ids],
        "sampling_params": {},
        "trajectory_ids": ids,
        "batch_metadata": BatchMetadata(global_step=step, training_phase="train"),
    }


def run_trainer(url: str, uids: list[str], *, trains: list[str]) -> list[str]:
    """Run a trainer process: it requests prompts, and saves some of them in a checkpoint.

    Args:
        url: URL of the store.
        uids: The prompts to request.
        trains: The prompts that the checkpoint contains.

    Returns:
        The prompts that were generated.
    """
    with blocking.Store.open(url, run="skyrl") as store:
        inner = Adding()
        generator = StoredGenerator(inner, store.buffer("rollouts"))
        asyncio.run(generator.generate(batch(uids, step=1)))
        generator.settle(consumed=trains)  # `CheckpointedGroups` calls it at each checkpoint
        return inner.generated


def main() -> None:
    """Run two trainers, one after the other, on the same store."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/rollouts.db"
        print("generated", run_trainer(url, ["1", "2", "3"], trains=["1"]))
        print("generated", run_trainer(url, ["2", "3", "4"], trains=["2", "3", "4"]))


if __name__ == "__main__":
    main()
