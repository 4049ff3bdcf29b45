"""Flipped bytes come back as a typed error that names the group, never as other tokens.

Bits of stored payloads are flipped through the bare driver; on SQLite also bytes anywhere in a
copy of the file.
"""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import asyncpg
import numpy as np
import pytest

import replaydb as rdb
from processes.derived import check_group, derived_group
from replaydb import Store
from torture.arena import Arena
from torture.crew import BUFFER

PROMISES = (8, 9)
ENGINES = ("sqlite", "postgresql")
GROUPS, FLIPS = 24, 5


async def attack(arena: Arena) -> None:
    """Payloads, and files."""
    async with Store.open(arena.url, run="torture") as store:
        buffer = await store.buffer(BUFFER, compression=arena.chance.choice([None, "zstd"]))
        ids = await buffer.put([derived_group(f"{i}:0:1") for i in range(GROUPS)])
    if arena.engine == "sqlite":
        for _ in range(3):
            await _flip_file(arena, ids)
    damaged = set(arena.chance.sample(ids, FLIPS))
    for one in damaged:
        await _flip_payload(arena, one)
    async with Store.open(arena.url, run="torture") as store:
        buffer = await store.buffer(BUFFER)
        with pytest.raises(rdb.CorruptPayloadError) as caught:
            await buffer.sample(GROUPS)
        assert set(caught.value.group_ids) == damaged
        assert caught.value.batch is not None
        for group in caught.value.batch.groups:
            check_group(group)
        batch = await buffer.sample(GROUPS - FLIPS)
        assert not damaged & set(batch.ids)
        for group in batch.groups:
            check_group(group)
    arena.figures["payloads flipped"] += FLIPS


async def _flip_payload(arena: Arena, group_id: int) -> None:
    def flipped(data: bytes) -> bytes:
        at = arena.chance.randrange(8 * len(data))
        changed = bytearray(data)
        changed[at // 8] ^= 1 << at % 8
        return bytes(changed)

    if arena.engine == "sqlite":
        with closing(sqlite3.connect(arena.url.removeprefix("sqlite:///"))) as file, file:
            row = file.execute("SELECT data FROM payload WHERE group_id = ?", (group_id,))
            change = flipped(row.fetchone()[0])
            file.execute("UPDATE payload SET data = ? WHERE group_id = ?", (change, group_id))
        return
    connection = await asyncpg.connect(arena.url)
    data = await connection.fetchval("SELECT data FROM payload WHERE group_id = $1", group_id)
    update = "UPDATE payload SET data = $1 WHERE group_id = $2"
    await connection.execute(update, flipped(data), group_id)
    await connection.close()


def _flipped_copy(arena: Arena) -> Path:
    original = Path(arena.url.removeprefix("sqlite:///"))
    with closing(sqlite3.connect(original)) as file:
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(original.read_bytes())
    for _ in range(arena.chance.choice([1, 20, 400])):
        content[arena.chance.randrange(100, len(content))] ^= 1 << arena.chance.randrange(8)
        arena.figures["bytes flipped"] += 1
    copy = arena.folder / f"flipped-{arena.chance.getrandbits(32)}.db"
    copy.write_bytes(content)
    return copy


async def _flip_file(arena: Arena, ids: list[int]) -> None:
    """Whatever it hits, what comes back is what was put, or a typed error."""
    copy = await asyncio.to_thread(_flipped_copy, arena)
    try:
        async with asyncio.timeout(60), Store.open(f"sqlite:///{copy}", run="torture") as store:
            buffer = await store.buffer(BUFFER)
            for one in ids:
                await _read(arena, buffer, one)
            await buffer.sample(4, at_least=1)
    except rdb.ReplayDBError:
        arena.figures["files refused"] += 1


async def _read(arena: Arena, buffer: rdb.Buffer, one: int) -> None:
    try:
        (found,) = await buffer.get([one])
    except rdb.ReplayDBError:
        arena.figures["groups refused"] += 1
        return
    expected = derived_group(f"{ids_position(one)}:0:1")
    for mine, theirs in zip(found.episodes, expected.episodes, strict=True):
        np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)
        assert mine.logprobs is not None
        np.testing.assert_array_equal(mine.logprobs, theirs.logprobs)
    arena.figures["groups sound"] += 1


def ids_position(group_id: int) -> int:
    """Which of the groups it is: ids begin at 1."""
    return group_id - 1
