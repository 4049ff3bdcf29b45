"""Arrow tables that are read when needed, and conversion of database rows to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import pyarrow as pa
from sqlalchemy import Boolean, Double, Integer, Select, String
from sqlalchemy.types import TypeEngine

from replaydb.database.tables.column_types import UtcDateTime
from replaydb.domain import checks
from replaydb.errors import CorruptPayloadError, NotSupportedError

if TYPE_CHECKING:
    import pandas as pd

TIME = pa.timestamp("us", tz="UTC")

#: What to do with a group that cannot be read.
Damaged: TypeAlias = Literal["raise", "skip"]


class Rows:
    """A lazy table of rows of a store. Each reading queries the store again, page by page.

    It implements the Arrow stream interface (`__arrow_c_stream__`), so `polars.DataFrame`, `duckdb`
    and `pyarrow.table` accept it. Memory holds one or two pages, whatever the number of rows,
    unless you load all of them. Pages are cut by their size: about 64 MB, or one larger row.

    A reading is a keyset-paginated scan by ascending id. It returns each row that existed when it
    began once, as it is when its page is read; rows deleted before that are omitted. Each page is a
    consistent snapshot, and so are all rows of a group from `groups` and `tokens`; different pages
    are not. Each page is a short read-only transaction: it does not block writers, and a paused
    reader holds no snapshot.

    Attributes:
        schema: Names and types of the columns; they do not depend on the stored data.
    """

    def __init__(self, schema: pa.Schema, batches: Callable[[], Iterator[pa.RecordBatch]]) -> None:
        self.schema = schema
        self._batches = batches

    def __repr__(self) -> str:
        return f"Rows({', '.join(self.schema.names)})"

    def reader(self) -> pa.RecordBatchReader:
        """Return a `pyarrow.RecordBatchReader` over all rows.

        It keeps a connection from the first row to the last, or until it is garbage-collected. Use
        each reader in one thread only.
        """
        return pa.RecordBatchReader.from_batches(self.schema, self._batches())

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.reader().__arrow_c_stream__(requested_schema)

    def to_table(self) -> pa.Table:
        """Load all rows into memory, as a `pyarrow.Table`.

        Raises:
            CorruptPayloadError: A group is damaged; the error names it.
            DatabaseError: The store cannot be read.
        """
        return pa.Table.from_batches(self._batches(), self.schema)

    def to_pandas(self, **options: Any) -> pd.DataFrame:
        """Load all rows into memory, as a `pandas.DataFrame`.

        Args:
            options: Arguments of `pyarrow.Table.to_pandas`.

        Raises:
            NotSupportedError: pandas is not installed. No extra installs it.
            CorruptPayloadError: A group is damaged; the error names it.
            DatabaseError: The store cannot be read.
        """
        if find_spec("pandas") is None:
            raise NotSupportedError("to_pandas needs pandas: pip install pandas")
        return self.to_table().to_pandas(**options)


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
