"""One store in a process of its own: a line of JSON in, a line of JSON out.

python -m benchmarks.peers.worker MODULE CLASS

Runs in the environment of the store, so it imports nothing but numpy and the adapter. Times are
taken here; making and checking groups is not part of them.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.groups import SHAPES, Group, check, concatenated, make_group, touch


class Worker:
    """The commands; each returns what is sent back."""

    def __init__(self, made: type) -> None:
        self._made = made
        self._adapter: Any = None
        self._rng = np.random.default_rng(0)
        self._next = 0

    def describe(self) -> dict[str, Any]:
        """What the store can do."""
        return {
            "policies": self._made.POLICIES,
            "one_store": self._made.ONE_STORE,
            "none": self._made.NONE,
            "updates": hasattr(self._made, "update_priorities"),
            "checkpoints": hasattr(self._made, "checkpoint"),
        }

    def open(self, folder: str, policy: str, capacity: int, size: str) -> float:
        """Seconds."""
        self._shape = SHAPES[size]
        made = partial(self._made, Path(folder), policy, capacity, self._shape)
        self._adapter, seconds = _timed(made)
        return seconds

    def put(self, times: int, batch: int) -> list[float]:
        """Seconds of each put of so many groups; they are numbered on and on."""
        seconds = []
        for _ in range(times):
            groups = [make_group(self._next + i, self._shape) for i in range(batch)]
            self._next += batch
            seconds.append(_timed(partial(self._adapter.put, groups))[1])
        return seconds

    def sample(self, policy: str, n: int, times: int, columns: bool) -> list[float]:
        """Seconds of each draw, until all arrays were read: as they come, or one for each field."""
        seconds = []
        for _ in range(times):
            arrays, taken = _timed(partial(self._drawn, policy, n, columns))
            seconds.append(taken)
            check(concatenated(arrays), n, self._shape, self._rng)
        return seconds

    def update(self, n: int, times: int) -> list[float]:
        """Seconds of each update, of the groups of a sample."""
        seconds = []
        for _ in range(times):
            sample = self._adapter.sample("priority", n)
            values = self._rng.gamma(2.0, 1.0, n) + 0.01
            update = partial(self._adapter.update_priorities, sample, values)
            seconds.append(_timed(update)[1])
        return seconds

    def checkpoint(self) -> float:
        """Seconds."""
        return _timed(self._adapter.checkpoint)[1]

    def count(self) -> int:
        """Groups in the store."""
        return self._adapter.count()

    def pids(self) -> list[int]:
        """What runs for the store, beside this process and its children."""
        return self._adapter.pids()

    def close(self) -> None:
        """End what runs for the store; no command, it comes at the end."""
        if self._adapter is not None:
            self._adapter.close()

    def _drawn(self, policy: str, n: int, columns: bool) -> list[Group]:
        sample = self._adapter.sample(policy, n)
        if not columns:
            arrays = self._adapter.pieces(sample)
        elif hasattr(self._adapter, "columns"):
            arrays = [self._adapter.columns(sample)]
        else:
            arrays = [concatenated(self._adapter.pieces(sample))]
        touch(arrays)
        return arrays


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def main() -> None:
    """Answer until the input ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no reply
    module, name = sys.argv[1:]
    worker = Worker(getattr(importlib.import_module(f"benchmarks.peers.adapters.{module}"), name))
    try:
        for line in sys.stdin:
            command, arguments = json.loads(line)
            print(json.dumps(getattr(worker, command)(**arguments)), file=replies)
    finally:
        worker.close()


if __name__ == "__main__":
    main()
