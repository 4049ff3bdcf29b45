"""Stores that are opened with `read_only=True`."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import func, make_url, select

import replaydb as rdb
from replaydb import Store, blocking
from support.groups import group, groups
from support.other_process import other_process
from support.users import without_root


async def fill(url: str) -> None:
    async with Store.open(url, run="a") as store:
        await (await store.buffer("math")).put(groups(3))


async def test_reads_work_and_writes_are_refused(url: str) -> None:
    await fill(url)
    async with Store.open(url, read_only=True) as store:
        buffer = await store.buffer("math")
        with patch.object(store._database.writer, "write") as write:
            for call in (
                lambda: buffer.put(group()),
                lambda: buffer.sample(1),
                lambda: buffer.sample(9, timeout=60),
                lambda: buffer.delete([1]),
                lambda: buffer.advance_policy(1),
                lambda: store.buffer("math", max_staleness=2),
                lambda: store.buffer("other"),
            ):
                with pytest.raises(rdb.DatabaseReadOnlyError, match="read_only=True"):
                    await call()
            write.assert_not_called()  # nothing was sent
        assert await buffer.count() == 3
        assert [one.group_uid for one in await buffer.get([1])] == ["gsm8k-0"]
        assert [info.name for info in await store.buffers()] == ["math"]


async def test_puts_of_other_stores_are_seen(url: str) -> None:
    await fill(url)
    async with Store.open(url, read_only=True) as store, Store.open(url, run="b") as other:
        buffer = await store.buffer("math")
        await (await other.buffer("math")).put(group())
        assert await buffer.count() == 4


@pytest.mark.parametrize("read_only", [True, False])
async def test_a_read_only_store_uses_one_core(postgresql_url: str, read_only: bool) -> None:
    """A query then uses no parallel workers."""
    await fill(postgresql_url)
    name = "max_parallel_workers_per_gather"
    async with Store.open(postgresql_url, read_only=read_only) as store:
        [(workers,)] = await store._database.read(
            lambda session: session.run(select(func.current_setting(name)))
        )
    assert (workers == "0") is read_only


def test_a_read_only_blocking_store(sqlite_url: str) -> None:
    with blocking.Store.open(sqlite_url) as store:
        store.buffer("math").put(group())
    with blocking.Store.open(sqlite_url, read_only=True) as store:
        assert store.buffer("math").count() == 1
        with pytest.raises(rdb.DatabaseReadOnlyError):
            store.buffer("math").put(group())


@pytest.mark.parametrize(
    ("arguments", "field"),
    [({"run": "a"}, "read_only"), ({"lineage": "a"}, "read_only"),
     ({"run_metadata": {}}, "read_only"), ({"migrate": True}, "migrate")],
)  # fmt: skip
def test_arguments_that_would_write_are_refused(
    sqlite_url: str, arguments: dict[str, Any], field: str
) -> None:
    with pytest.raises(rdb.InvalidInputError) as caught:
        Store.open(sqlite_url, read_only=True, **arguments)
    assert caught.value.field == field


async def test_a_missing_database_is_not_created(empty_url: str, engine_name: str) -> None:
    expected = {
        "sqlite": rdb.DatabaseUnavailableError,  # no file
        "postgresql": rdb.SchemaOutOfDateError,  # a database without tables
    }[engine_name]
    with pytest.raises(expected):
        await Store.open(empty_url, read_only=True)
    assert not _exists(empty_url)


def _exists(url: str) -> bool:
    return url.startswith("sqlite") and os.path.exists(make_url(url).database or "")


@pytest.fixture
def closed_folder(sqlite_url: str) -> Iterator[Path]:
    """A folder that is not writable without root, with a database of three groups."""
    asyncio.run(fill(sqlite_url))
    with tempfile.TemporaryDirectory(prefix="replaydb-closed-") as name:
        folder = Path(name)
        shutil.copy(make_url(sqlite_url).database or "", folder / "replay.db")
        (folder / "replay.db").chmod(0o444)
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)


async def test_a_folder_that_cannot_be_written(closed_folder: Path) -> None:
    with without_root():
        async with Store.open(f"sqlite:///{closed_folder}/replay.db", read_only=True) as store:
            buffer = await store.buffer("math")
            assert await buffer.count() == 3
            assert [len(one.episodes) for one in await buffer.get([1, 2])] == [2, 2]
    assert os.listdir(closed_folder) == ["replay.db"]


async def test_a_reader_follows_a_writer_that_begins_later(closed_folder: Path) -> None:
    """All connections reopen a file that was read as immutable, during and after the writes."""
    url = f"sqlite:///{closed_folder}/replay.db"
    with without_root():
        store = await Store.open(url, read_only=True)
        buffer = await store.buffer("math")
        assert await asyncio.gather(*(buffer.leases() for _ in range(3))) == [[]] * 3
    os.chmod(closed_folder, 0o755)  # noqa: S103 - for its owner, which need not be root
    os.chmod(closed_folder / "replay.db", 0o644)
    async with other_process("ack", url, "math") as other:
        with without_root():
            leases = await asyncio.gather(*(buffer.leases() for _ in range(3)))
            assert [len(one) for one in leases] == [1] * 3
        await other.act()
    with without_root():
        assert await asyncio.gather(*(buffer.leases() for _ in range(3))) == [[]] * 3
        await store.close()


async def test_unreadable_commits_are_an_error(closed_folder: Path) -> None:
    os.chmod(closed_folder, 0o755)  # noqa: S103
    (closed_folder / "replay.db-wal").write_bytes(b"x" * 5000)
    os.chmod(closed_folder, 0o555)  # noqa: S103
    with without_root(), pytest.raises(rdb.DatabaseReadOnlyError, match="-wal file") as caught:
        await Store.open(f"sqlite:///{closed_folder}/replay.db", read_only=True)
    assert "\n" not in str(caught.value)
