"""Comparison of rows between two databases, and application of the differences."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnClause,
    Delete,
    Select,
    Table,
    Update,
    and_,
    bindparam,
    delete,
    func,
    null,
    select,
    update,
)

from replaydb.database.runtime.prepared import Bound
from replaydb.database.runtime.session import Session
from replaydb.database.statements.insertion import insert_into
from replaydb.database.statements.table_ranges import JsonText, columns, families, plain_table
from replaydb.database.tables.column_types import Damaged
from replaydb.database.tables.expressions import among
from replaydb.database.tables.schema import compatibility, metadata, payload
from replaydb.errors import DatabaseError

#: Values of the columns of `table_ranges.columns`, the key first.
Values = tuple[Any, ...]

#: Prefix of parameters for the key columns of the row that is changed.
OF = "of_"


@dataclass(slots=True)
class Difference:
    """Changes that make rows of a table equal to the wanted rows.

    Attributes:
        table: The table.
        missing: Rows to insert.
        changed: Rows to update, as (current, wanted).
        surplus: Keys of rows to delete.
    """

    table: Table
    missing: list[Values] = field(default_factory=list)
    changed: list[tuple[Values, Values]] = field(default_factory=list)
    surplus: list[Values] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Number of rows that differ."""
        return len(self.missing) + len(self.changed) + len(self.surplus)


def roots(session: Session, of: Table, after: int, most: int) -> list[Values]:
    """Return up to `most` rows of a table with generated ids, in order, after an id."""
    found = session.run(Bound(select_after(of, *columns(of)), {"after": after, "most": most}))
    return [tuple(row) for row in found]


def children(session: Session, of: Table, after: int, last: int) -> list[Values]:
    """Return the rows that belong to rows with ids above `after`, up to `last`."""
    found = session.run(Bound(select_children(of), {"after": after, "last": last}))
    return [tuple(row) for row in found]


def end_of_page(session: Session, of: Table, after: int, most: int) -> int | None:
    """Return the largest id among the next `most` rows after an id; None if there is no row.

    In a child table it is the id of the parent row.
    """
    found = session.run(Bound(select_after(of, columns(of)[0]), {"after": after, "most": most}))
    return max((row[0] for row in found), default=None)


def compare(of: Table, wanted: Sequence[Values], found: Sequence[Values]) -> Difference:
    """Return how rows of a table differ from the wanted rows.

    Raises:
        DatabaseError: A wanted row has a value that cannot be read.
    """
    difference, width = Difference(of), key_length(of)
    existing = {row[:width]: row for row in found}
    for row in wanted:
        other = existing.pop(row[:width], None)
        if other == row:
            continue
        _check(of, row)
        if other is None:
            difference.missing.append(row)
        elif not _are_equivalent(of, other, row):
            difference.changed.append((other, row))
    difference.surplus.extend(existing)
    return difference


def _are_equivalent(of: Table, found: Values, wanted: Values) -> bool:
    """Compare rows. JSON read from PostgreSQL is serialized again, so texts may differ."""
    texts = json_positions(of)
    return all(
        a == b or (i in texts and None not in (a, b) and _is_same_json(a, b))
        for i, (a, b) in enumerate(zip(found, wanted, strict=True))
    )


def _is_same_json(*texts: str) -> bool:
    """Compare JSON texts by value. Python considers 1, 1.0 and True equal, JSON does not."""
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


def apply(session: Session, differences: Sequence[Difference]) -> None:
    """Apply differences to a family of tables, its root first. Payload rows are only deleted.

    The counters of packs are not updated: see `packs.recount`.
    """
    for one in differences:
        surplus = one.surplus
        if one.table is payload:
            surplus = [*surplus, *(row[: key_length(payload)] for row, _ in one.changed)]
        _delete(session, one.table, surplus)
    for one in differences:
        if one.table is not payload:
            names = [each.name for each in columns(one.table)]
            missing = [dict(zip(names, row, strict=True)) for row in one.missing]
            session.run_many(insert_into(plain_table(one.table)), missing)
            _update(session, one.table, one.changed)


def _delete(session: Session, of: Table, surplus: Sequence[Values]) -> None:
    if not surplus:
        return
    if any(of is family.root for family in families()):
        for statement in clear_references(of, [key for (key,) in surplus]):
            session.run(statement)
    names = [OF + key.name for key in keys(of)]
    session.core.execute(delete_rows(of), [dict(zip(names, key, strict=True)) for key in surplus])


def _update(session: Session, of: Table, changed: Sequence[tuple[Values, Values]]) -> None:
    """Update only columns in which some rows differ: most of these columns are in no index."""
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
    session.run_many(update_rows(of), rows)


def count(session: Session, of: Table) -> int:
    """Return the number of rows of a table."""
    [(number,)] = session.run(select(func.count()).select_from(of))
    return int(number)


def first_in_use(session: Session) -> str | None:
    """Return the name of the first table that has rows; None if the store is empty."""
    tables = [
        one
        for family in families()
        for one in (family.root, *family.children)
        if one is not compatibility
    ]
    any_row = ((one, select(*one.primary_key).limit(1)) for one in tables)
    return next((one.name for one, found in any_row if session.run(found)), None)


def key_length(of: Table) -> int:
    """Return the number of key columns of a table; these are the first ones."""
    return len(of.primary_key)


@cache
def json_positions(of: Table) -> tuple[int, ...]:
    """Return the positions of JSON columns among `columns`."""
    return tuple(i for i, one in enumerate(columns(of)) if isinstance(one.type, JsonText))


@cache
def select_after(of: Table, *shown: ColumnClause[Any]) -> Select[Any]:
    """Select columns of up to `most` rows after the id `after`, in order of ids."""
    key = columns(of)[0]
    after = select(*shown).where(key > bindparam("after"))
    return after.order_by(key).limit(bindparam("most"))


@cache
def select_children(of: Table) -> Select[Any]:
    """Select the rows that belong to rows with ids above `after`, up to `last`."""
    key = columns(of)[0]
    return select(*columns(of)).where(key > bindparam("after"), key <= bindparam("last"))


@cache
def update_rows(of: Table) -> Update:
    """Update rows, given as dicts of the columns to change, and of the key with the prefix `OF`."""
    return update(plain_table(of)).where(_has_key(of))


@cache
def delete_rows(of: Table) -> Delete:
    """Delete rows, and rows that belong to them, given as dicts of the key with the prefix `OF`."""
    return delete(plain_table(of)).where(_has_key(of))


def _has_key(of: Table) -> Any:
    return and_(*(one == bindparam(OF + one.name, type_=one.type) for one in keys(of)))


def keys(of: Table) -> Sequence[ColumnClause[Any]]:
    """Return the key columns of a table."""
    return columns(of)[: key_length(of)]


def clear_references(root: Table, ids: Sequence[int]) -> list[Update]:
    """Set foreign keys without ON DELETE that refer to these rows to NULL."""
    return [
        update(other).where(among(key.parent, ids)).values({key.parent.name: null()})
        for other in metadata.sorted_tables
        for key in other.foreign_keys
        if key.column.table is root and key.ondelete is None
    ]
