"""Conversion of database rows to Arrow columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import pyarrow as pa
from sqlalchemy import Boolean, Double, Integer, Select, String
from sqlalchemy.types import TypeEngine

from replaydb.database.tables.column_types import UtcDateTime
from replaydb.domain import checks
from replaydb.errors import CorruptPayloadError

TIME = pa.timestamp("us", tz="UTC")

#: What to do with a group that cannot be read.
Damaged: TypeAlias = Literal["raise", "skip"]


def to_damaged(value: str) -> Damaged:
    """Check the argument `damaged`."""
    return checks.one_of("damaged", value, get_args(Damaged))


def schema_of(rows: Select[Any]) -> pa.Schema:
    """Return the columns of a query as a schema; all of them are nullable."""
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
    schema: pa.Schema, rows: Sequence[Sequence[Any]], damaged: Damaged = "raise"
) -> pa.RecordBatch:
    """Convert rows to an Arrow batch.

    Args:
        schema: Columns of the batch.
        rows: Rows, which may have further columns after those of the schema.
        damaged: What to do with rows that have a value of a wrong type: raise, or skip them.

    Raises:
        CorruptPayloadError: A column has a value of a wrong type, which SQLite does not prevent;
            the error names the groups, if the rows have their ids.
    """
    try:
        return _batch(schema, rows)
    except _WRONG_TYPE:
        wrong = {id(row): reason for row in rows if (reason := _fault(schema, row)) is not None}
        if not wrong:  # no value is damaged: for example, the rows are too large together
            raise
    if damaged == "raise":
        index = schema.get_field_index("group_id")
        ids = sorted({row[index] for row in rows if index >= 0 and id(row) in wrong})
        raise CorruptPayloadError("; ".join(sorted(set(wrong.values()))), ids)
    return _batch(schema, [row for row in rows if id(row) not in wrong])


_WRONG_TYPE = (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, TypeError, ValueError)


def _batch(schema: pa.Schema, rows: Sequence[Sequence[Any]]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True) if rows else [[] for _ in schema]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=False)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _fault(schema: pa.Schema, row: Sequence[Any]) -> str | None:
    for value, field in zip(row, schema, strict=False):
        try:
            pa.array([value], field.type)
        except _WRONG_TYPE:
            return f"{field.name} cannot be read: {value!r:.80}"
    return None
