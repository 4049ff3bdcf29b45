"""Statements that are built once and run with other values every time."""

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

if TYPE_CHECKING:
    from sqlalchemy.sql.compiler import SQLCompiler

S = TypeVar("S", bound=Executable, covariant=True)


class Bound(NamedTuple, Generic[S]):
    """A statement, and what to run it with this time.

    Attributes:
        statement: With bound parameters.
        values: Theirs, by name.
        is_kept: Whether it is the same object every time, and not made for the call.
    """

    statement: S
    values: Mapping[str, Any]
    is_kept: bool = True


class prepared(Generic[S]):
    """A function that makes a statement of bound parameters: those that are its own.

    Building a statement and finding its compiled form costs several times what running it does,
    and a draw runs a dozen. Called with values it gives the statement, always the same one, bound
    to them.

    Attributes:
        build: The function, for statements that are made from this one.
    """

    def __init__(self, build: Callable[..., S]) -> None:
        self.build = build
        self._names = tuple(inspect.signature(build).parameters)
        update_wrapper(self, build)

    @cached_property
    def _statement(self) -> S:
        """The statement, whose parameters have no values yet."""
        return self.build(*map(bindparam, self._names))

    def __call__(self, *values: Any) -> Bound[S]:
        """The statement, and what to run it with."""
        return Bound(self._statement, dict(zip(self._names, values, strict=True)))


@overload
def execute(
    connection: Connection, statement: Select[*tuple[Any, ...]] | Bound[Select[*tuple[Any, ...]]]
) -> Sequence[Any]: ...


@overload
def execute(connection: Connection, statement: UpdateBase | Bound[UpdateBase]) -> int: ...


def execute(connection: Connection, statement: Executable | Bound[Any]) -> Sequence[Any] | int:
    """Run a statement, whether it was made for this call or is kept.

    Returns:
        The rows that it reads, whose columns are attributes, or the number of those that it
        changes.
    """
    if not isinstance(statement, Bound):
        result = connection.execute(statement)
    elif not statement.is_kept or _is_watched(connection):
        result = connection.execute(statement.statement, statement.values)
    else:
        plan = _plan(statement.statement, tuple(statement.values), connection.dialect)
        return plan.run(connection, statement.values)
    return result.all() if result.returns_rows else result.rowcount


def execute_many(
    connection: Connection, statement: Insert | Update, rows: Sequence[Mapping[str, Any]]
) -> None:
    """Run a statement once for every row, a dict of its parameters; all have the same names.

    What `connection.execute` does, but for what it does anew for every row: that takes longer
    than writing most of ours. `statement` must be one that is kept, not made for the call.
    """
    if not rows:
        return
    plan = _plan(statement, tuple(rows[0]), connection.dialect)
    if _is_watched(connection):
        connection.exec_driver_sql(plan.sql, plan.parameters(rows))
    elif len(rows) == 1:
        plan.run(connection, rows[0])
    else:
        _run(connection, plan.sql, plan.parameters(rows), many=True)


def inserted_id(connection: Connection, statement: Insert, values: Mapping[str, Any]) -> int:
    """Insert a row with a kept statement that returns its id, and say which one it is."""
    rows: Any = execute(connection, Bound(statement, values))
    return int(rows[0].id)


def _is_watched(connection: Connection) -> bool:
    """Whether somebody wants to hear of each statement, which only SQLAlchemy tells."""
    events = connection.dispatch
    return bool(connection._echo or events.before_cursor_execute or events.after_cursor_execute)


def _run(
    connection: Connection, sql: str, parameters: Sequence[Any], *, many: bool = False
) -> tuple[Sequence[Any], Any]:
    """Hand SQL to the driver, in a transaction, with errors as SQLAlchemy has them.

    Returns:
        The driver's rows, and the cursor, which says what they are.
    """
    if not connection.in_transaction():
        connection.begin()
    cursor = connection.connection.cursor()
    try:
        (cursor.executemany if many else cursor.execute)(sql, parameters)
        rows = cursor.fetchall() if cursor.description else ()
    except BaseException as error:
        # It looks whether the connection is lost. Only what the driver raises is wrapped.
        is_drivers = isinstance(error, connection.dialect.loaded_dbapi.Error)
        connection._handle_dbapi_exception(error, sql if is_drivers else None, None, cursor, None)
    cursor.close()
    return rows, cursor


class _Plan:
    """A compiled statement.

    Attributes:
        sql: With the dialect's placeholders.
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
        # What fills placeholders, in order: the name of a value, and how to hand it to the driver
        # if that takes something; or, without a name, a value that is always the same.
        self._fillers: list[tuple[str | None, Any]] = []
        for name in compiled.positiontup or ():
            process = compiled.binds[name].type.dialect_impl(dialect).bind_processor(dialect)
            if name in names:
                self._fillers.append((name, process))
            else:
                value = compiled.params[name]
                self._fillers.append((None, value if process is None else process(value)))

    def run(self, connection: Connection, values: Mapping[str, Any]) -> Sequence[Any] | int:
        """Its rows, or the number of those it changes."""
        parameters = [
            process if name is None else values[name] if process is None else process(values[name])
            for name, process in self._fillers
        ]
        rows, cursor = _run(connection, self.sql, parameters)
        return cursor.rowcount if cursor.description is None else self._read(rows, cursor)

    def parameters(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
        """Rows of values as the driver takes them."""
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
        """The driver's rows as named tuples of the values that the types of columns make of them.

        With their names come the driver's own types, on which that depends.
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
