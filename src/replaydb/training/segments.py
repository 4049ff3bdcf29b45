"""Segment reductions (sum, min, max per group) for numpy arrays and torch tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from replaydb.domain.episodes.arrays import is_tensor, to_numpy
from replaydb.errors import InvalidInputError

# numpy and torch share the operators and methods used here, but no static type covers both.


def checked(values: Any, index: Any) -> tuple[Any, Any, int]:
    """Return values and segment indexes as arrays of one library, and the number of segments.

    Args:
        values: Numbers, [E]; tensors of another dtype than float64 become float32.
        index: Segment of each value, integers >= 0 in any order, [E].

    Raises:
        InvalidInputError: A shape is not [E], a value is not a number, or an index is negative.
    """
    if is_tensor(values):
        import torch

        values = values if values.dtype == torch.float64 else values.float()
        index = torch.as_tensor(index, device=values.device).long()
    else:
        values = to_numpy("rewards", values).astype(np.float64)
        index = to_numpy("group_index", index)
    if values.ndim != 1 or values.shape != index.shape:
        shapes = f"{list(values.shape)} and {list(index.shape)}"
        raise InvalidInputError("group_index", "the shape of rewards, one-dimensional", shapes)
    if not len(values):
        return values, index.astype(np.int64) if isinstance(index, np.ndarray) else index, 0
    if int(index.min()) < 0:
        raise InvalidInputError("group_index", "integers >= 0", int(index.min()))
    return values, index, int(index.max()) + 1


def total(values: Any, index: Any, count: int) -> Any:
    """Return the sum of each segment, [count]; 0 if it has no values."""
    if is_tensor(values):
        return values.new_zeros(count).index_add_(0, index, values)
    return np.bincount(index, values, count)


def least(values: Any, index: Any, count: int) -> Any:
    """Return the minimum of each segment, [count]; infinity if it has no values."""
    if is_tensor(values):
        return values.new_full((count,), float("inf")).scatter_reduce_(0, index, values, "amin")
    lowest = np.full(count, np.inf)
    np.minimum.at(lowest, index, values)
    return lowest


def most(values: Any, index: Any, count: int) -> Any:
    """Return the maximum of each segment, [count]; minus infinity if it has no values."""
    return -least(-values, index, count)


def where(condition: Any, chosen: Any, other: float) -> Any:
    """Return `chosen` where the condition is true, else `other`."""
    if is_tensor(condition):
        import torch

        return torch.where(condition, chosen, other)
    return np.where(condition, chosen, other)
