"""Payloads outside the database, in a folder; `tests/packs` tests the other payload stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

import replaydb as rdb
from replaydb import Buffer, Capacity, Durability, Queue, Store
from replaydb.database import payloads as outside
from replaydb.database.pruning import Pruning
from replaydb.database.repository import packs
from replaydb.database.runtime.transactions import end_in
from replaydb.database.tables import records
from replaydb.database.tables.schema import pack, payload, payload_place
from replaydb.packs import PackDamage, PayloadStore, Range
from support.connections import transaction
from support.damage import damage, pack_file
from support.groups import episode, group, groups, long_group
from support.invariants import check_invariants, number_of


@pytest.fixture
def layout() -> str:
    return "outside"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the payload folder of the store at `url`."""
    return tmp_path / "payloads"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of parts of each pack that is written."""
    counts: list[int] = []
    write = PayloadStore.write

    async def counted(
        payload_store: PayloadStore, name: str, parts: Sequence[Any], **more: Any
    ) -> list[int]:
        counts.append(len(parts))
        return await write(payload_store, name, parts, **more)

    monkeypatch.setattr(PayloadStore, "write", counted)
    return counts


@pytest.fixture
async def elsewhere(tmp_path: Path) -> AsyncIterator[Buffer]:
    """A buffer of a store with its payloads in the database."""
    async with Store.open(f"sqlite:///{tmp_path / 'elsewhere.db'}") as opened:
        yield await opened.buffer("math")


def uids(batch: rdb.Batch) -> list[str]:
    return sorted(one.group_uid for one in batch.groups)


async def packs_entered(url: str, count: int) -> None:
    """Wait until `count` packs are in the tables: a refused put records its own pack."""
    async with asyncio.timeout(60):
        while await number_of(url, pack) < count:  # noqa: ASYNC110 - of another task
            await asyncio.sleep(0.01)


def num_files(folder: Path, pattern: str = "*") -> int:
    return len(list(folder.rglob(pattern)))


def file_sizes(folder: Path) -> list[int]:
    return sorted(one.stat().st_size for one in folder.rglob("*.pack"))


def move(folder: Path, there: Path) -> None:
    folder.rename(there)


async def test_every_call_that_reads(buffer: Buffer, url: str, elsewhere: Buffer) -> None:
    await buffer.put(groups(3))
    await buffer.open_group("gsm8k", "late", 2)
    await asyncio.gather(*(buffer.add_episode("late", episode(reward=float(i))) for i in (0, 1)))
    async with transaction(url) as connection:
        assert set(await connection.scalars(select(payload.c.data))) == {None}
        assert len((await connection.scalars(select(pack.c.id))).all()) in (2, 3)
    everything = ["gsm8k-0", "gsm8k-1", "gsm8k-2", "late"]
    sampled = await buffer.sample(4)
    assert uids(sampled) == uids(await buffer.peek(4)) == everything
    assert sampled.draw_id is not None
    assert uids(await buffer.redraw(sampled.draw_id)) == everything
    [first, late] = await buffer.get(uids=["gsm8k-0", "late"])
    assert first.episodes[0].response_ids.tolist() == [3, 4, 5]
    assert [one.reward for one in late.episodes] == [0.0, 1.0]
    lease = await buffer.lease(4, ttl=60)
    async with buffer.open_lease(lease.id, ttl=60) as same:
        assert uids(same.batch) == uids(lease.batch) == everything
        await same.nack()
    assert await buffer.copy_to(elsewhere) == 4
    assert uids(await elsewhere.sample(4)) == everything


async def test_the_payload_location_is_set_once(url: str, folder: Path, tmp_path: Path) -> None:
    async with Store.open(url, payloads=f"{folder.as_uri()}/") as store:
        await (await store.buffer("math")).put(groups(1))
    async with Store.open(url, read_only=True) as store:
        assert len(await (await store.buffer("math")).get([1])) == 1
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(rdb.InvalidInputError, match="where this store has its payloads") as caught:
        await Store.open(url, payloads=other.as_uri())
    assert caught.value.field == "payloads"
    assert folder.as_uri() in str(caught.value)
    assert other.as_uri() in str(caught.value)
    assert num_files(other) == 0


async def test_a_folder_is_created_once(empty_sqlite_url: str, tmp_path: Path) -> None:
    """If it is missing later, a mount is missing, and creating another folder would be wrong."""
    folder = tmp_path / "new"
    async with Store.open(empty_sqlite_url, payloads=folder.as_uri()) as store:
        await (await store.buffer("math")).put(groups(1))
    move(folder, folder.with_name("away"))
    with pytest.raises(rdb.PayloadsUnavailableError, match="replaydb db relocate"):
        await Store.open(empty_sqlite_url, payloads=folder.as_uri())
    assert not folder.exists()


async def test_a_store_that_has_payloads_keeps_them(elsewhere: Buffer, tmp_path: Path) -> None:
    await elsewhere.put(groups(1))
    folder = tmp_path / "late"
    folder.mkdir()
    url = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    for read_only in (False, True):
        with pytest.raises(rdb.InvalidInputError, match="replaydb copy"):
            await Store.open(url, payloads=folder.as_uri(), read_only=read_only)
    with pytest.raises(rdb.InvalidInputError, match="payload_grace"):
        await Store.open(url, payload_grace=60)
    assert num_files(folder) == 0


async def test_a_store_opened_before_the_location_was_set_uses_it(
    elsewhere: Buffer, tmp_path: Path, written: list[int]
) -> None:
    url = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    folder = tmp_path / "named"
    folder.mkdir()
    async with Store.open(url, payloads=folder.as_uri()) as store:
        await (await store.buffer("math")).put(groups(1))
    assert len(await elsewhere.sample(1)) == 1
    await elsewhere.put(group("new"))
    assert written == [1, 1]
    assert await elsewhere.delete(tasks="gsm8k") == 2
    await check_invariants(url)


async def test_a_refused_put_writes_its_pack_once(
    buffer: Buffer, written: list[int], url: str
) -> None:
    await buffer.update_settings(rate_limit=Queue(size=1))
    await buffer.put(group("first"))
    waiting = [asyncio.create_task(buffer.put(group(f"waits-{i}"))) for i in range(2)]
    await packs_entered(url, 2)
    for _ in range(3):  # each frees capacity for one
        async with buffer.lease(1, ttl=60, timeout=30):
            pass
    await asyncio.gather(*waiting)
    assert sum(written) == 3


@pytest.mark.parametrize("is_gone", [True, False], ids=["removed", "being removed"])
async def test_a_refused_put_writes_a_new_pack_if_its_pack_is_gone(
    store: Store, written: list[int], url: str, is_gone: bool
) -> None:
    """While a pack has a row marked for deletion, any process may be deleting it."""
    buffer = await store.buffer("math", rate_limit=Queue(size=1))
    await buffer.put(group("first"))
    waiting = asyncio.create_task(buffer.put(group("waits")))
    await packs_entered(url, 2)
    if is_gone:
        await _remove_all(store, url)
        assert await number_of(url, pack) == 1
    else:
        unused = update(pack).where(pack.c.live_parts == 0)
        async with transaction(url) as connection:
            await connection.execute(unused.values(removing=True))
    async with buffer.lease(1, ttl=60):
        pass
    await waiting
    assert written == [1, 1, 1]
    assert uids(await buffer.sample(1)) == ["waits"]


async def test_a_pack_that_took_too_long_is_written_again(
    buffer: Buffer, written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prune may take an older pack without a row for the leftover of a crash."""
    first = records.Pack

    def began_long_ago(name: str, num_bytes: int, written_at: float) -> records.Pack:
        monkeypatch.setattr(outside, "Pack", first)
        return first(name, num_bytes, written_at - packs.FRESH_SECONDS)

    monkeypatch.setattr(outside, "Pack", began_long_ago)
    await buffer.put(groups(2))
    assert written == [2, 2]
    assert len(await buffer.sample(2)) == 2


@pytest.mark.parametrize("durability", ["process", "full"])
async def test_what_a_power_cut_leaves(
    url: str, durability: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL is as durable as its server, so packs are too, whatever `durability` is."""
    asked: list[bool] = []
    write = PayloadStore.write

    async def noted(
        payload_store: PayloadStore, name: str, parts: Any, *, sync: bool, end: float
    ) -> list[int]:
        asked.append(sync)
        return await write(payload_store, name, parts, sync=sync, end=end)

    monkeypatch.setattr(PayloadStore, "write", noted)
    async with Store.open(url, durability=durability) as store:
        await (await store.buffer("math")).put(groups(1))
    assert asked == [durability == "full" or url.startswith("postgresql")]


async def test_a_draw_can_be_read_during_the_grace_period(
    buffer: Buffer, store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if others delete the groups as soon as the draw has committed."""
    await buffer.put(groups(3))
    read = PayloadStore.read

    async def late(payload_store: PayloadStore, ranges: Sequence[Range], *, end: float) -> Any:
        assert await buffer.delete(tasks="gsm8k") == 3
        await Pruning(
            store._database, payload_store, end_in(60.0), rdb.PruneReport(False)
        ).remove_marked()
        return await read(payload_store, ranges, end=end)

    monkeypatch.setattr(PayloadStore, "read", late)
    assert uids(await buffer.sample(3)) == ["gsm8k-0", "gsm8k-1", "gsm8k-2"]
    monkeypatch.undo()
    assert await number_of(url, pack) == 1
    await _remove_all(store, url)
    assert await number_of(url, pack) == 0


async def test_the_size_of_a_pack_is_that_of_its_file(
    buffer: Buffer, url: str, folder: Path
) -> None:
    await buffer.put([group(), long_group("long", 2000)])
    await buffer.put([long_group("longer", 3000), group()])
    async with transaction(url) as connection:
        sizes = await connection.scalars(select(pack.c.num_bytes))
    assert sorted(sizes) == file_sizes(folder)


async def test_a_pack_is_deleted_with_its_last_reference(
    store: Store, other: Store, url: str, folder: Path
) -> None:
    buffer = await store.buffer("math")
    await buffer.put(groups(4))  # one pack
    await buffer.put(groups(1, "code"))
    there = await other.buffer("math")
    await buffer.delete([1, 2])
    await _remove_all(store, url)
    assert num_files(folder, "*.pack") == 2
    await asyncio.gather(buffer.delete([3]), there.delete([4]))
    await _remove_all(other, url)
    assert num_files(folder, "*.pack") == await number_of(url, pack) == 1
    assert len(await there.sample(1)) == 1


async def test_a_damaged_count_removes_no_referenced_pack(store: Store, url: str) -> None:
    buffer = await store.buffer("math")
    await buffer.put(groups(2))
    async with transaction(url) as connection:
        await connection.execute(update(pack).values(live_parts=1))
    await buffer.delete([1])
    await _remove_all(store, url)
    assert uids(await buffer.sample(1)) == ["gsm8k-1"]
    async with transaction(url) as connection:  # for the counters, which the fixture checks
        await connection.execute(update(pack).values(live_parts=1, condemned_at=None))


async def test_an_interrupted_removal_resumes(
    store: Store, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await store.buffer("math")
    await buffer.put(groups(1))
    await buffer.delete([1])
    begin_removal = packs.begin_removal

    def then_unmounted(*args: Any) -> dict[int, str]:
        removing = begin_removal(*args)
        move(folder, folder.with_name("gone"))
        return removing

    with monkeypatch.context() as patched:
        patched.setattr(packs, "begin_removal", then_unmounted)
        with pytest.raises(rdb.PayloadsUnavailableError):
            await _remove_all(store, url)
    async with transaction(url) as connection:
        assert (await connection.scalars(select(pack.c.removing))).all() == [True]
    move(folder.with_name("gone"), folder)
    monkeypatch.setattr(outside, "TIDY_SECONDS", -1.0)
    await buffer.put(groups(1, "code"))  # every process that puts removes packs
    tidying = store._payloads._tidying
    assert tidying is not None
    await tidying
    assert await number_of(url, pack) == 1
    assert num_files(folder, "*.pack") == 1


async def test_an_unreachable_payload_store_is_not_damage(buffer: Buffer, folder: Path) -> None:
    await buffer.put(groups(2))
    move(folder, folder.with_name("gone"))
    calls: list[Awaitable[object]] = [
        buffer.sample(1, rdb.Fifo()),
        buffer.lease(2, ttl=60),
        buffer.get([1]),
        buffer.put(group("new")),
    ]
    for call in calls:
        with pytest.raises(rdb.PayloadsUnavailableError):
            await call
    assert await buffer.leases() == []
    assert await buffer.count(statuses="completed") == await buffer.count() == 2
    move(folder.with_name("gone"), folder)
    async with buffer.lease(2, ttl=60) as lease:
        assert len(lease.batch) == 2


async def test_closing_waits_for_payload_transfers(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await Store.open(url)
    buffer = await store.buffer("math")
    await buffer.put(groups(3))
    reading, resume = _blocked_reads(monkeypatch)
    sampled = asyncio.ensure_future(buffer.sample(3))
    got = asyncio.ensure_future(buffer.get([1, 2, 3]))
    await asyncio.gather(reading.acquire(), reading.acquire())
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0.1)
    assert not closing.done()
    resume.set()
    assert len(await sampled) == len(await got) == 3
    await closing


async def test_closing_cancels_long_payload_transfers(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await Store.open(url)
    buffer = await store.buffer("math")
    await buffer.put(groups(1))
    reading, _ = _blocked_reads(monkeypatch)
    call = asyncio.ensure_future(buffer.sample(1))
    await reading.acquire()
    await store.close(timeout=0.1)
    with pytest.raises(rdb.StoreClosedError):
        await call


def _blocked_reads(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Semaphore, asyncio.Event]:
    """Block reads: the semaphore counts reads that have begun, the event lets them continue."""
    reading, resume, read = asyncio.Semaphore(0), asyncio.Event(), PayloadStore.read

    async def blocked_read(
        payload_store: PayloadStore, ranges: Sequence[Range], *, end: float
    ) -> Any:
        reading.release()
        await resume.wait()
        return await read(payload_store, ranges, end=end)

    monkeypatch.setattr(PayloadStore, "read", blocked_read)
    return reading, resume


async def test_a_closed_store_writes_nothing(url: str, written: list[int]) -> None:
    async with Store.open(url) as store:
        buffer = await store.buffer("math")
        await buffer.put(groups(1))
    with pytest.raises(rdb.StoreClosedError):
        await buffer.put(group("new"))
    assert written == [1]


async def test_a_missing_pack_is_damage_with_its_own_message(buffer: Buffer, url: str) -> None:
    for one in groups(4):
        await buffer.put(one)
    async with transaction(url) as connection:
        (await pack_file(connection, 1)).unlink()
        await connection.execute(
            update(payload).where(payload.c.group_id == 2).values(pack_length=2**60)
        )
    await damage(url, 3)
    with pytest.raises(rdb.CorruptPayloadError) as caught:
        await buffer.sample(4)
    assert caught.value.group_ids == (1, 2, 3)
    assert caught.value.batch is not None
    assert uids(caught.value.batch) == ["gsm8k-3"]
    assert await buffer.count(statuses="failed") == 3
    async with transaction(url) as connection:  # for the counters, which the fixture checks
        sizes = select(pack.c.num_bytes).where(pack.c.id == 2).scalar_subquery()
        await connection.execute(
            update(payload).where(payload.c.group_id == 2).values(pack_length=sizes)
        )
    await buffer.delete([1])


async def test_an_eviction_updates_the_counts_of_packs(store: Store, written: list[int]) -> None:
    """For all packs, also if a put is rolled back after it has evicted groups."""
    buffer = await store.buffer(
        "math", capacity=Capacity(groups=3), eviction="lowest_priority", on_evict="delete"
    )
    for i in range(6):
        await buffer.put([group(f"{i}-{j}", priority=float(10 * j + i)) for j in range(2)])
    assert await buffer.count(where=rdb.col.group_uid == "5-1") == 1
    await buffer.put([group("5-1"), group("0-0"), group("new")], on_duplicate="ignore")
    await buffer.put([group("5-1", priority=99.0)], on_duplicate="replace")
    with pytest.raises(rdb.DuplicateGroupError):
        await buffer.put(group("5-1"))
    assert len(written) == 9


async def test_a_put_that_is_rolled_back_releases_no_pack(store: Store, url: str) -> None:
    """It evicted one group, which was not enough. Its own pack is recorded, and so is committed."""
    buffer = await store.buffer("math", capacity=Capacity(groups=3))
    await buffer.put(groups(3))
    async with buffer.lease(2, ttl=60):
        with pytest.raises(rdb.BufferFullError):
            await buffer.put(groups(2, "code"), timeout=0)
        assert await number_of(url, pack) == 2
        await check_invariants(url)


async def test_a_rewritten_pack_replaces_the_old_one(store: Store, url: str) -> None:
    buffer = await store.buffer("math")
    await buffer.put(groups(5))
    await buffer.delete([2, 4, 5])
    database = store._database
    end = asyncio.get_running_loop().time() + 60
    payload_store = await store._payloads._located(end)
    [dead] = await database.read(lambda session: packs.mostly_dead(session, 5))
    parts = await database.read(lambda session: packs.members(session, dead.id))
    ranges = [Range(dead.name, part.pack_offset, part.pack_length) for part in parts]
    data = [
        one for one in await payload_store.read(ranges, end=end) if not isinstance(one, PackDamage)
    ]
    offsets = await payload_store.write("e" * 32, data, sync=False, end=end)
    moved = dict(zip([part.pack_offset for part in parts], offsets, strict=True))
    size = offsets[-1] + len(data[-1])
    await database.write(
        lambda session: packs.repoint(session, dead.id, "e" * 32, size, moved, session.now())
    )
    await _remove_all(store, url)
    assert await number_of(url, pack) == 1
    assert uids(await buffer.sample(2)) == ["gsm8k-0", "gsm8k-2"]


async def test_an_orphan_can_be_claimed(store: Store, url: str) -> None:
    buffer = await store.buffer("math")
    await buffer.put(groups(1))
    async with transaction(url) as connection:
        [name] = await connection.scalars(select(pack.c.name))
    database = store._database
    orphans = {name, "f" * 32}
    claimed = await database.write(
        lambda session: packs.claim_orphans(session, orphans, session.now())
    )
    async with transaction(url) as connection:
        doomed = select(pack.c.id, pack.c.name).where(pack.c.removing)
        assert dict((await connection.execute(doomed)).all()) == claimed
    assert list(claimed.values()) == ["f" * 32]
    await database.write(lambda session: packs.delete_rows(session, claimed.keys()))
    assert await number_of(url, pack) == 1


async def _remove_all(store: Store, url: str) -> None:
    """Remove packs marked for deletion, as if their grace period had ended."""
    async with transaction(url) as connection:
        await connection.execute(update(payload_place).values(grace_seconds=-1.0))
    payload_store = await store._payloads._located(asyncio.get_running_loop().time() + 60)
    await Pruning(
        store._database, payload_store, end_in(60.0), rdb.PruneReport(False)
    ).remove_marked()
