"""Several writes in one statement, so that a call waits for the server once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from sqlalchemy import (
    ARRAY,
    BindParameter,
    Boolean,
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
from sqlalchemy.sql.selectable import TableValuedAlias
from sqlalchemy.sql.visitors import iterate, replacement_traverse
from sqlalchemy.types import Integer, TypeEngine

from replaydb.database.runtime.prepared import Bound, Postponable, Write

#: More bytes are written one table after the other: an array would hold them in memory once more,
#: and PostgreSQL limits one message to 1 GB.
MAX_BYTES = 1 << 20
#: Counted for each row. It limits the rows to 100,000: their names, which are not counted, have up
#: to a kilobyte each.
_ROW_BYTES = 10


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


def writes_as_one(writes: Sequence[Postponable], last: Bound[Any] | None) -> Bound[Any]:
    """Return a statement that writes to several tables, none of them twice, and does the last.

    All parts of one statement read the same snapshot, so no part sees the rows of another.
    """
    parts, values = [], {} if last is None else dict(last.values)
    for number, write in enumerate(writes):
        given = write.columns if isinstance(write, Write) else write.values
        parts.append(Part(write.statement, tuple(given), isinstance(write, Write)))
        values |= numbered(number, given)
    return Bound(_combined(tuple(parts), None if last is None else last.statement), values)


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
def _combined(parts: tuple[Part, ...], last: Any = None) -> Any:
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
