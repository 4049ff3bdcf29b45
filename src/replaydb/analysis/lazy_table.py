"""`Rows`: a lazy table that is read from a store as an Arrow stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from replaydb.errors import NotSupportedError

if TYPE_CHECKING:
    import pandas as pd


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
