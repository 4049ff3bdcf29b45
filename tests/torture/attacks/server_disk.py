"""A full disk of PostgreSQL raises typed errors, loses nothing, and recovers when space is freed.

The data of the server, or only its write-ahead log, is on a small disk of its own (tmpfs). The
server stops when the log cannot grow, and is restarted after space was freed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import asyncpg

import replaydb as rdb
from processes.derived import check_group, derived_group
from replaydb import Buffer, Store
from replaydb.database import migrations
from support.postgres import data_folder
from torture import checker
from torture.context import AttackContext
from torture.workers import BUFFER

PROMISES = (1, 2)
ENGINES = ("postgresql",)
MEGABYTE = 1 << 20
_SETTINGS = "max_wal_size = 32MB\nmin_wal_size = 32MB\nmax_connections = 20\nautovacuum = off\n"


async def attack(context: AttackContext) -> None:
    """Fill the disk until puts fail, free space, and check that acknowledged groups are stored."""
    is_log = context.chance.random() < 0.5
    with data_folder(_SETTINGS) as server:
        data = Path(server.pgdata)
        async with _small_disk(data / "pg_wal" if is_log else data, 70 if is_log else 110) as disk:
            if disk is None:
                context.figures["could not mount a disk"] += 1
                return
            try:
                await asyncio.to_thread(server.start)
                await _fill(context, server, disk, holds_log=is_log)
            finally:
                await asyncio.to_thread(server.cleanup)


async def _fill(context: AttackContext, server: Any, disk: Path, *, holds_log: bool) -> None:
    url = server.get_uri()
    await migrations.upgrade(url)
    if holds_log:
        await _keep_log(url)
    stored: list[str] = []
    async with Store.open(url) as store:
        buffer = await store.buffer(BUFFER)
        await _put(buffer, "first", stored)
        ballast = disk / "ballast"
        await asyncio.to_thread(_occupy, ballast, shutil.disk_usage(disk).free - 4 * MEGABYTE)
        for number in range(2000):
            try:
                await _put(buffer, f"full{number}", stored, timeout=2)
            except rdb.DatabaseError as error:
                context.figures[type(error).__name__] += 1
                break
        else:
            raise AssertionError("the disk was never full")
        ballast.unlink()
        await _started(server, url)
        for number in range(3):
            await _put(buffer, f"after{number}", stored)
        for found in await buffer.get(uids=stored):
            check_group(found)
    tables = await checker.read_tables(url)
    checker.check_tables(tables)
    context.figures["put"] += len(stored)
    context.figures["full logs" if holds_log else "full disks"] += 1


async def _put(buffer: Buffer, name: str, stored: list[str], *, timeout: float = 60) -> None:
    uids = [f"{name}:{number}:8" for number in range(8)]
    await buffer.put([derived_group(uid) for uid in uids], timeout=timeout)
    stored += uids


async def _keep_log(url: str) -> None:
    """Prevent reuse of log segments, so that the log grows."""
    connection = await asyncpg.connect(url)
    await connection.execute("SELECT pg_create_physical_replication_slot('held', true)")
    await connection.close()


async def _started(server: Any, url: str) -> None:
    """Wait until the server accepts connections; restart it if it has ended."""
    async with asyncio.timeout(60):
        while True:
            try:
                connection = await asyncpg.connect(url)
            except (OSError, asyncpg.PostgresError):
                with suppress(subprocess.SubprocessError):  # it is recovering, or has ended again
                    await asyncio.to_thread(server.ensure_postgres_running)
                await asyncio.sleep(0.05)
            else:
                await connection.close()
                return


def _occupy(file: Path, num_bytes: int) -> None:
    with file.open("wb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, num_bytes)


@asynccontextmanager
async def _small_disk(folder: Path, megabytes: int) -> AsyncIterator[Path | None]:
    """Move a folder to a small disk; yields None if mounting is not allowed."""
    owner = await asyncio.to_thread(folder.stat)
    async with AsyncExitStack() as stack:
        saved = folder.with_name(f"{folder.name}.saved")
        await asyncio.to_thread(shutil.copytree, folder, saved, symlinks=True)
        stack.callback(shutil.rmtree, saved)
        if not await _ran("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)):
            yield None
            return
        stack.push_async_callback(_ran, "umount", "--lazy", str(folder))
        await _ran("cp", "-a", f"{saved}/.", str(folder))
        await _ran("chown", "-R", f"{owner.st_uid}:{owner.st_gid}", str(folder))
        await _ran("chmod", "700", str(folder))
        yield folder


async def _ran(*command: str) -> bool:
    """Whether a command succeeded."""
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    return await process.wait() == 0
