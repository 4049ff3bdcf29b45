"""Corrupted bytes raise a typed error that names the group, and never return wrong tokens.

Bits of stored payloads are flipped by the bare driver. On SQLite, bits anywhere in a copy of the
file are flipped, too.
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
from torture.context import AttackContext
from torture.workers import BUFFER

PROMISES = (8, 9)
ENGINES = ("sqlite", "postgresql")
GROUPS, FLIPS = 24, 5


async def attack(context: AttackContext) -> None:
    """Flip bits of payloads and of files."""
    async with Store.open(context.url, run="torture") as store:
        buffer = await store.buffer(BUFFER, compression=context.chance.choice([None, "zstd"]))
        ids = await buffer.put([derived_group(f"{i}:0:1") for i in range(GROUPS)])
    if context.engine == "sqlite":
        for _ in range(3):
            await _flip_file(context, ids)
    damaged = set(context.chance.sample(ids, FLIPS))
    for one in damaged:
        await _flip_payload(context, one)
    async with Store.open(context.url, run="torture") as store:
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
    context.figures["payloads flipped"] += FLIPS


async def _flip_payload(context: AttackContext, group_id: int) -> None:
    def flipped(data: bytes) -> bytes:
        at = context.chance.randrange(8 * len(data))
        changed = bytearray(data)
        changed[at // 8] ^= 1 << at % 8
        return bytes(changed)

    if context.engine == "sqlite":
        with closing(sqlite3.connect(context.url.removeprefix("sqlite:///"))) as file, file:
            row = file.execute("SELECT data FROM payload WHERE group_id = ?", (group_id,))
            change = flipped(row.fetchone()[0])
            file.execute("UPDATE payload SET data = ? WHERE group_id = ?", (change, group_id))
        return
    connection = await asyncpg.connect(context.url)
    data = await connection.fetchval("SELECT data FROM payload WHERE group_id = $1", group_id)
    update = "UPDATE payload SET data = $1 WHERE group_id = $2"
    await connection.execute(update, flipped(data), group_id)
    await connection.close()


def _flipped_copy(context: AttackContext) -> Path:
    original = Path(context.url.removeprefix("sqlite:///"))
    with closing(sqlite3.connect(original)) as file:
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(original.read_bytes())
    for _ in range(context.chance.choice([1, 20, 400])):
        content[context.chance.randrange(100, len(content))] ^= 1 << context.chance.randrange(8)
        context.figures["bytes flipped"] += 1
    copy = context.folder / f"flipped-{context.chance.getrandbits(32)}.db"
    copy.write_bytes(content)
    return copy


async def _flip_file(context: AttackContext, ids: list[int]) -> None:
    """Flip bits of a file; every call must return the original content or raise a typed error."""
    copy = await asyncio.to_thread(_flipped_copy, context)
    try:
        async with asyncio.timeout(60), Store.open(f"sqlite:///{copy}", run="torture") as store:
            buffer = await store.buffer(BUFFER)
            for one in ids:
                await _read(context, buffer, one)
            await buffer.sample(4, at_least=1)
    except rdb.ReplayDBError:
        context.figures["files refused"] += 1


async def _read(context: AttackContext, buffer: rdb.Buffer, one: int) -> None:
    try:
        (found,) = await buffer.get([one])
    except rdb.ReplayDBError:
        context.figures["groups refused"] += 1
        return
    expected = derived_group(f"{ids_position(one)}:0:1")
    for mine, theirs in zip(found.episodes, expected.episodes, strict=True):
        np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)
        assert mine.logprobs is not None
        np.testing.assert_array_equal(mine.logprobs, theirs.logprobs)
    context.figures["groups sound"] += 1


def ids_position(group_id: int) -> int:
    """Return the position of a group: ids start at 1."""
    return group_id - 1
