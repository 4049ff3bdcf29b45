"""Revision 0004: the migration of checksums of existing payloads."""

from __future__ import annotations

import zlib

import pytest
from sqlalchemy import select

import replaydb as rdb
from replaydb.database import migrations
from replaydb.database.tables.schema import payload
from support.connections import transaction
from support.damage import damage
from support.groups import groups


async def checksums(url: str) -> dict[int, tuple[int, int]]:
    """Return the CRC-32 and the stored checksum of each payload."""
    async with transaction(url) as connection:
        columns = (
            payload.c.group_id,
            payload.c.data,
            payload.c.checksum,
        )  # of all revisions
        rows = await connection.execute(select(*columns).order_by(payload.c.group_id))
        return {row.group_id: (zlib.crc32(row.data), row.checksum) for row in rows}


async def test_intact_and_damaged_payloads_stay_so(url: str) -> None:
    await migrations.write_format(url, 1)
    async with rdb.Store.open(url) as store:
        ids = await (await store.buffer("math")).put(groups(150))  # several pages
    before = await checksums(url)
    await damage(url, ids[0])
    await migrations.downgrade(url, "0003")
    (damaged, stored), *intact = (await checksums(url)).values()
    assert damaged != stored
    assert [crc for crc, _ in intact] == [stored for _, stored in intact]
    await migrations.upgrade(url)
    assert {one: stored for one, (_, stored) in (await checksums(url)).items()} == {
        one: stored for one, (_, stored) in before.items()
    }
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("math")
        with pytest.raises(rdb.CorruptPayloadError) as caught:
            await buffer.get(ids)
    assert caught.value.group_ids == (ids[0],)
    assert len(caught.value.batch or ()) == 149
