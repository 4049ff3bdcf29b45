"""A put is acknowledged only if the files of the database have it, whatever is done to these files.

They are deleted, replaced, truncated and overwritten under processes that write.
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
from support.workers import Worker, killed
from torture import judge
from torture.arena import Arena
from torture.crew import BUFFER, Journal

PROMISES = (1,)
ENGINES = ("sqlite",)
#: Puts that a writer tries on a store that has failed, before it opens it again.
TRIES = 3

Damage = Callable[[Path, Path], None]


async def attack(arena: Arena) -> None:
    """Damage one database after another."""
    end, rounds = time.monotonic() + arena.seconds, 0
    while not rounds or time.monotonic() < end:
        rounds += 1
        name = arena.chance.choice(sorted(DAMAGES))
        await _damage(arena, name, arena.folder / f"{rounds}")
        arena.figures[name] += 1


async def _damage(arena: Arena, name: str, folder: Path) -> None:
    await asyncio.to_thread(folder.mkdir)
    path, log = folder / "replay.db", folder / "log"
    others = folder / "others.db"
    await _fill(others, 5)  # which is also an older copy, or a database of another store
    if arena.chance.random() < 0.5:
        shutil.copy(others, path)
    await _fill(path, 3)

    def hire() -> Worker:
        return Worker(_write, f"sqlite:///{path}", str(log), arena.chance.random() < 0.5)

    crew = [hire() for _ in range(arena.chance.choice([1, 2]))]
    try:
        await _until(log, arena.chance.choice([5, 40]))
        async with _between_checkpoints(path):
            DAMAGES[name](path, others)
        damaged = time.monotonic()
        if arena.chance.random() < 0.5:
            crew.append(hire())
        tried = len(judge.entries(log))
        await _until(log, tried + 2 * TRIES)
    finally:
        await killed(crew)
    told = judge.entries(log)
    errors = [entry.detail for entry in told if entry.what == "error"]
    assert not errors, f"{name}: {errors[0]}"
    promised = {
        uid
        for entry in told
        if entry.what == "put" and entry.begin > damaged
        for uid in entry.detail
    }
    arena.figures["refused"] += sum(entry.what == "refused" for entry in told)
    arena.figures["acknowledged afterwards"] += len(promised)
    try:
        tables = await judge.read(f"sqlite:///{path}")
        lost = promised - tables.by_uid.keys()
    except (sqlite3.Error, AssertionError):  # damaged beyond use
        lost = promised
    assert not lost, f"{name}: {len(lost)} of {len(promised)} acknowledged groups are lost"


async def _fill(path: Path, count: int) -> None:
    async with Store.open(f"sqlite:///{path}") as store:
        await (await store.buffer(BUFFER)).put([group() for _ in range(count)])


@asynccontextmanager
async def _between_checkpoints(path: Path) -> AsyncIterator[None]:
    """Hold the write lock, and wait for the last checkpoint.

    What overwrites the database while its pages are being written cannot be told from that.
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
    """Wait until the crew has told of this many calls."""
    async with asyncio.timeout(60):
        while len(judge.entries(log)) < count:  # noqa: ASYNC110 - other processes write it
            await asyncio.sleep(0.02)


def _write(url: str, log: str, large: bool) -> None:
    """Put until killed; open the store again after some failures."""
    asyncio.run(_live(url, Journal(log), large))


async def _live(url: str, journal: Journal, large: bool) -> None:
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
                        journal.tell("put", begin, [uid])
                    except rdb.DatabaseError as error:
                        failures += 1
                        journal.tell("refused", begin, str(error))
        except rdb.ReplayDBError as error:  # while opening or closing
            journal.tell("refused", begin, str(error))
        except Exception:
            journal.tell("error", begin, traceback.format_exc())
        await asyncio.sleep(0.05)


def _file(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _delete(*endings: str) -> Damage:
    def happens(path: Path, _: Path) -> None:
        for ending in endings:
            _file(path, ending).unlink(missing_ok=True)

    return happens


def _replace(ending: str) -> Damage:
    def happens(path: Path, _: Path) -> None:
        shutil.copy(_file(path, ending), path.with_suffix(".new"))
        path.with_suffix(".new").rename(_file(path, ending))

    return happens


def _cut(ending: str, keep: float) -> Damage:
    def happens(path: Path, _: Path) -> None:
        os.truncate(_file(path, ending), int(keep * _file(path, ending).stat().st_size))

    return happens


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
