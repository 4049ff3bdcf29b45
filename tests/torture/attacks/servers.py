"""What was acknowledged survives a server that is killed, and its clients go on by themselves.

kill -9 of a server process takes the whole server down; it recovers from its log. Meanwhile and
afterwards processes put, lease and ack through the same stores.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import asyncpg

from replaydb import Store
from support.workers import Worker, killed
from torture.arena import Arena
from torture.crew import BUFFER, Member

PROMISES = (1, 2, 3)
ENGINES = ("postgresql",)
_VICTIM = "SELECT pid FROM pg_stat_activity WHERE application_name = 'replaydb' ORDER BY random()"


async def attack(arena: Arena) -> None:
    """One to a few deaths of the server."""
    async with Store.open(arena.url) as store:
        await store.buffer(BUFFER)
    crew: list[Worker] = [
        Member(arena.url, arena.log, role, arena.chance.getrandbits(32), unavailable=True)
        for role in ("put", "lease", "pieces")
    ]
    end = time.monotonic() + arena.seconds
    try:
        while not arena.figures["server kills"] or time.monotonic() < end:
            await arena.progress(crew, 5, "put")
            await asyncio.sleep(arena.chance.uniform(0, 0.3))
            if await _kill_server(arena.url):
                arena.figures["server kills"] += 1
        await arena.progress(crew, 5, "put")
    finally:
        await killed(crew)
    await arena.verdict()


async def _kill_server(url: str) -> bool:
    """Kill one of its processes, of which it dies; wait until it is back."""
    connection = await asyncpg.connect(url)
    pid = await connection.fetchval(_VICTIM)
    connection.terminate()
    if pid is None:
        return False
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        while True:
            try:
                connection = await asyncpg.connect(url)
            except (OSError, asyncpg.PostgresError):
                await asyncio.sleep(0.05)
            else:
                connection.terminate()
                return True
