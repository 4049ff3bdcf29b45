"""Fully asynchronous training: workers generate while the trainer trains, bounded by staleness.

`Buffer.admission` lets workers start only as many groups as can be trained before they are too
stale. The trainer leases every group once, in the order of arrival, and acks it after its step;
after a crash nothing is lost and nothing is trained twice.

    python -m examples.async_admission
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field

import torch

import replaydb as rdb
from examples.grpo_replay import update
from examples.toy import COMPLETIONS, NUM_DIGITS, Policy

STEPS = 25
GROUPS_PER_STEP = 8
MAX_STALENESS = 2
WORKERS = 3


@dataclass
class Outcome:
    """What was reached, and how stale each group was when it was trained."""

    reward: float = 0.0
    staleness: list[int | None] = field(default_factory=list)


async def train(url: str, steps: int = STEPS) -> Outcome:
    """Run workers and the trainer in one event loop; they might as well be on many machines."""
    policy, outcome = Policy(), Outcome()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    async with rdb.Store.open(url, run="async") as store:
        buffer = await store.buffer("repeat")
        starting = asyncio.Lock()
        workers = [
            asyncio.create_task(generate(buffer, policy, starting, seed)) for seed in range(WORKERS)
        ]
        try:
            async with buffer.loader(
                GROUPS_PER_STEP, rdb.Fifo(), lease=True, ttl=30, prefetch=1, num_steps=steps
            ) as loader:
                async for batch in loader:
                    version = buffer.policy_version
                    outcome.staleness += [
                        version - group.min_policy_version
                        for group in batch
                        if group.min_policy_version is not None
                    ]
                    update(policy, optimizer, batch)
                    await buffer.advance_policy(version + 1)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    outcome.reward = policy.expected_reward()
    return outcome


async def generate(buffer: rdb.Buffer, policy: Policy, starting: asyncio.Lock, seed: int) -> None:
    """Generate until cancelled; episodes are stored as they come, in any order."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(10**9):
        uid = f"{seed}-{number}"
        async with starting:  # what was admitted counts from `open_group` on
            await buffer.admission(GROUPS_PER_STEP, max_staleness=MAX_STALENESS)
            await buffer.open_group("repeat", uid, COMPLETIONS)
        digit = int(torch.randint(NUM_DIGITS, (), generator=generator))
        group = policy.complete(digit, buffer.policy_version, generator)
        await asyncio.gather(
            *(
                buffer.add_episode(uid, episode, position=position)
                for position, episode in enumerate(group.episodes)
            )
        )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        outcome = asyncio.run(train(f"sqlite:///{folder}/replay.db"))
    print(f"expected reward: {outcome.reward:.2f}, by chance it is {1 / NUM_DIGITS}")
    stalest = max(one for one in outcome.staleness if one is not None)
    print(f"trained {len(outcome.staleness)} groups, the stalest {stalest} versions old")


if __name__ == "__main__":
    main()
