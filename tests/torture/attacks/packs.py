"""Packs keep all acknowledged payloads during deletes and prunes, and nothing else remains.

Processes put, lease and delete groups in every way while others prune. All are killed at times.
Then a copy of the database, without groups, must remove no file. At the end every group is deleted,
and concurrent prunes must leave no file.
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
    ConsumedGroupError,
    DatabaseUnavailableError,
    PayloadsReadOnlyError,
    PayloadsUnavailableError,
    Store,
    operations,
)
from support.workers import Worker, kill_all
from torture import checker
from torture.context import AttackContext, copied
from torture.workers import BUFFER, EXPECTED, CallLog, add_episodes, put, sample

PROMISES = (1, 8)
ENGINES = ("sqlite", "postgresql")
DAYS: Final = 3 * 86_400
#: Grace periods in seconds: none if no process reads payloads, otherwise long.
GRACES: Final = {"quick": 1e-6, "read": 3600.0}
ROLES: Final = {
    "quick": ("put", "put", "clear", "clear", "prune", "prune"),
    "read": ("put", "lease", "sample", "clear", "prune", "prune"),
}


async def attack(context: AttackContext) -> None:
    """Kill a process after every few calls; at the end delete everything."""
    chance, end = context.chance, time.monotonic() + context.seconds
    kind = chance.choice(sorted(ROLES))
    folder = context.folder / "payloads"
    folder.mkdir()
    async with Store.open(
        context.url, payloads=folder.as_uri(), payload_grace=GRACES[kind]
    ) as store:
        buffer = await store.buffer(BUFFER, archived_payload="drop")
        log = CallLog(str(context.log))
        for number in range(30):
            await put(buffer, log, chance, -number)

    def start(role: str) -> Worker:
        return Worker(main, context.url, str(context.log), role, chance.getrandbits(32))

    roles = ROLES[kind]
    workers = [start(role) for role in roles]
    try:
        while not context.figures["kills"] or time.monotonic() < end:
            # Workers take some time to start, longer on a busy machine.
            await context.progress(workers, 4, "clear")
            await asyncio.sleep(chance.uniform(0, 0.1))
            victim = chance.randrange(len(workers))
            workers[victim].kill()
            context.figures["kills"] += 1
            workers[victim] = start(roles[victim])
    finally:
        await kill_all(workers)
    await context.check()
    await _use_copy(context, folder)
    await _clean_up(context, folder)


async def _use_copy(context: AttackContext, folder: Path) -> None:
    """Delete every group of a copy, and try to put and prune there; then read the original."""
    _age(folder)  # the copy would remove all of them as orphans
    files = {path.name for path in _files(folder)}
    async with copied(context.url, context.folder / "copy.db") as url, Store.open(url) as store:
        buffer = await store.buffer(BUFFER)
        await buffer.delete([info.id for info in await buffer.find()])
        for call in (buffer.put(derived_group("refused:0:1")), store.prune(dry_run=False)):
            try:
                await call
            except PayloadsReadOnlyError:
                context.figures["refused calls of copies"] += 1
            else:
                raise AssertionError("a copy has written to the payloads of the original")
    assert {path.name for path in _files(folder)} == files
    async with Store.open(context.url) as store:
        report = await operations.verify(store)
        assert report.is_sound, report.problems[:3]


async def _clean_up(context: AttackContext, folder: Path) -> None:
    """Delete and prune everything; two prunes and a delete run concurrently."""
    _age(folder)  # files that killed processes have left
    async with (
        Store.open(context.url, payload_grace=1e-6) as store,
        Store.open(context.url) as other,
    ):
        for info in await store.buffers():
            if info.name != BUFFER:
                await operations.delete_buffer(store, info.name)
        buffer = await store.buffer(BUFFER)
        ids = [info.id for info in await buffer.find()]
        context.chance.shuffle(ids)
        await buffer.delete(ids[len(ids) // 3 :])  # then most packs are worth compacting
        await asyncio.gather(
            store.prune(dry_run=False), other.prune(dry_run=False), buffer.delete(ids[::2])
        )
        checker.check_tables(await checker.read_tables(context.url))
        await buffer.delete(ids)
        _age(folder)
        for _ in range(2):  # the first marks packs for deletion, the second deletes them
            await store.prune(dry_run=False)
    left = _files(folder)
    assert not left, f"{len(left)} files are left of groups that were deleted"
    # Rows of removed orphans remain for some hours, with a size of 0.
    packs = [row for row in (await checker.read_tables(context.url)).packs if row["num_bytes"]]
    assert not packs, f"{len(packs)} packs are left of groups that were deleted"


def _files(folder: Path) -> list[Path]:
    return list(folder.glob("*/*.pack*"))


def _age(folder: Path) -> None:
    """Make all files so old that no put or prune can still be using them."""
    past = time.time() - DAYS
    for path in _files(folder):
        os.utime(path, (past, past))


def main(url: str, log: str, role: str, seed: int) -> None:
    """Perform a role until the process is killed."""
    logging.getLogger("replaydb").setLevel(logging.ERROR)
    asyncio.run(_work(url, CallLog(log), role, random.Random(seed)))


async def _work(url: str, log: CallLog, role: str, chance: random.Random) -> None:
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
                        log.record(role, begin, None)
                    elif role == "clear":
                        await _clear(store, buffer, log, chance)
                        log.record(role, begin, None)
                    else:
                        is_incremental = role == "put" and chance.random() < 0.2
                        step = add_episodes if is_incremental else STEPS[role]
                        await step(buffer, log, chance, number)
                except PayloadsUnavailableError:
                    raise
                except (*EXPECTED, DatabaseUnavailableError) as error:  # on a busy machine
                    log.record(type(error).__name__, begin, None)
    except Exception:
        log.record("error", time.monotonic(), traceback.format_exc())


async def lease(buffer: Buffer, log: CallLog, chance: random.Random, number: int) -> None:
    """Lease and ack groups, which drops their payloads. Other attacks check the leases."""
    begin = time.monotonic()
    async with buffer.lease(3, ttl=600, timeout=0.5, at_least=1) as leased:
        await (leased.ack() if chance.random() < 0.7 else leased.nack())
    log.record("archive", begin, None)


STEPS: Final = {"put": put, "lease": lease, "sample": sample}


async def _prune(store: Store, chance: random.Random) -> None:
    await asyncio.sleep(chance.uniform(0, 0.1))
    with suppress(TimeoutError):
        async with asyncio.timeout(chance.choice([None, 0.005, 0.02, 0.05])):
            await store.prune(dry_run=False)


async def _clear(store: Store, buffer: Buffer, log: CallLog, chance: random.Random) -> None:
    """Drop payloads in a random way."""
    known = await buffer.find(statuses=["completed", "failed", "archived"], limit=60)
    some = chance.sample(known, min(len(known), chance.randint(1, 20)))
    ids, uids = [info.id for info in some], [info.group_uid for info in some]
    again = [derived_group(uid) for uid in uids if ":" in uid]
    match chance.choice(["delete", "archive", "replace", "renew", "buffer"]):
        case "delete":
            log.record("deleting", time.monotonic(), uids)
            await buffer.delete(ids)
        case "archive":
            await buffer.update(ids, status="archived")
        case "replace":
            with suppress(ConsumedGroupError):
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
