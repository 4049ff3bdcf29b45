"""Statements on runs and buffers."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Select, literal_column, select, true

from replaydb.database.runtime.prepared import prepared
from replaydb.database.tables.expressions import in_turn, server_time
from replaydb.database.tables.schema import buffer, compatibility, payload_place, run

#: Buffers, with what the store requires of clients, and the place of payloads outside the database,
#: if there is one.
BUFFERS = buffer.outerjoin(payload_place, true()).outerjoin(compatibility, true())
#: Columns that a row of a buffer needs besides its own.
OF_STORE = (
    payload_place.c.id.is_not(None).label("uses_payload_store"),
    compatibility.c.min_client,
    compatibility.c.write_format,
)
#: Kind of the advisory locks of buffers.
_BUFFER: ColumnElement[int] = literal_column("1919250541")  # "repm"
BUFFER_ROWS = select(buffer, *OF_STORE).select_from(BUFFERS)


def select_run(name: str) -> Select[Any]:
    """Select the row of a run."""
    return select(run).where(run.c.name == name)


def turn_of_buffer(buffer_id: Any) -> ColumnElement[bool]:
    """Return a condition that is true when the turn of this transaction for the buffer has come.

    Every lock of a buffer waits for its turn before it waits for the row. Otherwise a transaction
    that has the row could wait for its turn, and the one whose turn it is for the row.
    """
    return select(in_turn(_BUFFER, buffer_id)).scalar_subquery()


@prepared
def select_buffer(buffer_id: Any) -> Select[Any]:
    """Select the row of a buffer by id, and the time."""
    timed = BUFFER_ROWS.add_columns(server_time().label("read_at"))
    return timed.where(buffer.c.id == buffer_id)
