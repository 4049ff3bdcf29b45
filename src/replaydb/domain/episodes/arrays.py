"""Conversion of array arguments to stored arrays.

Arrays are numpy arrays if numpy has the dtype. bfloat16 and the float8 types stay torch tensors.
torch is only looked up in `sys.modules`: if it is not imported, no argument is a tensor.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Number
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, TypeVar, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from replaydb import limits
from replaydb.domain import checks
from replaydb.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

Array: TypeAlias = "NDArray[Any] | torch.Tensor"
Versions: TypeAlias = int | NDArray[np.int32] | None
ArrayLike: TypeAlias = Any  # nested lists of numbers, or an array of any library

_A = TypeVar("_A", bound=Array)

# dtypes by safetensors code, as they are stored: those of numpy, and those that only torch has.
NUMPY_CODES = {
    "BOOL": "bool",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
TORCH_CODES = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}

# `dtype.name` takes two microseconds, `dtype.str` none. Its first character is the byte order.
_NUMPY_NAMES = {np.dtype(name).str[1:]: name for name in NUMPY_CODES.values()}
_TORCH_DTYPES = frozenset(TORCH_CODES.values())
_CONVERSION_ERRORS = (ValueError, TypeError, OverflowError, RuntimeError)


def to_int32(field: str, value: ArrayLike) -> NDArray[np.int32]:
    """Return integers [N] as a read-only int32 copy. An empty sequence counts as integers."""
    array = _vector(field, value)
    if array.size and array.dtype.kind not in "iu":
        raise InvalidInputError(field, "integers", f"dtype {array.dtype}")
    if array.size and array.dtype != np.int32:
        low, high = int(array.min()), int(array.max())
        if low < checks.INT32[0] or high > checks.INT32[1]:
            raise InvalidInputError(
                field, "32-bit integers", low if low < checks.INT32[0] else high
            )
    return frozen(array, "<i4")


def to_bool(field: str, value: ArrayLike) -> NDArray[np.bool_]:
    """Return a mask [N] as a read-only bool copy, from bools or from integers 0 and 1."""
    array = _vector(field, value)
    if array.size and array.dtype.kind not in "biu":
        raise InvalidInputError(field, "bools, or integers 0 and 1", f"dtype {array.dtype}")
    if array.dtype.kind != "b" and ((array != 0) & (array != 1)).any():
        actual = int(array[(array != 0) & (array != 1)][0])
        raise InvalidInputError(field, "bools, or integers 0 and 1", actual)
    return frozen(array, "?")


def to_float32(field: str, value: ArrayLike) -> NDArray[np.float32]:
    """Return floats [N] as a read-only float32 copy. float64 is rounded.

    Raises:
        InvalidInputError: The value is no vector of floats, or a number is beyond float32.
    """
    array = _vector(field, value)
    is_int_list = isinstance(value, list | tuple) and array.dtype.kind in "iu"
    if array.size and array.dtype.kind != "f" and not is_int_list:
        raise InvalidInputError(field, "floats", f"dtype {array.dtype}")
    with np.errstate(over="ignore", invalid="ignore"):
        found = frozen(array, "<f4")
    beyond = np.isinf(found)
    if beyond.any() and (beyond & np.isfinite(array)).any():
        actual = float(array[beyond & np.isfinite(array)][0])
        raise InvalidInputError(field, "numbers in the range of float32", actual)
    return found


def to_logprobs(value: ArrayLike) -> NDArray[np.float32]:
    """Return logprobs [N] as a read-only float32 copy. -inf becomes NaN, which is not recorded.

    A sampled token has a logprob above -inf, and with -inf its importance ratio is infinite.

    Raises:
        InvalidInputError: As for `to_float32`, or a logprob is infinite and positive.
    """
    found = to_float32("logprobs", value)
    if not np.isinf(found).any():
        return found
    if np.isposinf(found).any():
        raise InvalidInputError("logprobs", "finite numbers, -inf or NaN", np.inf)
    return fixed(np.where(np.isneginf(found), np.float32(np.nan), found))


def to_float64(field: str, value: ArrayLike, count: int) -> NDArray[np.float64]:
    """Return `count` numbers in the range of float32, or NaN, as float64. Rewards can be bools.

    Raises:
        InvalidInputError: The value has another shape or dtype, or a number is beyond float32.
    """
    array = to_numpy(field, value)
    if array.shape != (count,) or array.dtype.kind not in ("biuf" if field == "rewards" else "iuf"):
        raise InvalidInputError(
            field, f"real numbers, shape [{count}]", f"{array.dtype}, {shape_of(array)}"
        )
    numbers = array.astype(np.float64)
    most = checks.FLOAT32_MAX
    beyond = np.flatnonzero(abs(numbers) > most)
    if len(beyond):
        expected = f"a finite number from {-most:g} to {most:g}, or NaN"
        raise InvalidInputError(f"{field}[{beyond[0]}]", expected, numbers[beyond[0]])
    return numbers


def to_numpy(field: str, value: ArrayLike) -> NDArray[Any]:
    """Apply `to_array`, and return bfloat16 and float8 as float32."""
    array = to_array(field, value)
    return array if isinstance(array, np.ndarray) else array.float().numpy()


def to_array(field: str, value: ArrayLike) -> Array:
    """Return a value as an array or tensor of a dtype that can be stored. Does not copy yet.

    Raises:
        InvalidInputError: The value is ragged or masked, has strings or objects, or numbers that no
            dtype that can be stored holds exactly.
    """
    if is_tensor(value):
        return _detached(field, value)
    try:
        array = np.asarray(value)
    except _CONVERSION_ERRORS as error:
        raise InvalidInputError(field, "a rectangular array of numbers", error) from error
    if array.dtype.str[1:] not in _NUMPY_NAMES:
        raise InvalidInputError(field, "a bool, integer or float array", f"dtype {array.dtype}")
    if _has_mask(value, array.ndim):
        raise InvalidInputError(field, "an array without a mask", "a masked array")
    if isinstance(value, list | tuple) and array.dtype == np.float64:
        # numpy rounds large integers next to floats, or if no integer dtype holds all of them.
        large = np.flatnonzero(abs(array) >= 2**53)
        given = np.asarray(value, object).reshape(-1)[large] if len(large) else large
        if len(rounded := given[given != array.reshape(-1)[large]]):
            raise InvalidInputError(field, "numbers that one dtype holds exactly", rounded[0])
    return array


def named_arrays(
    field: str, arrays: Mapping[str, ArrayLike] | None, taken: Collection[str] = ()
) -> dict[str, Array]:
    """Return copies of arrays of any shape by name. None becomes empty.

    Raises:
        InvalidInputError: A name is `taken` or invalid, or an array cannot be stored.
    """
    return {name: own(array) for name, array in to_arrays(field, arrays, taken).items()}


def to_arrays(
    field: str,
    arrays: Mapping[str, ArrayLike] | None,
    taken: Collection[str] = (),
    convert: Callable[[str, ArrayLike], Any] = to_array,
) -> dict[str, Any]:
    """Apply `to_array`, or another conversion, to named arrays. None becomes empty.

    Raises:
        InvalidInputError: A name is `taken` or invalid, or an array cannot be stored, or a token
            reward is beyond float32.
    """
    if arrays is None:
        return {}
    if not isinstance(arrays, Mapping):
        raise InvalidInputError(field, "a mapping of names to arrays", type(arrays).__name__)
    check_names(field, arrays, taken)
    found = {
        checks.name(f"{field} name", name): convert(f"{field}[{name!r}]", array)
        for name, array in arrays.items()
    }
    rewards = found.get("token_rewards") if field == "token_extras" else None
    if isinstance(rewards, np.ndarray) and rewards.dtype.str[1:] == "f8":
        # Merged turns and tables for analysis have them as float32.
        to_float32("token_extras['token_rewards']", rewards.reshape(-1))
    return found


def fixed(array: _A) -> _A:
    """Make a numpy array read-only. torch has no read-only tensors."""
    if isinstance(array, np.ndarray):
        array.setflags(write=False)
    return array


def own(array: Array) -> Array:
    """Return a little-endian, contiguous copy. numpy arrays are read-only."""
    if isinstance(array, np.ndarray):
        return frozen(array, array.dtype.newbyteorder("<"))
    return array.clone(memory_format=sys.modules["torch"].contiguous_format)


def frozen(value: ArrayLike, dtype: DTypeLike) -> NDArray[Any]:
    """Return a read-only, contiguous copy, because the caller may change the original."""
    return fixed(np.array(value, dtype=dtype, order="C"))


def check_names(field: str, names: Iterable[str], taken: Collection[str]) -> None:
    """Raise if a name is in use."""
    for name in names:
        if name in taken:
            raise InvalidInputError(field, "a name that is not in use", repr(name))


def spread_named(
    field: str, arrays: Mapping[str, Any], total: int, response: int | None = None
) -> dict[str, Any]:
    """Apply `spread` to named arrays, [total, ...] each."""
    return {
        name: spread(f"{field}[{name!r}]", array, total, response) for name, array in arrays.items()
    }


def spread(field: str, array: _A, total: int, response: int | None = None) -> _A:
    """Return an array of length `total`. One of length `response` gets zeros in front.

    Raises:
        InvalidInputError: The array has neither length.
    """
    if array.ndim and len(array) == total:
        return array
    if not array.ndim or len(array) != response:
        more = ", ..." if array.ndim > 1 else ""
        lengths = dict.fromkeys([total] if response is None else [total, response])
        expected = "shape " + " or ".join(f"[{length}{more}]" for length in lengths)
        raise InvalidInputError(field, expected, shape_of(array))
    given = bits(array)
    values = np.zeros((total, *given.shape[1:]), given.dtype)
    values[total - response :] = given
    return cast("_A", from_bits(fixed(values), dtype_name(array)))


def to_versions(value: ArrayLike, total: int, response: int | None = None) -> Versions:
    """Return a policy version: an int32, or one per token [total], from [total] or [response].

    The prompt gets the lowest version of the response. Without tokens the version is None.
    """
    if value is None:
        return None
    if isinstance(value, Number) or getattr(value, "ndim", 1) == 0:
        return checks.whole_number("policy_version", value, *checks.INT32)
    given = to_int32("policy_version", value)
    versions = np.array(spread("policy_version", given, total, response))
    if not given.size:
        return None
    versions[: total - len(given)] = given.min()
    return fixed(versions)


def same(one: object, other: object) -> bool:
    """Whether two values, or all they contain, have the same types, dtypes, shapes and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray) or is_tensor(one):
        left, right = cast("Array", one), cast("Array", other)
        alike = left.dtype == right.dtype and left.shape == right.shape
        return alike and bits(left).tobytes() == bits(right).tobytes()
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def filled(shape: tuple[int, ...], fill: float, dtype: DTypeLike) -> NDArray[Any]:
    """Return a new array of one value.

    Raises:
        InvalidInputError: It is larger than `replaydb.limits.MAX_ARRAY_BYTES`.
    """
    limits.check_array(math.prod(shape) * np.dtype(dtype).itemsize)
    return np.full(shape, fill, dtype)


def bits(array: Array) -> NDArray[Any]:
    """Return a numpy array unchanged, or the bits of a tensor as a numpy view (uint8 or int16)."""
    if isinstance(array, np.ndarray):
        return array
    torch = sys.modules["torch"]
    view: NDArray[Any] = array.view(torch.uint8 if array.itemsize == 1 else torch.int16).numpy()
    return view


def from_bits(array: NDArray[Any], dtype: str) -> Array:
    """Reverse `bits`: return the array unchanged, or a tensor of (a copy of) its bits."""
    if dtype not in _TORCH_DTYPES:
        return array
    import torch

    if not array.flags.writeable:  # torch has no read-only tensors
        array = array.copy()
    return torch.from_numpy(array).view(getattr(torch, dtype))


def dtype_name(array: Any) -> str:
    """Return the name of a dtype, such as `float32`, spelled the same for numpy and torch."""
    if isinstance(array, np.ndarray):
        return _NUMPY_NAMES[array.dtype.str[1:]]
    return str(array.dtype).removeprefix("torch.")


def shape_of(array: Array) -> str:
    """Return the shape for an error, such as `shape [2, 3]`."""
    return f"shape {list(array.shape)}"


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Whether `value` is a torch tensor. Never imports torch."""
    # Another thread may be importing torch. Before it defines the class, there are no tensors.
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def _vector(field: str, value: ArrayLike) -> NDArray[Any]:
    """Return `value` as a one-dimensional numpy array. bfloat16 and float8 become float32."""
    array = to_numpy(field, value)
    if array.ndim != 1:
        raise InvalidInputError(field, "one dimension", shape_of(array))
    return array


def _has_mask(value: ArrayLike, depth: int) -> bool:
    """Whether an array, or one of nested lists of arrays, is masked. numpy drops their masks."""
    if isinstance(value, list | tuple):
        return depth > 1 and any(_has_mask(each, depth - 1) for each in value)
    return isinstance(value, np.ma.MaskedArray)


def _detached(field: str, value: torch.Tensor) -> Array:
    try:
        tensor = value.detach().cpu().resolve_conj().resolve_neg()
        if dtype_name(tensor) in _TORCH_DTYPES:
            bits(tensor)  # raises for other layouts, and for parts of a distributed tensor
            return tensor
        array: NDArray[Any] = tensor.numpy()
    except _CONVERSION_ERRORS as error:
        raise InvalidInputError(
            field, "a dense tensor of bools, integers or floats", f"{value.dtype}, {value.layout}"
        ) from error
    if array.dtype.str[1:] not in _NUMPY_NAMES:
        raise InvalidInputError(field, "a bool, integer or float array", f"dtype {value.dtype}")
    return array
