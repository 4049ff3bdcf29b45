"""Concurrent processes keep leases exclusive, capacity after every commit, and counters exact.

Processes make random calls on a buffer with a capacity, while an independent reader continuously
checks snapshots of the tables.
"""

from __future__ import annotations

import asyncio

import replaydb as rdb
from replaydb import Store
from torture import checker
from torture.context import AttackContext
from torture.workers import BUFFER, RoleWorker

PROMISES = (2, 3, 4, 5, 10, 11)
ENGINES = ("sqlite", "postgresql")
CAPACITY = 40


async def attack(context: AttackContext) -> None:
    """Run five processes until the end of the round."""
    async with Store.open(context.url) as store:
        await store.buffer(BUFFER, capacity=rdb.Capacity(groups=CAPACITY), on_evict="archive")
    workers = [
        RoleWorker(
            context.url, context.log, "any", context.chance.getrandbits(32), seconds=context.seconds
        )
        for _ in range(5)
    ]
    try:
        while any(one.is_running for one in workers):
            found = await checker.count_stored_groups(context.url)
            assert found <= CAPACITY, f"{found} groups are stored, {CAPACITY} are allowed"
            checker.check_tables(await checker.read_tables(context.url))
            context.figures["snapshots"] += 1
            await asyncio.sleep(0.05)
        await asyncio.gather(*(one.ended() for one in workers))
    finally:
        for one in workers:
            one.kill()
    await context.check()
