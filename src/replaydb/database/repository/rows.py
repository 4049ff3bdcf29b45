"""Rows of two databases compared, and those of one made like those of the other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Table

from replaydb.database.column_types import Damaged
from replaydb.database.prepared import execute, execute_many
from replaydb.database.schema import payload
from replaydb.database.statements.rows import (
    OF,
    columns,
    count_rows,
    delete_rows,
    families,
    forget,
    insert_rows,
    json_positions,
    key_length,
    keys,
    select_any,
    select_children,
    select_ids,
    select_roots,
    update_rows,
)
from replaydb.errors import DatabaseError

#: Values of the columns of `statements.rows.columns`, the key first.
Values = tuple[Any, ...]


@dataclass(slots=True)
class Difference:
    """What it takes to make rows of a table like others.

    Attributes:
        table: The table.
        missing: Rows that are not there.
        changed: Rows that are, as they are and as they should be.
        surplus: Keys of rows that should not be there.
    """

    table: Table
    missing: list[Values] = field(default_factory=list)
    changed: list[tuple[Values, Values]] = field(default_factory=list)
    surplus: list[Values] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """How many rows differ."""
        return len(self.missing) + len(self.changed) + len(self.surplus)


def roots(connection: Connection, of: Table, after: int, most: int) -> list[Values]:
    """Rows of a table that gives ids, after one of these, up to so many."""
    found = connection.execute(select_roots(of), {"after": after, "most": most})
    return [tuple(row) for row in found]


def children(connection: Connection, of: Table, after: int, last: int) -> list[Values]:
    """Rows that hang on those with ids from `after`, excluded, to `last`."""
    found = connection.execute(select_children(of), {"after": after, "last": last})
    return [tuple(row) for row in found]


def end_of_page(connection: Connection, of: Table, after: int, most: int) -> int | None:
    """The id of the last of up to so many rows after an id, or of what rows hang on."""
    found = connection.execute(select_ids(of), {"after": after, "most": most})
    return max((row[0] for row in found), default=None)


def compare(of: Table, wanted: Sequence[Values], found: Sequence[Values]) -> Difference:
    """How rows of a table differ from those that are wanted.

    Raises:
        DatabaseError: Something stands in one that is wanted that cannot be there.
    """
    difference, width = Difference(of), key_length(of)
    there = {row[:width]: row for row in found}
    for row in wanted:
        other = there.pop(row[:width], None)
        if other == row:
            continue
        _check(of, row)
        if other is None:
            difference.missing.append(row)
        elif not _means_the_same(of, other, row):
            difference.changed.append((other, row))
    difference.surplus.extend(there)
    return difference


def _means_the_same(of: Table, found: Values, wanted: Values) -> bool:
    """PostgreSQL's JSON is written anew as it is read: words may differ that mean the same."""
    texts = json_positions(of)
    return all(
        a == b or (i in texts and None not in (a, b) and _is_same_json(a, b))
        for i, (a, b) in enumerate(zip(found, wanted, strict=True))
    )


def _is_same_json(*texts: str) -> bool:
    """To Python 1, 1.0 and True are equal."""
    try:
        a, b = map(json.loads, texts)
    except ValueError:
        return False
    return json.dumps(a) == json.dumps(b)


def _check(of: Table, row: Values) -> None:
    for name, value in zip(columns(of), row, strict=True):
        if isinstance(value, Damaged):
            shown = ", ".join(map(repr, row[: key_length(of)]))
            raise DatabaseError(f"{of.name} {shown}: {name.name} can not be read: {value}")


def apply(connection: Connection, differences: Sequence[Difference]) -> None:
    """Make rows of a family of tables like others: of its root first. Payloads are only removed.

    What is in packs is not counted: see `packs.recount`.
    """
    for one in differences:
        gone = one.surplus
        if one.table is payload:
            gone = [*gone, *(row[: key_length(payload)] for row, _ in one.changed)]
        _delete(connection, one.table, gone)
    for one in differences:
        if one.table is not payload:
            names = [each.name for each in columns(one.table)]
            missing = [dict(zip(names, row, strict=True)) for row in one.missing]
            execute_many(connection, insert_rows(one.table), missing)
            _update(connection, one.table, one.changed)


def _delete(connection: Connection, of: Table, gone: Sequence[Values]) -> None:
    if not gone:
        return
    if any(of is family.root for family in families()):
        for statement in forget(of, [key for (key,) in gone]):
            execute(connection, statement)
    names = [OF + key.name for key in keys(of)]
    connection.execute(delete_rows(of), [dict(zip(names, key, strict=True)) for key in gone])


def _update(connection: Connection, of: Table, changed: Sequence[tuple[Values, Values]]) -> None:
    """Only columns in which some differ: most of what changes is in no index."""
    shown = columns(of)
    differing = [
        i
        for i in range(key_length(of), len(shown))
        if any(old[i] != new[i] for old, new in changed)
    ]
    rows = [
        {OF + key.name: new[i] for i, key in enumerate(keys(of))}
        | {shown[i].name: new[i] for i in differing}
        for _, new in changed
    ]
    execute_many(connection, update_rows(of), rows)


def count(connection: Connection, of: Table) -> int:
    """How many rows a table has."""
    [(number,)] = execute(connection, count_rows(of))
    return int(number)


def first_in_use(connection: Connection) -> str | None:
    """The name of a table that has rows; None: the store is empty."""
    tables = [one for family in families() for one in (family.root, *family.children)]
    return next((one.name for one in tables if execute(connection, select_any(one))), None)
