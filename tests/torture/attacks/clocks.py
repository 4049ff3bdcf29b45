"""Wrong clocks neither expire active leases nor stop maintenance.

On SQLite the clock of the machine, which all processes share, jumps back and forth by less than the
ttl of leases. On PostgreSQL every client has a different wrong clock; only the server's clock
counts.
"""

from __future__ import annotations

import asyncio

from replaydb import Store
from torture.context import AttackContext
from torture.workers import BUFFER, RoleWorker

PROMISES = (3,)
ENGINES = ("sqlite", "postgresql")
TTL, HOUR = 600.0, 3600.0


async def attack(context: AttackContext) -> None:
    """Lease, ack and put with wrong clocks, then check that all remaining groups can be leased."""
    async with Store.open(context.url) as store:
        await store.buffer(BUFFER, time_to_live=30 * 24 * HOUR)
    shared = [context.chance.uniform(-TTL / 3, TTL / 3) for _ in range(4)]
    workers = []
    for role in ("put", "lease", "lease", "any"):
        own = [context.chance.uniform(-24 * HOUR, 24 * HOUR) for _ in range(3)]
        clocks = shared if context.engine == "sqlite" else own
        ttls = {"torture.workers.TTLS": [TTL]}
        seed = context.chance.getrandbits(32)
        workers.append(
            RoleWorker(context.url, context.log, role, seed, seconds=context.seconds, clocks=clocks,
                   patches=ttls)
        )  # fmt: skip
        context.figures["clocks"] += 1
    try:
        await asyncio.gather(*(one.ended() for one in workers))
    finally:
        for one in workers:
            one.kill()
    tables = await context.check()
    async with Store.open(context.url) as store:
        buffer = await store.buffer(BUFFER)
        if count := len(tables.with_status("completed")):
            async with buffer.lease(count, ttl=TTL) as lease:
                assert len(lease.batch) == count
