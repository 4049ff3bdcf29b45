"""Acknowledged calls survive kill -9 of any process; interrupted calls are atomic.

Processes of every role work on one database. They are killed at random times, and replaced by new
ones.
"""

from __future__ import annotations

import asyncio
import time

import replaydb as rdb
from replaydb import Store
from support.groups import group
from support.workers import Worker, kill_all
from torture.context import AttackContext
from torture.workers import BUFFER, ROLES, RoleWorker

PROMISES = (1, 2, 3, 11)
ENGINES = ("sqlite", "postgresql")


async def attack(context: AttackContext) -> None:
    """Kill a process every few hundredths of a second."""
    async with Store.open(context.url) as store:
        await store.buffer(BUFFER, capacity=rdb.Capacity(groups=100_000))
    chance, end = context.chance, time.monotonic() + context.seconds

    def start(role: str) -> RoleWorker:
        return RoleWorker(context.url, context.log, role, chance.getrandbits(32))

    workers: list[Worker] = [start(role) for role in ROLES]
    roles = list(ROLES)
    try:
        while not context.figures["kills"] or time.monotonic() < end:
            # Workers take some time to start, longer on a busy machine.
            await context.progress(workers, 3)
            await asyncio.sleep(chance.uniform(0, 0.1))
            victim = chance.randrange(len(workers))
            workers[victim].kill()
            context.figures["kills"] += 1
            workers[victim] = start(roles[victim])
    finally:
        await kill_all(workers)
    async with asyncio.timeout(60), Store.open(context.url) as store:  # no lock is left
        buffer = await store.buffer(BUFFER)
        await buffer.put(group())
        await buffer.sample(1)
    await context.check()
