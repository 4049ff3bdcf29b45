"""Repairs of `verify` in transactions of their own: wrong indexes, and groups that failed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from replaydb.database.payloads import Payloads
from replaydb.database.repository import aging, buffers, damage, groups, recount, tags
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.damage import Failed
from replaydb.database.repository.locked import LockedBuffer, scope_of
from replaydb.database.repository.locking import buffer_locked
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import BULK_SECONDS, Database, allowance, end_in
from replaydb.database.tables.records import decoded
from replaydb.domain.episodes import GroupStatus
from replaydb.operations.reading import BATCH_BYTES, PAGE
from replaydb.util.chunks import chunks

T = TypeVar("T")

#: Groups whose staleness is corrected in one transaction.
AT_ONCE = 1000


def every_buffer(session: Session) -> list[BufferRow]:
    """Return all buffers."""
    found = (buffers.find(session, name) for name in buffers.buffer_names(session))
    return [row for row in found if row is not None]


async def intact_groups(
    payloads: Payloads,
) -> AsyncIterator[tuple[BufferRow, Mapping[int, GroupStatus]]]:
    """Read every group that failed as damaged, in batches of up to `BATCH_BYTES`.

    Yields:
        A buffer, and its intact groups: the status to restore, by group id.
    """

    def work(session: Session) -> list[tuple[BufferRow, dict[int, Failed]]]:
        return [(row, damage.failed(session, row.id)) for row in every_buffer(session)]

    database = payloads.database
    for buffer, found in await database.read(work, end=end_in(BULK_SECONDS)):
        for some in chunks(found.items(), lambda one: one[1].num_bytes, BATCH_BYTES, length=PAGE):
            ids = [group_id for group_id, _ in some]
            end = end_in(allowance(sum(one.num_bytes for _, one in some)))
            fetch = partial(groups.fetch, buffer_id=buffer.id, ids=ids)
            stored = await database.read(fetch, end=end)
            sound = (await decoded(await payloads.read(stored, end))).groups
            if sound:
                yield buffer, {one: found[one].status for one in ids if one in sound}


async def restore(database: Database, row: BufferRow, ids: Sequence[int]) -> None:
    """Restore the former status of intact groups of a buffer."""
    await _change(database, row, lambda buffer: damage.restore(buffer, ids))
    database.signal.announce()


async def rebuild_tags(database: Database, row: BufferRow, name: str) -> None:
    """Rebuild the index of a tag of a buffer. Filters do not use it until it is complete."""

    def step(buffer: LockedBuffer) -> bool:
        tags.continue_indexing(buffer)
        return bool(buffer.row.pending_tags)

    await _change(database, row, lambda buffer: tags.rebuild(buffer, [name]))
    await _repeat(database, row, step)


async def rebuild_staleness(database: Database, row: BufferRow, task_name: str) -> None:
    """Update the staleness of all groups of a task of a buffer, and expire groups."""

    def step(buffer: LockedBuffer) -> bool:
        aging.step(buffer, AT_ONCE)
        return any(task.is_behind for task in buffer.task_states.values())

    await _change(database, row, lambda buffer: aging.repair(buffer, task_name))
    await _repeat(database, row, step)
    database.signal.announce()


async def rebuild_columns(database: Database, row: BufferRow, ids: Sequence[int]) -> None:
    """Recompute the columns of groups that follow from their episodes or their priority."""
    names = await _change(database, row, lambda buffer: recount.repair_columns(buffer, ids))
    for name in sorted(names):
        await rebuild_staleness(database, row, name)


async def _repeat(database: Database, row: BufferRow, step: Callable[[LockedBuffer], bool]) -> None:
    left = True
    while left:
        left = await _change(database, row, step)
        await database.let_others_in()


async def _change(database: Database, row: BufferRow, change: Callable[[LockedBuffer], T]) -> T:
    """Run `change` in a transaction, with the buffer and its tasks locked."""

    def work(session: Session) -> T:
        with buffer_locked(session, scope_of(database.backend, row)) as buffer:
            return change(buffer)

    return await database.write(work, end=end_in(BULK_SECONDS))
