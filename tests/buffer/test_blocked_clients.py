"""No lock of PostgreSQL waits for the event loop of the client that holds it.

The event loop of a client is blocked at each of its turns, until another connection has locked all
buffers and tasks. A transaction that needs another turn of that loop would not release its locks.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import asyncpg
import pytest

from replaydb import Buffer, Capacity, Store
from replaydb.util.loop_thread import LoopThread
from support.groups import groups, long_group

#: Attempts of the other connection to lock all rows: far more than a transaction has statements, so
#: that a busy machine does not matter.
MOST_ATTEMPTS = 5000
LOCKS = ["SELECT id FROM buffer FOR UPDATE NOWAIT", "SELECT id FROM task FOR UPDATE NOWAIT"]
#: Tokens of a group that a draw does not read before its commit.
LARGE = 100_000


class BlockingSelector(selectors.DefaultSelector):
    """Selector of an event loop that calls `block`, if it is set, at each turn of the loop.

    Attributes:
        block: Blocks, and returns whether the locks were released meanwhile. If not, it is not
            called again.
        num_blocked: How often it was called.
    """

    block: Callable[[], bool] | None = None
    num_blocked = 0
    are_released = True

    def select(self, timeout: float | None = None) -> Any:
        if self.block is not None and self.are_released:
            self.num_blocked += 1
            self.are_released = self.block()
        return super().select(timeout)


async def lock_all(connection: asyncpg.Connection, attempts: int) -> bool:
    """Lock all buffers and tasks for a moment. Return whether that succeeded."""
    for _ in range(attempts):
        try:
            async with connection.transaction():
                for sql in LOCKS:
                    await connection.execute(sql)
        except asyncpg.LockNotAvailableError:
            continue
        return True
    return False


@contextmanager
def other_connection(url: str, attempts: int) -> Iterator[Callable[[], bool]]:
    """Yield a function that blocks its thread until another connection has locked all rows."""
    loop = asyncio.new_event_loop()
    with ThreadPoolExecutor(1) as thread, closing(loop):

        def run(work: Awaitable[Any]) -> Any:
            return thread.submit(loop.run_until_complete, work).result()

        connection = run(asyncpg.connect(url))
        try:
            yield lambda: run(lock_all(connection, attempts))
        finally:
            run(connection.close())


def run_blocked(
    url: str, call: Callable[[Buffer], Awaitable[object]], attempts: int, **settings: Any
) -> BlockingSelector:
    """Run a call in a blocked event loop. Return its selector."""
    selector = BlockingSelector()

    async def client(block: Callable[[], bool]) -> None:
        async with Store.open(url, run="blocked") as store:
            buffer = await store.buffer("math", **settings)
            await buffer.put([*groups(12, version=1), long_group("large", LARGE, "large")])
            await buffer.sample(1)
            selector.block = block
            await call(buffer)
            selector.block = None

    with (
        other_connection(url, attempts) as block,
        asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner,
    ):
        runner.run(client(block))
    return selector


async def lease_and_ack(buffer: Buffer) -> None:
    lease = await buffer.lease(2, ttl=60)
    await lease.extend()
    await lease.ack()


async def lease_and_nack(buffer: Buffer) -> None:
    async with buffer.lease(2, ttl=60) as lease:
        await lease.nack(reason="later")


async def open_and_complete(buffer: Buffer) -> None:
    await buffer.open_group("gsm8k", "incremental", 1)
    await buffer.add_episode("incremental", groups(1)[0].episodes[0])


CALLS: dict[str, Callable[[Buffer], Awaitable[object]]] = {
    "put": lambda it: it.put(groups(15)[12:]),
    "put of a new task": lambda it: it.put(groups(3, "new")),
    "incremental group": open_and_complete,
    "sample": lambda it: it.sample(4),
    "sample from all tasks": lambda it: it.sample(4, tasks=None),
    "sample of a large group": lambda it: it.sample(1, tasks="large"),
    "lease and ack": lease_and_ack,
    "lease and nack": lease_and_nack,
    "update_priorities": lambda it: it.update_priorities([1, 2, 3], [2.0, 3.0, 4.0]),
    "advance_policy": lambda it: it.advance_policy(9),
    "delete": lambda it: it.delete(ids=[1, 2]),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "at capacity": {"capacity": Capacity(groups=13), "max_staleness": 4},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("settings", SETTINGS)
def test_no_lock_waits_for_a_blocked_client(postgresql_url: str, name: str, settings: str) -> None:
    selector = run_blocked(postgresql_url, CALLS[name], MOST_ATTEMPTS, **SETTINGS[settings])
    assert selector.are_released
    assert selector.num_blocked > 1


def test_a_lock_that_waits_for_a_blocked_client_is_detected(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run_here(backend: object, coroutine: Awaitable[Any]) -> Any:
        return await coroutine

    monkeypatch.setattr(LoopThread, "run", run_here)
    assert not run_blocked(postgresql_url, CALLS["put"], 20).are_released
