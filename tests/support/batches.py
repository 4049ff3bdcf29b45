"""Batches as draws return them, created without a database."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from replaydb import codec
from replaydb.batch.batch import Batch
from replaydb.batch.stored import StoredGroup
from replaydb.domain.episodes import Episode

#: Columns of a stored group that affect tensors.
ROW: dict[str, Any] = defaultdict(lambda: None) | {
    "id": 100, "task_name": "task", "group_uid": "100", "tags": {}, "group_status": "completed",
    "priority": 1.0, "times_sampled": 1, "attempts": 0,
}  # fmt: skip


def batch_of(groups: Sequence[Sequence[Episode]], weights: Sequence[float] | None = None) -> Batch:
    """Return a batch of stored groups with the ids 100, 101, ..."""
    stored = [stored_group(episodes, 100 + i) for i, episodes in enumerate(groups)]
    return Batch(stored, weights=weights)


def stored_group(episodes: Sequence[Episode], group_id: int = 100) -> StoredGroup:
    """Return a stored group with the episodes as they are read in format 2."""
    [core, *columns] = codec.encode(episodes)
    found = codec.decode([bytes(part.data) for part in (core, *columns)])
    row = ROW | {"id": group_id, "group_uid": str(group_id)}
    return StoredGroup(row, dict(enumerate(found.episodes)), found.context)


def episode(prompt: list[int], response: list[int], **fields: Any) -> Episode:
    """Return an episode with logprobs -0.1, -0.2, ... on the response, unless others are given."""
    logprobs = [-0.1 * (i + 1) for i in range(len(response))]
    given: dict[str, Any] = {"prompt_ids": prompt, "response_ids": response}
    return Episode(**given | {"logprobs": logprobs} | fields)


@st.composite
def ragged_episode(draw: st.DrawFn) -> Episode:
    """Generate an episode of any length, also 0, with or without logprobs, versions and extras."""
    length = draw(st.integers(0, 7))
    tokens = draw(st.lists(st.integers(1, 2**31 - 1), min_size=length, max_size=length))
    return Episode(
        token_ids=tokens,
        loss_mask=draw(st.lists(st.booleans(), min_size=length, max_size=length)),
        logprobs=draw(
            st.none() | st.lists(st.floats(-9, 0, width=32), min_size=length, max_size=length)
        ),
        reward=draw(st.none() | st.floats(-1, 1, width=32)),
        advantage=draw(st.none() | st.floats(-1, 1, width=32)),
        policy_version=draw(
            st.none()
            | st.integers(0, 9)
            | st.lists(st.integers(0, 9), min_size=length, max_size=length)
        ),
        token_extras=draw(
            st.just({}) | st.just({"values": np.arange(2.0 * length).reshape(length, 2)})
        ),
        extras=draw(st.just({}) | st.just({"state": np.array([1, 2, 3], np.int16)})),
    )


ragged_groups = st.lists(st.lists(ragged_episode(), max_size=4), max_size=4)
