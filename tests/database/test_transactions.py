"""Retries of transactions: how often, and only while the store is open."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from unittest.mock import Mock, call

import pytest
from sqlalchemy import func, insert, make_url, select, text, update

import replaydb as rdb
from replaydb import Store
from replaydb.database import migrations
from replaydb.database.postgresql.transactions import PostgresqlTransactions
from replaydb.database.runtime.protocol import LostRaceError
from replaydb.database.runtime.revisions import version_table
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import ATTEMPTS
from replaydb.database.tables.schema import REVISIONS, compatibility, run
from support.connections import transaction
from support.groups import groups
from support.proxy import Proxy


async def test_a_permanent_constraint_violation_is_an_error(store: Store, engine_name: str) -> None:
    """On PostgreSQL it may be a lost race, so it is retried, but not until the deadline."""
    await (await store.buffer("math")).put([], cursor={"data": 1})  # inserts the run
    attempts = 0

    def work(session: Session) -> None:
        nonlocal attempts
        attempts += 1
        session.run(insert(run).values(name="test", started_at=session.now(), metadata={}))

    with pytest.raises(rdb.DatabaseError):
        await asyncio.wait_for(store._database.write(work), 60)
    assert attempts == (ATTEMPTS if engine_name == "postgresql" else 1)


async def test_races_that_are_always_lost_are_an_error(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replaydb.database.runtime.transactions.random.uniform", lambda *_: 0.0)
    races = iter(range(1, 100))

    def work(_: Session) -> None:
        raise LostRaceError(f"race {next(races)}")

    with pytest.raises(rdb.DatabaseError, match=rf"lost {ATTEMPTS} races .*\(race 8\).* repeated"):
        await store._database.write(work)


async def test_callers_can_withdraw_after_each_attempt_that_stored_nothing(store: Store) -> None:
    gate = Mock(answer_by=asyncio.get_running_loop().time() + 60)
    attempts = iter((LostRaceError("first"), LostRaceError("second"), None))

    def work(_: Session) -> None:
        if error := next(attempts):
            raise error

    await store._database.write(work, gate=gate)
    assert gate.method_calls == [call.open(), call.open(), call.close()]


async def test_a_write_on_sqlite_excludes_others_from_its_beginning(sqlite_url: str) -> None:
    """Otherwise it could read what another one changes before it writes."""

    def work(_: Session) -> None:
        with closing(sqlite3.connect(str(make_url(sqlite_url).database), timeout=0)) as other:
            other.execute("BEGIN")
            other.execute("SELECT * FROM buffer")
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("DELETE FROM buffer")

    async with Store.open(sqlite_url) as store:
        await store._database.write(work)


async def test_a_commit_that_fails_during_its_read(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read is cancelled, and the caller gets the error of the commit."""

    async def fail(*_: object) -> None:
        raise rdb.DatabaseError("no commit")

    def read(session: Session, _: bool, pinned: Callable[[], object]) -> None:
        pinned()
        session.run(select(func.pg_sleep(60)))

    async with Store.open(postgresql_url) as store:
        database = store._database
        monkeypatch.setattr(PostgresqlTransactions, "_commit", fail)
        with pytest.raises(rdb.DatabaseError, match="no commit"):
            await asyncio.wait_for(
                database.write_then_read(
                    lambda _: True, read, is_needed=bool, num_bytes=lambda _: 0
                ),
                60,
            )


async def test_a_changed_revision_is_reported(own_url: str) -> None:
    """An open store has read the revision before the change."""
    await migrations.write_format(own_url, 1)  # later ones prevent the downgrade
    async with Store.open(own_url, run="a") as store:
        buffer = await store.buffer("math")
        await buffer.put(groups(2))
        before = "0005"
        await migrations.downgrade(own_url, before)
        for call in (buffer.put(groups(1, "more")), buffer.sample(1), buffer.stats()):
            with pytest.raises(rdb.SchemaOutOfDateError, match="run: replaydb db upgrade") as old:
                await call
            assert (old.value.current, old.value.expected) == (before, REVISIONS[-1])
    await migrations.upgrade(own_url)
    async with Store.open(own_url) as store:
        assert len(await (await store.buffer("math")).sample(2)) == 2
        async with transaction(own_url) as connection:
            await connection.execute(text("ALTER TABLE run RENAME COLUMN name TO title"))
            await connection.execute(update(version_table).values(version_num="9999"))
            await connection.execute(update(compatibility).values(min_client="9.0.0"))
        with pytest.raises(rdb.ClientTooOldError, match=r"replaydb 9\.0\.0 or later"):
            await store.runs()


async def test_a_terminated_call_is_not_run_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing takes less time than the pause before the next attempt."""
    attempts, lost = 0, asyncio.Event()
    loop = asyncio.get_running_loop()

    def work(_: Session) -> None:
        nonlocal attempts
        attempts += 1
        loop.call_soon_threadsafe(lost.set)
        raise LostRaceError

    monkeypatch.setattr("replaydb.database.runtime.transactions.random.uniform", lambda *_: 0.5)
    call = asyncio.create_task(store._database.write(work))
    await lost.wait()
    await asyncio.wait_for(store.close(timeout=0.1), 60)
    with pytest.raises(rdb.StoreClosedError):
        await asyncio.wait_for(call, 60)
    assert attempts == 1


async def test_closing_does_not_wait_for_the_end_of_an_outage(
    proxied_url: str, proxy: Proxy
) -> None:
    async with Store.open(proxied_url, run="far") as store:
        buffer = await store.buffer("math")
        proxy.refuse()
        proxy.drop()
        call = asyncio.create_task(buffer.count())
        await asyncio.sleep(0.2)
        assert not call.done()
        await asyncio.wait_for(store.close(timeout=None), 60)
        with pytest.raises(rdb.DatabaseUnavailableError):
            await call
