"""Reading on a standby of PostgreSQL: what it has, how late it is, and reads that it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import func, select

import replaydb as rdb
from replaydb import Store, blocking
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import end_in
from replaydb.database.tables.schema import episode_group
from replaydb.training.prometheus import StoreCollector
from support.cluster import Node, template
from support.command import run
from support.groups import group, groups

COUNT = select(func.count()).select_from(episode_group)


@pytest.fixture(scope="module")
def primary() -> Iterator[Node]:
    with template() as node:
        node.start()
        yield node


@pytest.fixture(scope="module")
def standby(primary: Node) -> Iterator[Node]:
    with closing(primary.backup()) as node:
        node.configure("max_standby_streaming_delay = 0")
        node.start()
        yield node


@pytest.fixture
async def buffer(primary: Node) -> AsyncIterator[rdb.Buffer]:
    """An empty buffer on the primary."""
    async with Store.open(primary.url(), run="test") as store:
        buffer = await store.buffer("math")
        await buffer.delete(where=rdb.col.id > 0)
        yield buffer


async def replayed(primary: Node, standby: Node) -> None:
    """Wait until the standby has all commits of the primary."""
    end = await primary.ask("SELECT pg_current_wal_insert_lsn()::text")
    async with asyncio.timeout(30):
        while not await standby.ask(f"SELECT pg_last_wal_replay_lsn() >= '{end}'"):
            pass


def count(session: Session) -> int:
    """Return the number of groups."""
    return int(session.run(COUNT)[0][0])


async def replace_rows(primary: Node, standby: Node) -> None:
    """Remove row versions on the primary that transactions on the standby may need."""
    await primary.ask("UPDATE episode_group SET status_reason = 'changed'")
    await primary.ask("VACUUM episode_group")
    await replayed(primary, standby)


async def put_one(primary: Node, standby: Node) -> None:
    """Put a group on the primary, and wait until the standby has it."""
    async with Store.open(primary.url(), run="test") as store:
        await (await store.buffer("math")).put(group())
    await replayed(primary, standby)


async def test_reading(primary: Node, standby: Node, buffer: rdb.Buffer) -> None:
    await buffer.put(groups(5), cursor={"data": 7})
    drawn = await buffer.sample(2, step=1)
    await replayed(primary, standby)
    async with Store.open(standby.url(), read_only=True) as store:
        there = await store.buffer("math", create=False)
        assert await there.count() == 5
        assert [one.id for one in (await there.get(drawn.ids))] == drawn.ids
        assert await there.cursor("data") == 7
        assert [draw.group_ids for draw in await there.draws()] == [tuple(drawn.ids)]
        assert len(await there.peek(5)) == 5
        assert (await there.stats()).tasks == (await buffer.stats()).tasks
        with pytest.raises(rdb.DatabaseReadOnlyError):
            await there.put(group())
    with pytest.raises(rdb.DatabaseReadOnlyError, match="25006"):
        await put_one(standby, standby)


async def test_a_waiting_call_sees_a_commit_of_the_primary(
    standby: Node, buffer: rdb.Buffer
) -> None:
    """A standby passes no notifications on, so the call checks every second."""
    async with Store.open(standby.url(), read_only=True) as store:
        there = await store.buffer("math", create=False)
        waiting = asyncio.create_task(there.wait_until(at_least=3, timeout=30))
        await asyncio.sleep(0.1)
        await buffer.put(groups(3))
        assert await asyncio.wait_for(waiting, 60)


async def test_the_lag(primary: Node, standby: Node, buffer: rdb.Buffer) -> None:
    async with Store.open(primary.url(), read_only=True) as store:
        assert await store.replication_lag() is None
    await buffer.put(group())
    await replayed(primary, standby)
    async with Store.open(standby.url(), read_only=True) as store:
        assert await store.replication_lag() == 0.0
        await standby.ask("SELECT pg_wal_replay_pause()")
        try:
            await buffer.put(group())
            async with asyncio.timeout(30):
                while not await store.replication_lag():  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(0.01)
            lag = await store.replication_lag()
            assert lag is not None
            assert 0.0 < lag < 60.0
        finally:
            await standby.ask("SELECT pg_wal_replay_resume()")
        await replayed(primary, standby)
        assert await store.replication_lag() == 0.0


async def test_a_standby_without_a_primary(primary: Node) -> None:
    with closing(primary.backup()) as alone:
        (alone.folder / "postgresql.auto.conf").write_text("")  # forgets its primary
        alone.start()
        async with Store.open(alone.url(), read_only=True) as store:
            lag = await store.replication_lag()
            assert lag is not None
            assert lag > 0.0
        alone.promote()
        async with Store.open(alone.url(), read_only=True) as store:
            assert await store.replication_lag() is None


@pytest.mark.parametrize("is_idle", [True, False], ids=["between statements", "in a statement"])
async def test_a_read_that_is_ended_is_run_again(
    primary: Node, standby: Node, buffer: rdb.Buffer, is_idle: bool
) -> None:
    """An idle transaction loses its connection; in a statement it fails with SQLSTATE 40001."""
    await buffer.put(groups(3))
    await replayed(primary, standby)
    attempts: list[int] = []

    def read(session: Session) -> int:
        attempts.append(count(session))
        if len(attempts) == 1:
            with ThreadPoolExecutor() as pool:
                done = pool.submit(asyncio.run, replace_rows(primary, standby))
                if is_idle:
                    done.result()
                else:
                    session.run(select(func.pg_sleep(30)))
        return count(session)

    async with Store.open(standby.url(), read_only=True) as store:
        assert await store._database.read(read) == 3
    assert attempts == [3, 3]


async def test_a_long_read_that_is_ended_says_why(
    primary: Node, standby: Node, buffer: rdb.Buffer
) -> None:
    """A snapshot for several reads, as of `verify` and `copy`, cannot be continued."""
    await buffer.put(groups(3))
    await replayed(primary, standby)
    async with (
        Store.open(standby.url(), read_only=True) as store,
        store._database.snapshot(end_in(60)) as snapshot,
    ):
        await snapshot.read(count)
        await replace_rows(primary, standby)
        with pytest.raises(rdb.DatabaseUnavailableError, match="hot_standby_feedback"):
            await snapshot.read(count)


async def test_a_read_that_is_always_ended_says_why(
    primary: Node, standby: Node, buffer: rdb.Buffer
) -> None:
    def read(session: Session) -> None:
        with ThreadPoolExecutor() as pool:
            pool.submit(asyncio.run, put_one(primary, standby)).result()
            count(session)
            pool.submit(asyncio.run, replace_rows(primary, standby))
            session.run(select(func.pg_sleep(30)))

    async with Store.open(standby.url(), read_only=True) as store:
        with pytest.raises(rdb.DatabaseUnavailableError, match="hot_standby_feedback"):
            await store._database.read(read)


async def test_commands(primary: Node, standby: Node, buffer: rdb.Buffer, tmp_path: Path) -> None:
    await buffer.put(groups(3))
    await replayed(primary, standby)
    url = standby.url()

    def commands() -> None:
        for words in (
            ["buffers", "show", "math"],
            ["groups", "list", "math"],
            ["verify"],
            ["export", str(tmp_path / "out")],
            ["backup", str(tmp_path / "backup.db")],
        ):
            outcome = run(*words, url=url)
            assert outcome.exit_code == 0, (words, outcome.stderr)
        found = run("doctor", url=url).stdout
        assert "it is a standby, 0.0 s behind its primary" in " ".join(found.split())
        assert "hot_standby_feedback" in found
        with blocking.Store.open(url, read_only=True) as store:
            families = {one.name: one for one in StoreCollector(store).collect()}
        assert families["replaydb_replication_lag_seconds"].samples[0].value == 0.0

    await asyncio.to_thread(commands)
    async with Store.open(f"sqlite:///{tmp_path}/backup.db", read_only=True) as store:
        assert await (await store.buffer("math", create=False)).count() == 3
