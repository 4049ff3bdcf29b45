"""The index of tags: kept with the groups, filled and emptied a little at a time, looked up."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from sqlalchemy import BinaryExpression, BindParameter, ColumnElement, Connection
from sqlalchemy.sql import operators

from replaydb import checks
from replaydb.database.prepared import execute
from replaydb.database.repository import buffers
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.schema import group
from replaydb.database.statements.buffer import update_buffer
from replaydb.database.statements.pages import select_ids_of_prompt
from replaydb.database.statements.selections import Selection
from replaydb.database.statements.tag import (
    count_tagged,
    delete_tags,
    insert_tags,
    select_ids_below,
    select_mistagged,
    select_tagged,
)
from replaydb.database.tag_lookups import Lookup, conjuncts, lookups_in

#: Groups that are entered in an index, or taken out, in one transaction.
CHUNK = 1000
#: Groups that are looked up one by one, at most, instead of reading all there are; and instead of
#: reading them in some order until there are enough.
FEW = 20_000
FEW_IN_ORDER = 1000


def enter(buffer: LockedBuffer, ids: Sequence[int]) -> None:
    """Enter new groups in the indexes of their buffer."""
    for name in buffer.settings.indexed_tags:
        execute(buffer.connection, insert_tags(name, ids))


def enter_anew(buffer: LockedBuffer, ids: Sequence[int], names: Collection[str]) -> None:
    """Enter what some tags of groups are now; those that are not to have an index only go."""
    execute(buffer.connection, delete_tags(ids, sorted(names)))
    for name in sorted(set(names) & set(buffer.settings.indexed_tags)):
        execute(buffer.connection, insert_tags(name, ids))


def plan(buffer: LockedBuffer, before: Collection[str]) -> None:
    """Note which indexes are to be filled, or emptied, where the settings had others before."""
    changed = set(before) ^ set(buffer.settings.indexed_tags)
    if changed:
        _save(buffer, {**buffer.row.pending_tags, **dict.fromkeys(changed, checks.INT64[1])})


def go_on(buffer: LockedBuffer) -> None:
    """Fill and empty indexes a little further, from the newest group to the oldest.

    What is put or changed meanwhile is entered by those who do so.
    """
    pending = dict(buffer.row.pending_tags)
    if not pending:
        return
    before = max(pending.values())
    names = [name for name, reached in pending.items() if reached == before]
    rows = execute(buffer.connection, select_ids_below(before, CHUNK))
    mine = [row.id for row in rows if row.buffer_id == buffer.id]
    if mine:
        enter_anew(buffer, mine, names)
    for name in names:
        if len(rows) < CHUNK:
            del pending[name]
        else:
            pending[name] = rows[-1].id
    _save(buffer, pending)


def _save(buffer: LockedBuffer, pending: dict[str, int]) -> None:
    execute(buffer.connection, update_buffer(buffer.id, {"pending_tags": pending or None}))
    buffer.row = replace(buffer.row, pending_tags=pending)


def look_up(
    connection: Connection, row: BufferRow, where: ColumnElement[bool] | None, most: int
) -> Sequence[int] | None:
    """Every group that meets a filter, and maybe others, if an index tells that they are few.

    Args:
        connection: That of a transaction in which the buffer stays as it is.
        row: The buffer, as it is in that transaction.
        where: The filter.
        most: How many groups are few.

    Returns:
        Their ids; None where there are more, or no index of what is asked.
    """
    lookup = _rarest(connection, row, where, most)
    if lookup is None:
        return None
    return [group_id for (group_id,) in execute(connection, select_tagged(row.id, lookup))]


def are_few(
    connection: Connection, row: BufferRow, where: ColumnElement[bool] | None, most: int
) -> bool:
    """Whether `look_up` would find any."""
    return _rarest(connection, row, where, most) is not None


def mistagged(connection: Connection, row: BufferRow, most: int) -> dict[int, str]:
    """Groups that an index does not have as they are, up to so many of each: the tag, by id."""
    return {
        group_id: name
        for name in sorted(row.indexed_tags)
        for (group_id,) in execute(connection, select_mistagged(row.id, name, most))
    }


def _rarest(
    connection: Connection, row: BufferRow, where: ColumnElement[bool] | None, most: int
) -> Lookup | None:
    found = None
    for lookup in lookups_in(where, row.indexed_tags):
        [(number,)] = execute(connection, count_tagged(row.id, lookup, most + 1))
        if number <= most:
            found, most = lookup, number
    return found


def look_up_now(
    connection: Connection, seen: BufferRow, where: ColumnElement[bool] | None, most: int
) -> Sequence[int] | None:
    """The same in a snapshot, of a buffer as this process last saw it, and of prompts."""
    if not lookups_in(where, seen.settings.indexed_tags):
        return _of_prompt(connection, seen.id, where, most)
    return look_up(connection, buffers.state(connection, seen.id, seen.name), where, most)


def _of_prompt(
    connection: Connection, buffer_id: int, where: ColumnElement[bool] | None, most: int
) -> Sequence[int] | None:
    """The groups of the prompt that a filter names, if there are few; None where it names none."""
    for part in conjuncts(where):
        match part:
            case BinaryExpression(operator=operators.eq, right=BindParameter(value=str(uid))):
                if part.left is group.prompt_uid:
                    rows = execute(connection, select_ids_of_prompt(buffer_id, uid, most + 1))
                    return [row.id for row in rows] if len(rows) <= most else None
    return None


def narrowed(connection: Connection, seen: BufferRow, which: Selection) -> ColumnElement[bool]:
    """A selection, by the ids of the groups where an index tells that they are few."""
    if which.ids is None and which.uids is None:
        ids = look_up_now(connection, seen, which.where, FEW)
        return replace(which, ids=ids).condition
    return which.condition
