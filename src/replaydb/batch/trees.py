"""Placement of sequences as trees: tokens with which several sequences begin are placed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self

import numpy as np
from numpy.typing import NDArray

from replaydb import limits
from replaydb.batch.columns import Columns, TokenField
from replaydb.batch.layouts import Layout
from replaydb.domain.episodes.arrays import bits
from replaydb.domain.episodes.building import TOKEN_REWARDS
from replaydb.domain.episodes.prefixes import PrefixTree
from replaydb.domain.episodes.ragged import placed
from replaydb.domain.episodes.segments import (
    EXTRA,
    LOSS_MASK,
    TOKEN_VERSIONS,
    Segment,
    common_prefix,
)

#: An array of the dtype of logprobs.
_NUMBER = np.empty(0, np.float32)
#: Fields of tokens that belong to the first sequence which has them: they are not compared.
_OF_FIRST = {TOKEN_VERSIONS, EXTRA + TOKEN_REWARDS}


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where the own tokens of N sequences are, in a row of tokens for each group.

    A sequence has its own tokens, after those that it has from the sequence above it. Sequences are
    placed depth first, and those that leave a sequence at later tokens before others. So the tokens
    below a token, of all sequences, are consecutive.

    Attributes:
        columns: Columns with the sequences.
        above: Index of the sequence from which each sequence has its first tokens, -1 for none [N].
        shared: Number of these tokens [N].
        starts: Position of the first own token in its row [N].
        ends: Position after the tokens of the sequence and of those below it [N].
        children: The sequences below each sequence, in the order of their placement [N].
        widths: Number of tokens of each row, int64 [groups].
    """

    columns: Columns
    above: list[int]
    shared: list[int]
    starts: list[int]
    ends: list[int]
    children: list[list[int]]
    widths: NDArray[np.int64]

    @classmethod
    def of(cls, columns: Columns, fields: Sequence[TokenField], num_groups: int) -> Self:
        """Place the sequences of groups, which share tokens if these have the same values."""
        above, shared = _shared_prefixes(columns, fields)
        children: list[list[int]] = [[] for _ in above]
        for i, j in enumerate(above):
            if j >= 0:
                children[j].append(i)
        for mine in children:
            mine.sort(key=lambda i: -shared[i])
        starts, ends = [0] * len(above), [0] * len(above)
        widths = np.zeros(num_groups, np.int64)
        order: list[int] = []
        waiting = [i for i in range(len(above) - 1, -1, -1) if above[i] < 0]
        while waiting:
            i = waiting.pop()
            order.append(i)
            row = columns.group_index[i]
            starts[i] = int(widths[row])
            widths[row] += columns.lengths[i] - shared[i]
            waiting += reversed(children[i])
        for i in reversed(order):
            own = starts[i] + int(columns.lengths[i]) - shared[i]
            ends[i] = max([own, *(ends[j] for j in children[i])])
        return cls(columns, above, shared, starts, ends, children, widths)

    def layout(self, width: int) -> Layout:
        """Return the layout of the own tokens."""
        shape = len(self.widths), width
        limits.check_array(shape[0] * width)
        rows = self.columns.group_index * width
        return Layout(
            shape=shape,
            filled=np.arange(width) < self.widths[:, None],
            segments=self.columns.segments,
            begins=self.shared,
            lengths=(self.columns.lengths - self.shared).tolist(),
            targets=(rows + self.starts).tolist(),
        )

    def indices(self, shape: tuple[int, int]) -> dict[str, NDArray[np.int64]]:
        """Return the attributes of `TreeBatch` that are positions, by name."""
        positions = np.arange(shape[1])
        parents, owners = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
        exits = np.broadcast_to(positions + 1, shape).copy()
        depths = np.zeros(shape, np.int64)
        leaves = np.full(len(self.above), -1, np.int64)
        for i, row, begin, end in self._runs():
            if begin < end:
                parents[row, begin + 1 : end] = positions[begin : end - 1]
                parents[row, begin] = self._position(self.above[i], self.shared[i] - 1)
            owners[row, begin:end] = i
            depths[row, begin:end] = positions[: end - begin] + self.shared[i]
            leaves[i] = (
                end - 1 if begin < end else self._position(self.above[i], self.shared[i] - 1)
            )
            below = end
            for j in self.children[i]:
                leaves_at = begin + self.shared[j] - self.shared[i]
                exits[row, leaves_at:end] = below
                end, below = leaves_at, self.ends[j]
            exits[row, begin:end] = below
        return {
            "parents": parents,
            "enter": np.broadcast_to(positions, shape).copy(),
            "exit": exits,
            "position_ids": depths,
            "sequence_index": owners,
            "leaves": leaves,
        }

    def _runs(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield each sequence, its row, and the begin and end of its own tokens there."""
        sizes = (self.columns.lengths - self.shared).tolist()
        rows = self.columns.group_index.tolist()
        for i, (row, begin, size) in enumerate(zip(rows, self.starts, sizes, strict=True)):
            yield i, row, begin, begin + size

    def _position(self, i: int, depth: int) -> int:
        """Return the position in its row of an own token of a sequence; -1 for no sequence."""
        return -1 if i < 0 else self.starts[i] + depth - self.shared[i]


def _shared_prefixes(columns: Columns, fields: Sequence[TokenField]) -> tuple[list[int], list[int]]:
    """Return from which sequence of its group each one has its first tokens, and how many.

    That sequence has the last of these tokens itself. A sequence has its own tokens from the first
    one that is in its loss on, or has a reward.
    """
    compared = [field for field in fields if field.column not in _OF_FIRST]
    above, shared = [], []
    sequences = enumerate(columns.segments)
    for _, mine in groupby(sequences, key=lambda one: int(columns.group_index[one[0]])):
        tree = PrefixTree()
        index: dict[int, int] = {}
        for i, segment in mine:
            node, matched = tree.add(segment)
            most, other = min(matched, _first_own(segment)), -1
            while most:
                other = index[id(node.above(most).segment)]
                alike = min([most, *(_alike(columns, one, (other, i), most) for one in compared)])
                if alike == most:
                    break
                most, other = alike, -1
            above.append(other)
            shared.append(most)
            index.setdefault(id(segment), i)
    return above, shared


def _first_own(segment: Segment) -> int:
    """Return the first token of a segment that is in the loss or has a reward, or its length."""
    found = segment.length if LOSS_MASK in segment.columns else segment.prompt_length
    for name in (LOSS_MASK, EXTRA + TOKEN_REWARDS):
        for at, values in segment.pieces(name, 0, segment.length):
            own = np.flatnonzero(bits(values))  # type: ignore[arg-type]
            if len(own):
                found = min(found, at + int(own[0]))
                break
    return found


def _alike(columns: Columns, field: TokenField, sequences: tuple[int, int], most: int) -> int:
    """Return of how many of the first tokens two sequences have the same values of a field."""
    segments = [columns.segments[i] for i in sequences]
    fills = [0.0 if field.fill is None else field.fill[i] for i in sequences]
    pieces = [segment.pieces(field.column, 0, most) for segment in segments]
    if not any(pieces) and repr(fills[0]) == repr(fills[1]):  # NaN is not equal to NaN
        return most
    like = next(
        (one.columns[field.column].pieces[0][1] for one in segments if field.column in one.columns),
        _NUMBER,
    )
    one, other = (placed(own, most, like, fill) for own, fill in zip(pieces, fills, strict=True))
    return common_prefix(one, other, most)
