"""What a run is told."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.groups import LARGE, MIDDLE, SMALL, Shape


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes of a run.

    Attributes:
        rows: Groups in the buffers of `scale`.
        shapes: Of the groups of `put`, `sample` and `claim`.
        megabytes: What their measurements move in a round, at least.
        most_megabytes: What they may move at most; larger ones are left out.
        file_rows: Groups in the file of `open`.
        trainers: How many processes draw at once.
        seconds: How long things run that run for a while.
        rounds: Rounds whose median counts, where a round is short.
        long_rounds: The same where it is long.
    """

    rows: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    shapes: tuple[Shape, ...] = (SMALL, MIDDLE, LARGE)
    megabytes: int = 48
    most_megabytes: int = 240
    file_rows: int = 10_000
    trainers: tuple[int, ...] = (1, 4, 16)
    seconds: float = 3.0
    rounds: int = 25
    long_rounds: int = 3

    def groups(self, shape: Shape, least: int = 1) -> int:
        """How many groups of a shape make up `megabytes`, but at least so many."""
        return max(least, 10**6 * self.megabytes // shape.num_bytes)
