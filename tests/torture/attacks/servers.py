"""Acknowledged calls survive a killed server, and clients reconnect by themselves.

kill -9 of a server process terminates the whole server, which recovers from its log. Processes put,
lease and ack through the same stores during the outage and afterwards.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import asyncpg

from replaydb import Store
from support.workers import Worker, kill_all
from torture.context import AttackContext
from torture.workers import BUFFER, RoleWorker

PROMISES = (1, 2, 3)
ENGINES = ("postgresql",)
_VICTIM = (
    "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'replaydb %' ORDER BY random()"
)


async def attack(context: AttackContext) -> None:
    """Kill the server once or several times."""
    async with Store.open(context.url) as store:
        await store.buffer(BUFFER)
    workers: list[Worker] = [
        RoleWorker(context.url, context.log, role, context.chance.getrandbits(32), unavailable=True)
        for role in ("put", "lease", "add_episodes")
    ]
    end = time.monotonic() + context.seconds
    try:
        while not context.figures["server kills"] or time.monotonic() < end:
            await context.progress(workers, 5, "put")
            await asyncio.sleep(context.chance.uniform(0, 0.3))
            if await _kill_server(context.url):
                context.figures["server kills"] += 1
        await context.progress(workers, 5, "put")
    finally:
        await kill_all(workers)
    await context.check()


async def _kill_server(url: str) -> bool:
    """Kill a process of the server, which terminates the server; wait until it has recovered."""
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
