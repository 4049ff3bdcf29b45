"""Drawn groups are delivered, even if they are changed or deleted before they are read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import Connection

from replaydb import Buffer, Store
from replaydb.database.engines.protocol import Backend
from replaydb.database.records import Facts, Stored
from replaydb.database.repository.groups import stored
from support.groups import group, groups
from support.in_transaction import await_in_transaction

#: Settings with which the payloads of drawn groups are gone before they are read, and the groups
#: to delete meanwhile. The delete waits for the commit of the draw.
LOSSES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "deleted by another call": ({}, [1, 2, 3]),
    "dropped by the draw": ({"max_times_sampled": 1, "archived_payload": "drop"}, [99]),
}


@pytest.mark.usefixtures("from_snapshots")
@pytest.mark.parametrize("loss", LOSSES)
async def test_groups_deleted_before_they_are_read_are_delivered(
    store: Store, url: str, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the snapshot that a draw takes while it has the locks."""
    settings, deleted = LOSSES[loss]
    buffer = await store.buffer("math", **settings)
    await buffer.put(groups(3))
    loop = asyncio.get_running_loop()

    async with Store.open(url) as other:
        there: Buffer = await other.buffer("math")

        def read_late(backend: Backend, connection: Connection, rows: Sequence[Facts]) -> Stored:
            await_in_transaction(there.delete(deleted), loop)
            return stored(backend, connection, rows)

        monkeypatch.setattr("replaydb.database.repository.groups.stored", read_late)
        batch = await buffer.sample(3)
    assert sorted(one.group_uid for one in batch.groups) == ["gsm8k-0", "gsm8k-1", "gsm8k-2"]
    assert all(one.episodes[0].response_ids.tolist() == [3, 4, 5] for one in batch.groups)
    assert await buffer.count(statuses="completed") == 0


async def test_draws_without_pause_do_not_starve_puts(store: Store) -> None:
    buffer = await store.buffer("math")
    await buffer.put(groups(4))
    await asyncio.gather(buffer.sample(1), buffer.put(group("connects")))
    drawn = 0

    async def draw_for_ever() -> None:
        nonlocal drawn
        while True:
            await buffer.sample(1)
            drawn += 1

    drawing = asyncio.create_task(draw_for_ever())
    for i in range(10):
        await buffer.put(group(f"new-{i}"))
    drawing.cancel()
    assert drawn < 100
