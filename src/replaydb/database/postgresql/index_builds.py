"""Creation of missing indexes on PostgreSQL while other processes read and write."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Index, MetaData, Row, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateIndex, DropIndex
from sqlalchemy.util import greenlet_spawn

from replaydb.database.postgresql.connecting import Connection

#: How often the server is asked about its progress, in seconds.
POLL_SECONDS = 0.5
#: Maximum attempts to create an index. Two processes that create indexes may deadlock.
ATTEMPTS = 8
_DEADLOCK = "40P01"

#: An index that exists is invalid while it is created, and after its creation was interrupted.
_STATE = text("""
    SELECT indisvalid AND indisready AS is_valid, phase IS NOT NULL AS is_in_progress,
        CASE WHEN blocks_total > 0 THEN blocks_done ELSE tuples_done END AS done,
        CASE WHEN blocks_total > 0 THEN blocks_total ELSE tuples_total END AS total
    FROM pg_index LEFT JOIN pg_stat_progress_create_index ON index_relid = indexrelid
    WHERE indexrelid = to_regclass(:name)
""")


async def create_missing(
    connection: Connection,
    observer: Connection,
    indexes: Sequence[Index],
    notify: Callable[[int, int | None], object],
) -> None:
    """Create the indexes that do not exist or are invalid, one after the other.

    Args:
        connection: A connection in autocommit.
        observer: Another one, which reads the progress.
        indexes: Indexes of tables that exist.
        notify: Called with the number of blocks or rows processed in the current phase, and their
            total.
    """
    for index in map(_concurrent, indexes):
        await _create(connection, observer, index, notify)


async def _create(
    connection: Connection,
    observer: Connection,
    index: Index,
    notify: Callable[[int, int | None], object],
) -> None:
    attempts = 0
    while (state := await _state(observer, index)) is None or not state.is_valid:
        if state is not None and state.is_in_progress:  # by another process
            notify(state.done, state.total)
            await asyncio.sleep(POLL_SECONDS)
            continue
        attempts += 1
        try:
            if state is not None:
                await greenlet_spawn(connection.core.execute, DropIndex(index, if_exists=True))
            create = CreateIndex(index, if_not_exists=True)
            creation = asyncio.create_task(greenlet_spawn(connection.core.execute, create))
            await _watch(creation, observer, index, notify)
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) != _DEADLOCK or attempts == ATTEMPTS:
                raise
            await asyncio.sleep(POLL_SECONDS)


async def _watch(
    creation: asyncio.Task[Any],
    observer: Connection,
    index: Index,
    notify: Callable[[int, int | None], object],
) -> None:
    """Wait for the creation of an index, and report its progress."""
    try:
        while not creation.done():
            await asyncio.wait([creation], timeout=POLL_SECONDS)
            state = await _state(observer, index)
            if state is not None and state.is_in_progress:
                notify(state.done, state.total)
        await creation
    finally:
        creation.cancel()
        await asyncio.wait([creation])


async def _state(connection: Connection, index: Index) -> Row[Any] | None:
    found = await greenlet_spawn(connection.core.execute, _STATE, {"name": index.name})
    return found.one_or_none()


def _concurrent(index: Index) -> Index:
    """Return a copy that is created and dropped without locks that block writes."""
    assert index.table is not None  # noqa: S101 - it is from the schema
    table = index.table.to_metadata(MetaData())
    [copy] = [one for one in table.indexes if one.name == index.name]
    copy.dialect_options["postgresql"]["concurrently"] = True
    return copy
