"""A copy to another engine and back is complete and can be used in place of the original.

A store is copied from a file to a PostgreSQL server and from there to another file. Each copy is
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
from torture import checker
from torture.context import AttackContext
from torture.workers import BUFFER, EXPECTED, ROLES, CallLog

PROMISES = (14,)
ENGINES = ("postgresql",)
#: More than the attempts of a transaction.
VERSIONS = 12


async def attack(context: AttackContext) -> None:
    """Use a store, copy it, and use the copy."""
    urls = [f"sqlite:///{context.folder / 'first.db'}", context.url]
    urls.append(f"sqlite:///{context.folder / 'last.db'}")
    numbers = itertools.count()
    async with Store.open(urls[0]) as store:
        buffer = await store.buffer(BUFFER)
        for version in range(1, VERSIONS + 1):
            await buffer.advance_policy(version)
    await _work(context, urls[0], numbers)
    for source, target in pairwise(urls):
        await _copy(context, source, target)
        await _work(context, target, numbers)
        tables = await checker.read_tables(target)
        checker.check_tables(tables)
        calls = checker.check_log(checker.read_log(context.log), tables)
        context.figures["copies"] += 1
    context.figures += calls


async def _work(context: AttackContext, url: str, numbers: Iterator[int]) -> None:
    """Make all kinds of calls, partly concurrently."""
    log, end = CallLog(str(context.log)), time.monotonic() + context.seconds / 3

    async def work() -> None:
        async with Store.open(url, run="workers") as store:
            buffer = await store.buffer(BUFFER)
            roles = sorted(ROLES)
            context.chance.shuffle(roles)
            for role in itertools.cycle(roles):
                try:
                    await ROLES[role](buffer, log, context.chance, next(numbers))
                except EXPECTED as error:
                    log.record(type(error).__name__, time.monotonic(), None)
                if time.monotonic() > end:
                    return

    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(work())
    async with Store.open(url) as store:
        buffer = await store.buffer(BUFFER)
        await buffer.advance_policy(buffer.policy_version + 1)
        report = await verify(store)
        assert report.is_sound, report.problems


async def _copy(context: AttackContext, source: str, target: str) -> None:
    """Copy a store; the first run may be interrupted."""
    left = context.chance.randrange(8)

    def interrupt(_: CopyReport) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise InterruptedError

    try:
        await copy(source, target, progress=interrupt)
    except InterruptedError:
        context.figures["interrupted copies"] += 1
    else:
        return
    await copy(source, target)
