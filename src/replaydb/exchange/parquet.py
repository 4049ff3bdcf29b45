"""Parquet files, read in bounded memory whatever they claim to hold.

A few kilobytes of Parquet can describe gigabytes: repeated values are stored as counts, a
dictionary stores a text once for a million rows, and pages of zeros compress by thousands. The
footer may say anything. So the page headers of a file, by which the reader allocates memory, are
added up before a page is read. Text columns are read as dictionaries, and measured before these
are decoded. Arrow cannot read nested text so; there the longest text of a dictionary counts for
every value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from replaydb.errors import InvalidInputError

#: What a file may expand to: 64 MiB, or 1000 times its size if that is more. Episodes of a group
#: repeat its prompt, and turns the turns before them: files shrink more than payloads do.
FREE_EXPANSION_BYTES = 2**26
MAX_EXPANSION_RATIO = 1000
#: Rows are read together: at most this many, of about this many bytes.
READ_ROWS, READ_BYTES = 1024, 2**26

#: Bytes that a value takes in memory, by its physical type; of text, its place in a dictionary.
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 8,
           "BYTE_ARRAY": 4}  # fmt: skip
#: The encoding of text as what differs from the text before, which expands without limit.
_DELTA_BYTE_ARRAY = 7
#: The encodings of values as places in a dictionary.
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
        pyarrow.ArrowException, ValueError, OSError: It is not a Parquet file, or is damaged.
    """
    allowed = most_expanded(path.stat().st_size)
    metadata = pq.read_metadata(path)
    leaves = _leaves(metadata.schema, columns)
    described = described_bytes(path, metadata, allowed, leaves)
    _check(name, described, allowed)
    num_rows = max(1, min(READ_ROWS, READ_BYTES * metadata.num_rows // max(1, described)))
    texts = [leaf.path for i, leaf in leaves.items() if _is_kept_once(metadata, i)]
    with pq.ParquetFile(path, metadata=metadata, read_dictionary=texts) as file:
        names = file.schema_arrow.names
        known = [one for one in names if columns is None or one in columns]
        if columns is not None and not known:
            raise InvalidInputError(name, f"columns such as {', '.join(sorted(columns))}", names)
        expanded = 0
        for batch in file.iter_batches(batch_size=num_rows, columns=known):
            expanded += sum(map(_expanded_bytes, batch.columns))
            _check(name, expanded, allowed)
            yield pa.RecordBatch.from_arrays(
                [
                    column.dictionary_decode() if _is_dictionary(column) else column
                    for column in batch.columns
                ],
                batch.schema.names,
            )


def described_bytes(
    path: Path, metadata: Any, most: int, leaves: Collection[int] | None = None
) -> int:
    """Return how many bytes the page headers of a file describe; if more than `most`, any more.

    A text in a dictionary counts once if its column is read as a dictionary, else each time.

    Args:
        path: The file.
        metadata: Its `pyarrow.parquet.FileMetaData`.
        most: Where to stop.
        leaves: Columns to add up, by their positions among the leaves of the schema; by default
            all.

    Raises:
        ValueError: Pages overlap, are damaged, or are encoded so that they do not say their size.
    """
    total, left = 0, path.stat().st_size
    with path.open("rb") as file:
        for i in range(metadata.num_row_groups):
            for leaf in range(metadata.num_columns) if leaves is None else leaves:
                chunk = metadata.row_group(i).column(leaf)
                left -= chunk.total_compressed_size
                if left < 0 or chunk.total_compressed_size < 0:
                    raise ValueError("columns that overlap")
                column = metadata.schema.column(leaf)
                repeats = _is_text(column) and not _is_kept_once(metadata, leaf)
                total += _chunk_bytes(file, chunk, column, most - total, repeats=repeats)
                if total > most:
                    return total
    return total


def _leaves(schema: Any, columns: Collection[str] | None) -> dict[int, Any]:
    """Columns as they are stored, of those that are nested several, by their positions."""
    leaves = {i: schema.column(i) for i in range(len(schema))}
    if columns is None:
        return leaves
    return {i: leaf for i, leaf in leaves.items() if leaf.path.partition(".")[0] in columns}


def _check(name: str, num_bytes: int, allowed: int) -> None:
    if num_bytes > allowed:
        raise InvalidInputError(
            name, f"a file that expands to at most {allowed} bytes", f"one of {num_bytes} or more"
        )


def _chunk_bytes(file: BinaryIO, chunk: Any, leaf: Any, most: int, *, repeats: bool) -> int:
    """Bytes of the pages of one column in one row group, and of the values decoded from them.

    Args:
        file: The file.
        chunk: Metadata of the column in the row group.
        leaf: The column in the schema.
        most: Where to stop.
        repeats: Whether a text of the dictionary counts each time that it occurs.
    """
    # `length` is that of a value of fixed length, else 0. Beside each value the reader has two
    # levels of two bytes, and an offset for each list around it.
    width = _WIDTHS.get(leaf.physical_type, leaf.length) + 4 * (1 + leaf.max_repetition_level)
    position = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        position = min(position, chunk.dictionary_page_offset)
    end = position + chunk.total_compressed_size
    total: int = 0
    num_values = longest = 0
    while position < end:
        file.seek(position)
        header = _struct(file)
        kind, expanded, stored = header[1], header[2], header[3]
        position = file.tell() + stored
        page = header[_PAGES[kind]] if kind in _PAGES else {}
        count = page.get(1, 0)
        encoding = page.get(4 if kind == _DATA_V2 else 2)
        if min(stored, expanded, count) < 0:
            raise ValueError("a page of negative size")
        if encoding == _DELTA_BYTE_ARRAY:
            raise ValueError(f"{leaf.path} in the encoding DELTA_BYTE_ARRAY: write it in another")
        total += expanded + width * count
        if total > most:
            return total
        if kind != _DICTIONARY:
            num_values += count
            total += longest * count if encoding in _FROM_DICTIONARY else 0
        elif repeats:
            longest = _longest(_decompressed(file.read(stored), expanded, chunk.compression))
    # Else the reader would go on to pages that were not counted.
    if position != end or num_values < chunk.num_values:
        raise ValueError(f"pages of {leaf.path} that do not add up")
    return total


def _struct(file: BinaryIO) -> dict[int, Any]:
    """A page header, in the compact protocol of Thrift: its integers and structs by their numbers.

    Fields of other types are passed over, as the reader does that allocates by them.
    """
    found: dict[int, Any] = {}
    number = 0
    while head := _byte(file):
        number = number + (head >> 4) if head >> 4 else _signed(file)
        match head & 15:
            case 1 | 2:  # a flag, which the type says
                pass
            case 3:
                _byte(file)
            case 4 | 6:
                _unsigned(file)
            case 5:
                found[number] = _signed(file)
            case 7:
                file.seek(8, 1)
            case 8:
                file.seek(_unsigned(file), 1)
            case 12:
                found[number] = _struct(file)
            case other:
                raise ValueError(f"a page header with a field of type {other}")
    return found


def _byte(file: BinaryIO) -> int:
    if not (found := file.read(1)):
        raise ValueError("a page header that is cut off")
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


def _decompressed(page: bytes, num_bytes: int, compression: str) -> bytes:
    if compression == "UNCOMPRESSED":
        return page
    return bytes(pa.decompress(page, num_bytes, codec=compression.lower(), asbytes=True))


def _longest(page: bytes) -> int:
    """Bytes of the longest text of a dictionary, in which each comes after its length."""
    longest = position = 0
    while position < len(page):
        length = int.from_bytes(page[position : position + 4], "little")
        longest = max(longest, length)
        position += 4 + length
    return longest


def _is_kept_once(metadata: Any, position: int) -> bool:
    """Whether a column is read as a dictionary, which holds a text once however often it occurs.

    The reader makes dictionaries of top-level columns only, and not of `DELTA_LENGTH_BYTE_ARRAY`,
    in which DuckDB writes distinct texts with `PARQUET_VERSION v2`.
    """
    leaf = metadata.schema.column(position)
    if not _is_text(leaf) or _is_nested(leaf):
        return False
    chunks = (metadata.row_group(i).column(position) for i in range(metadata.num_row_groups))
    return all("DELTA_LENGTH_BYTE_ARRAY" not in chunk.encodings for chunk in chunks)


def _is_text(leaf: Any) -> bool:
    return bool(leaf.physical_type == "BYTE_ARRAY")


def _is_nested(leaf: Any) -> bool:
    return bool(leaf.path != leaf.name)


def _is_dictionary(array: pa.Array) -> bool:
    return bool(pa.types.is_dictionary(array.type))


def _expanded_bytes(array: pa.Array) -> int:
    """Bytes of an array once it is decoded, if it is a dictionary."""
    if not _is_dictionary(array):
        return int(array.nbytes)
    lengths = pc.binary_length(array.dictionary).take(array.indices)
    return int(pc.sum(lengths, min_count=0).as_py()) + 4 * len(array)
