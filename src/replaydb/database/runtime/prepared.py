"""Prepared statements: built and compiled once, and run with different values each time."""

from __future__ import annotations

import inspect
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache, update_wrapper
from itertools import repeat
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast, overload

from sqlalchemy import (
    Connection,
    Dialect,
    Executable,
    Insert,
    Select,
    Update,
    UpdateBase,
    bindparam,
)
from sqlalchemy.util import await_only

if TYPE_CHECKING:
    from sqlalchemy.sql.compiler import SQLCompiler

S = TypeVar("S", bound=Executable, covariant=True)
#: Execution option of a connection: the `Pipeline` of its transaction.
PIPELINE = "replaydb_pipeline"
#: Execution option of an engine: statements take a round trip each, so several are sent together.
TOGETHER = "replaydb_together"


class Bound(NamedTuple, Generic[S]):
    """A statement, and the values of its parameters for one execution.

    Attributes:
        statement: A statement with bound parameters.
        values: Values of the parameters, by name.
        is_cached: Whether every call uses the same statement object, so that its compiled form can
            be cached.
    """

    statement: S
    values: Mapping[str, Any]
    is_cached: bool = True


class prepared(Generic[S]):
    """Decorator for a function that builds a statement: its parameters become bound parameters.

    Building a statement and finding its compiled form costs several times what running it does,
    and a draw runs a dozen. A call with values returns them with the statement, which is built only
    once.

    Attributes:
        build: The undecorated function, for statements that are built from this one.
    """

    def __init__(self, build: Callable[..., S]) -> None:
        self.build = build
        self._names = tuple(inspect.signature(build).parameters)
        update_wrapper(self, build)

    @cached_property
    def _statement(self) -> S:
        """The statement, with parameters that have no values."""
        return self.build(*map(bindparam, self._names))

    def __call__(self, *values: Any) -> Bound[S]:
        """Return the statement with the values to run it with."""
        return Bound(self._statement, dict(zip(self._names, values, strict=True)))


@overload
def execute(
    connection: Connection, statement: Select[*tuple[Any, ...]] | Bound[Select[*tuple[Any, ...]]]
) -> Sequence[Any]: ...


@overload
def execute(connection: Connection, statement: UpdateBase | Bound[UpdateBase]) -> int: ...


def execute(connection: Connection, statement: Executable | Bound[Any]) -> Sequence[Any] | int:
    """Run a statement. If it is cached, so is its compiled form.

    Returns:
        The rows that it reads, with columns as attributes, or the number of rows that it changes.
    """
    known = _send_before(connection, statement)
    if known is not None:
        return known
    if not isinstance(statement, Bound):
        result = connection.execute(statement)
    elif not statement.is_cached or _is_watched(connection):
        result = connection.execute(statement.statement, statement.values)
    else:
        plan = _plan(statement.statement, tuple(statement.values), connection.dialect)
        return plan.run(connection, statement.values)
    return result.all() if result.returns_rows else result.rowcount


def execute_locking(connection: Connection, statement: Bound[Any]) -> Sequence[Any]:
    """Run a statement that locks rows, and return what it reads once it has the locks.

    On a server a statement reads the rows that it does not lock as they were before it waited for
    the others. Therefore it is run twice there, in one round trip. Its parameter `is_last`, also a
    column, is False the first time; it should return few rows then. The column `locked_ids` of its
    first row lists the rows that it has locked. If there are others the second time, for which it
    may have waited again, it is run once more.
    """
    _send_before(connection, statement)
    first, last = (
        Bound(statement.statement, {**statement.values, "is_last": is_last})
        for is_last in (False, True)
    )
    if not sends_together(connection):
        return cast("Sequence[Any]", execute(connection, last))
    plan = _plan(statement.statement, tuple(last.values), connection.dialect)
    before: Sequence[Any]
    after: Sequence[Any]
    if plan.has_run and not _is_watched(connection):
        rows = plan.run_each(connection, [first.values, last.values])
        before = [row for row in rows if not row.is_last]
        after = [row for row in rows if row.is_last]
    else:
        before, after = (cast("Any", execute(connection, one)) for one in (first, last))
    while _locked(after) - _locked(before):
        before, after = after, cast("Any", execute(connection, last))
    return after


def _locked(rows: Sequence[Any]) -> set[str]:
    """Return the ids of the rows that a run of a locking statement has locked."""
    return set((rows[0].locked_ids or "").split(",")) - {""} if rows else set()


def execute_many(
    connection: Connection, statement: Insert | Update, rows: Sequence[Mapping[str, Any]]
) -> None:
    """Run a statement once for each row, a dict of its parameters. All rows have the same names.

    This is faster than `connection.execute`, whose work per row takes longer than writing most of
    our rows. `statement` must be an object that every call uses, not one that is built for this
    call.
    """
    if not rows:
        return
    _send_before(connection, statement)
    plan = _plan(statement, tuple(rows[0]), connection.dialect)
    if _is_watched(connection):
        connection.exec_driver_sql(plan.sql, plan.parameters(rows))
    elif len(rows) == 1:
        plan.run(connection, rows[0])
    else:
        _run(connection, plan.sql, plan.parameters(rows), many=True)


def sends_together(connection: Connection) -> bool:
    """Whether a connection is to a server, so that several statements are sent together."""
    return bool(connection.get_execution_options().get(TOGETHER))


def inserted_id(connection: Connection, statement: Insert, values: Mapping[str, Any]) -> int:
    """Insert a row with a cached statement that returns its id, and return the id."""
    rows: Any = execute(connection, Bound(statement, values))
    return int(rows[0].id)


def _send_before(connection: Connection, statement: Any) -> Sequence[Any] | None:
    """Send what precedes a statement; return its rows if they have been read already."""
    pipeline = connection.get_execution_options().get(PIPELINE)
    return None if pipeline is None else pipeline.send_before(connection, statement)


def _is_watched(connection: Connection) -> bool:
    """Whether `echo` or event listeners are set, for which SQLAlchemy must run the statement."""
    events = connection.dispatch
    return bool(connection._echo or events.before_cursor_execute or events.after_cursor_execute)


def _run(
    connection: Connection,
    sql: str,
    parameters: Sequence[Any],
    *,
    many: bool = False,
    each: bool = False,
) -> tuple[Sequence[Any], Any]:
    """Run SQL on the driver, in a transaction, and raise the errors that SQLAlchemy would raise.

    Args:
        connection: The connection.
        sql: A statement with the placeholders of the dialect.
        parameters: Its parameters.
        many: They are several sequences of parameters, for a statement without rows.
        each: They are several sequences of parameters, for `_fetch_each`.

    Returns:
        The driver's rows, and the cursor that describes them.
    """
    if not connection.in_transaction():
        connection.begin()
    cursor = connection.connection.cursor()
    try:
        if each:
            rows = _fetch_each(cursor, sql, parameters)
        else:
            (cursor.executemany if many else cursor.execute)(sql, parameters)
            rows = cursor.fetchall() if cursor.description else ()
    except BaseException as error:
        # This also detects a lost connection. Only errors of the driver are wrapped.
        is_drivers = isinstance(error, connection.dialect.loaded_dbapi.Error)
        # Errors contain no values, only their size, by which engines judge a lost connection.
        size = {"num_bytes": message_bytes(parameters)} if is_drivers else None
        connection._handle_dbapi_exception(error, sql if is_drivers else None, size, cursor, None)
    cursor.close()
    return rows, cursor


def message_bytes(parameters: Sequence[Any]) -> int:
    """Return the size of the parameters of a statement, or of the largest row of parameters."""
    rows = [row for row in parameters if isinstance(row, tuple)]  # each is a message
    return max(map(_num_bytes, rows), default=_num_bytes(parameters))


def _num_bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="replace"))
    if isinstance(value, bytes | bytearray):
        return len(value)
    if isinstance(value, memoryview):
        return value.nbytes
    return sum(map(_num_bytes, value)) if isinstance(value, list | tuple) else 0


def _fetch_each(cursor: Any, sql: str, parameters: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """Run SQL once for each sequence of parameters, in one round trip, and return all rows.

    Each run has a snapshot of its own. Only asyncpg can do this, and SQLAlchemy's adapter of it has
    no such method. Otherwise this does what its `execute` does.
    """
    adapter = cursor._adapt_connection

    async def fetch() -> Sequence[Any]:
        async with adapter._execute_mutex:
            if adapter._transaction is None:
                await adapter._start_transaction()
            try:
                rows: Sequence[Any] = await adapter.driver_connection.fetchmany(sql, parameters)
            except Exception as error:
                adapter._handle_exception(error)
                raise
        return rows

    return await_only(fetch())


class _Plan:
    """A compiled statement.

    Attributes:
        sql: Its text, with the placeholders of the dialect.
    """

    def __init__(self, statement: Any, names: tuple[str, ...], dialect: Dialect) -> None:
        compiled: SQLCompiler = statement.compile(
            dialect=dialect, column_keys=names, for_executemany=True
        )
        self.sql = compiled.string
        self._dialect = dialect
        self._types = [column.type for column in getattr(statement, "exported_columns", ())]
        self._make_row: Callable[[Iterable[Any]], Any] | None = None
        self._readers: Sequence[tuple[int, Callable[[Any], Any]]] = ()
        # For each placeholder the name of a value and its bind processor, if it has one; or None
        # and a constant value.
        self._fillers: list[tuple[str | None, Any]] = []
        for name in compiled.positiontup or ():
            process = compiled.binds[name].type.dialect_impl(dialect).bind_processor(dialect)
            if name in names:
                self._fillers.append((name, process))
            else:
                value = compiled.params[name]
                self._fillers.append((None, value if process is None else process(value)))

    def run(self, connection: Connection, values: Mapping[str, Any]) -> Sequence[Any] | int:
        """Run it. Returns its rows, or the number of rows that it changes."""
        rows, cursor = _run(connection, self.sql, self._parameters(values))
        return cursor.rowcount if cursor.description is None else self._read(rows, cursor)

    @property
    def has_run(self) -> bool:
        """Whether it has returned rows before, so that the driver's types are known."""
        return self._make_row is not None

    def run_each(
        self, connection: Connection, several: Sequence[Mapping[str, Any]]
    ) -> Sequence[Any]:
        """Run it several times in one round trip (see `_fetch_each`), after it `has_run`."""
        parameters = [self._parameters(values) for values in several]
        return self._convert(_run(connection, self.sql, parameters, each=True)[0])

    def _parameters(self, values: Mapping[str, Any]) -> list[Any]:
        return [
            process if name is None else values[name] if process is None else process(values[name])
            for name, process in self._fillers
        ]

    def parameters(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
        """Convert rows of values to parameters of the driver."""
        columns: list[Iterable[Any]] = []
        for name, process in self._fillers:
            if name is None:
                columns.append(repeat(process, len(rows)))
            elif process is None:
                columns.append([row[name] for row in rows])
            else:
                columns.append([process(row[name]) for row in rows])
        return list(zip(*columns, strict=True)) if columns else [()] * len(rows)

    def _read(self, rows: Sequence[Any], cursor: Any) -> Sequence[Any]:
        """Convert the driver's rows to named tuples, by the types of their columns.

        The conversion depends on the driver's types of the columns, which the first result has.
        """
        if self._make_row is None:
            names = [name for name, *_ in cursor.description]
            kinds = zip(self._types, cursor.description, strict=True)
            readers = [
                kind.dialect_impl(self._dialect).result_processor(self._dialect, shown[1])
                for kind, shown in kinds
            ]
            self._readers = [(at, read) for at, read in enumerate(readers) if read is not None]
            self._make_row = cast("Any", namedtuple)("Row", names, rename=True)._make
        return self._convert(rows)

    def _convert(self, rows: Sequence[Any]) -> Sequence[Any]:
        assert self._make_row is not None  # noqa: S101
        if not self._readers:
            return [self._make_row(row) for row in rows]
        made = []
        for row in rows:
            values = list(row)
            for at, read in self._readers:
                values[at] = read(values[at])
            made.append(self._make_row(values))
        return made


_plan = lru_cache(maxsize=1024)(_Plan)
