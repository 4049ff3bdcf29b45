"""Options of a benchmark run."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.groups import LARGE, MIDDLE, SMALL, Shape


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes of a run.

    Attributes:
        rows: Numbers of groups in the buffers of `scale`, `advance` and `viewers`, and the smallest
            and largest of `growth`.
        shapes: Shapes of the groups of `put`, `sample`, `claim`, `packs`, `files`, `memory`, and of
            `fleet` and `shards`, which use the first two.
        megabytes: Minimum amount of data that a round of these moves.
        most_megabytes: Maximum amount; cases that would move more are skipped.
        file_rows: Number of groups in the file of `open`.
        trainers: Numbers of processes that draw concurrently.
        sharers: Numbers of processes that share a task, and at the end twice the largest.
        tasks: Numbers of tasks of the buffers of `tasks`.
        seconds: Duration of measurements over a period of time.
        rounds: Number of rounds, if a round is short.
        long_rounds: Number of rounds, if a round is long.
    """

    rows: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    shapes: tuple[Shape, ...] = (SMALL, MIDDLE, LARGE)
    megabytes: int = 48
    most_megabytes: int = 240
    file_rows: int = 10_000
    trainers: tuple[int, ...] = (1, 4, 16)
    sharers: tuple[int, ...] = (2, 8, 32)
    tasks: tuple[int, ...] = (40, 250, 4000)
    seconds: float = 3.0
    rounds: int = 25
    long_rounds: int = 3

    def groups(self, shape: Shape, least: int = 1) -> int:
        """Return how many groups of a shape make up `megabytes`, but at least `least`."""
        return max(least, 10**6 * self.megabytes // shape.num_bytes)
