"""Main program of the worker processes in these tests.

    python -m processes.worker put_and_sample URL ACKS SECONDS   check every sampled group
    python -m processes.worker wait URL                          wait for a group, only by signals
    python -m processes.worker spawner URL ACKS                  fork a process for every line read,
                                                                 "put" or "sample", without end

After `put` has returned, the uids are appended to the file ACKS, one per line. Results are lines of
JSON on standard output.
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
from replaydb.database.runtime import signals
from replaydb.domain.policies import SamplingPolicy

BUFFER = "shared"
POLICIES: list[SamplingPolicy] = [Uniform(), Prioritized()]


def report(**facts: Any) -> None:
    """Print one line of JSON."""
    print(json.dumps(facts), flush=True)


class Acks:
    """File of acknowledged uids. All uids of a put are appended in one write."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def add(self, uids: Sequence[str]) -> None:
        os.write(self._file, "".join(f"{uid}\n" for uid in uids).encode())


async def put_repeatedly(
    buffer: Buffer, acks: Acks, seconds: float = float("inf"), least: int = 0
) -> int:
    """Put one to six groups at a time. A uid contains the number of groups of its put.

    Args:
        buffer: The buffer.
        acks: Where acknowledged uids are noted.
        seconds: Minimum duration.
        least: Minimum number of puts, which takes longer on a busy machine.
    """
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end or count < least:
        size = random.randint(1, 6)
        uids = [f"{os.getpid()}-{count}-{i}-of-{size}" for i in range(size)]
        await buffer.put([derived_group(uid) for uid in uids])
        acks.add(uids)
        count += 1
    return count


async def sample_repeatedly(buffer: Buffer, seconds: float = float("inf"), least: int = 0) -> int:
    """Sample in various ways, and check every group. Arguments as of `put_repeatedly`."""
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end or count < least:
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


async def put_and_sample(url: str, acks: str, seconds: str) -> None:
    async with Store.open(url) as store:
        buffer = await store.buffer(BUFFER)
        puts, sampled = await asyncio.gather(
            put_repeatedly(buffer, Acks(acks), float(seconds), least=21),
            sample_repeatedly(buffer, float(seconds), least=51),
        )
    report(puts=puts, sampled=sampled)


async def wait(url: str) -> None:
    async with Store.open(url) as store:
        buffer = await store.buffer(BUFFER)
        report(ready=True)
        signals.RECHECK_SECONDS = 600.0  # no periodic checks
        batch = await buffer.sample(1, timeout=600)
        report(uid=batch.groups[0].group_uid)


def spawner(url: str, acks: str) -> None:
    """Fork processes on request. Forking takes a millisecond, but importing a second."""

    async def work(role: str) -> None:
        async with Store.open(url) as store:
            buffer = await store.buffer(BUFFER)
            if role == "put":
                await put_repeatedly(buffer, Acks(acks))
            else:
                await sample_repeatedly(buffer)

    report(ready=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            random.seed()
            asyncio.run(work(line.strip()))
            os._exit(0)
        report(pid=child)
        _, status = os.waitpid(child, 0)
        report(status=status)


ROLES: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {
    "put_and_sample": put_and_sample,
    "wait": wait,
}


def main(role: str, *arguments: str) -> None:
    if role == "spawner":
        spawner(*arguments)
    else:
        asyncio.run(ROLES[role](*arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
