"""GRPO in which replay takes the place of groups that teach nothing.

Every step generates groups and stores them. Those whose rewards are all equal have no advantage:
stored groups are trained on in their place, the most informative ones most often.

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
    """Returns the reward that is reached, and the metrics of the buffer."""
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
            if replaced.batch:  # in the beginning there may be nothing to replay
                grpo_step(policy, optimizer, replaced.batch)
                await buffer.advance_policy(policy.version)
        return policy.expected_reward(), await buffer.metrics()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        reward, metrics = asyncio.run(train(f"sqlite:///{folder}/replay.db"))
    print(f"expected reward: {reward:.2f}, by chance it is {1 / NUM_DIGITS}")
    for name in ("gen/groups", "buffer/dropped", "train/groups", "replay/share"):
        print(f"{name}: {metrics[name]:g}")


if __name__ == "__main__":
    main()
