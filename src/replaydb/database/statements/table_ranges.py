"""Generic statements on rows of any table, by ranges of ids, for copies of whole stores.

Most tables generate ids. A row of any other table belongs to one row of these, by the first column
of its key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import (
    Column,
    ColumnClause,
    Delete,
    Dialect,
    Insert,
    Select,
    Table,
    TableClause,
    Text,
    Update,
    and_,
    bindparam,
    column,
    delete,
    func,
    insert,
    null,
    select,
    table,
    update,
)
from sqlalchemy.types import TypeEngine, UserDefinedType

from replaydb.database.tables.column_types import GeneratedText, is_json, tolerant, unconverted
from replaydb.database.tables.expressions import among
from replaydb.database.tables.schema import (
    GENERATED,
    commit_proof,
    metadata,
    pack,
    payload,
    payload_place,
)

#: Tables that are not copied: they describe payload locations and commits of one database.
OWN_TABLES = (payload_place, pack, commit_proof)
#: Name of the column that rows of payloads have instead of their bytes.
LENGTH = "length"
#: Prefix of parameters for the key columns of the row that is changed.
OF = "of_"


class _JsonText(UserDefinedType[str]):
    """JSON as text, to distinguish 1, 1.0 and true."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "JSON"

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
        """Serialize the value, which the driver of PostgreSQL has parsed."""
        return lambda value: value if value is None else json.dumps(value)


class _KeptText(_JsonText):
    """JSON in SQLite: stored as text, as bytes, or as a number written by an earlier version."""

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any]:
        return lambda value: value if value is None else unconverted(value)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
        def read(value: Any) -> Any:
            if isinstance(value, bytes):
                return value.decode()
            return value if value is None or isinstance(value, str) else json.dumps(value)

        return tolerant(read)


@dataclass(frozen=True)
class Family:
    """A table that generates ids, and the tables whose rows belong to its rows.

    Attributes:
        root: The table; its key is `id`.
        children: Tables whose first key column is the id of a row of `root`.
    """

    root: Table
    children: tuple[Table, ...]


@cache
def families() -> tuple[Family, ...]:
    """Return all tables except `OWN_TABLES`, each after the tables that it refers to."""
    tables = [one for one in metadata.sorted_tables if len(one.primary_key)]  # views have no key
    roots = [one for one in tables if one not in OWN_TABLES and len(one.primary_key) == 1]
    return tuple(
        Family(root, tuple(one for one in tables if _parent_key(one) is root.c.id))
        for root in roots
    )


def _parent_key(child: Table) -> Column[Any] | None:
    first = next(iter(child.primary_key))
    return next((key.column for key in first.foreign_keys), None)


def key_length(of: Table) -> int:
    """Return the number of key columns of a table; these are the first ones."""
    return len(of.primary_key)


@cache
def columns(of: Table) -> tuple[ColumnClause[Any], ...]:
    """Return the columns that are compared and copied, the key first.

    For payloads these are all columns except the bytes and their location.
    """
    own = _plain(of).c
    if of is not payload:
        return tuple(own)
    length = func.coalesce(own.pack_length, func.length(own.data)).label(LENGTH)
    return own.group_id, own.part, own.codec_version, own.checksum, length  # type: ignore[return-value]


@cache
def json_positions(of: Table) -> tuple[int, ...]:
    """Return the positions of JSON columns among `columns`."""
    return tuple(i for i, one in enumerate(columns(of)) if isinstance(one.type, _JsonText))


@cache
def _plain(of: Table) -> TableClause:
    return table(of.name, *(column(one.name, _plain_type(one.type)) for one in of.columns))


def _plain_type(kind: TypeEngine[Any]) -> TypeEngine[Any]:
    if is_json(kind):
        return _JsonText().with_variant(_KeptText(), "sqlite")
    return Text() if isinstance(kind, GeneratedText) else kind


@cache
def select_roots(of: Table) -> Select[Any]:
    """Select up to `most` rows after the id `after`, in order of ids."""
    key = columns(of)[0]
    return (
        select(*columns(of)).where(key > bindparam("after")).order_by(key).limit(bindparam("most"))
    )


@cache
def select_ids(of: Table) -> Select[Any]:
    """Select the first key column of up to `most` rows after the id `after`."""
    key = columns(of)[0]
    return select(key).where(key > bindparam("after")).order_by(key).limit(bindparam("most"))


@cache
def select_children(of: Table) -> Select[Any]:
    """Select the rows that belong to rows with ids above `after`, up to `last`."""
    key = columns(of)[0]
    return select(*columns(of)).where(key > bindparam("after"), key <= bindparam("last"))


def count_rows(of: Table) -> Select[int]:
    """Count the rows of a table."""
    return select(func.count()).select_from(of)


def select_any(of: Table) -> Select[Any]:
    """Select the first key column of any row, if there is one."""
    return select(next(iter(of.primary_key))).limit(1)


@cache
def select_largest_ids() -> Select[Any]:
    """Select the largest id of each table that generates ids, by its name; NULL without rows."""
    return select(
        *(select(func.max(one.c.id)).scalar_subquery().label(one.name) for one in GENERATED)
    )


@cache
def insert_rows(of: Table) -> Insert:
    """Insert rows, given as dicts of their columns."""
    return insert(_plain(of))


@cache
def update_rows(of: Table) -> Update:
    """Update rows, given as dicts of the columns to change, and of the key with the prefix `OF`."""
    return update(_plain(of)).where(_has_key(of))


@cache
def delete_rows(of: Table) -> Delete:
    """Delete rows, and rows that belong to them, given as dicts of the key with the prefix `OF`."""
    return delete(_plain(of)).where(_has_key(of))


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
