"""GRPO in which replay takes the place of groups that teach nothing.

Every step generates groups; those whose rewards are all equal have no advantage, so stored groups
are trained on instead, the most informative ones most often.

    python -m examples.grpo_replay
"""

from __future__ import annotations

import asyncio
import tempfile

import torch

import replaydb as rdb
from examples.toy import NUM_DIGITS, Policy
from replaydb.training import advantages, importance, priorities, replace_uninformative

STEPS = 60
GROUPS_PER_STEP = 8
MAX_STALENESS = 10


async def train(url: str, steps: int = STEPS) -> tuple[float, dict[str, float]]:
    """Returns the reward that is reached, and the metrics of the buffer."""
    generator = torch.Generator().manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    async with rdb.Store.open(url, run="grpo-replay") as store:
        buffer = await store.buffer("repeat", max_staleness=MAX_STALENESS)
        for step in range(steps):
            digits = torch.randint(NUM_DIGITS, (GROUPS_PER_STEP,), generator=generator)
            fresh = [policy.complete(digit, step, generator) for digit in digits.tolist()]
            made = await replace_uninformative(
                fresh, buffer, rdb.Prioritized(), priority=priorities.reward_std, step=step
            )
            if len(made.batch):
                update(policy, optimizer, made.batch)
            await buffer.advance_policy(step + 1)
        return policy.expected_reward(), await buffer.metrics()


def update(policy: Policy, optimizer: torch.optim.Optimizer, batch: rdb.Batch) -> None:
    """One step of clipped policy gradient on fresh and replayed groups alike."""
    tensors = batch.split(pad_token_id=0)
    gain = tensors.per_token(advantages.grpo(tensors.rewards, tensors.group_index))
    logprobs = policy.logprobs(tensors.prompt_ids, tensors.response_ids)
    assert tensors.logprobs is not None
    ratio = importance.token_ratios(logprobs, tensors.logprobs, tensors.loss_mask)
    surrogate = torch.minimum(ratio * gain, importance.clipped(ratio, 0.2) * gain)
    optimizer.zero_grad()
    loss = -surrogate[tensors.loss_mask].mean()
    loss.backward()
    optimizer.step()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        reward, metrics = asyncio.run(train(f"sqlite:///{folder}/replay.db"))
    print(f"expected reward: {reward:.2f}, by chance it is {1 / NUM_DIGITS}")
    for name in ("gen/groups", "buffer/dropped", "train/groups", "replay/share"):
        print(f"{name}: {metrics[name]:g}")


if __name__ == "__main__":
    main()
