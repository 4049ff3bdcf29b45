"""Another process at the same database: started, told when to act, and waited for."""

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
    """A process that is ready to act."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    async def act(self) -> Any:
        """Let it do what it was started for; its answer."""
        self._pipe.send("go")
        return await asyncio.to_thread(self._pipe.recv)


@asynccontextmanager
async def other_process(action: str, url: str, *arguments: str) -> AsyncIterator[Other]:
    """Another process, which must end by itself when the block ends.

    Args:
        action: "put", "get", "settings", or how it ends a lease that it takes: "ack" or "nack".
        url: Of the database.
        arguments: The name of a buffer, and uids to put or ids to get.
    """
    pipe, theirs = Pipe()
    with pipe, workers(Worker(_live, theirs, action, url, *arguments)) as (process,):
        theirs.close()  # so that its death ends the wait for an answer
        assert await asyncio.to_thread(pipe.recv) == "ready"
        yield Other(pipe)
        assert await process.ended() == 0


def _live(pipe: Connection, *arguments: str) -> None:
    asyncio.run(_act(pipe, *arguments))


async def _act(pipe: Connection, action: str, url: str, buffer_name: str, *arguments: str) -> None:
    async with Store.open(url) as store:
        buffer = await store.buffer(buffer_name, create=False)
        lease = await buffer.lease(1, ttl=600) if action in ("ack", "nack") else None
        pipe.send("ready")
        await asyncio.to_thread(pipe.recv)
        answer: Any = None
        match action:
            case "put":
                answer = {"ids": await buffer.put([group(uid) for uid in arguments])}
            case "settings":
                answer = (await store.buffer(buffer_name)).settings.to_json()
            case "get":
                found = await buffer.get([int(argument) for argument in arguments])
                answer = [one.group_uid for one in found]
            case "ack" | "nack":
                assert lease is not None
                await (lease.ack() if action == "ack" else lease.nack())
        pipe.send(answer)
