"""Several writes in one statement, so that a call waits for the server once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

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
    UpdateBase,
    bindparam,
    func,
    insert,
    select,
)
from sqlalchemy.sql.selectable import TableValuedAlias
from sqlalchemy.sql.visitors import iterate, replacement_traverse
from sqlalchemy.types import Integer, TypeEngine

from replaydb.database.runtime.prepared import (
    PIPELINE,
    Bound,
    execute,
    execute_many,
    sends_together,
)

#: More bytes are written one table after the other: an array would hold them in memory once more,
#: and PostgreSQL limits one message to 1 GB.
MAX_BYTES = 1 << 20
#: Counted for each row. It limits the rows to 100,000: their names, which are not counted, have up
#: to a kilobyte each.
_ROW_BYTES = 10


class Write(NamedTuple):
    """Rows to insert into a table or to update in it, each a dict with the same names.

    Attributes:
        statement: Inserts a row; or updates a row, which it finds by a parameter.
        rows: Values of parameters of the statement, and of further columns to set.
    """

    statement: Insert | Update
    rows: Sequence[Mapping[str, Any]]

    @property
    def columns(self) -> dict[str, list[Any]]:
        """The values of all rows, by name."""
        return {name: [row[name] for row in self.rows] for name in self.rows[0]}


#: What can be postponed: rows, or a prepared statement that reads no other table.
Postponable = Write | Bound[Insert | Update | Delete]


class Later(Protocol):
    """Reads that a transaction may run with its last statement."""

    def run(self, connection: Connection) -> None:
        """Run them now."""

    def added_to(self, last: Bound[Insert]) -> Bound[Insert]:
        """Return a statement that does what one with one row does, and runs them."""

    def receive(self, row: Any) -> None:
        """Process the row that this statement returns."""


class Pipeline:
    """What a transaction sends later than it is called, and reads earlier: with other statements.

    It is the execution option `PIPELINE` of connections to a server.
    """

    def __init__(self) -> None:
        self._writes: list[Postponable] = []
        self._rows: list[tuple[Bound[Any], Sequence[Any]]] = []
        self._later: Later | None = None

    def postpone(self, connection: Connection, write: Postponable) -> None:
        """Send a write later. Two of the same table are not sent together: rows may be in both."""
        self._rows.clear()
        if any(write.statement.table is one.statement.table for one in self._writes):
            self.send(connection)
        self._writes.append(write)

    def keep(self, reads: Iterable[tuple[Bound[Any], Sequence[Any]]]) -> None:
        """Keep the rows of statements, until they are run or anything is written."""
        self._rows = list(reads)

    def read_later(self, connection: Connection, reads: Later) -> None:
        """Read rows as they are now, at the latest with the last statement.

        They are read before anything is written, unless that is sent with the last statement.
        """
        self.send(connection)
        self._later = reads

    def send_before(self, connection: Connection, statement: Any) -> Sequence[Any] | None:
        """Send what precedes a statement; return its rows if they have been read already."""
        of_bound = isinstance(statement, Bound)
        for position, (read, rows) in enumerate(self._rows):
            if of_bound and read.statement is statement.statement and read == statement:
                del self._rows[position]
                return rows
        if isinstance(statement.statement if of_bound else statement, UpdateBase):
            self._rows.clear()
            self._read_now(connection)
        self.send(connection)
        return None

    def send(self, connection: Connection, last: Bound[Any] | None = None) -> Any:
        """Send what was postponed, and a last statement with it. Return the result of that."""
        writes, self._writes = self._writes, []
        if last is None or self._later is None:
            return write_together(connection, writes, last)
        later, self._later = self._later, None
        rows = write_together(connection, writes, later.added_to(last))
        later.receive(rows[0])
        return rows

    def discard(self) -> None:
        """Discard what was postponed, because it is rolled back."""
        self._writes.clear()
        self._later = None

    def _read_now(self, connection: Connection) -> None:
        """Run the reads before anything is written."""
        later, self._later = self._later, None
        if later is not None:
            later.run(connection)


def pipeline_of(connection: Connection) -> Pipeline | None:
    """Return the pipeline of a transaction; None if each statement is sent at once."""
    pipeline: Pipeline | None = connection.get_execution_options().get(PIPELINE)
    return pipeline


def postpone(connection: Connection, *writes: Postponable) -> None:
    """Write before the next statement of the transaction, or with the last one.

    On a server this saves a round trip each, since they are sent together.
    """
    pipeline = pipeline_of(connection)
    if pipeline is None:
        write_together(connection, writes)
        return
    for write in writes:
        if not isinstance(write, Write) or write.rows:
            pipeline.postpone(connection, write)


def send_writes(connection: Connection, last: Bound[Any] | None = None) -> Any:
    """Write what was postponed, and run a statement together with it. Return the result of that."""
    pipeline = pipeline_of(connection)
    if pipeline is None:
        return write_together(connection, (), last)
    return pipeline.send(connection, last)


def discard_writes(connection: Connection) -> None:
    """Discard what was postponed, because it is rolled back."""
    pipeline = pipeline_of(connection)
    if pipeline is not None:
        pipeline.discard()


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
    number = len(writes) + (last is not None)
    if not sends_together(connection) or number < 2 or not fit_together(writes):
        for write in writes:
            if isinstance(write, Write):
                execute_many(connection, write.statement, write.rows)
            else:
                execute(connection, write)
        return None if last is None else execute(connection, last)
    parts, values = [], {} if last is None else dict(last.values)
    for number, write in enumerate(writes):
        given = write.columns if isinstance(write, Write) else write.values
        parts.append(Part(write.statement, tuple(given), isinstance(write, Write)))
        values |= numbered(number, given)
    statement = combined(tuple(parts), None if last is None else last.statement)
    return execute(connection, Bound(statement, values))


class Part(NamedTuple):
    """A part of a combined statement.

    Attributes:
        statement: The statement.
        names: Names of its parameters, and of further columns to set.
        is_for_rows: Whether it is run for many rows, given as an array for each name.
    """

    statement: Any
    names: tuple[str, ...]
    is_for_rows: bool = False


def numbered(number: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of parameters under the names that they have in a combined statement."""
    return {_parameter(number, name): value for name, value in values.items()}


def fit_together(writes: Iterable[Postponable]) -> bool:
    """Whether writes are small enough to be sent in one statement."""
    return sum(map(_num_bytes, writes)) <= MAX_BYTES


def _num_bytes(write: Postponable) -> int:
    """Return the approximate size of those values that can be large."""
    if not isinstance(write, Write):
        return 0
    names = _unlimited(write.statement, tuple(write.rows[0]))
    values = (row[name] for row in write.rows for name in names)
    return _ROW_BYTES * len(write.rows) + sum(
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
    # SQLAlchemy itself makes names such as `buffer_id_1`.
    return f"{name}_of_{number}"


@lru_cache(maxsize=256)
def combined(parts: tuple[Part, ...], last: Any = None) -> Any:
    """Return one statement that does what several do.

    Its parameters are `NAME_of_0` for the first part, `NAME_of_1` for the second, and so on, and
    those of the statement `last`.
    """
    every = [
        (_of_arrays if part.is_for_rows else renamed)(number, part)
        for number, part in enumerate(parts)
    ]
    if last is not None:
        every.append(last)
    *others, final = every
    return final.add_cte(*(one.cte(f"write_{number}") for number, one in enumerate(others)))


def renamed(number: int, part: Part) -> Any:
    """Return the statement with the names that its parameters have in a combined one."""

    def rename(element: Any, **_: Any) -> Any:
        if isinstance(element, BindParameter) and element.key in part.names:
            return bindparam(_parameter(number, element.key), type_=element.type)
        return None

    return replacement_traverse(part.statement, {}, rename)


def rows_of(number: int, part: Part) -> TableValuedAlias:
    """Return the rows of a part, given an array for each name."""
    arrays = [
        # A cast to an array of VARCHAR(n) would shorten values, not refuse them. With one dimension
        # a JSON value can be a list.
        bindparam(
            _parameter(number, name),
            type_=ARRAY(Text() if type(kind) is String else kind, dimensions=1),
        )
        for name, kind in _types(part.statement, part.names).items()
    ]
    return func.unnest(*arrays).table_valued(*part.names, name=f"new_{number}").render_derived()


def _of_arrays(number: int, part: Part) -> Any:
    """Return the statement for all rows at once, given an array for each name."""
    statement, names, _ = part
    new = rows_of(number, part)
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
