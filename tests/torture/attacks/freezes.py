"""A frozen process holds up nobody for longer than is documented, and its work is whole or absent.

One process is stopped (SIGSTOP) in the middle of whatever it does; others, each with a timeout of
a second, must all come back; where the server ends what hangs, they must get through.
"""

from __future__ import annotations

import asyncio
import time

import replaydb as rdb
from replaydb import Store
from support.groups import group
from torture.arena import Arena
from torture.crew import BUFFER, Member

PROMISES = (1, 2, 5)
ENGINES = ("sqlite", "postgresql")
TIMEOUT, WAITERS = 1.0, 8
#: A second each, together, and room for a busy machine; one after the other it would be longer.
LONGEST = 15.0


async def attack(arena: Arena) -> None:
    """A few freezes."""
    end = time.monotonic() + arena.seconds
    async with Store.open(arena.url, run="torture") as store:
        # With capacity a put holds the lock of the whole buffer while it travels.
        buffer = await store.buffer(BUFFER, capacity=rdb.Capacity(groups=10_000))
        await buffer.put(group())
        frozen = Member(arena.url, arena.log, "put", arena.chance.getrandbits(32),
                        unavailable=True)  # fmt: skip
        try:
            while not arena.figures or time.monotonic() < end:
                await arena.progress([frozen], 3)
                await asyncio.sleep(arena.chance.uniform(0, 0.02))
                frozen.freeze()
                arena.figures["freezes"] += 1
                await _everybody_comes_back(arena, buffer)
                frozen.thaw()
                await buffer.put(group(), timeout=60)
        finally:
            frozen.kill()
            await frozen.ended()
    await arena.verdict()


async def _everybody_comes_back(arena: Arena, buffer: rdb.Buffer) -> None:
    slow: list[str] = []

    async def call(number: int) -> str:
        begin, what = time.monotonic(), "sample" if number % 2 else "put"
        try:
            if number % 2:
                await buffer.sample(1, timeout=TIMEOUT)
            else:
                await buffer.put(group(), timeout=TIMEOUT)
        except rdb.DatabaseUnavailableError:
            return "gave up in time"
        finally:
            if (took := time.monotonic() - begin) > LONGEST:
                slow.append(f"{what}: {took:.0f} s")
        return "got through"

    outcomes = await asyncio.gather(*(call(number) for number in range(WAITERS)))
    assert not slow, f"calls with a timeout of {TIMEOUT} s took longer: {slow}"
    arena.figures.update(outcomes)
