"""Rows of any table as they are, by ranges of ids: what a copy of a whole store is made of.

Most tables give ids; a row of any other hangs on one row of those, by the first column of its key.
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

from replaydb.database.column_types import GeneratedText, is_json, kept, tolerant
from replaydb.database.expressions import among
from replaydb.database.schema import (
    GENERATED,
    commit_proof,
    metadata,
    pack,
    payload,
    payload_place,
)

#: Each database has its own: they say where in it payloads are, and who has committed there.
OWN_TABLES = (payload_place, pack, commit_proof)
#: What rows of payloads have in the place of their bytes.
LENGTH = "length"
#: Before the name of a column: what it is in the row that is changed.
OF = "of_"


class _JsonText(UserDefinedType[str]):
    """JSON as text, in which 1, 1.0 and true differ."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "JSON"

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
        """The driver of PostgreSQL has read it."""
        return lambda value: value if value is None else json.dumps(value)


class _KeptText(_JsonText):
    """SQLite has the text itself, or its bytes, or a number that an earlier version has put."""

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any]:
        return lambda value: value if value is None else kept(value)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
        def read(value: Any) -> Any:
            if isinstance(value, bytes):
                return value.decode()
            return value if value is None or isinstance(value, str) else json.dumps(value)

        return tolerant(read)


@dataclass(frozen=True)
class Family:
    """A table that gives ids, and those whose rows hang on its rows.

    Attributes:
        root: Its key is `id`.
        children: The first column of their keys is the id of a row of it.
    """

    root: Table
    children: tuple[Table, ...]


@cache
def families() -> tuple[Family, ...]:
    """All tables but `OWN_TABLES`, after those that they refer to."""
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
    """How many columns are its key: the first ones."""
    return len(of.primary_key)


@cache
def columns(of: Table) -> tuple[ColumnClause[Any], ...]:
    """What of rows is compared and copied, the key first; of payloads all but where they are."""
    own = _plain(of).c
    if of is not payload:
        return tuple(own)
    length = func.coalesce(own.pack_length, func.length(own.data)).label(LENGTH)
    return own.group_id, own.part, own.codec_version, own.checksum, length  # type: ignore[return-value]


@cache
def json_positions(of: Table) -> tuple[int, ...]:
    """Which of its columns are JSON."""
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
    """Rows after an id, `after`, up to `most`, in the order of ids."""
    key = columns(of)[0]
    return (
        select(*columns(of)).where(key > bindparam("after")).order_by(key).limit(bindparam("most"))
    )


@cache
def select_ids(of: Table) -> Select[Any]:
    """The first column of the keys of rows after an id, `after`, up to `most` of them."""
    key = columns(of)[0]
    return select(key).where(key > bindparam("after")).order_by(key).limit(bindparam("most"))


@cache
def select_children(of: Table) -> Select[Any]:
    """Rows that hang on rows with ids from `after`, excluded, to `last`."""
    key = columns(of)[0]
    return select(*columns(of)).where(key > bindparam("after"), key <= bindparam("last"))


def count_rows(of: Table) -> Select[int]:
    """How many rows there are."""
    return select(func.count()).select_from(of)


def select_any(of: Table) -> Select[Any]:
    """A row, if there is one."""
    return select(next(iter(of.primary_key))).limit(1)


@cache
def select_largest_ids() -> Select[Any]:
    """The largest id of each table that generates ids, by its name; NULL without rows."""
    return select(
        *(select(func.max(one.c.id)).scalar_subquery().label(one.name) for one in GENERATED)
    )


@cache
def insert_rows(of: Table) -> Insert:
    """Rows, as dicts of their columns."""
    return insert(_plain(of))


@cache
def update_rows(of: Table) -> Update:
    """Rows, as dicts of the columns that change, and of the key with `OF` before each name."""
    return update(_plain(of)).where(_has_key(of))


@cache
def delete_rows(of: Table) -> Delete:
    """Rows, as dicts of the key with `OF` before each name; what hangs on them goes along."""
    return delete(_plain(of)).where(_has_key(of))


def _has_key(of: Table) -> Any:
    return and_(*(one == bindparam(OF + one.name, type_=one.type) for one in keys(of)))


def keys(of: Table) -> Sequence[ColumnClause[Any]]:
    """The columns of its key."""
    return columns(of)[: key_length(of)]


def forget(root: Table, ids: Sequence[int]) -> list[Update]:
    """Let nothing refer to rows that would not go along with them."""
    return [
        update(other).where(among(key.parent, ids)).values({key.parent.name: null()})
        for other in metadata.sorted_tables
        for key in other.foreign_keys
        if key.column.table is root and key.ondelete is None
    ]
