"""Plan of where tokens are placed in a tensor; every token-level field is placed by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from replaydb import limits
from replaydb.batch.columns import Columns, TokenField
from replaydb.domain.episodes.arrays import TORCH_CODES, bits
from replaydb.domain.episodes.ragged import Ragged, from_offsets
from replaydb.domain.episodes.segments import LOSS_MASK, Segment
from replaydb.util.memory import take

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the tokens of the sequences are placed.

    Attributes:
        shape: Shape of the result.
        filled: Which elements hold a token, bool [*shape].
        segments: The tokens of each sequence [N].
        begins: Position in its sequence of the first token to place [N].
        lengths: Number of tokens to place [N].
        targets: Index of the first token in the flattened result [N].
    """

    shape: tuple[int, int]
    filled: NDArray[np.bool_]
    segments: Sequence[Segment]
    begins: Sequence[int]
    lengths: Sequence[int]
    targets: Sequence[int]

    def tensor(
        self,
        field: TokenField,
        *,
        dtype: str | None = None,
        pad: float = 0,
        pinned: bool = False,
    ) -> torch.Tensor:
        """Return a field as a tensor in this layout.

        Args:
            field: The field.
            dtype: Dtype of the result. Default: that of the field.
            pad: Value of elements without a token.
            pinned: Whether to allocate page-locked memory.

        Returns:
            [*shape, *trailing], on the CPU.
        """
        trailing: Any = field.trailing
        result, memory = _empty((*self.shape, *trailing), dtype or field.dtype, pinned=pinned)
        if not memory.size:
            return result
        memory.fill(pad)
        target = memory.reshape(-1, *trailing)
        if field.fill is not None:
            for fill, start, length in zip(field.fill, self.targets, self.lengths, strict=True):
                if fill != pad:
                    target[start : start + length] = fill
        is_torch = field.dtype in _TORCH_ONLY
        name = field.column
        rows = zip(self.segments, self.begins, self.lengths, self.targets, strict=True)
        for segment, begin, length, start in rows:
            column = segment.columns.get(name)
            if column is None:
                if name == LOSS_MASK:  # exactly the response is in the loss
                    prompt = max(segment.prompt_length - begin, 0)
                    target[start + prompt : start + length] = True
                continue
            placed: Any
            placed, _, inherits = column
            if begin or inherits or length < segment.length:
                placed = segment.pieces(name, begin, begin + length)
                start -= begin
            for at, values in placed:
                first = start + at
                target[first : first + len(values)] = bits(values) if is_torch else values
        return result

    def ragged(self, field: TokenField, *, pinned: bool) -> Ragged:
        """Return a field whose number of values varies from token to token, as tensors."""
        rows = zip(self.segments, self.begins, self.lengths, self.targets, strict=True)
        several: list[tuple[int, Any]] = [
            (start - begin + at, values)
            for segment, begin, length, start in rows
            for at, values in segment.pieces(field.column, begin, begin + length)
        ]
        offsets, ends = _empty((math.prod(self.shape) + 1,), "int64", pinned=pinned)
        ends.fill(0)
        for first, ragged in several:
            ends[first + 1 : first + 1 + len(ragged)] = ragged.counts
        ends.cumsum(out=ends)
        trailing: Any = field.trailing[1:]
        values, target = _empty((int(ends[-1]), *trailing), field.dtype, pinned=pinned)
        for first, ragged in several:
            target[ends[first] : ends[first + len(ragged)]] = bits(ragged.values)
        return from_offsets(values, offsets)


def row_layout(
    columns: Columns,
    begins: NDArray[np.int64],
    lengths: NDArray[np.int64],
    width: int,
    *,
    left: bool,
) -> Layout:
    """Return a layout of one row per sequence, with the tokens at its left or right end.

    Args:
        columns: Columns with the sequences.
        begins: Position of the first token to place from each sequence, int64 [N].
        lengths: Number of tokens to place from each sequence, int64 [N].
        width: Width of a row, at least the longest length.
        left: Whether padding is on the left.
    """
    limits.check_array(len(lengths) * width)
    # 32 bits are twice as fast to compare
    offsets, ends = np.arange(width, dtype=np.int32), lengths.astype(np.int32)[:, None]
    starts = np.arange(len(lengths)) * width
    return Layout(
        shape=(len(lengths), width),
        filled=offsets >= width - ends if left else offsets < ends,
        segments=columns.segments,
        begins=begins.tolist(),
        lengths=lengths.tolist(),
        targets=(starts + width - lengths if left else starts).tolist(),
    )


def _empty(
    shape: tuple[int, ...], dtype: str, *, pinned: bool
) -> tuple[torch.Tensor, NDArray[Any]]:
    """Return a new tensor, and its memory as a numpy array."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    stored = _TORCH_ONLY.get(dtype, dtype)
    num_bytes = math.prod(shape) * np.dtype(stored).itemsize
    limits.check_array(num_bytes)
    if pinned:
        tensor = torch.empty(shape, dtype=kind, pin_memory=True)
        return tensor, bits(tensor if dtype in _TORCH_ONLY else tensor.numpy())
    memory: NDArray[Any] = np.ndarray(shape, stored, take(num_bytes))
    return torch.from_numpy(memory).view(kind), memory


#: numpy dtype for the bits of each dtype that only torch has.
_TORCH_ONLY = {name: "int16" if name == "bfloat16" else "uint8" for name in TORCH_CODES.values()}
