"""The trainer: lease groups, take a GRPO step, save the weights, ack what they were trained on."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import torch

import replaydb as rdb
from examples.grpo_digits import checkpoint, task
from examples.grpo_digits.checkpoint import Position
from examples.grpo_digits.grpo import clipped_loss, token_logprobs
from examples.grpo_digits.job import (
    BUFFER_NAME,
    GROUPS_PER_STEP,
    URL_VARIABLE,
    Job,
    Journal,
    StopRequest,
    checkpoint_path,
    journal_path,
)
from examples.grpo_digits.model import Policy, generate
from replaydb.training import advantages

LEARNING_RATE = 2e-3
WARMUP_STEPS = 20
HELD_OUT_PROMPTS = 500
#: What a trainer that was killed held goes back after so many seconds.
LEASE_SECONDS = 10.0


async def train(folder: Path) -> None:
    """Train to the end of the job, from the checkpoint if there is one."""
    job = Job.load(folder)
    stop = StopRequest()
    journal = Journal(journal_path(folder))
    async with rdb.Store.open(os.environ[URL_VARIABLE], run=job.run) as store:
        buffer = await store.buffer(BUFFER_NAME)
        trainer = Trainer(job, folder, await buffer.cursor(job.run))
        if trainer.position.step == 0:
            trainer.save()
            await buffer.put([], cursor={job.run: 0})
        ready = await buffer.count(statuses=[rdb.GroupStatus.COMPLETED])
        journal.write("started", step=trainer.position.step, groups_ready=ready)
        if trainer.position.step == 0:
            journal.write("evaluated", **trainer.evaluate())
        while trainer.position.step < job.num_steps and not stop:
            step = trainer.position.step
            async with buffer.lease(
                GROUPS_PER_STEP, rdb.Uniform(), ttl=LEASE_SECONDS, step=step, timeout=30
            ) as lease:
                reward = await asyncio.to_thread(trainer.step, lease.batch)
                # In this order no group can name a version the buffer has not heard of. Killed in
                # between, the trainer takes this step again and gives its result the same number.
                await buffer.advance_policy(trainer.position.policy_version)
                trainer.save()
                # One transaction: from here on that checkpoint counts, and this batch trained it.
                await lease.ack(cursor={job.run: trainer.position.step})
            trainer.forget(step - 1)
            journal.write("step", step=step + 1, reward=reward, staleness=lease.batch.staleness)
    journal.write("evaluated", **trainer.evaluate())


class Trainer:
    """Policy, optimizer and how far they have come."""

    def __init__(self, job: Job, folder: Path, step: int | None) -> None:
        torch.manual_seed(job.seed)
        self.policy = Policy()
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._num_steps = job.num_steps
        self._folder = folder
        if step is None:
            self.position = Position(step=0, policy_version=job.first_version)
        else:
            path = checkpoint_path(folder, step)
            self.position = checkpoint.load(path, self.policy, self.optimizer)

    def save(self) -> None:
        """Write the checkpoint: to resume from, and for the rollout workers."""
        path = checkpoint_path(self._folder, self.position.step)
        checkpoint.save(path, self.policy, self.optimizer, self.position)

    def forget(self, step: int) -> None:
        """Remove a checkpoint that nobody goes by any more."""
        checkpoint_path(self._folder, step).unlink(missing_ok=True)

    def step(self, batch: rdb.Batch) -> float:
        """One optimizer step on a batch of groups; returns their mean reward."""
        tensors = batch.padded(pad_token_id=0)
        gain = advantages.grpo(tensors.rewards, tensors.group_index)
        loss = clipped_loss(token_logprobs(self.policy, tensors.token_ids), tensors, gain)
        self.optimizer.param_groups[0]["lr"] = self._learning_rate()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        self.position = Position(self.position.step + 1, self.position.policy_version + 1)
        return tensors.rewards.mean().item()

    def evaluate(self) -> dict[str, float | str]:
        """Greedy completions of held-out prompts: their mean reward, and one to look at."""
        prompts = task.held_out_prompts(HELD_OUT_PROMPTS)
        responses, _ = generate(self.policy, prompts)
        rewards = task.rewards_of(prompts, responses)
        return {
            "reward": rewards.mean().item(),
            "share_right": (rewards == 1).float().mean().item(),
            "example": task.to_text(prompts[0]) + task.to_text(responses[0]),
        }

    def _learning_rate(self) -> float:
        step = self.position.step
        return LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * (1 - step / self._num_steps)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(train(Path(sys.argv[1])))
