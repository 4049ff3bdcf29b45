"""Any history of many processes: exclusive leases, capacity after every commit, exact counters.

Processes do whatever comes to their minds on a buffer with capacity, while an independent reader
looks at every moment it can.
"""

from __future__ import annotations

import asyncio

import replaydb as rdb
from replaydb import Store
from torture import judge
from torture.arena import Arena
from torture.crew import BUFFER, Member

PROMISES = (2, 3, 4, 5, 10, 11)
ENGINES = ("sqlite", "postgresql")
CAPACITY = 40


async def attack(arena: Arena) -> None:
    """Five processes, until the time is over."""
    async with Store.open(arena.url) as store:
        await store.buffer(BUFFER, capacity=rdb.Capacity(groups=CAPACITY), on_evict="archive")
    crew = [
        Member(arena.url, arena.log, "any", arena.chance.getrandbits(32), seconds=arena.seconds)
        for _ in range(5)
    ]
    try:
        while any(one.is_running for one in crew):
            found = await judge.stored_groups(arena.url)
            assert found <= CAPACITY, f"{found} groups stored, where {CAPACITY} are allowed"
            judge.check(await judge.read(arena.url))
            arena.figures["looks"] += 1
            await asyncio.sleep(0.05)
        await asyncio.gather(*(one.ended() for one in crew))
    finally:
        for one in crew:
            one.kill()
    await arena.verdict()
