"""A SkyRL generator that is asked again after a restart answers from the store.

A trainer asks for prompts, trains on the first of them, saves a checkpoint, and is gone. The next
one resumes: its data loader comes to the prompts that the checkpoint does not have, and only the
one that was never generated is generated.

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
    """Where the inference engine would be, there is chance; `seen` are the prompts that it got."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """An answer for each row of the input."""
        uids = [one.instance_id for one in input_batch["trajectory_ids"] or ()]
        self.seen += dict.fromkeys(uids)
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
    """What SkyRL's trainer hands to its generator: each prompt as often as it wants answers."""
    ids = [TrajectoryID(uid, repetition) for uid in uids for repetition in range(COMPLETIONS)]
    return {
        "prompts": [[{"role": "user", "content": f"{one.instance_id} + 1 ="}] for one in ids],
        "env_classes": ["adding"] * len(ids),
        "env_extras": [{} for _ in ids],
        "sampling_params": {},
        "trajectory_ids": ids,
        "batch_metadata": BatchMetadata(global_step=step, training_phase="train"),
    }


def live(url: str, uids: list[str], *, trains: list[str]) -> list[str]:
    """A trainer's life: it asks for prompts, and its checkpoint has some of them.

    Returns:
        The prompts that were generated.
    """
    with blocking.Store.open(url, run="skyrl") as store:
        inner = Adding()
        generator = StoredGenerator(inner, store.buffer("rollouts"))
        asyncio.run(generator.generate(batch(uids, step=1)))
        generator.settle(consumed=trains)  # `CheckpointedGroups` does so with each checkpoint
        return inner.seen


def main() -> None:
    """Two lives on one store."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/rollouts.db"
        print("generated", live(url, ["1", "2", "3"], trains=["1"]))
        print("generated", live(url, ["2", "3", "4"], trains=["2", "3", "4"]))


if __name__ == "__main__":
    main()
