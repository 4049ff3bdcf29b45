"""Upper bound of performance: references in a Python list."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from benchmarks.peers.groups import Group, Shape

Sample = list[int]


class Adapter:
    """Keeps references to the arrays: no copies, no checks, in-process, not durable."""

    POLICIES = ("uniform", "priority", "order")
    ONE_STORE = True
    NONE: ClassVar[dict[str, str]] = {"checkpoint": "none: a list has no checkpoints"}

    def __init__(self, folder: Path, policy: str, capacity: int, shape: Shape) -> None:
        self._groups: list[Group] = []
        self._priorities = np.ones(capacity)
        self._rng = np.random.default_rng(0)

    def put(self, groups: Sequence[Group]) -> None:
        self._groups.extend(groups)

    def sample(self, policy: str, n: int) -> Sample:
        count = len(self._groups)
        if policy == "order":
            return list(range(n))
        if policy == "uniform":
            return self._rng.choice(count, n, replace=False).tolist()
        weights = self._priorities[:count]
        return self._rng.choice(count, n, p=weights / weights.sum()).tolist()

    def parts(self, sample: Sample) -> list[Group]:
        return [self._groups[i] for i in sample]

    def update_priorities(self, sample: Sample, values: np.ndarray) -> None:
        self._priorities[sample] = values

    def count(self) -> int:
        return len(self._groups)

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        self._groups.clear()
