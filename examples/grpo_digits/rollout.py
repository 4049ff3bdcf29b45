"""Rollout worker: complete prompts with the newest weights, put the groups, record their uids.

python -m examples.grpo_digits.rollout FOLDER RUN WORKER
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import replaydb as rdb
from examples.grpo_digits import checkpoint, task
from examples.grpo_digits.job import (
    GROUPS_PER_STEP,
    STEP,
    URL_VARIABLE,
    StopRequest,
    acknowledged_path,
    checkpoint_path,
)
from examples.grpo_digits.model import Policy, generate

COMPLETIONS = 8
GROUPS_PER_PUT = 16
# Enough groups to draw from, but few enough that groups are trained before they are too stale.
ENOUGH_GROUPS = 4 * GROUPS_PER_STEP


async def roll_out(folder: Path, run: str, worker: str) -> None:
    """Generate groups until a stop is requested."""
    stop = StopRequest()
    generator = torch.Generator()
    generator.seed()  # a restarted worker must not repeat its prompts
    policy = Policy()
    async with rdb.Store.open(os.environ[URL_VARIABLE], run=run) as store:
        buffer = await store.buffer(run, create=False)
        while not stop:
            if not await buffer.wait_until(
                fewer_than=ENOUGH_GROUPS, statuses="completed", timeout=1
            ):
                continue
            version = await buffer.cursor(STEP)
            try:
                checkpoint.load(checkpoint_path(folder, version), policy)
            except FileNotFoundError:
                continue  # the trainer has deleted it, and there is a newer one
            prompts = task.training_prompts(GROUPS_PER_PUT, generator)
            groups = complete(policy, version, worker, prompts, generator)
            await buffer.put(groups)
            with acknowledged_path(folder, worker).open("a") as file:
                file.writelines(f"{group.group_uid}\n" for group in groups)


def complete(
    policy: Policy,
    version: int,
    worker: str,
    prompts: Tensor,
    generator: torch.Generator,
    group_uids: Sequence[str] | None = None,
) -> list[rdb.EpisodeGroup]:
    """Sample several completions of each prompt, and compute their rewards."""
    repeated = prompts.repeat_interleave(COMPLETIONS, dim=0)
    responses, logprobs = generate(policy, repeated, generator)
    rewards = task.rewards_of(repeated, responses)
    lengths = task.lengths_of(responses)
    episodes = [
        rdb.Episode(
            prompt_ids=prompt,
            response_ids=response[:length],
            logprobs=of_response[:length],
            reward=reward,
            policy_version=version,
            text=task.to_text(response[:length]),
            finish_reason="stop" if response[length - 1] == task.SEPARATOR else "length",
        )
        for prompt, response, of_response, reward, length in zip(
            repeated, responses, logprobs, rewards.tolist(), lengths.tolist(), strict=True
        )
    ]
    return [
        rdb.EpisodeGroup(
            task.NAME,
            episodes[i * COMPLETIONS : (i + 1) * COMPLETIONS],
            prompt_uid=task.to_text(prompt),
            group_uid=group_uids[i] if group_uids else None,
            tags={"distinct_digits": len(prompt[: task.NUM_DIGITS].unique()), "worker": worker},
        )
        for i, prompt in enumerate(prompts)
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(roll_out(Path(sys.argv[1]), run=sys.argv[2], worker=sys.argv[3]))
