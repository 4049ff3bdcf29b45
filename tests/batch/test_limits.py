"""Limits of memory: `replaydb.limits`."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from replaydb import (
    Batch,
    CorruptPayloadError,
    Episode,
    EpisodeGroup,
    InvalidInputError,
    Store,
    Turn,
    limits,
)
from replaydb.training import merge_turns
from support.groups import episode

REFUSED = r"^replaydb\.limits\.MAX_ARRAY_BYTES: expected at least [0-9]+, .* got 100$"


def bomb(count: int, length: int) -> EpisodeGroup:
    """Return a group of an episode with turns that share their context."""
    first = Turn(
        prompt_ids=np.arange(length),
        response_ids=[1],
        logprobs=[-0.5],
        token_extras={"x": np.ones(length + 1, np.int8)},
    )
    others = [Turn(parent=first, new_ids=[i], response_ids=[2]) for i in range(count)]
    return EpisodeGroup("t", [Episode(turns=[first, *others])])


async def test_rows_over_a_long_prefix_cost_what_is_stored(store: Store) -> None:
    """A thousand rows over a prefix of a million tokens are 8 GB of token ids."""
    buffer = await store.buffer("math")
    await buffer.put(bomb(2, 10))  # logs once how often tokens are stored
    given = bomb(1000, 10**6)
    tracemalloc.start()
    try:
        [group_id] = await buffer.put(given)
        [group] = await buffer.get([group_id])
        assert (group.num_tokens, group.num_loss_tokens) == (1000 * (10**6 + 3), 1001)
        assert tracemalloc.get_traced_memory()[1] < 25 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["token_ids", "loss_mask", "logprobs", "token_extras"])
def test_arrays_of_episodes_are_limited(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    [one] = bomb(2, 200).episodes
    getattr(one, name)
    monkeypatch.setattr(limits, "MAX_ARRAY_BYTES", 100)
    with pytest.raises(InvalidInputError, match=REFUSED):
        getattr(one, name)
    with pytest.raises(InvalidInputError, match=REFUSED):
        _ = one.turns[-1].prompt_ids


def test_tensors_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch([EpisodeGroup("t", [episode(1.0, 3) for _ in range(8)])])
    batch.padded(0)
    monkeypatch.setattr(limits, "MAX_ARRAY_BYTES", 100)
    for make in (lambda: batch.padded(0), lambda: batch.split(0)):
        with pytest.raises(InvalidInputError, match=REFUSED):
            make()
    with pytest.raises(InvalidInputError, match=REFUSED):
        batch.packed(0, max_tokens=50)


async def test_parts_are_limited(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = await store.buffer("math")
    [group_id] = await buffer.put(EpisodeGroup("t", [episode(1.0, 3)]))
    monkeypatch.setattr(limits, "MAX_PART_BYTES", 10)
    with pytest.raises(CorruptPayloadError, match=r"replaydb\.limits\.MAX_PART_BYTES is 10"):
        await buffer.get([group_id])
    refused = r"^replaydb\.limits\.MAX_PART_BYTES: expected at least [0-9]+, .* got 10$"
    with pytest.raises(InvalidInputError, match=refused):
        await buffer.put(EpisodeGroup("t", [episode(1.0, 3)]))
    monkeypatch.setattr(limits, "MAX_PART_BYTES", 1000)
    assert len(await buffer.get([group_id])) == 1


def test_rewards_of_rows_cost_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards of turns, and the common prompt, are not made for whole contexts."""
    first = Turn(prompt_ids=np.arange(10**6), response_ids=[1], reward=0.5)
    turns = [Turn(parent=first, new_ids=[i], response_ids=[2], reward=i) for i in range(300)]
    group = EpisodeGroup("t", [Episode(turns=[first, one]) for one in turns])
    tracemalloc.start()
    try:
        rows = [row.episode for one in group.episodes for row in merge_turns(one)[0]]
        assert len(rows) == 300
        assert group.prompt_ids is not None
        monkeypatch.setattr(limits, "MAX_ARRAY_BYTES", 2**26)
        for make in (Batch([group]).padded, Batch([group]).split):
            with pytest.raises(InvalidInputError, match=r"^replaydb\.limits\.MAX_ARRAY_BYTES"):
                make(0)
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()
    assert rows[3].token_extras["token_rewards"][[10**6 - 1, 10**6, -1]].tolist() == [0.0, 0.5, 3.0]
