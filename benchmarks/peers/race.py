"""Timed operations of a peer, in rounds shared by all peers."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.catalog import Peer
from benchmarks.peers.findings import Finding
from benchmarks.peers.processes import WorkerProcess


@dataclass(frozen=True, slots=True)
class Load:
    """Operations of a round on a store.

    Attributes:
        size: Size of its groups, a key of `SHAPES`.
        groups: Number of groups in the store before measurements.
        batch: Groups per batched put.
        n: Groups per sample.
        singles: Single puts per round.
        batches: Batched puts per round.
        draws: Draws of each kind per round.
        all_policies: Whether to draw by every policy and update priorities; otherwise only by the
            first policy of the store.
    """

    size: str
    groups: int
    batch: int
    n: int
    singles: int
    batches: int
    draws: int
    all_policies: bool = False

    @property
    def warm_up(self) -> int:
        """Number of batched puts before memory is measured: as many as a sample needs."""
        return max(2, -(-self.n // self.batch))

    def capacity(self, rounds: int) -> int:
        """Return the total number of groups that are put."""
        each = self.singles + self.batches * self.batch + self.draws
        return self.warm_up * self.batch + self.groups + (rounds + 1) * each


def loads(groups: int) -> dict[str, Load]:
    """Return the loads by group size. `groups` is the number of stored groups of 72 KB."""
    several = (
        Load("72 KB", groups, 50, 32, singles=20, batches=2, draws=5, all_policies=True),
        Load("590 KB", max(32, groups // 8), 10, 32, singles=4, batches=2, draws=3),
        Load("4.7 MB", max(10, groups // 32), 2, 10, singles=2, batches=2, draws=3),
    )
    return {load.size: load for load in several}


OPERATIONS = {
    "uniform": "sample uniform",
    "priority": "sample priority",
    "order": "sample order",
    "update_priorities": "update priorities",
    "memory": "memory",
}


class Contender:
    """A peer with its worker processes: one for all policies, or one for each."""

    def __init__(
        self, peer: Peer, load: Load, python: Path, folder: Path, stack: ExitStack
    ) -> None:
        self.name = peer.name
        self._load = load
        self._peer = peer
        self._python = python
        self._folder = folder
        self._stack = stack
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def start(self, rounds: int) -> None:
        """Open the stores and put groups into each. The memory of the first one is measured."""
        first = self._worker()
        self._facts: dict[str, Any] = first.ask("describe")
        self._first, *others = self._facts["policies"]
        self._workers = {self._first: first}
        self._memory = self._fill(self._first, rounds)
        for policy in others if self._load.all_policies else ():
            if self._facts["one_store"]:
                self._workers[policy] = first
            else:
                self._workers[policy] = self._worker()
                self._fill(policy, rounds)

    def round(self, *, counts: bool) -> None:
        """Run all operations; times are recorded unless this is the warm-up round."""
        first, load = self._workers[self._first], self._load
        taken = {
            "put one": first.ask("put", times=load.singles, batch=1),
            f"put {load.batch}": first.ask("put", times=load.batches, batch=load.batch),
            f"sample {self._first} after a put": [
                one for _ in range(load.draws) for one in self._put_and_sample(first)
            ],
        }
        for policy, worker in self._workers.items():
            if load.all_policies and policy == "priority" and self._facts["updates"]:
                taken["update priorities"] = worker.ask("update", n=load.n, times=load.draws)
            for columns, how in ((False, ""), (True, ", columns")):
                taken[f"sample {policy}{how}"] = worker.ask(
                    "sample", policy=policy, n=load.n, times=load.draws, columns=columns
                )
        for operation, seconds in taken.items() if counts else ():
            self._seconds[operation] += seconds

    def findings(self) -> Iterator[Finding]:
        """Yield the medians of all operations, and the operations that the store lacks."""
        for operation, seconds in self._seconds.items():
            median = statistics.median(seconds)
            if operation.startswith("put"):
                count = 1 if operation == "put one" else self._load.batch
                yield self._finding(operation, count / median, "groups/s")
            else:
                yield self._finding(operation, 1e3 * median, "ms")
        lacks: dict[str, str] = self._facts["none"]
        for what, operation in OPERATIONS.items() if self._load.all_policies else ():
            if what in lacks:
                yield Finding(self.name, operation, None, note=lacks[what], size=self._load.size)
        if "memory" not in lacks:
            total, mapped = self._memory
            yield self._finding("memory", total / 1e6, "MB")
            yield self._finding("memory, of files", mapped / 1e6, "MB")

    def _finding(self, operation: str, value: float, unit: str) -> Finding:
        return Finding(self.name, operation, value, unit, size=self._load.size)

    def _fill(self, policy: str, rounds: int) -> list[int]:
        """Put groups. Return the bytes of memory that they take: total, and mapped from files."""
        load = self._load
        folder = self._folder / policy
        folder.mkdir()
        worker = self._workers[policy]
        worker.open(folder, policy, load.capacity(rounds), load.size)
        # Used before memory is measured, since libraries loaded at the first use do not count.
        worker.ask("put", times=load.warm_up, batch=load.batch)
        worker.ask("sample", policy=policy, n=load.n, times=2, columns=False)
        before = worker.memory()
        worker.ask("put", times=load.groups // load.batch, batch=load.batch)
        return [max(0, now - then) for now, then in zip(worker.memory(), before, strict=True)]

    def _put_and_sample(self, worker: WorkerProcess) -> list[float]:
        worker.ask("put", times=1, batch=1)
        seconds: list[float] = worker.ask(
            "sample", policy=self._first, n=self._load.n, times=1, columns=False
        )
        return seconds

    def _worker(self) -> WorkerProcess:
        worker = WorkerProcess(self._peer, self._python, self._folder)
        self._stack.callback(worker.close)
        return worker
