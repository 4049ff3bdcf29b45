"""GRPO that replaces zero-variance groups by replayed groups.

Every step generates and stores groups. Groups whose rewards are all equal have zero advantage. They
are replaced by stored groups, sampled in proportion to their reward standard deviation.

    python -m examples.grpo_replay
"""

from __future__ import annotations

import asyncio
import tempfile

import torch

import replaydb as rdb
from examples.toy import NUM_DIGITS, Policy, grpo_step
from replaydb.training import priorities, replace_uninformative

STEPS = 60
GROUPS_PER_STEP = 8
MAX_STALENESS = 10


async def train(url: str, steps: int = STEPS) -> tuple[float, dict[str, float]]:
    """Train. Return the expected reward after training, and the metrics of the buffer."""
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    async with rdb.Store.open(url, run="grpo-replay") as store:
        buffer = await store.buffer("repeat", max_staleness=MAX_STALENESS)
        for step in range(steps):
            digits = torch.randint(NUM_DIGITS, (GROUPS_PER_STEP,), generator=generator)
            fresh = [
                rdb.EpisodeGroup("repeat", policy.complete(digit, generator), prompt_uid=str(digit))
                for digit in digits.tolist()
            ]
            replaced = await replace_uninformative(
                fresh, buffer, rdb.Prioritized(), priority=priorities.reward_std, step=step
            )
            if replaced.batch:  # at first there may be no groups to train on
                grpo_step(policy, optimizer, replaced.batch)
                await buffer.advance_policy(policy.version)
        return policy.expected_reward(), await buffer.metrics()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        reward, metrics = asyncio.run(train(f"sqlite:///{folder}/replay.db"))
    print(f"expected reward: {reward:.2f}, at random: {1 / NUM_DIGITS}")
    for name in ("gen/groups", "buffer/dropped", "train/groups", "replay/share"):
        print(f"{name}: {metrics[name]:g}")


if __name__ == "__main__":
    main()
