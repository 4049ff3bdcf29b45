"""Lossless Parquet and JSON Lines files of the rows of `analysis.tokens()`."""

from __future__ import annotations

import base64
import errno
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from replaydb.analysis.episode_columns import ARRAY, DTYPES, LISTS, TOKENS, episode_schema
from replaydb.domain import checks
from replaydb.errors import InvalidInputError, NotSupportedError, PayloadsUnavailableError
from replaydb.exchange.parquet import batches_of, described_bytes, most_expanded

Format: TypeAlias = Literal["parquet", "jsonl"]
#: A row by column name, with lists of numbers as arrays.
Row = dict[str, Any]

#: Size of a Parquet row group, in bytes of Arrow data.
ROW_GROUP_BYTES = 16 << 20
#: Maximum length of a JSON line in characters, including its newline.
MAX_LINE = 2**30
#: Number of names that are read at once.
READ_NAMES = 1024
#: Errors that an invalid file can cause.
_INVALID_FILE = (
    pa.ArrowException, ValueError, TypeError, KeyError, OverflowError, RecursionError, OSError
)  # fmt: skip
#: Lists of numbers, and their dtypes.
_NUMBERS: dict[str, Any] = {name: DTYPES[kind].type for name, kind in TOKENS.items()} | {
    "group_prompt_ids": np.int32
}
_ARRAYS = [name for name, kind in LISTS.items() if kind == ARRAY]
#: Columns that groups are built from.
_COLUMNS = frozenset(episode_schema().names)
#: Integer columns, which pandas writes as floats if a row has no value.
_INTEGERS = frozenset({
    "group_id", "position", "num_episodes", "expected_episodes", "prompt_length", "policy_version"
})  # fmt: skip


class ParquetWriter:
    """Writer of a Parquet file, compressed with zstd."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path, self._schema = path, schema
        # No dictionaries in structs: most of their bytes are arrays, which seldom repeat.
        dictionaries = [
            f"{one.name}.list.element" if pa.types.is_list(one.type) else one.name for one in schema
        ]
        self._file = pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=dictionaries)
        self._waiting: list[pa.RecordBatch] = []
        self._num_bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows; small batches are combined into one row group."""
        self._waiting.append(batch)
        if sum(one.nbytes for one in self._waiting) >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            table = pa.Table.from_batches(self._waiting)
            self._num_bytes += table.nbytes
            self._file.write_table(table)
            self._waiting = []

    def close(self) -> None:
        """Write the footer, which completes the file."""
        try:
            self._flush()
        finally:
            self._file.close()
        # An import refuses files that expand too far. Half of its limit, as it counts differently.
        most = most_expanded(self._path.stat().st_size) // 2
        found = described_bytes(self._path, pq.read_metadata(self._path), most)
        if max(found, self._num_bytes) > most:
            self._expand()

    def _expand(self) -> None:
        """Rewrite the file without compression and dictionaries."""
        plain = self._path.with_name(f"{self._path.name}.plain")
        try:
            with (
                pq.ParquetFile(self._path) as file,
                pq.ParquetWriter(
                    plain, self._schema, compression="none", use_dictionary=False
                ) as writer,
            ):
                for i in range(file.num_row_groups):
                    writer.write_table(file.read_row_group(i))
            plain.replace(self._path)
        finally:
            plain.unlink(missing_ok=True)


class JsonlWriter:
    """Writer of a JSON Lines file, with one object for each row."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._file = path.open("w", encoding="utf8")

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows.

        Raises:
            NotSupportedError: A line is longer than an import reads.
        """
        lists = {name: _values(name, batch[name]) for name in _NUMBERS}
        others = batch.drop_columns(list(_NUMBERS)).to_pylist()
        for i, row in enumerate(others):
            line = _to_line(row | {name: lists[name][i] for name in _NUMBERS})
            if len(line) > MAX_LINE:
                raise NotSupportedError(
                    f"group {row['group_id']}, episode {row['position']}: {len(line)} characters, "
                    f"and a line of JSON has at most {MAX_LINE}. Export to Parquet instead."
                )
            self._file.write(line)

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()


#: A writer of one file.
Writer = ParquetWriter | JsonlWriter
WRITERS: dict[Format, Callable[[Path, pa.Schema], Writer]] = {
    "parquet": ParquetWriter,
    "jsonl": JsonlWriter,
}


def rows_of(path: Path, name: str) -> Iterator[Row]:
    """Yield the rows of a file, whose format is given by the suffix of its name.

    Raises:
        InvalidInputError: The file is not valid.
        PayloadsUnavailableError: The file cannot be read.
    """
    with reading(name):
        if name.endswith(".parquet"):
            yield from _parquet_rows(path, name, _COLUMNS)
        else:
            yield from _lines(path, name, _from_line)


@contextmanager
def reading(name: str, expected: str = "a file with rows of episodes") -> Iterator[None]:
    """Raise errors that an invalid file causes as `InvalidInputError`, and no others."""
    try:
        yield
    except InvalidInputError:
        raise
    except _INVALID_FILE as error:
        # pyarrow sets no number, and an invalid file may have negative offsets.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise PayloadsUnavailableError(name, os.strerror(error.errno)) from error
        if isinstance(error, MemoryError):
            raise
        raise InvalidInputError(name, expected, error) from error


#: Columns that identify a group; `group_id` distinguishes groups that had the same uid.
_KEY = {"buffer_name": str, "group_uid": str, "group_id": int}
NAMES = pa.schema({"buffer_name": pa.string(), "group_uid": pa.string(), "group_id": pa.int64()})


def names_of(path: Path, name: str) -> Iterator[pa.Table]:
    """Yield the columns `NAMES` of a file, one row for each sequence of rows of a group.

    Raises:
        InvalidInputError: The file is not valid.
        PayloadsUnavailableError: The file cannot be read.
    """
    with reading(name):
        if name.endswith(".parquet"):
            rows = _parquet_rows(path, name, NAMES.names)
        else:
            rows = _lines(path, name, _names)
        keys = (key for key, _ in groupby(rows, _key))
        while several := list(islice(keys, READ_NAMES)):
            columns = zip(zip(*several, strict=True), NAMES.types, strict=True)
            yield pa.table([pa.array(*column) for column in columns], schema=NAMES)


def _key(row: Row) -> list[Any]:
    values = ((row.get(name), kind) for name, kind in _KEY.items())
    return [None if value is None else kind(value) for value, kind in values]


def _names(line: str) -> Row:
    row = _row(line)
    for name, kind in _KEY.items():
        value = row.get(name)
        if value is not None and type(value) is not kind:
            raise InvalidInputError(name, f"a value of type {kind.__name__}", f"{value!r:.80}")
    return {name: row.get(name) for name in _KEY}


def _lines(path: Path, name: str, read: Callable[[str], Row]) -> Iterator[Row]:
    """Yield the result of `read` for each line of a file; errors name the line."""
    for where, line in lines_of(path, name):
        try:
            row = read(line)
        except InvalidInputError as error:
            field = f"{where}, {error.field}"
            raise InvalidInputError(field, error.expected, error.actual) from error
        except _INVALID_FILE as error:
            raise InvalidInputError(where, "a row of an episode", error) from error
        yield row


def lines_of(path: Path, name: str) -> Iterator[tuple[str, str]]:
    """Yield (position for errors, line) for each line of a text file that is not blank.

    Raises:
        InvalidInputError: A line has more than `MAX_LINE` characters.
    """
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), ""), 1):
            where = f"{name}, line {number}"
            if len(line) > MAX_LINE:
                raise InvalidInputError(where, f"at most {MAX_LINE} characters", "more")
            if not line.isspace():
                yield where, line


def _row(line: str) -> Row:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("a line that is not a JSON object")
    return row


def _parquet_rows(path: Path, name: str, wanted: Collection[str]) -> Iterator[Row]:
    for batch in batches_of(path, name, wanted):
        names = batch.schema.names
        columns = [_values(*one) for one in zip(names, batch.columns, strict=True)]
        for values in zip(*columns, strict=True):
            yield dict(zip(names, values, strict=True))


def _values(name: str, column: pa.Array) -> list[Any]:
    """Return the values of a column; lists of numbers as arrays."""
    kind = column.type
    if name in _INTEGERS and pa.types.is_floating(kind):
        return list(column.cast(pa.int64()).to_pylist())
    if not pa.types.is_list(kind) and not pa.types.is_large_list(kind):
        return list(column.to_pylist())
    number = kind.value_type
    if not pa.types.is_primitive(number) or column.values.null_count:
        return list(column.to_pylist())
    values = column.values.to_numpy(zero_copy_only=False)
    offsets = column.offsets.to_numpy()
    known = column.is_valid().to_numpy(zero_copy_only=False)
    return [
        values[begin:end] if is_known else None
        for begin, end, is_known in zip(offsets[:-1], offsets[1:], known, strict=True)
    ]


def _from_line(line: str) -> Row:
    row = _row(line)
    for name, dtype in _NUMBERS.items():
        if row.get(name) is not None:
            row[name] = numbers(name, row[name], dtype)
    for array in _arrays(row):
        array["data"] = base64.b64decode(array["data"], validate=True)
    return row


def _arrays(row: Row) -> Iterator[dict[str, Any]]:
    """Yield the named arrays of a row."""
    for name in _ARRAYS:
        yield from row.get(name) or ()
    for turn in row.get("turns") or ():
        if "context_extras" in turn:
            yield from turn["context_extras"] or ()


def _to_line(row: Row) -> str:
    for name in _NUMBERS:
        if row[name] is not None:
            row[name] = _to_json(row[name])
    for array in _arrays(row):
        array["data"] = base64.b64encode(array["data"]).decode("ascii")
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            row[name] = _to_json(np.array([value], np.float32))[0]
    return json.dumps(row, ensure_ascii=False, allow_nan=False, default=_time) + "\n"


def _time(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} in JSON")


def _to_json(numbers: NDArray[Any]) -> list[Any]:
    """Return numbers for JSON: non-finite ones as text, a non-standard NaN by its bits."""
    listed: list[Any] = numbers.tolist()
    for i in np.flatnonzero(~np.isfinite(numbers)):
        bits = int(numbers[i : i + 1].view(np.uint32)[0])
        listed[i] = _SPECIAL.get(bits, f"{bits:#010x}")
    return listed


def numbers(field: str, values: Any, dtype: type[Any]) -> NDArray[Any]:
    """Convert a JSON list to an array; `Episode` refuses values that do not fit the dtype.

    Raises:
        InvalidInputError: The value is not a list, or has items of another type.
    """
    expected, kinds = _KINDS[dtype]
    if not isinstance(values, list):
        raise InvalidInputError(field, expected, f"{values!r:.80}")
    if not set(map(type, values)) <= kinds:
        wrong = next(value for value in values if type(value) not in kinds)
        raise InvalidInputError(field, expected, f"{wrong!r:.80}")
    if dtype is not np.float32 or str not in map(type, values):
        return np.array(values) if values else np.empty(0, dtype)
    found = np.empty(len(values), np.float32)
    for i, value in enumerate(values):
        if isinstance(value, str):
            if value not in _BITS and not re.fullmatch("0x[0-9a-f]{8}", value):
                raise InvalidInputError(field, expected, f"{value!r:.80}")
            found[i : i + 1].view(np.uint32)[0] = _BITS.get(value) or int(value, 16)
        else:
            found[i] = checks.float32(field, value)
    return found


#: Expected content of a list and Python types of its items, by dtype.
_KINDS: dict[type[Any], tuple[str, set[type]]] = {
    np.int32: ("a list of integers", {int}),
    np.bool_: ("a list of true and false, or of 1 and 0", {bool, int}),
    np.float32: (
        'a list of numbers, "NaN", "Infinity", "-Infinity" or bits as "0x7fc00001"',
        {float, int, str},
    ),
}
_BITS = {"NaN": 0x7FC00000, "Infinity": 0x7F800000, "-Infinity": 0xFF800000}
_SPECIAL = {bits: name for name, bits in _BITS.items()}
