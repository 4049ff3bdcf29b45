"""A frozen process blocks others no longer than documented, and its calls are atomic.

One process is stopped (SIGSTOP) at a random time. Calls of other processes with a timeout of one
second must all return in time. Where the server terminates the frozen transaction, they succeed.
"""

from __future__ import annotations

import asyncio
import time

import replaydb as rdb
from replaydb import Store
from support.groups import group
from torture.context import AttackContext
from torture.workers import BUFFER, RoleWorker

PROMISES = (1, 2, 5)
ENGINES = ("sqlite", "postgresql")
TIMEOUT, WAITERS = 1.0, 8
#: Maximum duration of a call in seconds, with a margin for a busy machine. Calls that wait for each
#: other would take longer.
LONGEST = 15.0


async def attack(context: AttackContext) -> None:
    """Freeze a process several times."""
    end = time.monotonic() + context.seconds
    async with Store.open(context.url, run="torture") as store:
        # With a capacity a put locks the whole buffer until its commit.
        buffer = await store.buffer(BUFFER, capacity=rdb.Capacity(groups=10_000))
        await buffer.put(group())
        frozen = RoleWorker(context.url, context.log, "put", context.chance.getrandbits(32),
                        unavailable=True)  # fmt: skip
        try:
            while not context.figures or time.monotonic() < end:
                await context.progress([frozen], 3)
                await asyncio.sleep(context.chance.uniform(0, 0.02))
                frozen.freeze()
                context.figures["freezes"] += 1
                await _check_calls_return(context, buffer)
                frozen.thaw()
                await buffer.put(group(), timeout=60)
        finally:
            frozen.kill()
            await frozen.ended()
    await context.check()


async def _check_calls_return(context: AttackContext, buffer: rdb.Buffer) -> None:
    slow: list[str] = []

    async def call(number: int) -> str:
        begin, name = time.monotonic(), "sample" if number % 2 else "put"
        try:
            if number % 2:
                await buffer.sample(1, timeout=TIMEOUT)
            else:
                await buffer.put(group(), timeout=TIMEOUT)
        except rdb.DatabaseUnavailableError:
            return "timed out"
        finally:
            if (took := time.monotonic() - begin) > LONGEST:
                slow.append(f"{name}: {took:.0f} s")
        return "succeeded"

    outcomes = await asyncio.gather(*(call(number) for number in range(WAITERS)))
    assert not slow, f"calls with a timeout of {TIMEOUT} s took longer: {slow}"
    context.figures.update(outcomes)
