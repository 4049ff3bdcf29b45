"""Upgrades keep all rows, are atomic, and may run concurrently."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from sqlalchemy import inspect, text

from replaydb import Store
from replaydb.database import migrations
from replaydb.database.engines import backend_for
from replaydb.database.postgresql import schema_changes
from replaydb.database.runtime.transactions import Database
from replaydb.database.tables.schema import REVISIONS
from replaydb.errors import DatabaseError, InvalidInputError
from support.connections import transaction
from support.groups import group
from support.in_transaction import await_in_transaction
from support.revisions import NEXT, release_next
from support.rows import contents, fill, view_counts
from support.snapshot import take_snapshot

# SQLite cannot do this in place, so the table is copied. AUTOINCREMENT must be stated again.
REBUILD = """
with op.batch_alter_table("episode_group", table_kwargs={"sqlite_autoincrement": True}) as batch:
    batch.alter_column("weight", existing_type=sa.Double(), nullable=%s)
"""
ADD_COLUMN = "op.add_column('pack', sa.Column('x', sa.Integer()))"
FORWARD, BACK = REBUILD % True, REBUILD % False


@pytest.fixture
async def filled_url(own_url: str) -> str:
    """A database that no other test uses, with rows in every table."""
    async with transaction(own_url) as connection:
        await fill(connection)
    return own_url


async def test_rebuilding_a_table_keeps_every_row(
    filled_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with transaction(filled_url) as connection:
        before = await contents(connection)
        schema = await take_snapshot(connection)
        views = await view_counts(connection)
    assert all(before.values())
    release_next(tmp_path, monkeypatch, FORWARD, BACK)

    await migrations.upgrade(filled_url)
    assert await migrations.current(filled_url) == NEXT
    async with transaction(filled_url) as connection:
        assert await contents(connection) == before
        assert await view_counts(connection) == views
        assert await take_snapshot(connection) != schema

    await migrations.downgrade(filled_url, "-1")
    async with transaction(filled_url) as connection:
        assert await contents(connection) == before
        assert await take_snapshot(connection) == schema


async def test_rebuilding_a_table_does_not_reuse_ids(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with transaction(sqlite_url) as connection:
        await fill(connection)
    release_next(tmp_path, monkeypatch, FORWARD)
    await migrations.upgrade(sqlite_url)
    # 99 was deleted, and a draw still names it.
    assert await _new_ids(sqlite_url) == range(100, 101)
    async with transaction(sqlite_url) as connection:
        await connection.execute(text("DELETE FROM episode_group"))
    await migrations.downgrade(sqlite_url, "-1")
    assert await _new_ids(sqlite_url) == range(100, 101)


async def _new_ids(url: str) -> Sequence[int]:
    """Return the ids of the next groups."""
    database = Database(backend_for(url))
    found = await database.write(lambda session: session.identify(1, ["new"], children=()))
    await database.close()
    return found.new


async def test_a_failed_upgrade_changes_nothing(
    filled_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with transaction(filled_url) as connection:
        before = await contents(connection)
        schema = await take_snapshot(connection)
    midway = """
op.create_table("extra", sa.Column("id", sa.Integer(), primary_key=True))
op.execute(sa.text("DELETE FROM draw"))
raise RuntimeError("midway")
"""
    release_next(tmp_path, monkeypatch, FORWARD + midway)
    with pytest.raises(RuntimeError, match="midway"):
        await migrations.upgrade(filled_url)
    assert await migrations.current(filled_url) == REVISIONS[-1]
    async with transaction(filled_url) as connection:
        assert await contents(connection) == before
        assert await take_snapshot(connection) == schema


async def test_creating_a_database_is_atomic(
    empty_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release_next(tmp_path, monkeypatch, 'op.execute(sa.text("SELECT * FROM nowhere"))')
    with pytest.raises(DatabaseError, match="nowhere"):
        await migrations.upgrade(empty_url)
    assert await migrations.current(empty_url) is None
    async with transaction(empty_url) as connection:
        assert not await connection.run_sync(lambda sync: inspect(sync).get_table_names())


async def test_an_upgrade_that_leaves_orphans_is_refused(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with transaction(sqlite_url) as connection:
        await fill(connection)
        before = await contents(connection)
    release_next(tmp_path, monkeypatch, 'op.execute(sa.text("DELETE FROM episode_group"))')
    with pytest.raises(DatabaseError, match="rows that do not exist"):
        await migrations.upgrade(sqlite_url)
    async with transaction(sqlite_url) as connection:
        assert await contents(connection) == before


async def test_an_unknown_revision_is_refused(url: str) -> None:
    for revision in ("nonsense", "+5"):
        with pytest.raises(InvalidInputError, match="revision"):
            await migrations.upgrade(url, revision)


async def test_concurrent_upgrades_in_coroutines(empty_url: str) -> None:
    async with asyncio.timeout(60):
        await asyncio.gather(*(migrations.upgrade(empty_url) for _ in range(8)))
    assert await migrations.check(empty_url) == ()


async def test_concurrent_upgrades_of_several_databases(
    empty_postgresql_url: str, tmp_path: Path
) -> None:
    urls = [empty_postgresql_url, *(f"sqlite:///{tmp_path / str(number)}" for number in range(4))]
    async with asyncio.timeout(60):
        await asyncio.gather(*map(migrations.upgrade, urls))
    assert [await migrations.check(url) for url in urls] == [()] * 5


async def test_concurrent_upgrades_in_threads(empty_url: str) -> None:
    errors: list[BaseException] = []

    def upgrade() -> None:
        try:
            asyncio.run(migrations.upgrade(empty_url))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=upgrade) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert errors == []
    assert await migrations.check(empty_url) == ()


_PROCESS = """
import alembic.command, asyncio, sys
from replaydb import Store
from replaydb.database import migrations
from replaydb.database.engines import backend_for
from replaydb.database.postgresql import backend
from replaydb.database.runtime import revisions
print("ready", flush=True)
sys.stdin.read()
asyncio.run(migrations.prepare(backend_for(sys.argv[1]), migrate=True))
"""


async def test_concurrent_upgrades_in_processes(empty_url: str) -> None:
    pipe = asyncio.subprocess.PIPE
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", _PROCESS, empty_url, stdin=pipe, stdout=pipe, stderr=pipe
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        await process.stdout.readline()
    # All wait for their input to end, and so start together.
    results = await asyncio.gather(*(process.communicate(b"") for process in processes))
    assert [error.decode() for _, error in results] == ["", ""]
    assert [process.returncode for process in processes] == [0, 0]
    assert await migrations.check(empty_url) == ()


async def test_waiting_for_another_upgrade_can_be_cancelled(empty_sqlite_url: str) -> None:
    backend = backend_for(empty_sqlite_url)
    loop = asyncio.get_running_loop()

    async def cancelled() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(migrations.upgrade(backend), 0.3)

    await backend.schema.change(lambda _: await_in_transaction(cancelled(), loop), create=True)
    await migrations.upgrade(backend)
    assert await migrations.check(backend) == ()


async def test_an_upgrade_that_waits_for_a_reader_blocks_no_other_call(
    own_postgresql_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL lets later calls wait behind it, so it waits for a second at a time."""
    async with Store.open(own_postgresql_url) as store:
        buffer = await store.buffer("math")
        await buffer.put(group())
        release_next(tmp_path, monkeypatch, ADD_COLUMN)
        async with transaction(own_postgresql_url) as reader:
            await reader.execute(text("SELECT count(*) FROM episode_group"))
            upgrading = asyncio.create_task(migrations.upgrade(own_postgresql_url))
            async with asyncio.timeout(60):
                for _ in range(4):
                    await asyncio.sleep(0.5)
                    await buffer.put(group())
                    assert not upgrading.done()
    async with asyncio.timeout(60):
        await upgrading
    assert await migrations.current(own_postgresql_url) == NEXT


async def test_an_upgrade_gives_up_if_the_tables_are_always_in_use(
    own_postgresql_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release_next(tmp_path, monkeypatch, ADD_COLUMN)
    monkeypatch.setattr(schema_changes, "LOCK_SECONDS", 0.5)
    async with transaction(own_postgresql_url) as reader:
        await reader.execute(text("SELECT count(*) FROM episode_group"))
        with pytest.raises(DatabaseError, match="could not be locked in 0 s"):
            await migrations.upgrade(own_postgresql_url)
    assert await migrations.current(own_postgresql_url) == REVISIONS[-1]
