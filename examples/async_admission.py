"""Fully asynchronous training with bounded staleness: workers generate while the trainer trains.

A scheduler opens only as many groups as can be trained before they are too stale
(`Buffer.admission`). Workers claim groups and add episodes. If a worker dies, another worker claims
its groups. The trainer leases every group once, oldest first, and acks it after its step.

    python -m examples.async_admission
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile

import torch

import replaydb as rdb
from examples.toy import COMPLETIONS, NUM_DIGITS, Policy, grpo_step

STEPS = 25
GROUPS_PER_STEP = 8
MAX_STALENESS = 2
WORKERS = 3


async def run(url: str, steps: int = STEPS) -> tuple[float, list[int | None]]:
    """Run scheduler, workers and trainer in one event loop; they could run on several machines.

    Returns:
        The expected reward after training, and the staleness of every group when it was trained.
    """
    policy = Policy()
    async with rdb.Store.open(url, run="async") as store, asyncio.TaskGroup() as tasks:
        buffer = await store.buffer("repeat")
        others = [
            tasks.create_task(schedule(buffer)),
            *(tasks.create_task(generate(buffer, policy, seed)) for seed in range(WORKERS)),
        ]
        staleness = await train(buffer, policy, steps)
        for other in others:
            other.cancel()
    return policy.expected_reward(), staleness


async def schedule(buffer: rdb.Buffer) -> None:
    """Open as many groups as are admitted. They are pending until all episodes are added."""
    generator = torch.Generator().manual_seed(0)
    for number in itertools.count():
        await buffer.admission(GROUPS_PER_STEP, max_staleness=MAX_STALENESS)
        digit = int(torch.randint(NUM_DIGITS, (), generator=generator))
        await buffer.open_group("repeat", f"group-{number}", COMPLETIONS, prompt_ids=[digit])


async def generate(buffer: rdb.Buffer, policy: Policy, seed: int) -> None:
    """Claim groups one after another. The last episode of a group completes it."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        [claim] = await buffer.claim(whole_groups=True, ttl=30)
        async with claim:
            assert claim.group.prompt_ids is not None
            episodes = policy.complete(int(claim.group.prompt_ids[0]), generator)
            for position in claim.positions:
                await claim.add_episode(episodes[position], position=position)


async def train(buffer: rdb.Buffer, policy: Policy, steps: int) -> list[int | None]:
    """Train on every group once. If a trainer dies, its leased groups go to the next trainer."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    staleness: list[int | None] = []
    for step in range(steps):
        async with buffer.lease(GROUPS_PER_STEP, ttl=30, step=step, timeout=None) as lease:
            grpo_step(policy, optimizer, lease.batch)
            await buffer.advance_policy(policy.version)
        staleness += lease.batch.staleness
    return staleness


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        reward, staleness = asyncio.run(run(f"sqlite:///{folder}/replay.db"))
    print(f"expected reward: {reward:.2f}, at random: {1 / NUM_DIGITS}")
    stalest = max(versions for versions in staleness if versions is not None)
    print(f"trained {len(staleness)} groups, the stalest {stalest} versions behind")


if __name__ == "__main__":
    main()
