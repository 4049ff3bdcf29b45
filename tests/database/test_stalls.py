"""Stalled networks and peers: every call ends within its time limit, with a typed error."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import asyncpg
import pytest
from sqlalchemy import text

import replaydb as rdb
from replaydb import Buffer, Store
from replaydb.database.repository import tasks
from replaydb.database.sqlite.connection import SqliteConnection
from support.connections import transaction
from support.groups import episode, group, groups, long_group
from support.invariants import check_invariants
from support.proxy import CLOSE, Fate, Proxy, break_messages, cut_commits, on_nth

CALLS: dict[str, Callable[[Buffer], Awaitable[Any]]] = {
    "put": lambda buffer: buffer.put(group(), timeout=0.2),
    "patient put": lambda buffer: buffer.put(group()),
    "sample": lambda buffer: buffer.sample(1, timeout=0.2),
    "impatient sample": lambda buffer: buffer.sample(1),
    "waiting sample": lambda buffer: buffer.sample(99, timeout=0.2),
    "lease": lambda buffer: buffer.lease(1, ttl=60, timeout=0.2).__aenter__(),
    "count": lambda buffer: buffer.count(),
    "get": lambda buffer: buffer.get([1]),
    "find": lambda buffer: buffer.find(limit=1),
    "update": lambda buffer: buffer.update_priorities([1], [2.0]),
    "wait_until": lambda buffer: buffer.wait_until(at_least=99, timeout=0.2),
    "admission": lambda buffer: buffer.admission(1, max_staleness=0, timeout=0.2),
}

LIMITS = {
    "replaydb.database.runtime.transactions.PATIENCE_SECONDS": 0.5,
    "replaydb.buffer.inspecting.BULK_SECONDS": 0.5,
    "replaydb.buffer.managing.BULK_SECONDS": 0.5,
    "replaydb.buffer.waiting.GRACE_SECONDS": 0.3,
    "replaydb.buffer.drawing.RELEASE_SECONDS": 0.3,
    "replaydb.database.postgresql.transactions.COMMIT_SECONDS": 0.3,
    "replaydb.database.postgresql.connecting.ROLLBACK_SECONDS": 0.2,
}


HURRIED: dict[str, Callable[[Buffer, float], Awaitable[Any]]] = {
    "put": lambda buffer, timeout: buffer.put(group("new"), timeout=timeout),
    "open_group": lambda buffer, timeout: buffer.open_group(
        "gsm8k", "new", 2, deadline=60, timeout=timeout
    ),
    "add_episode": lambda buffer, timeout: buffer.add_episode("pieces", episode(), timeout=timeout),
    "sample": lambda buffer, timeout: buffer.sample(1, timeout=timeout),
    "lease": lambda buffer, timeout: buffer.lease(1, ttl=60, timeout=timeout).__aenter__(),
}


def some_hurried(*names: str) -> list[Any]:
    """Return the names of all calls; those not given are for `make test-all`."""
    return [
        name if name in names else pytest.param(name, marks=pytest.mark.nightly) for name in HURRIED
    ]


@contextmanager
def short_limits(**limits: float) -> Iterator[None]:
    """Shorten the default time limits. A call that ignores them hangs and fails the test."""
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in (LIMITS | limits).items():
            patch.setattr(name, seconds)
        yield


@pytest.fixture
async def far(proxied_url: str) -> AsyncIterator[Store]:
    store = await Store.open(proxied_url, run="far")
    yield store
    await asyncio.wait_for(store.close(timeout=0.2), 60)


@asynccontextmanager
async def far_buffers(url: str, names: Iterable[str]) -> AsyncIterator[dict[str, Buffer]]:
    """Open a buffer for each name, each in its own store, so that calls share no connections."""
    async with AsyncExitStack() as stack:
        buffers = {}
        for name in names:
            store = await Store.open(url, run=name)
            stack.push_async_callback(store.close, timeout=0.2)
            buffers[name] = await store.buffer(name)
        yield buffers


async def outcomes_of(calls: dict[str, Awaitable[Any]]) -> dict[str, type]:
    """Run all calls at once. Returns the type of each result or error; none may hang."""
    results = await asyncio.gather(
        *(asyncio.wait_for(call, 60) for call in calls.values()), return_exceptions=True
    )
    return {name: type(result) for name, result in zip(calls, results, strict=True)}


@pytest.mark.parametrize(
    ("reading", "connected"),
    [
        ("in the draw", False),
        ("from a snapshot", True),
        pytest.param("in the draw", True, marks=pytest.mark.nightly),
        pytest.param("from a snapshot", False, marks=pytest.mark.nightly),
    ],
    indirect=["reading"],
)
@pytest.mark.usefixtures("reading")
async def test_a_stalled_network(proxied_url: str, proxy: Proxy, connected: bool) -> None:
    async with far_buffers(proxied_url, CALLS) as buffers:
        for buffer in buffers.values():
            await buffer.put(groups(3))
        if not connected:
            proxy.drop()
        proxy.stall()
        with short_limits():
            outcomes = await outcomes_of({name: CALLS[name](buffers[name]) for name in CALLS})
        assert outcomes == dict.fromkeys(CALLS, rdb.DatabaseUnavailableError)
        proxy.heal()
        for buffer in buffers.values():
            assert await buffer.count() >= 3


@contextmanager
def in_a_hurry() -> Iterator[None]:
    """Let only its own timeout end a call, and not the default time limit."""
    with short_limits(**{"replaydb.database.runtime.transactions.PATIENCE_SECONDS": 600.0}):
        yield


async def test_a_timeout_bounds_the_first_call(proxied_url: str, proxy: Proxy) -> None:
    """The first call inserts the run, while other calls of the store wait for it."""
    async with far_buffers(proxied_url, HURRIED) as buffers:
        proxy.stall()
        calls = {
            f"{name} {number}": call(buffers[name], 0.2)
            for name, call in HURRIED.items()
            for number in range(3)
        }
        with in_a_hurry():
            outcomes = await outcomes_of(calls)
        assert outcomes == dict.fromkeys(calls, rdb.DatabaseUnavailableError)


@pytest.mark.parametrize("name", some_hurried("put", "open_group", "lease"))
async def test_a_timeout_bounds_reading_the_outcome_of_a_commit(
    far: Store, proxy: Proxy, name: str, pass_time: Callable[[float], None]
) -> None:
    buffer = await far.buffer("math")
    await buffer.put(groups(2))
    await buffer.open_group("gsm8k", "pieces", 2)
    await notified(far)
    cut = cut_commits("answer")
    proxy.rule = lambda message: CLOSE if proxy.num_cut else cut(message)
    with in_a_hurry():
        hurried = asyncio.ensure_future(HURRIED[name](buffer, 60.0))
        await proxy.until_cut()
        pass_time(60.0)
        with pytest.raises(rdb.OutcomeUnknownError):
            await asyncio.wait_for(hurried, 60)


@pytest.mark.parametrize("name", some_hurried("add_episode", "sample"))
async def test_a_stalled_answer_is_read_on_another_connection(
    proxied_url: str, proxy: Proxy, name: str, pass_time: Callable[[float], None]
) -> None:
    """This happens within the timeout of one call, although others share the transaction."""
    # The time of a connection that is being opened passes, too.
    async with Store.open(f"{proxied_url}?connect_timeout=6000", run="far") as far:
        buffer = await far.buffer("math")
        await buffer.put(groups(2))
        await buffer.open_group("gsm8k", "pieces", 3)
        fate = Fate(0, "stall")
        proxy.rule = on_nth(lambda one: one.committed and one.wrote, fate, first=1, every=None)
        hurried = asyncio.ensure_future(HURRIED[name](buffer, 600.0))
        with short_limits(
            **{
                "replaydb.database.runtime.transactions.PATIENCE_SECONDS": 6000.0,
                "replaydb.database.postgresql.transactions.COMMIT_SECONDS": 60.0,
            }
        ):
            if name in ("sample", "lease"):  # puts do not share its transaction, and could be first
                await proxy.until_cut()
            others = asyncio.gather(
                buffer.put(group("patient")), buffer.add_episode("pieces", episode())
            )
            await proxy.until_cut()
            pass_time(601.0)
            await asyncio.wait_for(hurried, 60)
            proxy.heal()
            answers = await asyncio.wait_for(others, 60)
        assert answers[1] == "pending"


async def notified(store: Store) -> None:
    """Wait until the notifications of earlier commits were sent."""
    signal: Any = store._database.signal

    async def published() -> None:
        await signal._publisher  # it never fails

    await signal._thread.run(published())


@pytest.mark.parametrize("kinds", [b"B", b"Q"], ids=["a statement", "the commit"])
async def test_a_network_that_stalls_during_a_transaction(
    far: Store, proxy: Proxy, kinds: bytes, postgresql_url: str
) -> None:
    buffer = await far.buffer("math", capacity=rdb.Capacity(groups=10))
    await buffer.put(groups(3))
    await notified(far)  # its messages would be counted, too
    proxy.rule = break_messages("stall", "client", kinds, first=2)
    with short_limits(), pytest.raises(rdb.DatabaseUnavailableError):
        await asyncio.wait_for(buffer.put(long_group("new", 2000), timeout=0.2), 60)
    async with Store.open(postgresql_url, run="near") as near:
        there = await near.buffer("math")
        await asyncio.wait_for(there.put(group("other")), 60)
    proxy.heal()
    assert await buffer.put(long_group("new", 2000), on_duplicate="ignore")
    assert await buffer.count() == 5
    await check_invariants(postgresql_url)


async def test_a_stalled_payload_blocks_no_other_call(
    proxied_url: str, proxy: Proxy, postgresql_url: str
) -> None:
    async with Store.open(postgresql_url, run="near") as near:
        there = await near.buffer("math", capacity=rdb.Capacity(groups=2))
        await there.put(groups(2))
        far = await Store.open(proxied_url, run="far")
        buffer = await far.buffer("math")
        proxy.rule = break_messages("stall", "client", b"B", num_bytes=5000, at_least=10_000)
        stuck = asyncio.create_task(buffer.put(long_group("stuck", 5000)))
        await proxy.until_cut()
        for i in range(3):
            await asyncio.wait_for(there.put(group(f"{i}")), 60)
        proxy.heal()
        await asyncio.wait_for(stuck, 60)
        await far.close()
        assert await there.count(statuses="completed") == 2
    await check_invariants(postgresql_url)


async def test_a_read_whose_connection_is_lost_is_run_again(far: Store, proxy: Proxy) -> None:
    buffer = await far.buffer("math")
    ids = await buffer.put(groups(3), cursor={"data": 1})
    await buffer.sample(1)
    await buffer.lease(1, ttl=600)
    reads: list[Callable[[], Awaitable[Any]]] = [
        buffer.count,
        lambda: buffer.get(ids),
        buffer.stats,
        lambda: buffer.peek(2),
        buffer.draws,
        buffer.leases,
        buffer.metrics,
        lambda: buffer.cursor("data"),
        far.buffers,
        lambda: buffer.admission(8, max_staleness=0),
    ]
    for number, read in enumerate(reads, 1):
        proxy.rule = break_messages("close", "server", b"D", num_bytes=3)
        await asyncio.wait_for(read(), 60)
        assert proxy.num_cut == number


async def test_a_stalled_notification_recovers(
    far: Store, proxy: Proxy, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replaydb.database.runtime.signals.RECHECK_SECONDS", 60.0)
    buffer = await far.buffer("math")
    async with Store.open(postgresql_url) as near:
        there = await near.buffer("math")
        await buffer.put(group())  # and opens a connection for notifications
        proxy.stall()
        with short_limits(**{"replaydb.database.postgresql.signal.NOTIFY_TIMEOUT_SECONDS": 0.2}):
            far._database.signal.announce()
            await asyncio.wait_for(notified(far), 60)
        proxy.heal()
        waiting = asyncio.create_task(there.sample(2, timeout=50))
        await asyncio.sleep(0.3)
        await buffer.put(group())
        assert len(await asyncio.wait_for(waiting, 60)) == 2


async def test_a_notification_on_a_connection_that_ends_is_lost(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ending(*_: object) -> None:
        raise asyncpg.InternalClientError("cannot switch to state 15")

    async with Store.open(postgresql_url) as store:
        await store.buffers()  # starts the thread of the database
        monkeypatch.setattr("replaydb.database.postgresql.connecting.Connection.execute", ending)
        store._database.signal.announce()
        await asyncio.wait_for(notified(store), 60)


async def test_close_terminates_calls_that_do_not_end(far: Store, proxy: Proxy) -> None:
    buffer = await far.buffer("math")
    await buffer.put(groups(3))
    proxy.stall()
    put = asyncio.create_task(buffer.put(group()))
    sample = asyncio.create_task(buffer.sample(99, timeout=None))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(far.close(timeout=0.1), 60)
    outcomes = await asyncio.wait_for(asyncio.gather(put, sample, return_exceptions=True), 60)
    for one in outcomes:
        assert isinstance(one, rdb.StoreClosedError | rdb.DatabaseUnavailableError)


async def _closed_with_a_queue(
    store: Store, buffer: Buffer, heal: Callable[[], Awaitable[Any]]
) -> None:
    """Close a store with more calls than connections. No call may continue after that."""
    calls = [
        *(buffer.update_priorities([1], [2.0]) for _ in range(5)),
        *(buffer.sample(1, rdb.Fifo(), timeout=None) for _ in range(5)),
    ]
    tasks = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0.05)
    await asyncio.wait_for(store.close(timeout=0.1), 60)
    await heal()
    for one in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60):
        assert isinstance(one, rdb.StoreClosedError | rdb.DatabaseUnavailableError)


async def _untouched(url: str) -> None:
    async with Store.open(url) as store:
        [stored] = await (await store.buffer("math")).get([1])
    assert (stored.priority, stored.times_sampled) == (1.0, 0)


async def test_close_ends_waits_for_a_connection(
    proxied_url: str, proxy: Proxy, postgresql_url: str
) -> None:
    store = await Store.open(proxied_url, run="far", pool_size=1)
    buffer = await store.buffer("math")
    await buffer.put(group())

    async def heal() -> None:
        proxy.heal()

    await notified(store)
    proxy.stall()
    await _closed_with_a_queue(store, buffer, heal)
    await _untouched(postgresql_url)


async def test_close_ends_waits_for_a_locked_file(sqlite_url: str) -> None:
    store = await Store.open(sqlite_url, run="a")
    buffer = await store.buffer("math")
    await buffer.put(group())
    async with transaction(sqlite_url) as other:
        await other.exec_driver_sql("SELECT 1")  # BEGIN IMMEDIATE runs with it
        await _closed_with_a_queue(store, buffer, other.rollback)
    await _untouched(sqlite_url)


@pytest.mark.parametrize("silent", [False, True])
async def test_a_temporary_outage_of_the_server(
    proxied_url: str, proxy: Proxy, postgresql_url: str, silent: bool
) -> None:
    async with Store.open(f"{proxied_url}?connect_timeout=1", run="far") as store:
        buffer = await store.buffer("math")
        ids = await buffer.put(groups(4))
        lease = await buffer.lease(1, ttl=600)
        waiting = asyncio.create_task(buffer.sample(6, timeout=60))
        await asyncio.sleep(0.1)
        if silent:  # connections are accepted, and nothing answers
            proxy.stall()
        else:
            proxy.refuse()
        proxy.drop()
        calls: list[Awaitable[Any]] = [
            buffer.put(groups(3, "code")),
            buffer.count(),
            buffer.sample(1, timeout=30),
            buffer.update_priorities(ids, [2.0] * 4),
            lease.ack(),
        ]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(1.5 if silent else 0.5)  # longer than connect_timeout
        assert not any(task.done() for task in [*tasks, waiting])
        proxy.heal()
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
        assert len(await asyncio.wait_for(waiting, 60)) == 6
    await check_invariants(postgresql_url)


async def test_a_call_that_times_out_before_it_begins_does_not_wait(sqlite_url: str) -> None:
    """It times out just before its thread begins, so the thread could not be interrupted."""
    async with Store.open(sqlite_url, run="a") as store, transaction(sqlite_url) as other:
        await other.exec_driver_sql("SELECT 1")  # BEGIN IMMEDIATE runs with it
        with short_limits(**{"replaydb.database.sqlite.connection.LOCK_SECONDS": 60.0}):
            async with asyncio.timeout(30):
                for _ in range(20):
                    now = asyncio.get_running_loop().time()
                    with pytest.raises(rdb.DatabaseUnavailableError):
                        await store._database.write(
                            lambda session: session.core.scalar(text("SELECT 1")), end=now
                        )


async def test_all_waiting_writers_share_one_time_limit(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not each wait for the lock, one after another."""
    begun = 0
    begin = SqliteConnection._begin

    def counted(connection: SqliteConnection) -> None:
        nonlocal begun
        begun += connection.writes
        begin(connection)

    monkeypatch.setattr(SqliteConnection, "_begin", counted)
    async with Store.open(sqlite_url, run="a") as store:
        buffer = await store.buffer("math")
        await buffer.put(groups(2))
        async with transaction(sqlite_url) as other:
            await other.exec_driver_sql("SELECT 1")  # BEGIN IMMEDIATE runs with it
            begun = 0
            puts = [buffer.put(group(f"{i}")) for i in range(20)]
            others = [buffer.put(group("late"), timeout=0.2), buffer.sample(1, timeout=0.2)]
            with short_limits():
                outcomes = await asyncio.gather(*puts, *others, return_exceptions=True)
            assert {type(one) for one in outcomes} == {rdb.DatabaseUnavailableError}
            assert await buffer.count() == 2  # readers do not wait
            assert begun <= 3
        await buffer.put(group("0"))
        assert await buffer.count() == 3


@pytest.mark.parametrize("times", [2, 10**6], ids=["for a while", "for good"])
async def test_a_reader_waits_for_the_recovery_of_the_log(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """The wait is not inside SQLite, where it could not be ended."""
    left = 0
    begin = SqliteConnection._begin

    def begin_later(connection: SqliteConnection) -> None:
        nonlocal left
        if left and not connection.writes:
            left -= 1
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorname = "SQLITE_BUSY_RECOVERY"
            raise error
        begin(connection)

    monkeypatch.setattr(SqliteConnection, "_begin", begin_later)
    async with Store.open(sqlite_url, run="a") as store:
        buffer = await store.buffer("math")
        await buffer.put(groups(2))
        left = times
        if times == 2:
            assert await buffer.count() == 2
        else:
            with short_limits(), pytest.raises(rdb.DatabaseUnavailableError, match="BUSY_RECOVERY"):
                await buffer.count()
        left = 0


async def test_a_draw_waits_for_a_reader_before_it_locks(sqlite_url: str) -> None:
    async with Store.open(sqlite_url, run="a") as store:
        buffer = await store.buffer("math")
        await buffer.put(groups(2))
        database = store._database
        for _ in range(database.backend.traits.concurrent_draws):
            await database._draws.acquire()
        sample = asyncio.create_task(buffer.sample(1))
        await asyncio.sleep(0.1)
        await asyncio.wait_for(buffer.put(group()), 60)
        assert not sample.done()
        for _ in range(database.backend.traits.concurrent_draws):
            database._draws.release()
        assert len(await sample) == 1


async def test_a_frozen_client_loses_its_locks(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends its transaction, which runs again when the client continues."""
    frozen_url = f"{postgresql_url}&frozen_client_timeout=0.5"
    locked, resume, lock = asyncio.Event(), threading.Event(), tasks.states_of
    loop = asyncio.get_running_loop()

    def lock_and_freeze(*arguments: Any) -> Any:
        monkeypatch.undo()
        found = lock(*arguments)
        loop.call_soon_threadsafe(locked.set)
        assert resume.wait(60)
        return found

    async with Store.open(frozen_url, run="a") as frozen, Store.open(postgresql_url) as other:
        here, there = await frozen.buffer("math"), await other.buffer("math")
        await there.put(groups(2))
        monkeypatch.setattr(tasks, "states_of", lock_and_freeze)
        late = asyncio.create_task(here.put(group("late")))
        await locked.wait()
        await asyncio.wait_for(there.put(group("other")), 60)
        assert not late.done()
        resume.set()
        assert len(await late) == 1
        assert await there.count() == 4
