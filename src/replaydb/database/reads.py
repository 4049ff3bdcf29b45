"""Several reads in one round trip to a server."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

from sqlalchemy import Connection, Dialect, Select, func, select
from sqlalchemy.types import UserDefinedType

from replaydb.database.prepared import Bound, execute


def read_together(
    connection: Connection, reads: Sequence[Bound[Select[*tuple[Any, ...]]]]
) -> list[Sequence[Any]]:
    """Run prepared statements that read, and return the rows of each.

    On PostgreSQL they are one statement, which reads one snapshot in one round trip. Its only row
    has an array of records for each of them.

    Raises:
        ValueError: Two statements have a parameter of the same name with different values.
    """
    if connection.dialect.name != "postgresql" or len(reads) < 2:
        return [execute(connection, read) for read in reads]
    values: dict[str, Any] = {}
    for read in reads:
        for name, value in read.values.items():
            if values.setdefault(name, value) is not value and values[name] != value:
                raise ValueError(f"two values of the parameter {name}: {values[name]!r}, {value!r}")
    [row] = execute(connection, Bound(_together(*(read.statement for read in reads)), values))
    return list(row)


@lru_cache(maxsize=64)
def _together(*statements: Select[*tuple[Any, ...]]) -> Select[*tuple[Any, ...]]:
    """Return a statement whose columns are the rows of these statements."""
    columns = []
    for number, statement in enumerate(statements):
        rows = statement.subquery(f"read_{number}")
        records = select(func.row(*rows.c)).scalar_subquery()
        columns.append(func.array(records, type_=_Records(statement)).label(f"rows_{number}"))
    return select(*columns)


class _Records(UserDefinedType[Sequence[Any]]):
    """An array of records, read as rows of a statement."""

    cache_ok = False

    def __init__(self, statement: Select[*tuple[Any, ...]]) -> None:
        self.statement = statement  # of this name, because SQLAlchemy copies the type

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
        """Return a processor that makes named tuples, with values converted by their types."""
        columns = self.statement.selected_columns
        make = cast("Any", namedtuple)("Row", columns.keys(), rename=True)._make
        readers = []
        for at, kind in enumerate(column.type for column in columns):
            read = kind.dialect_impl(dialect).result_processor(dialect, _NUMERIC)
            if read is not None:
                readers.append((at, read))

        def process(records: Sequence[Any]) -> list[Any]:
            rows = []
            for record in records:
                values = list(record)
                for at, read in readers:
                    values[at] = read(values[at])
                rows.append(make(values))
            return rows

        return process


#: PostgreSQL's id of a type. Only conversions of numbers depend on that of the column, which is not
#: known here. The one for this type also accepts doubles.
_NUMERIC = 1700
