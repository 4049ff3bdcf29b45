"""The tables of a store and their columns, as copies of whole stores transfer and compare them.

Most tables generate ids. A row of any other table belongs to one row of these, by the first column
of its key.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import Column, ColumnClause, Dialect, Table, TableClause, Text, column, func, table
from sqlalchemy.types import TypeEngine, UserDefinedType

from replaydb.database.tables.column_types import GeneratedText, is_json, tolerant, unconverted
from replaydb.database.tables.schema import commit_proof, metadata, pack, payload, payload_place

#: Tables that are not copied: they describe payload locations and commits of one database.
OWN_TABLES = (payload_place, pack, commit_proof)
#: Name of the column that rows of payloads have instead of their bytes.
LENGTH = "length"


class JsonText(UserDefinedType[str]):
    """JSON as text, to distinguish 1, 1.0 and true."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        """Return the name of the type."""
        return "JSON"

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
        """Serialize the value, which the driver of PostgreSQL has parsed."""
        return lambda value: value if value is None else json.dumps(value)


class _KeptText(JsonText):
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


@cache
def columns(of: Table) -> tuple[ColumnClause[Any], ...]:
    """Return the columns that are compared and copied, the key first.

    For payloads these are all columns except the bytes and their location.
    """
    own = plain_table(of).c
    if of is not payload:
        return tuple(own)
    length = func.coalesce(own.pack_length, func.length(own.data)).label(LENGTH)
    located = ("data", "pack_id", "pack_offset", "pack_length")
    shown: list[Any] = [one for one in own if one.name not in located]
    return *shown, length


@cache
def plain_table(of: Table) -> TableClause:
    """Return a table with columns of the types that copies transfer unchanged."""
    return table(of.name, *(column(one.name, _plain_type(one.type)) for one in of.columns))


def _plain_type(kind: TypeEngine[Any]) -> TypeEngine[Any]:
    if is_json(kind):
        return JsonText().with_variant(_KeptText(), "sqlite")
    return Text() if isinstance(kind, GeneratedText) else kind
