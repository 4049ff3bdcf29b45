"""Groups as far as their columns can be read: one that is damaged does not hide the others."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement

from replaydb.buffer import Buffer
from replaydb.database import filters
from replaydb.database.group_columns import col
from replaydb.errors import CorruptPayloadError
from replaydb.results import GroupInfo


async def find(
    buffer: Buffer,
    unreadable: set[int],
    *,
    where: ColumnElement[bool] | None = None,
    **asked: Any,
) -> list[GroupInfo]:
    """As `Buffer.find`, without groups whose columns are damaged.

    Args:
        buffer: Whose groups.
        unreadable: Ids of damaged ones; those that would be among them are added.
        where: Only groups that meet this.
        asked: What else `Buffer.find` takes.
    """
    while True:
        rest = col.id.not_in(unreadable) if unreadable else None
        try:
            return await buffer.find(where=filters.all_of([where, rest]), **asked)
        except CorruptPayloadError as error:
            if unreadable.issuperset(error.group_ids):
                raise
            unreadable.update(error.group_ids)
