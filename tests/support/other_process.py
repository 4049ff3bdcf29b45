"""A second process that uses the same database and acts when the test requests it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from replaydb import Store
from support.groups import group
from support.workers import Worker, workers


class Other:
    """A process that waits for `act`."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    async def act(self) -> Any:
        """Let the process perform its action; return the result."""
        self._pipe.send("go")
        return await asyncio.to_thread(self._pipe.recv)


@asynccontextmanager
async def other_process(action: str, url: str, *arguments: str) -> AsyncIterator[Other]:
    """Start a process, which must exit by itself at the end of the block.

    Args:
        action: "put", "get" or "settings"; or "ack" or "nack" of a lease, which the process takes
            when it starts.
        url: URL of the database.
        arguments: The name of a buffer, followed by uids to put or ids to get.
    """
    pipe, theirs = Pipe()
    with pipe, workers(Worker(_main, theirs, action, url, *arguments)) as (process,):
        theirs.close()  # otherwise `recv` would not notice that the process has ended
        assert await asyncio.to_thread(pipe.recv) == "ready"
        yield Other(pipe)
        assert await process.ended() == 0


def _main(pipe: Connection, *arguments: str) -> None:
    asyncio.run(_act(pipe, *arguments))


async def _act(pipe: Connection, action: str, url: str, buffer_name: str, *arguments: str) -> None:
    async with Store.open(url) as store:
        buffer = await store.buffer(buffer_name, create=False)
        lease = await buffer.lease(1, ttl=600) if action in ("ack", "nack") else None
        pipe.send("ready")
        await asyncio.to_thread(pipe.recv)
        result: Any = None
        match action:
            case "put":
                result = {"ids": await buffer.put([group(uid) for uid in arguments])}
            case "settings":
                result = (await store.buffer(buffer_name)).settings.to_json()
            case "get":
                found = await buffer.get([int(argument) for argument in arguments])
                result = [one.group_uid for one in found]
            case "ack" | "nack":
                assert lease is not None
                await (lease.ack() if action == "ack" else lease.nack())
        pipe.send(result)
