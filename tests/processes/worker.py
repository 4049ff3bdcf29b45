"""What other processes do in these tests.

    python -m processes.worker trade URL ACKS SECONDS   put and sample, check every group
    python -m processes.worker wait URL                 wait for a group, woken by signals alone
    python -m processes.worker nursery URL ACKS         fork a child for every line read:
                                                        "put" or "sample", for ever

What was put is told in the file ACKS, a line a uid, after `put` has returned. Answers are lines
of JSON on standard output.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from processes.derived import check_group, derived_group
from replaydb import Buffer, NotEnoughGroupsError, Prioritized, Store, Uniform
from replaydb.database.engines import signals
from replaydb.policies import SamplingPolicy

BUFFER = "shared"
POLICIES: list[SamplingPolicy] = [Uniform(), Prioritized()]


def tell(**facts: Any) -> None:
    """One line of JSON."""
    print(json.dumps(facts), flush=True)


class Acks:
    """Appends uids, all of a put in one write."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def add(self, uids: Sequence[str]) -> None:
        os.write(self._file, "".join(f"{uid}\n" for uid in uids).encode())


async def put_for_ever(buffer: Buffer, acks: Acks, seconds: float = float("inf")) -> int:
    """Puts of one to six groups; a uid says how many came with it."""
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end:
        size = random.randint(1, 6)
        uids = [f"{os.getpid()}-{count}-{i}-of-{size}" for i in range(size)]
        await buffer.put([derived_group(uid) for uid in uids])
        acks.add(uids)
        count += 1
    return count


async def sample_for_ever(buffer: Buffer, seconds: float = float("inf")) -> int:
    """Draws of every kind; each group drawn is checked."""
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end:
        policy = random.choice(POLICIES)
        n: Any = random.choice([1, 8, {"math": 3, "code": 2}])
        try:
            batch = await buffer.sample(n, policy, timeout=5)
        except NotEnoughGroupsError:
            continue
        for group in batch.groups:
            check_group(group)
        count += len(batch)
    return count


async def trade(url: str, acks: str, seconds: str) -> None:
    async with Store.open(url) as store:
        buffer = await store.buffer(BUFFER)
        puts, sampled = await asyncio.gather(
            put_for_ever(buffer, Acks(acks), float(seconds)),
            sample_for_ever(buffer, float(seconds)),
        )
    tell(puts=puts, sampled=sampled)


async def wait(url: str) -> None:
    async with Store.open(url) as store:
        buffer = await store.buffer(BUFFER)
        tell(ready=True)
        signals.RECHECK_SECONDS = 600.0  # nobody looks again anyway
        batch = await buffer.sample(1, timeout=600)
        tell(uid=batch.groups[0].group_uid)


def nursery(url: str, acks: str) -> None:
    """Importing takes a second, forking a millisecond: many can be killed in a short test."""

    async def live(role: str) -> None:
        async with Store.open(url) as store:
            buffer = await store.buffer(BUFFER)
            if role == "put":
                await put_for_ever(buffer, Acks(acks))
            else:
                await sample_for_ever(buffer)

    tell(ready=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            random.seed()
            asyncio.run(live(line.strip()))
            os._exit(0)
        tell(pid=child)
        _, status = os.waitpid(child, 0)
        tell(status=status)


ROLES: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {
    "trade": trade,
    "wait": wait,
}


def main(role: str, *arguments: str) -> None:
    if role == "nursery":
        nursery(*arguments)
    else:
        asyncio.run(ROLES[role](*arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
