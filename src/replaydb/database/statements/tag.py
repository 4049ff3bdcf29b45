"""Statements on the tag index."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Delete,
    Insert,
    Select,
    Text,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal,
    or_,
    select,
)

from replaydb.database.filters.tag_lookups import PREFIX, Lookup
from replaydb.database.runtime.prepared import Bound, prepared
from replaydb.database.tables.expressions import (
    among,
    bytewise,
    json_boolean,
    json_double,
    json_text,
)
from replaydb.database.tables.schema import group, group_tag

_tag = group_tag.c


def insert_tags(name: str, ids: Sequence[int]) -> Bound[Insert]:
    """Insert the index entries of one tag of groups, with the values that filters compare."""
    return Bound(_insert(name), {"ids": ids})


@lru_cache(maxsize=256)
def _insert(name: str) -> Insert:
    some = _entries(name).where(among(group.id, bindparam("ids"))).subquery()
    row = some.c
    there = or_(row.text.is_not(None), row.number.is_not(None))
    columns = [_tag.group_id, _tag.name, _tag.buffer_id, _tag.text, _tag.number]
    rows = select(row.id, literal(name), row.buffer_id, row.text, row.number).where(there)
    return insert(group_tag).from_select(columns, rows)


def _entries(name: str) -> Select[Any]:
    text = func.substr(json_text(group.tags, (name,)), 1, PREFIX, type_=Text())
    is_true = json_boolean(group.tags, (name,))
    number = func.coalesce(
        json_double(group.tags, (name,)), case((is_true, literal(1.0)), (~is_true, literal(0.0)))
    )
    return select(group.id, group.buffer_id, text.label("text"), number.label("number"))


def count_mistagged(buffer_id: int, name: str) -> Select[int]:
    """Count the groups whose index entry differs from the tag."""
    some = _entries(name).where(group.buffer_id == buffer_id).subquery()
    row = some.c
    return (
        select(func.count())
        .select_from(some)
        .outerjoin(group_tag, (_tag.group_id == row.id) & (_tag.name == name))
        .where(
            bytewise(row.text).is_distinct_from(_tag.text)
            | row.number.is_distinct_from(_tag.number)
            | (_tag.buffer_id != row.buffer_id)
        )
    )


@prepared
def delete_tags(ids: Any, names: Any) -> Delete:
    """Delete the index entries of tags of groups."""
    return delete(group_tag).where(among(_tag.group_id, ids), among(_tag.name, names))


def count_tagged(buffer_id: int, lookup: Lookup, most: int) -> Select[int]:
    """Count up to `most` groups that a lookup finds."""
    some = select(_tag.group_id).where(_found(buffer_id, lookup)).limit(most).subquery()
    return select(func.count()).select_from(some)


def select_tagged(buffer_id: int, lookup: Lookup) -> Select[int]:
    """Select the ids of the groups that a lookup finds."""
    return select(_tag.group_id).where(_found(buffer_id, lookup))


def _found(buffer_id: int, lookup: Lookup) -> ColumnElement[bool]:
    mine = (_tag.buffer_id == buffer_id) & (_tag.name == lookup.name)
    if not lookup.is_text:  # the column before that of numbers
        mine &= _tag.text.is_(None)
    return mine & lookup.condition


@prepared
def select_ids_below(before: Any, most: Any) -> Select[Any]:
    """Select groups of any buffer with ids below one, largest first, as (id, buffer_id)."""
    return (
        select(group.id, group.buffer_id)
        .where(group.id < before)
        .order_by(group.id.desc())
        .limit(most)
    )
