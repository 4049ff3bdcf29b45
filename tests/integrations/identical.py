"""Equality of values and types. With `==`, 1, 1.0 and True are equal."""

from __future__ import annotations

from typing import Any

import numpy as np


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
    if hasattr(one, "equal"):  # tensors
        return one.dtype == other.dtype and bool(one.equal(other))
    if isinstance(one, float):
        return repr(one) == repr(other)
    return bool(one == other)
