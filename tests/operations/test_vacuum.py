"""`vacuum` reclaims disk space and leaves the store unchanged."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

import replaydb as rdb
from replaydb import Store
from replaydb.database.sqlite import connection
from replaydb.operations import vacuum
from support.command import run
from support.groups import groups, long_group
from support.invariants import check_invariants


async def fill_and_delete(url: str) -> None:
    """Fill a store and delete most of it."""
    async with Store.open(url) as store:
        math = await store.buffer("math", seed=1)
        await math.put([long_group(f"long-{i}", 50_000) for i in range(40)])
        await math.put(groups(5, "code"))
        await math.delete(tasks="gsm8k")


async def test_space_is_reclaimed(url: str) -> None:
    await fill_and_delete(url)
    async with Store.open(url) as store:  # while it is open
        math = await store.buffer("math")
        before = await math.sample(3)
        report = await vacuum(url)
        assert report.bytes_before > 4_000_000
        assert report.bytes_after < 2_000_000
        assert report.freed_bytes == report.bytes_before - report.bytes_after
        assert len(await math.get(before.ids)) == 3
        await math.put(groups(2, "more"))
        assert len((await math.sample(7)).ids) == 7
    await check_invariants(url)


def test_the_vacuum_command(sqlite_url: str) -> None:
    asyncio.run(fill_and_delete(sqlite_url))
    done = run("vacuum", url=sqlite_url)
    assert done.exit_code == 0, done.output
    assert re.match(r"freed \d\S* MB: ", done.output)


@pytest.fixture
def locked(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A file locked by another writer."""
    monkeypatch.setattr(connection, "LOCK_SECONDS", 0.05)
    other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    yield sqlite_url
    other.close()


async def test_a_locked_file_is_not_rewritten(locked: str) -> None:
    with pytest.raises(rdb.DatabaseUnavailableError, match="locked"):
        await vacuum(locked)


def test_a_missing_file_is_not_created(tmp_path: Path) -> None:
    missing = run("vacuum", url=f"sqlite:///{tmp_path / 'none.db'}")
    assert missing.exit_code == 1
    assert "no such file" in missing.output
    assert list(tmp_path.iterdir()) == []
