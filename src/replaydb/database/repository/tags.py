"""The tag index: updates with the groups, incremental fill and removal, lookups."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from sqlalchemy import BinaryExpression, BindParameter, ColumnElement, Connection
from sqlalchemy.sql import operators

from replaydb.database.filters.tag_lookups import Lookup, conjuncts, lookups_in
from replaydb.database.repository import buffers
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.runtime.prepared import execute
from replaydb.database.statements.pages import select_ids_of_prompt
from replaydb.database.statements.selections import Selection
from replaydb.database.statements.tag import (
    count_mistagged,
    count_tagged,
    delete_tags,
    insert_tags,
    select_ids_below,
    select_tagged,
)
from replaydb.database.tables.schema import group
from replaydb.domain import checks

#: Groups that are added to an index, or removed, in one transaction.
CHUNK = 1000
#: Maximum number of groups that are looked up by id instead of scanning all groups.
MAX_LOOKUPS = 20_000
#: The same, instead of reading groups in some order until there are enough.
MAX_LOOKUPS_IN_ORDER = 1000


def enter(buffer: LockedBuffer, ids: Sequence[int]) -> None:
    """Add new groups to the tag indexes of their buffer."""
    for name in buffer.settings.indexed_tags:
        execute(buffer.connection, insert_tags(name, ids))


def reindex(buffer: LockedBuffer, ids: Sequence[int], names: Collection[str]) -> None:
    """Replace the index entries of some tags of groups. Tags without an index are only removed."""
    execute(buffer.connection, delete_tags(ids, sorted(names)))
    for name in sorted(set(names) & set(buffer.settings.indexed_tags)):
        execute(buffer.connection, insert_tags(name, ids))


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
    rows = execute(buffer.connection, select_ids_below(before, CHUNK))
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
    buffers.save(buffer.connection, buffer.id, {"pending_tags": pending or None})
    buffer.row = replace(buffer.row, pending_tags=pending)


def look_up(
    connection: Connection, row: BufferRow, where: ColumnElement[bool] | None, most: int
) -> Sequence[int] | None:
    """Return a superset of the groups that meet a filter, if a tag index shows that it is small.

    Args:
        connection: Connection of a transaction in which the buffer's row does not change.
        row: Row of the buffer in that transaction.
        where: The filter.
        most: Maximum number of groups.

    Returns:
        Their ids; None if there are more, or no index applies to the filter.
    """
    lookup = _rarest(connection, row, where, most)
    if lookup is None:
        return None
    return [group_id for (group_id,) in execute(connection, select_tagged(row.id, lookup))]


def is_selective(
    connection: Connection, row: BufferRow, where: ColumnElement[bool] | None, most: int
) -> bool:
    """Return whether `look_up` would return ids."""
    return _rarest(connection, row, where, most) is not None


def mistagged(connection: Connection, row: BufferRow) -> dict[str, int]:
    """Return the number of groups with a wrong index entry, by the names of wrong indexes."""
    found = {}
    for name in sorted(row.indexed_tags):
        [(number,)] = execute(connection, count_mistagged(row.id, name))
        if number:
            found[name] = number
    return found


def _rarest(
    connection: Connection, row: BufferRow, where: ColumnElement[bool] | None, most: int
) -> Lookup | None:
    found = None
    for lookup in lookups_in(where, row.indexed_tags):
        [(number,)] = execute(connection, count_tagged(row.id, lookup, most + 1))
        if number <= most:
            found, most = lookup, number
    return found


def look_up_in_snapshot(
    connection: Connection, cached: BufferRow, where: ColumnElement[bool] | None, most: int
) -> Sequence[int] | None:
    """As `look_up`, in a snapshot and with a cached row; also uses the index of prompts."""
    if not lookups_in(where, cached.settings.indexed_tags):
        return _of_prompt(connection, cached.id, where, most)
    return look_up(connection, buffers.state(connection, cached.id, cached.name), where, most)


def _of_prompt(
    connection: Connection, buffer_id: int, where: ColumnElement[bool] | None, most: int
) -> Sequence[int] | None:
    """Return the ids of the groups of the prompt that a filter names.

    None if it names no prompt, or there are more than `most` groups.
    """
    for part in conjuncts(where):
        match part:
            case BinaryExpression(operator=operators.eq, right=BindParameter(value=str(uid))):
                if part.left is group.prompt_uid:
                    rows = execute(connection, select_ids_of_prompt(buffer_id, uid, most + 1))
                    return [row.id for row in rows] if len(rows) <= most else None
    return None


def narrowed(connection: Connection, cached: BufferRow, which: Selection) -> ColumnElement[bool]:
    """Return the condition of a selection, by ids if an index shows that there are few groups."""
    if which.ids is None and which.uids is None:
        ids = look_up_in_snapshot(connection, cached, which.where, MAX_LOOKUPS)
        return replace(which, ids=ids).condition
    return which.condition
