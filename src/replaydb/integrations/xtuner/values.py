"""Python values as JSON and arrays, which come back equal in type and value."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel
from xtuner.v1.data_proto import rl_data

from replaydb.errors import InvalidInputError

#: A value that JSON lacks is an object of one key, its kind, which begins like this.
_PREFIX = "replaydb."
#: XTuner's own data classes and enumerations, which values may hold.
_CLASSES: dict[str, Any] = {
    name: value
    for name, value in vars(rl_data).items()
    if isinstance(value, type)
    and issubclass(value, BaseModel | Enum)
    and value.__module__ == rl_data.__name__
}
#: Builtins that JSON has no counterpart of and that are made of their items.
_COLLECTIONS: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}
#: Longer lists of floats are stored as arrays.
_FEW = 16
#: Arrays of these dtypes are stored as they are, others as bytes.
_STORED = frozenset(np.typecodes["AllInteger"] + "?efd")


def pack(value: Any, arrays: dict[str, Any], path: str) -> Any:
    """Return a value as JSON, with its arrays and bytes in `arrays`.

    Builtin types, numpy scalars and arrays, tensors and XTuner's data classes come back equal in
    type and value. An instance of a subclass of a builtin type comes back as that type. Ray
    references are resolved, because what they refer to is lost with the cluster.

    Args:
        value: The value.
        arrays: Receives arrays under names that do not exist in it yet.
        path: Where the value is, for errors.

    Raises:
        InvalidInputError: The value is, or contains, an object of another kind.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    for kinds, packed in _PACKERS.items():
        if isinstance(value, kinds):
            return packed(value, arrays, path)
    ray = sys.modules.get("ray")  # not imported: no reference can exist
    if ray is not None and isinstance(value, ray.ObjectRef):
        return _wrapped("ref", pack(ray.get(value), arrays, path))
    expected = "builtin values, arrays, tensors and XTuner's data classes"
    raise InvalidInputError(path, expected, f"{type(value).__name__}: {value!r}"[:200])


def unpack(value: Any, arrays: dict[str, Any]) -> Any:
    """Return the value that `pack` was given; what references referred to is put into Ray again."""
    if isinstance(value, list):
        return [unpack(each, arrays) for each in value]
    if not isinstance(value, dict):
        return value
    for key, inner in value.items():
        if key.startswith(_PREFIX):
            return _UNPACKERS[key.removeprefix(_PREFIX)](inner, arrays)
    return {key: unpack(each, arrays) for key, each in value.items()}


def restored(kind: type[BaseModel], fields: dict[str, Any]) -> Any:
    """Return an object of a data class with fields as they are, without validating them.

    Fields that the installed class does not have any more are dropped.
    """
    known = {name: value for name, value in fields.items() if name in kind.model_fields}
    found = kind.model_construct(**known)
    vars(found).update(known)  # what the constructor derives from other fields included
    return found


def _wrapped(kind: str, inner: Any) -> dict[str, Any]:
    return {_PREFIX + kind: inner}


def _named(array: Any, arrays: dict[str, Any]) -> str:
    name = f"xtuner_{len(arrays)}"
    arrays[name] = array
    return name


def _array(value: NDArray[Any], arrays: dict[str, Any], path: str) -> Any:
    dtype, shape = value.dtype, list(value.shape)
    if dtype.char in _STORED and dtype.isnative:
        return _wrapped("array", _named(value, arrays))
    if dtype.char == "O":
        return _wrapped("objects", [shape, _items(value.ravel().tolist(), arrays, path)])
    if np.dtype(dtype.str) != dtype:  # of named fields, for example
        raise InvalidInputError(path, "an array of numbers, text, times or objects", f"{dtype}")
    content = np.frombuffer(value.tobytes(), np.uint8)
    return _wrapped("buffer", [shape, dtype.str, _named(content, arrays)])


def _scalar(value: np.generic, arrays: dict[str, Any], path: str) -> Any:
    return _wrapped("scalar", _array(np.asarray(value), arrays, path))


def _tensor(value: torch.Tensor, arrays: dict[str, Any], path: str) -> Any:
    return _wrapped("tensor", _named(value, arrays))


def _object(value: BaseModel | Enum, arrays: dict[str, Any], path: str) -> Any:
    """An object of one of XTuner's classes, or a member of an enumeration of numbers or text."""
    name = type(value).__name__
    content = value.value if isinstance(value, Enum) else dict(value)
    if _CLASSES.get(name) is type(value):
        return _wrapped("class", [name, pack(content, arrays, path)])
    if isinstance(value, int | float | str):
        return pack(content, arrays, path)
    raise InvalidInputError(path, "an object of one of XTuner's classes", repr(value)[:200])


def _dict(value: dict[Any, Any], arrays: dict[str, Any], path: str) -> Any:
    """A dict as an object of JSON; as pairs if its keys are not text or could be taken for ours."""
    if all(type(key) is str and not key.startswith(_PREFIX) for key in value):
        return {key: pack(each, arrays, f"{path}[{key!r}]") for key, each in value.items()}
    pairs = [
        [pack(key, arrays, f"{path} (a key)"), pack(each, arrays, f"{path}[{key!r}]")]
        for key, each in value.items()
    ]
    return _wrapped("dict", pairs)


def _list(value: list[Any], arrays: dict[str, Any], path: str) -> Any:
    if len(value) > _FEW and set(map(type, value)) == {float}:
        return _wrapped("floats", _named(np.array(value), arrays))
    return _items(value, arrays, path)


def _items(values: Any, arrays: dict[str, Any], path: str) -> list[Any]:
    return [pack(each, arrays, f"{path}[{i}]") for i, each in enumerate(values)]


def _collection(value: Any, arrays: dict[str, Any], path: str) -> Any:
    kind = next(name for name, one in _COLLECTIONS.items() if isinstance(value, one))
    return _wrapped(kind, _items(value, arrays, path))


def _bytes(value: bytes | bytearray, arrays: dict[str, Any], path: str) -> Any:
    kind = "bytes" if isinstance(value, bytes) else "bytearray"
    return _wrapped(kind, _named(np.frombuffer(value, np.uint8), arrays))


def _number_or_text(value: Any, arrays: dict[str, Any], path: str) -> Any:
    return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))


#: How values are packed, by their class; the first that fits counts: np.float64 is a float, too.
_PACKERS: dict[Any, Callable[[Any, dict[str, Any], str], Any]] = {
    np.ndarray: _array,
    np.generic: _scalar,
    torch.Tensor: _tensor,
    (BaseModel, Enum): _object,
    dict: _dict,
    list: _list,
    tuple(_COLLECTIONS.values()): _collection,
    (bytes, bytearray): _bytes,
    (int, float, str): _number_or_text,
}


def _array_of(inner: Any, arrays: dict[str, Any]) -> Any:
    return np.array(arrays[inner])


def _buffer_of(inner: Any, arrays: dict[str, Any]) -> Any:
    shape, dtype, name = inner
    return np.ndarray(shape, dtype, bytearray(np.asarray(arrays[name])))


def _objects_of(inner: Any, arrays: dict[str, Any]) -> Any:
    shape, items = inner
    found = np.empty(shape, object)
    flat = found.reshape(-1)  # of a new array, so a view
    for i, each in enumerate(items):  # one by one: an item may be a list
        flat[i] = unpack(each, arrays)
    return found


def _tensor_of(inner: Any, arrays: dict[str, Any]) -> Any:
    found = arrays[inner]
    return found.clone() if isinstance(found, torch.Tensor) else torch.from_numpy(np.array(found))


def _object_of(inner: Any, arrays: dict[str, Any]) -> Any:
    kind, content = _CLASSES[inner[0]], unpack(inner[1], arrays)
    return kind(content) if issubclass(kind, Enum) else restored(kind, content)


def _ref_of(inner: Any, arrays: dict[str, Any]) -> Any:
    found, ray = unpack(inner, arrays), sys.modules.get("ray")
    return ray.put(found) if ray is not None and ray.is_initialized() else found


def _collector(kind: Callable[[Any], Any]) -> Callable[[Any, dict[str, Any]], Any]:
    return lambda inner, arrays: kind(unpack(inner, arrays))


_UNPACKERS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "array": _array_of,
    "buffer": _buffer_of,
    "objects": _objects_of,
    "floats": lambda inner, arrays: np.asarray(arrays[inner]).tolist(),
    "scalar": lambda inner, arrays: unpack(inner, arrays)[()],
    "tensor": _tensor_of,
    "class": _object_of,
    "bytes": lambda inner, arrays: np.asarray(arrays[inner]).tobytes(),
    "bytearray": lambda inner, arrays: bytearray(np.asarray(arrays[inner])),
    "ref": _ref_of,
    "dict": _collector(dict),
} | {name: _collector(kind) for name, kind in _COLLECTIONS.items()}
