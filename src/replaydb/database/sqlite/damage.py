"""Damage in a SQLite file: SQLite's own check, and values that their columns cannot have."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import (
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Double,
    Integer,
    String,
    Table,
    Text,
    cast,
    func,
    or_,
    select,
)

from replaydb.database.tables.column_types import GeneratedText, UtcDateTime, is_json
from replaydb.database.tables.schema import metadata

#: At most this many rows of a table are reported.
MOST_ROWS = 1000


def damage(connection: Connection) -> Iterator[tuple[str, str]]:
    """Yield where the file is damaged, and what is wrong."""
    for (message,) in connection.exec_driver_sql("PRAGMA integrity_check"):
        if message != "ok":
            yield "the file", str(message)
    for one in metadata.sorted_tables:
        if len(one.primary_key):  # views have none
            yield from _mistyped(connection, one)


def _mistyped(connection: Connection, of: Table) -> Iterator[tuple[str, str]]:
    """Yield the rows of a table with values that their columns cannot have."""
    wrong = {one.name: test for one in of.columns if (test := _is_mistyped(one)) is not None}
    keys = [func.quote(key) for key in of.primary_key]  # literally: the key may be damaged
    rows = connection.execute(
        select(*keys, *wrong.values()).where(or_(*wrong.values())).limit(MOST_ROWS)
    )
    for row in rows:
        key, flags = row[: len(keys)], row[len(keys) :]
        named = zip(of.primary_key, key, strict=True)
        where = ", ".join(f"{column.name} {value}" for column, value in named)
        names = [name for name, is_wrong in zip(wrong, flags, strict=True) if is_wrong]
        yield f"table {of.name}, {where}", f"{', '.join(names)}: not a valid value of the column"


def _is_mistyped(one: Column[object]) -> ColumnElement[bool] | None:
    """Return whether a column has an invalid value; None if its type is checked elsewhere."""
    found = func.typeof(one)
    match one.type:
        case kind if is_json(kind):
            return one.is_not(None) & (func.json_valid(cast(one, Text)) == 0)
        case UtcDateTime():
            return one.is_not(None) & func.julianday(one).is_(None)
        case Integer() | Double() | Boolean():
            return found.in_(["text", "blob"])
        case String() | GeneratedText():
            return found == "blob"
    return None
