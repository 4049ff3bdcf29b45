"""Copies of a database refer to the same payloads: only their owner may put and prune.

`test_failover.py` has the standbys and copied servers.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

import replaydb as rdb
from replaydb import PayloadsReadOnlyError, PayloadsUnavailableError, Store
from replaydb.database import payloads as outside
from replaydb.database.postgresql.administration import PostgresqlAdministration
from replaydb.database.pruning import Pruning
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import end_in
from replaydb.database.sqlite.file import DatabaseFile
from replaydb.operations import examine, verify
from replaydb.packs import Instance
from support.buckets import Endpoint
from support.connections import transaction
from support.engines import postgresql_nightly
from support.groups import episode, group, groups
from support.invariants import check_invariants
from support.postgres import PostgresServer


def _copy_and_remove(old: Path, new: Path) -> Path:
    shutil.copy(old, new)
    old.unlink()
    return new


def _write_into(old: Path, new: Path) -> Path:
    old.write_bytes(old.read_bytes())
    return old


#: How a file is moved, copied or restored, with whether the result is the same file.
WAYS: dict[str, tuple[Callable[[Path, Path], Path], bool]] = {
    "moved on one disk": (Path.rename, True),
    "moved to another disk": (_copy_and_remove, False),
    "copied": (lambda old, new: Path(shutil.copy(old, new)), False),
    "restored by a rename": (lambda old, new: Path(shutil.copy(old, new)).replace(old), False),
    "restored into the same file": (_write_into, True),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the payloads."""
    return tmp_path / "payloads"


@pytest.fixture
async def original(own_url: str, folder: Path) -> str:
    """A closed store with three groups, whose payloads are in the folder."""
    async with Store.open(own_url, payloads=folder.as_uri()) as store:
        await (await store.buffer("math")).put(groups(3))
    return own_url


@pytest.fixture
def copied(original: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A copy of that database: a copied file, or another database with the same rows."""
    if original.startswith("sqlite"):
        return f"sqlite:///{shutil.copy(tmp_path / 'replay.db', tmp_path / 'copy.db')}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.create_database("copy", original)


async def check_writes(url: str, uid: str) -> None:
    """Check that a store reads, puts and prunes."""
    async with Store.open(url) as store:
        buffer = await store.buffer("math")
        await buffer.put(group(uid))
        await store.prune(dry_run=False)
        ids = [info.id for info in await buffer.find()]
        assert len(await buffer.get(ids)) == len(ids) >= 4
    await check_invariants(url)


async def check_only_reads(url: str) -> None:
    """Check that a store reads, and that it neither writes nor removes a file."""
    async with Store.open(url) as store:
        buffer = await store.buffer("math")
        await buffer.open_group("math", "open", 2)
        num_groups = await buffer.count()
        payload_store = await store._payloads._located(asyncio.get_running_loop().time() + 30)
        files = [one.name async for one in payload_store.listed(end=1e9)]
        for call in (
            buffer.put(group("refused")),
            buffer.add_episode("open", episode(1.0)),
            store.prune(dry_run=False),
            Pruning(
                store._database, payload_store, end_in(60.0), rdb.PruneReport(False)
            ).remove_marked(),
        ):
            with pytest.raises(PayloadsReadOnlyError, match="replaydb db adopt-payloads") as raised:
                await call
            assert raised.value.url == payload_store.url
            assert raised.value.owner != raised.value.actual
        assert files == [one.name async for one in payload_store.listed(end=1e9)]
        assert await buffer.count() == num_groups
        await buffer.delete(uids="open")
        assert len(await buffer.sample(3)) == 3
        assert (await verify(store)).is_sound
        assert "replaydb db adopt-payloads" in ((await store.prune()).refused or "")


async def test_a_copy_only_reads_until_it_adopts_the_payloads(original: str, copied: str) -> None:
    await check_only_reads(copied)
    async with Store.open(original) as store:
        buffer = await store.buffer("math")
        await buffer.put(group("original"))
        async with Store.open(copied) as other:
            await other.adopt_payloads()
            await other.adopt_payloads()
        with pytest.raises(PayloadsReadOnlyError):  # by the next put of an open store
            await buffer.put(group("refused"))
        with pytest.raises(PayloadsReadOnlyError):
            await buffer.put(group("refused"))
        assert len(await buffer.sample(4)) == 4
        await check_writes(copied, "copy")
        await check_only_reads(original)
        await store.adopt_payloads()
        await buffer.put(group("again"))
    await check_only_reads(copied)


@postgresql_nightly
async def test_a_copy_with_its_own_payloads(original: str, copied: str, folder: Path) -> None:
    """The marker was copied as well, and names the original."""
    own = shutil.copytree(folder, folder.with_name("own"))
    async with Store.open(copied) as store:
        await store.relocate_payloads(own.as_uri())
        with pytest.raises(PayloadsReadOnlyError):
            await (await store.buffer("math")).put(group("refused"))
        await store.adopt_payloads()
    for url in (original, copied):
        await check_writes(url, "own")


@postgresql_nightly
async def test_moved_payloads(original: str, folder: Path) -> None:
    shutil.move(folder, folder.with_name("moved"))
    async with Store.open(original) as store:
        await store.relocate_payloads(folder.with_name("moved").as_uri())
    await check_writes(original, "new")


@pytest.mark.parametrize(("move", "is_same"), WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("engine_name", ["sqlite"])
async def test_files(
    original: str, tmp_path: Path, move: Callable[[Path, Path], Path], is_same: bool
) -> None:
    url = f"sqlite:///{move(tmp_path / 'replay.db', tmp_path / 'new.db')}"
    if not is_same:
        await check_only_reads(url)
        async with Store.open(url) as store:
            await store.adopt_payloads()
    await check_writes(url, "new")


@pytest.mark.parametrize("engine_name", ["sqlite"])
async def test_a_file_after_vacuum(original: str, tmp_path: Path) -> None:
    await rdb.operations.vacuum(original)
    await check_writes(original, "new")
    with closing(sqlite3.connect(tmp_path / "replay.db")) as connection:
        connection.execute("VACUUM INTO ?", [str(tmp_path / "into.db")])
    await check_only_reads(f"sqlite:///{tmp_path / 'into.db'}")


@pytest.mark.parametrize("engine_name", ["sqlite"])
async def test_a_file_that_is_mounted_elsewhere(
    original: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reboot, or in another container, the file has another device number and path."""
    status = DatabaseFile.status

    def remounted(file: DatabaseFile) -> os.stat_result:
        found = status(file)
        times = {name: getattr(found, name) for name in ("st_mtime_ns", "st_ctime_ns")}
        mode, inode, device, *others = found
        return os.stat_result([mode, inode, device + 1, *others], times)

    monkeypatch.setattr(DatabaseFile, "status", remounted)
    (tmp_path / "mount").symlink_to(tmp_path)
    await check_writes(f"sqlite:///{tmp_path}/mount/replay.db", "new")


def test_an_inode_that_is_used_again(tmp_path: Path) -> None:
    """Ext4 gives the inode of a deleted file to the next new file."""
    path, found = tmp_path / "replay.db", []
    for _ in range(2):
        path.write_bytes(b"a")
        found.append(DatabaseFile(path, read_only=False).instance())
        path.unlink()
    old, new = found
    assert old.facts.keys() == {"inode", "birth"}
    assert replace(new, facts={**new.facts, "inode": old.facts["inode"]}).relation(old) == "other"
    assert new.relation(old) == "other"


@pytest.mark.parametrize("missing", [AttributeError, OSError])
async def test_a_system_without_times_of_birth(
    sqlite_url: str, folder: Path, missing: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Facts are compared that both the marker and the database have."""

    def fail(name: object) -> None:
        raise missing

    for is_missing in (True, False):
        with monkeypatch.context() as patched:
            if is_missing:
                patched.setattr("ctypes.CDLL", fail)
            async with Store.open(sqlite_url, payloads=folder.as_uri()) as store:
                await (await store.buffer("math")).put(group())
                instance = await store._database.read(
                    store._database.backend.administration.instance
                )
                assert ("birth" in instance.facts) != is_missing


def only(folder: Path, name: str) -> Path:
    """Return the only file of this name in the payload store."""
    (found,) = folder.glob(f"*/{name}")
    return found


def set_owner(folder: Path, line: bytes) -> None:
    """Replace the second line of the marker."""
    marker = only(folder, "replaydb-store")
    marker.write_bytes(marker.read_bytes().splitlines(keepends=True)[0] + line)


@postgresql_nightly
async def test_a_marker_without_an_owner(original: str, copied: str, folder: Path) -> None:
    """Earlier versions wrote no owner. The first instance that writes becomes the owner."""
    set_owner(folder, b"")
    await check_writes(copied, "first")
    await check_only_reads(original)


async def test_a_lost_marker_is_restored(original: str, folder: Path) -> None:
    """If its packs are there; otherwise the folder may be that of something else."""
    marker, pack = (only(folder, name) for name in ("replaydb-store", "*.pack"))
    for damage, state in (
        (marker.unlink, "missing"),
        (lambda: marker.write_bytes(b""), "damaged"),
        (lambda: marker.write_bytes(marker.read_bytes()[:100]), "damaged"),  # in the owner
    ):
        damage()
        (finding,) = [one for one in await examine(original) if one.subject == "payload store"]
        assert finding.level == "bad"
        assert "replaydb db adopt-payloads" in (finding.fix or "")
        async with Store.open(original) as store:
            buffer = await store.buffer("math")
            for call in (
                buffer.put(group("refused")),
                store.relocate_payloads(folder.as_uri()),
                verify(store),
            ):
                with pytest.raises(PayloadsUnavailableError, match=f"replaydb-store is {state}"):
                    await call
            assert len(await buffer.peek(3)) == 3  # reads need no marker
            hidden = pack.rename(pack.with_suffix(".hidden"))
            with pytest.raises(PayloadsUnavailableError, match="1 packs of this database"):
                await store.adopt_payloads()
            hidden.rename(pack)
            await store.adopt_payloads()
    await check_writes(original, "new")


@postgresql_nightly
async def test_the_marker_of_another_store(original: str, folder: Path) -> None:
    marker = only(folder, "replaydb-store")
    marker.write_bytes(marker.read_bytes().replace(marker.parent.name.encode(), b"0" * 32))
    async with Store.open(original) as store:
        with pytest.raises(PayloadsUnavailableError, match="belongs to another store"):
            await verify(store)
        assert len(await (await store.buffer("math")).sample(3)) == 3


@postgresql_nightly
async def test_a_bucket(own_url: str, tmp_path: Path, endpoint: Endpoint) -> None:
    async with Store.open(own_url, payloads=endpoint.url) as store:
        buffer = await store.buffer("math")
        await buffer.put(groups(3))
        payload_store = store._payloads._payload_store
        assert payload_store is not None
        payload_store._read_instance = _another
        endpoint.requests.clear()
        await buffer.put(group("not read again"))
        assert [request.kind for request in endpoint.requests] == ["PUT", "LIST"]
        with pytest.raises(PayloadsReadOnlyError):
            await store.prune(dry_run=False)
        await store.adopt_payloads()
        await buffer.put(group("another"))
    async with Store.open(own_url) as store:
        with pytest.raises(PayloadsReadOnlyError):
            await (await store.buffer("math")).put(group("refused"))


async def _another(_: float) -> Instance:
    return Instance({"inode": 1, "database": 1})


@postgresql_nightly
async def test_doctor(original: str, copied: str) -> None:
    for url, level in ((original, "good"), (copied, "warning")):
        (finding,) = [one for one in await examine(url) if one.subject == "payload store"]
        assert finding.level == level
    assert finding.fix == "replaydb db adopt-payloads"


@pytest.mark.parametrize("engine_name", ["postgresql"])
async def test_timelines(original: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A promoted standby takes over; the server that it replaced is refused."""
    timeline = 1
    read = PostgresqlAdministration.instance

    def on_timeline(it: PostgresqlAdministration, session: Session) -> Instance:
        return replace(read(it, session), timeline=timeline)

    monkeypatch.setattr(PostgresqlAdministration, "instance", on_timeline)
    async with Store.open(original) as old:
        buffer = await old.buffer("math")
        await buffer.put(group("old"))
        timeline = 2
        async with Store.open(original) as new:
            await (await new.buffer("math")).put(group("new"))
        await buffer.put(group("connected to the new server"))
        timeline = 1
        async with Store.open(original) as stale:
            with pytest.raises(PayloadsReadOnlyError, match=r"timeline 2.*timeline 1"):
                await (await stale.buffer("math")).put(group("refused"))
            await stale.adopt_payloads()
            await (await stale.buffer("math")).put(group("adopted"))
        timeline = 2  # has written before, so it does not take over again by itself
        with pytest.raises(PayloadsReadOnlyError, match=r"timeline 1.*timeline 2"):
            await buffer.put(group("refused"))
        timeline = 3
        monkeypatch.setattr(outside, "TIDY_SECONDS", -1.0)
        await buffer.put(group("promoted"))
        timeline = 4
        await old._payloads._tidy()  # takes over without a put
        timeline = 3
        with pytest.raises(PayloadsReadOnlyError):
            await old.prune(dry_run=False)
    timeline = 4
    await check_writes(original, "last")


@pytest.mark.parametrize("engine_name", ["postgresql"])
async def test_facts_that_a_user_may_not_read(own_url: str, folder: Path) -> None:
    """Any role may read them, unless the administrator of the server has restricted that."""
    facts: list[Any] = []
    for function in ("", "pg_control_system()", "pg_walfile_name(pg_lsn)"):
        if function:
            async with transaction(own_url) as connection:
                await connection.execute(text(f"REVOKE EXECUTE ON FUNCTION {function} FROM PUBLIC"))
        async with Store.open(own_url, payloads=folder.as_uri()) as store:
            facts.append(await store._database.read(_as_ordinary_role))
    full, without_system, without_timeline = facts
    assert full.facts.keys() == {"system", "database"}
    assert full.timeline > 0
    assert without_system == replace(full, facts={"database": full.facts["database"]})
    assert without_timeline == replace(without_system, timeline=0)
    assert {one.relation(other) for one in facts for other in facts} == {"same"}


def _as_ordinary_role(session: Session) -> Instance:
    session.core.execute(text("SET LOCAL ROLE pg_signal_backend"))
    return PostgresqlAdministration.instance(None, session)  # type: ignore[arg-type]
