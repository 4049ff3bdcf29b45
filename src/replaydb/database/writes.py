"""Several writes in one statement, so that a call waits for the server once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from sqlalchemy import (
    ARRAY,
    Boolean,
    Connection,
    DateTime,
    Insert,
    Numeric,
    String,
    Text,
    Update,
    bindparam,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.types import Integer, TypeEngine

from replaydb.database.prepared import BEFORE, Bound, execute, execute_many

#: More bytes are written one table after the other: an array would hold them in memory once more,
#: and PostgreSQL limits one message to 1 GB.
MAX_BYTES = 1 << 20


class Write(NamedTuple):
    """Rows to insert into a table or to update in it, each a dict with the same names.

    Attributes:
        statement: Inserts a row, or updates the row whose id is the parameter that is no column.
        rows: Columns of the rows, and for an update that parameter.
    """

    statement: Insert | Update
    rows: Sequence[Mapping[str, Any]]


def write_together(
    connection: Connection, writes: Sequence[Write], last: Bound[Insert] | None = None
) -> Any:
    """Write to several tables, none of them twice, in one round trip to a server.

    All parts of one statement read the same snapshot, so no part sees the rows of another.

    Args:
        connection: Connection of the transaction.
        writes: What to write.
        last: A statement that also runs.

    Returns:
        The result of `last`.
    """
    writes = [write for write in writes if write.rows]
    is_server = connection.dialect.name == "postgresql"
    number = len(writes) + (last is not None)
    if not is_server or number < 2 or sum(map(_num_bytes, writes)) > MAX_BYTES:
        for write in writes:
            execute_many(connection, write.statement, write.rows)
        return None if last is None else execute(connection, last)
    names = tuple(tuple(write.rows[0]) for write in writes)
    statements = tuple(write.statement for write in writes)
    values = {
        _parameter(number, name): [row[name] for row in write.rows]
        for number, write in enumerate(writes)
        for name in names[number]
    }
    if last is not None:
        values |= last.values
    statement = combined(statements, names, None if last is None else last.statement)
    return execute(connection, Bound(statement, values))


class Postponed:
    """Writes that are sent with the last statement of a transaction, or before its next one.

    It is the execution option `BEFORE` of connections to a server.
    """

    def __init__(self) -> None:
        self._writes: list[Write] = []

    def add(self, connection: Connection, writes: Sequence[Write]) -> None:
        """Postpone writes, after sending those that were postponed before."""
        self(connection)
        self._writes = list(writes)

    def take(self) -> list[Write]:
        """Return the writes, which the caller sends."""
        writes, self._writes = self._writes, []
        return writes

    def __call__(self, connection: Connection) -> None:
        """Send the writes."""
        if self._writes:
            write_together(connection, self.take())


def write_last(connection: Connection, writes: Sequence[Write]) -> None:
    """Write to several tables, none of them twice, at the end of the transaction.

    A server gets them with the proof of the commit, in one round trip: see `Postponed`.
    """
    postponed: Postponed | None = connection.get_execution_options().get(BEFORE)
    if postponed is None:
        write_together(connection, writes)
    else:
        postponed.add(connection, writes)


def finish_writes(connection: Connection, last: Bound[Insert]) -> Any:
    """Write what was postponed, and run the last statement of the transaction. Return its rows."""
    postponed: Postponed | None = connection.get_execution_options().get(BEFORE)
    return write_together(connection, postponed.take() if postponed else (), last)


def _num_bytes(write: Write) -> int:
    """Return the approximate size of those values that can be large."""
    names = _unlimited(write.statement, tuple(write.rows[0]))
    values = (row[name] for row in write.rows for name in names)
    return sum(
        len(value if isinstance(value, bytes | str) else str(value))
        for value in values
        if value is not None
    )


@lru_cache(maxsize=256)
def _unlimited(statement: Insert | Update, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of texts, bytes and JSON values."""
    return tuple(
        name
        for name in names
        if not isinstance(kind := _type_of(statement, name), Integer | Numeric | Boolean | DateTime)
        and getattr(kind, "length", None) is None
    )


def _type_of(statement: Insert | Update, name: str) -> TypeEngine[Any]:
    """Return the type of a column, or of the id that an update finds a row by."""
    columns = statement.table.c
    column = columns.get(name)
    return (columns.id if column is None else column).type


def _parameter(number: int, name: str) -> str:
    return f"{name}_{number}"


@lru_cache(maxsize=256)
def combined(
    statements: tuple[Insert | Update, ...],
    names: tuple[tuple[str, ...], ...],
    last: Insert | None = None,
) -> Insert | Update:
    """Return one statement that does what several do, given the names of their rows.

    Its parameters are arrays: `NAME_0` of the first statement, `NAME_1` of the second, and so on;
    and those of `last`, which does not write rows of the caller.
    """
    every: list[Insert | Update] = [
        _of_arrays(number, *one) for number, one in enumerate(zip(statements, names, strict=True))
    ]
    if last is not None:
        every.append(last)
    *others, final = every
    return final.add_cte(*(one.cte(f"write_{number}") for number, one in enumerate(others)))


def _of_arrays(number: int, statement: Insert | Update, names: tuple[str, ...]) -> Insert | Update:
    """Return the statement for all rows at once, given an array for each name."""
    table = statement.table
    types = [_type_of(statement, name) for name in names]
    arrays = [
        # A cast to an array of VARCHAR(n) would shorten values, not refuse them.
        bindparam(_parameter(number, name), type_=ARRAY(Text() if type(kind) is String else kind))
        for name, kind in zip(names, types, strict=True)
    ]
    new = func.unnest(*arrays).table_valued(*names, name=f"new_{number}").render_derived()
    if isinstance(statement, Insert):
        return insert(table).from_select(list(names), select(*(new.c[name] for name in names)))
    [key] = (name for name in names if name not in table.c)
    values = {name: new.c[name] for name in names if name != key}
    return update(table).values(values).where(table.c.id == new.c[key])
