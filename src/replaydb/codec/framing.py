"""Frame of a payload: a safetensors blob, optionally compressed with zstd.

Blobs are written and read here instead of by the safetensors library, which copies every tensor
twice to write it and once to read it. Here reading returns views of the same bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from replaydb.domain.episodes.arrays import NUMPY_CODES, TORCH_CODES, Array, bits, dtype_name
from replaydb.errors import ClientTooOldError, CorruptPayloadError
from replaydb.util import extras, memory

# Tensors by name: safetensors code, and bits as a numpy dtype.
Tensors = dict[str, tuple[str, NDArray[Any]]]

_VERSION_KEY = "replaydb"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"  # read as the header length of a blob, it is over 4 GB
#: Maximum size of a decompressed payload: 64 MiB, or 100 times its compressed size if that is more.
#: Real token arrays compress to a half or a tenth; only a decompression bomb claims more.
FREE_EXPANSION_BYTES = 2**26
MAX_EXPANSION_RATIO = 100
MAX_DIMENSIONS = 64  # of numpy

#: Safetensors codes by name of the dtype, and dtypes of the bits by code.
CODES = {name: code for code, name in (NUMPY_CODES | TORCH_CODES).items()}
BITS = {code: np.dtype(name).newbyteorder("<") for code, name in NUMPY_CODES.items()}
BITS |= {code: np.dtype("<i2" if code == "BF16" else "u1") for code in TORCH_CODES}


def corrupt(reason: str, cause: Exception | None = None) -> NoReturn:
    """Raise `CorruptPayloadError`."""
    raise CorruptPayloadError(reason) from cause


class Joined(NamedTuple):
    """A large tensor whose rows are in several arrays, which are joined when it is written.

    Attributes:
        arrays: Arrays [n, ...] of one dtype.
    """

    arrays: Sequence[Array]

    @property
    def itemsize(self) -> int:
        """Size of a value."""
        return self.arrays[0].itemsize

    @property
    def nbytes(self) -> int:
        """Size of all values."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return (sum(len(array) for array in self.arrays), *self.arrays[0].shape[1:])


Tensor: TypeAlias = "Array | Joined"


def arrays_of(tensor: Tensor) -> Sequence[Array]:
    """Return the arrays of a tensor."""
    return tensor.arrays if isinstance(tensor, Joined) else (tensor,)


def write(tensors: Mapping[str, Tensor], version: int, columns: str | None = None) -> memoryview:
    """Return a safetensors blob in reusable memory. The same tensors give the same bytes.

    `columns`: how columns are stored, see `compaction`.
    """
    metadata = {_VERSION_KEY: str(version)} | ({} if columns is None else {"columns": columns})
    header: dict[str, Any] = {"__metadata__": metadata}
    offsets: list[tuple[int, NDArray[Any]]] = []
    end = 0
    # Wider dtypes come first, so all tensors are aligned.
    for name, tensor in sorted(tensors.items(), key=lambda one: (-one[1].itemsize, one[0])):
        arrays, begin = arrays_of(tensor), end
        for array in arrays:
            offsets.append((end, bits(array)))
            end += array.nbytes
        header[name] = {
            "dtype": CODES[dtype_name(arrays[0])],
            "shape": tensor.shape,
            "data_offsets": (begin, end),
        }
    text = _JSON_WRITER.encode(header).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    blob = memory.take(start + end)
    blob[:start] = len(text).to_bytes(8, "little") + text
    for begin, array in offsets:
        np.ndarray(array.shape, array.dtype, blob, start + begin)[...] = array
    return blob.toreadonly()


class Blob(NamedTuple):
    """A safetensors blob.

    Attributes:
        version: Version of the payload format.
        tensors: Views of its tensors.
        columns: How columns are stored, see `compaction`.
    """

    version: int
    tensors: Tensors
    columns: str | None


def read(data: memoryview, newest: int) -> Blob:
    """Return views of the tensors in a blob of version `newest` or older.

    Raises:
        CorruptPayloadError: The data is not such a blob, or its sizes are inconsistent.
        ClientTooOldError: The blob is of a newer version.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    if end > len(data):
        corrupt(f"foreign or truncated: {len(data)} bytes with a header of {end}")
    header = parse_json(data[8:end])
    metadata = header.pop("__metadata__", None)
    version = metadata.get(_VERSION_KEY) if isinstance(metadata, dict) else None
    if not isinstance(version, str) or not version.isdecimal() or len(version) > 9:
        corrupt("foreign: safetensors, but not of replaydb")
    if not int(version):
        corrupt("written in payload format 0, which does not exist")
    if int(version) > newest:
        raise ClientTooOldError(
            f"written in payload format {version}, and this replaydb reads up to {newest}; run: "
            "pip install --upgrade replaydb"
        )
    tensors: Tensors = {}
    begin = 0
    for name, spec in header.items():
        try:
            tensors[name] = _tensor(data, end, spec, begin)
        except (TypeError, KeyError, ValueError) as error:
            corrupt(f"tensor {name!r}: {error!r}", error)
        begin += tensors[name][1].nbytes
    if end + begin != len(data):
        corrupt(f"{len(data)} bytes, where the header describes {end + begin}")
    return Blob(int(version), tensors, metadata.get("columns"))


def parse_json(data: bytes | memoryview) -> dict[str, Any]:
    """Return a JSON object from its UTF-8 bytes.

    Raises:
        CorruptPayloadError: The bytes are not a JSON object, or contain NaN or infinities.
    """
    try:
        value = _JSON.decode(str(data, "utf-8"))
    except (ValueError, RecursionError) as error:
        corrupt(f"foreign or altered: {error}", error)
    if not isinstance(value, dict):
        corrupt("foreign: not a JSON object")
    return value


def compress(blob: memoryview) -> bytes | memoryview:
    """Return one zstd frame with its content size, or the blob if `decompress` would refuse that.

    Raises:
        NotSupportedError: zstandard is not installed.
    """
    frame: bytes = zstandard_library().ZstdCompressor().compress(blob)
    return frame if len(blob) <= _most_expanded(len(frame)) else blob


def decompress(data: memoryview) -> memoryview:
    """Return the content of a zstd frame, or other data unchanged.

    Raises:
        CorruptPayloadError: The frame is damaged, or claims a larger content than allowed. No
            memory is allocated for that claim.
        NotSupportedError: zstandard is not installed.
    """
    if data[:4] != _ZSTD_MAGIC:
        return data
    zstandard = zstandard_library()
    try:
        size = zstandard.get_frame_parameters(data).content_size
        if size > _most_expanded(len(data)):  # also true for an unknown size
            corrupt(f"{len(data)} bytes of zstd that claim to hold {size}")
        blob = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        corrupt(f"damaged zstd frame: {error}", error)
    return memoryview(blob)


def _most_expanded(num_bytes: int) -> int:
    """Return the maximum content size of a compressed payload of `num_bytes`."""
    return max(FREE_EXPANSION_BYTES, MAX_EXPANSION_RATIO * num_bytes)


def _tensor(data: memoryview, start: int, spec: Any, begin: int) -> tuple[str, NDArray[Any]]:
    """Return one tensor, which must begin at `begin` in the bytes from `start` on."""
    code, shape = spec["dtype"], spec["shape"]
    first, last = spec["data_offsets"]
    dtype = BITS[code]
    # A product with text is the repeated text, and one of many large numbers takes long.
    if len(shape) > MAX_DIMENSIONS or any([type(length) is not int for length in shape]):
        raise ValueError(f"a shape of other values than at most {MAX_DIMENSIONS} integers")
    if first != begin or last - first != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{code} {shape} cannot lie at {first}..{last}, after {begin}")
    return code, checked(code, np.ndarray(shape, dtype, data, start + first))


def checked(code: str, array: NDArray[Any]) -> NDArray[Any]:
    """Return an array of a type if its bytes are values of it.

    Raises:
        ValueError: A bool has a byte that is neither true nor false.
    """
    if code == "BOOL" and array.view(np.uint8).max(initial=0) > 1:
        raise ValueError("bytes that are neither true nor false")
    return array


def zstandard_library() -> ModuleType:
    """Return the module `zstandard`, or raise `NotSupportedError`."""
    extras.need("zstd", "a compressed payload")

    import zstandard

    return zstandard


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)
_JSON_WRITER = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"))
