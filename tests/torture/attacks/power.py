"""With durability="full" acknowledged puts survive power loss; otherwise the newest may be lost.

The disk keeps all writes that were flushed before the power loss, and any part of the others
(`support/power_loss.py`). The attack needs strace and is not listed without it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from pathlib import Path

from processes.derived import check_group, derived_group
from replaydb import Capacity, Store
from replaydb.database.runtime.protocol import Durability
from replaydb.operations import verify
from support import power_loss
from support.power_loss import Disk, Operation
from torture.context import AttackContext
from torture.workers import BUFFER, CallLog

PROMISES = (1, 2)
ENGINES = ("sqlite",) if power_loss.is_available() else ()
PUTS = 30
FAILURES_PER_SECOND = 3


async def attack(context: AttackContext) -> None:
    """Trace a writer once, then simulate power losses at many points of the trace."""
    durability: Durability = context.chance.choice(["full", "process"])
    is_outside = durability == "full" and context.chance.random() < 0.5
    folder = context.folder / "disk"
    (folder / "packs").mkdir(parents=True)
    payloads = f"file://{folder}/packs" if is_outside else ""
    environment = ("env", f"PYTHONPATH={os.pathsep.join(sys.path)}")
    process = (sys.executable, "-m", "torture.attacks.power")
    operations = await power_loss.traced(
        (*environment, *process, str(folder), durability, payloads, str(context.log)),
        folder,
        context.log,
        context.folder / "trace",
    )
    first = next(at for at, one in enumerate(operations) if one.kind == "logged")
    for _ in range(round(FAILURES_PER_SECOND * context.seconds)):
        moment = context.chance.randrange(first, len(operations))
        how = await _fail(context, operations[: moment + 1], folder, durability)
        context.figures[f"failures, kept {how}"] += 1
        context.figures["puts before failures"] += _num_logged(operations[: moment + 1])


def _num_logged(operations: list[Operation]) -> int:
    return sum(one.kind == "logged" for one in operations)


async def _fail(
    context: AttackContext, operations: list[Operation], folder: Path, durability: Durability
) -> str:
    """Replay the trace until the power loss, and check a store on the remaining files."""
    disk = Disk()
    for one in operations:
        disk.do(one)
    how = disk.fail(context.chance)
    shutil.rmtree(folder)
    (folder / "packs").mkdir(parents=True)
    disk.save(Path)
    logged = [json.loads(one.data) for one in operations if one.kind == "logged"]
    promised = [uid for *_, uids in logged for uid in uids]
    async with Store.open(f"sqlite:///{folder}/replay.db") as store:
        buffer = await store.buffer(BUFFER)
        groups = await buffer.find(limit=None)
        stored = [one.group_uid for one in sorted(groups, key=lambda one: one.id)]
        order = [_uids(number)[0] for number in range(PUTS)]
        kept = [uid for uid in stored if uid in order]
        assert kept == order[: len(kept)], "a put is missing, but a later one is stored"
        if durability == "full":
            assert set(promised) <= set(stored), f"lost: {set(promised) - set(stored)}"
        for found in await buffer.get([one.id for one in groups]):
            check_group(found)
        report = await verify(store)
        assert report.is_sound, report.problems[:3]
        if list((folder / "packs").iterdir()):
            await store.adopt_payloads()  # its file was restored
        await buffer.put(derived_group("after:0:1"))
    return how


def _uids(number: int) -> list[str]:
    return [f"{number}:{i}:2" for i in range(2)]


async def _write(folder: str, durability: Durability, payloads: str, log_path: str) -> None:
    log = CallLog(log_path)
    url = f"sqlite:///{folder}/replay.db"
    async with Store.open(url, durability=durability, payloads=payloads or None) as store:
        buffer = await store.buffer(BUFFER, capacity=Capacity(groups=10 * PUTS))
        for number in range(PUTS):
            uids, begin = _uids(number), time.monotonic()
            await buffer.put([derived_group(uid) for uid in uids])
            log.record("put", begin, uids)
            if number % 5 == 0:
                await buffer.sample(2, step=number)


if __name__ == "__main__":
    folder, durability, payloads, log = sys.argv[1:]
    asyncio.run(_write(folder, "full" if durability == "full" else "process", payloads, log))
