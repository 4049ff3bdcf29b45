"""Equality of values and of their types, where `==` says that 1, 1.0 and True are the same."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def identical(one: Any, other: Any) -> bool:
    """Whether two values are equal and have the same types, and so has all that they hold."""
    if type(one) is not type(other):
        return False
    if is_dataclass(one):
        names = [each.name for each in fields(one)]
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
    if isinstance(one, float):
        return repr(one) == repr(other)
    return bool(one == other)
