"""Batches to tensors, beside a copy of the same bytes: `python -m benchmarks.tensors`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from replaydb.batch import Batch
from replaydb.codec.flat import flatten
from replaydb.episodes import Episode, GroupStatus
from replaydb.stored import StoredGroup

NUM_GROUPS, NUM_EPISODES, NUM_TOKENS = 64, 8, 4096
ROUNDS = 15


def main() -> None:
    for title, ragged in (("equal lengths", False), ("ragged lengths", True)):
        Console().print(measure(title, make_batch(ragged=ragged)))


def make_batch(*, ragged: bool) -> Batch:
    """A batch as a draw returns it, decoded."""
    rng = np.random.default_rng(0)
    groups = [stored_group(i, rng, ragged=ragged) for i in range(NUM_GROUPS)]
    return Batch(groups, np.ones(NUM_GROUPS), np.ones(NUM_GROUPS))


def stored_group(i: int, rng: np.random.Generator, *, ragged: bool) -> StoredGroup:
    episodes = []
    for _ in range(NUM_EPISODES):
        length = int(rng.integers(NUM_TOKENS // 4, NUM_TOKENS + 1)) if ragged else NUM_TOKENS
        prompt = length // 4
        episodes.append(
            Episode(
                prompt_ids=rng.integers(0, 150_000, prompt, np.int32),
                response_ids=rng.integers(0, 150_000, length - prompt, np.int32),
                logprobs=rng.standard_normal(length - prompt).astype(np.float32),
                reward=float(rng.random()),
                policy_version=3,
            )
        )
    facts: dict[str, Any] = defaultdict(lambda: None)
    facts |= {"id": i, "task_name": "t", "group_uid": str(i), "priority": 1.0, "tags": {}}
    facts |= {"group_status": GroupStatus.COMPLETED, "times_sampled": 1, "attempts": 0}
    return StoredGroup(facts, {0: flatten(episodes)})


def measure(title: str, batch: Batch) -> Table:
    made: dict[str, Callable[[], Any]] = {
        "padded": lambda: batch.padded(0),
        "padded, pad token 9": lambda: batch.padded(9),
        "padded left": lambda: batch.padded(0, side="left"),
        "split": lambda: batch.split(0),
        "packed, next fit": lambda: batch.packed(4 * NUM_TOKENS),
        "packed, first fit": lambda: batch.packed(4 * NUM_TOKENS, fit="first"),
    }
    table = Table(title=f"64 groups x 8 episodes x 4,096 tokens, {title}", title_justify="left")
    for column in ("what", "MB", "ms", "copy, ms", "times a copy"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, make in made.items():
        memory = [one.numpy() for one in token_tensors(make())]
        size = sum(array.nbytes for array in memory)
        copied = seconds(partial(copy_all, memory))
        taken = seconds(make)
        table.add_row(
            name,
            f"{size / 1e6:.1f}",
            f"{1e3 * taken:.1f}",
            f"{1e3 * copied:.1f}",
            f"{taken / copied:.2f}",
        )
    return table


def copy_all(arrays: list[Any]) -> None:
    for array in arrays:
        array.copy()


def token_tensors(made: Any) -> list[Any]:
    """Everything of a batch that has a value for each place."""
    names = [name for kind in type(made).__mro__ for name in getattr(kind, "__slots__", ())]
    values = [getattr(made, name) for name in names]
    return [value for value in values if getattr(value, "ndim", 0) == 2]


def seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
