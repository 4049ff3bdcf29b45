"""Several reads in one statement, so that a call waits for the server once."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from sqlalchemy import ColumnElement, Dialect, Insert, Select, and_, case, func, select
from sqlalchemy.types import UserDefinedType

from replaydb.database.postgresql.combined_writes import Part, numbered, renamed
from replaydb.database.runtime.prepared import Bound

#: Number of the first of the reads in a statement that writes, after those of its writes.
_LATER = 100

Rows = Sequence[Any]


def reads_as_one(reads: Sequence[Bound[Any]]) -> Bound[Select[*tuple[Any, ...]]]:
    """Return a statement that runs several, in one snapshot. `rows_of_each` has its rows."""
    return Bound(_together(_parts(reads)), _values(reads))


def with_reads(lock: Bound[Any], reads: Sequence[Bound[Any]]) -> Bound[Any]:
    """Return a statement that locks rows, and then runs others: see `rows_of_each`."""
    return Bound(_locking(lock.statement, _parts(reads)), {**lock.values, **_values(reads)})


def after_reads(last: Bound[Insert], reads: Sequence[Bound[Any]]) -> Bound[Insert]:
    """Return a statement that writes one row, and runs others before it: see `rows_of_each`."""
    statement = _with_last(last.statement, _parts(reads))
    return Bound(statement, {**last.values, **_values(reads, _LATER)})


def rows_of_each(row: Any, number: int) -> list[Rows]:
    """Return the rows of the statements of which one statement has returned this row."""
    found: Mapping[str, Rows] = row._asdict()
    return [found[_column(at)] for at in range(number)]


def _parts(reads: Sequence[Bound[Any]]) -> tuple[Part, ...]:
    return tuple(Part(read.statement, tuple(read.values)) for read in reads)


def _values(reads: Sequence[Bound[Any]], first: int = 0) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for number, read in enumerate(reads, first):
        values |= numbered(number, read.values)
    return values


def _column(number: int) -> str:
    return f"rows_{number}"


@lru_cache(maxsize=256)
def _together(parts: tuple[Part, ...]) -> Select[*tuple[Any, ...]]:
    """Return a statement whose columns are the rows of these statements."""
    return select(
        *(_records(number, part).label(_column(number)) for number, part in enumerate(parts))
    )


@lru_cache(maxsize=256)
def _with_last(last: Insert, parts: tuple[Part, ...]) -> Insert:
    """Return a statement that also returns the rows of these, as they are before it writes."""
    records = (_records(_LATER + at, part).label(_column(at)) for at, part in enumerate(parts))
    statement = last.returning(*records)
    for cached in ("exported_columns", "_all_selected_columns"):
        vars(statement).pop(cached, None)  # SQLAlchemy has copied those of `last`
    return statement


@lru_cache(maxsize=256)
def _locking(lock: Any, parts: tuple[Part, ...]) -> Any:
    """Return a locking statement whose first row, in the last run, also has these columns.

    Other expressions of CASE are not evaluated.
    """
    columns = lock.selected_columns
    is_wanted = and_(columns.is_last.element, columns.is_first.element)
    return lock.add_columns(
        *(
            case((is_wanted, _records(number, part))).label(_column(number))
            for number, part in enumerate(parts)
        )
    )


def _records(number: int, part: Part) -> ColumnElement[Any]:
    """Return the rows of a statement, as an array."""
    rows = renamed(number, part).subquery(f"read_{number}")
    records = select(func.row(*rows.c)).scalar_subquery()
    return func.array(records, type_=_Records(part.statement))


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
            read = kind.dialect_impl(dialect).result_processor(dialect, NUMERIC)
            if read is not None:
                readers.append((at, read))

        def process(records: Sequence[Any] | None) -> list[Any]:
            rows = []
            for record in records or ():
                values = list(record)
                for at, read in readers:
                    values[at] = read(values[at])
                rows.append(make(values))
            return rows

        return process


#: PostgreSQL's id of a type. Only conversions of numbers depend on that of the column, which is not
#: known here. The one for this type also accepts doubles.
NUMERIC = 1700
