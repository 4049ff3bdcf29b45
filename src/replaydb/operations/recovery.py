"""Recovery of groups that failed as damaged but whose payloads are intact now."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial

from sqlalchemy import Connection

from replaydb.database.payloads import Payloads
from replaydb.database.records import decoded
from replaydb.database.repository import buffers, damage, groups
from replaydb.database.repository.buffers import BufferRow, RunRow
from replaydb.database.repository.damage import Failed
from replaydb.database.repository.locked import Scope
from replaydb.database.repository.locking import buffer_locked
from replaydb.database.transactions import BULK_SECONDS, Database, allowance, end_in
from replaydb.episodes import GroupStatus
from replaydb.operations.reading import BATCH_BYTES, PAGE


async def intact_groups(
    database: Database, payloads: Payloads
) -> AsyncIterator[tuple[BufferRow, Mapping[int, GroupStatus]]]:
    """Read every group that failed as damaged, in batches of up to `BATCH_BYTES`.

    Yields:
        A buffer, and its intact groups: the status to restore, by group id.
    """

    def every_buffer(connection: Connection) -> list[tuple[BufferRow, dict[int, Failed]]]:
        names = buffers.buffer_names(connection)
        rows = [row for name in names if (row := buffers.find(connection, name)) is not None]
        return [(row, damage.failed(connection, row.id)) for row in rows]

    for buffer, found in await database.read(every_buffer, end=end_in(BULK_SECONDS)):
        for ids in _batches(found):
            end = end_in(allowance(sum(found[one].num_bytes for one in ids)))
            fetch = partial(groups.fetch, database.backend, buffer_id=buffer.id, ids=ids)
            stored = await database.read(fetch, end=end)
            sound = (await decoded(await payloads.read(stored, end))).groups
            if sound:
                yield buffer, {one: found[one].status for one in ids if one in sound}


async def restore(database: Database, row: BufferRow, ids: Sequence[int]) -> None:
    """Restore the former status of intact groups of a buffer."""
    no_run = RunRow(0, None)
    scope = Scope(database.backend, row.id, row.name, no_run, row, lambda _: None)

    def work(connection: Connection) -> None:
        with buffer_locked(connection, scope) as buffer:
            damage.restore(buffer, ids)

    await database.write(work, end=end_in(BULK_SECONDS))
    database.signal.announce()


def _batches(found: Mapping[int, Failed]) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for group_id, one in found.items():
        if batch and (size + one.num_bytes > BATCH_BYTES or len(batch) == PAGE):
            yield batch
            batch, size = [], 0
        batch.append(group_id)
        size += one.num_bytes
    if batch:
        yield batch
