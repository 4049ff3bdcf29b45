"""Worker process of one store: reads commands and writes replies, each a line of JSON.

python -m benchmarks.peers.worker MODULE CLASS

It runs in the environment of the store, so it imports only numpy and the adapter. Times are
measured here, without the generation and checking of groups.
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
    """Commands of a worker; each returns its reply."""

    def __init__(self, made: type) -> None:
        self._made = made
        self._adapter: Any = None
        self._rng = np.random.default_rng(0)
        self._next = 0

    def describe(self) -> dict[str, Any]:
        """Return the capabilities of the store."""
        return {
            "policies": self._made.POLICIES,
            "one_store": self._made.ONE_STORE,
            "none": self._made.NONE,
            "updates": hasattr(self._made, "update_priorities"),
            "checkpoints": hasattr(self._made, "checkpoint"),
        }

    def open(self, folder: str, policy: str, capacity: int, size: str) -> float:
        """Open the store. Return the seconds it took."""
        self._shape = SHAPES[size]
        made = partial(self._made, Path(folder), policy, capacity, self._shape)
        self._adapter, seconds = _timed(made)
        return seconds

    def put(self, times: int, batch: int) -> list[float]:
        """Put `batch` groups `times` times. Return the seconds of each put."""
        seconds = []
        for _ in range(times):
            groups = [make_group(self._next + i, self._shape) for i in range(batch)]
            self._next += batch
            seconds.append(_timed(partial(self._adapter.put, groups))[1])
        return seconds

    def sample(self, policy: str, n: int, times: int, columns: bool) -> list[float]:
        """Draw and read all arrays, as returned or as one array per field. Return the seconds."""
        seconds = []
        for _ in range(times):
            arrays, taken = _timed(partial(self._drawn, policy, n, columns))
            seconds.append(taken)
            check(concatenated(arrays), n, self._shape, self._rng)
        return seconds

    def update(self, n: int, times: int) -> list[float]:
        """Update the priorities of the groups of a sample. Return the seconds of each update."""
        seconds = []
        for _ in range(times):
            sample = self._adapter.sample("priority", n)
            values = self._rng.gamma(2.0, 1.0, n) + 0.01
            update = partial(self._adapter.update_priorities, sample, values)
            seconds.append(_timed(update)[1])
        return seconds

    def checkpoint(self) -> float:
        """Write a checkpoint. Return the seconds it took."""
        return _timed(self._adapter.checkpoint)[1]

    def count(self) -> int:
        """Return the number of groups in the store."""
        return self._adapter.count()

    def pids(self) -> list[int]:
        """Return the processes of the store other than this one and its children."""
        return self._adapter.pids()

    def close(self) -> None:
        """Close the store, when the input ends. This is not a command."""
        if self._adapter is not None:
            self._adapter.close()

    def _drawn(self, policy: str, n: int, columns: bool) -> list[Group]:
        sample = self._adapter.sample(policy, n)
        if not columns:
            arrays = self._adapter.parts(sample)
        elif hasattr(self._adapter, "columns"):
            arrays = [self._adapter.columns(sample)]
        else:
            arrays = [concatenated(self._adapter.parts(sample))]
        touch(arrays)
        return arrays


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def main() -> None:
    """Serve commands until the input ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the output of libraries must not mix with replies
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
