"""`upgrade` creates missing indexes, on PostgreSQL while other processes read and write."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import AsyncMock, Mock
from urllib.parse import urlsplit

import pytest
from sqlalchemy import Column, Index, Integer, MetaData, text
from sqlalchemy.exc import DBAPIError

from replaydb import Store, operations
from replaydb.database import migrations
from replaydb.database.engines import backend_for
from replaydb.database.postgresql import index_builds
from replaydb.database.tables.schema import episode_group
from support.connections import transaction
from support.groups import group, groups
from support.invariants import check_invariants
from support.revisions import release_next
from support.snapshot import take_snapshot

ADD_COLUMN = "op.add_column('episode_group', sa.Column('new', sa.Integer()))"
NAME = "ix_episode_group_comparable_version"
INVALID = text("SELECT count(*) FROM pg_index WHERE NOT indisvalid")


async def _drop(url: str, *names: str) -> None:
    async with transaction(url) as connection:
        for name in names:
            await connection.execute(text(f"DROP INDEX {name}"))


@contextlib.asynccontextmanager
async def _snapshot_held(url: str) -> AsyncIterator[None]:
    """Hold a snapshot, for which the server waits before an index becomes valid."""
    async with transaction(url) as reader:
        await reader.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
        await reader.execute(text("SELECT count(*) FROM episode_group"))
        yield


async def _begun(url: str) -> None:
    """Wait until the server creates an index."""
    async with transaction(url) as connection:
        while not (await connection.execute(INVALID)).scalar_one():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_missing_indexes_are_created_as_before(own_url: str) -> None:
    async with transaction(own_url) as connection:
        before = await take_snapshot(connection)
    await _drop(own_url, NAME, "ix_draw_step", "ix_payload_pack_id")
    assert len(await migrations.check(own_url)) == 3
    await migrations.upgrade(own_url)
    async with transaction(own_url) as connection:
        assert await take_snapshot(connection) == before
    await migrations.upgrade(own_url)  # nothing is left to do
    assert await migrations.check(own_url) == ()


async def test_a_new_database_gets_its_indexes_with_its_tables(
    empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a store on a new file opens without another transaction."""
    backend = backend_for(empty_url)
    created = AsyncMock()
    monkeypatch.setattr(type(backend.schema), "create_indexes", created)
    await migrations.upgrade(backend)
    created.assert_not_called()
    assert await migrations.check(backend) == ()
    await migrations.upgrade(backend)
    created.assert_awaited_once()


async def test_other_processes_write_meanwhile(own_postgresql_url: str) -> None:
    url, seen = own_postgresql_url, []
    async with Store.open(url, run="a") as store:
        buffer = await store.buffer("math")
        await buffer.put(groups(3))
        await _drop(url, NAME)
        async with _snapshot_held(url):
            upgrading = asyncio.create_task(
                migrations.upgrade(url, progress=lambda *numbers: seen.append(numbers))
            )
            async with asyncio.timeout(60):
                await _begun(url)
                for _ in range(4):
                    await buffer.put(group())
                    assert len(await buffer.sample(2)) == 2
                    assert not upgrading.done()
                while not seen:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        async with asyncio.timeout(60):
            await upgrading
        assert await migrations.check(url) == ()
        assert all(done <= total for done, total in seen)
    await check_invariants(url)


async def test_limits_of_the_role_do_not_apply(own_postgresql_url: str) -> None:
    url = own_postgresql_url
    await _drop(url, NAME)
    database = urlsplit(url).path.removeprefix("/")
    async with transaction(url) as connection:
        for setting in ("lock_timeout", "statement_timeout"):
            await connection.execute(text(f'ALTER DATABASE "{database}" SET {setting} = 500'))
    async with _snapshot_held(url):
        upgrading = asyncio.create_task(migrations.upgrade(url))
        await asyncio.sleep(1.5)
        assert not upgrading.done()
    async with asyncio.timeout(60):
        await upgrading
    assert await migrations.check(url) == ()


@pytest.mark.parametrize("how", ["cancelled", "terminated"])
async def test_another_call_continues_after_an_interruption(
    own_postgresql_url: str, how: str
) -> None:
    """The interrupted creation leaves an invalid index, which nothing uses."""
    url = own_postgresql_url
    await _drop(url, NAME)
    async with _snapshot_held(url):
        upgrading = asyncio.create_task(migrations.upgrade(url))
        async with asyncio.timeout(60):
            await _begun(url)
            if how == "cancelled":
                upgrading.cancel()
            await asyncio.wait([upgrading], timeout=0 if how == "terminated" else None)
            async with transaction(url) as connection:
                await connection.execute(
                    text(
                        "SELECT pg_terminate_backend(pid, 2000) FROM pg_stat_progress_create_index"
                    )
                )
            await asyncio.wait([upgrading])
        assert upgrading.cancelled() or upgrading.exception() is not None
    [found] = [one for one in await operations.examine(url) if one.subject == "indexes"]
    assert NAME in found.text
    assert "replaydb db upgrade" in (found.fix or "")
    await migrations.upgrade(url)
    async with transaction(url) as connection:
        assert (await connection.execute(INVALID)).scalar_one() == 0
    assert await migrations.check(url) == ()


async def test_several_upgrades_create_an_index_at_once(own_postgresql_url: str) -> None:
    url = own_postgresql_url
    await _drop(url, NAME, "ix_draw_step")
    async with _snapshot_held(url):
        upgrades = [asyncio.create_task(migrations.upgrade(url)) for _ in range(4)]
        await asyncio.sleep(2)
        assert not any(upgrade.done() for upgrade in upgrades)
    async with asyncio.timeout(60):
        await asyncio.gather(*upgrades)
    async with transaction(url) as connection:
        assert (await connection.execute(INVALID)).scalar_one() == 0
    assert await migrations.check(url) == ()


@pytest.mark.parametrize(("sqlstate", "attempts"), [("40P01", 3), ("53100", 1)])
async def test_a_creation_that_deadlocks_is_repeated_a_limited_number_of_times(
    sqlstate: str, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other errors, such as a full disk, are raised at once."""
    monkeypatch.setattr(index_builds, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(index_builds, "ATTEMPTS", 3)
    reason = Mock(spec=Exception, sqlstate=sqlstate)
    creator, observer = Mock(), Mock()
    creator.core.execute.side_effect = DBAPIError("CREATE INDEX", None, reason)
    observer.core.execute.return_value = Mock(one_or_none=lambda: None)  # there is no index
    [index, *_] = episode_group.indexes
    with pytest.raises(DBAPIError):
        await index_builds.create_missing(creator, observer, [index], lambda *_: None)
    assert creator.core.execute.call_count == attempts


async def test_an_index_of_a_new_revision(
    own_postgresql_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The revision adds the column, and `upgrade` creates its index afterwards."""
    url = own_postgresql_url
    table = episode_group.to_metadata(MetaData())
    new = Index("ix_episode_group_new", Column("new", Integer()), _table=table)
    monkeypatch.setattr(migrations, "_INDEXES", (*migrations._INDEXES, new))
    async with Store.open(url, run="a") as store:
        buffer = await store.buffer("math")
        await buffer.put(groups(3))
        release_next(tmp_path, monkeypatch, ADD_COLUMN)
        await migrations.upgrade(url)
        await buffer.put(group())
    assert "remove index ix_episode_group_new" in await migrations.check(url)


async def test_an_index_of_a_table_with_rows_is_created_after_its_revision(
    own_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade that is killed before the creation leaves it to the next, or to a downgrade."""
    await migrations.write_format(own_url, 1)
    async with Store.open(own_url, payloads=(tmp_path / "packs").as_uri()) as store:
        await (await store.buffer("math")).put(groups(3))
    async with transaction(own_url) as connection:
        before = await take_snapshot(connection)
    await migrations.downgrade(own_url, "0010")
    backend = backend_for(own_url)
    with monkeypatch.context() as patch:
        patch.setattr(type(backend.schema), "create_indexes", AsyncMock())
        await migrations.upgrade(backend)
    missing = ("add index ix_pack_mostly_dead", "add index ix_payload_field")
    assert await migrations.check(own_url) == missing
    await migrations.downgrade(own_url, "0010")
    await migrations.upgrade(own_url)
    async with transaction(own_url) as connection:
        assert await take_snapshot(connection) == before
