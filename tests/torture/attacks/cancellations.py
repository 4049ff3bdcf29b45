"""A call that is cancelled at any await is atomic and leaves nothing behind.

Every kind of call is repeated and cancelled at its first, second, third ... await, until it
completes before that. Awaits in the event loop of the database count too. No lease without an
owner may be left, no connection checked out, and no task exception unretrieved.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import replaydb as rdb
from replaydb import Buffer, Store
from replaydb.database.postgresql.backend import PostgresqlBackend
from support.groups import episode, group, groups
from support.watching import num_used
from torture import checker
from torture.context import AttackContext

PROMISES = (2, 3, 6)
ENGINES = ("sqlite", "postgresql")
#: Time in which a cancellation reaches the other event loop.
ARRIVAL_SECONDS = 0.01


class Countdown:
    """Cancels a call when it waits for the n-th time, in its own event loop or the database's."""

    def __init__(self, n: int) -> None:
        self._left = n
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = None

    async def run(self, call: Awaitable[Any]) -> Any:
        """Await a call, as a task of its own."""
        self._task = asyncio.current_task()
        return await _Steps(call, self.step)

    def there(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Return a part of the call that runs in the database's event loop."""
        return _Steps(call, self.step_there)

    def step(self) -> None:
        """Count a wait. At the last one, cancel the call."""
        self._left -= 1
        if self._left == 0 and self._task is not None:
            self._task.cancel()

    def step_there(self) -> None:
        """As `step`, from the other loop, which is blocked until the cancellation is sent to it."""
        self._left -= 1
        if self._left == 0 and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
            time.sleep(ARRIVAL_SECONDS)


class _Steps:
    """An awaitable that calls `step` whenever it waits."""

    def __init__(self, call: Awaitable[Any], step: Callable[[], None]) -> None:
        self._call = call
        self._step = step

    def close(self) -> None:
        """Close the call, if it never began."""
        self._call.close()  # type: ignore[attr-defined]

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._call.__await__()
        send, value = steps.send, None
        while True:
            try:
                future = send(value)
            except StopIteration as end:
                return end.value
            self._step()
            try:
                value, send = (yield future), steps.send
            except BaseException as error:
                value, send = error, steps.throw


Call = Callable[[Buffer, int, list[int]], Awaitable[Any]]


async def _lease(buffer: Buffer, number: int, ids: list[int]) -> None:
    async with buffer.lease(2, ttl=600) as lease:
        await asyncio.sleep(0)
        await lease.extend()


async def _wait(buffer: Buffer, number: int, ids: list[int]) -> None:
    with suppress(rdb.NotEnoughGroupsError):
        await buffer.sample(10_000, timeout=0.02)


async def _add_episode(buffer: Buffer, number: int, ids: list[int]) -> None:
    await buffer.open_group("incremental", f"incremental-{number}", 2)
    await buffer.add_episode(f"incremental-{number}", episode(), position=0)


async def _loader(buffer: Buffer, number: int, ids: list[int]) -> None:
    async with buffer.loader(2, rdb.Fifo(), lease=True, ttl=600, prefetch=1) as loader:
        await anext(loader)


CALLS: dict[str, Call] = {
    "put": lambda buffer, number, ids: buffer.put([group(f"{number}-{i}") for i in range(2)]),
    "replace": lambda buffer, number, ids: buffer.put(group("gsm8k-0"), on_duplicate="replace"),
    "sample": lambda buffer, number, ids: buffer.sample(3, rdb.Prioritized()),
    "wait": _wait,
    "lease": _lease,
    "loader": _loader,
    "add_episode": _add_episode,
    "priorities": lambda buffer, number, ids: buffer.update_priorities(ids[:2], [2.0, 0.5]),
    "advance": lambda buffer, number, ids: buffer.advance_policy(buffer.policy_version + 1),
    "get": lambda buffer, number, ids: buffer.get(ids[:2]),
    "stats": lambda buffer, number, ids: buffer.stats(),
}


async def attack(context: AttackContext) -> None:
    """Cancel calls of all kinds at every await, as far as time allows."""
    unseen: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unseen.append(context))
    try:
        end = loop.time() + context.seconds
        for name in context.chance.sample(sorted(CALLS), len(CALLS)):
            await _every_await(context, name)
            if loop.time() > end:
                break
        gc.collect()
        await asyncio.sleep(0)
    finally:
        loop.set_exception_handler(None)
    assert not unseen, f"unretrieved errors: {unseen}"


async def _every_await(context: AttackContext, name: str) -> None:
    call = CALLS[name]
    async with Store.open(context.url, run="torture") as store:
        buffer = await store.buffer(name, on_ack="return")
        ids = await buffer.put(groups(20))
        n, ended = 0, 0
        while ended < 2 and n < 200:
            n += 1
            countdown = Countdown(n)
            with _counted_there(store._database.backend, countdown):
                task = asyncio.create_task(countdown.run(call(buffer, n, ids)))
                await asyncio.wait([task])
            if not task.cancelled():
                ended += 1
                task.result()
            else:
                context.figures["cancellations"] += 1
        async with asyncio.timeout(30):
            assert len(await buffer.sample(3)) == 3
        assert num_used(store) == 0, f"{name}: a connection was not returned"
    tables = await checker.read_tables(context.url)
    checker.check_tables(tables)
    leased = tables.with_status("leased")
    assert not leased, f"{name}: {len(leased)} groups are leased without an owner"
    if name == "put":
        mine = [uid for uid in tables.by_uid if uid[0].isdigit()]
        assert len(mine) % 2 == 0, "a put is stored partially"


@contextmanager
def _counted_there(backend: Any, countdown: Countdown) -> Iterator[None]:
    """Also count waits in the event loop of PostgreSQL. Transactions of SQLite have none."""
    if isinstance(backend, PostgresqlBackend):
        run = backend.loop.run
        with patch.object(backend.loop, "run", lambda call: run(countdown.there(call))):
            yield
    else:
        yield
