"""What was acknowledged survives its server, and nothing is reported that did not.

A primary that waits for its standby is killed, and the standby is promoted. Sometimes the standby
was away for a moment, so that commits wait which it does not have. Meanwhile and afterwards
processes put, lease and ack through the same stores. The first standby is a clone of the stopped
primary, and each new one is made by `pg_basebackup`.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack

from replaydb import Store
from support.cluster import Node, template
from support.proxy import Proxy, running_proxy
from support.workers import Worker, killed
from torture.arena import Arena
from torture.crew import BUFFER, Member

PROMISES = (1, 2, 3, 12)
ENGINES = ("postgresql",)


async def attack(arena: Arena) -> None:
    """One to a few failovers, each to the standby of the last one."""
    chance = arena.chance
    with ExitStack() as stack:
        primary = await asyncio.to_thread(stack.enter_context, template())
        primary.configure("synchronous_standby_names = '*'")
        standby = primary.clone()
        standby.follow(primary)
        primary.start()
        standby.start()
        proxy = stack.enter_context(running_proxy(primary.url()))
        async with Store.open(proxy.url) as store:
            await store.buffer(BUFFER)
        crew: list[Worker] = [
            Member(proxy.url, arena.log, role, chance.getrandbits(32), unavailable=True)
            for role in ("put", "lease", "pieces")
        ]
        end = time.monotonic() + arena.seconds
        try:
            while not arena.figures["failovers"] or time.monotonic() < end:
                await arena.progress(crew, 5, "put")
                await asyncio.to_thread(
                    _fail_over, primary, standby, proxy, chance.choice([None, 0.0, 0.1])
                )
                arena.figures["failovers"] += 1
                primary, standby = standby, await asyncio.to_thread(standby.backup)
                standby.start()
            await arena.progress(crew, 5, "put")
        finally:
            await killed(crew)
        arena.url = primary.url()
        await arena.verdict()


def _fail_over(primary: Node, standby: Node, proxy: Proxy, away: float | None) -> None:
    """Replace a primary by its standby, which was away for so many seconds before."""
    if away is not None:
        standby.kill()
        time.sleep(away)
    primary.kill()
    if away is not None:
        standby.start()
    standby.promote()
    proxy.lead_to(standby.url())
