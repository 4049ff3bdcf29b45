"""Network faults (drops, delays, truncation, stalls) lose no acknowledged call and split no put.

Processes work through a proxy that injects another fault every few hundredths of a second.
"""

from __future__ import annotations

import asyncio
import time

from replaydb import Store
from support.proxy import Proxy, break_messages, cut_commits, delay_all, running_proxy
from support.workers import Worker, kill_all
from torture.context import AttackContext
from torture.workers import BUFFER, RoleWorker

PROMISES = (1, 2, 3)
ENGINES = ("postgresql",)
_FAULTS = (
    "drop",
    "refuse",
    "delay",
    "truncate request",
    "truncate response",
    "stall",
    "freeze",
    "cut",
)


async def attack(context: AttackContext) -> None:
    """Inject faults in random order, each followed by a time without faults."""
    async with Store.open(context.url) as store:
        await store.buffer(BUFFER)
    chance, end = context.chance, time.monotonic() + context.seconds
    with running_proxy(context.url) as proxy:
        workers: list[Worker] = [
            RoleWorker(proxy.url, context.log, role, chance.getrandbits(32), unavailable=True)
            for role in ("put", "lease", "add_episodes")
        ]
        try:
            await context.progress(workers, 3, "put")
            while not context.figures or time.monotonic() < end:
                fault = chance.choice(_FAULTS)
                _inject(fault, proxy, chance.randint(1, 9))
                context.figures[fault] += 1
                await asyncio.sleep(chance.uniform(0.05, 0.4))
                if fault in ("stall", "freeze") and chance.random() < 0.5:
                    proxy.drop()  # otherwise stalled messages are forwarded
                proxy.heal()
                await context.progress(workers, 3, "put")
        finally:
            await kill_all(workers)
    await context.check()


def _inject(fault: str, proxy: Proxy, number: int) -> None:
    match fault:
        case "drop":
            proxy.drop()
        case "refuse":
            proxy.refuse()
            proxy.drop()
        case "delay":
            proxy.rule = delay_all(0.01)
        case "truncate request":
            proxy.rule = break_messages("close", "client", b"QPBES", first=number, every=3)
        case "truncate response":
            proxy.rule = break_messages("close", "server", b"CDTZ", first=number, every=3)
        case "cut":
            proxy.rule = cut_commits("request" if number % 2 else "answer", every=2)
        case "stall":
            proxy.rule = break_messages("stall", "client", b"B", num_bytes=20, first=number)
        case "freeze":
            proxy.stall()
