"""A full disk is a typed error, takes back nothing, and passes when there is room again.

A process may not let its files grow any further (RLIMIT_FSIZE, as any user), or the disk is a
small one of its own (tmpfs, where mounting is allowed).
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import sys
from pathlib import Path

import replaydb as rdb
from processes.derived import derived_group
from replaydb import Store
from torture import judge
from torture.arena import Arena
from torture.crew import BUFFER, Journal

PROMISES = (1, 2)
ENGINES = ("sqlite",)
ROOM = 600_000


async def attack(arena: Arena) -> None:
    """Fill it, see it refuse, make room, go on."""
    async with Store.open(arena.url) as store:
        await store.buffer(BUFFER)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "torture.attacks.disk", arena.url, str(arena.log)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    out, problem = await process.communicate()
    assert process.returncode == 0, problem.decode()
    arena.figures.update(json.loads(out))
    tables = await judge.read(arena.url)
    judge.check(tables)
    arena.figures += judge.check_log(judge.entries(arena.log), tables)


def _size(path: Path) -> int:
    """Of the larger of the two files."""
    return max(path.stat().st_size, path.with_name(f"{path.name}-wal").stat().st_size)


async def _fill(url: str, log: str) -> None:
    journal, figures = Journal(log), {"refused": 0, "afterwards": 0}
    path = Path(url.removeprefix("sqlite:///"))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    async with Store.open(url, run="torture") as store:
        buffer = await store.buffer(BUFFER)

        async def put(number: int, room: str) -> bool:
            uids = [f"{room}.{number}:{i}:2" for i in range(2)]
            try:
                await buffer.put([derived_group(uid) for uid in uids])
            except rdb.DatabaseError:
                return False
            journal.tell("put", 0.0, uids)
            return True

        for number in range(5):
            await put(number, "first")
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (_size(path) + ROOM, hard))
        for number in range(400):
            figures["refused"] += not await put(number, "full")
            if figures["refused"] >= 5:
                break
        assert figures["refused"], "it never was full"
        assert await buffer.count() > 0  # reading goes on
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        for number in range(5):
            assert await put(number, "after"), "there is room again"
            figures["afterwards"] += 1
    sys.stdout.write(json.dumps(figures))


if __name__ == "__main__":
    asyncio.run(_fill(*sys.argv[1:]))
