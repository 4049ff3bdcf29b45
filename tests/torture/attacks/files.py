"""A put is acknowledged only if it is in the files of the database, even if these are damaged.

The files are deleted, replaced, truncated and overwritten while processes write.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import replaydb as rdb
from replaydb import Store
from support.groups import group
from support.workers import Worker, kill_all
from torture import checker
from torture.context import AttackContext
from torture.workers import BUFFER, CallLog

PROMISES = (1,)
ENGINES = ("sqlite",)
#: Number of failed puts after which a writer opens the store again.
TRIES = 3

Damage = Callable[[Path, Path], None]


async def attack(context: AttackContext) -> None:
    """Damage one database after another."""
    end, rounds = time.monotonic() + context.seconds, 0
    while not rounds or time.monotonic() < end:
        rounds += 1
        name = context.chance.choice(sorted(DAMAGES))
        await _damage(context, name, context.folder / f"{rounds}")
        context.figures[name] += 1


async def _damage(context: AttackContext, name: str, folder: Path) -> None:
    await asyncio.to_thread(folder.mkdir)
    path, log = folder / "replay.db", folder / "log"
    others = folder / "others.db"
    await _fill(others, 5)  # later an older copy of the database, or one of another store
    if context.chance.random() < 0.5:
        shutil.copy(others, path)
    await _fill(path, 3)

    def start() -> Worker:
        return Worker(_write, f"sqlite:///{path}", str(log), context.chance.random() < 0.5)

    workers = [start() for _ in range(context.chance.choice([1, 2]))]
    try:
        await _until(log, context.chance.choice([5, 40]))
        async with _between_checkpoints(path):
            DAMAGES[name](path, others)
        damaged = time.monotonic()
        if context.chance.random() < 0.5:
            workers.append(start())
        tried = len(checker.read_log(log))
        await _until(log, tried + 2 * TRIES)
    finally:
        await kill_all(workers)
    entries = checker.read_log(log)
    errors = [entry.detail for entry in entries if entry.call == "error"]
    assert not errors, f"{name}: {errors[0]}"
    promised = {
        uid
        for entry in entries
        if entry.call == "put" and entry.begin > damaged
        for uid in entry.detail
    }
    context.figures["refused"] += sum(entry.call == "refused" for entry in entries)
    context.figures["acknowledged afterwards"] += len(promised)
    try:
        tables = await checker.read_tables(f"sqlite:///{path}")
        lost = promised - tables.by_uid.keys()
    except (sqlite3.Error, AssertionError):  # the file cannot be read
        lost = promised
    assert not lost, f"{name}: {len(lost)} of {len(promised)} acknowledged groups are lost"


async def _fill(path: Path, count: int) -> None:
    async with Store.open(f"sqlite:///{path}") as store:
        await (await store.buffer(BUFFER)).put([group() for _ in range(count)])


@asynccontextmanager
async def _between_checkpoints(path: Path) -> AsyncIterator[None]:
    """Take the write lock and wait until the last checkpoint has ended.

    Overwriting the database during a checkpoint could not be distinguished from the checkpoint.
    """
    with closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as one:
        one.execute("BEGIN IMMEDIATE")
        await asyncio.to_thread(_wait_until_unchanged, path)
        yield
        one.execute("ROLLBACK")


def _wait_until_unchanged(path: Path) -> None:
    before = None
    while before != (before := path.stat().st_mtime_ns):
        time.sleep(0.1)


async def _until(log: Path, count: int) -> None:
    """Wait until the workers have logged this number of calls."""
    async with asyncio.timeout(60):
        while len(checker.read_log(log)) < count:  # noqa: ASYNC110 - other processes write it
            await asyncio.sleep(0.02)


def _write(url: str, log: str, large: bool) -> None:
    """Put until killed; open the store again after several failures."""
    asyncio.run(_work(url, CallLog(log), large))


async def _work(url: str, log: CallLog, large: bool) -> None:
    number = 0
    while True:
        begin = time.monotonic()
        try:
            async with Store.open(url) as store:
                buffer = await store.buffer(BUFFER)
                failures = 0
                while failures < TRIES:
                    number += 1
                    begin, uid = time.monotonic(), f"{os.getpid()}-{number}"
                    tags = {"filling": "x" * 200_000 if large else ""}
                    try:
                        await buffer.put(group(uid, tags=tags))
                        log.record("put", begin, [uid])
                    except rdb.DatabaseError as error:
                        failures += 1
                        log.record("refused", begin, str(error))
        except rdb.ReplayDBError as error:  # while opening or closing the store
            log.record("refused", begin, str(error))
        except Exception:
            log.record("error", begin, traceback.format_exc())
        await asyncio.sleep(0.05)


def _file(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _delete(*endings: str) -> Damage:
    def damage(path: Path, _: Path) -> None:
        for ending in endings:
            _file(path, ending).unlink(missing_ok=True)

    return damage


def _replace(ending: str) -> Damage:
    def damage(path: Path, _: Path) -> None:
        shutil.copy(_file(path, ending), path.with_suffix(".new"))
        path.with_suffix(".new").rename(_file(path, ending))

    return damage


def _cut(ending: str, keep: float) -> Damage:
    def damage(path: Path, _: Path) -> None:
        os.truncate(_file(path, ending), int(keep * _file(path, ending).stat().st_size))

    return damage


def _overwrite(path: Path, others: Path) -> None:
    shutil.copyfile(others, path)


def _spoil(path: Path, _: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(100))


DAMAGES: dict[str, Damage] = {
    "wal deleted": _delete("-wal"),
    "shm deleted": _delete("-shm"),
    "wal and shm deleted": _delete("-wal", "-shm"),
    "all deleted": _delete("", "-wal", "-shm"),
    "file replaced": _replace(""),
    "wal replaced": _replace("-wal"),
    "shm replaced": _replace("-shm"),
    "file emptied": _cut("", 0),
    "wal emptied": _cut("-wal", 0),
    "file overwritten": _overwrite,
    "header overwritten": _spoil,
}
