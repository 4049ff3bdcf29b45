"""cpprb: a ring buffer of arrays in C++."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import cpprb
import numpy as np

from benchmarks.peers.groups import Group, Shape

Sample = dict[str, np.ndarray]


class Adapter:
    """Groups are copied into preallocated arrays of fixed shape; in-process, not durable.

    Samples are copies too; uniform ones are drawn with replacement. A checkpoint is a compressed
    file of all data without the priorities.
    """

    POLICIES = ("uniform", "priority")
    ONE_STORE = False
    NONE: ClassVar[dict[str, str]] = {
        "order": "none",
        "memory": "not measurable: the whole capacity is allocated when the buffer is created",
    }

    def __init__(self, folder: Path, policy: str, capacity: int, shape: Shape) -> None:
        self._file = folder / "transitions.npz"
        self._shapes = {name: each for name, (each, _) in shape.fields.items()}
        fields = {
            name: {"shape": (shape.episodes, *each), "dtype": dtype}
            for name, (each, dtype) in shape.fields.items()
        }
        made = cpprb.PrioritizedReplayBuffer if policy == "priority" else cpprb.ReplayBuffer
        self._buffer = made(capacity, fields)
        if self._file.exists():
            self._buffer.load_transitions(str(self._file))

    def put(self, groups: Sequence[Group]) -> None:
        if len(groups) == 1:
            self._buffer.add(**groups[0])
        else:
            stacked = {name: np.stack([group[name] for group in groups]) for name in self._shapes}
            self._buffer.add(**stacked)

    def sample(self, policy: str, n: int) -> Sample:
        return self._buffer.sample(n)

    def parts(self, sample: Sample) -> list[Group]:
        return [{name: sample[name].reshape(-1, *each) for name, each in self._shapes.items()}]

    def update_priorities(self, sample: Sample, values: np.ndarray) -> None:
        self._buffer.update_priorities(sample["indexes"], values)

    def checkpoint(self) -> None:
        self._buffer.save_transitions(str(self._file))

    def count(self) -> int:
        return self._buffer.get_stored_size()

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        self._buffer.clear()
