"""Packs in a folder: errors of the operating system, killed writes and lost mounts."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from replaydb import DatabaseFullError, DatabaseReadOnlyError, PayloadsUnavailableError
from replaydb.packs import PackDamage, PayloadStore, Range
from replaydb.packs import folder as folder_module
from replaydb.packs.protocol import State

from .conftest import STORE, opened, soon

_KILLED = """
import asyncio, os, signal, sys
from replaydb.packs import Instance, PayloadStore

async def main():
    async def instance(end):
        return Instance({"inode": 1})

    payload_store = PayloadStore(sys.argv[1], sys.argv[2], instance)
    await payload_store.claim(asyncio.get_running_loop().time() + 30)
    os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
    loop = asyncio.get_running_loop()
    await payload_store.write(sys.argv[3], [bytes(100_000)], sync=True, end=loop.time() + 30)

asyncio.run(main())
"""


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """The folder of a payload store."""
    async with opened(tmp_path.as_uri()) as payload_store:
        await payload_store.prepare(soon())
    return tmp_path / STORE


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def killed(*args: str) -> int:
    """Return the exit status of a process that is killed while it writes."""
    return subprocess.run([sys.executable, "-c", _KILLED, *args], check=False).returncode


async def test_the_remains_of_a_killed_write_are_not_a_pack(folder: Path) -> None:
    url, pack = folder.parent.as_uri(), uuid4().hex
    assert await asyncio.to_thread(killed, url, STORE, pack) == -9
    assert sorted(file[32:] for file in files(folder) - {"replaydb-store"}) == [".pack.part"]
    async with opened(url) as payload_store:
        (missing,) = await payload_store.read([Range(pack, 0, 1)], end=soon())
        assert isinstance(missing, PackDamage)
        (left,) = [each async for each in payload_store.listed(end=soon())]
        assert (left.name != pack, left.num_bytes) == (True, 100_000)
        await payload_store.remove([left.name], end=soon())
        assert [each async for each in payload_store.listed(end=soon())] == []


async def test_a_file_is_flushed_before_it_is_renamed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def flushed(descriptor: int) -> None:
        done.append(f"flush {Path(os.readlink(f'/proc/self/fd/{descriptor}')).suffix}")
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        done.append(f"rename {path.suffix}")
        return rename(path, target)

    async with opened(folder.parent.as_uri()) as payload_store:
        await payload_store.claim(soon())
        monkeypatch.setattr(os, "fsync", flushed)
        monkeypatch.setattr(Path, "rename", renamed)
        await payload_store.write(uuid4().hex, [b"a"], sync=True, end=soon())
        assert done == ["flush .part", "rename .part", "flush "]
        done.clear()
        await payload_store.write(uuid4().hex, [b"a"], sync=False, end=soon())
        assert done == ["rename .part"]


async def test_short_writes_and_reads_are_completed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writev, preadv = os.writev, os.preadv
    monkeypatch.setattr(os, "writev", lambda fd, views: writev(fd, [views[0][:7]]))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:5]], at))
    async with opened(folder.parent.as_uri()) as payload_store:
        pack, parts = uuid4().hex, [b"abcdefghijk", b"", b"lm", b"n" * 30]
        offsets = await payload_store.write(pack, parts, sync=False, end=soon())
        wanted = [Range(pack, at, len(part)) for at, part in zip(offsets, parts, strict=True)]
        found = await payload_store.read(wanted, end=soon())
        assert list(map(bytes, found)) == parts  # type: ignore[arg-type]


async def test_system_calls_are_limited_in_size(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large ones are slow on Linux. Small parts share calls."""
    writev, sizes = os.writev, list[int]()

    def counted(descriptor: int, views: list[memoryview]) -> int:
        sizes.append(sum(map(len, views)))
        return writev(descriptor, views)

    async with opened(folder.parent.as_uri()) as payload_store:
        await payload_store.claim(soon())
        monkeypatch.setattr(os, "writev", counted)
        pack, parts = uuid4().hex, [os.urandom(3_000_000), *[b"small"] * 100, b"x" * 2_000_000]
        offsets = await payload_store.write(pack, parts, sync=False, end=soon())
        assert max(sizes) == 256 << 10
        assert len(sizes) == 20  # 5,000,500 bytes
        wanted = [Range(pack, at, len(part)) for at, part in zip(offsets, parts, strict=True)]
        found = await payload_store.read(wanted, end=soon())
        assert list(map(bytes, found)) == parts  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, DatabaseFullError),
        (errno.EDQUOT, DatabaseFullError),
        (errno.EROFS, DatabaseReadOnlyError),
        (errno.EACCES, DatabaseReadOnlyError),
        (errno.EIO, PayloadsUnavailableError),
        (errno.ESTALE, PayloadsUnavailableError),
    ],
)
async def test_system_errors_are_typed_and_leave_no_file(
    folder: Path, number: int, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, chunks: object) -> int:
        raise OSError(number, os.strerror(number))

    async with opened(folder.parent.as_uri()) as payload_store:
        with monkeypatch.context() as patched:
            patched.setattr(os, "writev", refuse)
            with pytest.raises(expected) as raised:
                await payload_store.write(uuid4().hex, [b"a"], sync=False, end=soon())
        assert isinstance(raised.value.__cause__, OSError)
        assert files(folder) == {"replaydb-store"}
        await payload_store.write(uuid4().hex, [b"a"], sync=False, end=soon())


async def test_a_failed_write_does_not_remove_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk below the mount point is full. The folder is needed for the next mount."""

    def refuse(descriptor: int, chunks: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with opened(tmp_path.as_uri()) as payload_store:
        await payload_store.prepare(soon())
        await payload_store.claim(soon())
        folder = tmp_path / os.listdir(tmp_path)[0]
        folder.rename(tmp_path / "away")
        folder.mkdir()
        monkeypatch.setattr(os, "writev", refuse)
        with pytest.raises(DatabaseFullError):
            await payload_store.write(uuid4().hex, [b"a"], sync=False, end=soon())
        assert folder.exists()


async def test_a_folder_that_is_not_mounted_is_not_created(tmp_path: Path) -> None:
    away = tmp_path / "mounted" / "replay"
    async with opened(away.as_uri()) as payload_store:
        for call in (
            lambda: payload_store.prepare(soon()),
            lambda: payload_store.check(soon()),
            lambda: payload_store.write(uuid4().hex, [b"a"], sync=True, end=soon()),
            lambda: payload_store.read([Range(uuid4().hex, 0, 1)], end=soon()),
        ):
            with pytest.raises(PayloadsUnavailableError):
                await call()
    assert not away.parent.exists()


async def test_only_the_last_folder_of_the_url_is_created(tmp_path: Path) -> None:
    new, file = tmp_path / "new", tmp_path / "file"
    async with opened(new.as_uri()) as payload_store:
        await payload_store.prepare(soon())
        await payload_store.check(soon())
    assert files(new / STORE) == {"replaydb-store"}
    file.touch()
    for url, reason in (
        ((tmp_path / "a" / "b").as_uri(), f"{tmp_path / 'a'} does not exist: create or mount"),
        (file.as_uri(), "this path, or one above it, is a file"),
        ((file / "below").as_uri(), "this path, or one above it, is a file"),
    ):
        async with opened(url) as payload_store:
            with pytest.raises(PayloadsUnavailableError, match=reason):
                await payload_store.prepare(soon())
    assert files(tmp_path) == {"new", "file"}


async def test_a_folder_that_is_remounted_before_the_marker_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder was not mounted when the pack was read, but is when the marker is read."""
    away = folder.with_name("away")
    os.rename(folder, away)
    check = PayloadStore.check

    async def mounted(payload_store: PayloadStore, end: float) -> None:
        os.rename(away, folder)
        await check(payload_store, end)

    monkeypatch.setattr(PayloadStore, "check", mounted)
    async with opened(folder.parent.as_uri()) as payload_store:
        with pytest.raises(PayloadsUnavailableError):
            await payload_store.read([Range(uuid4().hex, 0, 1)], end=soon())


async def test_a_folder_that_is_remounted_during_the_proof_of_a_write(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pack was written below the mount point. The marker is in the mounted folder."""
    away = folder.with_name("away")
    state = folder_module._state

    def mounted(*args: Any) -> State | None:
        found = state(*args)
        if away.exists():
            folder.rename(folder.with_name("below"))
            away.rename(folder)
        return found

    async with opened(folder.parent.as_uri()) as payload_store:
        await payload_store.claim(soon())
        os.rename(folder, away)
        os.mkdir(folder)
        monkeypatch.setattr(folder_module, "_state", mounted)
        with pytest.raises(PayloadsUnavailableError, match="beside the marker"):
            await payload_store.write(payload_store.new_name(), [b"a"], sync=False, end=soon())


@pytest.mark.parametrize("least", [1, 4_000_000], ids=["several threads", "one thread"])
async def test_a_pack_that_is_truncated_or_removed_during_a_read(
    folder: Path, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replaydb.packs.folder._LEAST_BYTES", least)
    async with opened(folder.parent.as_uri()) as payload_store:
        cut, gone = uuid4().hex, uuid4().hex
        for pack in (cut, gone):
            await payload_store.write(pack, [b"a" * 1000], sync=False, end=soon())
        prepared = type(payload_store._objects)._prepared  # type: ignore[attr-defined]

        def meanwhile(*args: object) -> object:
            answer = prepared(*args)
            os.truncate(folder / f"{cut}.pack", 10)
            (folder / f"{gone}.pack").unlink(missing_ok=True)
            return answer

        monkeypatch.setattr(type(payload_store._objects), "_prepared", meanwhile)
        found = await payload_store.read([Range(cut, 0, 1000), Range(gone, 0, 1000)], end=soon())
        assert found == [
            PackDamage(f"pack {cut} ends at byte 10, before byte 1000"),
            PackDamage(f"pack {gone} is missing"),
        ]


async def test_a_stalled_file_system_does_not_block_the_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken = threading.Event()
    writev = os.writev
    monkeypatch.setattr(os, "writev", lambda *args: (woken.wait(30), writev(*args))[1])
    async with opened(folder.parent.as_uri()) as payload_store:
        with pytest.raises(PayloadsUnavailableError, match="no answer in time"):
            await payload_store.write(uuid4().hex, [b"a"], sync=False, end=soon(0.1))
        woken.set()
