"""TRL: the replay buffer of its experimental `GRPOWithReplayBufferTrainer`, last in 1.13."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from trl.experimental.grpo_with_replay_buffer.grpo_with_replay_buffer_trainer import ReplayBuffer

from benchmarks.peers.groups import Group, Shape


class Adapter:
    """A heap of references that keeps the best scores: no copies, in-process, not durable.

    Draws are proportional to the score, without replacement if there are enough groups. Equal
    scores cannot be compared (the heap would compare tensors), so all scores here are different.
    """

    POLICIES = ("priority",)
    ONE_STORE = True
    NONE: ClassVar[dict[str, str]] = {
        "uniform": "none: by score only",
        "order": "none: by score only",
        "update_priorities": "none: a score is given once",
        "checkpoint": "none",
    }

    def __init__(self, folder: Path, policy: str, capacity: int, shape: Shape) -> None:
        self._buffer = ReplayBuffer(capacity)
        self._rng = np.random.default_rng(0)

    def put(self, groups: Sequence[Group]) -> None:
        tensors = [
            {name: torch.from_numpy(array) for name, array in group.items()} for group in groups
        ]
        self._buffer.add((1.0 + self._rng.random(len(groups))).tolist(), tensors)

    def sample(self, policy: str, n: int) -> list[dict[str, torch.Tensor]]:
        return self._buffer.sample(n)

    def parts(self, sample: list[dict[str, torch.Tensor]]) -> list[Group]:
        return [{name: one.numpy() for name, one in group.items()} for group in sample]

    def count(self) -> int:
        return len(self._buffer.heap)

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        self._buffer.heap.clear()
