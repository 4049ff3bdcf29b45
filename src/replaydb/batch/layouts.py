"""Plan of where tokens are placed in a tensor; every token-level field is scattered by it.

Tokens stay in the order in which they are stored, so a field is written with one masked scatter per
stored part. numpy copies runs of tokens, at the speed of memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from replaydb.batch.columns import Columns, TokenField
from replaydb.domain.episodes.arrays import TORCH_CODES, bits
from replaydb.util.memory import take

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the tokens of some columns are placed.

    Attributes:
        shape: Shape of the result.
        filled: Which elements hold a token, bool [*shape].
        bounds: Part i fills the elements `bounds[i]:bounds[i + 1]` of the flattened result.
        kept: Which tokens of each part are placed, bool [T]; None: all.
        indices: Index of each token of each part in the flattened result, int64; None: tokens fill
            the filled elements in order.
    """

    shape: tuple[int, int]
    filled: NDArray[np.bool_]
    bounds: Sequence[int]
    kept: Sequence[NDArray[np.bool_] | None]
    indices: Sequence[NDArray[np.int64]] | None = None

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
        result, memory = _empty(
            (*self.shape, *field.trailing), dtype or field.dtype, pinned=pinned, zero=pad == 0
        )
        if not memory.size:
            return result
        raw = _opaque(memory.reshape(-1, *field.trailing))
        filled = self.filled.reshape(-1)
        if pad != 0:
            np.copyto(raw, pad, where=~filled)
        for i, part in enumerate(field.parts):
            begin, end = self.bounds[i], self.bounds[i + 1]
            if part is None and field.absent == pad:
                continue
            values: Any = field.absent
            if part is not None:
                kept, values = self.kept[i], _opaque(bits(part))
                values = values if kept is None else values[kept]
            mask, target = filled[begin:end], raw[begin:end]
            if self.indices is not None:
                raw[self.indices[i]] = values
            elif mask.all():
                target[:] = values
            else:
                target[mask] = values
        return result


def row_layout(
    columns: Columns,
    lengths: NDArray[np.int64],
    width: int,
    *,
    left: bool,
    kept: Sequence[NDArray[np.bool_] | None] | None = None,
) -> Layout:
    """Return a layout of one row per sequence, with the tokens at its left or right end.

    Args:
        columns: Columns with the sequences.
        lengths: Number of tokens to place from each sequence, int64 [N].
        width: Width of a row, at least the longest length.
        left: Whether padding is on the left.
        kept: See `Layout`.
    """
    # 32 bits are twice as fast to compare
    offsets, ends = np.arange(width, dtype=np.int32), lengths.astype(np.int32)[:, None]
    filled = offsets >= width - ends if left else offsets < ends
    return Layout(
        shape=(len(lengths), width),
        filled=filled,
        bounds=(columns.bounds * width).tolist(),
        kept=kept if kept is not None else [None] * len(columns.parts),
    )


def _empty(
    shape: tuple[int, ...], dtype: str, *, pinned: bool, zero: bool
) -> tuple[torch.Tensor, NDArray[Any]]:
    """Return a new tensor, and its memory as a numpy array."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    if pinned:
        make = torch.zeros if zero else torch.empty
        tensor = make(shape, dtype=kind, pin_memory=True)
        return tensor, bits(tensor if dtype in _TORCH_ONLY else tensor.numpy())
    stored = _TORCH_ONLY.get(dtype, dtype)
    num_bytes = math.prod(shape) * np.dtype(stored).itemsize
    memory: NDArray[Any] = np.ndarray(shape, stored, take(num_bytes))
    if zero:
        memory.fill(0)
    return torch.from_numpy(memory).view(kind), memory


def _opaque(array: NDArray[Any]) -> NDArray[Any]:
    """View [T, ...] as [T], with all values of a token as one element."""
    if array.ndim == 1:
        return array
    count = int(np.prod(array.shape[1:]))
    rows = np.ascontiguousarray(array).reshape(len(array), count)
    return rows.view(np.dtype((np.void, count * array.dtype.itemsize)))[:, 0]


#: numpy dtype for the bits of each dtype that only torch has.
_TORCH_ONLY = {name: "int16" if name == "bfloat16" else "uint8" for name in TORCH_CODES.values()}
