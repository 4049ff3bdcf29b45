"""What a place does with packs, in a folder and in a bucket."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from random import Random
from uuid import uuid4

import obstore
import pytest

from replaydb import PayloadsUnavailableError
from replaydb.packs import Listed, PackDamage, Place, Range
from support.s3 import S3Server

from .conftest import STORE, opened, soon

SIZES = [0, 1, 63, 64, 65, 1000, 300_000, 0, 70_000]


def name() -> str:
    return uuid4().hex


class Behind:
    """What is in the place, past what is tested."""

    def __init__(self, place: Place, tmp_path: Path, s3: S3Server | None) -> None:
        prefix = place.url.partition("?")[0].partition("payloads/")[2]
        self._store = s3.store(f"{prefix}/{STORE}") if s3 else None
        self._folder = tmp_path / STORE

    def put(self, file: str, content: bytes) -> None:
        if self._store is None:
            (self._folder / file).write_bytes(content)
        else:
            obstore.put(self._store, file, content, use_multipart=False)

    def get(self, file: str) -> bytes:
        if self._store is None:
            return (self._folder / file).read_bytes()
        return bytes(obstore.get(self._store, file).bytes())

    def delete(self, file: str) -> None:
        if self._store is None:
            (self._folder / file).unlink()
        else:
            obstore.delete(self._store, file)


@pytest.fixture
def behind(place: Place, tmp_path: Path, request: pytest.FixtureRequest) -> Behind:
    in_bucket = place.url.startswith("s3:")
    return Behind(place, tmp_path, request.getfixturevalue("s3") if in_bucket else None)


async def listing(place: Place) -> dict[str, Listed]:
    return {each.name: each async for each in place.listed(end=soon())}


async def read(place: Place, *ranges: Range) -> list[bytes | str]:
    """Bytes, or what is wrong instead."""
    return [
        each.reason if isinstance(each, PackDamage) else bytes(each)
        for each in await place.read(ranges, end=soon())
    ]


@pytest.mark.parametrize("sync", [False, True])
async def test_parts_come_back_in_the_order_asked_for(place: Place, sync: bool) -> None:
    random, wanted, expected = Random(1), [], []
    for pack in (name(), name()):
        parts = [random.randbytes(size) for size in SIZES]
        given: list[bytes | memoryview] = [*parts]
        given[3] = memoryview(parts[3])
        offsets = await place.write(pack, given, sync=sync, end=soon())
        assert all(offset % 64 == 0 for offset in offsets)
        for offset, part in zip(offsets, parts, strict=True):
            wanted += [Range(pack, offset, len(part)), Range(pack, offset, len(part) // 2)]
            expected += [part, part[: len(part) // 2]]
    order = random.sample(range(len(wanted)), len(wanted))
    found = await read(place, *(wanted[nth] for nth in order))
    assert found == [expected[nth] for nth in order]
    assert await place.read([], end=soon()) == []


async def test_large_packs_and_many_at_once(place: Place) -> None:
    contents = {name(): os.urandom(9_000_000 if nth == 0 else 400_000) for nth in range(24)}
    await asyncio.gather(
        *(place.write(pack, [data], sync=False, end=soon()) for pack, data in contents.items())
    )
    found = await read(place, *(Range(pack, 0, len(data)) for pack, data in contents.items()))
    assert found == list(contents.values())


@pytest.mark.parametrize("least", [1, 4_000_000], ids=["several threads", "one thread"])
async def test_damage_is_that_of_its_range_only(
    place: Place, behind: Behind, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replaydb.packs.folder._LEAST_BYTES", least)
    sound, cut, gone = name(), name(), name()
    for pack in (sound, cut):
        await place.write(pack, [b"a" * 100, b"b" * 400_000, b"c"], sync=False, end=soon())
    behind.put(f"{cut}.pack", behind.get(f"{cut}.pack")[:150])
    whole = (Range(sound, 0, 100), Range(cut, 0, 100))
    assert await read(
        place,
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
    alone = await read(place, Range(cut, 400_128, 1))
    assert alone == [f"pack {cut} ends at byte 150, before byte 400129"]


async def test_what_can_be_no_range_is_damage(place: Place) -> None:
    pack = "0" * 32
    await place.write(pack, [b"abc"], sync=False, end=soon())
    impossible = [
        *(Range("../" * 3 + "etc/passwd", 0, 10), Range("", 0, 1), Range("é" * 32, 0, 1)),
        *(Range(pack, -1, 10), Range(pack, 0, -1), Range(pack, 2**62, 2**62)),
    ]
    found = await read(place, *impossible, Range(pack, 0, 3))
    assert found == ["no pack has such bytes"] * len(impossible) + [b"abc"]


async def test_a_length_that_is_absurd_takes_no_memory(place: Place) -> None:
    pack = name()
    await place.write(pack, [b"abc"], sync=False, end=soon())
    (found,) = await place.read([Range(pack, 0, 2**61)], end=soon())
    assert isinstance(found, PackDamage)


async def test_only_names_are_written(place: Place) -> None:
    for pack in ("", "a/../b", "../../x", "0" * 31, "G" * 32):
        with pytest.raises(ValueError, match="no name"):
            await place.write(pack, [b"a"], sync=False, end=soon())


async def test_packs_are_listed_and_removed(place: Place, behind: Behind) -> None:
    behind.put("notes.txt", b"of somebody else")
    assert await listing(place) == {}
    names = [name() for _ in range(3)]
    for pack in names:
        await place.write(pack, [b"a" * 1000, b"b"], sync=False, end=soon())
    found = await listing(place)
    assert set(found) == set(names)
    assert {each.num_bytes for each in found.values()} == {1025}
    assert all(each.modified.tzinfo is not None for each in found.values())
    for _ in range(2):
        await place.remove([*names[:2], name(), "notes.txt", "../x"], end=soon())
        assert set(await listing(place)) == {names[2]}
    assert behind.get("notes.txt") == b"of somebody else"
    await place.remove([], end=soon())
    await place.check(soon())


async def test_a_listing_has_all_pages(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("folder", "bucket"):
        monkeypatch.setattr(f"replaydb.packs.{kind}._PAGE", 2)
    names = {name() for _ in range(5)}
    for pack in names:
        await place.write(pack, [b"a"], sync=False, end=soon())
    assert set(await listing(place)) == names


async def test_nothing_is_concluded_without_the_marker(place: Place, behind: Behind) -> None:
    pack = name()
    await place.write(pack, [b"abc"], sync=False, end=soon())
    marker = behind.get("replaydb-store")
    behind.delete("replaydb-store")
    assert await read(place, Range(pack, 0, 3)) == [b"abc"]
    for call in (
        lambda: place.check(soon()),
        lambda: place.read([Range(pack, 0, 3), Range(name(), 0, 3)], end=soon()),
        lambda: place.remove([pack], end=soon()),
        lambda: listing(place),
    ):
        with pytest.raises(PayloadsUnavailableError, match="no packs of this store") as raised:
            await call()
        assert raised.value.url == place.url
    assert behind.get(f"{pack}.pack") == b"abc"
    behind.put("replaydb-store", marker.replace(STORE.encode(), name().encode()))
    for refused in (place.check, place.prepare):
        with pytest.raises(PayloadsUnavailableError, match="not that of this store"):
            await refused(soon())
    behind.put("replaydb-store", marker)
    await place.remove([pack], end=soon())


async def test_a_pack_that_was_cut_short_is_not_used(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = place._objects.put
    monkeypatch.setattr(
        place._objects, "put", lambda file, pieces, sync: put(file, pieces[:-1], sync=sync)
    )
    with pytest.raises(PayloadsUnavailableError, match="beside the marker"):
        await place.write(place.new_name(), [b"abc", b"d"], sync=False, end=soon())


async def test_a_place_is_prepared_by_many_at_once(place_url: str) -> None:
    async with opened(place_url) as place:
        with pytest.raises(PayloadsUnavailableError):
            await place.check(soon())
        await asyncio.gather(*(place.prepare(soon()) for _ in range(4)))
        await place.check(soon())
        assert await listing(place) == {}
    async with opened(place_url, name()) as other:
        with pytest.raises(PayloadsUnavailableError):
            await other.check(soon())
        await other.prepare(soon())


async def test_two_stores_share_a_prefix(place: Place, place_url: str) -> None:
    pack = name()
    await place.write(pack, [b"abc"], sync=False, end=soon())
    async with opened(place_url, name()) as other:
        await other.prepare(soon())
        assert await listing(other) == {}
        await other.remove([pack], end=soon())
        assert await read(other, Range(pack, 0, 3)) == [f"pack {pack} is missing"]
    assert await read(place, Range(pack, 0, 3)) == [b"abc"]


async def test_a_cancelled_write_is_whole_or_absent(place: Place, behind: Behind) -> None:
    data = os.urandom(3_000_000)
    for pause in (0.0, 0.001, 0.005, 0.02):
        pack = name()
        writing = asyncio.create_task(place.write(pack, [data], sync=False, end=soon()))
        await asyncio.sleep(pause)
        writing.cancel()
        await asyncio.wait([writing])
        found = await read(place, Range(pack, 0, len(data)))
        assert found[0] in (data, f"pack {pack} is missing")
