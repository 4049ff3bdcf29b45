"""Placement of several sequences in each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from replaydb.domain import checks

Fit = Literal["next", "first"]


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Runs of tokens in all rows: sequences, and the padding at the end of each row.

    Attributes:
        shape: Number of rows, and tokens in each.
        bounds: Start of each run in the flattened rows, and their total: int64 [S + 1].
        members: Index of the sequence of each run, -1 for padding, int64 [S].
    """

    shape: tuple[int, int]
    bounds: NDArray[np.int64]
    members: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        rows: NDArray[np.int64],
        width: int,
    ) -> Self:
        """Return the runs of sequences that begin at `starts`."""
        members = np.flatnonzero(lengths)
        num_rows = int(rows[members].max(initial=-1)) + 1
        used = np.bincount(rows[members], lengths[members], num_rows).astype(np.int64)
        edges = np.arange(num_rows) * width
        open_rows = used < width
        begins = np.concatenate([starts[members], (edges + used)[open_rows]])
        owners = np.concatenate([members, np.full(np.count_nonzero(open_rows), -1)])
        order = np.argsort(begins)
        bounds = np.append(begins[order], num_rows * width)
        return cls((num_rows, width), bounds, owners[order])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of elements of each run, int64 [S]."""
        return np.diff(self.bounds)

    def spread(self, values: NDArray[Any]) -> NDArray[Any]:
        """Repeat values of runs [S] for each of their elements [R, C]."""
        return np.repeat(values, self.lengths).reshape(self.shape)

    def positions(self) -> NDArray[np.int64]:
        """Return the position of each element in its sequence, 0 in padding, int64 [R, C]."""
        positions = np.arange(self.bounds[-1])
        positions -= np.repeat(self.bounds[:-1], self.lengths)
        positions *= np.repeat(self.members >= 0, self.lengths)
        return positions.reshape(self.shape)


def plan(
    lengths: NDArray[np.int64], width: int, fit: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the row of each sequence, and where in the row it begins."""
    plan = _next_fit if checks.one_of("fit", fit, get_args(Fit)) == "next" else _first_fit
    return plan(lengths, width)


def _next_fit(
    lengths: NDArray[np.int64], width: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Close a row at the first sequence that does not fit. Takes one step per row."""
    ends = np.cumsum(lengths)
    firsts, used = [], 0
    while (first := int(np.searchsorted(ends, used, side="right"))) < len(ends):
        firsts.append(first)
        beyond = int(np.searchsorted(ends, used + width, side="right"))
        used = int(ends[beyond - 1])
    if not firsts:
        return np.zeros_like(lengths), np.zeros_like(lengths)
    rows = np.searchsorted(firsts, np.arange(len(lengths)), side="right") - 1
    rows = np.maximum(rows, 0)
    before = (ends - lengths)[np.array(firsts)]
    return rows, np.maximum(ends - lengths - before[rows], 0)


def _first_fit(
    lengths: NDArray[np.int64], width: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Place the longest sequences first, each into the first row with enough space.

    This needs at most 11/9 of the minimum number of rows (Johnson, 1973). Each sequence is placed
    in turn, because where it fits depends on those before it.
    """
    rows, begins = np.zeros_like(lengths), np.zeros_like(lengths)
    used = np.zeros(len(lengths), np.int64)
    for i in np.argsort(-lengths, kind="stable"):
        rows[i] = row = int(np.argmax(used + lengths[i] <= width))
        begins[i] = used[row]
        used[row] += lengths[i]
    # Sequences without tokens need no row of their own.
    return np.where(lengths > 0, rows, 0), np.where(lengths > 0, begins, 0)
