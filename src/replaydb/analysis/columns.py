"""Rows of a database as Arrow columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import pyarrow as pa
from sqlalchemy import Boolean, Double, Integer, Select, String
from sqlalchemy.types import TypeEngine

from replaydb import checks
from replaydb.database.column_types import UtcDateTime
from replaydb.errors import CorruptPayloadError

TIME = pa.timestamp("us", tz="UTC")

#: What to do with a group of which something cannot be read.
Damaged: TypeAlias = Literal["raise", "skip"]


def to_damaged(value: str) -> Damaged:
    """What a caller wants done with damaged groups."""
    return checks.one_of("damaged", value, get_args(Damaged))


def schema_of(rows: Select[Any]) -> pa.Schema:
    """The columns of a query, all of which may be null."""
    return pa.schema([(column.key, _type(column.type)) for column in rows.selected_columns])


def _type(kind: TypeEngine[Any]) -> pa.DataType:
    match kind:
        case UtcDateTime():
            return TIME
        case Boolean():
            return pa.bool_()
        case Integer():
            return pa.int64()
        case Double():
            return pa.float64()
        case String():
            return pa.string()
    raise TypeError(f"no column of {kind!r}")


def batch_of(
    schema: pa.Schema,
    rows: Sequence[Sequence[Any]],
    id_of: Callable[[Any], int],
    damaged: Damaged = "raise",
) -> pa.RecordBatch:
    """Rows as Arrow; they may have more columns than the schema.

    Raises:
        CorruptPayloadError: SQLite, which takes anything, has something in a column that cannot be
            there. It names the groups.
    """
    try:
        return _batch(schema, rows)
    except _UNFIT:
        wrong = {id(row): reason for row in rows if (reason := _fault(schema, row)) is not None}
    if damaged == "raise":
        ids = sorted({id_of(row) for row in rows if id(row) in wrong})
        raise CorruptPayloadError("; ".join(sorted(set(wrong.values()))), ids)
    return _batch(schema, [row for row in rows if id(row) not in wrong])


_UNFIT = (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, TypeError, ValueError)


def _batch(schema: pa.Schema, rows: Sequence[Sequence[Any]]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True) if rows else [[] for _ in schema]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=False)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _fault(schema: pa.Schema, row: Sequence[Any]) -> str | None:
    for value, field in zip(row, schema, strict=False):
        try:
            pa.array([value], field.type)
        except _UNFIT:
            return f"{field.name} can not be read: {value!r:.80}"
    return None
