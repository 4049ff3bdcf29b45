"""Clocks that run ahead and back end no lease that is not over, and stop no upkeep.

On SQLite the machine's clock jumps to and fro for everybody, by less than the leases last; on
PostgreSQL every client has another wrong clock, and only the server's counts.
"""

from __future__ import annotations

import asyncio

from replaydb import Store
from torture.arena import Arena
from torture.crew import BUFFER, Member

PROMISES = (3,)
ENGINES = ("sqlite", "postgresql")
TTL, HOUR = 600.0, 3600.0


async def attack(arena: Arena) -> None:
    """Lease, ack and put under wrong clocks; then everything left can be leased."""
    async with Store.open(arena.url) as store:
        await store.buffer(BUFFER, time_to_live=30 * 24 * HOUR)
    together = [arena.chance.uniform(-TTL / 3, TTL / 3) for _ in range(4)]
    crew = []
    for role in ("put", "lease", "lease", "any"):
        alone = [arena.chance.uniform(-24 * HOUR, 24 * HOUR) for _ in range(3)]
        clocks = together if arena.engine == "sqlite" else alone
        ttls = {"torture.crew.TTLS": [TTL]}
        seed = arena.chance.getrandbits(32)
        crew.append(
            Member(arena.url, arena.log, role, seed, seconds=arena.seconds, clocks=clocks,
                   patches=ttls)
        )  # fmt: skip
        arena.figures["clocks"] += 1
    try:
        await asyncio.gather(*(one.ended() for one in crew))
    finally:
        for one in crew:
            one.kill()
    tables = await arena.verdict()
    async with Store.open(arena.url) as store:
        buffer = await store.buffer(BUFFER)
        if count := len(tables.with_status("completed")):
            async with buffer.lease(count, ttl=TTL) as lease:
                assert len(lease.batch) == count
