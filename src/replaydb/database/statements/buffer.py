"""Statements on runs, buffers and their cursors."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Insert,
    Select,
    Update,
    bindparam,
    func,
    insert,
    literal_column,
    select,
    true,
    update,
)

from replaydb.database.runtime.prepared import prepared
from replaydb.database.tables.expressions import bytewise, in_turn, server_time
from replaydb.database.tables.schema import (
    buffer,
    cursor,
    episode_group,
    payload_place,
    policy_change,
    run,
)

#: Buffers, with the place of payloads outside the database, if there is one.
BUFFERS = buffer.outerjoin(payload_place, true())
#: Whether new payloads are stored outside the database.
USES_PAYLOAD_STORE = payload_place.c.id.is_not(None).label("uses_payload_store")
#: Kind of the advisory locks of buffers.
_BUFFER: ColumnElement[int] = literal_column("1919250541")  # "repm"
_select_buffer = select(buffer, USES_PAYLOAD_STORE).select_from(BUFFERS)


def select_run(name: str) -> Select[Any]:
    """Select the row of a run."""
    return select(run).where(run.c.name == name)


def select_runs() -> Select[Any]:
    """Select all runs, oldest first."""
    return select(run).order_by(run.c.id)


@cache
def insert_run() -> Insert:
    """Insert a run, given as a dict of its columns. Returns its id."""
    return insert(run).returning(run.c.id)


def turn_of_buffer(buffer_id: Any) -> ColumnElement[bool]:
    """Return a condition that is true when the turn of this transaction for the buffer has come.

    Every lock of a buffer waits for its turn before it waits for the row. Otherwise a transaction
    that has the row could wait for its turn, and the one whose turn it is for the row.
    """
    return select(in_turn(_BUFFER, buffer_id)).scalar_subquery()


def select_buffer_named(name: str) -> Select[Any]:
    """Select the row of a buffer by name."""
    return _select_buffer.where(buffer.c.name == name)


@prepared
def select_buffer(buffer_id: Any) -> Select[Any]:
    """Select the row of a buffer by id, and the time."""
    timed = _select_buffer.add_columns(server_time().label("read_at"))
    return timed.where(buffer.c.id == buffer_id)


@prepared
def lock_buffer(buffer_id: Any) -> Select[Any]:
    """Select the row of a buffer by id, locked against changes."""
    mine = _select_buffer.where(buffer.c.id == buffer_id, turn_of_buffer(buffer_id))
    return mine.with_for_update(key_share=True, of=buffer)


def select_buffer_names() -> Select[Any]:
    """Select the names of all buffers."""
    return select(buffer.c.name).order_by(bytewise(buffer.c.name))


def select_buffers() -> Select[Any]:
    """Select all buffers, sorted by name, with their number of groups of any status."""
    groups = (
        select(func.count())
        .select_from(episode_group)
        .where(episode_group.c.buffer_id == buffer.c.id)
        .scalar_subquery()
    )
    return select(buffer, groups.label("num_groups")).order_by(bytewise(buffer.c.name))


@cache
def insert_buffer() -> Insert:
    """Insert a buffer, given as a dict of its columns."""
    return insert(buffer)


@cache
def update_buffers() -> Update:
    """Change buffers, given as dicts of `of_buffer` and the columns to change."""
    return update(buffer).where(buffer.c.id == bindparam("of_buffer"))


@cache
def insert_policy_change() -> Insert:
    """Insert a change of the policy version of a buffer, given as a dict of its columns."""
    return insert(policy_change)


def select_cursor(buffer_id: int, name: str) -> Select[Any]:
    """Select the value of a cursor."""
    return select(cursor.c.value).where(cursor.c.buffer_id == buffer_id, cursor.c.name == name)


@prepared
def update_cursor(of_buffer: Any, of_name: Any, new_value: Any, now: Any) -> Update:
    """Update a cursor."""
    mine = (cursor.c.buffer_id == of_buffer) & (cursor.c.name == of_name)
    return update(cursor).where(mine).values({cursor.c.value: new_value, cursor.c.updated_at: now})


@cache
def insert_cursor() -> Insert:
    """Insert a cursor, given as a dict of its columns."""
    return insert(cursor)
