"""Trajectories with branches in a store: what it counts, and what a trainer gets."""

from __future__ import annotations

from typing import Any

import pytest

from replaydb import Buffer, Episode, EpisodeGroup, Store, Turn
from replaydb.operations import verify


def trajectory() -> Episode:
    """Return main, sub, sub, a lost retry, main, and another branch of the first turn."""
    main = Turn(prompt_ids=[1, 2], response_ids=[10], uid="a", agent="main", state="disk/1")
    sub = Turn(prompt_ids=[3], response_ids=[11], agent="search")
    lost = Turn(parent=main, new_ids=[4], response_ids=[12], is_discarded=True)
    turns = [
        main,
        sub,
        Turn(parent=sub, new_ids=[5], response_ids=[13], agent="search"),
        lost,
        Turn(parent=lost, new_ids=[6], response_ids=[14]),
        Turn(parent=main, new_ids=[4], response_ids=[15, 16], agent="main"),
        Turn(parent=main, new_ids=[7], response_ids=[17], loss_mask=[False]),
    ]
    return Episode(turns=turns, reward=1.0)


ROWS = [[1, 2, 10, 4, 15, 16], [3, 11, 5, 13], [1, 2, 10, 7, 17]]


@pytest.mark.parametrize("adds", [False, True])
async def test_counts_are_those_of_the_rows(buffer: Buffer, store: Store, adds: bool) -> None:
    other = Episode(prompt_ids=[1, 2], response_ids=[9], reward=0.0)
    if adds:
        await buffer.open_group("t", "g", 2)
        await buffer.add_episode("g", trajectory())
        await buffer.add_episode("g", other)
    else:
        await buffer.put(EpisodeGroup("t", [trajectory(), other], group_uid="g"))
    [info] = await buffer.find()
    first, second = await buffer.episodes(info.id)
    counts = [(one.num_tokens, one.longest_row, one.num_loss_tokens, one.num_turns)
              for one in (first, second)]  # fmt: skip
    assert counts == [(15, 6, 5, 7), (3, 3, 1, 1)]
    assert (info.num_tokens, info.num_episodes, info.reward_mean) == (18, 2, 0.5)
    report = await verify(store)
    assert report.is_sound, report.problems
    batch = await buffer.sample(1)
    found = batch[0].episodes[0]
    assert found == trajectory()
    made: Any = batch.padded(0)
    ids = [row[:size].tolist() for row, size in zip(made.token_ids, made.lengths, strict=True)]
    assert ids == [*ROWS, [1, 2, 9]]
    assert made.episode_index.tolist() == [0, 0, 0, 1]
    assert made.token_ids[made.loss_mask].tolist() == [10, 15, 16, 11, 13, 9]
