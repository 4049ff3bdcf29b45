"""A full disk raises a typed error, loses nothing, and writes succeed after space is freed.

The size of the files is limited for the process (RLIMIT_FSIZE, as any user), or the files are on a
small disk of their own (tmpfs, if mounting is allowed).
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
from torture import checker
from torture.context import AttackContext
from torture.workers import BUFFER, CallLog

PROMISES = (1, 2)
ENGINES = ("sqlite",)
FREE_BYTES = 600_000


async def attack(context: AttackContext) -> None:
    """Fill the disk, check that puts are refused, free space, and check that puts succeed."""
    async with Store.open(context.url) as store:
        await store.buffer(BUFFER)
    url = context.url
    async with _small_disk(context) as disk:
        if disk is not None:
            file = await asyncio.to_thread(shutil.copy, url.removeprefix("sqlite:///"), disk)
            url = f"sqlite:///{file}"
            context.figures["small disks"] += 1
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "torture.attacks.disk", url, str(context.log), str(disk or "")),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        out, problem = await process.communicate()
        assert process.returncode == 0, problem.decode()
        context.figures.update(json.loads(out))
        tables = await checker.read_tables(url)
    checker.check_tables(tables)
    context.figures += checker.check_log(checker.read_log(context.log), tables)


@asynccontextmanager
async def _small_disk(context: AttackContext) -> AsyncIterator[Path | None]:
    """Mount a small, half full disk; yields None at random, or if mounting is not allowed."""
    folder = context.folder / "small"
    folder.mkdir()
    if context.chance.random() < 0.5 or not await _ran(
        "mount", "-t", "tmpfs", "-o", f"size={12 * FREE_BYTES}", "tmpfs", str(folder)
    ):
        yield None
        return
    try:
        await asyncio.to_thread((folder / "ballast").write_bytes, bytes(5 * FREE_BYTES))
        yield folder
    finally:
        await _ran("umount", "--lazy", str(folder))


async def _ran(*command: str) -> bool:
    """Whether a command succeeded."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stderr=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
        )
    except OSError:
        return False
    return await process.wait() == 0


def _size(path: Path) -> int:
    """Return the size of the larger file, of the database and its WAL."""
    return max(path.stat().st_size, path.with_name(f"{path.name}-wal").stat().st_size)


class _Limit:
    """Limit of the size of files of this process."""

    def __init__(self, path: Path) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        _, self._hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (_size(path) + FREE_BYTES, self._hard))

    def lift(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._hard, self._hard))


async def _fill(url: str, log_path: str, disk: str) -> None:
    log, figures = CallLog(log_path), {"refused": 0, "afterwards": 0}
    path = Path(url.removeprefix("sqlite:///"))
    async with Store.open(url, run="torture") as store:
        buffer = await store.buffer(BUFFER)

        async def put(number: int, phase: str) -> bool:
            uids = [f"{phase}.{number}:{i}:2" for i in range(2)]
            try:
                await buffer.put([derived_group(uid) for uid in uids])
            except rdb.DatabaseError:
                return False
            log.record("put", 0.0, uids)
            return True

        for number in range(5):
            await put(number, "first")
        free_space = Path(disk, "ballast").unlink if disk else _Limit(path).lift
        for number in range(400):
            figures["refused"] += not await put(number, "full")
            if figures["refused"] >= 5:
                break
        assert figures["refused"], "the disk was never full"
        assert await buffer.count() > 0  # reads still work
        free_space()
        for number in range(5):
            assert await put(number, "after"), "a put failed after space was freed"
            figures["afterwards"] += 1
    sys.stdout.write(json.dumps(figures))


if __name__ == "__main__":
    asyncio.run(_fill(*sys.argv[1:]))
