"""Another process at the same database: started, told when to act, and waited for.

    python -m support.other_process put URL BUFFER UID...
    python -m support.other_process settings URL BUFFER
    python -m support.other_process get URL BUFFER ID...
    python -m support.other_process ack|nack URL BUFFER    (a group, leased before it is ready)

It prints `ready`, waits for a line, acts, and prints what came of it as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from replaydb import Store
from support.groups import group


class Other:
    """A process that is ready to act."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def act(self) -> Any:
        """Let it do what it was started for; its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"go\n")
        await self._process.stdin.drain()
        return json.loads(await self._process.stdout.readline())


@asynccontextmanager
async def other_process(action: str, url: str, *arguments: str) -> AsyncIterator[Other]:
    """Another process; it must end well by itself when the block ends."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "support.other_process", action, url, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"ready\n"
        yield Other(process)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def main(action: str, url: str, buffer_name: str, *arguments: str) -> None:
    async with Store.open(url) as store:
        buffer = await store.buffer(buffer_name, create=False)
        lease = await buffer.lease(1, ttl=600) if action in ("ack", "nack") else None
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        answer: Any = None
        match action:
            case "put":
                ids = await buffer.put([group(uid) for uid in arguments])
                answer = {"ids": ids}
            case "settings":
                answer = (await store.buffer(buffer_name)).settings.to_json()
            case "get":
                found = await buffer.get([int(argument) for argument in arguments])
                answer = [one.group_uid for one in found]
            case "ack" | "nack":
                assert lease is not None
                await (lease.ack() if action == "ack" else lease.nack())
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
