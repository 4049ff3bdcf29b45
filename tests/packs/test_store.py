"""Reads, writes and removals of packs, in a folder and in a bucket."""

from __future__ import annotations

import asyncio
import os
from random import Random
from uuid import uuid4

import pytest

from replaydb import PayloadsUnavailableError
from replaydb.packs import Listed, PackDamage, PayloadStore, Range

from .conftest import STORE, Behind, opened, soon

SIZES = [0, 1, 63, 64, 65, 1000, 300_000, 0, 70_000]


def name() -> str:
    return uuid4().hex


async def listing(payload_store: PayloadStore) -> dict[str, Listed]:
    return {each.name: each async for each in payload_store.listed(end=soon())}


async def read(payload_store: PayloadStore, *ranges: Range) -> list[bytes | str]:
    """Return the bytes of each range, or the reason of its damage."""
    return [
        each.reason if isinstance(each, PackDamage) else bytes(each)
        for each in await payload_store.read(ranges, end=soon())
    ]


@pytest.mark.parametrize("sync", [False, True])
async def test_parts_are_returned_in_the_requested_order(
    payload_store: PayloadStore, sync: bool
) -> None:
    random, wanted, expected = Random(1), [], []
    for pack in (name(), name()):
        parts = [random.randbytes(size) for size in SIZES]
        given: list[bytes | memoryview] = [*parts]
        given[3] = memoryview(parts[3])
        offsets = await payload_store.write(pack, given, sync=sync, end=soon())
        assert all(offset % 64 == 0 for offset in offsets)
        for offset, part in zip(offsets, parts, strict=True):
            wanted += [Range(pack, offset, len(part)), Range(pack, offset, len(part) // 2)]
            expected += [part, part[: len(part) // 2]]
    order = random.sample(range(len(wanted)), len(wanted))
    found = await read(payload_store, *(wanted[nth] for nth in order))
    assert found == [expected[nth] for nth in order]
    assert await payload_store.read([], end=soon()) == []


async def test_large_packs_and_concurrent_writes(payload_store: PayloadStore) -> None:
    contents = {name(): os.urandom(9_000_000 if nth == 0 else 400_000) for nth in range(24)}
    await asyncio.gather(
        *(
            payload_store.write(pack, [data], sync=False, end=soon())
            for pack, data in contents.items()
        )
    )
    found = await read(
        payload_store, *(Range(pack, 0, len(data)) for pack, data in contents.items())
    )
    assert found == list(contents.values())


@pytest.mark.parametrize("least", [1, 4_000_000], ids=["several threads", "one thread"])
async def test_damage_affects_only_its_range(
    payload_store: PayloadStore, behind: Behind, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replaydb.packs.folder._LEAST_BYTES", least)
    sound, cut, gone = name(), name(), name()
    for pack in (sound, cut):
        await payload_store.write(pack, [b"a" * 100, b"b" * 400_000, b"c"], sync=False, end=soon())
    behind.put(f"{cut}.pack", behind.get(f"{cut}.pack")[:150])
    whole = (Range(sound, 0, 100), Range(cut, 0, 100))
    assert await read(
        payload_store,
        *(Range(gone, 0, 1), Range(cut, 128, 400_000), whole[0]),
        *(Range(cut, 400_128, 1), whole[1], Range(cut, 140, 10)),
    ) == [
        f"pack {gone} is missing",
        f"pack {cut} ends at byte 150, before byte 400128",
        b"a" * 100,
        f"pack {cut} ends at byte 150, before byte 400129",
        b"a" * 100,
        b"b" * 10,
    ]
    alone = await read(payload_store, Range(cut, 400_128, 1))
    assert alone == [f"pack {cut} ends at byte 150, before byte 400129"]


async def test_impossible_ranges_are_damage(payload_store: PayloadStore) -> None:
    pack = "0" * 32
    await payload_store.write(pack, [b"abc"], sync=False, end=soon())
    impossible = [
        *(Range("../" * 3 + "etc/passwd", 0, 10), Range("", 0, 1), Range("é" * 32, 0, 1)),
        *(Range(pack, -1, 10), Range(pack, 0, -1), Range(pack, 2**62, 2**62)),
    ]
    found = await read(payload_store, *impossible, Range(pack, 0, 3))
    assert found == ["no pack has such bytes"] * len(impossible) + [b"abc"]


async def test_an_absurd_length_allocates_no_memory(payload_store: PayloadStore) -> None:
    pack = name()
    await payload_store.write(pack, [b"abc"], sync=False, end=soon())
    (found,) = await payload_store.read([Range(pack, 0, 2**61)], end=soon())
    assert isinstance(found, PackDamage)


async def test_invalid_names_are_refused(payload_store: PayloadStore) -> None:
    for pack in ("", "a/../b", "../../x", "0" * 31, "G" * 32):
        with pytest.raises(ValueError, match="expected 32 hex digits"):
            await payload_store.write(pack, [b"a"], sync=False, end=soon())


async def test_packs_are_listed_and_removed(payload_store: PayloadStore, behind: Behind) -> None:
    behind.put("notes.txt", b"of another program")
    assert await listing(payload_store) == {}
    names = [name() for _ in range(3)]
    for pack in names:
        await payload_store.write(pack, [b"a" * 1000, b"b"], sync=False, end=soon())
    found = await listing(payload_store)
    assert set(found) == set(names)
    assert {each.num_bytes for each in found.values()} == {1025}
    assert all(each.modified.tzinfo is not None for each in found.values())
    for _ in range(2):
        await payload_store.remove([*names[:2], name(), "notes.txt", "../x"], end=soon())
        assert set(await listing(payload_store)) == {names[2]}
    assert behind.get("notes.txt") == b"of another program"
    await payload_store.remove([], end=soon())
    await payload_store.check(soon())


async def test_a_listing_has_all_pages(
    payload_store: PayloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("folder", "bucket"):
        monkeypatch.setattr(f"replaydb.packs.{kind}._PAGE", 2)
    names = {name() for _ in range(5)}
    for pack in names:
        await payload_store.write(pack, [b"a"], sync=False, end=soon())
    assert set(await listing(payload_store)) == names


async def test_calls_fail_without_the_marker(payload_store: PayloadStore, behind: Behind) -> None:
    pack = name()
    await payload_store.write(pack, [b"abc"], sync=False, end=soon())
    marker = behind.get("replaydb-store")
    behind.delete("replaydb-store")
    assert await read(payload_store, Range(pack, 0, 3)) == [b"abc"]
    for call in (
        lambda: payload_store.check(soon()),
        lambda: payload_store.read([Range(pack, 0, 3), Range(name(), 0, 3)], end=soon()),
        lambda: payload_store.remove([pack], end=soon()),
        lambda: listing(payload_store),
    ):
        with pytest.raises(PayloadsUnavailableError, match="replaydb-store is missing") as raised:
            await call()
        assert raised.value.url == payload_store.url
    assert behind.get(f"{pack}.pack") == b"abc"
    behind.put("replaydb-store", marker.replace(STORE.encode(), name().encode()))
    for refused in (payload_store.check, payload_store.prepare):
        with pytest.raises(PayloadsUnavailableError, match="belongs to another store"):
            await refused(soon())
    behind.put("replaydb-store", marker)
    await payload_store.remove([pack], end=soon())


async def test_a_truncated_write_is_refused(
    payload_store: PayloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = payload_store._objects.put
    monkeypatch.setattr(
        payload_store._objects, "put", lambda file, pieces, sync: put(file, pieces[:-1], sync=sync)
    )
    with pytest.raises(PayloadsUnavailableError, match="beside the marker"):
        await payload_store.write(payload_store.new_name(), [b"abc", b"d"], sync=False, end=soon())


async def test_concurrent_preparation(payload_url: str) -> None:
    async with opened(payload_url) as payload_store:
        with pytest.raises(PayloadsUnavailableError):
            await payload_store.check(soon())
        await asyncio.gather(*(payload_store.prepare(soon()) for _ in range(4)))
        await payload_store.check(soon())
        assert await listing(payload_store) == {}
    async with opened(payload_url, name()) as other:
        with pytest.raises(PayloadsUnavailableError):
            await other.check(soon())
        await other.prepare(soon())


async def test_two_stores_share_a_prefix(payload_store: PayloadStore, payload_url: str) -> None:
    pack = name()
    await payload_store.write(pack, [b"abc"], sync=False, end=soon())
    async with opened(payload_url, name()) as other:
        await other.prepare(soon())
        assert await listing(other) == {}
        await other.remove([pack], end=soon())
        assert await read(other, Range(pack, 0, 3)) == [f"pack {pack} is missing"]
    assert await read(payload_store, Range(pack, 0, 3)) == [b"abc"]


async def test_a_cancelled_write_is_atomic(payload_store: PayloadStore, behind: Behind) -> None:
    data = os.urandom(3_000_000)
    for pause in (0.0, 0.001, 0.005, 0.02):
        pack = name()
        writing = asyncio.create_task(payload_store.write(pack, [data], sync=False, end=soon()))
        await asyncio.sleep(pause)
        writing.cancel()
        await asyncio.wait([writing])
        found = await read(payload_store, Range(pack, 0, len(data)))
        assert found[0] in (data, f"pack {pack} is missing")
