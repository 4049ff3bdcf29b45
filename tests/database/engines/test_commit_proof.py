"""The table `commit_proof`: what transactions write to it, and how outcomes are read from it.

`test_failover.py` tests the outcomes after failovers and crashes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import func, insert, literal, select, text, update
from sqlalchemy.dialects.postgresql import REGCLASS
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

import replaydb as rdb
from replaydb import Store
from replaydb.database.engines import backend_for
from replaydb.database.postgresql import commits
from replaydb.database.postgresql.backend import PostgresqlBackend
from replaydb.database.postgresql.commits import Acknowledged, Commit, Transaction
from replaydb.database.postgresql.connecting import Connection
from replaydb.database.postgresql.session import PostgresqlSession
from replaydb.database.tables.schema import commit_proof
from support.connections import transaction
from support.groups import group
from support.invariants import number_of
from support.postgres import PostgresServer
from support.proxy import Proxy, cut_commits


@pytest.fixture
async def engine(postgresql_url: str) -> AsyncIterator[AsyncEngine]:
    backend = backend_for(postgresql_url)
    assert isinstance(backend, PostgresqlBackend)
    made = backend.engine(isolation_level="READ COMMITTED")
    yield made
    await made.dispose()


async def prove(connection: AsyncConnection, known: Acknowledged) -> bool:
    """Run the last statement of a write, in the transaction of SQLAlchemy's connection."""
    await connection.execute(select(1))
    return await connection.run_sync(lambda core: commits.prove(PostgresqlSession(core), known))


@asynccontextmanager
async def proved(engine: AsyncEngine) -> AsyncIterator[tuple[AsyncConnection, Transaction]]:
    """Run a transaction as every write does, until its COMMIT."""
    async with engine.connect() as connection:
        assert await prove(connection, Acknowledged())
        yield connection, commits.transaction_of(connection)


def read_outcome(engine: AsyncEngine, about: Transaction) -> asyncio.Task[bool]:
    end = asyncio.get_running_loop().time() + 30
    return asyncio.create_task(commits.was_committed(engine, about, end))


@pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
@pytest.mark.parametrize("earlier", [0, 1], ids=["the first", "a later one"])
async def test_reading_an_outcome_waits_for_the_transaction(
    engine: AsyncEngine,
    postgres: PostgresServer,
    postgresql_url: str,
    commits: bool,
    earlier: int,
) -> None:
    for _ in range(earlier):
        async with proved(engine) as (connection, _done):
            await connection.commit()
    async with proved(engine) as (connection, mine):
        assert mine.number == earlier + 1
        answer = read_outcome(engine, replace(mine, pid=0))  # no session is terminated
        while not (answer.done() or await postgres.num_blocked(postgresql_url)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await (connection.commit() if commits else connection.rollback())
        assert await answer is commits


async def test_reading_an_outcome_terminates_only_that_transaction(engine: AsyncEngine) -> None:
    """Another server, or a later transaction, may have the same process id."""
    async with proved(engine) as (innocent, other), proved(engine) as (ended, mine):
        stranger = replace(other, connection_uid=uuid4(), began_at=mine.began_at)
        assert await read_outcome(engine, stranger) is False
        assert await innocent.scalar(select(1)) == 1
        assert await read_outcome(engine, mine) is False
        await innocent.commit()
        await ended.invalidate()


async def test_updates_of_commit_proof_are_hot(engine: AsyncEngine, postgresql_url: str) -> None:
    """No index is changed, and no more than one page is used."""
    async with transaction(postgresql_url) as connection:  # remove dead rows of other tests
        await connection.execute(text("TRUNCATE commit_proof"))
    table = literal("commit_proof").cast(REGCLASS)
    in_place = select(func.pg_stat_get_xact_tuples_hot_updated(table))
    found = []
    for _ in range(300):
        async with proved(engine) as (connection, _mine):
            found.append(await connection.scalar(in_place))
            await connection.commit()
    async with engine.connect() as connection:
        assert await connection.scalar(select(func.pg_relation_size(table))) == 8192
    assert found.count(0) == 1  # the first inserts the row


async def test_a_commit_is_required_until_a_later_one_includes_it(
    engine: AsyncEngine, postgresql_url: str
) -> None:
    """Either of two concurrent transactions may be the first in the log of the server."""
    known = Acknowledged()
    async with engine.connect() as first, engine.connect() as second:
        for connection in (first, second):
            assert await prove(connection, known)
        for connection in (second, first):
            await connection.commit()
            known.add(commits.transaction_of(connection))
        uid = commits.transaction_of(second).connection_uid
        for number, is_there in ((0, False), (1, True)):
            async with transaction(postgresql_url) as other:
                of_second = commit_proof.c.connection_uid == uid
                await other.execute(
                    update(commit_proof).where(of_second).values(transaction_number=number)
                )
            assert await prove(first, known) is is_there
            await first.commit()
        assert len(known.newest) == 2
        known.add(commits.transaction_of(first))
        assert len(known.newest) == 1


async def test_commits_whose_rows_may_be_deleted_are_not_required(
    engine: AsyncEngine, postgresql_url: str
) -> None:
    known = Acknowledged()
    async with engine.connect() as connection:
        assert await prove(connection, known)
        await connection.commit()
        mine = commits.transaction_of(connection)
    for age, is_there in ((timedelta(hours=11), False), (timedelta(hours=13), True)):
        known.newest = {mine.connection_uid: Commit(2, mine.began_at - age)}
        async with engine.connect() as connection:
            assert await prove(connection, known) is is_there


async def test_commits_after_a_snapshot_are_not_required(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statement that sets the limits of a long read takes its snapshot."""
    loop, execute = asyncio.get_running_loop(), Connection.execute
    has_snapshot, has_committed = asyncio.Event(), threading.Event()

    async def execute_and_wait(self: Connection, query: str, *values: Any, **options: Any) -> str:
        sets_limits = "READ ONLY" in query and bool(self.first_statement)
        result = await execute(self, query, *values, **options)
        if sets_limits:
            loop.call_soon_threadsafe(has_snapshot.set)
            await asyncio.to_thread(has_committed.wait, 30)
        return result

    async with Store.open(postgresql_url, run="test") as store:
        buffer = await store.buffer("math")
        monkeypatch.setattr(Connection, "execute", execute_and_wait)
        async with asyncio.timeout(30), asyncio.TaskGroup() as calls:
            reading = calls.create_task(buffer.find())
            await has_snapshot.wait()
            await buffer.put(group())
            has_committed.set()
        assert len(reading.result()) == 0
        assert len(await buffer.find()) == 1


async def test_rows_of_old_connections_are_deleted(postgresql_url: str) -> None:
    old = {
        "transaction_number": 7,
        "written_at": func.now() - commits.RETENTION - timedelta(seconds=1),
    }
    gone, late = uuid4(), uuid4()
    async with transaction(postgresql_url) as connection:
        for uid in (gone, late):
            await connection.execute(insert(commit_proof).values(connection_uid=uid, **old))
    async with transaction(postgresql_url) as connection:
        is_late = commit_proof.c.connection_uid == late
        await connection.execute(update(commit_proof).where(is_late).values(transaction_number=8))
        async with Store.open(postgresql_url) as store:
            await store.buffer("math")  # does not wait for the locked row
    assert await number_of(postgresql_url, commit_proof) == 2
    async with transaction(postgresql_url) as connection:
        assert gone not in (await connection.scalars(select(commit_proof.c.connection_uid))).all()


async def test_no_outcome_is_read_when_the_row_may_be_deleted(
    proxied_url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "READABLE_SECONDS", 0.0)
    async with Store.open(proxied_url, run="test") as store:
        buffer = await store.buffer("math")
        proxy.rule = cut_commits("answer")
        with pytest.raises(rdb.OutcomeUnknownError):
            await buffer.put(group("new"))
