"""The pool of connections of both engines."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from replaydb.database.runtime.pool import Pool, Waits


class Connection:
    """A connection to nothing."""

    is_usable = True
    is_open = False
    is_closed = False

    async def abandon(self) -> None:
        self.is_open = False

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.is_closed, self.is_usable = True, False

    def cut_off(self) -> None:
        self.is_usable = False


class Server:
    """Opens connections, and knows all of them."""

    def __init__(self) -> None:
        self.opened: list[Connection] = []
        self.num_kept = 2
        self.pool = Pool(self.connect, 4, Waits("test"), lambda: self.num_kept)

    async def connect(self) -> Connection:
        assert sum(not one.is_closed for one in self.opened) < 4
        self.opened.append(Connection())
        return self.opened[-1]

    async def use(self, number: int) -> list[Connection]:
        """Use some connections at the same time."""
        end = asyncio.get_running_loop().time() + 60
        async with AsyncExitStack() as stack:
            uses = [self.pool.connection(end) for _ in range(number)]
            return [await stack.enter_async_context(one) for one in uses]


async def test_some_connections_are_kept() -> None:
    server = Server()
    used = await server.use(4)
    kept = [one for one in used if not one.is_closed]
    assert len(kept) == 2
    assert set(await server.use(2)) == set(kept)


async def test_a_connection_that_is_used_once_is_closed_before_the_next_is_opened() -> None:
    server = Server()
    server.num_kept = 0
    await asyncio.gather(*(server.use(1) for _ in range(10)))
    assert [one.is_closed for one in server.opened] == [True] * 10


async def test_unusable_connections_are_replaced() -> None:
    server = Server()
    lost = await server.use(2)
    for one in lost:
        one.is_closed, one.is_usable = True, False
    assert not set(await server.use(4)) & set(lost)


async def test_connections_that_are_discarded_are_replaced() -> None:
    server = Server()
    idle = await server.use(2)
    server.pool.discard()
    assert not any(one.is_usable for one in idle)
    for one in idle:
        one.is_closed = True
    assert len(await server.use(4)) == 4
