"""Python objects as JSON beside arrays, and back. Decoding executes nothing."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import partial
from types import NoneType
from typing import Any, get_args, get_type_hints

import numpy as np

from replaydb import InvalidInputError
from replaydb.escapes import escape

Arrays = dict[str, Any]
#: Dataclasses, pydantic models and enumerations that values may hold, by qualified name. The
#: database must not choose the class of an object, so only these are created.
Classes = Mapping[str, type]

_EXPECTED = "numbers, text, bytes, arrays, tensors, lists, sets, mappings and known classes"
_MAX_DEPTH = 100  # as in metadata
_INT64 = range(-(2**63), 2**63)
_LONG = 16  # lists of so many numbers are smaller, and faster to read, as arrays
#: Numbers and text, of which `==` is enough if the types are equal.
_SHALLOW = {NoneType, bool, int, float, str, bytes}


def encode(
    field: str, value: Any, arrays: Arrays, classes: Classes | None = None, depth: int = 0
) -> Any:
    """Return JSON for a value, which `metadata` accepts. It refers to arrays by their names.

    The value may hold None, bools, numbers, text, bytes, bytearrays, lists, tuples, sets, mappings,
    instances of `classes`, numpy arrays, numpy scalars, torch tensors, and Ray references, which
    are resolved. An instance of a subclass of these that is not in `classes`, such as an `IntEnum`,
    a named tuple or a `defaultdict`, is encoded as an instance of the base.

    Args:
        field: Name of the value, for errors.
        value: The value.
        arrays: Receives the arrays and tensors, by name.
        classes: Classes whose instances are accepted.
        depth: Levels around the value.

    Raises:
        InvalidInputError: It holds something else, or more than 100 levels. The field is the path.
    """
    if _is_plain(value):
        return value
    if depth > _MAX_DEPTH:
        raise InvalidInputError(field[:255], f"at most {_MAX_DEPTH} levels of nesting", "more")

    def inside(path: str, item: Any) -> Any:
        return encode(field + path, item, arrays, classes, depth + 1)

    reduced = _reduced(value, classes or {})
    if reduced is None:
        raise InvalidInputError(field, _EXPECTED, type(value).__name__)
    kind, content, *parameters = reduced
    if kind in _STORED:
        name = f"array-{len(arrays)}"
        arrays[name] = content
        return {kind: name}
    if kind:
        return {kind: [inside("", content), *parameters]}
    if isinstance(content, list):
        return [inside(f"[{i}]", item) for i, item in enumerate(content)]
    return {key: inside(f".{key}", item) for key, item in content.items()}


def decode(value: Any, arrays: Mapping[str, Any], classes: Classes | None = None) -> Any:
    """Return what `encode` was given.

    Arrays and tensors are copies. What a Ray reference referred to is put into Ray again if Ray
    runs; otherwise it takes the place of the reference.

    Raises:
        InvalidInputError: A class is not in `classes`, or `create` refuses what is stored.
    """
    if isinstance(value, list):
        return [decode(item, arrays, classes) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if not kind.startswith("$"):
        return {key: decode(item, arrays, classes) for key, item in value.items()}
    if kind in _STORED:
        return _STORED[kind](arrays[value[kind]])
    content, *parameters = value[kind]
    content = decode(content, arrays, classes)
    if kind != "$class":
        return _DECODERS[kind](content, *parameters)
    [name], known = parameters, classes or {}
    if name not in known:
        raise InvalidInputError(name, "one of the classes that may be created", sorted(known))
    return create(known[name], content)


def to_extras(field: str, value: Any, name: str, classes: Classes | None = None) -> Arrays:
    """Return a value as extras: its JSON as bytes under a name, and its arrays.

    Raises:
        InvalidInputError: As `encode` does.
    """
    arrays: Arrays = {}
    stored = encode(field, value, arrays, classes)
    # Not as escapes of ASCII: two unpaired surrogates in a row would come back as one character.
    text = json.dumps(stored, allow_nan=False, ensure_ascii=False)
    return arrays | {name: _bytes(text.encode(errors="surrogatepass"))}


def from_extras(extras: Mapping[str, Any], name: str, classes: Classes | None = None) -> Any:
    """Return the value that `to_extras` was given.

    Raises:
        InvalidInputError: As `decode` does.
    """
    text = np.asarray(extras[name]).tobytes().decode(errors="surrogatepass")
    return decode(json.loads(text), extras, classes)


def create(kind: type, state: Any) -> Any:
    """Return a member of an enumeration by its value, or another object with the given fields.

    The object is created without its `__init__`, which may change the fields, and without
    validation; pydantic runs `model_post_init`. Fields that the class no longer has are dropped.

    Raises:
        InvalidInputError: The enumeration does not have the value, or a field of a dataclass is
            neither given nor has a default.
    """
    if issubclass(kind, Enum):
        try:
            return kind(state)
        except ValueError:
            raise InvalidInputError(kind.__qualname__, "one of its values", repr(state)) from None
    if not is_dataclass(kind):
        model: Any = kind
        made = model.model_construct(**state)
        # `model_post_init` may have changed fields.
        vars(made).update((name, state[name]) for name in model.model_fields if name in state)
        return made
    made = object.__new__(kind)
    for one in fields(kind):
        if one.name in state:
            value = state[one.name]
        elif one.default_factory is not MISSING:
            value = one.default_factory()
        elif one.default is not MISSING:
            value = one.default
        else:
            path = f"{kind.__qualname__}.{one.name}"
            raise InvalidInputError(path, "a stored value or a default", "none")
        object.__setattr__(made, one.name, value)
    return made


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
                received = f"{one.__name__}: {error}"
                raise InvalidInputError(field, "resolvable annotations", received) from None
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


def _is_plain(value: Any) -> bool:
    """Return whether JSON can hold it unchanged."""
    if type(value) is float:
        return math.isfinite(value)
    return type(value) in (NoneType, bool, str) or (type(value) is int and value in _INT64)


def _reduced(value: Any, classes: Classes) -> tuple[Any, ...] | None:
    """Return a kind, a simpler value to encode, and the other arguments of the kind's decoder.

    The kind of lists and mappings that JSON can hold is "". None means that the value is refused.
    """
    if classes.get(type(value).__qualname__) is type(value):
        return "$class", _state(value), type(value).__qualname__
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, list):
        return _list(value)
    if isinstance(value, Mapping):
        return _mapping(value)
    for kind, (base, simpler, _) in _TYPES.items():
        if isinstance(value, base):
            return kind, simpler(value)
    if isinstance(value, _imported("torch", "Tensor")):
        return "$tensor", value
    if isinstance(value, _imported("ray", "ObjectRef")):
        return "$ref", sys.modules["ray"].get(value)  # which is lost with the cluster
    return None


def _array(array: Any) -> tuple[Any, ...] | None:
    dtype, shape = array.dtype, list(array.shape)
    if isinstance(array, np.ma.MaskedArray):
        return None
    if dtype.kind == "O":
        return "$objects", list(array.flat), shape
    # Fields of structured dtypes, and dtypes of other packages, are not in the text of a dtype.
    if dtype.kind not in "biufcmMSUV" or np.dtype(dtype.str) != dtype:
        return None
    if dtype.kind in "biuf" and dtype.isnative and dtype.itemsize <= 8:
        return "$array", array
    return "$raw", _bytes(array.tobytes()), dtype.str, shape


def _list(items: list[Any]) -> tuple[Any, ...]:
    kinds = {*map(type, items)}
    if len(items) >= _LONG and kinds in ({int}, {float}):
        numbers = np.array(items)
        if numbers.dtype == kinds.pop():  # not if some are beyond 64 bits
            return "$numbers", numbers
    return "", items


def _mapping(items: Mapping[Any, Any]) -> tuple[Any, ...]:
    # Keys of metadata are valid UTF-8 without NUL characters, and "$" begins a kind.
    if all(type(key) is str and key[:1] != "$" and escape(key) == key for key in items):
        return "", items
    return "$pairs", [list(pair) for pair in items.items()]


def _raw(content: Any, name: str, shape: list[int]) -> Any:
    dtype = np.dtype(name)
    if dtype.hasobject:  # its bytes would be taken for addresses in memory
        raise InvalidInputError("dtype", "one without objects", name)
    return np.ndarray(shape, dtype, content)


def _ref(value: Any) -> Any:
    ray = sys.modules.get("ray")
    return ray.put(value) if ray is not None and ray.is_initialized() else value


def _state(value: Any) -> Any:
    """Return the value of a member of an enumeration, or the fields of another object."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return {one.name: getattr(value, one.name) for one in fields(value)}
    return dict(value)


def _imported(module: str, name: str) -> Any:
    """Return a class; of one that nobody has imported, there are no instances."""
    return getattr(sys.modules.get(module), name, ())


_bytes = partial(np.frombuffer, dtype=np.uint8)
#: What is stored as it is, and how it is copied.
_STORED: dict[str, Callable[[Any], Any]] = {"$array": np.array, "$tensor": to_tensor}
#: Types by kind, with what makes a simpler value of theirs, and what makes theirs of that. The
#: first type that fits counts: np.float64 is a float, too.
_TYPES: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "$scalar": (np.generic, np.asarray, lambda array: array[()]),
    "$float": (float, lambda number: repr(float.__float__(number)), float),
    "$int": (int, hex, lambda text: int(text, 16)),
    "$str": (str, str.__str__, str),
    "$bytes": (bytes, _bytes, bytes),
    "$bytearray": (bytearray, _bytes, bytearray),
    "$tuple": (tuple, list, tuple),
    "$set": (set, list, set),
    "$frozenset": (frozenset, list, frozenset),
}
#: How a value is made of its simpler value and the other arguments.
_DECODERS: dict[str, Callable[..., Any]] = {
    **{kind: decoder for kind, (_, _, decoder) in _TYPES.items()},
    "$numbers": lambda array: array.tolist(),
    "$pairs": dict,
    "$ref": _ref,
    "$objects": lambda items, shape: np.fromiter(items, object, len(items)).reshape(shape),
    "$raw": _raw,
}
