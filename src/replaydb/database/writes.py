"""Several writes in one statement, so that a call waits for the server once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from sqlalchemy import (
    ARRAY,
    BindParameter,
    Boolean,
    Connection,
    DateTime,
    Delete,
    Insert,
    Numeric,
    String,
    Text,
    Update,
    bindparam,
    func,
    insert,
    select,
)
from sqlalchemy.sql.visitors import iterate, replacement_traverse
from sqlalchemy.types import Integer, TypeEngine

from replaydb.database.prepared import BEFORE, Bound, execute, execute_many

#: More bytes are written one table after the other: an array would hold them in memory once more,
#: and PostgreSQL limits one message to 1 GB.
MAX_BYTES = 1 << 20


class Write(NamedTuple):
    """Rows to insert into a table or to update in it, each a dict with the same names.

    Attributes:
        statement: Inserts a row; or updates a row, which it finds by a parameter.
        rows: Values of parameters of the statement, and of further columns to set.
    """

    statement: Insert | Update
    rows: Sequence[Mapping[str, Any]]


#: What can be postponed: rows, or a prepared statement that reads no other table.
Postponable = Write | Bound[Insert | Update | Delete]


class Postponed:
    """Writes of a transaction that are sent together, before its next statement or its commit.

    It is the execution option `BEFORE` of connections to a server.
    """

    def __init__(self) -> None:
        self._writes: list[Postponable] = []

    def add(self, connection: Connection, write: Postponable) -> None:
        """Add a write. Two of the same table are not sent together: rows may be in both."""
        if any(write.statement.table is one.statement.table for one in self._writes):
            self(connection)
        self._writes.append(write)

    def take(self) -> list[Postponable]:
        """Return the writes, which the caller sends or discards."""
        writes, self._writes = self._writes, []
        return writes

    def __call__(self, connection: Connection) -> None:
        """Send the writes."""
        write_together(connection, self.take())


def postpone(connection: Connection, *writes: Postponable) -> None:
    """Write before the next statement of the transaction, or with the last one.

    On a server this saves a round trip each, since they are sent together.
    """
    postponed: Postponed | None = connection.get_execution_options().get(BEFORE)
    if postponed is None:
        write_together(connection, writes)
        return
    for write in writes:
        if not isinstance(write, Write) or write.rows:
            postponed.add(connection, write)


def send_writes(connection: Connection, last: Bound[Any] | None = None) -> Any:
    """Write what was postponed, and run a statement together with it. Return the result of that."""
    postponed: Postponed | None = connection.get_execution_options().get(BEFORE)
    return write_together(connection, postponed.take() if postponed else (), last)


def discard_writes(connection: Connection) -> None:
    """Discard what was postponed, because it is rolled back."""
    postponed: Postponed | None = connection.get_execution_options().get(BEFORE)
    if postponed is not None:
        postponed.take()


def write_together(
    connection: Connection, writes: Sequence[Postponable], last: Bound[Any] | None = None
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
    writes = [write for write in writes if not isinstance(write, Write) or write.rows]
    is_server = connection.dialect.name == "postgresql"
    number = len(writes) + (last is not None)
    if not is_server or number < 2 or sum(map(_num_bytes, writes)) > MAX_BYTES:
        for write in writes:
            if isinstance(write, Write):
                execute_many(connection, write.statement, write.rows)
            else:
                execute(connection, write)
        return None if last is None else execute(connection, last)
    parts, values = [], {} if last is None else dict(last.values)
    for number, write in enumerate(writes):
        if isinstance(write, Write):
            given = {name: [row[name] for row in write.rows] for name in write.rows[0]}
        else:
            given = dict(write.values)
        parts.append(Part(write.statement, tuple(given), isinstance(write, Write)))
        values |= {_parameter(number, name): value for name, value in given.items()}
    statement = combined(tuple(parts), None if last is None else last.statement)
    return execute(connection, Bound(statement, values))


class Part(NamedTuple):
    """A part of a combined statement.

    Attributes:
        statement: The statement.
        names: Names of its parameters, and of further columns to set.
        is_for_rows: Whether it is run for many rows, given as an array for each name.
    """

    statement: Insert | Update | Delete
    names: tuple[str, ...]
    is_for_rows: bool


def _num_bytes(write: Postponable) -> int:
    """Return the approximate size of those values that can be large."""
    if not isinstance(write, Write):
        return 0
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
        for name, kind in _types(statement, names).items()
        if not isinstance(kind, Integer | Numeric | Boolean | DateTime)
        and getattr(kind, "length", None) is None
    )


def _types(
    statement: Insert | Update | Delete, names: tuple[str, ...]
) -> dict[str, TypeEngine[Any]]:
    """Return the types of the parameters of a statement: explicit ones, and columns to set."""
    explicit = {one.key: one.type for one in iterate(statement) if isinstance(one, BindParameter)}
    columns = statement.table.c
    return {name: explicit[name] if name in explicit else columns[name].type for name in names}


def _parameter(number: int, name: str) -> str:
    return f"{name}_{number}"


@lru_cache(maxsize=256)
def combined(parts: tuple[Part, ...], last: Any = None) -> Any:
    """Return one statement that does what several do.

    Its parameters are `NAME_0` for the first part, `NAME_1` for the second, and so on, and those of
    the statement `last`.
    """
    every = [
        (_of_arrays if part.is_for_rows else _renamed)(number, part)
        for number, part in enumerate(parts)
    ]
    if last is not None:
        every.append(last)
    *others, final = every
    return final.add_cte(*(one.cte(f"write_{number}") for number, one in enumerate(others)))


def _renamed(number: int, part: Part) -> Any:
    """Return the statement with the names that its parameters have in a combined one."""

    def rename(element: Any, **_: Any) -> Any:
        if isinstance(element, BindParameter) and element.key in part.names:
            return bindparam(_parameter(number, element.key), type_=element.type)
        return None

    return replacement_traverse(part.statement, {}, rename)


def _of_arrays(number: int, part: Part) -> Any:
    """Return the statement for all rows at once, given an array for each name."""
    statement, names, _ = part
    types = _types(statement, names)
    arrays = [
        # A cast to an array of VARCHAR(n) would shorten values, not refuse them.
        bindparam(_parameter(number, name), type_=ARRAY(Text() if type(kind) is String else kind))
        for name, kind in types.items()
    ]
    new = func.unnest(*arrays).table_valued(*names, name=f"new_{number}").render_derived()
    if isinstance(statement, Insert):
        values = select(*(new.c[name] for name in names))
        return insert(statement.table).from_select(list(names), values)
    explicit: set[str] = set()

    def of_row(element: Any, **_: Any) -> Any:
        if isinstance(element, BindParameter) and element.key in names:
            explicit.add(element.key)
            return new.c[element.key]
        return None

    for_rows: Any = replacement_traverse(statement, {}, of_row)
    columns = {name: new.c[name] for name in names if name not in explicit}
    return for_rows.values(columns) if columns else for_rows
