"""Prepared statements: built and compiled once, and run with different values each time."""

from __future__ import annotations

import inspect
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache, update_wrapper
from itertools import repeat
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

from sqlalchemy import Delete, Dialect, Executable, Insert, Update, bindparam

if TYPE_CHECKING:
    from sqlalchemy.sql.compiler import SQLCompiler

S = TypeVar("S", bound=Executable, covariant=True)


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


class Plan:
    """A compiled statement.

    Attributes:
        sql: Its text, with the placeholders of the dialect.
        has_rows: Whether it returns rows.
    """

    def __init__(self, statement: Any, names: tuple[str, ...], dialect: Dialect) -> None:
        compiled: SQLCompiler = statement.compile(
            dialect=dialect, column_keys=names, for_executemany=True
        )
        self.sql = compiled.string
        self._dialect = dialect
        self._types = [column.type for column in getattr(statement, "exported_columns", ())]
        self.has_rows = bool(self._types)
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

    def parameters(self, values: Mapping[str, Any]) -> list[Any]:
        """Convert values to parameters of the driver."""
        return [
            process if name is None else values[name] if process is None else process(values[name])
            for name, process in self._fillers
        ]

    def parameters_of_each(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
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

    @property
    def is_described(self) -> bool:
        """Whether it has returned rows before, so that `rows` needs no description."""
        return self._make_row is not None

    def rows(self, found: Sequence[Any], columns: Sequence[Any] | None) -> list[Any]:
        """Convert the driver's rows to named tuples, by the types of their columns.

        Args:
            found: Rows of the driver.
            columns: The driver's description of the columns. It is needed for the first rows:
                their conversion depends on the driver's types.
        """
        if self._make_row is None:
            self._describe(columns)
        make, readers = cast("Callable[[Iterable[Any]], Any]", self._make_row), self._readers
        if not readers:
            return list(map(make, found))
        made = []
        for row in found:
            values = list(row)
            for at, read in readers:
                values[at] = read(values[at])
            made.append(make(values))
        return made

    def _describe(self, columns: Sequence[Any] | None) -> None:
        assert columns is not None  # noqa: S101 - see `rows`
        kinds = zip(self._types, columns, strict=True)
        readers = [
            kind.dialect_impl(self._dialect).result_processor(self._dialect, shown[1])
            for kind, shown in kinds
        ]
        self._readers = [(at, read) for at, read in enumerate(readers) if read is not None]
        names = [name for name, *_ in columns]
        self._make_row = cast("Any", namedtuple)("Row", names, rename=True)._make


#: Returns the plan of a statement, for values of these names.
plan_of = lru_cache(maxsize=1024)(Plan)
