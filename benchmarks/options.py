"""What a run is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes of a run.

    Attributes:
        rows: Groups in the buffers of `scale`.
        live_rows: Groups of `advance`.
        groups: Groups of 72 KB that `put`, `sample` and `loop` work with in a round.
        file_rows: Groups in the file of `open`.
        rounds: Rounds whose median counts.
    """

    rows: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    live_rows: int = 100_000
    groups: int = 500
    file_rows: int = 10_000
    rounds: int = 25
