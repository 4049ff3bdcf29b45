"""Equality of values and types. With `==`, 1, 1.0 and True are equal."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch


def identical(one: Any, other: Any) -> bool:
    """Whether two values are equal and of the same types, including nested values."""
    if type(one) is not type(other):
        return False
    kind = type(one)
    names = getattr(kind, "__dataclass_fields__", None) or getattr(kind, "model_fields", None)
    if names:  # a dataclass, or a model of pydantic
        return all(identical(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(identical, one, other))
    if isinstance(one, dict):
        return identical(list(one.items()), list(other.items()))
    if isinstance(one, set | frozenset):
        return one == other and {*map(type, one)} == {*map(type, other)}
    if isinstance(one, np.ndarray) and one.dtype == object:
        return one.shape == other.shape and identical(one.tolist(), other.tolist())
    if isinstance(one, np.ndarray | np.generic):
        same = (one.dtype, one.shape) == (other.dtype, other.shape)
        return same and one.tobytes() == other.tobytes()
    if isinstance(one, torch.Tensor):
        same = (one.dtype, one.shape) == (other.dtype, other.shape)
        return same and _bytes(one) == _bytes(other)
    if isinstance(one, float):  # repr does not show the bits of NaN
        return struct.pack("d", one) == struct.pack("d", other)
    return bool(one == other)


def _bytes(tensor: torch.Tensor) -> bytes:
    storage = tensor.detach().clone(memory_format=torch.contiguous_format).untyped_storage()
    return bytes(storage.tolist())
