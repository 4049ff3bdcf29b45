"""Acknowledged calls survive a failover, and no call is acknowledged that did not.

A primary with a synchronous standby is killed, and the standby is promoted. Sometimes the standby
was disconnected for a short time before, so that waiting commits are missing on it. Processes put,
lease and ack through the same stores during the failover and afterwards. The first standby is a
clone of the stopped primary, and each new one is created by `pg_basebackup`.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack

from replaydb import Store
from support.cluster import Node, template
from support.proxy import Proxy, running_proxy
from support.workers import Worker, kill_all
from torture.context import AttackContext
from torture.workers import BUFFER, RoleWorker

PROMISES = (1, 2, 3, 12)
ENGINES = ("postgresql",)


async def attack(context: AttackContext) -> None:
    """Fail over once or several times, each time to the standby of the current primary."""
    chance = context.chance
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
        workers: list[Worker] = [
            RoleWorker(proxy.url, context.log, role, chance.getrandbits(32), unavailable=True)
            for role in ("put", "lease", "add_episodes")
        ]
        end = time.monotonic() + context.seconds
        try:
            while not context.figures["failovers"] or time.monotonic() < end:
                await context.progress(workers, 5, "put")
                await asyncio.to_thread(
                    _fail_over, primary, standby, proxy, chance.choice([None, 0.0, 0.1])
                )
                context.figures["failovers"] += 1
                primary, standby = standby, await asyncio.to_thread(standby.backup)
                standby.start()
            await context.progress(workers, 5, "put")
        finally:
            await kill_all(workers)
        context.url = primary.url()
        await context.check()


def _fail_over(primary: Node, standby: Node, proxy: Proxy, away: float | None) -> None:
    """Replace a primary by its standby, which was killed `away` seconds earlier unless None."""
    if away is not None:
        standby.kill()
        time.sleep(away)
    primary.kill()
    if away is not None:
        standby.start()
    standby.promote()
    proxy.route_to(standby.url())
