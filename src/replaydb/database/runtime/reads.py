"""Several reads in one round trip to a server."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

from sqlalchemy import ColumnElement, Connection, Dialect, Insert, Select, and_, case, func, select
from sqlalchemy.types import UserDefinedType

from replaydb.database.runtime.prepared import Bound, execute, execute_locking, sends_together
from replaydb.database.runtime.writes import Part, numbered, pipeline_of, renamed

#: Number of the first of the later reads in a statement, after those of its writes.
LATER = 100


def read_together(
    connection: Connection, reads: Sequence[Bound[Select[*tuple[Any, ...]]]]
) -> list[Sequence[Any]]:
    """Run prepared statements that read, and return the rows of each.

    On PostgreSQL they are one statement, which reads one snapshot in one round trip. Its only row
    has an array of records for each of them.
    """
    if not sends_together(connection) or len(reads) < 2:
        return [execute(connection, read) for read in reads]
    statement, values = _together(_parts(reads)), _values(reads)
    [row] = execute(connection, Bound(statement, values))
    return list(row)


def lock_and_read(
    connection: Connection, lock: Bound[Any], reads: Sequence[Bound[Any]]
) -> Sequence[Any]:
    """Run a statement that locks rows, as `execute_locking` does.

    In a pipeline the same round trip also runs prepared statements that read, after the locks were
    granted. Their rows are kept for when they are run, unless something is written before that.
    """
    pipeline = pipeline_of(connection)
    if pipeline is None or not reads:
        return execute_locking(connection, lock)
    statement = _locking(lock.statement, _parts(reads))
    rows = execute_locking(connection, Bound(statement, {**lock.values, **_values(reads)}))
    if rows:
        found = rows[0]._asdict()
        pipeline.keep((read, found[_column(number)]) for number, read in enumerate(reads))
    return rows


class LaterReads:
    """Prepared statements that read, which a transaction may run with its last statement."""

    def __init__(
        self,
        reads: Sequence[Bound[Any]],
        received: Callable[[Sequence[Sequence[Any]]], object],
    ) -> None:
        """Set the statements, and a function that gets the rows of each."""
        self._reads = reads
        self._received = received

    def run(self, connection: Connection) -> None:
        """Run them now."""
        self._received(read_together(connection, self._reads))

    def added_to(self, last: Bound[Insert]) -> Bound[Insert]:
        """Return a statement that does what one with one row does, and runs them."""
        statement = _with_last(last.statement, _parts(self._reads))
        return Bound(statement, {**last.values, **_values(self._reads, LATER)})

    def receive(self, row: Any) -> None:
        """Process the row that this statement returns."""
        found = row._asdict()
        self._received([found[_column(number)] for number in range(len(self._reads))])


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
    records = (_records(LATER + at, part).label(_column(at)) for at, part in enumerate(parts))
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
            read = kind.dialect_impl(dialect).result_processor(dialect, _NUMERIC)
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
_NUMERIC = 1700
