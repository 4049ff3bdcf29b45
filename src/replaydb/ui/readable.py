"""Group listing that skips groups with damaged columns."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement

from replaydb.buffer import Buffer
from replaydb.database.filters import compiling
from replaydb.database.filters.group_columns import col
from replaydb.domain.results import GroupInfo
from replaydb.errors import CorruptPayloadError


async def find(
    buffer: Buffer,
    unreadable: set[int],
    *,
    where: ColumnElement[bool] | None = None,
    **arguments: Any,
) -> list[GroupInfo]:
    """Find groups as `Buffer.find` does, but skip groups with damaged columns.

    Args:
        buffer: The buffer.
        unreadable: Ids of damaged groups. Damaged groups that this call encounters are added.
        where: Only groups that meet this filter.
        arguments: Further arguments of `Buffer.find`.
    """
    while True:
        rest = col.id.not_in(unreadable) if unreadable else None
        try:
            return await buffer.find(where=compiling.all_of([where, rest]), **arguments)
        except CorruptPayloadError as error:
            if unreadable.issuperset(error.group_ids):
                raise
            unreadable.update(error.group_ids)
