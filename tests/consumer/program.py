"""A program that uses an installed replaydb, as a type checker and an interpreter see it.

`make consumer` runs it, and checks it with `mypy --strict` and `pyright` in strict mode, in an
environment with the wheel alone.
"""

from __future__ import annotations

import asyncio
import sys
from typing import assert_type

import torch

import replaydb as rdb
from replaydb import blocking, training


def group(number: int) -> rdb.EpisodeGroup:
    episodes = [
        rdb.Episode(
            prompt_ids=[1, 2],
            response_ids=[3, 4 + number],
            logprobs=[-0.5, -0.25],
            reward=reward,
            policy_version=0,
        )
        for reward in (0.0, 1.0)
    ]
    return rdb.EpisodeGroup("gsm8k", episodes, prompt_uid=f"gsm8k/{number}", tags={"level": "hard"})


async def train(url: str) -> None:
    async with rdb.Store.open(url, run="consumer") as store:
        buffer = await store.buffer("math", capacity=rdb.Capacity(groups=100), max_staleness=4)
        ids = await buffer.put([group(number) for number in range(8)], cursor={"gsm8k": 8})
        assert_type(ids, list[int])
        batch = await buffer.sample(4, rdb.Prioritized(beta=0.4), where=rdb.col.reward_mean > 0)
        assert_type(batch, rdb.Batch)
        for stored in batch:
            assert_type(stored, rdb.StoredGroup)
        assert_type(batch.padded(pad_token_id=0).token_ids, torch.Tensor)
        await buffer.update_priorities(batch.ids, [0.5] * len(batch))
        async with buffer.lease(2, rdb.Fifo(), ttl=60, step=0) as lease:
            assert_type(lease, rdb.Lease)
            assert len(lease.batch.ids) == 2
        await buffer.advance_policy(1)
        try:
            await buffer.sample(1000, timeout=0)
        except rdb.NotEnoughGroupsError as error:
            assert_type(error, rdb.NotEnoughGroupsError)
        async with buffer.loader(2, ttl=60) as loader:
            async for loaded in loader:
                assert_type(loaded, rdb.Batch)
                break


def inspect(url: str) -> None:
    with blocking.Store.open(url, read_only=True) as store:
        buffer = store.buffer("math", create=False)
        assert_type(buffer, blocking.Buffer)
        assert buffer.count() > 0
        assert_type(buffer.find(limit=2), list[rdb.GroupInfo])
        batch = buffer.peek(2)
        rewards = batch.padded(pad_token_id=0).rewards
        assert_type(training.advantages.grpo(rewards, [0, 0, 1, 1]), torch.Tensor)


if __name__ == "__main__":
    asyncio.run(train(sys.argv[1]))
    inspect(sys.argv[1])
