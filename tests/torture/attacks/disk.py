"""A full disk is a typed error, takes back nothing, and passes when there is room again.

A process may not let its files grow any further (RLIMIT_FSIZE, as any user), or the disk is a
small one of its own (tmpfs, where mounting is allowed).
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
    url = arena.url
    async with _small_disk(arena) as disk:
        if disk is not None:
            file = await asyncio.to_thread(shutil.copy, url.removeprefix("sqlite:///"), disk)
            url = f"sqlite:///{file}"
            arena.figures["small disks"] += 1
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "torture.attacks.disk", url, str(arena.log), str(disk or "")),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        out, problem = await process.communicate()
        assert process.returncode == 0, problem.decode()
        arena.figures.update(json.loads(out))
        tables = await judge.read(url)
    judge.check(tables)
    arena.figures += judge.check_log(judge.entries(arena.log), tables)


@asynccontextmanager
async def _small_disk(arena: Arena) -> AsyncIterator[Path | None]:
    """A folder on a disk of its own, half of it taken by ballast; None: as chance has it, or
    where this user may not mount."""
    folder = arena.folder / "small"
    folder.mkdir()
    if arena.chance.random() < 0.5 or not await _ran(
        "mount", "-t", "tmpfs", "-o", f"size={12 * ROOM}", "tmpfs", str(folder)
    ):
        yield None
        return
    try:
        await asyncio.to_thread((folder / "ballast").write_bytes, bytes(5 * ROOM))
        yield folder
    finally:
        await _ran("umount", "--lazy", str(folder))


async def _ran(*command: str) -> bool:
    """Whether a command did what it was asked for."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stderr=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
        )
    except OSError:
        return False
    return await process.wait() == 0


def _size(path: Path) -> int:
    """Of the larger of the two files."""
    return max(path.stat().st_size, path.with_name(f"{path.name}-wal").stat().st_size)


class _Limit:
    """How large this process's files may be."""

    def __init__(self, path: Path) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        _, self._hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (_size(path) + ROOM, self._hard))

    def lift(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._hard, self._hard))


async def _fill(url: str, log: str, disk: str) -> None:
    journal, figures = Journal(log), {"refused": 0, "afterwards": 0}
    path = Path(url.removeprefix("sqlite:///"))
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
        make_room = Path(disk, "ballast").unlink if disk else _Limit(path).lift
        for number in range(400):
            figures["refused"] += not await put(number, "full")
            if figures["refused"] >= 5:
                break
        assert figures["refused"], "it never was full"
        assert await buffer.count() > 0  # reading goes on
        make_room()
        for number in range(5):
            assert await put(number, "after"), "there is room again"
            figures["afterwards"] += 1
    sys.stdout.write(json.dumps(figures))


if __name__ == "__main__":
    asyncio.run(_fill(*sys.argv[1:]))
