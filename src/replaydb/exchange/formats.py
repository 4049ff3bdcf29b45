"""Rows of `tokens()` as Parquet and as JSON lines, with nothing lost."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from replaydb.analysis.episode_rows import episode_schema
from replaydb.errors import InvalidInputError
from replaydb.exchange.parquet import batches_of, described_bytes, most_expanded

Format: TypeAlias = Literal["parquet", "jsonl"]
#: A row by the names of its columns, lists of numbers as arrays.
Row = dict[str, Any]

#: Rows are written together: so many bytes of them.
ROW_GROUP_BYTES = 16 << 20
#: Characters of a line of JSON at most, with its end.
MAX_LINE = 2**30
#: Names are read together.
READ_NAMES = 1024
#: What comes of a file that is none of rows.
_NO_ROWS = (
    pa.ArrowException, ValueError, TypeError, KeyError, OverflowError, RecursionError, OSError
)  # fmt: skip
_NUMBERS = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "token_versions": np.int32,
    "token_rewards": np.float32,
    "group_prompt_ids": np.int32,
}
_ARRAYS = ("token_extras", "extras", "group_extras")
#: Columns of which groups are made.
_COLUMNS = frozenset(episode_schema().names)
#: Columns that pandas makes floats of where a row has none.
_INTEGERS = frozenset({
    "group_id", "position", "num_episodes", "expected_episodes", "prompt_length", "policy_version"
})  # fmt: skip


class Writer(Protocol):
    """Writes a file."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Rows after those before."""

    def close(self) -> None:
        """Make it whole."""


class ParquetWriter:
    """Parquet, compressed with zstd."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path, self._schema = path, schema
        # Not those of structs, which `batches_of` has to measure by the longest text of each.
        dictionaries = [
            f"{one.name}.list.element" if pa.types.is_list(one.type) else one.name for one in schema
        ]
        self._file = pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=dictionaries)
        self._waiting: list[pa.RecordBatch] = []
        self._num_bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Rows after those before; small batches become one row group."""
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
        """Write the footer, without which the file is none."""
        try:
            self._flush()
        finally:
            self._file.close()
        # An import refuses what expands too far: half of that, as it counts otherwise.
        most = most_expanded(self._path.stat().st_size) // 2
        found = described_bytes(self._path, pq.read_metadata(self._path), most)
        if max(found, self._num_bytes) > most:
            self._expand()

    def _expand(self) -> None:
        """Write the file again as large as what it holds, without compression."""
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
    """A JSON object for each row."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._file = path.open("w", encoding="utf8")

    def write(self, batch: pa.RecordBatch) -> None:
        """Rows after those before."""
        lists = {name: _values(name, batch[name]) for name in _NUMBERS}
        others = batch.drop_columns(list(_NUMBERS)).to_pylist()
        for i, row in enumerate(others):
            self._file.write(_to_line(row | {name: lists[name][i] for name in _NUMBERS}))

    def close(self) -> None:
        """Hand over what is left to the system."""
        self._file.close()


WRITERS: dict[Format, Callable[[Path, pa.Schema], Writer]] = {
    "parquet": ParquetWriter,
    "jsonl": JsonlWriter,
}


def rows_of(path: Path, name: str) -> Iterator[Row]:
    """The rows of a file, by the ending of its name.

    Raises:
        InvalidInputError: It is not what its name says.
    """
    try:
        if name.endswith(".parquet"):
            yield from _parquet_rows(path, name)
        else:
            yield from _lines(path, name, _from_line)
    except InvalidInputError:
        raise
    except _NO_ROWS as error:
        raise InvalidInputError(name, "a file of rows", error) from error


#: What names a group, and tells it from a later one of the same uid.
NAMES = pa.schema({"buffer_name": pa.string(), "group_uid": pa.string(), "group_id": pa.int64()})


def names_of(path: Path, name: str) -> Iterator[pa.Table]:
    """The groups of a file under `NAMES`, a row wherever rows of another begin.

    Raises:
        InvalidInputError: It is not what its name says.
    """
    before = None
    try:
        is_parquet = name.endswith(".parquet")
        for table in _parquet_names(path, name) if is_parquet else _jsonl_names(path, name):
            keys = list(zip(*table.to_pydict().values(), strict=True))
            yield table.filter(pa.array([a != b for a, b in pairwise([before, *keys])], pa.bool_()))
            before = keys[-1] if keys else before
    except InvalidInputError:
        raise
    except _NO_ROWS as error:
        raise InvalidInputError(name, "a file of rows", error) from error


def _parquet_names(path: Path, name: str) -> Iterator[pa.Table]:
    for batch in batches_of(path, name, NAMES.names):
        columns = [
            batch[one.name].cast(one.type)
            if one.name in batch.schema.names
            else pa.nulls(len(batch), one.type)
            for one in NAMES
        ]
        yield pa.table(columns, schema=NAMES)


def _jsonl_names(path: Path, name: str) -> Iterator[pa.Table]:
    rows = _lines(path, name, _names)
    while several := list(islice(rows, READ_NAMES)):
        yield pa.Table.from_pylist(several, NAMES)


def _names(line: str) -> Row:
    row = _row(line)
    for one in NAMES:
        value, kind = row.get(one.name), int if one.type == pa.int64() else str
        if value is not None and type(value) is not kind:
            raise InvalidInputError(one.name, f"a value of type {kind.__name__}", f"{value!r:.80}")
    return {name: row.get(name) for name in NAMES.names}


def _lines(path: Path, name: str, read: Callable[[str], Row]) -> Iterator[Row]:
    """What is read of each line of a file; errors name it."""
    for where, line in lines_of(path, name):
        try:
            row = read(line)
        except InvalidInputError as error:
            field = f"{where}, {error.field}"
            raise InvalidInputError(field, error.expected, error.actual) from error
        except _NO_ROWS as error:
            raise InvalidInputError(where, "a row of a group", error) from error
        yield row


def lines_of(path: Path, name: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of a text file that are not blank, each after its place, for errors.

    Raises:
        InvalidInputError: A line has more than `MAX_LINE` characters; it is not read whole.
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
        raise ValueError("a line that is no JSON object")
    return row


def _parquet_rows(path: Path, name: str) -> Iterator[Row]:
    for batch in batches_of(path, name, _COLUMNS):
        names = batch.schema.names
        columns = [_values(*one) for one in zip(names, batch.columns, strict=True)]
        for values in zip(*columns, strict=True):
            yield dict(zip(names, values, strict=True))


def _values(name: str, column: pa.Array) -> list[Any]:
    """The values of a column; lists of numbers as arrays."""
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
    for name in _ARRAYS:
        for array in row.get(name) or ():
            array["data"] = base64.b64decode(array["data"], validate=True)
    return row


def _to_line(row: Row) -> str:
    for name in _NUMBERS:
        if row[name] is not None:
            row[name] = _to_json(row[name])
    for name in _ARRAYS:
        for array in row[name] or ():
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
    """Numbers; those that JSON has not as text, the bits of a NaN that is not the usual one."""
    listed: list[Any] = numbers.tolist()
    for i in np.flatnonzero(~np.isfinite(numbers)):
        bits = int(numbers[i : i + 1].view(np.uint32)[0])
        listed[i] = _SPECIAL.get(bits, f"{bits:#010x}")
    return listed


def numbers(field: str, values: Any, dtype: type[Any]) -> NDArray[Any]:
    """A list of JSON as an array; what does not fit the dtype is for `Episode` to refuse.

    Raises:
        InvalidInputError: There is something else than such numbers in it.
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
            with np.errstate(over="ignore"):  # as in an array
                found[i] = value
    return found


#: What stands in a list for numbers of a dtype, and what that is in Python.
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
