"""Encoding of Python objects as JSON and arrays, and back. Decoding executes no stored code."""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import partial
from numbers import Real
from types import NoneType
from typing import Any, get_args, get_type_hints

import numpy as np

from replaydb import InvalidInputError
from replaydb.domain.episodes.arrays import same, to_array
from replaydb.util.escapes import escape

Arrays = dict[str, Any]
#: Classes whose instances values can contain, by qualified name: dataclasses, pydantic models,
#: enumerations, and classes whose objects consist of their attributes. Only these are created,
#: because stored data must not decide which class is instantiated.
Classes = Mapping[str, type]

FLOAT32_MAX = float(np.finfo(np.float32).max)
_EXPECTED = "numbers, text, bytes, arrays, tensors, lists, sets, mappings and known classes"
_MAX_DEPTH = 100  # as in metadata
_INT64 = range(-(2**63), 2**63)
_NAN = struct.pack(">d", math.nan).hex()
_LONG = 16  # lists of at least this many numbers are smaller and faster to read as arrays
#: Types for whose values `==` is sufficient if the types are equal.
_SHALLOW = {NoneType, bool, int, float, str, bytes}


def encode(
    field: str, value: Any, arrays: Arrays, classes: Classes | None = None, depth: int = 0
) -> Any:
    """Encode a value as JSON that `metadata` accepts. It refers to arrays by their names.

    The value can contain None, bools, numbers, text, bytes, bytearrays, lists, tuples, sets,
    mappings, instances of `classes`, numpy arrays, numpy scalars, torch tensors, and Ray
    references, which are resolved. An instance of a subclass of these that is not in `classes`,
    such as an `IntEnum`, a named tuple or a `defaultdict`, is encoded as an instance of the base.

    Args:
        field: Name of the value, for errors.
        value: The value.
        arrays: Receives the arrays and tensors, by name.
        classes: Classes whose instances are accepted.
        depth: Number of levels around the value.

    Raises:
        InvalidInputError: The value contains an object of another type, or more than 100 levels.
            The field of the error is the path to it.
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
    """Decode a value that `encode` returned.

    Arrays and tensors are copies. The object of a Ray reference is put into Ray again if Ray is
    running; otherwise the object itself is returned in place of the reference.

    Args:
        value: The JSON.
        arrays: The arrays and tensors, by name.
        classes: Classes whose instances can be created.

    Raises:
        InvalidInputError: A class is not in `classes`, or `create` refuses the stored fields.
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
    """Encode a value as extras: its JSON as bytes under `name`, and its arrays.

    Raises:
        InvalidInputError: See `encode`.
    """
    arrays: Arrays = {}
    stored = encode(field, value, arrays, classes)
    # Not ASCII: two escaped unpaired surrogates in a row would be read as one character.
    text = json.dumps(stored, allow_nan=False, ensure_ascii=False)
    return arrays | {name: _bytes(text.encode(errors="surrogatepass"))}


def from_extras(extras: Mapping[str, Any], name: str, classes: Classes | None = None) -> Any:
    """Decode the value that `to_extras` encoded.

    Raises:
        InvalidInputError: See `decode`.
    """
    text = np.asarray(extras[name]).tobytes().decode(errors="surrogatepass")
    return decode(json.loads(text), extras, classes)


def without(field: str, fields: Mapping[str, Any], usual: Mapping[str, Any], arrays: Arrays) -> Any:
    """Encode fields, except those whose `usual` values, such as those of columns, are identical.

    Identical values have the same types and bits: 1 and 1.0 differ, and so do 0.0 and -0.0.

    Args:
        field: Name of the fields, for errors.
        fields: The fields by name.
        usual: Values that need not be stored, by name.
        arrays: Receives the arrays and tensors, by name.

    Raises:
        InvalidInputError: See `encode`.
    """
    given = [
        name
        for name, value in fields.items()
        if name in usual and _is_encoded_alike(f"{field}.{name}", value, usual[name])
    ]
    others = {name: value for name, value in fields.items() if name not in given}
    return {"usual": given, "fields": encode(field, others, arrays)}


def completed(stored: Any, usual: Mapping[str, Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Decode fields that `without` encoded, and add those that it left out."""
    others: dict[str, Any] = decode(stored["fields"], arrays)
    return {name: usual[name] for name in stored["usual"]} | others


def uniform(extras: Mapping[str, Any], kinds: dict[str, Any]) -> dict[str, Any]:
    """Return the token extras that have the dtype and shape of those of earlier turns, as all must.

    `kinds`: dtypes and shapes so far. Receives those of other names.
    """
    return {
        name: values
        for name, values in extras.items()
        for kind in [(values.dtype, values.shape[1:])]
        if kinds.setdefault(name, kind) == kind
    }


def create(kind: type, state: Any) -> Any:
    """Create a member of an enumeration from its value, or another object from its fields.

    The object is created without calling `__init__`, which can change the fields, and without
    validation; pydantic runs `model_post_init`. Fields that a dataclass or model no longer has are
    dropped.

    Raises:
        InvalidInputError: The enumeration does not have the value, or a field of a dataclass is not
            in `state` and has no default.
    """
    if issubclass(kind, Enum):
        try:
            return kind(state)
        except ValueError:
            raise InvalidInputError(kind.__qualname__, "one of its values", repr(state)) from None
    model: Any = kind
    if hasattr(model, "model_construct"):
        made = model.model_construct(**state)
        # `model_post_init` can have changed fields.
        vars(made).update((name, state[name]) for name in model.model_fields if name in state)
        return made
    made = object.__new__(kind)
    if not is_dataclass(kind):
        vars(made).update(state)
        return made
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
    """Return a dataclass and the dataclasses in its annotations, recursively, by qualified name.

    Raises:
        InvalidInputError: `kind` is not a dataclass, annotations cannot be resolved, or two
            dataclasses have the same name.
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
    """Return whether two values are equal and of the same types, including nested values.

    Lists, tuples, dicts and dataclasses are compared recursively; NaN equals NaN.
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


def to_reward(value: Any) -> float | None:
    """Return a value if it can be the reward of an episode, or None."""
    # The bound is infinite as a float16.
    number: Any = value.item() if isinstance(value, np.floating) else value
    is_number = isinstance(number, Real)
    return number if is_number and abs(number) <= FLOAT32_MAX else None


def to_tensor(array: Any) -> Any:
    """Return a copy as a tensor."""
    import torch

    return array.clone() if isinstance(array, torch.Tensor) else torch.from_numpy(np.array(array))


def _is_encoded_alike(field: str, one: Any, other: Any) -> bool:
    texts, arrays = [], []
    for value in (one, other):
        into: Arrays = {}
        texts.append(json.dumps(encode(field, value, into), ensure_ascii=False))
        # `same` compares few dtypes of tensors. The texts distinguish tensors from arrays.
        arrays.append({name: to_array(name, array) for name, array in into.items()})
    return texts[0] == texts[1] and same(*arrays)


def _is_plain(value: Any) -> bool:
    """Return whether JSON holds the value unchanged."""
    if type(value) is float:
        return math.isfinite(value)
    return type(value) in (NoneType, bool, str) or (type(value) is int and value in _INT64)


def _reduced(value: Any, classes: Classes) -> tuple[Any, ...] | None:
    """Return a kind, a simpler value to encode, and the other arguments of the kind's decoder.

    The kind of lists and mappings that JSON can represent is "". None means an unsupported value.
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
        return "$ref", sys.modules["ray"].get(value)  # the reference is lost with the cluster
    return None


def _array(array: Any) -> tuple[Any, ...] | None:
    dtype, shape = array.dtype, list(array.shape)
    if isinstance(array, np.ma.MaskedArray):
        return None
    if dtype.kind == "O":
        return "$objects", list(array.flat), shape
    # The text of a dtype lacks the fields of structured dtypes, and dtypes of other packages.
    if dtype.kind not in "biufcmMSUV" or np.dtype(dtype.str) != dtype:
        return None
    if dtype.kind in "biuf" and dtype.isnative and dtype.itemsize <= 8:
        return "$array", array
    return "$raw", _bytes(array.tobytes()), dtype.str, shape


def _list(items: list[Any]) -> tuple[Any, ...]:
    kinds = {*map(type, items)}
    if len(items) >= _LONG and kinds in ({int}, {float}, {bool}):
        numbers = np.array(items)
        if numbers.dtype == kinds.pop():  # false if some are beyond 64 bits
            return "$numbers", numbers
    return "", items


def _mapping(items: Mapping[Any, Any]) -> tuple[Any, ...]:
    # Metadata keys must be valid UTF-8 without NUL characters, and "$" starts a kind.
    if all(type(key) is str and key[:1] != "$" and escape(key) == key for key in items):
        return "", items
    return "$pairs", [list(pair) for pair in items.items()]


def _raw(content: Any, name: str, shape: list[int]) -> Any:
    dtype = np.dtype(name)
    if dtype.hasobject:  # its bytes would be used as memory addresses
        raise InvalidInputError("dtype", "a dtype without objects", name)
    return np.ndarray(shape, dtype, content)


def _float_to_text(number: float) -> str:
    text = repr(float.__float__(number))
    bits = struct.pack(">d", number).hex()
    return f"nan:{bits}" if text == "nan" and bits != _NAN else text


def _float_from_text(text: str) -> float:
    _, _, bits = text.partition("nan:")
    found: float = struct.unpack(">d", bytes.fromhex(bits))[0] if bits else float(text)
    return found


def _ref(value: Any) -> Any:
    is_initialized = _imported("ray", "is_initialized")
    return sys.modules["ray"].put(value) if is_initialized and is_initialized() else value


def _state(value: Any) -> Any:
    """Return the value of a member of an enumeration, or the fields of another object."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return {one.name: getattr(value, one.name) for one in fields(value)}
    return dict(value) if hasattr(value, "model_fields_set") else vars(value)


def _imported(module: str, name: str) -> Any:
    """Return a class or function; () if no import has defined it yet, so no instance exists."""
    return getattr(sys.modules.get(module), name, ())


_bytes = partial(np.frombuffer, dtype=np.uint8)
#: Kinds that are stored unchanged, and the functions that copy them.
_STORED: dict[str, Callable[[Any], Any]] = {"$array": np.array, "$tensor": to_tensor}
#: By kind: a type, the function that simplifies its values for encoding, and the decoder. The first
#: matching type is used: np.float64 is a float, too.
_TYPES: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "$scalar": (np.generic, np.asarray, lambda array: array[()]),
    "$float": (float, _float_to_text, _float_from_text),
    "$int": (int, hex, lambda text: int(text, 16)),
    "$str": (str, str.__str__, str),
    "$bytes": (bytes, _bytes, bytes),
    "$bytearray": (bytearray, _bytes, bytearray),
    "$tuple": (tuple, list, tuple),
    "$set": (set, list, set),
    "$frozenset": (frozenset, list, frozenset),
}
#: By kind: the function that restores a value from its simpler value and the other arguments.
_DECODERS: dict[str, Callable[..., Any]] = {
    **{kind: decoder for kind, (_, _, decoder) in _TYPES.items()},
    "$numbers": lambda array: array.tolist(),
    "$pairs": dict,
    "$ref": _ref,
    "$objects": lambda items, shape: np.fromiter(items, object, len(items)).reshape(shape),
    "$raw": _raw,
}
