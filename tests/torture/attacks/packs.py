"""Packs hold what was acknowledged, whatever is deleted and pruned, and nothing else stays.

Processes put, lease and delete groups in every way while others prune; all are killed now and then.
In the end every group is deleted, and concurrent prunes must leave no file.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import uuid4

from processes.derived import derived_group
from replaydb import (
    Buffer,
    DatabaseUnavailableError,
    PayloadsUnavailableError,
    Store,
    operations,
)
from support.workers import Worker, killed
from torture import judge
from torture.arena import Arena
from torture.crew import BUFFER, EXPECTED, Journal, pieces, put, sample

PROMISES = (1, 8)
ENGINES = ("sqlite", "postgresql")
DAYS: Final = 3 * 86_400
#: Seconds that packs stay: none, where nobody reads them, or long.
GRACES: Final = {"quick": 1e-6, "read": 3600.0}
ROLES: Final = {
    "quick": ("put", "put", "clear", "clear", "prune", "prune"),
    "read": ("put", "lease", "sample", "clear", "prune", "prune"),
}


async def attack(arena: Arena) -> None:
    """Kill a process after every few calls; in the end delete everything."""
    chance, end = arena.chance, time.monotonic() + arena.seconds
    kind = chance.choice(sorted(ROLES))
    folder = arena.folder / "payloads"
    folder.mkdir()
    async with Store.open(arena.url, payloads=folder.as_uri(), payload_grace=GRACES[kind]) as store:
        buffer = await store.buffer(BUFFER, archived_payload="drop")
        journal = Journal(str(arena.log))
        for number in range(30):
            await put(buffer, journal, chance, -number)

    def hire(role: str) -> Worker:
        return Worker(live, arena.url, str(arena.log), role, chance.getrandbits(32))

    roles = ROLES[kind]
    crew = [hire(role) for role in roles]
    try:
        while not arena.figures["kills"] or time.monotonic() < end:
            # It takes them a while to begin, longer where the machine is busy.
            await arena.progress(crew, 4, "clear")
            await asyncio.sleep(chance.uniform(0, 0.1))
            victim = chance.randrange(len(crew))
            crew[victim].kill()
            arena.figures["kills"] += 1
            crew[victim] = hire(roles[victim])
    finally:
        await killed(crew)
    await arena.verdict()
    await _clear_up(arena, folder)


async def _clear_up(arena: Arena, folder: Path) -> None:
    """Delete and prune everything; two prunes compact the same packs beside a delete."""
    _age(folder)  # what kills have left
    async with Store.open(arena.url, payload_grace=1e-6) as store, Store.open(arena.url) as other:
        for info in await store.buffers():
            if info.name != BUFFER:
                await operations.delete_buffer(store, info.name)
        buffer = await store.buffer(BUFFER)
        ids = [info.id for info in await buffer.find()]
        arena.chance.shuffle(ids)
        await buffer.delete(ids[len(ids) // 3 :])  # most packs are mostly dead then
        await asyncio.gather(
            store.prune(dry_run=False), other.prune(dry_run=False), buffer.delete(ids[::2])
        )
        judge.check(await judge.read(arena.url))
        await buffer.delete(ids)
        _age(folder)
        for _ in range(2):  # what the first marks for deletion goes with the second
            await store.prune(dry_run=False)
    left = _files(folder)
    assert not left, f"{len(left)} files are left of groups that were deleted"
    # Of an orphan that was removed, a row without bytes stays for some hours.
    packs = [row for row in (await judge.read(arena.url)).packs if row["num_bytes"]]
    assert not packs, f"{len(packs)} packs are left of groups that were deleted"


def _files(folder: Path) -> list[Path]:
    return list(folder.glob("*/*.pack*"))


def _age(folder: Path) -> None:
    """Have every file be so old that no put or prune can still be about to use it."""
    past = time.time() - DAYS
    for path in _files(folder):
        os.utime(path, (past, past))


def live(url: str, log: str, role: str, seed: int) -> None:
    """The life of a process, until it is killed."""
    logging.getLogger("replaydb").setLevel(logging.ERROR)
    asyncio.run(_live(url, Journal(log), role, random.Random(seed)))


async def _live(url: str, journal: Journal, role: str, chance: random.Random) -> None:
    number = 0
    try:
        async with Store.open(url, run=f"packs-{os.getpid()}") as store:
            buffer = await store.buffer(BUFFER)
            while True:
                number += 1
                begin = time.monotonic()
                try:
                    if role == "prune":
                        await _prune(store, chance)
                        journal.tell(role, begin, None)
                    elif role == "clear":
                        await _clear(store, buffer, journal, chance)
                        journal.tell(role, begin, None)
                    else:
                        step = pieces if role == "put" and chance.random() < 0.2 else STEPS[role]
                        await step(buffer, journal, chance, number)
                except PayloadsUnavailableError:
                    raise
                except (*EXPECTED, DatabaseUnavailableError) as error:  # of a busy machine
                    journal.tell(type(error).__name__, begin, None)
    except Exception:
        journal.tell("error", time.monotonic(), traceback.format_exc())


async def lease(buffer: Buffer, journal: Journal, chance: random.Random, number: int) -> None:
    """An ack archives groups without their payloads. Who holds them others attack."""
    begin = time.monotonic()
    async with buffer.lease(3, ttl=600, timeout=0.5, at_least=1) as held:
        await (held.ack() if chance.random() < 0.7 else held.nack())
    journal.tell("lease", begin, None)


STEPS: Final = {"put": put, "lease": lease, "sample": sample}


async def _prune(store: Store, chance: random.Random) -> None:
    await asyncio.sleep(chance.uniform(0, 0.1))
    with suppress(TimeoutError):
        async with asyncio.timeout(chance.choice([None, 0.005, 0.02, 0.05])):
            await store.prune(dry_run=False)


async def _clear(store: Store, buffer: Buffer, journal: Journal, chance: random.Random) -> None:
    """One of the ways in which payloads go."""
    known = await buffer.find(statuses=["completed", "failed", "archived"], limit=60)
    some = chance.sample(known, min(len(known), chance.randint(1, 20)))
    ids, uids = [info.id for info in some], [info.group_uid for info in some]
    again = [derived_group(uid) for uid in uids if ":" in uid]
    match chance.choice(["delete", "archive", "replace", "renew", "buffer"]):
        case "delete":
            journal.tell("deleting", time.monotonic(), uids)
            await buffer.delete(ids)
        case "archive":
            await buffer.update(ids, status="archived")
        case "replace":
            await buffer.put(again, on_duplicate="replace")
        case "renew":
            await buffer.put(again, on_duplicate="renew")
        case _:
            name = f"other-{os.getpid()}"
            other = await store.buffer(name, archived_payload=chance.choice(["keep", "drop"]))
            put_ids = await other.put([derived_group(uuid4().hex) for _ in range(9)])
            await other.update(put_ids[:5], status="archived")
            await operations.prune_groups(store, names=name, dry_run=False)
            await operations.delete_buffer(store, name)
