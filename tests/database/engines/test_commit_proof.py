"""What transactions leave in `commit_proof`, and what is asked of it.

That it tells the truth after a failover or a crash is tested in `test_failover.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest
from sqlalchemy import func, insert, literal, select, text, update
from sqlalchemy.dialects.postgresql import REGCLASS
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

import replaydb as rdb
from replaydb import Store
from replaydb.database.engines import backend_for, postgresql_commits
from replaydb.database.engines.postgresql_commits import Acknowledged, Commit, Transaction
from replaydb.database.schema import commit_proof
from support.connections import transaction
from support.groups import group
from support.ledger import number_of
from support.postgres import PostgresServer
from support.proxy import Proxy, cut_commits

_WAITING = (
    "SELECT count(*) FROM pg_stat_activity "
    "WHERE datname = current_database() AND wait_event_type = 'Lock'"
)


@pytest.fixture
async def engine(postgresql_url: str) -> AsyncIterator[AsyncEngine]:
    made = backend_for(postgresql_url).writer_engine()
    yield made
    await made.dispose()


@asynccontextmanager
async def begun(engine: AsyncEngine) -> AsyncIterator[tuple[AsyncConnection, Transaction]]:
    """A transaction as every write begins one."""
    async with engine.connect() as connection:
        assert await postgresql_commits.begin(connection, 60, Acknowledged())
        yield connection, postgresql_commits.transaction_of(connection)


def question(engine: AsyncEngine, about: Transaction) -> asyncio.Task[bool]:
    end = asyncio.get_running_loop().time() + 30
    return asyncio.create_task(postgresql_commits.was_committed(engine, about, end))


async def locked_out(postgres: PostgresServer, url: str) -> bool:
    """Whether a session waits for a lock."""
    return bool(await asyncio.to_thread(postgres.fetch_int, url, _WAITING))


@pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
@pytest.mark.parametrize("earlier", [0, 1], ids=["the first", "a later one"])
async def test_a_question_waits_for_the_transaction(
    engine: AsyncEngine,
    postgres: PostgresServer,
    postgresql_url: str,
    commits: bool,
    earlier: int,
) -> None:
    for _ in range(earlier):
        async with begun(engine) as (connection, _done):
            await connection.commit()
    async with begun(engine) as (connection, mine):
        assert mine.number == earlier + 1
        asked = question(engine, replace(mine, pid=0))  # nothing is ended
        while not (asked.done() or await locked_out(postgres, postgresql_url)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await (connection.commit() if commits else connection.rollback())
        assert await asked is commits


async def test_a_question_ends_the_transaction_and_no_other(engine: AsyncEngine) -> None:
    """A process of another server may have the same id, as may a later transaction of its own."""
    async with begun(engine) as (innocent, other), begun(engine) as (ended, mine):
        stranger = replace(other, connection_uid=uuid4(), began_at=mine.began_at)
        assert await question(engine, stranger) is False
        assert await innocent.scalar(select(1)) == 1
        assert await question(engine, mine) is False
        await innocent.commit()
        await ended.invalidate()


async def test_numbers_change_in_place(engine: AsyncEngine, postgresql_url: str) -> None:
    """No index is touched, and no more than a page is filled."""
    async with transaction(postgresql_url) as connection:  # without dead rows of other tests
        await connection.execute(text("TRUNCATE commit_proof"))
    table = literal("commit_proof").cast(REGCLASS)
    in_place = select(func.pg_stat_get_xact_tuples_hot_updated(table))
    found = []
    for _ in range(300):
        async with begun(engine) as (connection, _mine):
            found.append(await connection.scalar(in_place))
            await connection.commit()
    async with engine.connect() as connection:
        assert await connection.scalar(select(func.pg_relation_size(table))) == 8192
    assert found.count(0) == 1  # the first inserts the row


async def test_each_commit_is_looked_for_until_a_later_one_is_known(
    engine: AsyncEngine, postgresql_url: str
) -> None:
    """Of transactions at the same time, either may come first in the log of the server."""
    known = Acknowledged()
    async with engine.connect() as first, engine.connect() as second:
        for connection in (first, second):
            assert await postgresql_commits.begin(connection, 60, known)
        for connection in (second, first):
            await connection.commit()
            known.add(postgresql_commits.transaction_of(connection))
        uid = postgresql_commits.transaction_of(second).connection_uid
        for number, is_there in ((0, False), (1, True)):
            async with transaction(postgresql_url) as other:
                of_second = commit_proof.c.connection_uid == uid
                await other.execute(
                    update(commit_proof).where(of_second).values(transaction_number=number)
                )
            assert await postgresql_commits.begin(first, 60, known) is is_there
            await first.commit()
        assert len(known.newest) == 2
        known.add(postgresql_commits.transaction_of(first))
        assert len(known.newest) == 1


async def test_nothing_is_missed_that_may_have_been_deleted(
    engine: AsyncEngine, postgresql_url: str
) -> None:
    known = Acknowledged()
    async with engine.connect() as connection:
        assert await postgresql_commits.begin(connection, 60, known)
        await connection.commit()
        mine = postgresql_commits.transaction_of(connection)
    for age, is_there in ((timedelta(hours=11), False), (timedelta(hours=13), True)):
        known.newest = {mine.connection_uid: Commit(2, mine.began_at - age)}
        async with engine.connect() as connection:
            assert await postgresql_commits.begin(connection, 60, known) is is_there


async def test_rows_of_connections_long_gone_are_deleted(postgresql_url: str) -> None:
    old = {
        "transaction_number": 7,
        "written_at": func.now() - postgresql_commits.RETENTION - timedelta(seconds=1),
    }
    gone, late = uuid4(), uuid4()
    async with transaction(postgresql_url) as connection:
        for uid in (gone, late):
            await connection.execute(insert(commit_proof).values(connection_uid=uid, **old))
    async with transaction(postgresql_url) as connection:
        is_late = commit_proof.c.connection_uid == late
        await connection.execute(update(commit_proof).where(is_late).values(transaction_number=8))
        async with Store.open(postgresql_url) as store:
            await store.buffer("math")  # does not wait for the one that is in use
    assert await number_of(postgresql_url, commit_proof) == 2
    async with transaction(postgresql_url) as connection:
        assert gone not in (await connection.scalars(select(commit_proof.c.connection_uid))).all()


async def test_nothing_is_asked_when_the_row_may_be_gone(
    proxied_url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql_commits, "ASKED_WITHIN_SECONDS", 0.0)
    async with Store.open(proxied_url, run="test") as store:
        buffer = await store.buffer("math")
        proxy.rule = cut_commits("answer")
        with pytest.raises(rdb.OutcomeUnknownError):
            await buffer.put(group("new"))
