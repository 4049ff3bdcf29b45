"""Payloads rewritten as those of new groups: of older formats, or of episodes added one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from replaydb.database.payloads import Payloads
from replaydb.database.repository import groups, rewriting
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.locked import scope_of
from replaydb.database.repository.locking import tasks_locked
from replaydb.database.repository.packs import PackGoneError, record_unused
from replaydb.database.runtime.session import Session
from replaydb.database.tables.records import PayloadRecord, from_rows, payload_records


async def rewrite(
    payloads: Payloads, row: BufferRow, some: Sequence[Any], end: float
) -> dict[int, int]:
    """Rewrite the payloads of some groups of a buffer.

    They are read and encoded without a lock, and replaced if they are the same by then.

    Args:
        payloads: The payloads of the store.
        row: The buffer.
        some: A row for each group, with `id` and `task_name`.
        end: When to give up.

    Returns:
        Sizes of the new payloads in bytes, by id of the group. Groups are omitted if another
        process changed them meanwhile, or their payload is damaged, and all if it took too long.
    """
    database = payloads.database
    ids = [one.id for one in some]
    stored = await database.read(partial(groups.fetch, buffer_id=row.id, ids=ids), end=end)
    whole = await payloads.read(stored, end)
    compression, version = row.settings.compression, row.write_format

    def encode() -> dict[int, list[PayloadRecord]]:
        found: dict[int, list[PayloadRecord]] = {}
        for group_id, group in from_rows(*whole).groups.items():
            episodes = dict(zip(group.positions, group.episodes, strict=True))
            found[group_id] = payload_records(episodes, group.context, compression, version)
        return found

    several = await asyncio.to_thread(encode)
    before: dict[int, set[tuple[int, int]]] = {group_id: set() for group_id in several}
    for part in stored.payloads:
        if part["group_id"] in before:
            before[part["group_id"]].add((part["part"], part["checksum"]))
    every = [part for parts in several.values() for part in parts]
    if row.uses_payload_store:
        await payloads.put(every, end)

    def work(session: Session) -> set[int]:
        names = {one.task_name for one in some}
        with tasks_locked(session, scope_of(database.backend, row), names, sweeps=False) as buffer:
            known = {one: frozenset(parts) for one, parts in before.items()}
            return rewriting.rewrite(buffer, several, known)

    done: set[int] = set()
    with suppress(PackGoneError):  # written too long ago: the groups are left for another call
        done = await database.write(work, end=end)
    if not done and row.uses_payload_store:
        with suppress(PackGoneError):
            await database.write(partial(record_unused, payloads=every), end=end)
    return {one: sum(len(part.data) for part in several[one]) for one in sorted(done)}
