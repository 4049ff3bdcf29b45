"""Packs in a folder: what the system refuses, and what kills leave behind."""

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
from replaydb.packs import PackDamage, Place, Range
from replaydb.packs import folder as folder_module

from .conftest import STORE, opened, soon

_KILLED = """
import asyncio, os, signal, sys
from replaydb.packs import Place

async def main():
    place = Place.at(sys.argv[1], sys.argv[2])
    os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
    loop = asyncio.get_running_loop()
    await place.write(sys.argv[3], [bytes(100_000)], sync=True, end=loop.time() + 30)

asyncio.run(main())
"""


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """A folder that is a place."""
    async with opened(tmp_path.as_uri()) as place:
        await place.prepare(soon())
    return tmp_path / STORE


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def killed(*args: str) -> int:
    """How a process ended that was killed while it wrote."""
    return subprocess.run([sys.executable, "-c", _KILLED, *args], check=False).returncode


async def test_what_a_kill_leaves_is_no_pack(folder: Path) -> None:
    url, pack = folder.parent.as_uri(), uuid4().hex
    assert await asyncio.to_thread(killed, url, STORE, pack) == -9
    assert sorted(file[32:] for file in files(folder) - {"replaydb-store"}) == [".pack.part"]
    async with opened(url) as place:
        (missing,) = await place.read([Range(pack, 0, 1)], end=soon())
        assert isinstance(missing, PackDamage)
        (left,) = [each async for each in place.listed(end=soon())]
        assert (left.name != pack, left.num_bytes) == (True, 100_000)
        await place.remove([left.name], end=soon())
        assert [each async for each in place.listed(end=soon())] == []


async def test_a_write_is_flushed_before_it_has_its_name(
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

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "rename", renamed)
    async with opened(folder.parent.as_uri()) as place:
        await place.write(uuid4().hex, [b"a"], sync=True, end=soon())
        assert done == ["flush .part", "rename .part", "flush "]
        done.clear()
        await place.write(uuid4().hex, [b"a"], sync=False, end=soon())
        assert done == ["rename .part"]


async def test_the_system_may_take_less_than_it_is_given(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writev, preadv = os.writev, os.preadv
    monkeypatch.setattr(os, "writev", lambda fd, views: writev(fd, [views[0][:7]]))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:5]], at))
    async with opened(folder.parent.as_uri()) as place:
        pack, parts = uuid4().hex, [b"abcdefghijk", b"", b"lm", b"n" * 30]
        offsets = await place.write(pack, parts, sync=False, end=soon())
        wanted = [Range(pack, at, len(part)) for at, part in zip(offsets, parts, strict=True)]
        assert list(map(bytes, await place.read(wanted, end=soon()))) == parts  # type: ignore[arg-type]


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
async def test_what_the_system_refuses_is_typed_and_leaves_nothing(
    folder: Path, number: int, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, pieces: object) -> int:
        raise OSError(number, os.strerror(number))

    async with opened(folder.parent.as_uri()) as place:
        with monkeypatch.context() as patched:
            patched.setattr(os, "writev", refuse)
            with pytest.raises(expected) as raised:
                await place.write(uuid4().hex, [b"a"], sync=False, end=soon())
        assert isinstance(raised.value.__cause__, OSError)
        assert files(folder) == {"replaydb-store"}
        await place.write(uuid4().hex, [b"a"], sync=False, end=soon())


async def test_a_folder_whose_mount_is_gone_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nothing can be written to it: it is where the mount comes back."""

    def refuse(descriptor: int, pieces: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with opened(tmp_path.as_uri()) as place:
        await place.prepare(soon())
        folder = tmp_path / os.listdir(tmp_path)[0]
        folder.rename(tmp_path / "away")
        folder.mkdir()
        monkeypatch.setattr(os, "writev", refuse)
        with pytest.raises(DatabaseFullError):
            await place.write(uuid4().hex, [b"a"], sync=False, end=soon())
        assert folder.exists()


async def test_a_folder_that_is_not_mounted_is_not_made(tmp_path: Path) -> None:
    away = tmp_path / "mounted" / "replay"
    async with opened(away.as_uri()) as place:
        for call in (
            lambda: place.prepare(soon()),
            lambda: place.check(soon()),
            lambda: place.write(uuid4().hex, [b"a"], sync=True, end=soon()),
            lambda: place.read([Range(uuid4().hex, 0, 1)], end=soon()),
        ):
            with pytest.raises(PayloadsUnavailableError):
                await call()
    assert not away.parent.exists()


async def test_a_folder_is_created_below_one_that_exists(tmp_path: Path) -> None:
    new, file = tmp_path / "new", tmp_path / "file"
    async with opened(new.as_uri()) as place:
        await place.prepare(soon())
        await place.check(soon())
    assert files(new / STORE) == {"replaydb-store"}
    file.touch()
    for url, reason in (
        ((tmp_path / "a" / "b").as_uri(), f"{tmp_path / 'a'} does not exist: create or mount"),
        (file.as_uri(), "a file of this name"),
        ((file / "below").as_uri(), "a file of this name, or above"),
    ):
        async with opened(url) as place:
            with pytest.raises(PayloadsUnavailableError, match=reason):
                await place.prepare(soon())
    assert files(tmp_path) == {"new", "file"}


async def test_a_folder_that_is_mounted_again_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marker is there when it is asked for; when the pack was looked for, nothing was."""
    away = folder.with_name("away")
    os.rename(folder, away)
    check = Place.check

    async def mounted(place: Place, end: float) -> None:
        os.rename(away, folder)
        await check(place, end)

    monkeypatch.setattr(Place, "check", mounted)
    async with opened(folder.parent.as_uri()) as place:
        with pytest.raises(PayloadsUnavailableError):
            await place.read([Range(uuid4().hex, 0, 1)], end=soon())


async def test_a_folder_that_is_mounted_again_during_the_proof(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pack is in the folder below the mount, and the marker in the one that was mounted."""
    away = folder.with_name("away")
    size = folder_module._size

    def mounted(*args: Any) -> int | None:
        found = size(*args)
        if away.exists():
            folder.rename(folder.with_name("below"))
            away.rename(folder)
        return found

    async with opened(folder.parent.as_uri()) as place:
        os.rename(folder, away)
        os.mkdir(folder)
        monkeypatch.setattr(folder_module, "_size", mounted)
        with pytest.raises(PayloadsUnavailableError, match="beside the marker"):
            await place.write(place.new_name(), [b"a"], sync=False, end=soon())


@pytest.mark.parametrize("least", [1, 4_000_000], ids=["several threads", "one thread"])
async def test_a_pack_that_shrinks_while_it_is_read(
    folder: Path, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replaydb.packs.folder._LEAST_BYTES", least)
    async with opened(folder.parent.as_uri()) as place:
        cut, gone = uuid4().hex, uuid4().hex
        for pack in (cut, gone):
            await place.write(pack, [b"a" * 1000], sync=False, end=soon())
        prepared = type(place._objects)._prepared  # type: ignore[attr-defined]

        def meanwhile(*args: object) -> object:
            answer = prepared(*args)
            os.truncate(folder / f"{cut}.pack", 10)
            (folder / f"{gone}.pack").unlink(missing_ok=True)
            return answer

        monkeypatch.setattr(type(place._objects), "_prepared", meanwhile)
        found = await place.read([Range(cut, 0, 1000), Range(gone, 0, 1000)], end=soon())
        assert found == [
            PackDamage(f"pack {cut} ends at byte 10, before byte 1000"),
            PackDamage(f"pack {gone} is missing"),
        ]


async def test_a_file_system_that_hangs_holds_nobody_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken = threading.Event()
    writev = os.writev
    monkeypatch.setattr(os, "writev", lambda *args: (woken.wait(30), writev(*args))[1])
    async with opened(folder.parent.as_uri()) as place:
        with pytest.raises(PayloadsUnavailableError, match="no answer in time"):
            await place.write(uuid4().hex, [b"a"], sync=False, end=soon(0.1))
        woken.set()
