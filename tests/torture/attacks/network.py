"""A network that drops, delays, truncates and stalls loses nothing and tears nothing.

Processes work through a relay that fails in another way every few hundredths of a second.
"""

from __future__ import annotations

import asyncio
import time

from replaydb import Store
from support.proxy import Proxy, break_messages, cut_commits, delay_all, running_proxy
from support.workers import Worker, killed
from torture.arena import Arena
from torture.crew import BUFFER, Member

PROMISES = (1, 2, 3)
ENGINES = ("postgresql",)
_TROUBLES = (
    "drop",
    "refuse",
    "delay",
    "truncate question",
    "truncate answer",
    "stall",
    "freeze",
    "cut",
)


async def attack(arena: Arena) -> None:
    """Every trouble there is, in a random order, each followed by a good moment."""
    async with Store.open(arena.url) as store:
        await store.buffer(BUFFER)
    chance, end = arena.chance, time.monotonic() + arena.seconds
    with running_proxy(arena.url) as proxy:
        crew: list[Worker] = [
            Member(proxy.url, arena.log, role, chance.getrandbits(32), unavailable=True)
            for role in ("put", "lease", "pieces")
        ]
        try:
            await arena.progress(crew, 3, "put")
            while not arena.figures or time.monotonic() < end:
                trouble = chance.choice(_TROUBLES)
                _make(trouble, proxy, chance.randint(1, 9))
                arena.figures[trouble] += 1
                await asyncio.sleep(chance.uniform(0.05, 0.4))
                if trouble in ("stall", "freeze") and chance.random() < 0.5:
                    proxy.drop()  # else what was stalled flows on
                proxy.heal()
                await arena.progress(crew, 3, "put")
        finally:
            await killed(crew)
    await arena.verdict()


def _make(trouble: str, proxy: Proxy, number: int) -> None:
    match trouble:
        case "drop":
            proxy.drop()
        case "refuse":
            proxy.refuse()
            proxy.drop()
        case "delay":
            proxy.rule = delay_all(0.01)
        case "truncate question":
            proxy.rule = break_messages("close", "client", b"QPBES", first=number, every=3)
        case "truncate answer":
            proxy.rule = break_messages("close", "server", b"CDTZ", first=number, every=3)
        case "cut":
            proxy.rule = cut_commits("request" if number % 2 else "answer", every=2)
        case "stall":
            proxy.rule = break_messages("stall", "client", b"B", num_bytes=20, first=number)
        case "freeze":
            proxy.stall()
