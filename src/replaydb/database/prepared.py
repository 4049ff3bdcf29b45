"""Statements that are built once and run with other values every time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, update_wrapper
from itertools import repeat
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, overload

from sqlalchemy import (
    Connection,
    Dialect,
    Executable,
    Insert,
    Row,
    Select,
    Update,
    UpdateBase,
    bindparam,
)

if TYPE_CHECKING:
    from sqlalchemy.sql.compiler import SQLCompiler

S = TypeVar("S", bound=Executable, covariant=True)


class Bound(NamedTuple, Generic[S]):
    """A statement that is kept, and what to run it with this time."""

    statement: S
    values: Mapping[str, Any]


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
) -> Sequence[Row[Any]]: ...


@overload
def execute(connection: Connection, statement: UpdateBase | Bound[UpdateBase]) -> int: ...


def execute(connection: Connection, statement: Executable | Bound[Any]) -> Sequence[Row[Any]] | int:
    """Run a statement, whether it was made for this call or is kept.

    Returns:
        The rows that it reads, or the number of those that it changes.
    """
    if isinstance(statement, Bound):
        result = connection.execute(statement.statement, statement.values)
    else:
        result = connection.execute(statement)
    return result.all() if result.returns_rows else result.rowcount


def execute_many(
    connection: Connection, statement: Insert | Update, rows: Sequence[Mapping[str, Any]]
) -> None:
    """Run a statement once for every row, a dict of its parameters; all have the same names.

    What `connection.execute` does, but for what it does anew for every row: that takes longer
    than writing most of ours. `statement` must be one that is kept, not made for the call.
    """
    if rows:
        shape = _shape(statement, tuple(rows[0]), connection.dialect)
        connection.exec_driver_sql(shape.sql, shape.values(rows))


def inserted_id(connection: Connection, statement: Insert, values: Mapping[str, Any]) -> int:
    """Insert a row, and say which id the engine gave it."""
    key: Any = connection.execute(statement, dict(values)).inserted_primary_key
    return int(key[0])


@dataclass(frozen=True, slots=True)
class _Shape:
    """A compiled statement.

    Attributes:
        sql: With the dialect's placeholders.
        columns: What fills them, in order: the name of a value, how to hand it to the driver if
            that takes something, and the value where it is the same in all rows.
    """

    sql: str
    columns: Sequence[tuple[str, Callable[[Any], Any] | None, Iterable[Any] | None]]

    def values(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
        """The rows as the driver takes them."""
        columns = []
        for name, process, constant in self.columns:
            if constant is not None:
                columns.append(constant)
            elif process is None:
                columns.append([row[name] for row in rows])
            else:
                columns.append([process(row[name]) for row in rows])
        return list(zip(*columns, strict=False))  # a constant is repeated without end


@lru_cache(maxsize=256)
def _shape(statement: Insert | Update, names: tuple[str, ...], dialect: Dialect) -> _Shape:
    compiled: SQLCompiler = statement.compile(
        dialect=dialect, column_keys=names, for_executemany=True
    )
    columns = []
    for name in compiled.positiontup or ():
        process = compiled.binds[name].type.dialect_impl(dialect).bind_processor(dialect)
        constant = None
        if name not in names:
            value = compiled.params[name]
            constant = repeat(value if process is None else process(value))
        columns.append((name, process, constant))
    return _Shape(compiled.string, columns)
