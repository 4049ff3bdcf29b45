"""What is timed, in rounds that all take part in."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.peers.catalog import Peer
from benchmarks.peers.findings import Finding
from benchmarks.peers.processes import WorkerProcess

BATCH, N = 50, 32
# Of each round: single puts, batches, draws of each kind.
SINGLES, BATCHES, DRAWS = 20, 2, 5
OPERATIONS = {
    "uniform": "sample uniform",
    "priority": "sample priority",
    "order": "sample order",
    "update_priorities": "update priorities",
    "memory": "memory",
}


class Contender:
    """A peer with its workers: one, or one for each policy."""

    def __init__(self, peer: Peer, python: Path, folder: Path, stack: ExitStack) -> None:
        self.name = peer.name
        self._peer = peer
        self._python = python
        self._folder = folder
        self._stack = stack
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def start(self, groups: int, rounds: int) -> None:
        """Open the stores and put so many groups into each; the first one is weighed."""
        first = self._worker()
        self._facts: dict[str, Any] = first.ask("describe")
        self._first, *others = self._facts["policies"]
        capacity = 2 * BATCH + groups + (rounds + 1) * (SINGLES + BATCHES * BATCH + DRAWS)
        self._workers = {self._first: first}
        self._memory = self._fill(self._first, groups, capacity)
        for policy in others:
            if self._facts["one_store"]:
                self._workers[policy] = first
            else:
                self._workers[policy] = self._worker()
                self._fill(policy, groups, capacity)

    def round(self, *, counts: bool) -> None:
        """Everything a few times; the first round only warms up."""
        first = self._workers[self._first]
        taken = {
            "put one": first.ask("put", times=SINGLES, batch=1),
            f"put {BATCH}": first.ask("put", times=BATCHES, batch=BATCH),
            f"sample {self._first} after a put": [
                one for _ in range(DRAWS) for one in self._put_and_sample(first)
            ],
        }
        for policy, worker in self._workers.items():
            if policy == "priority" and self._facts["updates"]:
                taken["update priorities"] = worker.ask("update", n=N, times=DRAWS)
            for columns, how in ((False, ""), (True, ", columns")):
                taken[f"sample {policy}{how}"] = worker.ask(
                    "sample", policy=policy, n=N, times=DRAWS, columns=columns
                )
        for operation, seconds in taken.items() if counts else ():
            self._seconds[operation] += seconds

    def findings(self) -> Iterator[Finding]:
        """Medians of everything, and what the store cannot do."""
        for operation, seconds in self._seconds.items():
            median = statistics.median(seconds)
            if operation.startswith("put"):
                size = 1 if operation == "put one" else BATCH
                yield Finding(self.name, operation, size / median, "groups/s")
            else:
                yield Finding(self.name, operation, 1e3 * median, "ms")
        lacks: dict[str, str] = self._facts["none"]
        for what, operation in OPERATIONS.items():
            if what in lacks:
                yield Finding(self.name, operation, None, note=lacks[what])
        if "memory" not in lacks:
            total, mapped = self._memory
            yield Finding(self.name, "memory", total / 1e6, "MB")
            yield Finding(self.name, "memory, of files", mapped / 1e6, "MB")

    def _fill(self, policy: str, groups: int, capacity: int) -> list[int]:
        """Bytes that so many groups took: all, and those of files."""
        folder = self._folder / policy
        folder.mkdir()
        worker = self._workers[policy]
        worker.open(folder, policy, capacity)
        # Used before it is weighed: what is loaded at the first use is no matter of groups.
        worker.ask("put", times=2, batch=BATCH)
        worker.ask("sample", policy=policy, n=N, times=2, columns=False)
        before = worker.memory()
        worker.ask("put", times=groups // BATCH, batch=BATCH)
        return [max(0, now - then) for now, then in zip(worker.memory(), before, strict=True)]

    def _put_and_sample(self, worker: WorkerProcess) -> list[float]:
        worker.ask("put", times=1, batch=1)
        seconds: list[float] = worker.ask("sample", policy=self._first, n=N, times=1, columns=False)
        return seconds

    def _worker(self) -> WorkerProcess:
        worker = WorkerProcess(self._peer, self._python, self._folder)
        self._stack.callback(worker.close)
        return worker
