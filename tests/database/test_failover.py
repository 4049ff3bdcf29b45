"""Failover: a server that dies during a commit is replaced, or restarts without the commit.

In each test a put waits for the answer to its COMMIT. Before it can read the outcome, other clients
have used the id of its transaction. The put must return the ids of groups that exist, and must
store its group once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from replaydb import DatabaseReplacedError, PayloadsReadOnlyError, Store
from support import pgbouncer
from support.cluster import DATABASE, Node, template
from support.groups import group
from support.invariants import check_invariants
from support.proxy import CLOSE, Proxy, cut_commits, running_proxy

_WAITING_XID = "SELECT backend_xid::text FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
_NEXT_XID = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text"
_HAS_ALL = "SELECT pg_last_wal_receive_lsn() >= '{}'::pg_lsn"
_FLUSHED = "SELECT pg_current_wal_flush_lsn()::text"


@pytest.fixture(scope="module")
def stopped() -> Iterator[Node]:
    """A server with replaydb's tables that was shut down cleanly."""
    with template() as node:
        yield node


@pytest.fixture
def primary(stopped: Node) -> Iterator[Node]:
    """A server for one test, which is not running yet."""
    with closing(stopped.clone()) as node:
        yield node


@pytest.fixture
def proxy(primary: Node) -> Iterator[Proxy]:
    """A proxy whose address leads to the current primary."""
    with running_proxy(primary.url()) as running:
        yield running


async def until(query: Callable[[], Awaitable[Any]]) -> Any:
    """Poll until there is a result, and return it."""
    async with asyncio.timeout(30):
        while not (found := await query()):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
    return found


async def put_by_others(server: Node, xid: int) -> None:
    """Commit puts of another store with transaction ids up to this one."""
    async with Store.open(server.url(), run="others") as store:
        buffer = await store.buffer("math")
        assert await buffer.count() == 1  # without the put that waits
        while int(await server.ask(_NEXT_XID)) <= xid:
            await buffer.put(group())


@asynccontextmanager
async def stored_once(url: str) -> AsyncIterator[Callable[[], None]]:
    """Yield a function that begins a put. At the end of the block its group must exist once."""
    async with Store.open(url, run="test") as store:
        buffer = await store.buffer("math")
        await buffer.put(group("before"))
        puts: list[asyncio.Task[list[int]]] = []

        def put() -> None:
            puts.append(asyncio.create_task(buffer.put(group("new"))))

        yield put
        [ids] = await asyncio.wait_for(asyncio.gather(*puts), 30)
        found = await buffer.find(limit=1000)
        assert [one.id for one in found if one.group_uid == "new"] == ids


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("not replicated", marks=pytest.mark.nightly),
        pytest.param("replicated", marks=pytest.mark.nightly),
        "not replicated, cut off",
        pytest.param("not replicated, two failovers", marks=pytest.mark.nightly),
        "replicated, two failovers",
        "not replicated, PgBouncer",
    ],
)
async def test_the_primary_dies(primary: Node, proxy: Proxy, case: str) -> None:
    standbys = [primary.clone() for _ in range(2 if "two failovers" in case else 1)]
    for standby, followed in zip(standbys, [primary, *standbys], strict=False):
        standby.follow(followed)
    primary.configure("synchronous_standby_names = '*'\nsynchronous_commit = remote_apply")
    for node in (primary, *standbys):
        node.start()
    first, last = standbys[0], standbys[-1]
    with ExitStack() as stack:
        url = proxy.url
        if "PgBouncer" in case:
            if pgbouncer.executable() is None:
                pytest.skip(pgbouncer.MISSING)
            url = stack.enter_context(pgbouncer.pgbouncer(url, "server_login_retry = 0.01")).url
        async with stored_once(url) as put:
            if "not replicated" in case:
                first.stop()
            else:
                await first.ask("SELECT pg_wal_replay_pause()")
            put()
            xid = await until(lambda: primary.ask(_WAITING_XID))
            if "cut off" in case:
                # The server now commits without a standby. The proof must wait for the standby.
                proxy.drop()
                await until(lambda: primary.ask(f"{_WAITING_XID} AND backend_xid <> '{xid}'"))
            if "not replicated" in case:
                primary.kill()
                first.start()
                first.promote()
                await put_by_others(first, int(xid))
            else:
                await caught_up(first, primary)
                primary.kill()
                first.promote()
            if last is not first:
                await caught_up(last, first)
                first.kill()
                last.promote()
            proxy.route_to(last.url())
    await check_invariants(last.url())


async def caught_up(standby: Node, followed: Node) -> None:
    """Wait until a standby has received all that another server has on disk."""
    flushed = await followed.ask(_FLUSHED)
    await until(lambda: standby.ask(_HAS_ALL.format(flushed)))


async def test_a_call_waits_for_the_promotion(primary: Node) -> None:
    """One of several hosts is promoted, and the URL requires one that accepts writes."""
    standby = primary.clone()
    standby.follow(primary)
    standby.configure("log_connections = on")
    primary.start()
    standby.start()
    async with stored_once(primary.url(standby, target_session_attrs="read-write")) as put:
        await caught_up(standby, primary)
        primary.kill()
        put()
        log = standby.folder / "log"
        await until(lambda: asyncio.to_thread(lambda: "=replaydb" in log.read_text()))
        standby.promote()


async def test_a_crash_that_loses_an_acknowledged_commit(primary: Node, proxy: Proxy) -> None:
    """The commit was not on disk yet, and its transaction id is assigned again."""
    primary.configure("synchronous_commit = off\nwal_writer_delay = 10s")
    primary.start()
    async with stored_once(proxy.url) as put:
        await primary.ask("CHECKPOINT")
        cut = cut_commits("answer")
        proxy.rule = lambda message: CLOSE if proxy.num_cut else cut(message)
        put()
        await proxy.until_cut()
        xid = await primary.ask(_NEXT_XID)
        primary.kill()
        primary.start()
        await put_by_others(primary, int(xid))
        proxy.heal()
    await check_invariants(primary.url())


@pytest.mark.parametrize(
    "through", ["directly", pytest.param("through PgBouncer", marks=pytest.mark.nightly)]
)
async def test_an_older_state_of_the_database_is_detected(
    primary: Node, proxy: Proxy, through: str
) -> None:
    """It generates the ids of lost rows again, so stores that know these ids must not continue."""
    primary.start()
    async with Store.open(primary.url(), run="test") as store:
        await (await store.buffer("math")).put(group("first"))
    primary.stop()
    with closing(primary.clone()) as backup, ExitStack() as stack:
        primary.start()
        url = proxy.url
        if through == "through PgBouncer":
            if pgbouncer.executable() is None:
                pytest.skip(pgbouncer.MISSING)
            url = stack.enter_context(pgbouncer.pgbouncer(url, "server_login_retry = 0.01")).url
        async with Store.open(url, run="test") as store:
            math = await store.buffer("math")
            mine = await math.lease(1, ttl=60)
            primary.kill()
            backup.start()
            proxy.route_to(backup.url())
            async with Store.open(backup.url(), run="others") as others:
                theirs = await (await others.buffer("math")).lease(1, ttl=60)
                assert theirs.id == mine.id
                calls = (
                    *(mine.ack(), math.put(group("second")), math.find()),
                    *(math.sample(1), math.sample(50)),  # of 50 it would say that they are too many
                )
                for call in calls:
                    with pytest.raises(DatabaseReplacedError, match="so close the store"):
                        await call
                await theirs.ack()
        async with Store.open(url, run="test") as store:
            await (await store.buffer("math")).put(group("second"))
        await check_invariants(backup.url())


async def put_or_refuse(node: Node, uid: str, *, refused: bool = False) -> None:
    """Put a group with a new store, and prune; or check that both are refused."""
    async with Store.open(node.url()) as store:
        buffer = await store.buffer("math")
        calls = buffer.put(group(uid)), store.prune(dry_run=False)
        for call in calls:
            if refused:
                with pytest.raises(PayloadsReadOnlyError, match="replaydb db adopt-payloads"):
                    await call
            else:
                await call
        ids = [info.id for info in await buffer.find()]
        assert len(await buffer.get(ids)) == len(ids) > 0


@pytest.mark.nightly
async def test_payloads_after_a_failover(primary: Node, proxy: Proxy, tmp_path: Path) -> None:
    """`test_instances.py` has a shorter form of this and of the next test."""
    standby = primary.clone()
    standby.follow(primary)
    primary.configure("synchronous_standby_names = '*'\nsynchronous_commit = remote_apply")
    primary.start()
    standby.start()
    async with Store.open(proxy.url, payloads=tmp_path.as_uri()) as store:
        buffer = await store.buffer("math")
        await buffer.put(group("before"))
        standby.promote()
        proxy.drop()
        proxy.route_to(standby.url())
        await put_or_refuse(standby, "new process")
        await buffer.put(group("old process"))
        await store.prune(dry_run=False)
        assert len(await buffer.sample(3)) == 3
    primary.stop()
    primary.configure("synchronous_standby_names = ''")
    primary.start()  # it was not told that it was replaced
    await put_or_refuse(primary, "stale", refused=True)
    standby.stop()
    standby.start()
    await put_or_refuse(standby, "after a restart")
    await check_invariants(standby.url())


@pytest.mark.nightly
async def test_payloads_of_copied_servers(primary: Node, tmp_path: Path) -> None:
    primary.start()
    async with Store.open(primary.url(), payloads=tmp_path.as_uri()) as store:
        await (await store.buffer("math")).put(group("before"))
    server, dump = f"host={primary.folder} user=postgres", str(primary.folder / "dump")
    primary.run("pg_dump", "-Fc", "-f", dump, "-d", f"{server} dbname={DATABASE}")
    promoted, started = primary.backup(), primary.backup()
    (started.folder / "standby.signal").unlink()
    (started.folder / "postgresql.auto.conf").write_text("")
    for node in (promoted, started):
        node.start()
    # A copy that was not promoted has all facts of the original, so it cannot be told apart.
    await put_or_refuse(started, "started")
    await put_or_refuse(primary, "original")
    # A restored dump is another database.
    await primary.ask("CREATE DATABASE restored", "postgres")
    primary.run("pg_restore", "-d", f"{server} dbname=restored", dump)
    async with Store.open(primary.url(database="restored")) as store:
        with pytest.raises(PayloadsReadOnlyError):
            await (await store.buffer("math")).put(group("restored"))
    # A promoted copy takes the payloads over, like a standby.
    promoted.promote()
    await put_or_refuse(promoted, "promoted")
    await put_or_refuse(primary, "refused", refused=True)
    async with Store.open(primary.url()) as store:
        await store.adopt_payloads()
    await put_or_refuse(primary, "adopted")
    await put_or_refuse(promoted, "refused", refused=True)
    await check_invariants(primary.url())
