"""Several writes in one statement, so that a call waits for the server once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from sqlalchemy import ARRAY, Connection, Insert, Update, bindparam, func, insert, select, update

from replaydb.database.prepared import Bound, execute, execute_many


class Write(NamedTuple):
    """Rows to insert into a table or to update in it, each a dict with the same names.

    Attributes:
        statement: Inserts a row, or updates the row whose id is the parameter that is no column.
        rows: Columns of the rows, and for an update that parameter.
    """

    statement: Insert | Update
    rows: Sequence[Mapping[str, Any]]


def write_together(connection: Connection, writes: Sequence[Write]) -> None:
    """Write to several tables, none of them twice, in one exchange with a server.

    All parts of one statement read the same snapshot, so no part sees the rows of another.
    """
    writes = [write for write in writes if write.rows]
    if connection.dialect.name != "postgresql" or len(writes) < 2:
        for write in writes:
            execute_many(connection, write.statement, write.rows)
        return
    names = tuple(tuple(write.rows[0]) for write in writes)
    statement = combined(tuple(write.statement for write in writes), names)
    values = {
        _parameter(number, name): [row[name] for row in write.rows]
        for number, write in enumerate(writes)
        for name in names[number]
    }
    execute(connection, Bound(statement, values))


def _parameter(number: int, name: str) -> str:
    return f"{name}_{number}"


@lru_cache(maxsize=256)
def combined(
    statements: tuple[Insert | Update, ...], names: tuple[tuple[str, ...], ...]
) -> Insert | Update:
    """Return one statement that does what several do, given the names of their rows.

    Its parameters are arrays: `NAME_0` of the first statement, `NAME_1` of the second, and so on.
    """
    *others, last = (
        _of_arrays(number, *one) for number, one in enumerate(zip(statements, names, strict=True))
    )
    return last.add_cte(*(one.cte(f"write_{number}") for number, one in enumerate(others)))


def _of_arrays(number: int, statement: Insert | Update, names: tuple[str, ...]) -> Insert | Update:
    """Return the statement for all rows at once, given an array for each name."""
    table = statement.table
    types = {name: (table.c[name] if name in table.c else table.c.id).type for name in names}  # noqa: SIM401
    arrays = [bindparam(_parameter(number, name), type_=ARRAY(types[name])) for name in names]
    new = func.unnest(*arrays).table_valued(*names, name=f"new_{number}").render_derived()
    if isinstance(statement, Insert):
        return insert(table).from_select(list(names), select(*(new.c[name] for name in names)))
    [key] = (name for name in names if name not in table.c)
    values = {name: new.c[name] for name in names if name != key}
    return update(table).values(values).where(table.c.id == new.c[key])
