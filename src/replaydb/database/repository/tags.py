"""The tag index: updates with the groups, incremental fill and removal, lookups."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    BinaryExpression,
    BindParameter,
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
from sqlalchemy.sql import operators

from replaydb.database.filters.tag_lookups import PREFIX, Lookup, conjuncts, lookups_in
from replaydb.database.repository import buffers
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.runtime.prepared import Bound, prepared
from replaydb.database.runtime.session import Session
from replaydb.database.statements.episode_group import update_each_group
from replaydb.database.statements.selections import Selection
from replaydb.database.tables.expressions import (
    among,
    as_stored,
    bytewise,
    json_boolean,
    json_double,
    json_text,
)
from replaydb.database.tables.schema import group, group_tag
from replaydb.domain import checks
from replaydb.errors import CorruptPayloadError

#: Groups that are added to an index, or removed, in one transaction.
CHUNK = 1000
#: Maximum number of groups that are looked up by id instead of scanning all groups.
MAX_LOOKUPS = 20_000
#: The same, instead of reading groups in some order until there are enough.
MAX_LOOKUPS_IN_ORDER = 1000

_tag = group_tag.c


def enter(buffer: LockedBuffer, ids: Sequence[int]) -> None:
    """Add new groups to the tag indexes of their buffer."""
    for name in buffer.settings.indexed_tags:
        buffer.session.run(insert_tags(name, ids))


def reindex(buffer: LockedBuffer, ids: Sequence[int], names: Collection[str]) -> None:
    """Replace the index entries of some tags of groups. Tags without an index are only removed."""
    buffer.session.run(delete_tags(ids, sorted(names)))
    for name in sorted(set(names) & set(buffer.settings.indexed_tags)):
        buffer.session.run(insert_tags(name, ids))


def merge(buffer: LockedBuffer, ids: Sequence[int], new: Mapping[str, Any]) -> None:
    """Merge tags into those of groups.

    Raises:
        CorruptPayloadError: The tags of some groups cannot be read.
    """
    rows = buffer.session.run(select_tags(ids))
    if damaged := [row.id for row in rows if not isinstance(row.tags, dict)]:
        raise CorruptPayloadError("tags can not be read", damaged)
    merged = [{"group_id": row.id, "tags": {**row.tags, **new}} for row in rows]
    buffer.session.run_many(update_each_group(), merged)
    if indexed := new.keys() & set(buffer.settings.indexed_tags):
        reindex(buffer, ids, indexed)


def plan(buffer: LockedBuffer, before: Collection[str]) -> None:
    """Record which indexes must be filled or emptied after `indexed_tags` was changed."""
    changed = set(before) ^ set(buffer.settings.indexed_tags)
    if changed:
        rebuild(buffer, changed)


def rebuild(buffer: LockedBuffer, names: Collection[str]) -> None:
    """Record that the indexes of these tags must be filled, or emptied, from the beginning."""
    _save(buffer, {**buffer.row.pending_tags, **dict.fromkeys(names, checks.INT64[1])})


def continue_indexing(buffer: LockedBuffer) -> None:
    """Fill and empty pending indexes for the next chunk of groups, from newest to oldest.

    Groups that are put or changed meanwhile are indexed by the calls that do so.
    """
    pending = dict(buffer.row.pending_tags)
    if not pending:
        return
    before = max(pending.values())
    names = [name for name, reached in pending.items() if reached == before]
    rows = buffer.session.run(select_ids_below(before, CHUNK))
    mine = [row.id for row in rows if row.buffer_id == buffer.id]
    if mine:
        reindex(buffer, mine, names)
    for name in names:
        if len(rows) < CHUNK:
            del pending[name]
        else:
            pending[name] = rows[-1].id
    _save(buffer, pending)


def _save(buffer: LockedBuffer, pending: dict[str, int]) -> None:
    buffers.save(buffer.session, buffer.id, {"pending_tags": pending or None})
    buffer.row = replace(buffer.row, pending_tags=pending)


def look_up(
    session: Session, row: BufferRow, where: ColumnElement[bool] | None, most: int
) -> Sequence[int] | None:
    """Return a superset of the groups that meet a filter, if a tag index shows that it is small.

    Args:
        session: A transaction in which the buffer's row does not change.
        row: Row of the buffer in that transaction.
        where: The filter.
        most: Maximum number of groups.

    Returns:
        Their ids; None if there are more, or no index applies to the filter.
    """
    lookup = _rarest(session, row, where, most)
    if lookup is None:
        return None
    return [group_id for (group_id,) in session.run(select_tagged(row.id, lookup))]


def is_selective(
    session: Session, row: BufferRow, where: ColumnElement[bool] | None, most: int
) -> bool:
    """Return whether `look_up` would return ids."""
    return _rarest(session, row, where, most) is not None


def mistagged(session: Session, row: BufferRow) -> dict[str, int]:
    """Return the number of groups with a wrong index entry, by the names of wrong indexes."""
    found = {}
    for name in sorted(row.indexed_tags):
        [(number,)] = session.run(count_mistagged(row.id, name))
        if number:
            found[name] = number
    return found


def _rarest(
    session: Session, row: BufferRow, where: ColumnElement[bool] | None, most: int
) -> Lookup | None:
    found = None
    for lookup in lookups_in(where, row.indexed_tags):
        [(number,)] = session.run(count_tagged(row.id, lookup, most + 1))
        if number <= most:
            found, most = lookup, number
    return found


def look_up_in_snapshot(
    session: Session, cached: BufferRow, where: ColumnElement[bool] | None, most: int
) -> Sequence[int] | None:
    """As `look_up`, in a snapshot and with a cached row; also uses the index of prompts."""
    if not lookups_in(where, cached.settings.indexed_tags):
        return _of_prompt(session, cached.id, where, most)
    return look_up(session, buffers.state(session, cached.id, cached.name), where, most)


def _of_prompt(
    session: Session, buffer_id: int, where: ColumnElement[bool] | None, most: int
) -> Sequence[int] | None:
    """Return the ids of the groups of the prompt that a filter names.

    None if it names no prompt, or there are more than `most` groups.
    """
    for part in conjuncts(where):
        match part:
            case BinaryExpression(operator=operators.eq, right=BindParameter(value=str(uid))):
                if part.left is group.prompt_uid:
                    rows = session.run(select_ids_of_prompt(buffer_id, uid, most + 1))
                    return [row.id for row in rows] if len(rows) <= most else None
    return None


def narrowed(session: Session, cached: BufferRow, which: Selection) -> ColumnElement[bool]:
    """Return the condition of a selection, by ids if an index shows that there are few groups."""
    if which.ids is None and which.uids is None:
        ids = look_up_in_snapshot(session, cached, which.where, MAX_LOOKUPS)
        return which._replace(ids=ids).condition
    return which.condition


@prepared
def select_ids_of_prompt(buffer_id: Any, prompt_uid: Any, most: Any) -> Select[Any]:
    """Select up to `most` ids of groups of a prompt."""
    mine = (group.buffer_id == buffer_id) & (group.prompt_uid == prompt_uid)
    return select(group.id).where(mine).limit(most)


@prepared
def select_tags(ids: Any) -> Select[Any]:
    """Select the tags of groups by id."""
    return select(group.id, as_stored(group.tags).label("tags")).where(among(group.id, ids))


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
