"""A lease that never reached its caller is released as soon as the database can be reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select

import replaydb as rdb
from replaydb import Buffer, Lease, Store
from replaydb.database.repository.draw_request import Drawn
from replaydb.database.runtime.protocol import LostRaceError
from replaydb.database.tables import schema
from support.connections import transaction
from support.engines import postgresql_nightly
from support.groups import groups
from support.invariants import check_invariants, group_rows
from support.postgres import PostgresServer
from support.proxy import CLOSE, Fate, Message, Proxy, Rule, cut_commits, on_nth, pass_all


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the wait for the release, and the time until a commit counts as unknown."""
    monkeypatch.setattr("replaydb.buffer.drawing.RELEASE_SECONDS", 0.1)
    monkeypatch.setattr("replaydb.database.postgresql.transactions.COMMIT_SECONDS", 0.2)


@pytest.fixture
async def near(postgresql_url: str) -> AsyncIterator[Buffer]:
    """A buffer with two groups."""
    async with Store.open(postgresql_url, run="near") as store:
        buffer = await store.buffer("math")
        await buffer.put(groups(2))
        yield buffer
    await check_invariants(postgresql_url)


async def lease_of(buffer: Buffer, timeout: float) -> Lease:
    """Lease both groups, for a time that no test waits for."""
    return await buffer.lease(2, ttl=36_000, timeout=timeout)


def _lost_race() -> rdb.DatabaseError:
    error = rdb.DatabaseError("lost 8 races")
    error.__cause__ = LostRaceError()
    return error


async def cancelled(buffer: Buffer, monkeypatch: pytest.MonkeyPatch, url: str) -> AsyncExitStack:
    """Cancel a lease that was committed. Until the block ends, another call has the lock."""
    committed = asyncio.Event()

    async def stuck(*_: Any) -> Any:
        committed.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(Buffer, "_delivered", stuck)
        call = asyncio.create_task(lease_of(buffer, 0))
        await committed.wait()
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(transaction(url))
        await other.execute(select(schema.task).with_for_update())
        call.cancel()
        await asyncio.wait_for(asyncio.wait([call]), 60)
        assert call.cancelled()
        assert len(await buffer.leases()) == 1
        return stack.pop_all()


async def test_cancelled_while_another_call_has_the_lock(
    buffer: Buffer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await buffer.put(groups(2))
    async with await cancelled(buffer, monkeypatch, url):
        pass
    await lease_of(buffer, 30)
    assert {row["attempts"] for row in await group_rows(url)} == {0}


@postgresql_nightly
@pytest.mark.parametrize(
    ("error", "is_repeated"),
    [
        (rdb.DatabaseUnavailableError("a restart"), True),
        (rdb.DatabaseFullError("no space"), True),
        (_lost_race(), True),
        (rdb.DatabaseError("permission denied"), False),
        (rdb.DatabaseReadOnlyError("a standby"), False),
        (rdb.DatabaseReplacedError("an older state"), False),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_only_temporary_errors_are_retried(
    buffer: Buffer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: rdb.DatabaseError,
    is_repeated: bool,
) -> None:
    monkeypatch.setattr("replaydb.buffer.drawing.RELEASE_PAUSE", 0.0)
    monkeypatch.setattr("replaydb.buffer.drawing.RELEASE_SECONDS", 60.0)
    await buffer.put(groups(2))
    lease = await lease_of(buffer, 0)
    drawn = replace(Drawn.empty(), ids=lease.batch.ids, lease_id=lease.id)
    drawn = replace(drawn, task_names=[one.task_name for one in lease.batch])
    write = buffer._write
    errors = iter([error, error])

    async def failing(*arguments: Any) -> Any:
        for raised in errors:
            raise raised
        return await write(*arguments)

    monkeypatch.setattr(buffer, "_write", failing)
    await buffer._release_undelivered(drawn, 36_000, "not delivered")
    assert not buffer._releasing
    assert len(await buffer.leases()) == (0 if is_repeated else 1)
    assert (f"lease {lease.id} was not delivered" in caplog.text) is not is_repeated


async def test_closing_does_not_wait_long_for_the_release(
    store: Store, buffer: Buffer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await buffer.put(groups(2))
    async with await cancelled(buffer, monkeypatch, url):
        await asyncio.wait_for(store.close(timeout=None), 60)
    assert not buffer._releasing


async def test_a_commit_of_unknown_outcome(proxied_url: str, proxy: Proxy, near: Buffer) -> None:
    async with Store.open(proxied_url, run="far") as far:
        buffer = await far.buffer("math")
        proxy.rule = _cut_off_after(proxy, cut_commits("answer"))
        with pytest.raises(rdb.OutcomeUnknownError):
            await lease_of(buffer, 0.2)
        [listed] = await near.leases()
        assert listed.num_groups == 2
        proxy.heal()
        lease = await lease_of(near, 30)
        assert {one.attempts for one in await near.find(lease.batch.ids)} == {0}


async def test_a_commit_that_arrives_later(
    proxied_url: str, proxy: Proxy, near: Buffer, postgres: PostgresServer, postgresql_url: str
) -> None:
    """It reaches the server after the client has reconnected."""
    async with Store.open(proxied_url, run="far") as far:
        buffer = await far.buffer("math")
        stalled = Fate(0, "stall")
        commit = on_nth(lambda one: one.asks_to_commit and one.wrote, stalled, first=1, every=None)
        proxy.rule = _cut_off_after(proxy, commit)
        with pytest.raises(rdb.OutcomeUnknownError):
            await lease_of(buffer, 0.2)
        assert await near.leases() == []
        proxy.rule = pass_all  # stalled connections stay stalled
        await postgres.until_blocked(postgresql_url)
        proxy.heal()
        await lease_of(near, 30)


def _cut_off_after(proxy: Proxy, rule: Rule) -> Rule:
    """Apply `rule` until a message is cut. After that, close every connection."""

    def then(message: Message) -> Fate:
        return CLOSE if proxy.num_cut else rule(message)

    return then
