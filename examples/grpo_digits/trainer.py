"""Trainer: lease groups, take a GRPO step, save the weights, ack the groups.

python -m examples.grpo_digits.trainer FOLDER RUN STEPS
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import torch

import replaydb as rdb
from examples.grpo_digits import checkpoint
from examples.grpo_digits.grpo import clipped_loss, token_logprobs
from examples.grpo_digits.job import (
    GROUPS_PER_STEP,
    STEP,
    URL_VARIABLE,
    StopRequest,
    checkpoint_path,
)
from examples.grpo_digits.model import Policy
from replaydb.training import advantages

OWNER = "trainer"
LEARNING_RATE = 2e-3
WARMUP_STEPS = 20


async def train(folder: Path, run: str, num_steps: int) -> None:
    """Train to the last step, from the valid checkpoint."""
    stop = StopRequest()
    async with rdb.Store.open(os.environ[URL_VARIABLE], run=run) as store:
        buffer = await store.buffer(run, create=False)
        for old in await buffer.leases():  # of a trainer that was killed: its step is repeated
            if old.owner == OWNER:
                await buffer.revoke(old.id, reason="the trainer was restarted")
        step = await buffer.cursor(STEP)
        policy = Policy()
        optimizer = new_optimizer(policy)
        checkpoint.load(checkpoint_path(folder, step), policy, optimizer)
        while step < num_steps and not stop:
            async with buffer.lease(
                GROUPS_PER_STEP, rdb.Uniform(), owner=OWNER, ttl=60, step=step, timeout=30
            ) as lease:
                optimizer.param_groups[0]["lr"] = learning_rate(step, num_steps)
                await asyncio.to_thread(update, policy, optimizer, lease.batch)
                # In this order no group can have a version that is newer than the buffer's. If it
                # is killed in between, the trainer repeats this step with the same version.
                await buffer.advance_policy(step + 1)
                checkpoint.save(checkpoint_path(folder, step + 1), policy, optimizer)
                # One transaction makes the checkpoint valid, and records that this batch is in it.
                await lease.ack(cursor={STEP: step + 1})
            checkpoint_path(folder, step - 1).unlink(missing_ok=True)
            step += 1


def new_optimizer(policy: Policy) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
    )


def learning_rate(step: int, num_steps: int) -> float:
    """Return the learning rate: a short warm-up, and a linear decay to 0."""
    return LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * (1 - step / num_steps)


def update(policy: Policy, optimizer: torch.optim.Optimizer, batch: rdb.Batch) -> None:
    """Take one optimizer step on a batch of groups."""
    tensors = batch.padded(pad_token_id=0)
    gain = advantages.grpo(tensors.rewards, tensors.group_index)
    loss = clipped_loss(token_logprobs(policy, tensors.token_ids), tensors, gain)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(train(Path(sys.argv[1]), run=sys.argv[2], num_steps=int(sys.argv[3])))
