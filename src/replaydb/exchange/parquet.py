"""Bounded-memory reading of untrusted Parquet files.

A few kilobytes of Parquet can expand to gigabytes: repeated values are stored as counts, a
dictionary stores a text once for a million rows, and pages of zeros compress by a factor of
thousands. Arrow reads one row as a whole, and does not compare the pages with the footer, which may
state any size. So the sizes in the page headers, by which Arrow allocates memory, are added up
before a page is read (`docs/decisions/0022-parquet-page-headers.md`). Text in dictionaries is read
as dictionaries, and its size is checked before it is decoded.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from replaydb.errors import InvalidInputError
from replaydb.util.chunks import chunks

#: Limit of expansion: 64 MiB, or 1000 times the size of the file if that is more. Episodes repeat
#: the prompt of their group, and turns the turns before them, so files compress well.
FREE_EXPANSION_BYTES = 2**26
MAX_EXPANSION_RATIO = 1000
#: Maximum number of rows, and approximate number of bytes, that are read at once.
READ_ROWS, READ_BYTES = 1024, 2**26

#: Bytes of a value in memory, by physical type; for text, bytes of its index in a dictionary.
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 8,
           "BYTE_ARRAY": 4}  # fmt: skip
#: The encoding of text as differences from the text before, which expands without limit.
_DELTA_BYTE_ARRAY = 7
#: The encodings of values as indexes into a dictionary.
_FROM_DICTIONARY = (2, 8)
#: Kinds of pages, by the fields of a page header that describe them.
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_PAGES = {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}


def most_expanded(num_bytes: int) -> int:
    """Return how many bytes a file of `num_bytes` may expand to."""
    return max(FREE_EXPANSION_BYTES, MAX_EXPANSION_RATIO * num_bytes)


def batches_of(
    path: Path, name: str, columns: Collection[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a Parquet file, a limited number of bytes at a time.

    Args:
        path: The file.
        name: Its name, for errors.
        columns: Columns to read, if the file has them; by default all. No others are decompressed.

    Raises:
        InvalidInputError: The file expands to more than `most_expanded` of its size.
        pyarrow.ArrowException, ValueError, OSError: The file is not Parquet, or is damaged.
    """
    allowed = most_expanded(path.stat().st_size)
    metadata = pq.read_metadata(path)
    leaves = _leaves(metadata.schema, columns)
    described = described_bytes(path, metadata, allowed, leaves)
    _check(name, described, allowed)
    num_rows = max(1, min(READ_ROWS, READ_BYTES * metadata.num_rows // max(1, described)))
    names = metadata.schema.to_arrow_schema().names
    known = [one for one in names if columns is None or one in columns]
    if columns is not None and not known:
        raise InvalidInputError(name, f"columns such as {', '.join(sorted(columns))}", names)
    expanded = 0
    for i in range(metadata.num_row_groups):
        chunks = {leaf: metadata.row_group(i).column(leaf) for leaf in leaves}
        texts = [leaf for leaf, chunk in chunks.items() if _is_dictionary_of_text(chunk)]
        with pq.ParquetFile(path, metadata=metadata, read_dictionary=texts) as file:
            for batch in file.iter_batches(batch_size=num_rows, row_groups=[i], columns=known):
                sizes = sum(map(_text_bytes, batch.columns), np.zeros(len(batch), np.int64))
                expanded += int(sizes.sum())
                _check(name, expanded, allowed)
                yield from map(_decoded, _parts(batch, sizes))


def described_bytes(
    path: Path, metadata: Any, most: int, leaves: Collection[int] | None = None
) -> int:
    """Return the number of bytes that the page headers of a file describe.

    Stops early above `most`. A text in a dictionary counts once.

    Args:
        path: The file.
        metadata: Its `pyarrow.parquet.FileMetaData`.
        most: Number of bytes above which to stop.
        leaves: Columns to add up, by index among the leaves of the schema; by default all.

    Raises:
        ValueError: Pages overlap, are damaged, or use an encoding of unlimited expansion.
    """
    total, left = 0, path.stat().st_size
    with path.open("rb") as file:
        _check_footer(file, metadata)
        for i in range(metadata.num_row_groups):
            for leaf in range(metadata.num_columns) if leaves is None else leaves:
                chunk = metadata.row_group(i).column(leaf)
                left -= chunk.total_compressed_size
                if left < 0 or chunk.total_compressed_size < 0:
                    raise ValueError("columns that overlap")
                total += _chunk_bytes(file, chunk, metadata.schema.column(leaf), most - total)
                if total > most:
                    return total
    return total


def _check_footer(file: BinaryIO, metadata: Any) -> None:
    """Check what would end the process when Arrow reads the metadata of a column.

    Raises:
        ValueError: A column is encrypted, or has size statistics for other levels than its own, or
            a struct is of another type.
    """
    file.seek(-8, os.SEEK_END)
    file.seek(-8 - int.from_bytes(file.read(4), "little"), os.SEEK_END)
    for group in _struct(file)[4]:
        for leaf, chunk in zip(_leaves(metadata.schema, None).values(), group[1], strict=True):
            column = chunk[3]
            sizes = column.get(16, {}) if isinstance(column, dict) else None
            if not isinstance(sizes, dict):  # it may hide a struct of that number before it
                raise ValueError(f"metadata of {leaf.path} of another type")
            levels = leaf.max_repetition_level, leaf.max_definition_level
            if 8 in chunk or (1 in sizes and leaf.physical_type != "BYTE_ARRAY"):
                raise ValueError(f"{leaf.path}, encrypted or with another size")
            for field, level in zip((2, 3), levels, strict=True):
                if len(sizes.get(field, ())) not in (0, level + 1):
                    raise ValueError(f"size statistics of {leaf.path} for other levels")


def _leaves(schema: Any, columns: Collection[str] | None) -> dict[int, Any]:
    """Return the leaf columns of the schema by index; a nested column has several."""
    leaves = {i: schema.column(i) for i in range(len(schema))}
    if columns is None:
        return leaves
    return {i: leaf for i, leaf in leaves.items() if leaf.path.partition(".")[0] in columns}


def _check(name: str, num_bytes: int, allowed: int) -> None:
    if num_bytes > allowed:
        raise InvalidInputError(
            name, f"a file that expands to at most {allowed} bytes", f"one of {num_bytes} or more"
        )


def _chunk_bytes(file: BinaryIO, chunk: Any, leaf: Any, most: int) -> int:
    """Return the bytes of one column in one row group: its pages and their decoded values.

    Args:
        file: The file.
        chunk: Metadata of the column in the row group.
        leaf: The column in the schema.
        most: Number of bytes above which to stop.
    """
    # `length` is the size of a fixed-length value, else 0. For each value the reader also allocates
    # two levels of two bytes, and an offset for each enclosing list.
    width = _WIDTHS.get(leaf.physical_type, leaf.length) + 4 * (1 + leaf.max_repetition_level)
    position = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        position = min(position, chunk.dictionary_page_offset)
    end = position + chunk.total_compressed_size
    total: int = 0
    num_values = 0
    while position < end:
        file.seek(position)
        header = _struct(file)
        kind, expanded, stored = header[1], header[2], header[3]
        position = file.tell() + stored
        page = header[_PAGES[kind]] if kind in _PAGES else {}
        if not isinstance(page, dict):
            raise ValueError("a page header with a field of another type")
        count = page.get(1, 0)
        encoding = page.get(4 if kind == _DATA_V2 else 2)
        if min(stored, expanded, count) < 0:
            raise ValueError("a page of negative size")
        if encoding == _DELTA_BYTE_ARRAY:
            raise ValueError(f"{leaf.path} in the encoding DELTA_BYTE_ARRAY; use another encoding")
        is_text = leaf.physical_type == "BYTE_ARRAY"
        if is_text and encoding in _FROM_DICTIONARY and not chunk.has_dictionary_page:
            raise ValueError(f"a dictionary of {leaf.path} that the footer does not mention")
        total += expanded + width * count
        if total > most:
            return total
        if kind != _DICTIONARY:
            num_values += count
    # Otherwise the reader would continue with pages that were not counted.
    if position != end or num_values < chunk.num_values:
        raise ValueError(f"pages of {leaf.path} that do not add up")
    return total


def _struct(file: BinaryIO, found: dict[int, Any] | None = None) -> dict[int, Any]:
    """Parse a struct (Thrift compact protocol): 32-bit integers, structs and lists by field number.

    Other values are skipped, as is a field of another type than the reader that allocates memory
    expects; 64-bit integers are None. Like that reader, it adds a repeated struct to `found`.
    """
    found = {} if found is None else found
    number = 0
    while head := _byte(file):
        number = number + (head >> 4) if head >> 4 else _signed(file)
        match head & 15:
            case 1 | 2:  # a bool; its value is in the type
                pass
            case 5:
                found[number] = _signed(file)
            case 6:
                _unsigned(file)
                found.setdefault(number)
            case 12:
                before = found.get(number)
                found[number] = _struct(file, before if isinstance(before, dict) else None)
            case 9:
                found[number] = _list(file)
            case kind:
                _value(file, kind)
    return found


def _list(file: BinaryIO) -> list[Any]:
    head = _byte(file)
    size = head >> 4 if head >> 4 < 15 else _unsigned(file)
    return [_value(file, head & 15) for _ in range(size)]


def _value(file: BinaryIO, kind: int) -> Any:
    """Parse an item of a list; skip those that are neither structs nor lists."""
    match kind:
        case 1 | 2 | 3:
            _byte(file)
        case 4 | 5 | 6:
            _unsigned(file)
        case 7:  # not skipped, as a list of them would not end at the end of the file
            for _ in range(8):
                _byte(file)
        case 8:
            file.seek(_unsigned(file), 1)
        case 9:
            return _list(file)
        case 12:
            return _struct(file)
        case _:
            raise ValueError(f"a value of type {kind}")
    return None


def _byte(file: BinaryIO) -> int:
    if not (found := file.read(1)):
        raise ValueError("a truncated page header")
    return found[0]


def _unsigned(file: BinaryIO) -> int:
    value = shift = 0
    while (byte := _byte(file)) & 0x80 and shift < 63:
        value |= (byte & 0x7F) << shift
        shift += 7
    return value | byte << shift


def _signed(file: BinaryIO) -> int:
    value = _unsigned(file)
    return (value >> 1) ^ -(value & 1)


def _is_dictionary_of_text(chunk: Any) -> bool:
    """Whether a column is read as a dictionary, which stores each distinct text once.

    Arrow cannot read `DELTA_LENGTH_BYTE_ARRAY` in this way, which DuckDB uses for distinct texts
    with `PARQUET_VERSION v2`. Row groups with that encoding have no dictionary.
    """
    return bool(chunk.physical_type == "BYTE_ARRAY" and chunk.has_dictionary_page)


def _is_dictionary(array: pa.Array) -> bool:
    return bool(pa.types.is_dictionary(array.type))


def _decoded(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Decode the columns that are dictionaries. Those inside of others are as good for a reader."""
    columns = [one.dictionary_decode() if _is_dictionary(one) else one for one in batch.columns]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


def _text_bytes(array: pa.Array) -> NDArray[np.int64]:
    """Return the size of the decoded dictionaries in each value of an array."""
    if isinstance(array, pa.ExtensionArray):
        return _text_bytes(array.storage)
    sizes = np.zeros(len(array), np.int64)
    if _is_dictionary(array):
        lengths = pc.binary_length(array.dictionary).take(array.indices)
        sizes += lengths.fill_null(0).to_numpy(zero_copy_only=False)
    elif pa.types.is_struct(array.type):
        sizes += sum(map(_text_bytes, array.flatten()))
    elif isinstance(array, pa.ListArray | pa.LargeListArray):  # a map is a list of structs
        sizes += np.diff(np.append(0, np.cumsum(_text_bytes(array.values)))[array.offsets])
    elif pa.types.is_fixed_size_list(array.type):
        of_lists = _text_bytes(array.values).reshape(-1, array.type.list_size).sum(axis=1)
        sizes += of_lists[array.offset : array.offset + len(array)]
    elif pa.types.is_nested(array.type):
        raise ValueError(f"a column of type {array.type}")
    return sizes


def _parts(batch: pa.RecordBatch, sizes: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
    """Yield rows of at most `READ_BYTES` once decoded, or single rows."""
    for rows in chunks(range(len(batch)), sizes.tolist().__getitem__, READ_BYTES):
        yield batch[rows[0] : rows[-1] + 1]
