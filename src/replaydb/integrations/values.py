"""Python objects as JSON beside arrays, and back. Decoding executes nothing."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args, get_type_hints

import numpy as np

from replaydb import InvalidInputError

Arrays = dict[str, Any]
#: Dataclasses that may be created, by name: the database must not choose the class.
Classes = Mapping[str, type]

_EXPECTED = "numbers, text, bytes, arrays, tensors, lists, sets and mappings"
_MAX_DEPTH = 100  # as in metadata
_NO_LEAF = object()
_LONG = 16  # lists of so many numbers are smaller, and faster to read, as arrays


def encode(
    field: str, value: Any, arrays: Arrays, classes: Classes | None = None, depth: int = 0
) -> Any:
    """Return JSON for a value; what JSON cannot express becomes an array, referred to by its name.

    The value may hold None, bools, numbers, text, bytes, lists, tuples, sets, mappings, instances
    of `classes`, numpy arrays, numpy scalars and torch tensors. An instance of a subclass of these,
    such as an `IntEnum`, a named tuple or a `defaultdict`, is encoded as an instance of the base.

    Args:
        field: Name of the value, for errors.
        value: The value.
        arrays: Receives the arrays and tensors, by name.
        classes: Dataclasses whose instances are accepted.
        depth: Levels around the value.

    Raises:
        InvalidInputError: It holds something else, or more than 100 levels. The field is the path.
    """
    if depth > _MAX_DEPTH:
        raise InvalidInputError(field[:255], f"at most {_MAX_DEPTH} levels of nesting", "more")

    def inside(path: str, item: Any) -> Any:
        return encode(field + path, item, arrays, classes, depth + 1)

    if (leaf := _leaf(value, arrays)) is not _NO_LEAF:
        return leaf
    match value:
        case list():
            return [inside(f"[{i}]", item) for i, item in enumerate(value)]
        case tuple() | set() | frozenset():
            kind = next(base for base in (tuple, set, frozenset) if isinstance(value, base))
            return {f"${kind.__name__}": inside("", list(value))}
        case np.ndarray() if value.dtype == object and not isinstance(value, np.ma.MaskedArray):
            return {"$objects": [list(value.shape), inside("", list(value.flat))]}
        case Mapping():
            if not all(isinstance(key, str) and _is_plain(key) for key in value):
                return {"$pairs": inside("", [list(pair) for pair in value.items()])}
            items = {key: inside(f".{key}", item) for key, item in value.items()}
            return {"$dict": items} if any(key.startswith("$") for key in value) else items
        case _ if type(value) in (classes or {}).values():
            names = [one.name for one in fields(type(value))]
            state = {name: getattr(value, name) for name in names}
            return {"$class": [type(value).__qualname__, inside("", state)]}
    raise InvalidInputError(field, _EXPECTED, type(value).__name__)


def decode(value: Any, arrays: Mapping[str, Any], classes: Classes | None = None) -> Any:
    """Return what `encode` was given. Arrays and tensors are copies.

    Raises:
        InvalidInputError: A field of a dataclass is neither stored nor has a default, or its class
            is not in `classes`.
    """
    if isinstance(value, list):
        return [decode(item, arrays, classes) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if kind in _LEAVES:
        return _LEAVES[kind](value[kind], arrays)
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](decode(value[kind], arrays, classes))
    if kind == "$class":
        name, state = value[kind]
        return _instance(name, decode(state, arrays, classes), classes or {})
    items = value[kind] if kind == "$dict" else value
    return {key: decode(item, arrays, classes) for key, item in items.items()}


def dataclasses_of(field: str, kind: type) -> dict[str, type]:
    """Return a dataclass and those in the annotations of its fields, by qualified name.

    Raises:
        InvalidInputError: It is not a dataclass, its annotations cannot be resolved, or two of
            them have one name.
    """
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise InvalidInputError(field, "a dataclass", repr(kind))
    found: dict[str, type] = {}
    waiting: list[Any] = [kind]
    while waiting:
        one = waiting.pop()
        waiting += get_args(one)
        if isinstance(one, type) and is_dataclass(one) and one not in found.values():
            if found.setdefault(one.__qualname__, one) is not one:
                raise InvalidInputError(field, "dataclasses of different names", one.__qualname__)
            try:
                waiting += get_type_hints(one).values()
            except NameError as error:
                raise InvalidInputError(
                    field, "annotations that can be resolved", f"{one.__name__}: {error}"
                ) from None
    return found


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal and of the same types, and so is all that they hold.

    It looks into lists, tuples, dicts and dataclasses; NaN equals NaN.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        kinds = list(map(type, one))
        if kinds != list(map(type, other)):
            return False
        return (_SHALLOW.issuperset(kinds) and one == other) or all(map(is_same, one, other))
    if isinstance(one, dict):
        return is_same([*one.items()], [*other.items()])
    if is_dataclass(one):
        names = [each.name for each in fields(one)]
        return all(is_same(getattr(one, name), getattr(other, name)) for name in names)
    return bool(one == other or (one != one and other != other))


def to_tensor(array: Any) -> Any:
    """Return a tensor of its own memory."""
    import torch

    return array.clone() if isinstance(array, torch.Tensor) else torch.from_numpy(np.array(array))


def _objects(parts: list[Any]) -> Any:
    shape, items = parts
    found = np.empty(len(items), object)
    found[:] = items
    return found.reshape(shape)


_LEAVES: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "$float": lambda text, _: float(text),
    "$int": lambda text, _: int(text, 16),
    "$text": lambda name, arrays: arrays[name].tobytes().decode("utf8", "surrogatepass"),
    "$bytes": lambda name, arrays: arrays[name].tobytes(),
    "$tensor": lambda name, arrays: to_tensor(arrays[name]),
    "$array": lambda name, arrays: np.array(arrays[name]),
    "$scalar": lambda name, arrays: arrays[name][()],
    "$numbers": lambda name, arrays: arrays[name].tolist(),
    "$raw": lambda its, arrays: _raw(arrays, *its).copy(),
    "$raw_scalar": lambda its, arrays: _raw(arrays, *its)[()],
}
_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$objects": _objects,
    "$pairs": dict,
}


def _leaf(value: Any, arrays: Arrays) -> Any:
    """Return JSON for a value that has no values inside; `_NO_LEAF` for any other."""
    if _is_plain(value):
        return value
    match value:
        case np.generic() | np.ndarray():
            return _of_numpy(value, arrays)
        case float():
            return {"$float": repr(float(value))}
        case int():
            return {"$int": hex(value)}
        case str():
            return {"$text": _keep(np.frombuffer(_utf8(value), np.uint8), arrays)}
        case bytes():
            return {"$bytes": _keep(np.frombuffer(value, np.uint8), arrays)}
        case list() if len(value) >= _LONG and {*map(type, value)} in ({int}, {float}):
            numbers = np.array(value)
            return {"$numbers": _keep(numbers, arrays)} if numbers.dtype.kind in "if" else _NO_LEAF
    if _is_tensor(value):
        return {"$tensor": _keep(value, arrays)}
    return _NO_LEAF


def _of_numpy(value: Any, arrays: Arrays) -> Any:
    """Return JSON for an array or scalar: kept as it is, or its bytes if it cannot be stored so."""
    array, is_scalar = np.asarray(value), isinstance(value, np.generic)
    if isinstance(value, np.ma.MaskedArray) or array.dtype.kind not in "biufcmMSU":
        return _NO_LEAF
    if array.dtype.kind in "biuf" and array.dtype.isnative and array.itemsize <= 8:
        return {"$scalar" if is_scalar else "$array": _keep(array, arrays)}
    name = _keep(np.frombuffer(array.tobytes(), np.uint8), arrays)
    kind = "$raw_scalar" if is_scalar else "$raw"
    return {kind: [array.dtype.str, list(array.shape), name]}


def _raw(arrays: Mapping[str, Any], dtype: str, shape: list[int], name: str) -> Any:
    return np.ndarray(shape, dtype, arrays[name].tobytes())


#: Numbers and text, of which `==` is enough if the types are equal.
_SHALLOW = {type(None), bool, int, float, str, bytes}


def _is_plain(value: Any) -> bool:
    """Return whether JSON, and the text of databases, can hold it unchanged."""
    match value:
        case np.generic():
            return False
        case float():
            return math.isfinite(value)
        case str():
            return "\0" not in value and _utf8(value) == value.encode(errors="replace")
        case int():
            return -(2**63) <= value < 2**63
    return value is None


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # which has been imported, if there is a tensor
    return torch is not None and isinstance(value, torch.Tensor)


def _keep(array: Any, arrays: Arrays) -> str:
    name = f"array-{len(arrays)}"
    arrays[name] = array
    return name


def _instance(name: str, state: dict[str, Any], classes: Classes) -> Any:
    """Create an instance from its fields, without its `__init__`, which may change them."""
    if name not in classes:
        raise InvalidInputError("kind", f"a dataclass with the fields of {name}", sorted(classes))
    made: Any = object.__new__(classes[name])
    for one in fields(classes[name]):
        if one.name in state:
            value = state[one.name]
        elif one.default_factory is not MISSING:
            value = one.default_factory()
        elif one.default is not MISSING:
            value = one.default
        else:
            raise InvalidInputError(f"{name}.{one.name}", "a stored value or a default", "none")
        object.__setattr__(made, one.name, value)
    return made


def _utf8(text: str) -> bytes:
    return text.encode("utf8", "surrogatepass")
