"""Python objects as JSON beside arrays, and back: nothing is executed when they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from replaydb import InvalidInputError

Arrays = dict[str, Any]


def encode(field: str, value: Any, arrays: Arrays) -> Any:
    """JSON for a value; what JSON cannot say as it is becomes an array, named in its place.

    Takes None, bools, numbers, text, bytes, lists, tuples, mappings, and numpy arrays, numpy
    scalars and torch tensors anywhere among them.

    Raises:
        InvalidInputError: Something else is in it; the field is the path to it.
    """
    if _is_plain(value):
        return value
    if (apart := _apart(value)) is not None:
        kind, array = apart
        name = f"array-{len(arrays)}"
        arrays[name] = array
        return {kind: name}
    match value:
        case list():
            return [encode(f"{field}[{i}]", item, arrays) for i, item in enumerate(value)]
        case tuple():
            return {"$tuple": encode(field, list(value), arrays)}
        case np.ndarray():
            return {"$objects": [list(value.shape), encode(field, list(value.flat), arrays)]}
        case Mapping() if all(isinstance(key, str) and _is_plain(key) for key in value):
            found = {key: encode(f"{field}.{key}", item, arrays) for key, item in value.items()}
            return {"$dict": found} if any(key.startswith("$") for key in value) else found
        case Mapping():
            return {"$pairs": encode(field, [list(pair) for pair in value.items()], arrays)}
    expected = "numbers, text, bytes, arrays, tensors, lists and mappings"
    raise InvalidInputError(field, expected, type(value).__name__)


def decode(value: Any, arrays: Mapping[str, Any]) -> Any:
    """The value that `encode` was given; arrays are copies, mappings are dicts."""
    if isinstance(value, list):
        return [decode(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if kind in _APART:
        return _APART[kind](arrays[value[kind]])
    match value:
        case {"$tuple": items}:
            return tuple(decode(items, arrays))
        case {"$dict": items}:
            return {key: decode(item, arrays) for key, item in items.items()}
        case {"$pairs": items}:
            return dict(decode(items, arrays))
        case {"$objects": [shape, items]}:
            found = np.empty(len(items), object)
            found[:] = decode(items, arrays)
            return found.reshape(shape)
    return {key: decode(item, arrays) for key, item in value.items()}


def to_tensor(array: Any) -> torch.Tensor:
    """A tensor of its own memory."""
    return array.clone() if isinstance(array, torch.Tensor) else torch.from_numpy(np.array(array))


_APART: dict[str, Callable[[Any], Any]] = {
    "$scalar": lambda array: array[()],
    "$float": float,
    "$text": lambda array: array.tobytes().decode("utf8", "surrogatepass"),
    "$bytes": lambda array: array.tobytes(),
    "$tensor": to_tensor,
    "$array": np.array,
}


def _is_plain(value: Any) -> bool:
    """Whether JSON, and the text of databases, can hold it as it is."""
    match value:
        case np.generic():
            return False
        case float():
            return math.isfinite(value)
        case str():
            return "\0" not in value and _utf8(value) == value.encode(errors="replace")
    return value is None or isinstance(value, int)


def _apart(value: Any) -> tuple[str, Any] | None:
    """An array that says what JSON does not, and how to read it; None for containers."""
    match value:
        case torch.Tensor():
            return "$tensor", value
        case np.ndarray() if value.dtype != object:
            return "$array", value
        case np.generic():
            return "$scalar", np.asarray(value)
        case float():
            return "$float", np.asarray(value)
        case str():
            return "$text", np.frombuffer(_utf8(value), np.uint8)
        case bytes():
            return "$bytes", np.frombuffer(value, np.uint8)
    return None


def _utf8(text: str) -> bytes:
    return text.encode("utf8", "surrogatepass")
