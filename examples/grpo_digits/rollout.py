"""A rollout worker: complete prompts with the newest weights, put the groups, take note."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import torch

import replaydb as rdb
from examples.grpo_digits import checkpoint, task
from examples.grpo_digits.job import (
    BUFFER_NAME,
    GROUPS_PER_STEP,
    URL_VARIABLE,
    Job,
    Journal,
    StopRequest,
    acknowledged_path,
    checkpoint_path,
)
from examples.grpo_digits.model import Policy, generate

COMPLETIONS_PER_PROMPT = 8
GROUPS_PER_PUT = 16
# Enough to draw from, little enough that a group meets the trainer while it is fresh.
ENOUGH_GROUPS = 4 * GROUPS_PER_STEP


async def roll_out(folder: Path, worker: str) -> None:
    """Generate until asked to stop."""
    job = Job.load(folder)
    stop = StopRequest()
    acknowledged = Journal(acknowledged_path(folder, worker))
    # Of the process too: a worker that is started again must not repeat its prompts.
    generator = torch.Generator().manual_seed(hash((job.seed, os.getpid())))
    policy = Policy()
    async with rdb.Store.open(os.environ[URL_VARIABLE], run=job.run) as store:
        buffer = await store.buffer(BUFFER_NAME)
        while not stop:
            ready = await buffer.count(statuses=[rdb.GroupStatus.COMPLETED])
            step = await buffer.cursor(job.run)
            if ready >= ENOUGH_GROUPS or step is None:
                await asyncio.sleep(0.02)
                continue
            try:
                position = checkpoint.load_weights(checkpoint_path(folder, step), policy)
            except FileNotFoundError:
                continue  # the trainer was quicker: there is a newer one
            version = position.policy_version
            groups = complete(policy, version, GROUPS_PER_PUT, generator)
            await buffer.put(groups)
            acknowledged.write("put", group_uids=[group.group_uid for group in groups])


def complete(
    policy: Policy, policy_version: int, num_groups: int, generator: torch.Generator
) -> list[rdb.EpisodeGroup]:
    """Sample several completions of each of some new prompts, and reward them."""
    prompts = task.training_prompts(num_groups, generator)
    repeated = prompts.repeat_interleave(COMPLETIONS_PER_PROMPT, dim=0)
    responses, logprobs = generate(policy, repeated, generator)
    rewards = task.rewards_of(repeated, responses)
    by_prompt = (num_groups, COMPLETIONS_PER_PROMPT, -1)
    return [
        rdb.EpisodeGroup(
            task_name=task.NAME,
            prompt_uid=task.to_text(prompt),
            episodes=[
                rdb.Episode(
                    prompt_ids=prompt,
                    response_ids=response,
                    logprobs=logprobs_of_response,
                    reward=reward.item(),
                    policy_version=policy_version,
                )
                for response, logprobs_of_response, reward in zip(*completions, strict=True)
            ],
        )
        for prompt, *completions in zip(
            prompts,
            responses.view(by_prompt),
            logprobs.view(by_prompt),
            rewards.view(by_prompt),
            strict=True,
        )
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(roll_out(Path(sys.argv[1]), worker=sys.argv[2]))
