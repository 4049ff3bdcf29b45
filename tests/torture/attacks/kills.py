"""What was acknowledged survives kill -9 of any process; calls cut short happened whole or not.

Processes of every role work on one database and are killed one by one in the middle of whatever
they do; new ones take their place.
"""

from __future__ import annotations

import asyncio
import time

import replaydb as rdb
from replaydb import Store
from support.groups import group
from support.workers import Worker, killed
from torture.arena import Arena
from torture.crew import BUFFER, ROLES, Member

PROMISES = (1, 2, 3, 11)
ENGINES = ("sqlite", "postgresql")


async def attack(arena: Arena) -> None:
    """Kill somebody every few hundredths of a second."""
    async with Store.open(arena.url) as store:
        await store.buffer(BUFFER, capacity=rdb.Capacity(groups=100_000))
    chance, end = arena.chance, time.monotonic() + arena.seconds

    def hire(role: str) -> Member:
        return Member(arena.url, arena.log, role, chance.getrandbits(32))

    crew: list[Worker] = [hire(role) for role in ROLES]
    roles = list(ROLES)
    try:
        while not arena.figures["kills"] or time.monotonic() < end:
            # It takes them a while to begin, longer where the machine is busy.
            await arena.progress(crew, 3)
            await asyncio.sleep(chance.uniform(0, 0.1))
            victim = chance.randrange(len(crew))
            crew[victim].kill()
            arena.figures["kills"] += 1
            crew[victim] = hire(roles[victim])
    finally:
        await killed(crew)
    async with asyncio.timeout(60), Store.open(arena.url) as store:  # and nothing is in its way
        buffer = await store.buffer(BUFFER)
        await buffer.put(group())
        await buffer.sample(1)
    await arena.verdict()
