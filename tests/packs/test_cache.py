"""Payloads that were read from packs are read from memory, up to a limit."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

import replaydb as rdb
from replaydb import Store
from replaydb.operations import verify
from replaydb.packs import BUCKET_BYTES, PackDamage, PayloadStore, Range, RangeCache
from support.damage import damage
from support.groups import groups, long_group
from support.invariants import check_invariants
from support.s3 import S3Server


def range_of(number: int, length: int) -> Range:
    return Range(f"{number:032x}", 0, length, 1)


@given(
    st.integers(0, 8),
    st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40),
)
def test_the_least_recently_used_ranges_are_dropped(
    most: int, calls: list[tuple[bool, int]]
) -> None:
    """Range number n has n bytes. A model keeps them in the order of their last use."""
    cache, model = RangeCache(most), OrderedDict[int, None]()
    hits = misses = 0
    for adds, number in calls:
        wanted = range_of(number, number)
        if adds:
            asyncio.run(cache.add({wanted: memoryview(bytes([number]) * number)}))
            if number <= most:
                model.setdefault(number)
            while sum(model) > most:
                model.popitem(last=False)
        else:
            data = cache.get(wanted)
            assert (data is not None) == (number in model)
            hits, misses = hits + (number in model), misses + (number not in model)
            if data is not None:
                assert bytes(data) == bytes([number]) * number
                model.move_to_end(number)
        assert cache.num_bytes == sum(model) <= most
    assert cache.metrics() == {
        "cache/hits": hits,
        "cache/misses": misses,
        "cache/bytes": sum(model),
    }


async def test_copies_are_cached() -> None:
    cache, wanted, data = RangeCache(3_000_000), range_of(1, 2_000_000), bytearray(2_000_000)
    await cache.add({wanted: memoryview(data)})
    data[0] = 1  # memory of a folder's reads is used again
    cached = cache.get(wanted)
    assert cached is not None
    assert cached[0] == 0
    assert cached.readonly


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of ranges of each read of packs."""
    counts: list[int] = []
    read = PayloadStore.read

    async def counted(
        payload_store: PayloadStore, ranges: Any, *, end: float
    ) -> list[memoryview | PackDamage]:
        counts.append(len(ranges))
        return await read(payload_store, ranges, end=end)

    monkeypatch.setattr(PayloadStore, "read", counted)
    return counts


@pytest.fixture(params=["folder", "bucket"])
def payload_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        (tmp_path / "payloads").mkdir()
        return (tmp_path / "payloads").as_uri()
    s3: S3Server = request.getfixturevalue("s3")
    return s3.url(f"tests/{uuid4().hex}")


async def test_a_second_draw_reads_only_what_is_not_cached(
    url: str, payload_url: str, reads: list[int]
) -> None:
    async with Store.open(url, payloads=payload_url, payload_cache=10**6) as store:
        buffer = await store.buffer("math")
        await buffer.put([long_group(str(i), 100) for i in range(4)])
        first = await buffer.sample(3, rdb.Fifo(), step=1)
        second = await buffer.sample(4, rdb.Fifo(), step=2)
        peeked = await buffer.peek(4, rdb.Fifo())
        (draw,) = await buffer.draws(step=2)
        redrawn = await buffer.redraw(draw.id)
        found = await buffer.metrics()
    assert reads == [3, 1]
    expected = [list(range(100))] * 4
    for batch in (second, peeked, redrawn):
        assert [one.episodes[0].token_ids.tolist() for one in batch] == expected
    assert list(first) == list(second)[:3]
    assert {name: found[name] for name in found if name.startswith("cache/")} == {
        "cache/hits": 11,
        "cache/misses": 4,
        "cache/bytes": found["buffer/bytes"],
    }
    await check_invariants(url)


async def test_buckets_are_cached_by_default_and_folders_are_not(
    url: str, payload_url: str, reads: list[int]
) -> None:
    """The location may have been recorded by an earlier process."""
    async with Store.open(url, payloads=payload_url) as store:
        await (await store.buffer("math")).put(groups(2))
    for size in (None, 0):
        async with Store.open(url, payload_cache=size) as store:
            buffer = await store.buffer("math")
            for step in range(2):
                await buffer.sample(2, step=step)
            cache = buffer._payloads.cache
    assert reads == ([2, 2, 2] if payload_url.startswith("s3") else [2, 2, 2, 2])
    assert cache is None
    async with Store.open(url) as store:
        await (await store.buffer("math")).sample(2)
        cache = store._payloads.cache
        assert (cache and cache.max_bytes) == (
            BUCKET_BYTES if payload_url.startswith("s3") else None
        )


async def test_a_replaced_group_is_read(url: str, payload_url: str, reads: list[int]) -> None:
    """It has the id of the group that it replaces, and another payload."""
    async with Store.open(url, payloads=payload_url, payload_cache=10**6) as store:
        buffer = await store.buffer("math")
        ids = []
        for tokens in (100, 120):
            ids += await buffer.put(long_group("same", tokens), on_duplicate="replace")
            [one] = await buffer.sample(1)
            assert one.num_tokens == tokens
    assert reads == [1, 1]


async def test_damage_is_not_cached_and_verify_reads_packs(url: str, tmp_path: Path) -> None:
    (tmp_path / "payloads").mkdir()
    payload_url = (tmp_path / "payloads").as_uri()
    async with Store.open(url, payloads=payload_url, payload_cache=10**6) as store:
        buffer = await store.buffer("math")
        [sound] = await buffer.put(long_group("sound", 100))
        [damaged] = await buffer.put(long_group("damaged", 100))
        await damage(url, damaged)
        with pytest.raises(rdb.CorruptPayloadError):
            await buffer.sample(2, rdb.Fifo())
        cache = buffer._payloads.cache
        assert cache is not None
        assert cache.misses == 2
        await damage(url, sound)
        assert [one.group_uid for one in await buffer.sample(1)] == ["sound"]
        report = await verify(store)
    assert cache.hits == 1
    found = {one.where for one in report.problems if one.kind == "payload"}
    assert all(any(f"group {one}" in where for where in found) for one in (sound, damaged)), found
