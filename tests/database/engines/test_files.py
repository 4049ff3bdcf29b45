"""SQLite files that are missing, are not databases, or are deleted while they are open."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

import replaydb as rdb
from replaydb import Store, operations
from replaydb.database.engines import backend_for
from replaydb.database.sqlite.backend import SqliteBackend
from replaydb.database.sqlite.file import DatabaseFile
from replaydb.database.sqlite.session import SqliteSession
from support.groups import group
from support.users import without_root


def path_of(url: str) -> Path:
    return Path(make_url(url).database or "")


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize(
    ("name", "message"),
    [("nowhere/replay.db", "there is no such folder"), ("folder", "it is not a file"),
     ("pipe", "it is not a file"), ("replay.db/replay.db", "there is no such folder")],
)  # fmt: skip
async def test_paths_that_cannot_be_opened(sqlite_url: str, name: str, message: str) -> None:
    folder = path_of(sqlite_url).parent
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    before = files_in(folder)
    for migrate in (None, True):
        with pytest.raises(rdb.DatabaseUnavailableError) as caught:
            await Store.open(f"sqlite:///{folder / name}", migrate=migrate)
        assert str(caught.value) == f"{folder / name}: {message}"
    assert files_in(folder) == before


@pytest.mark.parametrize(
    "name", ["a" * 300, f"{'a' * 300}/replay.db", "loop", "loop/replay.db", "a" * 252]
)
async def test_a_path_that_the_system_refuses(sqlite_url: str, name: str) -> None:
    folder = path_of(sqlite_url).parent
    (folder / "loop").symlink_to(folder / "loop")
    url = f"sqlite:///{folder / name}"
    for opening in (
        Store.open(url, read_only=True),
        operations.vacuum(url),
        Store.open(url),
        Store.open(url, migrate=True),
        operations.copy(sqlite_url, url),
    ):
        with pytest.raises(rdb.DatabaseUnavailableError) as caught:
            await opening
        assert str(folder) in str(caught.value)


async def test_a_folder_that_may_not_be_entered() -> None:
    with tempfile.TemporaryDirectory(prefix="replaydb-closed-") as name:  # not below pytest's
        os.mkdir(f"{name}/closed", mode=0o000)
        with (
            without_root(),
            pytest.raises(rdb.DatabaseUnavailableError, match="Permission denied"),
        ):
            await Store.open(f"sqlite:///{name}/closed/replay.db")


#: Opens a store with little memory left, and prints the outcome.
_SHORT_OF_MEMORY = """
import asyncio, os, resource, sys
import alembic.command, replaydb
from pathlib import Path
import replaydb.buffer, replaydb.database.postgresql.backend, replaydb.database.sqlite.backend

async def open_with(spare):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + spare
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        store = await replaydb.Store.open(sys.argv[1], migrate=True)
    except replaydb.DatabaseUnavailableError as error:
        assert error.__cause__ is not None
        outcome = "refused"
    else:
        outcome = "opened"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if outcome == "opened":
        await store.close()
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    assert not [link for link in links if "mem.db" in os.path.realpath(link)]
    return outcome

for spare in (0, 1 << 18, 1 << 21, 5 << 20, 9 << 20, 12 << 20, 17 << 20, 19 << 20, 21 << 20):
    print(asyncio.run(open_with(spare)))
print(asyncio.run(open_with(1 << 33)))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("engine", ["sqlite", "postgresql"])
async def test_an_opening_without_enough_memory(
    engine: str, tmp_path: Path, empty_postgresql_url: str
) -> None:
    url = f"sqlite:///{tmp_path / 'mem.db'}" if engine == "sqlite" else empty_postgresql_url
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _SHORT_OF_MEMORY, url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    outcome, problem = await process.communicate()
    assert process.returncode == 0, problem.decode()
    first, *_, last = outcome.decode().split()
    assert (first, last) == ("refused", "opened")  # failed openings have no effect on later ones


async def test_a_disk_that_is_full_at_open(
    empty_sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = "PRAGMA max_page_count = 4"
    with monkeypatch.context() as patch:
        given = SqliteBackend.pragmas
        patch.setattr(SqliteBackend, "pragmas", lambda self, *more: [*given(self, *more), full])
        with pytest.raises(rdb.DatabaseFullError, match="SQLITE_FULL") as caught:
            await Store.open(empty_sqlite_url)
        assert "\n" not in str(caught.value)
    async with Store.open(empty_sqlite_url) as store:  # once there is space
        await (await store.buffer("math")).put(group())


def test_no_space_for_the_shm_file(sqlite_url: str) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorname = "SQLITE_IOERR_SHMSIZE"
    assert isinstance(backend_for(sqlite_url).errors.typed(error), rdb.DatabaseFullError)


def delete(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    shutil.copy(path, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


def move(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("happens", "message"),
    [(delete, "it was deleted"), (replace, "replaced by another file"), (move, "it was deleted")],
)
async def test_a_file_deleted_or_replaced_while_open_is_detected(
    sqlite_url: str, tmp_path: Path, happens: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / "data" / "replay.db"
    path.parent.mkdir()
    shutil.copy(path_of(sqlite_url), path)
    async with Store.open(f"sqlite:///{path}", run="a") as store:
        buffer = await store.buffer("math")
        await buffer.put([group(), group()])
        await buffer.sample(1)
        happens(path)
        before = files_in(tmp_path)
        for call in (
            lambda: buffer.put(group()),
            lambda: buffer.sample(1),
            lambda: buffer.sample(5, timeout=20),
            lambda: buffer.count(),
            lambda: buffer.advance_policy(1),
        ):
            with pytest.raises(rdb.DatabaseUnavailableError, match=message):
                await call()
        assert files_in(tmp_path) == before  # no new, empty database


async def test_a_file_replaced_before_the_commit_is_detected(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Store.open(sqlite_url, run="a") as store:
        buffer = await store.buffer("math")
        await buffer.put(group())
        identify = SqliteSession.identify

        def meanwhile(*arguments: Any, **named: Any) -> Any:
            replace(path_of(sqlite_url))
            return identify(*arguments, **named)

        monkeypatch.setattr(SqliteSession, "identify", meanwhile)
        with pytest.raises(rdb.DatabaseUnavailableError, match="replaced"):
            await buffer.put(group())


async def test_a_waiting_draw_detects_a_deleted_file(sqlite_url: str) -> None:
    async with Store.open(sqlite_url, run="a") as store:
        buffer = await store.buffer("math")
        asyncio.get_running_loop().call_later(0.05, path_of(sqlite_url).unlink)
        with pytest.raises(rdb.DatabaseUnavailableError, match="deleted"):
            await buffer.sample(1, timeout=30)


async def test_a_change_of_the_current_folder(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = path_of(sqlite_url)
    monkeypatch.chdir(path.parent)
    async with Store.open(f"sqlite:///{path.name}", run="a") as store:
        buffer = await store.buffer("math")
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        await buffer.put(group())
        assert len(await buffer.sample(1)) == 1


def test_processes_that_create_one_file_wait_for_each_other(sqlite_url: str) -> None:
    """SQLite itself returns SQLITE_BUSY at once if two connections turn on WAL."""
    folder, together = path_of(sqlite_url).parent, threading.Barrier(4)
    pragmas = ["PRAGMA page_size = 16384", "PRAGMA journal_mode = WAL"]

    def create(_: int) -> None:
        for number in range(200):
            file = DatabaseFile(folder / f"{number}.db", read_only=False)
            together.wait(60)
            file.connect(pragmas, timeout=30, create=True).close()

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(create, range(4))) == [None] * 4
