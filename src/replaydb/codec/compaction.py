"""Columns of format 2 as they are stored: integers in the smallest type, and optionally compressed.

The metadata of the blob has a JSON object `columns` with two objects. `types` has the type of each
column that is stored in a smaller one. `zstd` has the type and shape of each column that is stored
as a zstd frame.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replaydb import limits
from replaydb.codec import framing
from replaydb.codec.framing import Joined, Tensor, corrupt
from replaydb.domain.episodes.arrays import bits, dtype_name
from replaydb.util.memory import take

#: Smaller columns are stored as they are. Others are compressed if that saves an eighth of them.
LEAST_BYTES = 512

#: Integer types by size, and the smallest and largest integers of each.
_INTEGERS = [
    (np.dtype(name), int(np.iinfo(name).min), int(np.iinfo(name).max))
    for name in ("u1", "i1", "<u2", "<i2", "<u4", "<i4")
]
_INTEGER_CODES = {f"{sign}{size}" for sign in "IU" for size in (8, 16, 32, 64)}


def write(tensors: Mapping[str, Tensor], version: int, compression: str | None) -> memoryview:
    """Return a blob with the columns as they are stored.

    Raises:
        NotSupportedError: `compression` is "zstd" and zstandard is not installed.
    """
    stored: dict[str, Tensor] = {}
    types: dict[str, str] = {}
    frames: dict[str, Any] = {}
    compressor = None if compression is None else framing.zstandard_library().ZstdCompressor()
    for name, tensor in sorted(tensors.items()):
        small = _smallest(tensor)
        if small is not tensor:
            types[name] = _code(tensor)
        if compressor is not None and small.nbytes >= LEAST_BYTES:
            whole = [np.ascontiguousarray(bits(array)) for array in framing.arrays_of(small)]
            frame = compressor.compress(
                (whole[0] if len(whole) == 1 else np.concatenate(whole)).data
            )
            if len(frame) <= small.nbytes * 7 // 8:
                frames[name] = [_code(small), list(small.shape)]
                small = np.frombuffer(frame, np.uint8)
        stored[name] = small
    notes = {key: value for key, value in (("types", types), ("zstd", frames)) if value}
    columns = json.dumps(notes, separators=(",", ":")) if notes else None
    return framing.write(stored, version, columns)


def expanded(blob: framing.Blob, num_bytes: int | None = None) -> framing.Tensors:
    """Return the tensors of a blob in the types in which they were given.

    Args:
        blob: The blob.
        num_bytes: Size of all these tensors, as the database has it. Default: unknown.

    Raises:
        CorruptPayloadError: The description of the columns does not fit them or `num_bytes`, or a
            frame is damaged or claims too much. No memory is allocated for that claim.
        NotSupportedError: A column is compressed and zstandard is not installed.
    """
    types, frames = _notes(blob)
    found = blob.tensors
    sizes = {name: array.nbytes for name, (_, array) in found.items()}
    sizes |= {name: _size(name, blob, frame) for name, frame in frames.items()}
    for name, code in types.items():
        stored = frames[name][0] if name in frames else found.get(name, ("",))[0]
        if not {stored, code} <= _INTEGER_CODES or _width(code) <= _width(stored):
            corrupt(f"{name} is {stored}, and is described as {code}")
        sizes[name] *= _width(code) // _width(stored)
    total = sum(sizes.values())
    if num_bytes not in (None, total):
        corrupt(f"columns of {total} bytes, where the database has {num_bytes}")
    if total > limits.MAX_PART_BYTES:
        most = f"replaydb.limits.MAX_PART_BYTES is {limits.MAX_PART_BYTES}"
        corrupt(f"columns that claim to hold {total} bytes, and {most}")
    for name, frame in frames.items():
        found[name] = _decompressed(name, found[name][1], frame)
    for name, code in types.items():
        found[name] = code, _widened(name, found[name][1], framing.BITS[code])
    return found


def _widened(name: str, narrow: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return integers in a wider type, in reusable memory."""
    # A wider type has all integers of a smaller one, unless it is unsigned and the other is not.
    if narrow.dtype.kind != dtype.kind == "u" and narrow.min(initial=0) < 0:
        corrupt(f"{name} has integers beyond {framing.CODES[dtype.name]}")
    memory = take(narrow.size * dtype.itemsize)
    wide: NDArray[Any] = np.ndarray(narrow.shape, dtype, memory)
    wide[...] = narrow
    wide.setflags(write=False)
    return wide


def _notes(blob: framing.Blob) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the types and the frames that the metadata describes."""
    if blob.columns is None:
        return {}, {}
    if not isinstance(blob.columns, str):
        corrupt("columns are not described by text")
    notes = framing.parse_json(blob.columns.encode("utf-8", "surrogatepass"))
    types, frames = notes.pop("types", {}), notes.pop("zstd", {})
    if notes or not isinstance(types, dict) or not isinstance(frames, dict):
        corrupt("columns are not described by types and zstd")
    if not all(isinstance(code, str) for code in types.values()):
        corrupt("a type is not text")
    return types, frames


def _width(code: str) -> int:
    return framing.BITS[code].itemsize


def _code(tensor: Tensor) -> str:
    return framing.CODES[dtype_name(framing.arrays_of(tensor)[0])]


def _smallest(tensor: Tensor) -> Tensor:
    """Return integers in the smallest type that holds them."""
    arrays = framing.arrays_of(tensor)
    if tensor.nbytes < LEAST_BYTES or tensor.itemsize == 1 or _code(tensor) not in _INTEGER_CODES:
        return tensor
    filled = [values for values in map(bits, arrays) if values.size]
    low, high = min(int(one.min()) for one in filled), max(int(one.max()) for one in filled)
    for dtype, least, most in _INTEGERS:
        if least <= low and high <= most and dtype.itemsize < tensor.itemsize:
            narrow = [bits(array).astype(dtype) for array in arrays]
            return Joined(narrow) if isinstance(tensor, Joined) else narrow[0]
    return tensor


def _size(name: str, blob: framing.Blob, frame: Any) -> int:
    """Return the size of the content of a frame, as the header describes it."""
    code, array = blob.tensors.get(name, (None, None))
    if code != "U8" or array is None or array.ndim != 1:
        corrupt(f"{name} is no zstd frame")
    try:
        kind, shape = frame
        is_shape = type(frame) is type(shape) is list and len(shape) <= framing.MAX_DIMENSIONS
        # Empty columns are not compressed, and a product of larger numbers may be unprintable.
        if not is_shape or any(type(n) is not int or not 0 < n < 2**63 for n in shape):
            raise ValueError(f"shape {shape}")
        return int(math.prod(shape)) * framing.BITS[kind].itemsize
    except (TypeError, KeyError, ValueError) as error:
        corrupt(f"frame {name!r}: {error!r}", error)


def _decompressed(name: str, frame: NDArray[np.uint8], described: Any) -> tuple[str, NDArray[Any]]:
    zstandard = framing.zstandard_library()
    code, shape = described
    size = math.prod(shape) * _width(code)
    try:
        # Other than the size in the frame, the one in the header was compared with the database.
        if zstandard.get_frame_parameters(frame.data).content_size != size:
            corrupt(f"{name} is described with {size} bytes, and its frame has another size")
        content = zstandard.ZstdDecompressor().decompress(frame.data, allow_extra_data=False)
        array = np.frombuffer(content, framing.BITS[code]).reshape(shape)
        return code, framing.checked(code, array)
    except (zstandard.ZstdError, ValueError) as error:
        corrupt(f"{name}: damaged zstd frame: {error}", error)
