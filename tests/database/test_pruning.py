"""Pruning of payload stores: what is found, and that nothing else is ever removed."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest
from sqlalchemy import Connection, case, null, select, update

from replaydb import (
    Buffer,
    ClientTooOldError,
    Episode,
    InvalidInputError,
    PayloadsUnavailableError,
    PruneReport,
    Store,
)
from replaydb.database.payloads import Payloads
from replaydb.database.pruning import Pruning
from replaydb.database.repository import packs
from replaydb.database.tables.schema import compatibility, pack, payload_place
from replaydb.operations import verify
from replaydb.packs import PayloadStore
from support.clock import Clock
from support.connections import transaction
from support.engines import postgresql_nightly
from support.groups import groups, long_group
from support.invariants import check_invariants, number_of

DAY = 86_400.0


@pytest.fixture
def layout() -> str:
    """Payloads are outside the database."""
    return "outside"


@pytest.fixture
def folder(url: str, tmp_path: Path) -> Path:
    """The folder of the payloads."""
    return tmp_path / "payloads"


def found(folder: Path, pattern: str) -> set[Path]:
    """Return matching files of all stores."""
    return set(folder.glob(f"*/{pattern}"))


def files(folder: Path) -> dict[str, int]:
    """Return the sizes of all files in the folder of the store, by name."""
    return {path.name: path.stat().st_size for path in folder.glob("*/*")}


async def stray(url: str, folder: Path, size: int) -> str:
    """Write a pack as if its put had been killed before the commit."""
    async with transaction(url) as connection:
        uid = (await connection.execute(select(payload_place.c.store_uid))).scalar_one()
    name = f"{uuid4().hex}.pack"
    await asyncio.to_thread((folder / uid / name).write_bytes, bytes(size))
    return name


async def contents(buffer: Buffer, ids: list[int]) -> list[list[Episode]]:
    return [list(group.episodes) for group in await buffer.get(ids)]


async def test_only_old_orphans_are_removed(
    url: str, store: Store, buffer: Buffer, folder: Path, clock: Clock
) -> None:
    ids = await buffer.put(groups(3))
    orphan, young = await stray(url, folder, 1000), await stray(url, folder, 2000)
    own = found(folder, orphan).pop().parent
    (own / f"{uuid4().hex}.pack.part").write_bytes(bytes(500))  # of a write that was killed
    (own / "notes.txt").write_text("of another program")
    other = folder / uuid4().hex
    shutil.copytree(own, other)  # of another store

    clock.jump(2 * DAY)
    ahead = clock.now().timestamp() - 3600
    os.utime(own / young, (ahead, ahead))
    before = files(folder)
    preview = await store.prune()
    assert files(folder) == before
    assert (preview.dry_run, preview.num_packs, preview.num_orphans) == (True, 4, 2)
    assert preview.orphan_bytes == preview.freed_bytes == 1500

    reports: list[PruneReport] = []
    removed = await store.prune(dry_run=False, progress=reports.append)
    assert (removed.num_orphans, removed.orphan_bytes) == (2, 1500)
    assert reports[-1] == removed
    left = {path.name for path in found(folder, "*") if path.parent == own}
    assert {orphan} == {name for name in before if name.endswith(".pack")} - left
    assert left >= {young, "notes.txt", "replaydb-store"}
    assert found(other.parent, "*") >= {other / orphan, other / young}
    assert (await store.prune(dry_run=False)).freed_bytes == 0
    assert len(await contents(buffer, ids)) == 3


async def test_a_client_that_has_become_too_old_removes_nothing(
    url: str,
    store: Store,
    buffer: Buffer,
    folder: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A newer one may refer to packs in ways that it does not know."""
    await buffer.put(groups(1))
    await stray(url, folder, 1000)
    clock.jump(2 * DAY)
    before = files(folder)
    listed = Pruning._mark_unmarked

    async def mark_later(pruning: Pruning, now: Any) -> None:
        await listed(pruning, now)
        async with transaction(url) as connection:
            await connection.execute(update(compatibility).values(min_client="9.0.0"))

    monkeypatch.setattr(Pruning, "_mark_unmarked", mark_later)
    location = f"file://{folder}"
    for call in (
        lambda: store.prune(dry_run=False),  # the first one notices it while it runs
        store.prune,
        store.adopt_payloads,
        lambda: store.relocate_payloads(location),
    ):
        with pytest.raises(ClientTooOldError, match=r"replaydb 9\.0\.0 or later"):
            await call()
        assert files(folder) == before


async def test_nothing_is_removed_without_the_marker(
    url: str, store: Store, buffer: Buffer, folder: Path, clock: Clock
) -> None:
    await buffer.put(groups(1))
    await stray(url, folder, 1000)
    clock.jump(2 * DAY)
    (marker,) = found(folder, "replaydb-store")
    content = marker.read_bytes()
    marker.unlink()
    before = files(folder)
    with pytest.raises(PayloadsUnavailableError):
        await store.prune(dry_run=False)
    assert files(folder) == before
    marker.write_bytes(content)
    assert (await store.prune(dry_run=False)).num_orphans == 1


async def test_a_pack_committed_during_a_prune_is_not_an_orphan(
    store: Store, buffer: Buffer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await buffer.put(groups(2))
    clock.jump(2 * DAY)

    def as_before_the_commit(connection: Connection, names: list[str]) -> set[str]:
        monkeypatch.undo()
        return set()

    monkeypatch.setattr(packs, "known", as_before_the_commit)
    await store.prune(dry_run=False)
    assert len(await contents(buffer, ids)) == 2


async def test_a_mostly_dead_pack_is_compacted(
    url: str, store: Store, buffer: Buffer, folder: Path, clock: Clock
) -> None:
    ids = await buffer.put([long_group(str(i), 1000 + i) for i in range(10)])
    expected = await contents(buffer, ids)
    (old,) = found(folder, "*.pack")
    size = old.stat().st_size
    assert (await store.prune(dry_run=False)).num_compacted == 0
    await buffer.delete(ids[2:])

    preview = await store.prune()
    assert preview.num_compacted == 1
    assert 0.75 * size < preview.compacted_bytes < 0.85 * size
    assert found(folder, "*.pack") == {old}
    done = await store.prune(dry_run=False)
    assert (done.num_packs, done.num_compacted, done.num_damaged) == (1, 1, 0)
    assert abs(done.compacted_bytes - preview.compacted_bytes) < 128  # parts are aligned
    new = found(folder, "*.pack") - {old}
    assert (len(new), old.exists()) == (1, True)  # earlier draws may still read the old one
    assert await contents(buffer, ids[:2]) == expected[:2]
    async with transaction(url) as connection:
        rows = (await connection.execute(select(pack).order_by(pack.c.id))).all()
    assert [row.live_parts for row in rows] == [0, 2]
    assert (await store.prune(dry_run=False)).freed_bytes == 0

    clock.jump(2 * DAY)
    gone = await store.prune()
    assert (gone.num_marked, gone.marked_bytes) == (1, size)
    assert (await store.prune(dry_run=False)).num_marked == 1
    assert found(folder, "*.pack") == new
    assert await contents(buffer, ids[:2]) == expected[:2]
    await buffer.delete(ids[:2])


async def test_compacted_packs_are_flushed(
    url: str, store: Store, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any durability, since the old pack, which has survived until now, will be removed."""
    ids = await buffer.put([long_group(str(i), 1000 + i) for i in range(4)])
    await buffer.delete(ids[1:])
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync := Mock(wraps=os.fsync))
        await store.prune(dry_run=False)
    assert fsync.call_count == 2  # the new pack, and the folder that has its name


async def test_groups_deleted_during_a_compaction(
    store: Store, buffer: Buffer, folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await buffer.put([long_group(str(i), 1000 + i) for i in range(10)])
    await buffer.delete(ids[3:])
    expected, write = await contents(buffer, ids[1:3]), PayloadStore.write

    async def meanwhile(*args: object, **kwargs: object) -> object:
        written = await write(*args, **kwargs)  # type: ignore[arg-type]
        await buffer.delete(ids[:1])
        return written

    with monkeypatch.context() as patched:
        patched.setattr(PayloadStore, "write", meanwhile)
        await store.prune(dry_run=False)
    assert await contents(buffer, ids[1:3]) == expected
    await buffer.delete(ids[1:3])
    clock.jump(2 * DAY)
    await store.prune(dry_run=False)
    assert found(folder, "*.pack") == set()


@pytest.mark.parametrize("left", [0, 1])
async def test_a_pack_is_marked_unless_parts_were_moved_into_it(
    url: str, buffer: Buffer, store: Store, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await buffer.put([long_group(str(i), 1000 + i) for i in range(10)])
    await buffer.delete(ids[2:])
    write = PayloadStore.write

    async def meanwhile(*args: object, **kwargs: object) -> object:
        written = await write(*args, **kwargs)  # type: ignore[arg-type]
        await buffer.delete(ids[left:2])
        return written

    with monkeypatch.context() as patched:
        patched.setattr(PayloadStore, "write", meanwhile)
        assert (await store.prune(dry_run=False)).num_compacted == left
    async with transaction(url) as connection:
        rows = (await connection.execute(select(pack).order_by(pack.c.id))).all()
    assert [(row.live_parts, row.condemned_at is None) for row in rows] == [
        (0, False),
        (left, bool(left)),
    ]
    await buffer.delete(ids[:left])


@postgresql_nightly
async def test_packs_that_earlier_versions_left_unmarked(
    url: str, store: Store, buffer: Buffer, folder: Path, clock: Clock
) -> None:
    await buffer.delete(await buffer.put(groups(3)))
    async with transaction(url) as connection:
        await connection.execute(update(pack).values(condemned_at=None))
    clock.jump(2 * DAY)
    found_packs = found(folder, "*.pack")
    (problem,) = (await verify(store)).problems
    assert (problem.kind, "not marked for deletion" in problem.what) == ("pack", True)
    preview = await store.prune()
    assert (preview.num_unmarked, preview.num_marked) == (1, 0)
    assert preview.freed_bytes == preview.unmarked_bytes > 0

    marked = await store.prune(dry_run=False)
    assert (marked.num_unmarked, marked.num_marked) == (1, 0)
    assert (await verify(store)).is_sound
    assert found(folder, "*.pack") == found_packs
    clock.jump(2 * DAY)
    gone = await store.prune(dry_run=False)
    assert (gone.num_unmarked, gone.num_marked) == (0, 1)
    assert found(folder, "*.pack") == set()


async def test_a_repair_corrects_deletion_marks(url: str, store: Store, buffer: Buffer) -> None:
    ids = await buffer.put(groups(1))
    await buffer.delete(await buffer.put(groups(1, "code")))
    async with transaction(url) as connection:
        is_marked = pack.c.condemned_at.is_not(None)
        swapped = case((is_marked, null()), else_=pack.c.created_at)
        await connection.execute(update(pack).values(condemned_at=swapped))
    reports = {one.what for one in (await verify(store)).problems}
    assert reports == {
        "marked for deletion, but 1 parts refer to it",
        "no parts refer to it, but it is not marked for deletion",
    }
    assert (await verify(store, repair=True)).num_repaired == 2
    await check_invariants(url)
    assert len(await contents(buffer, ids)) == 1


async def test_a_damaged_pack_is_not_compacted(store: Store, buffer: Buffer, folder: Path) -> None:
    ids = await buffer.put([long_group(str(i), 1000 + i) for i in range(10)])
    await buffer.delete(ids[2:])
    (path,) = found(folder, "*.pack")
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    report = await store.prune(dry_run=False)
    assert (report.num_damaged, report.num_compacted) == (1, 0)
    assert found(folder, "*.pack") == {path}


@postgresql_nightly
async def test_an_interrupted_prune_loses_nothing(
    url: str, store: Store, buffer: Buffer, folder: Path, clock: Clock
) -> None:
    chance, ids = random.Random(3), []
    for nth in range(12):
        ids.append(await buffer.put([long_group(f"{nth}-{i}", 500 + nth + i) for i in range(4)]))
        await stray(url, folder, 1000)
    kept = [group_id for several in ids for group_id in several[:1]]
    expected = await contents(buffer, kept)
    await buffer.delete([group_id for several in ids for group_id in several[1:]])
    clock.jump(2 * DAY)
    for _ in range(15):
        pruning = asyncio.create_task(store.prune(dry_run=False))
        await asyncio.sleep(chance.uniform(0, 0.03))
        pruning.cancel()
        await asyncio.wait([pruning])
        assert await contents(buffer, kept) == expected
    clock.jump(2 * DAY)
    for _ in range(2):  # the second removes what the first has marked
        await store.prune(dry_run=False)
        clock.jump(2 * DAY)
    assert await contents(buffer, kept) == expected
    assert len(found(folder, "*.pack")) == len(ids)


@postgresql_nightly
async def test_prune_refuses_invalid_calls(url: str, store: Store, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="min_age"):
        await store.prune(min_age=7199.0)
    inside = f"sqlite:///{tmp_path / 'inside.db'}"
    async with Store.open(inside) as other:
        for call in (other.prune(), other.relocate_payloads(tmp_path.as_uri())):
            with pytest.raises(InvalidInputError, match="outside the database"):
                await call


@postgresql_nightly
async def test_a_payload_store_that_has_moved(
    url: str, store: Store, buffer: Buffer, folder: Path, tmp_path: Path
) -> None:
    ids = await buffer.put(groups(2))
    expected = await contents(buffer, ids)
    moved = tmp_path / "elsewhere"
    os.rename(folder, moved)
    with pytest.raises(PayloadsUnavailableError):
        await buffer.get(ids)
    for wrong in (tmp_path, folder):
        with pytest.raises(PayloadsUnavailableError):
            await store.relocate_payloads(wrong.as_uri())
    with pytest.raises(InvalidInputError):
        await store.relocate_payloads("elsewhere")
    await store.relocate_payloads(moved.as_uri())
    assert await contents(buffer, ids) == expected
    async with Store.open(url, payloads=moved.as_uri()) as other:
        assert await contents(await other.buffer("math"), ids) == expected
        await (await other.buffer("math")).put(groups(1, "more"))
    assert found(tmp_path, "replaydb-store") == set()


async def test_concurrent_prunes_leave_no_packs(
    url: str, store: Store, other: Store, buffer: Buffer, folder: Path, clock: Clock
) -> None:
    """They compact the same packs while groups in these are deleted."""
    ids = [await buffer.put([long_group(f"{i}-{j}", 900) for j in range(5)]) for i in range(6)]
    await buffer.delete([group_id for several in ids for group_id in several[2:]])
    await asyncio.gather(
        store.prune(dry_run=False),
        other.prune(dry_run=False),
        *(buffer.delete(several[:2]) for several in ids[:3]),
    )
    await check_invariants(url)
    await buffer.delete([group_id for several in ids for group_id in several])
    clock.jump(2 * DAY)
    await store.prune(dry_run=False)
    assert found(folder, "*.pack") == set()


@postgresql_nightly
async def test_a_part_moved_before_it_is_read(
    url: str, store: Store, other: Store, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part is moved by a compaction whose old pack is removed at once."""
    ids = await buffer.put([long_group(str(i), 1000 + i) for i in range(10)])
    await buffer.delete(ids[2:])
    expected, read = await contents(buffer, ids[:2]), PayloadStore.read
    async with Store.open(url, payload_grace=1e-6):
        pass

    async def meanwhile(*args: object, **kwargs: object) -> object:
        monkeypatch.undo()
        for _ in range(2):
            await other.prune(dry_run=False)
        return await read(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(PayloadStore, "read", meanwhile)
    batch = await buffer.sample(2)
    found = {group.id: list(group.episodes) for group in batch.groups}
    assert [found[one] for one in ids[:2]] == expected
    assert await buffer.count(statuses="failed") == 0


async def _pruned_as_if_old(store: Store, folder: Path) -> int:
    """Prune as if the clock of the file system were days behind.

    Returns:
        The number of orphans that were removed.
    """
    for path in found(folder, "*.pack"):
        os.utime(path, (path.stat().st_mtime - 3 * DAY,) * 2)
    return (await store.prune(dry_run=False, min_age=7200.0)).num_orphans


async def test_a_put_whose_pack_was_removed_as_an_orphan(
    url: str, store: Store, buffer: Buffer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the file system is days behind: the pack is removed just before the commit."""
    removed: list[int] = []
    put = Payloads.put

    async def put_then_prune(self: Payloads, *args: Any) -> None:
        await put(self, *args)
        if not removed:
            removed.append(await _pruned_as_if_old(store, folder))

    monkeypatch.setattr(Payloads, "put", put_then_prune)
    async with Store.open(url) as other:
        ids = await (await other.buffer("math")).put(groups(2))
    assert removed == [1]
    assert len(await contents(buffer, ids)) == 2
    assert (await verify(store)).is_sound


async def test_a_compaction_whose_pack_was_removed_as_an_orphan(
    store: Store, buffer: Buffer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await buffer.put(groups(4))
    await buffer.delete(ids[:3])
    removed: list[int] = []
    write = PayloadStore.write

    async def nothing(*_: Any) -> None:
        pass

    async def write_then_prune(self: PayloadStore, *args: Any, **more: Any) -> list[int]:
        offsets = await write(self, *args, **more)
        monkeypatch.setattr(PayloadStore, "write", write)
        with monkeypatch.context() as patch:
            patch.setattr(Pruning, "compact", nothing)  # as if killed before it
            removed.append(await _pruned_as_if_old(store, folder))
        return offsets

    monkeypatch.setattr(PayloadStore, "write", write_then_prune)
    await store.prune(dry_run=False)
    assert removed == [1]
    assert len(await contents(buffer, ids[3:])) == 1
    assert (await verify(store)).is_sound


async def test_rows_of_removed_orphans_are_deleted_later(
    url: str, store: Store, folder: Path, clock: Clock
) -> None:
    await store.buffer("math")
    await stray(url, folder, 1000)
    async with Store.open(url, payload_grace=1e-6):
        pass
    assert await _pruned_as_if_old(store, folder) == 1
    assert (await store.prune(dry_run=False)).num_marked == 0
    assert await number_of(url, pack) == 1
    clock.jump(packs.REMEMBERED_SECONDS + 60.0)
    assert (await store.prune(dry_run=False)).freed_bytes == 0
    assert await number_of(url, pack) == 0


async def test_an_interrupted_removal_of_an_orphan(
    url: str, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run removes it at once."""
    await store.buffer("math")
    await stray(url, folder, 1000)

    async def fail(*_: Any, **__: Any) -> None:
        raise PayloadsUnavailableError("file:///away", "not mounted")

    with monkeypatch.context() as patch:
        patch.setattr(PayloadStore, "remove", fail)
        with pytest.raises(PayloadsUnavailableError):
            await _pruned_as_if_old(store, folder)
    assert await _pruned_as_if_old(store, folder) == 1
    assert not found(folder, "*.pack")
