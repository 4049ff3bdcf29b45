"""Payloads that are read into reused memory."""

from __future__ import annotations

import numpy as np

from replaydb import Buffer, Episode, EpisodeGroup
from replaydb.util.memory import LEAST_BYTES

TOKENS = LEAST_BYTES // 4


def large(uid: str, mark: int) -> EpisodeGroup:
    """An episode with `mark` as every token."""
    row = Episode(
        token_ids=np.full(TOKENS, mark, np.int32),
        loss_mask=np.ones(TOKENS, np.bool_),
    )
    return EpisodeGroup("gsm8k", [row], group_uid=uid)


async def test_memory_in_use_is_not_overwritten(buffer: Buffer) -> None:
    """By a group, an array, or a tensor of it, while other draws are made."""
    await buffer.put([large(str(mark), mark) for mark in range(1, 7)])
    groups, arrays, tensors = [], [], []
    for _ in range(4):
        batch = await buffer.sample(6)
        marks = [int(group.group_uid) for group in batch]
        groups.append((marks[0], batch[0]))
        arrays.append((marks[1], batch[1].episodes[0].token_ids[5:]))
        tensors.append((marks[2], batch[2:3].padded(0).token_ids))
        del batch
        assert all((group.episodes[0].token_ids == mark).all() for mark, group in groups)
        assert all((array == mark).all() for mark, array in arrays)
        assert all((tensor == mark).all() for mark, tensor in tensors)


async def test_several_parts_and_small_groups_among_large(buffer: Buffer) -> None:
    await buffer.put(EpisodeGroup("gsm8k", [Episode(token_ids=[7], loss_mask=[True])]))
    await buffer.open_group("gsm8k", "incremental", 2, prompt_ids=[1, 2])
    for mark in (3, 4):
        await buffer.add_episode("incremental", large("other", mark).episodes[0])
    small, incremental = sorted(await buffer.sample(2), key=lambda group: group.num_episodes)
    assert small.episodes[0].token_ids.tolist() == [7]
    assert [set(row.token_ids.tolist()) for row in incremental.episodes] == [{3}, {4}]
