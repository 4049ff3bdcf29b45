"""A copy is the store again, on either engine and back: nothing is lost, and work goes on in it.

A store begins in a file, moves to the server, and from there into another file. Each copy is
interrupted at a random point and run again.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from itertools import pairwise

from replaydb import Store
from replaydb.operations import CopyReport, copy, verify
from torture import judge
from torture.arena import Arena
from torture.crew import BUFFER, EXPECTED, ROLES, Journal

PROMISES = (14,)
ENGINES = ("postgresql",)
#: More than the attempts of a transaction.
VERSIONS = 12


async def attack(arena: Arena) -> None:
    """Work, copy, work on in the copy."""
    urls = [f"sqlite:///{arena.folder / 'first.db'}", arena.url]
    urls.append(f"sqlite:///{arena.folder / 'last.db'}")
    numbers = itertools.count()
    async with Store.open(urls[0]) as store:
        buffer = await store.buffer(BUFFER)
        for version in range(1, VERSIONS + 1):
            await buffer.advance_policy(version)
    await _work(arena, urls[0], numbers)
    for source, target in pairwise(urls):
        await _copy(arena, source, target)
        await _work(arena, target, numbers)
        tables = await judge.read(target)
        judge.check(tables)
        told = judge.check_log(judge.entries(arena.log), tables)
        arena.figures["copies"] += 1
    arena.figures += told


async def _work(arena: Arena, url: str, numbers: Iterator[int]) -> None:
    """Make every kind of call, some at once."""
    journal, end = Journal(str(arena.log)), time.monotonic() + arena.seconds / 3

    async def one() -> None:
        async with Store.open(url, run="crew") as store:
            buffer = await store.buffer(BUFFER)
            roles = sorted(ROLES)
            arena.chance.shuffle(roles)
            for role in itertools.cycle(roles):
                try:
                    await ROLES[role](buffer, journal, arena.chance, next(numbers))
                except EXPECTED as error:
                    journal.tell(type(error).__name__, time.monotonic(), None)
                if time.monotonic() > end:
                    return

    async with asyncio.TaskGroup() as crew:
        for _ in range(3):
            crew.create_task(one())
    async with Store.open(url) as store:
        buffer = await store.buffer(BUFFER)
        await buffer.advance_policy(buffer.policy_version + 1)
        report = await verify(store)
        assert report.is_sound, report.problems


async def _copy(arena: Arena, source: str, target: str) -> None:
    """Copy, interrupted at first."""
    left = arena.chance.randrange(8)

    def interrupt(_: CopyReport) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise InterruptedError

    try:
        await copy(source, target, progress=interrupt)
    except InterruptedError:
        arena.figures["interrupted copies"] += 1
    else:
        return
    await copy(source, target)
