"""Reductions over groups of any size, for numpy arrays and torch tensors alike."""

from __future__ import annotations

from typing import Any

import numpy as np

from replaydb.episodes.arrays import is_tensor
from replaydb.errors import InvalidInputError

# numpy and torch agree on operators, indexing and the methods used here; no type says so.


def checked(values: Any, index: Any) -> tuple[Any, Any, int]:
    """Values and the segment of each, as arrays of one library, and how many segments there are.

    Args:
        values: Numbers [E]; half precision is widened.
        index: Segment of each, whole numbers >= 0 [E], in any order.

    Raises:
        InvalidInputError: The shapes are not one and the same [E], or an index is negative.
    """
    if is_tensor(values):
        import torch

        values = values if values.dtype == torch.float64 else values.float()
        index = torch.as_tensor(index, device=values.device).long()
    else:
        values, index = np.asarray(values, np.float64), np.asarray(index)
    if values.ndim != 1 or values.shape != index.shape:
        shapes = f"{list(values.shape)} and {list(index.shape)}"
        raise InvalidInputError("group_index", "as many as rewards, in one dimension", shapes)
    if not len(values):
        return values, index.astype(np.int64) if isinstance(index, np.ndarray) else index, 0
    if int(index.min()) < 0:
        raise InvalidInputError("group_index", "numbers >= 0", int(index.min()))
    return values, index, int(index.max()) + 1


def total(values: Any, index: Any, count: int) -> Any:
    """Sum of each segment, [count]; 0 for one without values."""
    if is_tensor(values):
        return values.new_zeros(count).index_add_(0, index, values)
    return np.bincount(index, values, count)


def least(values: Any, index: Any, count: int) -> Any:
    """Minimum of each segment, [count]; infinite for one without values."""
    if is_tensor(values):
        return values.new_full((count,), float("inf")).scatter_reduce_(0, index, values, "amin")
    lowest = np.full(count, np.inf)
    np.minimum.at(lowest, index, values)
    return lowest


def most(values: Any, index: Any, count: int) -> Any:
    """Maximum of each segment, [count]; minus infinite for one without values."""
    return -least(-values, index, count)


def where(condition: Any, chosen: Any, other: float) -> Any:
    """`chosen` where the condition holds, and else `other`."""
    if is_tensor(condition):
        import torch

        return torch.where(condition, chosen, other)
    return np.where(condition, chosen, other)
