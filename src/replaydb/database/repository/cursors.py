"""Cursors: JSON values by name, written with a put or an ack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Update, select, update

from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.runtime.prepared import Write, prepared
from replaydb.database.runtime.session import Session
from replaydb.database.statements.insertion import insert_into
from replaydb.database.tables.schema import cursor


def read(session: Session, buffer_id: int, name: str) -> Any:
    """Return the value of a cursor; None if it does not exist."""
    mine = (cursor.c.buffer_id == buffer_id) & (cursor.c.name == name)
    rows = session.run(select(cursor.c.value).where(mine))
    return rows[0].value if rows else None


def save(buffer: LockedBuffer, cursors: Mapping[str, Any]) -> None:
    """Write cursors. If two transactions create the same cursor, one of them is retried."""
    for name, value in sorted(cursors.items()):  # in a fixed order, to avoid deadlocks
        changed = buffer.session.send(update_cursor(buffer.id, name, value, buffer.now))
        if changed == 0:
            row = {"buffer_id": buffer.id, "name": name, "value": value, "updated_at": buffer.now}
            buffer.session.postpone(Write(insert_into(cursor), [row]))


@prepared
def update_cursor(of_buffer: Any, of_name: Any, new_value: Any, now: Any) -> Update:
    """Update a cursor."""
    mine = (cursor.c.buffer_id == of_buffer) & (cursor.c.name == of_name)
    return update(cursor).where(mine).values({cursor.c.value: new_value, cursor.c.updated_at: now})
