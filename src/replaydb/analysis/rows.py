"""`Rows`: a table that is read from a store when somebody wants it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from replaydb.errors import NotSupportedError

if TYPE_CHECKING:
    import pandas as pd


class Rows:
    """Rows of a store, read a page at a time by whoever takes them; each reading begins anew.

    It is an Arrow stream (`__arrow_c_stream__`), which `polars.DataFrame`, `duckdb` and
    `pyarrow.table` take as it is. Memory holds a page or two, whatever the number of rows, unless
    all of them are asked for.

    A reading goes through ids in ascending order. It shows what was stored when it began, each row
    once, as it is when its page is read; what is deleted before that is left out. The rows of a
    page are of one moment, and so is all that is shown of a group by `groups` and `tokens`; two
    pages are not. Each page is a short read-only transaction: writers do not wait, and no old rows
    are kept for a reader that pauses.

    Attributes:
        schema: Names and types of its columns, the same whatever is stored.
    """

    def __init__(self, schema: pa.Schema, batches: Callable[[], Iterator[pa.RecordBatch]]) -> None:
        self.schema = schema
        self._batches = batches

    def __repr__(self) -> str:
        return f"Rows({', '.join(self.schema.names)})"

    def reader(self) -> pa.RecordBatchReader:
        """A `pyarrow.RecordBatchReader` over all rows.

        It holds a connection from its first row to its last, or until it is dropped. It is for one
        thread; others take readers of their own.
        """
        return pa.RecordBatchReader.from_batches(self.schema, self._batches())

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.reader().__arrow_c_stream__(requested_schema)

    def to_table(self) -> pa.Table:
        """All rows in memory, as a `pyarrow.Table`.

        Raises:
            CorruptPayloadError: What is stored of a group cannot be read; it names the group.
            DatabaseError: The store cannot be read.
        """
        return pa.Table.from_batches(self._batches(), self.schema)

    def to_pandas(self, **options: Any) -> pd.DataFrame:
        """All rows in memory, as a `pandas.DataFrame`.

        Args:
            options: As of `pyarrow.Table.to_pandas`.

        Raises:
            NotSupportedError: pandas is not installed, which no extra does.
        """
        if find_spec("pandas") is None:
            raise NotSupportedError("to_pandas needs pandas: pip install pandas")
        return self.to_table().to_pandas(**options)
