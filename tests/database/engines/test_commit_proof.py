"""The table `commit_proof`: what transactions write to it, and how outcomes are read from it.

`test_failover.py` tests the outcomes after failovers and crashes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import func, insert, select, text, update
from sqlalchemy.util import greenlet_spawn

import replaydb as rdb
from replaydb import Store
from replaydb.database.engines import backend_for
from replaydb.database.postgresql import commits
from replaydb.database.postgresql.backend import PostgresqlBackend
from replaydb.database.postgresql.commits import Acknowledged, Commit, Transaction
from replaydb.database.postgresql.connecting import WRITING, Connection
from replaydb.database.postgresql.session import PostgresqlSession
from replaydb.database.runtime.pool import Waits
from replaydb.database.tables.schema import commit_proof
from support.connections import transaction
from support.groups import group
from support.invariants import number_of
from support.postgres import PostgresServer
from support.proxy import Proxy, cut_commits

Connected = Callable[[], AbstractAsyncContextManager[Connection]]


@pytest.fixture
async def connected(postgresql_url: str) -> AsyncIterator[Connected]:
    """A function that uses a connection of a pool for a block."""
    backend = backend_for(postgresql_url)
    assert isinstance(backend, PostgresqlBackend)
    pool = backend.connections.pool(backend.connections.opening(), 5, 5, Waits("test"))
    yield partial(pool.connection, asyncio.get_running_loop().time() + 600)
    await pool.close()


async def prove(connection: Connection, known: Acknowledged) -> bool:
    """Begin a transaction, and run the last statement of a write."""
    await connection.begin(WRITING)
    return await greenlet_spawn(commits.prove, PostgresqlSession(connection), known)


def proof_of(connection: Connection) -> Transaction:
    assert connection.proof is not None
    return connection.proof


@asynccontextmanager
async def proved(connected: Connected) -> AsyncIterator[tuple[Connection, Transaction]]:
    """Run a transaction as every write does, until its COMMIT."""
    async with connected() as connection:
        assert await prove(connection, Acknowledged())
        yield connection, proof_of(connection)


def read_outcome(connected: Connected, about: Transaction) -> asyncio.Task[bool]:
    end = asyncio.get_running_loop().time() + 30
    return asyncio.create_task(commits.was_committed(connected, about, end))


@pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
@pytest.mark.parametrize("earlier", [0, 1], ids=["the first", "a later one"])
async def test_reading_an_outcome_waits_for_the_transaction(
    connected: Connected,
    postgres: PostgresServer,
    postgresql_url: str,
    commits: bool,
    earlier: int,
) -> None:
    for _ in range(earlier):
        async with proved(connected) as (connection, _done):
            await connection.commit()
    async with proved(connected) as (connection, mine):
        assert mine.number == earlier + 1
        answer = read_outcome(connected, replace(mine, pid=0))  # no session is terminated
        while not (answer.done() or await postgres.num_blocked(postgresql_url)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await (connection.commit() if commits else connection.abandon())
        assert await answer is commits


async def test_reading_an_outcome_terminates_only_that_transaction(connected: Connected) -> None:
    """Another server, or a later transaction, may have the same process id."""
    async with proved(connected) as (innocent, other), proved(connected) as (ended, mine):
        stranger = replace(other, connection_uid=uuid4(), began_at=mine.began_at)
        assert await read_outcome(connected, stranger) is False
        assert await innocent.fetchval("SELECT 1") == 1
        assert await read_outcome(connected, mine) is False
        await innocent.commit()
        ended.terminate()


async def test_updates_of_commit_proof_are_hot(connected: Connected, postgresql_url: str) -> None:
    """No index is changed, and no more than one page is used."""
    async with transaction(postgresql_url) as connection:  # remove dead rows of other tests
        await connection.execute(text("TRUNCATE commit_proof"))
    in_place = "SELECT pg_stat_get_xact_tuples_hot_updated('commit_proof'::regclass)"
    found = []
    for _ in range(300):
        async with proved(connected) as (connection, _mine):
            found.append(await connection.fetchval(in_place))
            await connection.commit()
    async with connected() as connection:
        assert await connection.fetchval("SELECT pg_relation_size('commit_proof')") == 8192
    assert found.count(0) == 1  # the first inserts the row


async def test_a_commit_is_required_until_a_later_one_includes_it(
    connected: Connected, postgresql_url: str
) -> None:
    """Either of two concurrent transactions may be the first in the log of the server."""
    known = Acknowledged()
    async with connected() as first, connected() as second:
        for connection in (first, second):
            assert await prove(connection, known)
        for connection in (second, first):
            await connection.commit()
            known.add(proof_of(connection))
        uid = proof_of(second).connection_uid
        for number, is_there in ((0, False), (1, True)):
            async with transaction(postgresql_url) as other:
                of_second = commit_proof.c.connection_uid == uid
                await other.execute(
                    update(commit_proof).where(of_second).values(transaction_number=number)
                )
            assert await prove(first, known) is is_there
            await first.commit()
        assert len(known.newest) == 2
        known.add(proof_of(first))
        assert len(known.newest) == 1


async def test_commits_whose_rows_may_be_deleted_are_not_required(
    connected: Connected, postgresql_url: str
) -> None:
    known = Acknowledged()
    async with connected() as connection:
        assert await prove(connection, known)
        await connection.commit()
        mine = proof_of(connection)
    for age, is_there in ((timedelta(hours=11), False), (timedelta(hours=13), True)):
        known.newest = {mine.connection_uid: Commit(2, mine.began_at - age)}
        async with connected() as connection:
            assert await prove(connection, known) is is_there


async def test_commits_after_a_snapshot_are_not_required(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statement that sets the limits of a long read takes its snapshot."""
    loop, execute = asyncio.get_running_loop(), Connection.execute
    has_snapshot, has_committed = asyncio.Event(), threading.Event()

    async def execute_and_wait(self: Connection, query: str, *values: Any, **options: Any) -> str:
        sets_limits = "READ ONLY" in query and "set_config" in query
        result: str = await execute(self, query, *values, **options)
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
